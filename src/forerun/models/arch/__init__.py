"""Architectures written out in operations, one file each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forerun.models.arch import gemma3, llama, qwen2, qwen3
from forerun.models.arch.base import Recorder
from forerun.models.config import Architecture
from forerun.ops import Buffer

ARCHITECTURES: Mapping[Architecture, Callable[[Recorder], Buffer]] = MappingProxyType(
    {"llama": llama.record, "qwen2": qwen2.record, "qwen3": qwen3.record, "gemma3": gemma3.record}
)

__all__ = ["ARCHITECTURES", "Recorder"]
