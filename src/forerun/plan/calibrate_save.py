"""Calibrated hardware as TOML that the planner's catalog reads again."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from forerun.errors import PlanError
from forerun.plan.hardware import Hardware


def hardware_toml(hardware: Hardware, *, name: str = "local") -> str:
    """The table [hardware.NAME], in the units of `catalog.hardware_of`; rates are written in full."""
    table: dict[str, object] = {
        "bandwidth_gb_s": hardware.bandwidth / 1e9,
        "memory_gb": hardware.memory / 1e9,
        "tflops": {dtype: rate / 1e12 for dtype, rate in hardware.flops.items()},
        "link_gb_s": hardware.link / 1e9,
        "link_us": hardware.link_us,
        "host_gb_s": hardware.host / 1e9,
    }
    for key in ("efficiency", "measured"):
        part = getattr(hardware, key)
        if part is not None:
            table[key] = {item.name: getattr(part, item.name) for item in fields(part)}
    table["sources"] = dict(hardware.sources)
    lines = [f"[hardware.{_text(name)}]"]
    lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def save_hardware(hardware: Hardware, path: Path) -> None:
    """Writes the hardware as `local` to `path`, whole or not at all; what stood there is replaced.

    Raises:
        PlanError: it can't be written.
    """
    text = "# Written by forerun plan calibrate --save; hardware of that name replaces it at the next.\n"
    text += hardware_toml(hardware)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        try:
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        raise PlanError("save", f"{path} can't be written: {error.strerror or error}") from error


def machine_memory() -> float | None:
    """Bytes of this machine's memory; None where the system doesn't say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None


def _value(value: object) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(str(key))} = {_value(item)}" for key, item in value.items()) + " }"
    if isinstance(value, Sequence):
        return "[" + ", ".join(_value(item) for item in value) + "]"
    if isinstance(value, float) and math.isinf(value):
        return "inf"
    return repr(value)


def _key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else _text(key)


def _text(text: str) -> str:
    """A basic string: TOML escapes quotes, backslashes and control characters."""
    return (
        '"' + "".join(_ESCAPES.get(letter, letter) if letter.isprintable() else _code(letter) for letter in text) + '"'
    )


_ESCAPES: Mapping[str, str] = {'"': '\\"', "\\": "\\\\"}


def _code(letter: str) -> str:
    # A lone surrogate is no character of a text; TOML has no way to write it.
    point = ord(letter)
    return "?" if 0xD800 <= point < 0xE000 else f"\\U{point:08x}"
