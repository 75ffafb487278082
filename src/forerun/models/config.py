"""What a model is, as numbers: sizes, rotary embedding, attention windows, expected tensors.

Nothing here knows a file format; `gguf_config` and `hf_config` fill a `ModelConfig` from the two
kinds of model files, and every field means the same whichever file it came from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.errors import ModelFormatError

Architecture: TypeAlias = Literal["llama", "qwen2", "qwen3", "gemma3"]
RopeStyle: TypeAlias = Literal["interleaved", "half"]
Activation: TypeAlias = Literal["silu", "gelu_tanh"]

MAX_LAYERS = 4096
"""More layers than this is a corrupt file; checked before anything is built per layer."""

MAX_SIZE = 2**31 - 1
"""Sizes and positions are int32 in the kernels."""


@dataclass(frozen=True)
class LinearScaling:
    """All frequencies divided by `factor` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def __post_init__(self) -> None:
        _require_positive("rope scaling factor", self.factor)


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth blend between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __post_init__(self) -> None:
        _require_positive("rope scaling factor", self.factor)
        _require_positive("rope scaling low_freq_factor", self.low_freq_factor)
        _require_positive("rope scaling original context", self.original_context)
        if not self.low_freq_factor < self.high_freq_factor < math.inf:
            raise ModelFormatError(
                f"rope scaling llama3: high_freq_factor {self.high_freq_factor} must be finite and "
                f"larger than low_freq_factor {self.low_freq_factor}."
            )


@dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation (YaRN, arXiv 2309.00071, section 3).

    `attention_factor` multiplies cosines and sines, so that scores grow by its square; it is the
    final value, usually `default_attention_factor(factor)`. `truncate` rounds the blend's ends to
    whole frequencies.
    """

    factor: float
    original_context: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        _require_positive("rope scaling factor", self.factor)
        _require_positive("rope scaling original context", self.original_context)
        _require_positive("rope scaling attention factor", self.attention_factor)
        _require_positive("rope scaling beta_fast", self.beta_fast)
        _require_positive("rope scaling beta_slow", self.beta_slow)

    @property
    def extended_context(self) -> int:
        """Positions that the scaled embedding is meant for."""
        return int(self.original_context * self.factor)

    @staticmethod
    def default_attention_factor(factor: float) -> float:
        """0.1 ln(factor) + 1, and 1 where the context isn't extended."""
        return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class FrequencyFactors:
    """Each frequency divided by its own factor (the GGUF tensor rope_freqs.weight)."""

    factors: tuple[float, ...]

    def __post_init__(self) -> None:
        for factor in self.factors:
            _require_positive("rope_freqs.weight value", factor)


