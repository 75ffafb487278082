"""A slow, obvious forward pass of every supported architecture, in NumPy.

Whole sequence at once, no cache, no paging: each step is the formula of the model's paper. The
rotary angles are spelled out one frequency at a time here, independently of the product's tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.models.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
)
from forerun.models.source import ModelSource
from reference.dequant import dequantize

Array = npt.NDArray[Any]
Hook = Callable[[str, Array], Array]


class ForwardResult(NamedTuple):
    """Logits float[T, vocabulary] and hidden states float[T, hidden].

    `hidden[0]` is the scaled embedding, `hidden[n]` the residual stream after n layers, before the
    final norm.
    """

    logits: Array
    hidden: list[Array]


def dequantised(source: ModelSource) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of a model as float32, by GGUF name."""
    result = {}
    for name in source.names():
        tensor = source.tensor(name)
        result[name] = dequantize(tensor.data, tensor.type, tensor.shape)
    return result


def forward(
    config: ModelConfig,
    weights: Mapping[str, npt.NDArray[np.float32]],
    tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
    *,
    positions: Sequence[int] | None = None,
    visible: npt.NDArray[np.bool_] | None = None,
    dtype: npt.DTypeLike = np.float64,
    hook: Hook | None = None,
) -> ForwardResult:
    """Logits after every token.

    `visible[i, j]` says whether token i may attend to token j; by default every token sees itself
    and those before it. Sliding windows come on top, by distance of `positions` (0, 1, ... unless
    given).
    `hook(site, x)` may replace what enters a linear layer (site: the weight's name), a key or value
    before it is attended to ("blk.N.key", "blk.N.value": float[T, kv heads, head dim]).
    """
    ids = np.asarray(tokens, dtype=np.int64)
    T = len(ids)
    at = np.arange(T) if positions is None else np.asarray(positions, dtype=np.int64)
    seen = np.tril(np.ones((T, T), dtype=bool)) if visible is None else visible
    change: Hook = hook or _unchanged

    def get(name: str) -> Array:
        return weights[name].astype(dtype, copy=False)

    def linear(name: str, x: Array) -> Array:
        y: Array = change(f"{name}.weight", x) @ get(f"{name}.weight").T
        if config.attention_bias and f"{name}.bias" in weights:
            y = y + get(f"{name}.bias")
        return y

    def norm(name: str, x: Array) -> Array:
        mean_square = np.mean(x * x, axis=-1, keepdims=True)
        y: Array = x / np.sqrt(mean_square + x.dtype.type(config.rms_eps)) * get(f"{name}.weight")
        return y

    def attention(layer: int, x: Array) -> Array:
        name = f"blk.{layer}"
        q = linear(f"{name}.attn_q", x).reshape(T, config.n_heads, config.head_dim)
        k = linear(f"{name}.attn_k", x).reshape(T, config.n_kv_heads, config.head_dim)
        v = linear(f"{name}.attn_v", x).reshape(T, config.n_kv_heads, config.head_dim)
        if config.qk_norm:
            q, k = norm(f"{name}.attn_q_norm", q), norm(f"{name}.attn_k_norm", k)
        q, k = rotate(config.rope_of(layer), q, at), rotate(config.rope_of(layer), k, at)
        k, v = change(f"{name}.key", k), change(f"{name}.value", v)
        allowed = seen
        window = config.window_of(layer)
        if window is not None:
            allowed = seen & (at[:, None] - at[None, :] < window)
        out = np.empty_like(q)
        group = config.n_heads // config.n_kv_heads
        for head in range(config.n_heads):
            scores = q[:, head] @ k[:, head // group].T * q.dtype.type(config.attention_scale)
            out[:, head] = softmax(np.where(allowed, scores, -np.inf)) @ v[:, head // group]
        return linear(f"{name}.attn_output", out.reshape(T, config.query_size))

    def feed_forward(layer: int, x: Array) -> Array:
        name = f"blk.{layer}"
        gate = activation(config.activation, linear(f"{name}.ffn_gate", x))
        return linear(f"{name}.ffn_down", gate * linear(f"{name}.ffn_up", x))

    x = get("token_embd.weight")[ids]
    x = x * x.dtype.type(config.embedding_scale)
    hidden = [x]
    for layer in range(config.n_layers):
        name = f"blk.{layer}"
        y = attention(layer, norm(f"{name}.attn_norm", x))
        x = x + (norm(f"{name}.post_attention_norm", y) if config.post_norms else y)
        y = feed_forward(layer, norm(f"{name}.ffn_norm", x))
        x = x + (norm(f"{name}.post_ffw_norm", y) if config.post_norms else y)
        hidden.append(x)
    head = "token_embd" if config.tied_embeddings else "output"
    return ForwardResult(linear(head, norm("output_norm", x)), hidden)


def _unchanged(_site: str, x: Array) -> Array:
    return x


def softmax(x: Array) -> Array:
    """Over the last axis; -inf has weight 0."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    result: Array = e / e.sum(axis=-1, keepdims=True)
    return result


def log_softmax(x: Array) -> Array:
    """Over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def activation(kind: str, x: Array) -> Array:
    """SiLU ("silu"), or GELU in its tanh form ("gelu_tanh")."""
    if kind == "silu":
        # exp of a large positive number would overflow; both forms are the same function.
        e = np.exp(-np.abs(x))
        return x * np.where(x >= 0, 1 / (1 + e), e / (1 + e))
    cubed = x + x.dtype.type(0.044715) * x * x * x
    result: Array = x * (1 + np.tanh(x.dtype.type(math.sqrt(2 / math.pi)) * cubed)) / 2
    return result


def frequency(rope: RopeConfig, pair: int) -> float:
    """Radians per position of one pair of dimensions, scaling applied."""
    plain = math.pow(rope.theta, -2 * pair / rope.dims)
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        return plain / scaling.factor
    if isinstance(scaling, FrequencyFactors):
        return plain / scaling.factors[pair]
    if isinstance(scaling, Llama3Scaling):
        wavelength = 2 * math.pi / plain
        if wavelength < scaling.original_context / scaling.high_freq_factor:
            return plain
        if wavelength > scaling.original_context / scaling.low_freq_factor:
            return plain / scaling.factor
        smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        return (1 - smooth) * plain / scaling.factor + smooth * plain
    if isinstance(scaling, YarnScaling):
        ends = [
            rope.dims * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        ]
        if scaling.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        low, high = max(ends[0], 0), min(ends[1], rope.dims - 1)
        ramp = (pair - low) / ((high - low) or 0.001)
        ramp = min(max(ramp, 0.0), 1.0)
        return plain / scaling.factor * ramp + plain * (1 - ramp)
    return plain


def rotate(rope: RopeConfig, x: Array, positions: npt.NDArray[np.integer[Any]]) -> Array:
    """Rotary embedding of x[T, heads, head dim]; dimensions past `rope.dims` stay as they are."""
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    out = x.copy()
    for pair in range(rope.dims // 2):
        first, second = 2 * pair, 2 * pair + 1
        if rope.style == "half":
            first, second = pair, pair + rope.dims // 2
        angle = positions[:, None].astype(np.float64) * frequency(rope, pair)
        cos = (np.cos(angle) * factor).astype(x.dtype)
        sin = (np.sin(angle) * factor).astype(x.dtype)
        out[:, :, first] = x[:, :, first] * cos - x[:, :, second] * sin
        out[:, :, second] = x[:, :, first] * sin + x[:, :, second] * cos
    return out


class Tree(NamedTuple):
    """A draft tree laid out after its prefix: bool[T, T] visibility and positions[T]."""

    visible: npt.NDArray[np.bool_]
    positions: list[int]


def tree_after(prefix: int, parents: Sequence[int]) -> Tree:
    """Visibility and positions of `prefix` committed tokens followed by a draft tree.

    `parents[i] < i` is the parent of draft token i; -1 hangs it on the last committed token.
    """
    T = prefix + len(parents)
    visible = np.zeros((T, T), dtype=bool)
    visible[:prefix, :prefix] = np.tril(np.ones((prefix, prefix), dtype=bool))
    positions = list(range(prefix))
    for node, parent in enumerate(parents):
        row = prefix + node
        above = prefix - 1 if parent < 0 else prefix + parent
        visible[row] = visible[above] if above >= 0 else False
        visible[row, row] = True
        positions.append((positions[above] if above >= 0 else -1) + 1)
    return Tree(visible, positions)
