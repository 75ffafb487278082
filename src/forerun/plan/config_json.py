"""Model shapes from a Hugging Face config.json.

Keys, and what a missing one means, are those of Transformers (configuration_llama.py and its neighbours for the model
types of `FAMILIES`). Only what decides a step's cost is read; rotary embeddings, say, are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, NoReturn

from forerun.errors import PlanError
from forerun.plan.quantization import formats_of
from forerun.plan.shapes import MOST, Experts, LatentAttention, ModelShape
from forerun.plan.shown import shown

MAX_BYTES = 1 << 24
"""A config.json is some kilobytes; what is larger than this is something else."""

Windows = Literal["none", "all", "from", "alternate", "pattern"]


class Family(NamedTuple):
    """What a model type means beyond the keys of its config.json.

    tied: `tie_word_embeddings` where it is missing. bias: of query, key and value projections: always ("qkv"), unless
    `qkv_bias` is false, or as `attention_bias` says ("key"; then the output projection has one, too). qk_norm,
    sandwich_norms, sinks: as in `ModelShape`.
    windows: which layers `sliding_window` is for where `layer_types` is missing: all; those from `max_window_layers` on
    (and none unless `use_sliding_window`); every other one, beginning with the first; all but every
    `sliding_window_pattern`th. experts: prefix of the keys that count experts ("": none). latent: multi-head latent
    attention. defaults: of keys that files leave out; where they lack `num_key_value_heads`, too, there are as many as
    attention heads.
    """

    tied: bool = False
    bias: Literal["key", "qkv", "qkv_bias"] = "key"
    qk_norm: bool = False
    sandwich_norms: bool = False
    sinks: bool = False
    mlp_bias: bool = False
    windows: Windows = "none"
    experts: Literal["", "num_local_experts", "num_experts", "n_routed_experts"] = ""
    latent: bool = False
    defaults: Mapping[str, Any] = MappingProxyType({})


_GEMMA = MappingProxyType({
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
})  # fmt: skip
_MOST_LAYERS = 10_000
_QWEN = MappingProxyType({"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28})
_DEEPSEEK = Family(experts="n_routed_experts", latent=True)

FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": Family(),
    "mistral": Family(windows="all", defaults=MappingProxyType({"num_key_value_heads": 8, "sliding_window": 4096})),
    "mixtral": Family(
        windows="all", experts="num_local_experts", defaults=MappingProxyType({"num_key_value_heads": 8})
    ),
    "phi3": Family(windows="all"),
    "qwen2": Family(bias="qkv", windows="from", defaults=_QWEN),
    "qwen2_moe": Family(
        bias="qkv_bias", experts="num_experts",
        defaults=MappingProxyType({"num_key_value_heads": 16, "shared_expert_intermediate_size": 5632}),
    ),
    "qwen3": Family(qk_norm=True, windows="from", defaults=MappingProxyType({**_QWEN, "head_dim": 128})),
    "qwen3_moe": Family(qk_norm=True, experts="num_experts", defaults=MappingProxyType({"num_key_value_heads": 4})),
    "gemma": Family(
        tied=True,
        defaults=MappingProxyType({"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192}),
    ),
    "gemma2": Family(
        tied=True, sandwich_norms=True, windows="alternate",
        defaults=MappingProxyType({**_GEMMA, "vocab_size": 256000, "max_position_embeddings": 8192}),
    ),
    "gemma3_text": Family(
        tied=True, qk_norm=True, sandwich_norms=True, windows="pattern",
        defaults=MappingProxyType({
            **_GEMMA, "vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window_pattern": 6,
        }),
    ),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK,
    "gpt_oss": Family(
        mlp_bias=True, sinks=True, windows="alternate", experts="num_local_experts",
        defaults=MappingProxyType({
            "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
        }),
    ),
})  # fmt: skip
"""By `model_type`."""

_NULLABLE = ("num_key_value_heads", "sliding_window", "q_lora_rank", "n_routed_experts", "n_shared_experts")
"""Keys whose null is no default: as many as attention heads, no window, no bottleneck, no experts."""

_FOREIGN = ("expert", "moe", "lora_rank", "ssm", "mamba", "conv", "linear_attn", "linear_attention", "recurrent",
            "encoder", "state_size", "block_types", "parallel_attn", "alibi")  # fmt: skip
"""Parts of keys that say that a model isn't the plain decoder that an unknown type is taken for."""


