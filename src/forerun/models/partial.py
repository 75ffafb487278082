"""Files under construction in the cache: appended to, hashed, kept, named in one step.

Every failed file operation becomes a CacheError that says where, why, and how many bytes are
needed and free.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from forerun.errors import CacheError

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def human_bytes(count: int) -> str:
    """A byte count for people, in decimal units: 98.4 MB."""
    if count < 1000:
        return f"{count} B"
    value = float(count)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


def cache_error(error: OSError, path: Path, needed: int = 0) -> CacheError:
    """The CacheError for a failed operation at `path`; `needed` is the bytes still to write."""
    if error.errno in _NO_SPACE:
        return no_space_error(path if path.is_dir() else path.parent, needed)
    reason = error.strerror or str(error)
    return CacheError(
        f"the cache can't be used at {path}: {reason}; make it writable or set FORERUN_CACHE to another directory"
    )


def no_space_error(directory: Path, needed: int) -> CacheError:
    """The CacheError for a full disk, with the bytes needed and free."""
    try:
        free = f"{shutil.disk_usage(directory).free:,}"
    except OSError:
        free = "an unknown number of"
    return CacheError(
        f"not enough disk space in {directory}: {needed:,} bytes are needed and {free} are free; "
        "free some space or set FORERUN_CACHE to another directory (what was fetched is kept)"
    )


def check_space(directory: Path, needed: int) -> None:
    """Raise CacheError unless `needed` bytes are free in `directory`."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise cache_error(error, directory) from error
    if free < needed:
        raise no_space_error(directory, needed)


class Partial:
    """A file under construction: appended to, hashed on the way, kept when the process dies.

    A JSON note beside it (`<path>.json`) records how many parts are joined and at which byte the
    last one ends; bytes after that belong to a part that was cut short. HTTP needs no such note,
    there any prefix is good.
    """

    def __init__(self, path: Path, size: int, *, by_parts: bool = False) -> None:
        """Open or create the file at `path`, of `size` bytes when complete. Raises CacheError."""
        self.path = path
        self.target = size
        self.parts = 0
        self._note = path.with_name(path.name + ".json")
        try:
            self._file = path.open("ab+", buffering=0)
        except OSError as error:
            raise cache_error(error, path, size) from error
        try:
            kept = self._file.seek(0, os.SEEK_END)
            if by_parts:
                self.parts, end = self._read_note()
                if end > kept:
                    self.parts = end = 0
                kept = end
            self._truncate(kept if kept <= size else 0)
        except OSError as error:
            self._file.close()
            raise cache_error(error, path, size) from error
        self.resumed = self.size > 0

    def __enter__(self) -> Partial:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def missing(self) -> int:
        """Bytes still to come; negative when a source sent too many."""
        return self.target - self.size

    def digest(self) -> str:
        """SHA-256 of all bytes so far, in hex."""
        return self._hash.hexdigest()

    def append(self, data: bytes) -> None:
        """Write and hash `data`. CacheError, with bytes needed and free, if the disk refuses."""
        view = memoryview(data)
        try:
            while view:
                written = os.write(self._file.fileno(), view)
                self._hash.update(view[:written])
                self.size += written
                view = view[written:]
        except OSError as error:
            raise cache_error(error, self.path, self.missing) from error

    def sync(self) -> None:
        """Force the bytes to the disk."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise cache_error(error, self.path, self.missing) from error

    def finish_part(self) -> None:
        """Record that another part is complete: a later attempt starts after it."""
        self.sync()
        try:
            write_atomically(self._note, json.dumps({"parts": self.parts + 1, "bytes": self.size}).encode())
        except OSError as error:
            raise cache_error(error, self._note, self.missing) from error
        self.parts += 1

    def restart(self) -> None:
        """Throw the bytes away and begin at zero."""
        try:
            self._note.unlink(missing_ok=True)
            self._truncate(0)
        except OSError as error:
            raise cache_error(error, self.path, self.target) from error
        self.parts = 0
        self.resumed = False

    def discard(self) -> None:
        """Close and remove the file and its note."""
        self._file.close()
        try:
            self.path.unlink(missing_ok=True)
            self._note.unlink(missing_ok=True)
        except OSError as error:
            raise cache_error(error, self.path) from error

    def publish(self, final: Path) -> None:
        """Give the complete, checked file its final name, in one step that survives a power cut."""
        self.sync()
        self._file.close()
        try:
            os.replace(self.path, final)
            self._note.unlink(missing_ok=True)
            sync_directory(final.parent)
        except OSError as error:
            raise cache_error(error, final) from error

    def _truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._hash = hashlib.sha256()
        self._file.seek(0)
        while data := self._file.read(1 << 20):
            self._hash.update(data)
        self.size = size

    def _read_note(self) -> tuple[int, int]:
        try:
            note = json.loads(self._note.read_bytes())
            parts, end = note["parts"], note["bytes"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return 0, 0
        if not isinstance(parts, int) or not isinstance(end, int) or parts < 0 or end < 0:
            return 0, 0
        return parts, end


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a small file in one step; readers see the old content or the new, never a part."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            # Temporary files are private; a shared cache needs them readable.
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Force a directory's entries to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
