"""The one face of the native kernels: shapes, dtypes and settings are checked here, once."""

from forerun.ops.kv import KvCache
from forerun.ops.settings import instruction_set, physical_cores, read_bandwidth
from forerun.ops.tape import Buffer, StepInput, Tape, Vector, Weight
from forerun.ops.weights import dequantize, pack, packed_bytes

__all__ = [
    "Buffer",
    "KvCache",
    "StepInput",
    "Tape",
    "Vector",
    "Weight",
    "dequantize",
    "instruction_set",
    "pack",
    "packed_bytes",
    "physical_cores",
    "read_bandwidth",
]
