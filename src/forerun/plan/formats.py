"""How many bytes a number takes, and which units multiply it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from forerun.errors import PlanError
from forerun.plan.shown import shown

WEIGHT_BITS: Mapping[str, float] = MappingProxyType({
    "f32": 32, "bf16": 16, "f16": 16, "fp8": 8, "int8": 8,
    "int4": 4.15625,  # groups of 128 share a 16-bit scale and a 4-bit zero point (AWQ, GPTQ)
    "mxfp4": 4.25,  # blocks of 32 share an 8-bit scale (OCP Microscaling 1.0)
    "nvfp4": 4.5,  # blocks of 16 share an 8-bit scale
    "q4_0": 4.5, "q4_1": 5, "q5_0": 5.5, "q5_1": 6, "q8_0": 8.5, "q4_k": 4.5, "q5_k": 5.5, "q6_k": 6.5625,
})  # fmt: skip
"""Bits a weight, scales included."""

_BITS = re.compile(r"(\d{1,2}(?:\.\d{1,6})?)bits", re.ASCII)

NUMBER_BYTES: Mapping[str, int] = MappingProxyType({"f32": 4, "bf16": 2, "f16": 2, "fp8": 1, "int8": 1})
"""Bytes of an activation or of a number in the KV cache."""


@dataclass(frozen=True)
class WeightFormats:
    """In which format each kind of weight is stored, as `weight_bits` has it.

    linear: attention, dense feed-forward, routers. experts: routed and shared experts. head: the output matrix.
    embedding: the input matrix (the same one as the head, if they are tied).
    """

    linear: str = "bf16"
    experts: str = "bf16"
    head: str = "bf16"
    embedding: str = "bf16"

    def __post_init__(self) -> None:
        for kind in ("linear", "experts", "head", "embedding"):
            weight_bits(f"weights ({kind})", getattr(self, kind))

    def bytes_of(self, kind: str) -> float:
        """Bytes a weight of one kind."""
        return weight_bits(f"weights ({kind})", getattr(self, kind)) / 8

    def quantized(self, weights: str | None, head: str | None = None) -> WeightFormats:
        """The same model with its layers in `weights`, its head and embedding in `head`; None leaves them as they are,
        as most published quantizations do with the latter."""
        layers = self if weights is None else replace(self, linear=weights, experts=weights)
        return layers if head is None else replace(layers, head=head, embedding=head)


def weight_bits(field: str, name: str) -> float:
    """Bits a weight of a format: one of `WEIGHT_BITS`, or a number such as "4.93bits" for a mixture of formats.

    Raises:
        PlanError: `name` is neither; it names `field`.
    """
    bits = WEIGHT_BITS.get(name)
    if bits is not None:
        return bits
    mixture = _BITS.fullmatch(name)
    if mixture is None or not 0 < float(mixture[1]) <= 64:
        raise PlanError(
            field,
            f"{shown(name)} is no known format; expected one of {', '.join(WEIGHT_BITS)}, or a mean such as 4.93bits",
        )
    return float(mixture[1])


def number_bytes(field: str, name: str) -> int:
    """Bytes of a number of that type. Raises PlanError naming `field`."""
    size = NUMBER_BYTES.get(name)
    if size is None:
        raise PlanError(field, f"{shown(name)} is no known type; expected one of {', '.join(NUMBER_BYTES)}")
    return size
