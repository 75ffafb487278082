"""A `ModelConfig` from GGUF metadata.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; an absent key means
what llama.cpp, which writes and reads these files, takes it to mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from forerun.errors import ModelFormatError, UnsupportedModelError
from forerun.models.config import (
    MAX_SIZE,
    Architecture,
    FrequencyFactors,
    LinearScaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    RopeStyle,
    YarnScaling,
    check_layer_count,
    periodic_windows,
)

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

# Converters reorder the rows of Q and K of llama models so that rotated pairs lie side by side.
_STYLES: Final[Mapping[str, tuple[Architecture, RopeStyle]]] = {
    "llama": ("llama", "interleaved"),
    "qwen2": ("qwen2", "half"),
    "qwen3": ("qwen3", "half"),
    "gemma3": ("gemma3", "half"),
}

# Any other value of these keys changes what the model computes in a way not implemented here.
_NEUTRAL: Final[Mapping[str, tuple[float, ...]]] = {
    "expert_count": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.causal": (1,),
    "attention.temperature_scale": (0,),
    "rope.scaling.yarn_ext_factor": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
}

_GEMMA3_PERIOD: Final = 6
_GEMMA3_27B_LAYERS: Final = 62


@dataclass(frozen=True)
class _Keys:
    """Typed look-ups of `ARCHITECTURE.key`, each failure naming the key."""

    metadata: Mapping[str, Any]
    prefix: str

    def name(self, key: str) -> str:
        return f"{self.prefix}.{key}"

    def get(self, key: str) -> Any:
        return self.metadata.get(self.name(key))

    def fail(self, key: str, expected: str) -> ModelFormatError:
        value = self.get(key)
        if value is None:
            return ModelFormatError(f"GGUF metadata lacks {self.name(key)!r} ({expected}): the file is incomplete.")
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ModelFormatError(f"GGUF metadata {self.name(key)!r} is {shown}, expected {expected}.")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_SIZE:
            raise self.fail(key, "a 32-bit integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, "a number")
        return float(value)

    def same_for_all_layers(self, key: str, n_layers: int, default: int | None = None) -> int:
        """An integer that may also be written once per layer."""
        value = self.get(key)
        if not isinstance(value, np.ndarray | list):
            return self.integer(key, default)
        entries = list(value)
        if len(entries) != n_layers or not all(isinstance(e, int | np.integer) for e in entries):
            raise self.fail(key, f"an integer or one for each of {n_layers} layers")
        if len(set(entries)) != 1:
            raise UnsupportedModelError(
                f"GGUF metadata {self.name(key)!r} differs between layers, which is not supported."
            )
        return int(entries[0])


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Shapes, rope_factors: Sequence[float] | None = None
) -> ModelConfig:
    """The configuration that a GGUF file's metadata and tensor table describe.

    `shapes` gives every tensor's shape in NumPy order; `rope_factors` are the values of
    rope_freqs.weight where the file has it. Tensor shapes are not checked here beyond what decides
    the configuration: `expected_tensors` says what they must be.

    Raises ModelFormatError for missing, mistyped or contradictory keys, UnsupportedModelError for
    features that Forerun doesn't implement.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str):
        raise ModelFormatError("GGUF metadata lacks the text 'general.architecture': this is not a model file.")
    if name not in _STYLES:
        raise UnsupportedModelError(f"architecture {name!r} is not supported; supported: {', '.join(sorted(_STYLES))}.")
    architecture, style = _STYLES[name]
    keys = _Keys(metadata, name)
    _refuse_unsupported(keys)

    n_layers = keys.integer("block_count")
    check_layer_count(n_layers)
    hidden = keys.integer("embedding_length")
    n_heads = keys.same_for_all_layers("attention.head_count", n_layers)
    if n_heads < 1:
        raise keys.fail("attention.head_count", "at least 1")
    head_dim = _head_dim(keys, hidden, n_heads)
    context = keys.integer("context_length")
    gemma3 = architecture == "gemma3"

    rope = RopeConfig(
        theta=keys.number("rope.freq_base", 1e6 if gemma3 else 1e4),
        style=style,
        dims=keys.integer("rope.dimension_count", head_dim),
        scaling=_scaling(keys, context, rope_factors),
    )
    window, layers = _windows(keys, architecture, n_layers, context)
    local = RopeConfig(keys.number("rope.freq_base_swa", 1e4), style, rope.dims)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_vocab_size(keys, shapes),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=keys.same_for_all_layers("attention.head_count_kv", n_layers, n_heads),
        head_dim=head_dim,
        ffn_size=keys.same_for_all_layers("feed_forward_length", n_layers),
        context_length=_context_length(context, rope.scaling),
        rms_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope=rope,
        rope_local=local if gemma3 and window is not None else None,
        sliding_window=window,
        window_layers=layers,
        attention_scale=_attention_scale(keys, architecture, n_layers, hidden, n_heads, head_dim),
        embedding_scale=math.sqrt(hidden) if gemma3 and hidden > 0 else 1.0,
        activation="gelu_tanh" if gemma3 else "silu",
        tied_embeddings="output.weight" not in shapes,
        attention_bias=_attention_bias(architecture, shapes),
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma3,
    )


def _refuse_unsupported(keys: _Keys) -> None:
    for key, neutral in _NEUTRAL.items():
        value = keys.get(key)
        if value is not None and not (isinstance(value, int | float) and value in neutral):
            raise UnsupportedModelError(
                f"GGUF metadata {keys.name(key)!r} is {value!r}: this feature is not supported."
            )


