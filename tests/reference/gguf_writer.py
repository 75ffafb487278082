"""A GGUF writer for tests: tiny models, and files that are wrong in one chosen way.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian, versions 2 and 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from forerun.ops.types import TensorData


class ValueType(IntEnum):
    """Ids of metadata value types."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


class Typed(NamedTuple):
    """A scalar written with a chosen type instead of the inferred one."""

    type: ValueType
    value: Any


_FORMATS = {
    ValueType.UINT8: "<B",
    ValueType.INT8: "<b",
    ValueType.UINT16: "<H",
    ValueType.INT16: "<h",
    ValueType.UINT32: "<I",
    ValueType.INT32: "<i",
    ValueType.FLOAT32: "<f",
    ValueType.BOOL: "<?",
    ValueType.UINT64: "<Q",
    ValueType.INT64: "<q",
    ValueType.FLOAT64: "<d",
}

_DTYPES = {
    "uint8": ValueType.UINT8,
    "int8": ValueType.INT8,
    "uint16": ValueType.UINT16,
    "int16": ValueType.INT16,
    "uint32": ValueType.UINT32,
    "int32": ValueType.INT32,
    "float32": ValueType.FLOAT32,
    "bool": ValueType.BOOL,
    "uint64": ValueType.UINT64,
    "int64": ValueType.INT64,
    "float64": ValueType.FLOAT64,
}


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def string(text: str | bytes) -> bytes:
    """A length-prefixed string; bytes are written as they are and may be invalid UTF-8."""
    raw = text.encode() if isinstance(text, str) else text
    return u64(len(raw)) + raw


def value_type(value: Any) -> ValueType:
    """The type inferred for a value: float is float32, int is uint32 where it fits, else wider."""
    if isinstance(value, Typed):
        return value.type
    if isinstance(value, bool):
        return ValueType.BOOL
    if isinstance(value, str | bytes):
        return ValueType.STRING
    if isinstance(value, float):
        return ValueType.FLOAT32
    if isinstance(value, list | tuple | np.ndarray):
        return ValueType.ARRAY
    if isinstance(value, int):
        if 0 <= value < 2**32:
            return ValueType.UINT32
        if value < 0:
            return ValueType.INT32 if value >= -(2**31) else ValueType.INT64
        return ValueType.UINT64
    raise TypeError(f"no GGUF type for {value!r}")


def _payload(value: Any) -> bytes:
    if isinstance(value, Typed):
        if value.type in _FORMATS:
            return struct.pack(_FORMATS[value.type], value.value)
        return _payload(value.value)
    kind = value_type(value)
    if kind is ValueType.STRING:
        return string(value)
    if kind is not ValueType.ARRAY:
        return struct.pack(_FORMATS[kind], value)
    if isinstance(value, np.ndarray):
        little = value.astype(value.dtype.newbyteorder("<"))
        return u32(_DTYPES[value.dtype.name]) + u64(value.size) + little.tobytes()
    kinds = [value_type(item) for item in value]
    element = ValueType.INT32 if not kinds else kinds[0]
    if set(kinds) == {ValueType.UINT32} or set(kinds) == {ValueType.UINT32, ValueType.INT32}:
        element = ValueType.INT32
    items = [item if element in (8, 9) else Typed(element, item) for item in value]
    return u32(element) + u64(len(items)) + b"".join(_payload(item) for item in items)


def entry(key: str | bytes, value: Any) -> bytes:
    """One metadata key and value as bytes."""
    return string(key) + u32(value_type(value)) + _payload(value)


def tensor_entry(name: str | bytes, dims: Iterable[int], type_id: int, offset: int) -> bytes:
    """One row of the tensor table; `dims` in GGUF order (fastest first)."""
    sizes = list(dims)
    head = string(name) + u32(len(sizes)) + b"".join(u64(d) for d in sizes)
    return head + u32(type_id) + u64(offset)


def header(version: int, n_tensors: int, n_entries: int) -> bytes:
    """Magic, version and the two counts."""
    return b"GGUF" + u32(version) + u64(n_tensors) + u64(n_entries)


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Iterable[TensorData] = (),
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A complete file. Writes general.alignment where `alignment` is not the default 32."""
    entries = dict(metadata)
    if alignment != 32:
        entries.setdefault("general.alignment", alignment)
    stored = list(tensors)
    out = [header(version, len(stored), len(entries))]
    out += [entry(key, value) for key, value in entries.items()]
    offset = 0
    offsets = []
    for t in stored:
        offsets.append(offset)
        offset += -(-t.data.size // alignment) * alignment
    out += [tensor_entry(t.name, reversed(t.shape), int(t.type), o) for t, o in zip(stored, offsets, strict=True)]
    head = b"".join(out)
    body = [head, bytes(-len(head) % alignment)]
    for t in stored:
        body += [t.data.tobytes(), bytes(-t.data.size % alignment)]
    return b"".join(body)


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[TensorData] = (),
    *,
    version: int = 3,
    alignment: int = 32,
) -> Path:
    """Write `gguf_bytes(...)` to `path` and return it."""
    path.write_bytes(gguf_bytes(metadata, tensors, version=version, alignment=alignment))
    return path
