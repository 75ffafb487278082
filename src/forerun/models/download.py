"""Bringing a catalog model into the cache, keeping it whole, and taking it away again.

A file appears under its final name only when every byte has arrived and its SHA-256 is the
catalog's. One lock per model (flock, released by the kernel when its holder dies) makes two pulls
at once take turns; the second finds the file done. Beside the file lies a marker with the size,
time stamp and hash that were verified, so that a start needs no second look at the bytes as long
as they match.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forerun.errors import (
    CacheError,
    DownloadError,
    ForerunError,
    HashMismatchError,
    ModelNotFoundError,
)
from forerun.models.catalog import Catalog, CatalogEntry, HuggingFaceSource, Source, cache_dir
from forerun.models.fetch import (
    DownloadSettings,
    Progress,
    SourceError,
    fetch_http,
    fetch_wheels,
)
from forerun.models.partial import Partial, cache_error, check_space, human_bytes, write_atomically

_log = logging.getLogger("forerun.models")


class LogProgress:
    """The Progress of a caller that doesn't watch: it goes to the log `forerun.models`."""

    def start(self, label: str, total: int) -> None:
        _log.info("%s (%s)", label, human_bytes(total))

    def update(self, done: int) -> None: ...

    def note(self, message: str) -> None:
        _log.warning("%s", message)

    def stop(self) -> None: ...


@dataclass(frozen=True)
class CacheStatus:
    """What the cache holds of one model.

    `state`: "present" (verified), "unverified" (right size, never checked or touched since),
    "partial" (a pull was cut short) or "absent". `bytes`: how many bytes of the file or of its
    longest partial are there.
    """

    state: Literal["present", "unverified", "partial", "absent"]
    bytes: int


@dataclass(frozen=True)
class Removal:
    """What `remove` took away: the paths and the bytes that they held."""

    paths: tuple[Path, ...]
    bytes: int


def resolve(name_or_path: str | Path, *, progress: Progress | None = None) -> Path:
    """The local .gguf file or model folder that a name or path stands for.

    A catalog model that is absent is pulled.

    A `Path`, and a string that holds a separator, ends in .gguf or names an existing folder, is a
    path; everything else is a catalog name. Raises ModelNotFoundError, and what `pull` raises.
    """
    text = os.fspath(name_or_path)
    is_path = (
        isinstance(name_or_path, Path)
        or os.sep in text
        or text.lower().endswith(".gguf")
        or (bool(text) and os.path.isdir(text))
    )
    if not is_path:
        return pull(Catalog.load().get(text), progress=progress)
    path = Path(os.path.expanduser(text))
    if not path.exists():
        raise ModelNotFoundError(
            f"there is no file or folder at {path}; expected a .gguf file, a Hugging Face folder, "
            "or a catalog name (forerun models list)"
        )
    return path


def pull(
    entry: CatalogEntry,
    *,
    progress: Progress | None = None,
    verify: bool = False,
    settings: DownloadSettings | None = None,
) -> Path:
    """The path of the model's complete file, fetched from its sources in order unless it is there.

    `verify` hashes a file that is there, too; one that turns out wrong is removed and fetched
    anew. `settings` default to the environment's. Interrupted, it leaves what the next pull can
    go on from. Raises DownloadError (no source delivers), HashMismatchError (what was delivered
    is another file), CacheError (disk full, cache not writable), ConfigurationError
    (environment).
    """
    watcher = progress or LogProgress()
    damaged: tuple[int, ...] | None = None
    try:
        if _is_verified(entry) and not verify:
            return entry.path
        # Checking what is there needs no lock: a cache baked into an image may be read-only.
        if _has_size(entry):
            damaged = _stamp(entry)
            if _hash_matches(entry, watcher):
                _mark(entry)
                return entry.path
        with _lock(entry, watcher):
            if entry.path.exists():
                # Another process may have put a good file in place since.
                if _stamp(entry) != damaged:
                    if _is_verified(entry):
                        return entry.path
                    if _has_size(entry) and _hash_matches(entry, watcher):
                        _mark(entry)
                        return entry.path
                watcher.note(f"{entry.path} is damaged; it is removed and fetched anew")
                _unlink(entry.path)
            _fetch(entry, settings or DownloadSettings.from_environment(), watcher)
        return entry.path
    finally:
        watcher.stop()


