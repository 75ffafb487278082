"""Reads GGUF model files, versions 2 and 3, little-endian.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A file is a header, metadata
entries, a tensor table, padding, and tensor data. The file is memory-mapped; metadata and the table
are read and checked when it is opened, tensor data only when somebody touches it.

A file is untrusted input. Every count and length is held against a limit and against the bytes that
are left before anything is allocated for it, so memory and time stay proportional to the bytes that
metadata and table really have, whatever the file claims.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final, NamedTuple, NoReturn, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from forerun.errors import (
    CacheError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from forerun.ops.types import GGMLType, TensorData, row_bytes, unsupported_type_name

MetadataValue: TypeAlias = "str | int | float | bool | list[str] | list[MetadataValue] | npt.NDArray[np.generic]"

MAGIC: Final = b"GGUF"
MAX_ENTRIES: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_KEY_BYTES: Final = (1 << 16) - 1
MAX_NAME_BYTES: Final = 1024
MAX_STRING_BYTES: Final = 1 << 26
MAX_ARRAY_ITEMS: Final = 1 << 22
MAX_ARRAY_DEPTH: Final = 4
MAX_DIMS: Final = 4
MIN_ALIGNMENT: Final = 8
MAX_ALIGNMENT: Final = 1 << 16
DEFAULT_ALIGNMENT: Final = 32

_HEADER_BYTES: Final = 24
_MIN_ENTRY_BYTES: Final = 8 + 4 + 1
_MIN_TENSOR_BYTES: Final = 8 + 4 + 8 + 4 + 8
_MIN_ARRAY_BYTES: Final = 4 + 8

_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final[dict[int, np.dtype[Any]]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")

_DAMAGED: Final = "The file is damaged or incomplete: download it again."


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table.

    `shape` is in NumPy order (a linear layer is (N outputs, K inputs)); `offset` counts bytes from
    the start of the file, `nbytes` is the size of the data there. Both lie within the file.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GGUFFile:
    """An open GGUF file; use it as a context manager or call `close`.

    `metadata` maps keys to str, int, float, bool, list (arrays of strings or arrays) or a read-only
    ndarray (arrays of numbers and booleans). `tensors` maps names to `TensorInfo` in file order.
    Both are read-only and stay valid after `close`. Safe to share between threads.
    """

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]
    version: int
    alignment: int

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        """Use `GGUFFile.open`. Takes over `mapped`, the whole file."""
        reader = _Reader(path, mapped)
        contents = reader.read()
        self.path = path
        self.version = contents.version
        self.alignment = contents.alignment
        self.metadata = MappingProxyType(contents.metadata)
        self.tensors = MappingProxyType(contents.tensors)
        self._map: mmap.mmap | None = mapped

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Map and check a file.

        Raises ModelNotFoundError (no such file), CacheError (it can't be read), ModelFormatError
        (not a GGUF file, truncated, corrupt; the message has the byte offset) or
        UnsupportedModelError (a tensor type that is not implemented, a model split over files).
        """
        where = Path(path)
        mapped = _map_file(where)
        try:
            return cls(where, mapped)
        except BaseException:
            mapped.close()
            raise

    def tensor(self, name: str) -> TensorData:
        """The tensor's bytes as a read-only view of the map, not copied, never beyond the file.

        The view keeps the map alive, also after `close`. Raises ModelFormatError where the model
        has no such tensor or the file has become shorter since it was opened, and ValueError after
        `close`.
        """
        if self._map is None:
            raise ValueError(f"{self.path}: the file is closed; open it again to read tensors")
        info = self.tensors.get(name)
        if info is None:
            raise ModelFormatError(
                f"{self.path}: there is no tensor {_show(name)} among the {len(self.tensors)}. The "
                "file is incomplete or was made for another architecture: download it again."
            )
        # Touching a page past the end of a file that has shrunk kills the process (SIGBUS).
        size = self._map.size()
        if info.offset + info.nbytes > size:
            raise ModelFormatError(
                f"{self.path}: tensor {_show(name)} ends at byte {info.offset + info.nbytes}, but "
                f"the file now has {size} bytes; it was changed while open. Download it again."
            )
        data = np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)
        return TensorData(name, info.type, info.shape, data)

    def close(self) -> None:
        """Let go of the map. It is unmapped as soon as no array that `tensor` returned is left."""
        mapped, self._map = self._map, None
        if mapped is not None:
            try:
                mapped.close()
            except BufferError:
                # Arrays still look into it; the last of them unmaps it.
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _show(name: str) -> str:
    """A key or name as it goes into a message: quoted, escaped, not too long."""
    return repr(name if len(name) <= 80 else f"{name[:80]}...")


