"""A `ModelConfig` from the config.json of a Hugging Face model folder.

Keys and their defaults are those of Transformers 4 and 5 (configuration_llama.py,
configuration_qwen2.py, configuration_qwen3.py, configuration_gemma3.py, modeling_rope_utils.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forerun.errors import ModelFormatError, UnsupportedModelError
from forerun.models.config import (
    MAX_SIZE,
    Activation,
    Architecture,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    check_layer_count,
    periodic_windows,
)

_MODEL_TYPES: Final[Mapping[str, Architecture]] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
}

_COMMON: Final[Mapping[str, Any]] = {"rope_theta": 1e4, "tie_word_embeddings": False}
_DEFAULTS: Final[Mapping[Architecture, Mapping[str, Any]]] = {
    "llama": {**_COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False},
    "qwen2": {**_COMMON, "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": True},
    "qwen3": {
        **_COMMON,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "head_dim": 128,
    },
    # Published Gemma 3 folders leave out what equals the default.
    "gemma3": {
        "vocab_size": 262208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
    },
}

_ACTIVATIONS: Final[Mapping[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# Any other value of these keys changes what the model computes in a way not implemented here.
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False),
    "is_causal": (None, True),
    "mlp_bias": (None, False),
    "clip_qkv": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "quantization_config": (None,),
}


@dataclass(frozen=True)
class _Keys:
    """Typed look-ups in config.json, falling back to the architecture's defaults."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]
    where: str = "config.json"

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def fail(self, key: str, expected: str) -> ModelFormatError:
        value = self.get(key)
        if value is None:
            return ModelFormatError(f"{self.where} lacks {key!r} ({expected}): the file is incomplete.")
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return ModelFormatError(f"{self.where} {key!r} is {shown}, expected {expected}.")

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
        try:
            return float(value)
        except OverflowError:
            raise self.fail(key, "a number that fits a float") from None

    def flag(self, key: str, default: bool | None = None) -> bool:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.fail(key, "a text")
        return value

    def table(self, key: str) -> Mapping[str, Any] | None:
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, "an object")
        return value


def config_from_hf(document: Mapping[str, Any]) -> ModelConfig:
    """The configuration that a parsed config.json describes.

    The language part of a multimodal Gemma 3 (`text_config`) counts; its vision part is left out.

    Raises ModelFormatError for missing, mistyped or contradictory keys, UnsupportedModelError for
    features that Forerun doesn't implement.
    """
    text, architecture = _text_config(document)
    keys = _Keys(text, _DEFAULTS[architecture])
    for key, neutral in _NEUTRAL.items():
        if keys.get(key) not in neutral:
            raise UnsupportedModelError(f"config.json {key!r} is {keys.get(key)!r}: this feature is not supported.")
    gemma3 = architecture == "gemma3"
    n_layers = keys.integer("num_hidden_layers")
    check_layer_count(n_layers)
    hidden = keys.integer("hidden_size")
    n_heads = keys.integer("num_attention_heads")
    if n_heads < 1:
        raise keys.fail("num_attention_heads", "at least 1")
    head_dim = _head_dim(keys, hidden, n_heads)
    context = keys.integer("max_position_embeddings")
    window, layers = _windows(keys, architecture, n_layers)
    rope, rope_local = _ropes(keys, architecture, head_dim, context)
    if isinstance(rope.scaling, YarnScaling):
        context = max(context, rope.scaling.extended_context)
    scalar = keys.number("query_pre_attn_scalar") if gemma3 else float(head_dim)
    if not 0 < scalar < math.inf:
        raise ModelFormatError(f"config.json attention is scaled by 1/sqrt({scalar}).")
    return ModelConfig(
        architecture=architecture,
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=keys.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        ffn_size=keys.integer("intermediate_size"),
        context_length=context,
        rms_eps=keys.number("rms_norm_eps"),
        rope=rope,
        rope_local=rope_local if window is not None else None,
        sliding_window=window,
        window_layers=layers,
        attention_scale=1.0 / math.sqrt(scalar),
        embedding_scale=math.sqrt(hidden) if gemma3 and hidden > 0 else 1.0,
        activation=_activation(keys, gemma3),
        tied_embeddings=_tied(document, keys),
        attention_bias=_attention_bias(keys, architecture),
        qk_norm=architecture in ("qwen3", "gemma3"),
        post_norms=gemma3,
    )


def _text_config(document: Mapping[str, Any]) -> tuple[Mapping[str, Any], Architecture]:
    outer = _Keys(document, {})
    name = outer.text("model_type")
    inner = outer.table("text_config")
    if name == "gemma3" and inner is not None:
        inner_name = inner.get("model_type", "gemma3_text")
        if inner_name == "gemma3_text":
            return inner, "gemma3"
        name = f"gemma3 with text model {inner_name}"
    if name not in _MODEL_TYPES:
        raise UnsupportedModelError(
            f"model type {name!r} is not supported; supported: gemma3, {', '.join(sorted(_MODEL_TYPES))}."
        )
    return document, _MODEL_TYPES[name]


