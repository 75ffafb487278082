"""The instruction sets that this machine can run, best first."""

from __future__ import annotations

from forerun import _native
from forerun.ops.settings import INSTRUCTION_SETS


def available() -> list[str]:
    names = []
    for name in INSTRUCTION_SETS:
        try:
            names.append(_native.instruction_set(name))
        except ValueError:
            continue
    return names


SETS = available()
