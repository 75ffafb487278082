"""Reads safetensors files, alone or sharded, without trusting them.

Format: https://github.com/huggingface/safetensors#format. Eight bytes give the length of a JSON
header; the header gives each tensor's type, shape and byte range in the rest of the file. Files are
memory-mapped, and tensor data is read only when somebody touches it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from forerun.errors import CacheError, ModelFormatError, UnsupportedModelError
from forerun.ops.types import GGMLType, TensorData

INDEX_NAME: Final = "model.safetensors.index.json"
SINGLE_NAME: Final = "model.safetensors"

MAX_HEADER_BYTES: Final = 100_000_000
"""The format's own limit."""

_PREFIX_BYTES: Final = 8
_MAX_DIMS: Final = 8
_DAMAGED: Final = "The file is damaged or incomplete: download it again."

_ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}

_TYPES: Final[Mapping[str, GGMLType]] = {
    "F32": GGMLType.F32,
    "F16": GGMLType.F16,
    "BF16": GGMLType.BF16,
}


@dataclass(frozen=True)
class SafetensorsInfo:
    """One tensor of a file: `start` and `stop` are byte offsets from the file's beginning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One open file; every byte range was checked against the file's size.

    Views handed out by `tensor` stay valid after `close`: the map lives as long as they do.
    """

    path: Path
    tensors: Mapping[str, SafetensorsInfo]

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, SafetensorsInfo],
        data: npt.NDArray[np.uint8],
    ) -> None:
        self.path = path
        self.tensors = tensors
        self._data: npt.NDArray[np.uint8] | None = data

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Map a file and check its header.

        Raises ModelFormatError where the header is malformed or contradicts the file's size,
        UnsupportedModelError for a tensor type that the format doesn't have, CacheError where the
        file can't be read.
        """
        try:
            size = path.stat().st_size
            if size < _PREFIX_BYTES:
                _fail(path, f"it has {size} bytes, expected at least {_PREFIX_BYTES}")
            data = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
        except OSError as error:
            raise CacheError(f"{path} can't be read: {error.strerror or error}.") from error
        length = int.from_bytes(data[:_PREFIX_BYTES].tobytes(), "little")
        if length > min(MAX_HEADER_BYTES, size - _PREFIX_BYTES):
            _fail(path, f"the header claims {length} bytes, the file has {size}")
        start = _PREFIX_BYTES + length
        header = _parse_object(path, data[_PREFIX_BYTES:start].tobytes(), "header")
        header.pop("__metadata__", None)
        tensors = {name: _info(path, name, entry, start) for name, entry in header.items()}
        _check_layout(path, tensors, start, size)
        return cls(path, tensors, data)

    def tensor(self, name: str) -> TensorData:
        """A tensor's bytes as a read-only view of the file, aligned as they are there.

        Raises ModelFormatError for a name that the file lacks, UnsupportedModelError for a type
        other than F32, F16 and BF16, and ValueError after `close`.
        """
        if self._data is None:
            raise ValueError(f"{self.path}: the file is closed; open it again to read tensors")
        if name not in self.tensors:
            raise ModelFormatError(f"{self.path.name} lacks the tensor {name!r}.")
        info = self.tensors[name]
        if info.dtype not in _TYPES:
            raise UnsupportedModelError(
                f"tensor {name!r} of {self.path.name} has type {info.dtype}; supported: F32, F16, BF16."
            )
        return TensorData(name, _TYPES[info.dtype], info.shape, self._data[info.start : info.stop])

    def close(self) -> None:
        """Let the memory map go. May be called twice."""
        self._data = None


class SafetensorsFolder:
    """All tensors of a folder: `model.safetensors`, or the shards that its index names."""

    def __init__(self, files: Mapping[str, SafetensorsFile], where: Mapping[str, str]) -> None:
        self._files = files
        self._where = where

    @classmethod
    def open(cls, folder: Path) -> SafetensorsFolder:
        """Open every file that the index names, or the one file of an unsharded model.

        Raises ModelFormatError where a file is missing or malformed, or where the index places a
        tensor in a file that lacks it.
        """
        index = folder / INDEX_NAME
        if index.is_file():
            where = _weight_map(index)
            names = sorted(set(where.values()))
        elif (folder / SINGLE_NAME).is_file():
            where, names = {}, [SINGLE_NAME]
        else:
            raise ModelFormatError(
                f"{folder.name} has neither {SINGLE_NAME} nor {INDEX_NAME}: it isn't a complete "
                "model folder with safetensors weights."
            )
        files = {}
        for name in names:
            if not (folder / name).is_file():
                raise ModelFormatError(f"{INDEX_NAME} names {name}, which is not in {folder.name}: download it.")
            files[name] = SafetensorsFile.open(folder / name)
        if not index.is_file():
            where = dict.fromkeys(files[SINGLE_NAME].tensors, SINGLE_NAME)
        for tensor, name in where.items():
            if tensor not in files[name].tensors:
                raise ModelFormatError(f"{INDEX_NAME} places {tensor!r} in {name}, which lacks it. {_DAMAGED}")
        return cls(files, where)

    @property
    def tensors(self) -> Mapping[str, SafetensorsInfo]:
        """Every tensor by name; offsets count within the tensor's own file."""
        return {name: self._files[file].tensors[name] for name, file in self._where.items()}

    def type_of(self, name: str) -> GGMLType | None:
        """A tensor's type, or None where Forerun doesn't read it."""
        return _TYPES.get(self._files[self._where[name]].tensors[name].dtype)

    @property
    def files(self) -> tuple[Path, ...]:
        """The files, in order of name."""
        return tuple(file.path for file in self._files.values())

    def tensor(self, name: str) -> TensorData:
        """As `SafetensorsFile.tensor`."""
        if name not in self._where:
            raise ModelFormatError(f"the model folder lacks the tensor {name!r}.")
        return self._files[self._where[name]].tensor(name)

    def close(self) -> None:
        """Close every file. May be called twice."""
        for file in self._files.values():
            file.close()


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON file whose top level is an object without repeated keys.

    Raises ModelFormatError for anything else, CacheError where the file can't be read.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise CacheError(f"{path} can't be read: {error.strerror or error}.") from error
    return _parse_object(path, raw, "file")