def _attention_bias(architecture: Architecture, shapes: Shapes) -> bool:
    # Some llama files have the three biases, and no key says so.
    some = any(f"blk.0.attn_{part}.bias" in shapes for part in "qkv")
    return architecture == "qwen2" or (architecture == "llama" and some)


def _head_dim(keys: _Keys, hidden: int, n_heads: int) -> int:
    if keys.get("attention.key_length") is None and hidden % n_heads:
        raise ModelFormatError(
            f"GGUF metadata {keys.name('embedding_length')!r} {hidden} is not a multiple of "
            f"{keys.name('attention.head_count')!r} {n_heads} and "
            f"{keys.name('attention.key_length')!r} is absent."
        )
    head_dim = keys.integer("attention.key_length", hidden // n_heads)
    value_dim = keys.integer("attention.value_length", head_dim)
    if value_dim != head_dim:
        raise UnsupportedModelError(
            f"values of {value_dim} dimensions beside keys of {head_dim} "
            f"({keys.name('attention.value_length')!r}) are not supported."
        )
    return head_dim


def _vocab_size(keys: _Keys, shapes: Shapes) -> int:
    shape = shapes.get("token_embd.weight")
    if shape is None or len(shape) != 2:
        raise ModelFormatError(
            "the GGUF file lacks the tensor 'token_embd.weight' with two dimensions: it is incomplete."
        )
    rows = shape[0]
    claims = {keys.name("vocab_size"): keys.get("vocab_size")}
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list):
        claims["tokenizer.ggml.tokens"] = len(tokens)
    for key, claim in claims.items():
        if claim is not None and claim != rows:
            raise ModelFormatError(
                f"GGUF metadata {key!r} means {claim!r} tokens, but 'token_embd.weight' has {rows} rows."
            )
    return rows


def _scaling(keys: _Keys, context: int, rope_factors: Sequence[float] | None) -> RopeScaling | None:
    kind = keys.get("rope.scaling.type")
    legacy = "rope.scale_linear" if keys.get("rope.scaling.factor") is None else None
    factor_key = legacy or "rope.scaling.factor"
    # llama.cpp takes a factor without a type for linear scaling, and 0 for none.
    factor = keys.number(factor_key, 0.0) or 1.0
    scaling: RopeScaling | None
    if kind == "none":
        scaling = None
    elif kind is None or kind == "linear":
        if kind == "linear" and keys.get(factor_key) is None:
            raise keys.fail("rope.scaling.factor", "a number")
        scaling = LinearScaling(factor) if factor != 1.0 else None
    elif kind == "yarn":
        scale = YarnScaling.default_attention_factor(keys.number("rope.scaling.factor"))
        scaling = YarnScaling(
            factor=factor,
            original_context=keys.integer("rope.scaling.original_context_length", context),
            attention_factor=scale * keys.number("rope.scaling.attn_factor", 1.0),
            beta_fast=keys.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=keys.number("rope.scaling.yarn_beta_slow", 1.0),
        )
    else:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} ({keys.name('rope.scaling.type')!r}) is not supported; "
            "supported: none, linear, yarn, and the tensor rope_freqs.weight."
        )
    if rope_factors is None:
        return scaling
    if scaling is not None:
        raise UnsupportedModelError(
            f"rope_freqs.weight together with {keys.name('rope.scaling.type')!r} is not supported."
        )
    return FrequencyFactors(tuple(float(factor) for factor in rope_factors))


def _context_length(context: int, scaling: RopeScaling | None) -> int:
    if isinstance(scaling, YarnScaling):
        return max(context, scaling.extended_context)
    return context


def _windows(
    keys: _Keys, architecture: Architecture, n_layers: int, context: int
) -> tuple[int | None, tuple[bool, ...]]:
    """The window's size and which layers use it."""
    everywhere = (False,) * n_layers
    window = keys.integer("attention.sliding_window", 0)
    if architecture != "gemma3":
        if 0 < window < context:
            raise UnsupportedModelError(
                f"a sliding window ({keys.name('attention.sliding_window')!r} = {window}) is not "
                f"supported in {architecture} models."
            )
        return None, everywhere
    if window == 0:
        return None, everywhere
    pattern = keys.get("attention.sliding_window_pattern")
    if pattern is None:
        layers = periodic_windows(n_layers, _GEMMA3_PERIOD)
    elif isinstance(pattern, np.ndarray | list):
        layers = tuple(bool(entry) for entry in pattern)
    else:
        period = keys.integer("attention.sliding_window_pattern")
        layers = periodic_windows(n_layers, period) if period else (True,) * n_layers
    return window, layers


def _attention_scale(
    keys: _Keys, architecture: Architecture, n_layers: int, hidden: int, n_heads: int, head_dim: int
) -> float:
    width = head_dim
    # The one Gemma 3 whose queries are scaled by hidden/heads; the files don't say so.
    if architecture == "gemma3" and n_layers == _GEMMA3_27B_LAYERS:
        width = hidden // n_heads
    scale = 1.0 / math.sqrt(width) if width > 0 else 0.0
    given = keys.number("attention.scale", 0.0)
    if given and not math.isclose(given, scale, rel_tol=1e-6):
        raise UnsupportedModelError(
            f"GGUF metadata {keys.name('attention.scale')!r} is {given}, where {architecture} uses "
            f"{scale}: another scale is not supported."
        )
    return scale
