"""Weights in the kernels' layout, kept in one memory-mapped file per model.

The first start packs every matrix (a second or two per billion parameters) into
`cache_dir()/repacked/FINGERPRINT-LAYOUT.packed`; later starts map that file. The file appears atomically, and what does
not look right when it is opened is packed again.

File: 8 bytes magic, uint64 length of the header, header (JSON: layout version, fingerprint, tensors), then each tensor
at a multiple of 4096 bytes, in the order in which a forward pass reads them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun import ops
from forerun.errors import CacheError
from forerun.models.source import ModelSource
from forerun.models.types import GGMLType

LAYOUT = 1
"""Changes whenever csrc/repack.hpp lays tensors out differently."""

_MAGIC = b"FRPACK01"
_ALIGN = 4096


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
        _write(source, places, total, path, header, threads)
        found = _map(path, header, total)
        if found is None:
            raise CacheError(
                f"{path} can't be read back after it was written; remove it and check the disk"
            )
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
    return {
        name: PackedTensor(p.type, p.n, p.k, data[p.offset : p.offset + p.nbytes])
        for name, p in places.items()
    }


def _pack_into(
    source: ModelSource, places: Mapping[str, _Place], data: npt.NDArray[np.uint8], threads: int
) -> None:
    for name, place in places.items():
        ops.pack(source.tensor(name), data[place.offset : place.offset + place.nbytes], threads)


def _map(path: Path, header: bytes, total: int) -> npt.NDArray[np.uint8] | None:
    """The data section of a cache file whose header is exactly the one expected, else None."""
    try:
        with path.open("rb") as file:
            if (
                os.fstat(file.fileno()).st_size != len(header) + total
                or file.read(len(header)) != header
            ):
                return None
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CacheError(
            f"the packed weights {path} can't be read: {error.strerror}; remove the file"
        ) from error
    with contextlib.suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_WILLNEED)
    return np.frombuffer(mapped, dtype=np.uint8, offset=len(header))


def _write(
    source: ModelSource,
    places: Mapping[str, _Place],
    total: int,
    path: Path,
    header: bytes,
    threads: int,
) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".packing-", delete=False) as file:
            try:
                # Reserving first turns a full disk into an error here instead of a bus error while packing.
                os.posix_fallocate(file.fileno(), 0, len(header) + total)
                file.write(header)
                file.flush()
                with mmap.mmap(file.fileno(), len(header) + total) as mapped:
                    data = np.frombuffer(mapped, dtype=np.uint8, offset=len(header))
                    try:
                        _pack_into(source, places, data, threads)
                    finally:
                        del data
                    mapped.flush()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        needed = (len(header) + total) / 1e6
        raise CacheError(
            f"packed weights ({needed:.0f} MB) can't be written to {path.parent}: {error.strerror}; free some space, "
            "set FORERUN_CACHE to a writable directory, or use Engine(..., cache_weights=False)"
        ) from error