def status(entry: CatalogEntry) -> CacheStatus:
    """What the cache holds of the model, by sizes and markers alone (no hashing, no writing)."""
    if _is_verified(entry):
        return CacheStatus("present", entry.size)
    if _has_size(entry):
        return CacheStatus("unverified", entry.size)
    lengths = []
    for path in entry.directory.glob(f".{entry.file}.*.partial"):
        try:
            lengths.append(path.stat().st_size)
        except FileNotFoundError:
            # A pull that ended at this moment took it away.
            continue
        except OSError as error:
            raise cache_error(error, path) from error
    longest = max(lengths, default=0)
    return CacheStatus("partial" if longest else "absent", longest)


def repacked_files(entry: CatalogEntry, fingerprint: str | None = None) -> tuple[Path, ...]:
    """Repacked weights in the cache whose names begin with the SHA-256 or the fingerprint."""
    prefixes = tuple(prefix for prefix in (entry.sha256, fingerprint) if prefix)
    folder = cache_dir() / "repacked"
    if not folder.is_dir():
        return ()
    return tuple(sorted(path for path in folder.iterdir() if path.name.startswith(prefixes)))


def remove(
    entry: CatalogEntry,
    *,
    progress: Progress | None = None,
    fingerprint: Callable[[Path], str | None] | None = None,
) -> Removal:
    """Delete the model's file, its unfinished pulls and its repacked weights.

    `fingerprint` maps the model's file to the prefix under which its repacked weights are stored,
    or to None; it is called before anything is deleted. A pull in progress is waited for. Raises
    CacheError.
    """
    if not entry.directory.exists() and not repacked_files(entry):
        return Removal((), 0)
    with _lock(entry, progress or LogProgress()):
        key = fingerprint(entry.path) if fingerprint and entry.path.is_file() else None
        try:
            targets = [*repacked_files(entry, key)]
            # The file goes before its marker: a marker alone is harmless.
            if entry.directory.is_dir():
                targets += sorted(entry.directory.iterdir(), key=lambda path: path != entry.path)
        except OSError as error:
            raise cache_error(error, entry.directory) from error
        total = 0
        for target in targets:
            total += sum(part.lstat().st_size for part in (target, *target.rglob("*")))
            _unlink(target)
        try:
            entry.directory.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise cache_error(error, entry.directory) from error
    return Removal(tuple(targets), total)


def _fetch(entry: CatalogEntry, settings: DownloadSettings, progress: Progress) -> None:
    """Try the sources in order until one has delivered the file and it is in place."""
    try:
        entry.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cache_error(error, entry.directory, entry.size) from error
    failures: list[str] = []
    wrong = False
    for source in entry.sources:
        try:
            _fetch_from(source, entry, settings, progress)
            return
        except HashMismatchError as error:
            wrong = True
            reason = str(error)
        except SourceError as error:
            reason = str(error)
        failures.append(f"{source}: {reason}")
        progress.note(f"{entry.name}: {failures[-1]}")
    message = f"the model {entry.name!r} isn't in the cache and could not be fetched [{'; '.join(failures)}]. "
    if wrong:
        raise HashMismatchError(
            f"{message}The wrong bytes were removed. Try again, compare the SHA-256 in the "
            "catalog, or give the path of a .gguf file instead of a name"
        )
    raise DownloadError(
        f"{message}Connect to the network and run: forerun models pull {entry.name} (what "
        "arrived is kept), or give the path of a .gguf file instead"
    )


