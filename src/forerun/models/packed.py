"""Weights in the kernels' layout, kept in one memory-mapped file per model.

The first start packs every matrix (a second or two per billion parameters) into
`cache_dir()/repacked/FINGERPRINT-LAYOUT.packed`; later starts map that file. The file appears atomically, and one whose
header, size or checksum is not as it should be is packed again. Processes that start together take turns at
FINGERPRINT-LAYOUT.packed.partial (flock, released by the kernel when its holder dies): the first packs, the others map.

File: 8 bytes magic, uint64 length of the header, header (JSON: layout version, fingerprint, tensors), then each tensor
at a multiple of 4096 bytes, in the order in which a forward pass reads them, then the checksum in 8 bytes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun import ops
from forerun.errors import CacheError
from forerun.models.partial import sync_directory
from forerun.models.source import ModelSource
from forerun.ops.types import GGMLType

LAYOUT = 2
"""Changes whenever csrc/repack.hpp lays tensors out differently."""

_MAGIC = b"FRPACK01"
_ALIGN = 4096
_CHECKSUM_BYTES = 8


class PackedTensor(NamedTuple):
    """A matrix of `n` outputs x `k` inputs, packed: uint8[ops.packed_bytes(type, n, k)]."""

    type: GGMLType
    n: int
    k: int
    data: npt.NDArray[np.uint8]


class _Place(NamedTuple):
    type: GGMLType
    n: int
    k: int
    offset: int  # from the start of the data section
    nbytes: int


def packed_path(cache: Path, fingerprint: str) -> Path:
    """Where the packed weights of a model lie."""
    return cache / "repacked" / f"{fingerprint}-{LAYOUT}.packed"


def load_packed(
    source: ModelSource, names: Sequence[str], *, cache: Path | None, threads: int
) -> dict[str, PackedTensor]:
    """The named matrices of a model, packed; mapped from the cache, or packed (and cached) now.

    `cache` None packs into memory. Raises `CacheError` when the cache can't be written; nothing partial is left.
    """
    places, total = _places(source, names)
    if cache is None:
        memory = np.empty(total, dtype=np.uint8)
        _pack_into(source, places, memory, threads)
        return _views(places, memory)
    fingerprint = source.fingerprint()
    path = packed_path(cache, fingerprint)
    header = _header(fingerprint, places)
    found = _map(path, header, total)
    if found is None:
        _build(source, places, total, path, header, threads)
        found = _map(path, header, total)
        if found is None:
            raise CacheError(f"{path} can't be read back after it was written; remove it and check the disk")
    return _views(places, found)


def _places(source: ModelSource, names: Sequence[str]) -> tuple[dict[str, _Place], int]:
    places: dict[str, _Place] = {}
    offset = 0
    for name in names:
        tensor = source.tensor(name)
        n, k = tensor.shape
        nbytes = ops.packed_bytes(tensor.type, n, k)
        places[name] = _Place(tensor.type, n, k, offset, nbytes)
        offset += (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN
    return places, offset


def _header(fingerprint: str, places: Mapping[str, _Place]) -> bytes:
    body = json.dumps(
        {
            "layout": LAYOUT,
            "fingerprint": fingerprint,
            "tensors": {k: list(v) for k, v in places.items()},
        }
    ).encode()
    start = _MAGIC + len(body).to_bytes(8, "little") + body
    return start + bytes(-len(start) % _ALIGN)


def _views(places: Mapping[str, _Place], data: npt.NDArray[np.uint8]) -> dict[str, PackedTensor]:
    return {name: PackedTensor(p.type, p.n, p.k, data[p.offset : p.offset + p.nbytes]) for name, p in places.items()}


def _pack_into(source: ModelSource, places: Mapping[str, _Place], data: npt.NDArray[np.uint8], threads: int) -> None:
    for name, place in places.items():
        ops.pack(source.tensor(name), data[place.offset : place.offset + place.nbytes], threads)


def _checksum(data: npt.NDArray[np.uint8]) -> bytes:
    """Of whole pages, at the speed of memory: a CRC over the sums of their 64-bit words."""
    sums = np.add.reduce(data.view(np.uint64).reshape(-1, _ALIGN // 8), axis=1)
    return zlib.crc32(sums.tobytes()).to_bytes(_CHECKSUM_BYTES, "little")


def _map(path: Path, header: bytes, total: int) -> npt.NDArray[np.uint8] | None:
    """The data section of a cache file with the header that is expected and a true checksum, else None."""
    size = len(header) + total + _CHECKSUM_BYTES
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size or file.read(len(header)) != header:
                return None
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CacheError(
            f"the packed weights {path} can't be read: {error.strerror}; remove the file, set FORERUN_CACHE to another "
            "directory, or use Engine(..., cache_weights=False)"
        ) from error
    # Large pages, where the file system keeps them, need a 512th of the address translations. That advice comes first
    # because it decides in which pages the file is then read.
    for advice in ("MADV_HUGEPAGE", "MADV_WILLNEED"):
        with contextlib.suppress(AttributeError, OSError):
            mapped.madvise(getattr(mmap, advice))
    data = np.frombuffer(mapped, dtype=np.uint8, offset=len(header), count=total)
    return data if _checksum(data) == mapped[-_CHECKSUM_BYTES:] else None


def _build(
    source: ModelSource, places: Mapping[str, _Place], total: int, path: Path, header: bytes, threads: int
) -> None:
    """Packs into `path`, unless another process has done so meanwhile."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            with os.fdopen(os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if not _is_at(file, partial):
                    continue  # its last holder has renamed or removed it
                try:
                    if _map(path, header, total) is None:
                        _write(source, places, total, file, header, threads)
                        os.replace(partial, path)
                        sync_directory(path.parent)
                        _remove_other_layouts(path)
                    else:
                        partial.unlink()
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise
                return
    except OSError as error:
        if isinstance(error, CacheError):
            raise
        needed = (len(header) + total) / 1e6
        raise CacheError(
            f"packed weights ({needed:.0f} MB) can't be written to {path.parent}: {error.strerror}; free some space, "
            "set FORERUN_CACHE to a writable directory, or use Engine(..., cache_weights=False)"
        ) from error


def _remove_other_layouts(path: Path) -> None:
    """What earlier versions packed of the same model: as large as the model, and of no use any more."""
    fingerprint = path.name.rpartition("-")[0]
    for other in path.parent.glob(f"{fingerprint}-*.packed"):
        if other != path:
            with contextlib.suppress(OSError):
                other.unlink()


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _write(
    source: ModelSource, places: Mapping[str, _Place], total: int, file: BinaryIO, header: bytes, threads: int
) -> None:
    size = len(header) + total + _CHECKSUM_BYTES
    # What a dead process left behind goes. Reserving then turns a full disk into an error here instead of a bus error
    # while packing.
    os.ftruncate(file.fileno(), 0)
    os.posix_fallocate(file.fileno(), 0, size)
    # Not closed here: a failing kernel's traceback may still hold a view, and the last view to go unmaps it anyway.
    mapped = mmap.mmap(file.fileno(), size)
    mapped[: len(header)] = header
    data = np.frombuffer(mapped, dtype=np.uint8, offset=len(header), count=total)
    _pack_into(source, places, data, threads)
    mapped[-_CHECKSUM_BYTES:] = _checksum(data)
    mapped.flush()
    os.fsync(file.fileno())