def read_config(path: Path) -> ModelShape:
    """The shape of the model that a config.json describes; `path` is the file or its folder, whose name the model gets.

    Raises:
        PlanError: the file isn't there, isn't JSON, or lacks or contradicts a field, which is named.
    """
    # Unlike those of Path, these say no where a name is too long or a folder may not be looked into.
    folder = os.path.isdir(path)
    file = path / "config.json" if folder else path
    if not os.path.isfile(file):
        what = f"{path} has no config.json" if folder else f"there is no file {shown(str(path))}"
        raise PlanError("model", f"{what}; expected a name of the catalog, a config.json, or a folder with one")
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_BYTES + 1)
        values = json.loads(text) if len(text) <= MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError("model", f"{file} can't be read as JSON: {error}") from error
    if len(text) > MAX_BYTES:
        raise PlanError("model", f"{file} is no config.json: it has more than {MAX_BYTES >> 20} MiB")
    name = file.resolve().parent.name if file.name == "config.json" else file.stem
    return shape_from_config(values, name=name or "model", where=file.name)


def shape_from_config(values: object, *, name: str, where: str = "config.json") -> ModelShape:
    """The shape that a config.json's contents describe. `where` stands before each key in errors.

    Of a model of several kinds of input the part that writes text is taken (`text_config`). A model type that isn't
    known is taken for a plain decoder like Llama, and `source` says so, if it has every key of one, a gated activation
    (SiLU) and nothing that a plain decoder doesn't have.

    Raises:
        PlanError: a key is missing, of a wrong type, out of range, contradicts another one, or asks for something that
            isn't modelled; it names the key.
    """
    if not isinstance(values, Mapping):
        raise PlanError(where, "expected an object of keys and values")
    keys = _Keys(values, where)
    text = keys.table("text_config")
    if text is not None:
        outer = {key: values[key] for key in ("quantization_config", "torch_dtype", "dtype") if key in values}
        inner = {**outer, **text}
        if values.get("tie_word_embeddings") is not None:
            inner.setdefault("tie_word_embeddings", values["tie_word_embeddings"])
        keys = _Keys(inner, f"{where}: text_config.", joint="")
    kind = keys.text("model_type")
    family = FAMILIES.get(kind)
    note = ", of which only the text model is counted" if text is not None else ""
    if family is None:
        _check_plain(keys, kind)
        family = Family(windows="all")
        note += f", its unknown model type {shown(kind)} taken for a plain decoder"
    keys = replace(keys, defaults=family.defaults)
    shape = _shape(keys, family, name, f"{where} of {name}{note}")
    taken = ", ".join(f"{key} {value}" for key, value in keys.taken.items())
    return replace(shape, source=f"{shape.source}, what it lacks as in Transformers: {taken}") if taken else shape