def _is_supported(type_id: int) -> bool:
    return type_id in GGMLType._value2member_map_


def _map_file(path: Path) -> mmap.mmap:
    """The whole file, read-only."""
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except ValueError as e:
        raise ModelNotFoundError(f"{str(path)!r} can't be a file name: {e}") from e
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG):
            raise ModelNotFoundError(
                f"{path}: there is no such file ({e.strerror}); expected the path of a .gguf file"
            ) from e
        raise CacheError(e.errno, f"the model file can't be opened ({e.strerror}); make it readable", str(path)) from e
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, pipe or socket"
            raise ModelFormatError(f"{path}: expected a .gguf file, but this is {kind}")
        if status.st_size < _HEADER_BYTES:
            raise ModelFormatError(
                f"{path}: the file ends at byte {status.st_size}, inside the header of "
                f"{_HEADER_BYTES} bytes. {_DAMAGED}"
            )
        return mmap.mmap(fd, 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise CacheError(e.errno, f"the model file can't be memory-mapped ({e.strerror})", str(path)) from e
    finally:
        os.close(fd)


@dataclass(frozen=True)
class _Contents:
    version: int
    alignment: int
    metadata: dict[str, MetadataValue]
    tensors: dict[str, TensorInfo]


class _Row(NamedTuple):
    """A row of the tensor table as written; `start` is the byte where it begins."""

    start: int
    type_id: int
    shape: tuple[int, ...]
    offset: int


class _Reader:
    """Walks over the file once, from front to back; `_at` is the next unread byte."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self._path = path
        self._map = mapped
        self._size = len(mapped)
        self._at = 0
        self._items_left = 2 * MAX_ARRAY_ITEMS

    def read(self) -> _Contents:
        version, n_tensors, n_entries = self._header()
        metadata = self._metadata(n_entries)
        alignment = self._alignment(metadata)
        self._refuse_split(metadata)
        tensors = self._tensors(n_tensors, alignment)
        return _Contents(version, alignment, metadata, tensors)

    def _fail(self, what: str, at: int | None = None, do: str = _DAMAGED) -> NoReturn:
        offset = self._at if at is None else at
        raise ModelFormatError(f"{self._path}: {what} (byte {offset} of {self._size}). {do}")

    def _need(self, nbytes: int, what: str) -> int:
        """Consume `nbytes` and return where they start."""
        start = self._at
        if nbytes > self._size - start:
            self._fail(f"the file ends inside {what}, which takes {nbytes} bytes")
        self._at = start + nbytes
        return start

    def _u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self._map, self._need(4, what))[0]
        return value

    def _u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self._map, self._need(8, what))[0]
        return value

    def _string(self, what: str, limit: int) -> str:
        start = self._at
        length = self._u64(f"the length of {what}")
        if length > limit:
            self._fail(f"{what} claims {length} bytes, more than the limit of {limit}", start)
        begin = self._need(length, what)
        try:
            return self._map[begin : self._at].decode()
        except UnicodeDecodeError as e:
            self._fail(f"{what} is not valid UTF-8", begin + e.start)

    def _header(self) -> tuple[int, int, int]:
        magic = self._map[:4]
        if magic != MAGIC:
            self._fail(
                f"the file starts with {self._map[:16]!r} instead of {MAGIC!r}",
                0,
                "It is no GGUF model (perhaps a web page or Git LFS pointer): download the file.",
            )
        self._at = 4
        version = self._u32("the version")
        if version not in (2, 3):
            if version and version & 0xFFFF == 0:
                self._fail(
                    "the file is big-endian, but only little-endian files can be read",
                    4,
                    "Get a little-endian file or convert it with gguf_convert_endian.py.",
                )
            self._fail(
                f"GGUF version {version} can't be read; versions 2 and 3 can",
                4,
                "Convert the model again with a current converter, or download another file.",
            )
        n_tensors = self._u64("the tensor count")
        n_entries = self._u64("the metadata count")
        left = self._size - self._at
        if n_tensors > min(MAX_TENSORS, left // _MIN_TENSOR_BYTES):
            self._fail(f"the header claims {n_tensors} tensors, more than the file can hold", 8)
        if n_entries > min(MAX_ENTRIES, left // _MIN_ENTRY_BYTES):
            self._fail(f"the header claims {n_entries} metadata entries, more than the file can hold", 16)
        return version, n_tensors, n_entries

    def _metadata(self, n_entries: int) -> dict[str, MetadataValue]:
        metadata: dict[str, MetadataValue] = {}
        for i in range(n_entries):
            start = self._at
            key = self._string(f"the key of metadata entry {i}", MAX_KEY_BYTES)
            if not key:
                self._fail(f"the key of metadata entry {i} is empty", start)
            if key in metadata:
                self._fail(f"the metadata key {_show(key)} occurs twice", start)
            metadata[key] = self._value(key)
        return metadata

    def _value(self, key: str) -> MetadataValue:
        start = self._at
        kind = self._u32(f"the type of {_show(key)}")
        what = f"the value of {_show(key)}"
        if kind == _STRING:
            return self._string(what, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array(key, 1)
        if kind == _BOOL:
            at = self._need(1, what)
            if self._map[at] > 1:
                self._fail(f"{what} must be a boolean, 0 or 1, but is {self._map[at]}", at)
            return self._map[at] == 1
        dtype = _NUMBERS.get(kind)
        if dtype is None:
            self._fail(f"{what} has the unknown type {kind}", start)
        at = self._need(dtype.itemsize, what)
        value: int | float = np.frombuffer(self._map[at : self._at], dtype)[0].item()
        return value

    def _array(self, key: str, depth: int) -> MetadataValue:
        what = f"the array {_show(key)}"
        if depth > MAX_ARRAY_DEPTH:
            self._fail(f"{what} is nested more than {MAX_ARRAY_DEPTH} deep")
        start = self._at
        kind = self._u32(f"the element type of {what}")
        count = self._u64(f"the length of {what}")
        if count > min(MAX_ARRAY_ITEMS, self._items_left):
            self._fail(f"{what} claims {count} elements, more than the limit", start + 4)
        self._items_left -= count
        if kind == _STRING:
            return self._string_array(key, count, start)
        if kind == _ARRAY:
            self._check_fits(count, _MIN_ARRAY_BYTES, what, start)
            return [self._array(key, depth + 1) for _ in range(count)]
        dtype = np.dtype("<u1") if kind == _BOOL else _NUMBERS.get(kind)
        if dtype is None:
            self._fail(f"{what} has elements of the unknown type {kind}", start)
        self._check_fits(count, dtype.itemsize, what, start)
        at = self._need(count * dtype.itemsize, what)
        values: npt.NDArray[Any] = np.frombuffer(self._map[at : self._at], dtype)
        if kind == _BOOL:
            if count and values.max() > 1:
                wrong = int(np.argmax(values > 1))
                self._fail(f"{what} must hold booleans, 0 or 1, but has {values[wrong]}", at + wrong)
            return values.view(np.bool_)
        return values

    def _check_fits(self, count: int, item_bytes: int, what: str, start: int) -> None:
        if count * item_bytes > self._size - self._at:
            self._fail(f"{what} claims {count} elements, more than the rest of the file", start + 4)

    def _string_array(self, key: str, count: int, start: int) -> list[str]:
        """The vocabulary and merges take this way, so the loop does as little as it can."""
        self._check_fits(count, 8, f"the array {_show(key)}", start)
        mapped, at, size, unpack = self._map, self._at, self._size, _U64.unpack_from
        values: list[str] = []
        append = values.append
        try:
            for _ in range(count):
                begin = at + 8
                end = begin + unpack(mapped, at)[0]
                if end > size:
                    break
                append(mapped[begin:end].decode())
                at = end
        except UnicodeDecodeError as e:
            self._fail(f"string {len(values)} of {_show(key)} is not valid UTF-8", at + 8 + e.start)
        except struct.error:
            self._fail(f"the file ends inside string {len(values)} of {_show(key)}", at)
        if len(values) < count:
            self._fail(f"string {len(values)} of {_show(key)} is longer than the rest of the file", at)
        self._at = at
        return values

    def _alignment(self, metadata: Mapping[str, MetadataValue]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
            shown = value if isinstance(value, int | float) else type(value).__name__
            self._fail(
                f"general.alignment is {shown}, but must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
            )
        return value

    def _refuse_split(self, metadata: Mapping[str, MetadataValue]) -> None:
        parts = metadata.get("split.count", 0)
        if isinstance(parts, int) and parts > 1:
            raise UnsupportedModelError(
                f"{self._path}: this is one of {parts} parts of a split model, and only whole "
                "files can be read. Join them with `llama-gguf-split --merge` or download one file."
            )

    def _tensors(self, n_tensors: int, alignment: int) -> dict[str, TensorInfo]:
        rows: dict[str, _Row] = {}
        for i in range(n_tensors):
            start = self._at
            name = self._string(f"the name of tensor {i}", MAX_NAME_BYTES)
            if not name:
                self._fail(f"the name of tensor {i} is empty", start)
            if name in rows:
                self._fail(f"the tensor name {_show(name)} occurs twice", start)
            shape = self._shape(name)
            type_id = self._u32(f"the type of tensor {_show(name)}")
            offset = self._u64(f"the offset of tensor {_show(name)}")
            rows[name] = _Row(start, type_id, shape, offset)
        data_start = -(-self._at // alignment) * alignment
        self._refuse_unsupported({name: row.type_id for name, row in rows.items()})
        tensors = {name: self._tensor_info(name, row, data_start, alignment) for name, row in rows.items()}
        self._check_disjoint(tensors)
        return tensors

    def _shape(self, name: str) -> tuple[int, ...]:
        start = self._at
        n_dims = self._u32(f"the number of dimensions of tensor {_show(name)}")
        if not 1 <= n_dims <= MAX_DIMS:
            self._fail(f"tensor {_show(name)} has {n_dims} dimensions; expected 1 to {MAX_DIMS}", start)
        dims = [self._u64(f"the shape of tensor {_show(name)}") for _ in range(n_dims)]
        if 0 in dims:
            self._fail(f"tensor {_show(name)} has an empty dimension: {dims}", start)
        return tuple(reversed(dims))

    def _refuse_unsupported(self, types: Mapping[str, int]) -> None:
        unsupported = {n: t for n, t in types.items() if not _is_supported(t)}
        if not unsupported:
            return
        name, type_id = next(iter(unsupported.items()))
        label = unsupported_type_name(type_id) or f"an unknown type (id {type_id})"
        known = ", ".join(t.name for t in GGMLType)
        raise UnsupportedModelError(
            f"{self._path}: tensor {_show(name)} is stored as {label}, which is not supported "
            f"({len(unsupported)} of {len(types)} tensors have such types). Supported: {known}. "
            "Choose another quantisation of the model, for example Q4_K_M."
        )

    def _tensor_info(self, name: str, row: _Row, data_start: int, alignment: int) -> TensorInfo:
        tensor_type = GGMLType(row.type_id)
        start, shape, offset = row.start, row.shape, row.offset
        if shape[-1] % tensor_type.block_size:
            self._fail(
                f"tensor {_show(name)} has rows of {shape[-1]} weights, not a multiple of the "
                f"{tensor_type.block_size} of {tensor_type.name}",
                start,
            )
        nbytes = row_bytes(tensor_type, shape[-1])
        for n in shape[:-1]:
            nbytes *= n
        if offset % alignment:
            self._fail(
                f"tensor {_show(name)} is at data offset {offset}, not a multiple of {alignment}",
                start,
            )
        begin = data_start + offset
        if begin + nbytes > self._size:
            self._fail(
                f"tensor {_show(name)} {list(shape)} takes bytes {begin} to {begin + nbytes}, "
                "beyond the end of the file",
                start,
            )
        return TensorInfo(name, tensor_type, shape, begin, nbytes)

    def _check_disjoint(self, tensors: Mapping[str, TensorInfo]) -> None:
        in_order = sorted(tensors.values(), key=lambda t: t.offset)
        for first, second in pairwise(in_order):
            if second.offset < first.offset + first.nbytes:
                self._fail(f"tensors {_show(first.name)} and {_show(second.name)} overlap", second.offset)
