"""Weight formats from the `quantization_config` and data type of a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from forerun.errors import PlanError
from forerun.plan.formats import WEIGHT_BITS, WeightFormats
from forerun.plan.shown import shown

_BASE: Mapping[str, str] = MappingProxyType({"bfloat16": "bf16", "float16": "f16", "float32": "f32"})

METHODS = ("fp8", "fbgemm_fp8", "awq", "gptq", "bitsandbytes", "mxfp4", "compressed-tensors", "modelopt")
"""Values of `quant_method` that are known."""

_SCALE_BITS = 16
_SMALL = ("lm_head", "embed", "norm", "router", "mlp.gate", "vision", "visual", "multi_modal")
"""Parts of names of modules that `WeightFormats` has apart, or that are too small to matter."""


class Found(NamedTuple):
    """formats: of the weights. left: what the formats don't express, to be added to a source; mostly empty."""

    formats: WeightFormats
    left: str


def formats_of(config: Mapping[str, Any] | None, dtype: object, *, where: str, mixture: bool) -> Found:
    """The formats of a model's weights.

    config: `quantization_config`, None for none. dtype: `dtype` or `torch_dtype` of the model, which what isn't
    quantized has. where: stands before keys in errors. mixture: whether the model has experts.

    Raises:
        PlanError: a key is missing, of a wrong type or not known; it names the key.
    """
    base = "bf16" if dtype is None else _BASE.get(dtype if isinstance(dtype, str) else "")
    if base is None:
        raise PlanError(f"{where}dtype", f"{shown(dtype)} is not known; expected one of {', '.join(_BASE)}")
    plain = WeightFormats(linear=base, experts=base, head=base, embedding=base)
    if config is None:
        return Found(plain, "")
    where = f"{where}quantization_config."
    method = config.get("quant_method")
    if method not in METHODS:
        what = "missing" if method is None else f"{shown(method)} is not known"
        raise PlanError(f"{where}quant_method", f"{what}; expected one of {', '.join(METHODS)}")
    weights = _weights(str(method), config, where)
    kept = _kept(config, where)
    if method == "mxfp4" or (mixture and any("attn" in name for name in kept)):
        if not mixture:
            raise PlanError(f"{where}quant_method", "'mxfp4' is for experts, and the model has none")
        return Found(replace(plain, experts=weights), "")
    formats = replace(plain, linear=weights, experts=weights)
    if config.get("lm_head") is True:
        formats = replace(formats, head=weights)
    others = [name for name in kept if not any(part in name for part in _SMALL)]
    if not others:
        return Found(formats, "")
    left = f"; {len(others)} modules that its quantization leaves out, {others[0]} first, counted in {weights}"
    return Found(formats, left)


def _weights(method: str, config: Mapping[str, Any], where: str) -> str:
    match method:
        case "fp8" | "fbgemm_fp8":
            return "fp8"
        case "mxfp4":
            return "mxfp4"
        case "awq" | "gptq":
            bits = _whole(config, "bits" if "bits" in config else "w_bit", where, 1, 8)
            key = "group_size" if "group_size" in config else "q_group_size"
            return _grouped(bits, _whole(config, key, where, -1, 1 << 20), bits)
        case "bitsandbytes":
            if config.get("load_in_8bit") is True:
                return "int8"
            if config.get("load_in_4bit") is not True:
                raise PlanError(f"{where}load_in_4bit", "expected load_in_4bit or load_in_8bit to be true")
            # A 32-bit scale for 64 weights; quantized again, 8 bits and a 32-bit scale for 256 of them (QLoRA).
            return _named(4 + (8 / 64 + 32 / (64 * 256) if config.get("bnb_4bit_use_double_quant") else 32 / 64))
        case "modelopt":
            algorithm = config.get("quant_algo")
            if algorithm not in ("FP8", "NVFP4"):
                raise PlanError(f"{where}quant_algo", f"{shown(algorithm)} is not known; expected FP8 or NVFP4")
            return str(algorithm).lower()
        case _:
            return _compressed(config, where)


def _compressed(config: Mapping[str, Any], where: str) -> str:
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise PlanError(f"{where}config_groups", "expected one group; mixtures of several formats are not modelled")
    name, group = next(iter(groups.items()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    where = f"{where}config_groups.{name}.weights"
    if not isinstance(weights, Mapping):
        raise PlanError(where, "expected an object")
    where += "."
    bits, kind = _whole(weights, "num_bits", where, 1, 16), weights.get("type", "int")
    if kind not in ("int", "float"):
        raise PlanError(f"{where}type", f"{shown(kind)} is not known; expected int or float")
    size = -1 if weights.get("group_size") is None else _whole(weights, "group_size", where, -1, 1 << 20)
    if kind == "float" and bits == 4:
        return "mxfp4" if size == 32 else "nvfp4"
    if bits == 8 and group.get("input_activations") is not None:
        return "fp8" if kind == "float" else "int8"
    return _grouped(bits, size, 0 if weights.get("symmetric", True) else bits)


def _grouped(bits: int, size: int, zero_bits: int) -> str:
    """Weights of which `size` share a scale and a zero point; not above 0: a whole column does, too many to count."""
    return _named(bits + (_SCALE_BITS + zero_bits) / size if size > 0 else float(bits))


def _named(bits: float) -> str:
    """The format of so many bits that only stores: operands are unpacked, so it is none of the 8-bit ones."""
    return "int4" if bits == WEIGHT_BITS["int4"] else f"{bits:.6g}bits"


def _kept(config: Mapping[str, Any], where: str) -> list[str]:
    """Names of modules that aren't quantized."""
    for key in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"):
        names = config.get(key)
        if names is None:
            continue
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise PlanError(f"{where}{key}", "expected a list of texts")
        return names
    return []


def _whole(values: Mapping[str, Any], key: str, where: str, least: int, most: int) -> int:
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most or value == 0:
        what = "missing" if value is None else f"{shown(value)} is not allowed"
        raise PlanError(f"{where}{key}", f"{what}; expected a whole number from {least} to {most}")
    return value