RopeScaling: TypeAlias = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of the first `dims` of each head's dimensions.

    `style` says which dimensions form the pair of frequency i: "interleaved" (2i, 2i + 1) or
    "half" (i, i + dims/2).
    """

    theta: float
    style: RopeStyle
    dims: int
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _require_positive("rope theta", self.theta)
        if self.theta <= 1:
            raise ModelFormatError(f"rope theta is {self.theta}, expected above 1.")
        if self.dims <= 0 or self.dims % 2:
            raise ModelFormatError(f"rope dimension count {self.dims} must be even and positive.")
        if isinstance(self.scaling, FrequencyFactors):
            found = len(self.scaling.factors)
            if found != self.dims // 2:
                raise ModelFormatError(
                    f"rope_freqs.weight has {found} values, expected {self.dims // 2} "
                    f"(half of the {self.dims} rotated dimensions)."
                )


class RopeFrequencies(NamedTuple):
    """Angle per position (radians, float64[dims/2]) and the factor on cosine and sine."""

    inverse: npt.NDArray[np.float64]
    attention_factor: float


class RopeTable(NamedTuple):
    """Cosines and sines, each float32[positions, dims/2]."""

    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]


def rope_frequencies(rope: RopeConfig) -> RopeFrequencies:
    """The scaled angular frequency of every pair of dimensions, in float64."""
    exponents = np.arange(0, rope.dims, 2, dtype=np.float64) / rope.dims
    plain = rope.theta**-exponents
    scaling = rope.scaling
    match scaling:
        case None:
            return RopeFrequencies(plain, 1.0)
        case LinearScaling():
            return RopeFrequencies(plain / scaling.factor, 1.0)
        case FrequencyFactors():
            return RopeFrequencies(plain / np.array(scaling.factors, dtype=np.float64), 1.0)
        case Llama3Scaling():
            return RopeFrequencies(_llama3(plain, scaling), 1.0)
        case YarnScaling():
            return RopeFrequencies(_yarn(plain, rope, scaling), scaling.attention_factor)


def rope_table(rope: RopeConfig, positions: int) -> RopeTable:
    """Cosines and sines of positions 0 .. `positions`-1: float32[positions, dims/2] each.

    Angles are computed in float64 and rounded once. Row p is the same whatever `positions` is.
    """
    frequencies = rope_frequencies(rope)
    angles = np.outer(np.arange(positions, dtype=np.float64), frequencies.inverse)
    cos = np.cos(angles) * frequencies.attention_factor
    sin = np.sin(angles) * frequencies.attention_factor
    return RopeTable(cos.astype(np.float32), sin.astype(np.float32))


def _llama3(plain: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    turns = scaling.original_context * plain / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / span, 0.0, 1.0)
    blended: npt.NDArray[np.float64] = (1 - keep) * plain / scaling.factor + keep * plain
    return blended


def _yarn(plain: npt.NDArray[np.float64], rope: RopeConfig, scaling: YarnScaling) -> npt.NDArray[np.float64]:
    def dimension_of(turns: float) -> float:
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return rope.dims * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dims - 1)
    if low == high:
        high += 0.001
    interpolate = np.clip((np.arange(len(plain)) - low) / (high - low), 0.0, 1.0)
    blended: npt.NDArray[np.float64] = interpolate * plain / scaling.factor + (1 - interpolate) * plain
    return blended


@dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that the forward pass needs besides its weights.

    A query at position p in a layer with `window_layers[layer]` sees the positions
    p - sliding_window + 1 .. p, in other layers all up to p. `rope_local` is the rotary embedding
    of window layers where it differs. Scores are q.k * `attention_scale`; token embeddings are
    multiplied by `embedding_scale`. Norm weights are used as they are: a family that stores w for
    1 + w is converted by its reader. `context_length` counts positions.

    Raises ModelFormatError for sizes that can't be or that contradict each other.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    context_length: int
    rms_eps: float
    rope: RopeConfig
    rope_local: RopeConfig | None
    sliding_window: int | None
    window_layers: tuple[bool, ...]
    attention_scale: float
    embedding_scale: float
    activation: Activation
    tied_embeddings: bool
    attention_bias: bool
    qk_norm: bool
    post_norms: bool

    def __post_init__(self) -> None:
        sizes = {
            "vocabulary size": self.vocab_size,
            "hidden size": self.hidden_size,
            "head count": self.n_heads,
            "key/value head count": self.n_kv_heads,
            "head dimension": self.head_dim,
            "feed-forward size": self.ffn_size,
            "context length": self.context_length,
        }
        for name, size in sizes.items():
            if not 0 < size <= MAX_SIZE:
                raise ModelFormatError(f"{name} is {size}, expected 1 to {MAX_SIZE}.")
        check_layer_count(self.n_layers)
        if self.n_heads % self.n_kv_heads:
            raise ModelFormatError(
                f"head count {self.n_heads} is not a multiple of the key/value head count {self.n_kv_heads}."
            )
        for rope in (self.rope, self.rope_local):
            if rope is not None and rope.dims > self.head_dim:
                raise ModelFormatError(
                    f"rope dimension count {rope.dims} is larger than the head dimension {self.head_dim}."
                )
        _require_positive("RMS norm epsilon", self.rms_eps)
        _require_positive("attention scale", self.attention_scale)
        _require_positive("embedding scale", self.embedding_scale)
        self._check_windows()

    def _check_windows(self) -> None:
        if len(self.window_layers) != self.n_layers:
            raise ModelFormatError(
                f"the sliding-window pattern names {len(self.window_layers)} layers, the model has {self.n_layers}."
            )
        if any(self.window_layers) and self.sliding_window is None:
            raise ModelFormatError("layers use a sliding window but its size is not given.")
        if self.sliding_window is not None and self.sliding_window <= 0:
            raise ModelFormatError(f"sliding window is {self.sliding_window}, expected at least 1.")

    @property
    def query_size(self) -> int:
        """Width of all heads' queries: n_heads * head_dim."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all heads' keys, or values: n_kv_heads * head_dim."""
        return self.n_kv_heads * self.head_dim

    def rope_of(self, layer: int) -> RopeConfig:
        """The rotary embedding that a layer uses."""
        if self.rope_local is not None and self.window_layers[layer]:
            return self.rope_local
        return self.rope

    def window_of(self, layer: int) -> int | None:
        """How many positions a query of this layer sees, itself included; None: all before it."""
        return self.sliding_window if self.window_layers[layer] else None


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor that the forward pass reads, by GGUF name: (outputs, inputs)."""
    hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (config.vocab_size, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["output.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (query, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, query),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (config.ffn_size, hidden),
        "ffn_up.weight": (config.ffn_size, hidden),
        "ffn_down.weight": (hidden, config.ffn_size),
    }
    if config.attention_bias:
        layer |= {"attn_q.bias": (query,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if config.qk_norm:
        layer |= {
            "attn_q_norm.weight": (config.head_dim,),
            "attn_k_norm.weight": (config.head_dim,),
        }
    if config.post_norms:
        layer |= {"post_attention_norm.weight": (hidden,), "post_ffw_norm.weight": (hidden,)}
    for index in range(config.n_layers):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_layer_count(n_layers: int) -> None:
    """Refuse a layer count that can't be real, before anything is built per layer."""
    if not 0 < n_layers <= MAX_LAYERS:
        raise ModelFormatError(f"layer count is {n_layers}, expected 1 to {MAX_LAYERS}.")


def periodic_windows(n_layers: int, period: int) -> tuple[bool, ...]:
    """Every `period`-th layer sees everything, the others a window; period 1: none has a window."""
    if period < 1:
        raise ModelFormatError(f"sliding-window pattern is {period}, expected at least 1.")
    return tuple((layer + 1) % period != 0 for layer in range(n_layers))


def _require_positive(name: str, value: float) -> None:
    # Wide enough for every real model, narrow enough that no float64 formula overflows.
    if not 1e-30 < value < 1e30:
        raise ModelFormatError(f"{name} is {value}, expected a number from 1e-30 to 1e30.")
