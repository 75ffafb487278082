"""The face of the native kernels that compute forwards: shapes, dtypes and settings are checked here, once.

Those of sampling, verification and suffix matching check their arrays themselves and are called by their rooms."""

from forerun.ops.kv import BLOCK, KvCache
from forerun.ops.settings import cpu_name, instruction_set, physical_cores, read_bandwidth
from forerun.ops.tape import Buffer, StepInput, Tape, Vector, Weight
from forerun.ops.weights import dequantize, pack, packed_bytes

__all__ = [
    "BLOCK",
    "Buffer",
    "KvCache",
    "StepInput",
    "Tape",
    "Vector",
    "Weight",
    "cpu_name",
    "dequantize",
    "instruction_set",
    "pack",
    "packed_bytes",
    "physical_cores",
    "read_bandwidth",
]