def _fetch_from(source: Source, entry: CatalogEntry, settings: DownloadSettings, progress: Progress) -> None:
    from_hub = isinstance(source, HuggingFaceSource)
    if settings.offline:
        raise SourceError("skipped, FORERUN_OFFLINE is set")
    if settings.hub_offline and from_hub:
        raise SourceError("skipped, HF_HUB_OFFLINE is set")
    # The identity of source and file is in the name: a changed catalog never goes on with other
    # bytes.
    key = hashlib.sha256(f"{entry.sha256} {entry.size} {source!r}".encode()).hexdigest()[:12]
    path = entry.directory / f".{entry.file}.{key}.partial"
    with Partial(path, entry.size, by_parts=not from_hub) as partial:
        try:
            _complete(source, partial, entry, settings, progress)
        except ForerunError:
            if partial.size == 0:
                partial.discard()
            raise
        partial.publish(entry.path)
    _mark(entry)
    for leftover in entry.directory.glob(f".{entry.file}.*.partial*"):
        _unlink(leftover)


def _complete(
    source: Source,
    partial: Partial,
    entry: CatalogEntry,
    settings: DownloadSettings,
    progress: Progress,
) -> None:
    """Fill `partial` until it is the catalog's file; the wrong bytes are thrown away."""
    while True:
        check_space(entry.directory, partial.missing)
        progress.start(f"{entry.name} from {source}", entry.size)
        progress.update(partial.size)
        if isinstance(source, HuggingFaceSource):
            fetch_http(source, partial, settings, progress.update)
        else:
            fetch_wheels(source, partial, progress.update)
        if partial.missing == 0 and partial.digest() == entry.sha256:
            return
        found = f"{partial.size:,} bytes with SHA-256 {partial.digest()}"
        resumed = partial.resumed
        partial.restart()
        if not resumed:
            raise HashMismatchError(f"it delivers {found}, expected {entry.size:,} bytes with {entry.sha256}")
        # The wrong bytes may be the earlier attempt's: only a fresh start tells.
        progress.note(f"{entry.name}: the resumed file is wrong ({found}); starting afresh")


@contextmanager
def _lock(entry: CatalogEntry, progress: Progress) -> Iterator[None]:
    """Hold the model's lock. Its file stays: without it, two processes could hold "the" lock."""
    path = cache_dir() / "locks" / f"{entry.name}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise cache_error(error, path) from error
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note(f"{entry.name}: waiting for another process that is working on it")
            fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        os.close(handle)
        raise CacheError(
            f"the cache's file system can't lock {path} ({error.strerror}); set FORERUN_CACHE to a "
            "directory on a local disk"
        ) from error
    except BaseException:
        os.close(handle)
        raise
    try:
        yield
    finally:
        os.close(handle)


def _marker(entry: CatalogEntry) -> Path:
    return entry.directory / f".{entry.file}.verified"


def _has_size(entry: CatalogEntry) -> bool:
    try:
        return entry.path.is_file() and entry.path.stat().st_size == entry.size
    except OSError as error:
        raise cache_error(error, entry.path) from error


def _stamp(entry: CatalogEntry) -> tuple[int, ...]:
    try:
        found = entry.path.stat()
    except OSError as error:
        raise cache_error(error, entry.path) from error
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _is_verified(entry: CatalogEntry) -> bool:
    """Whether the file is there with the size and time stamp that its marker says were verified."""
    if not _has_size(entry):
        return False
    try:
        marker = json.loads(_marker(entry).read_bytes())
    except (OSError, ValueError):
        return False
    return bool(marker == _identity(entry))


def _identity(entry: CatalogEntry) -> dict[str, object]:
    found = entry.path.stat()
    return {"sha256": entry.sha256, "size": found.st_size, "mtime_ns": found.st_mtime_ns}


def _mark(entry: CatalogEntry) -> None:
    try:
        write_atomically(_marker(entry), json.dumps(_identity(entry)).encode())
    except OSError as error:
        # Without a marker the next start hashes the file again: slower, not wrong.
        _log.info("no marker for %s: %s", entry.path, error)


def _hash_matches(entry: CatalogEntry, progress: Progress) -> bool:
    progress.start(f"{entry.name}: checking the file", entry.size)
    digest = hashlib.sha256()
    done = 0
    try:
        with entry.path.open("rb", buffering=0) as file:
            while data := file.read(1 << 22):
                digest.update(data)
                done += len(data)
                progress.update(done)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise cache_error(error, entry.path) from error
    return digest.hexdigest() == entry.sha256


def _unlink(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise cache_error(error, path) from error
