"""What the process computes with: instruction set, threads, and the memory bandwidth to compare against."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.errors import ConfigurationError

INSTRUCTION_SETS = ("avx512", "avxvnni", "avx2", "portable")


def instruction_set() -> str:
    """The instruction set that kernels use: the best that this CPU has, or the one that FORERUN_ISA names.

    All give the same bits. Raises `ConfigurationError` for a name that is unknown or that this CPU can't run.
    """
    forced = os.environ.get("FORERUN_ISA", "")
    try:
        return _native.instruction_set(forced)
    except ValueError as error:
        raise ConfigurationError(
            f"FORERUN_ISA={forced!r}: {error}; use one of {', '.join(INSTRUCTION_SETS)} that this CPU supports, "
            "or unset it"
        ) from None


def physical_cores() -> int:
    """Physical cores that this process may use (its affinity and its container's CPU quota respected)."""
    return _native.physical_cores()


def cpu_name() -> str:
    """The processor's name as the system knows it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return " ".join(value.split())
    return platform.processor() or platform.machine()


def resolve_threads(threads: int | None) -> int:
    """`threads`, or FORERUN_THREADS, or one per physical core. Raises `ConfigurationError` outside 1..256."""
    source = "threads"
    if threads is None:
        text = os.environ.get("FORERUN_THREADS", "")
        if not text:
            return physical_cores()
        source = "FORERUN_THREADS"
        if not text.isdecimal():
            raise ConfigurationError(f"FORERUN_THREADS={text!r} is not a number; use 1..256")
        threads = int(text)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 256:
        raise ConfigurationError(f"{source}={threads!r}: the number of threads must be 1..256")
    return threads


def read_bandwidth(threads: int, mebibytes: int = 512, repeats: int = 5) -> float:
    """Bytes per second of the best of `repeats` passes that only read `mebibytes` of memory with all threads."""
    data: npt.NDArray[np.uint8] = np.ones(mebibytes << 20, dtype=np.uint8)
    return _native.read_bandwidth(data, threads, repeats)