def _head_dim(keys: _Keys, hidden: int, n_heads: int) -> int:
    if keys.get("head_dim") is not None:
        return keys.integer("head_dim")
    if hidden % n_heads:
        raise ModelFormatError(
            f"config.json 'hidden_size' {hidden} is not a multiple of 'num_attention_heads' "
            f"{n_heads} and 'head_dim' is absent."
        )
    return hidden // n_heads


def _activation(keys: _Keys, gemma3: bool) -> Activation:
    name = keys.text("hidden_activation" if gemma3 else "hidden_act")
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"activation {name!r} is not supported; supported: {', '.join(sorted(_ACTIVATIONS))}."
        )
    return _ACTIVATIONS[name]


def _tied(document: Mapping[str, Any], keys: _Keys) -> bool:
    # A multimodal folder may say it outside of its text_config.
    if "tie_word_embeddings" not in keys.values and "tie_word_embeddings" in document:
        return _Keys(document, {}).flag("tie_word_embeddings")
    return keys.flag("tie_word_embeddings")


def _attention_bias(keys: _Keys, architecture: Architecture) -> bool:
    bias = keys.flag("attention_bias")
    if architecture == "qwen2":
        return True
    if bias:
        raise UnsupportedModelError(
            f"config.json 'attention_bias' is true: a bias on the attention output is not "
            f"supported in {architecture} models."
        )
    return False


def _windows(keys: _Keys, architecture: Architecture, n_layers: int) -> tuple[int | None, tuple[bool, ...]]:
    kinds = keys.get("layer_types")
    layers: tuple[bool, ...] = (False,) * n_layers
    if kinds is not None:
        known = {"full_attention": False, "sliding_attention": True}
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise keys.fail("layer_types", "a list of texts")
        for kind in kinds:
            if kind not in known:
                raise UnsupportedModelError(f"attention of type {kind!r} is not supported.")
        layers = tuple(known[kind] for kind in kinds)
    elif architecture == "gemma3":
        old_key = "_sliding_window_pattern"
        key = old_key if keys.get(old_key) is not None else "sliding_window_pattern"
        layers = periodic_windows(n_layers, keys.integer(key))
    if architecture == "gemma3":
        return keys.integer("sliding_window"), layers
    if any(layers):
        raise UnsupportedModelError(f"a sliding window ('layer_types') is not supported in {architecture} models.")
    return None, layers


def _ropes(
    keys: _Keys, architecture: Architecture, head_dim: int, context: int
) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding of full and, for Gemma 3, of sliding layers."""
    new, old = keys.table("rope_parameters"), keys.table("rope_scaling")
    if new is not None and old is not None and new != old:
        raise ModelFormatError("config.json 'rope_parameters' and 'rope_scaling' differ.")
    table = new or old or {}
    if architecture != "gemma3":
        return _rope(table, keys, head_dim, context, keys.number("rope_theta")), None
    full: Mapping[str, Any] = table
    sliding: Mapping[str, Any] = {}
    if "full_attention" in table or "sliding_attention" in table:
        by_type = _Keys(table, {}, "config.json rope parameters")
        full = by_type.table("full_attention") or {}
        sliding = by_type.table("sliding_attention") or {}
    return (
        _rope(full, keys, head_dim, context, keys.number("rope_theta")),
        _rope(sliding, keys, head_dim, context, keys.number("rope_local_base_freq")),
    )


def _rope(table: Mapping[str, Any], keys: _Keys, head_dim: int, context: int, theta: float) -> RopeConfig:
    inner = _Keys(table, {}, "config.json rope parameters")
    share = inner.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0))
    if not 0 < share <= 1:
        raise inner.fail("partial_rotary_factor", "above 0 and at most 1")
    return RopeConfig(
        theta=inner.number("rope_theta", theta),
        style="half",
        dims=int(head_dim * share),
        scaling=_scaling(inner, context),
    )


def _scaling(table: _Keys, context: int) -> RopeScaling | None:
    kind = table.get("rope_type")
    kind = table.get("type") if kind is None else kind
    if kind is None or kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(table.number("factor"))
    if kind == "llama3":
        return Llama3Scaling(
            factor=table.number("factor"),
            low_freq_factor=table.number("low_freq_factor"),
            high_freq_factor=table.number("high_freq_factor"),
            original_context=table.integer("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return _yarn(table, context)
    raise UnsupportedModelError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3, yarn.")


def _yarn(table: _Keys, context: int) -> YarnScaling:
    original = table.integer("original_max_position_embeddings", context)
    factor = table.number("factor")
    attention = YarnScaling.default_attention_factor(factor)
    if table.get("attention_factor") is not None:
        attention = table.number("attention_factor")
    elif table.get("mscale") is not None or table.get("mscale_all_dim") is not None:
        raise UnsupportedModelError("yarn rope scaling with 'mscale' is not supported.")
    return YarnScaling(
        factor=factor,
        original_context=original,
        attention_factor=attention,
        beta_fast=table.number("beta_fast", 32.0),
        beta_slow=table.number("beta_slow", 1.0),
        truncate=table.flag("truncate", True),
    )
