"""Where a model runs and how it is split."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import PlanError
from forerun.plan.formats import number_bytes
from forerun.plan.hardware import Efficiency, Hardware


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Accelerators that together run one copy of a model.

    tensor: every matrix and the key-value heads are split over so many (Megatron-LM, arXiv 1909.08053). pipeline:
    stages of layers, one after the other. expert: over how many of a stage's accelerators whole experts are dealt out
    (1: each expert is split like everything else); `tensor` must be a multiple. activations: type of the operands,
    which decides the rate of arithmetic. kv: type of the cache. efficiency: None takes the hardware's, or the defaults.
    """

    hardware: Hardware
    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    activations: str = "bf16"
    kv: str = "bf16"
    efficiency: Efficiency | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "expert"):
            if getattr(self, name) < 1:
                raise PlanError(name, f"{getattr(self, name)} is not allowed; expected at least 1")
        if self.tensor % self.expert:
            raise PlanError("expert", f"{self.expert} must divide tensor ({self.tensor})")
        number_bytes("activations", self.activations)
        number_bytes("kv", self.kv)
        self.hardware.rate(self.activations)
        if self.gpus > 1 and not self.hardware.link:
            raise PlanError("tensor", f"{self.hardware.name} has no link to others; expected tensor and pipeline 1")

    @property
    def gpus(self) -> int:
        """Accelerators of one copy."""
        return self.tensor * self.pipeline

    @property
    def eff(self) -> Efficiency:
        """What is reached of the peaks here."""
        return self.efficiency or self.hardware.efficiency or Efficiency()

    @property
    def act_bytes(self) -> int:
        """Bytes of an activation."""
        return number_bytes("activations", self.activations)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a number in the cache."""
        return number_bytes("kv", self.kv)
