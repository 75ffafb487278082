"""Where a model runs and how it is split."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import PlanError
from forerun.plan.formats import number_bytes
from forerun.plan.hardware import Efficiency, Hardware
from forerun.plan.shapes import ModelShape

_MOST_SPLITS = 1024


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Accelerators that together run one copy of a model.

    tensor: every matrix and the key-value heads are split over so many (Megatron-LM, arXiv 1909.08053). pipeline:
    stages of layers, one after the other. expert: over how many of a stage's accelerators whole experts are dealt out
    (1: each expert is split like everything else); `tensor` must be a multiple. activations: type of the layers'
    operands, which decides the rate of arithmetic. kv: type of the cache. efficiency: None takes the hardware's, or the
    defaults.
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

    def check_split(self, shape: ModelShape) -> None:
        """Raises PlanError unless the model can be split so.

        Heads are dealt out whole, as vLLM, SGLang and TensorRT-LLM do: `tensor` must divide the attention heads, and
        divide the key-value heads or be a multiple of them (the one latent of MLA is kept by all). A stage has a layer
        at least.
        """
        if not _splits(shape, self.tensor):
            counts = f"{shape.heads} attention heads" + (
                f" and {shape.kv_heads} of keys and values" * (not shape.latent)
            )
            known = ", ".join(str(n) for n in range(1, min(shape.heads, _MOST_SPLITS) + 1) if _splits(shape, n))
            raise PlanError(
                "tensor", f"{self.tensor} doesn't split the {counts} of {shape.name}; expected one of {known}"
            )
        if self.expert > 1 and shape.experts is None:
            raise PlanError("expert", f"{self.expert}, but {shape.name} has no experts; leave it out")
        if self.pipeline > shape.layers:
            raise PlanError(
                "pipeline", f"{self.pipeline} stages; expected at most the {shape.layers} layers of {shape.name}"
            )

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
        """Bytes of a number that flows between matrices or accelerators: engines turn it into 8 bits right before a
        product, so it has 16, or 32 where the operands do."""
        return max(2, number_bytes("activations", self.activations))

    @property
    def peak(self) -> float:
        """FLOP/s of the layers' matrices."""
        return self.hardware.rate(self.activations)

    @property
    def wide_peak(self) -> float:
        """FLOP/s of attention and head, which stay in 16 bits where the layers' operands have 8."""
        narrow = self.activations in ("fp8", "int8") and "bf16" in self.hardware.flops
        return self.hardware.rate("bf16") if narrow else self.peak

    @property
    def collective_seconds(self) -> float:
        """What a collective takes besides its bytes."""
        return self.hardware.link_us * self.eff.latency * 1e-6

    @property
    def kv_bytes(self) -> int:
        """Bytes of a number in the cache."""
        return number_bytes("kv", self.kv)


def _splits(shape: ModelShape, tensor: int) -> bool:
    shared = shape.latent is not None or shape.kv_heads % tensor == 0 or tensor % shape.kv_heads == 0
    return shape.heads % tensor == 0 and shared