def _fail(path: Path, what: str) -> NoReturn:
    raise ModelFormatError(f"{path.name}: {what}. {_DAMAGED}")


def _parse_object(path: Path, raw: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            _fail(path, f"the {what} repeats a key")
        return result

    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelFormatError):
            raise
        _fail(path, f"the {what} is not valid JSON ({error})")
    if not isinstance(value, dict):
        _fail(path, f"the {what} is not a JSON object")
    return value


def _counts(value: Any, at_most: int) -> tuple[int, ...] | None:
    """A short list of non-negative integers, or None where `value` is something else."""
    if not isinstance(value, list) or len(value) > at_most:
        return None
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value):
        return None
    return tuple(value)


def _info(path: Path, name: str, entry: Any, data_start: int) -> SafetensorsInfo:
    if not isinstance(entry, dict):
        _fail(path, f"the entry of tensor {name!r} is not an object")
    dtype = entry.get("dtype")
    shape = _counts(entry.get("shape"), _MAX_DIMS)
    offsets = _counts(entry.get("data_offsets"), 2)
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        _fail(path, f"tensor {name!r} lacks a valid dtype, shape or data_offsets")
    if dtype not in _ITEM_BYTES:
        raise UnsupportedModelError(f"{path.name}: tensor {name!r} has the type {dtype!r}.")
    start, stop = offsets
    nbytes = math.prod(shape) * _ITEM_BYTES[dtype]
    if stop - start != nbytes:
        _fail(
            path,
            f"tensor {name!r} of shape {list(shape)} and type {dtype} has {stop - start} bytes, expected {nbytes}",
        )
    return SafetensorsInfo(name, dtype, shape, data_start + start, data_start + stop)


def _check_layout(path: Path, tensors: Mapping[str, SafetensorsInfo], start: int, size: int) -> None:
    """The format wants the ranges to cover the data exactly, without gap or overlap."""
    at = start
    for info in sorted(tensors.values(), key=lambda info: (info.start, info.stop)):
        if info.start != at:
            _fail(path, f"tensor {info.name!r} starts at byte {info.start}, expected {at}")
        at = info.stop
    if at != size:
        _fail(path, f"the tensors end at byte {at}, the file at byte {size}")


def _weight_map(index: Path) -> dict[str, str]:
    where = read_json_object(index).get("weight_map")
    if not isinstance(where, dict) or not where:
        _fail(index, "'weight_map' is not an object with at least one tensor")
    for tensor, name in where.items():
        plain = isinstance(name, str) and Path(name).name == name and "\\" not in name
        if not plain or not name.endswith(".safetensors"):
            _fail(index, f"'weight_map' places {tensor!r} in {name!r}, expected a plain file name")
    return where