@dataclass(frozen=True)
class _Keys:
    """Typed look-ups; a missing key and null (but for `_NULLABLE`) mean the default. taken: defaults that were."""

    values: Mapping[str, Any]
    where: str
    joint: str = ": "
    defaults: Mapping[str, Any] = field(default_factory=dict)
    taken: dict[str, Any] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        if value is not None or (key in self.values and key in _NULLABLE):
            return value
        if key in self.defaults:
            self.taken[key] = self.defaults[key]
        return self.defaults.get(key)

    def need(self, key: str, expected: str) -> None:
        """Refuses a file without the key; null is there."""
        if key not in self.values:
            self.refuse(key, f"missing; expected {expected}")

    def refuse(self, key: str, message: str) -> NoReturn:
        raise PlanError(f"{self.where}{self.joint}{key}", message)

    def wrong(self, key: str, expected: str) -> NoReturn:
        value = self.get(key)
        if value is None:
            self.refuse(key, f"missing; expected {expected}")
        self.refuse(key, f"{shown(value)} is not allowed; expected {expected}")

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            self.wrong(key, f"a whole number from {least} to {MOST}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            self.wrong(key, "a text")
        return value

    def table(self, key: str) -> Mapping[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, Mapping):
            self.wrong(key, "an object")
        return value

    def items(self, key: str, kind: type) -> list[Any] | None:
        value = self.get(key)
        if value is not None and not (isinstance(value, list) and all(type(item) is kind for item in value)):
            self.wrong(key, f"a list of {'texts' if kind is str else 'whole numbers'}")
        return value


def _check_plain(keys: _Keys, kind: str) -> None:
    kind, known = shown(kind), f"expected one of {', '.join(FAMILIES)}"
    for key, value in keys.values.items():
        if value and any(part in key for part in _FOREIGN):
            keys.refuse("model_type", f"{kind} is not known, and by its {key} it is no plain decoder; {known}")
    activation = keys.get("hidden_act")
    if activation not in ("silu", "swish"):
        keys.refuse("model_type", f"{kind} is not known, nor what it multiplies with {shown(activation)}; {known}")
    for key in ("tie_word_embeddings", "num_key_value_heads", "intermediate_size"):
        if keys.get(key) is None:
            keys.refuse(key, f"missing, and what that means for the model type {kind} is not known")


def _shape(keys: _Keys, family: Family, name: str, source: str) -> ModelShape:
    hidden, layers, heads = (keys.whole(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    latent = _latent(keys) if family.latent else None
    kv_heads = keys.whole("num_key_value_heads", heads)
    if latent is None and keys.get("num_key_value_heads") is None:
        keys.taken["num_key_value_heads"] = kv_heads
    if heads % kv_heads:
        missing = "missing, and " if keys.values.get("num_key_value_heads") is None else ""
        keys.refuse("num_key_value_heads", f"{missing}{heads} attention heads can't share {kv_heads} evenly")
    if latent is not None:
        head_dim = latent.nope + latent.rope
    else:
        if keys.get("head_dim") is None and hidden % heads:
            keys.refuse("head_dim", f"missing, and hidden_size {hidden} is no multiple of {heads} attention heads")
        head_dim = keys.whole("head_dim", hidden // heads)
    biased = keys.flag("attention_bias", False)
    if latent is not None and biased:
        keys.refuse("attention_bias", "biases of latent attention are not modelled; expected false")
    if layers > _MOST_LAYERS:
        keys.refuse("num_hidden_layers", f"{layers} is not allowed; expected 1 to {_MOST_LAYERS}")
    experts = _experts(keys, family, layers)
    window_layers, window = _windows(keys, family, layers)
    # Where there are experts and nothing else, this key is the width of one of them (Mixtral, gpt-oss).
    own = experts is None or family.experts != "num_local_experts"
    formats, left = formats_of(
        keys.table("quantization_config"), keys.get("dtype") or keys.get("torch_dtype"),
        where=f"{keys.where}{keys.joint}", mixture=experts is not None,
    )  # fmt: skip
    return ModelShape(
        name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        vocab=keys.whole("vocab_size"),
        intermediate=keys.whole("intermediate_size") if own else 0,
        tied=keys.flag("tie_word_embeddings", family.tied),
        qkv_bias=biased or family.bias == "qkv" or (family.bias == "qkv_bias" and keys.flag("qkv_bias", True)),
        out_bias=biased,
        mlp_bias=family.mlp_bias or keys.flag("mlp_bias", False),
        qk_norm=family.qk_norm, sandwich_norms=family.sandwich_norms, sinks=family.sinks,
        window=window, window_layers=window_layers, latent=latent, experts=experts,
        mtp_layers=keys.whole("num_nextn_predict_layers", 0, least=0),
        max_context=keys.whole("max_position_embeddings", 0),
        formats=formats, source=source + left,
    )  # fmt: skip


def _latent(keys: _Keys) -> LatentAttention:
    # DeepSeek's own code and Transformers' take different values for some keys of its files that are missing.
    keys.need("q_lora_rank", "a whole number, or null for no bottleneck")
    return LatentAttention(
        q_rank=keys.whole("q_lora_rank", 0),
        kv_rank=keys.whole("kv_lora_rank"),
        nope=keys.whole("qk_nope_head_dim"),
        rope=keys.whole("qk_rope_head_dim"),
        value=keys.whole("v_head_dim"),
    )


def _experts(keys: _Keys, family: Family, layers: int) -> Experts | None:
    # DeepSeek's files of dense models have null here; elsewhere a mixture without experts is a damaged file.
    if family.latent:
        keys.need("n_routed_experts", "a whole number, or null for a dense model")
    if not family.experts or (family.latent and keys.get(family.experts) is None):
        return None
    n, active = keys.whole(family.experts), keys.whole("num_experts_per_tok")
    if active > n:
        keys.refuse("num_experts_per_tok", f"{active} of {n} ({family.experts}); expected 1 to {n}")
    if family.experts == "num_local_experts":
        return Experts(n=n, active=active, intermediate=keys.whole("intermediate_size"))
    width = keys.whole("moe_intermediate_size")
    if family.experts == "num_experts":
        step, dense = keys.whole("decoder_sparse_step", 1), keys.items("mlp_only_layers", int) or []
        n_sparse = sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
        shared = keys.whole("shared_expert_intermediate_size", 0) if family.bias == "qkv_bias" else 0
        n_dense = layers - n_sparse
        return Experts(
            n=n, active=active, intermediate=width, shared=shared, shared_gate=shared > 0, dense_layers=n_dense
        )
    if keys.whole("moe_layer_freq", 1) != 1:
        keys.wrong("moe_layer_freq", "1, the only one that is modelled")
    keys.need("n_shared_experts", "a whole number, or null for none")
    dense_layers = keys.whole("first_k_dense_replace", least=0)
    if dense_layers > layers:
        keys.refuse("first_k_dense_replace", f"{dense_layers} of {layers} layers")
    n_shared = keys.whole("n_shared_experts", 0, least=0)
    return Experts(n=n, active=active, intermediate=width, shared=n_shared * width, dense_layers=dense_layers)


class _Windows(NamedTuple):
    layers: int
    window: int | None


def _windows(keys: _Keys, family: Family, layers: int) -> _Windows:
    kinds = keys.items("layer_types", str)
    if kinds is not None:
        if len(kinds) != layers:
            keys.refuse("layer_types", f"{len(kinds)} entries for {layers} layers (num_hidden_layers)")
        other = set(kinds) - {"full_attention", "sliding_attention"}
        if other:
            keys.refuse("layer_types", f"{shown(min(other))} is not modelled; expected full_ or sliding_attention")
        count = kinds.count("sliding_attention")
        return _Windows(count, keys.whole("sliding_window")) if count else _Windows(0, None)
    switched_off = not keys.flag("use_sliding_window", family.windows not in ("none", "from"))
    if switched_off or keys.get("sliding_window") is None:
        return _Windows(0, None)
    match family.windows:
        case "none":
            keys.refuse("use_sliding_window", "true, but which layers have the window is not known; add layer_types")
        case "all":
            count = layers
        case "from":
            count = max(layers - keys.whole("max_window_layers", least=0), 0)
        case "alternate":
            count = (layers + 1) // 2
        case "pattern":
            count = layers - layers // keys.whole("sliding_window_pattern")
    return _Windows(count, keys.whole("sliding_window")) if count else _Windows(0, None)
