"""`forerun bench serve` against a live server: what it reports is what the engine did."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server's packages are not installed (pip install 'forerun[serve]')")
pytest.importorskip("httpx", reason="httpx is not installed (pip install 'forerun[bench]')")

from forerun import Engine, cli
from forerun.measure import load as measure
from forerun.measure.load_client import LoadClient
from forerun.measure.load_run import chosen_tasks
from forerun.measure.tasks import Task, read_tasks
from forerun.serve.app import Settings
from forerun.serve.run import ServeOptions
from reference.live_server import LiveServer
from reference.scripts import loaded
from reference.tiny import TinySpec, write_tiny_gguf

KEY = "sesame-1234"
N_TASKS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench-serve")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Path:
    path = folder / "tasks.jsonl"
    entries = [
        {"task_id": f"t{n}", "category": f"a/{n % 2}", "prompt": f"Say {n} and and and", "max_tokens": 10 + n}
        for n in range(N_TASKS)
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[LiveServer]:
    model = write_tiny_gguf(folder / "tiny.gguf", TinySpec("llama", layers=1, context=2048))
    engine = Engine(model, kv_tokens=8192, threads=1, cache_weights=False, draft_len=4, max_rows=8)
    with LiveServer(engine, ServeOptions(names=("tiny",), settings=Settings(api_keys=(KEY,)))) as live:
        yield live
        live.check_idle()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", KEY)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of `forerun bench serve` in this process."""
    code = cli.dispatch(["bench", "serve", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


def flags(server: LiveServer, tasks: Path, *more: str) -> list[str]:
    words = [server.url, "--tasks", str(tasks), "--extra-body", '{"ignore_eos": true}', *more]
    return words if {"--rate", "--concurrency"} & set(more) else [*words, "--concurrency", "3"]


def reported(capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, *more: str) -> dict[str, Any]:
    code, output, errors = call(capsys, *flags(server, tasks, "--json", *more))
    assert (code, errors) == (0, "")
    found: dict[str, Any] = json.loads(output)
    return found


@pytest.mark.parametrize("api", ["chat", "completions"])
@pytest.mark.parametrize("form", [("--concurrency", "3"), ("--rate", "200")])
def test_the_counts_are_the_engines(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, api: str, form: tuple[str, str]
) -> None:
    before = server.engine.stats().speculation
    found = reported(capsys, server, tasks, "--api", api, *form, "--requests", "8", "--warmup", "0")
    after = server.engine.stats().speculation
    assert found["kind"] == measure.KIND
    assert (found["answered"], found["errors"], found["complete"], found["unfinished"]) == (8, {}, True, 0)
    # Each task's own length, which the end token doesn't shorten; the first two are asked twice.
    lengths = {result["task_id"]: result["output_tokens"] for result in found["results"]}
    assert lengths == {f"t{n}": 10 + n for n in range(N_TASKS)}
    assert len(found["results"]) == 8
    tokens = sum(result["output_tokens"] for result in found["results"])
    assert found["output_tokens"] == tokens == after.emitted - before.emitted
    for name in ("drafted", "proposed", "accepted", "emitted", "decisions"):
        assert found["speculation"][name] == getattr(after, name) - getattr(before, name)
    # With speculation events are fewer than tokens, so that one can't be taken for the other.
    assert 8 <= found["events"] < tokens
    assert found["output_tokens_per_s"] == pytest.approx(tokens / found["seconds"])
    assert {result["finish_reason"] for result in found["results"]} == {"length"}
    assert (found["late_ms"] is None) == (form[0] == "--concurrency")
    assert found["load"]["mode"] == ("closed" if form[0] == "--concurrency" else "open")
    for result in found["results"]:
        assert 0 <= result["first_token_ms"] <= result["end_to_end_ms"] <= 1e3 * found["seconds"] + 1e-6
    setup = found["setup"]
    assert (setup["url"], setup["model"], setup["server"], setup["hardware"]) == (
        server.url + "/v1", "tiny", "uvicorn", "unknown",
    )  # fmt: skip


def test_counting_events_would_be_noticed(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = LoadClient.ask

    async def miscounting(self: LoadClient, *arguments: Any) -> measure.Exchange:
        found = await ask(self, *arguments)
        return measure.Exchange(**{**vars(found), "output_tokens": found.n_events})

    monkeypatch.setattr(LoadClient, "ask", miscounting)
    with pytest.raises(AssertionError):
        test_the_counts_are_the_engines(capsys, server, tasks, "chat", ("--concurrency", "3"))


def test_the_warm_up_does_not_count(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = LoadClient.ask

    async def spying(self: LoadClient, order: Any, due: float | None = None) -> measure.Exchange:
        asked.append(order.task.task_id)
        return await ask(self, order, due)

    monkeypatch.setattr(LoadClient, "ask", spying)
    found = reported(capsys, server, tasks, "--concurrency", "1", "--warmup", "2")
    assert len(asked) == N_TASKS + 2
    assert [result["task_id"] for result in found["results"]] == asked[2:]
    assert found["answered"] == N_TASKS
    asked.clear()
    reported(capsys, server, tasks, "--concurrency", "3")
    assert len(asked) == N_TASKS + 3


def test_the_report_for_people(capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path) -> None:
    targets = ("--target-ttft-ms", "100000", "--target-tpot-ms", "100000")
    code, output, errors = call(capsys, *flags(server, tasks, *targets))
    assert (code, errors) == (0, "")
    assert output.startswith(f"tiny at {server.url}/v1, server uvicorn, hardware unknown\n")
    assert f"{N_TASKS} answers in " in output
    assert "100.0% of all, had first token within 100000 ms and each further token within 100000 ms" in output
    assert "draft tokens accepted" in output
    for row in ("to first token", "between tokens", "between events", "per token of an answer", "end to end"):
        assert f"{row}  " in output
    assert KEY not in output
    # The command gives the same load again.
    command = next(line for line in output.splitlines() if line.startswith("forerun bench serve "))
    first = reported(capsys, server, tasks, *targets)
    code = cli.dispatch([*shlex.split(command)[1:], "--json"])
    again = json.loads(capsys.readouterr().out)
    assert code == 0
    assert again["load"] == first["load"]
    assert again["setup"]["command"] == command


def test_a_comparison(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    then = tmp_path / "then.json"
    then.write_text(json.dumps(reported(capsys, server, tasks)))
    code, output, _ = call(capsys, *flags(server, tasks, "--compare", str(then)))
    assert code == 0
    assert f"beside {then}" in " ".join(output.split())
    assert "NOW / THEN" in output
    found = reported(capsys, server, tasks, "--compare", str(then))
    rates = {row["name"]: row for row in found["comparison"]["rows"]}
    row = rates["output_tokens_per_s"]
    assert row["now"] == found["output_tokens_per_s"]
    assert row["ratio"] == pytest.approx(row["now"] / row["then"])
    # Another load is refused by name, and before anything is sent.
    monkeypatch.setattr(LoadClient, "ask", None)
    other = tmp_path / "other.jsonl"
    other.write_text(tasks.read_text() + "\n")
    for arguments, words in [
        (flags(server, tasks, "--compare", str(then), "--concurrency", "2"), "concurrency was 3 and is 2"),
        (flags(server, tasks, "--compare", str(then), "--rate", "9"), "mode was closed and is open"),
        (flags(server, tasks, "--compare", str(then), "--max-tokens", "5"), "max_tokens was 256 and is 5"),
        (flags(server, tasks, "--compare", str(then), "-t", "0.5"), "temperature was 0.0 and is 0.5"),
        (flags(server, other, "--compare", str(then)), "tasks_sha256 was"),
    ]:
        code, output, errors = call(capsys, *arguments)
        assert (code, output) == (1, "")
        assert words in errors


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_keeps_what_is_finished(server: LiveServer, folder: Path, as_json: bool) -> None:
    """A real SIGINT to a real process, which has three answers and waits for the fourth."""
    endless = folder / "endless.jsonl"
    entries = [
        {"task_id": f"e{n}", "category": "a", "prompt": f"Say {n}", "max_tokens": 1 if n < 3 else 1900}
        for n in range(4)
    ]
    endless.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    last = next(n for n in range(100) if chosen_tasks(read_tasks(endless), 4, 0, n)[1][-1].task_id == "e3")
    command = [sys.executable, "-c", "from forerun.cli import main; main()", "bench", "serve"]
    words = [server.url, "--tasks", str(endless), "--concurrency", "1", "--warmup", "0", "--max-tokens", "1900"]
    words += ["--seed", str(last), "--extra-body", '{"ignore_eos": true, "speculate": false}']
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    seen = server.engine.stats().speculation.emitted
    with subprocess.Popen(
        [*command, *words, *["--json"] * as_json], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        deadline = time.monotonic() + 60
        while server.engine.stats().speculation.emitted < seen + 20 and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, b"")
    if as_json:
        found = json.loads(output)
        assert (found["complete"], found["unfinished"], found["answered"]) == (False, 1, 3)
        assert "e3" not in {result["task_id"] for result in found["results"]}
    else:
        assert b"INTERRUPTED: 1 requests weren't finished" in output
    # What nobody waits for is given up.
    server.check_idle()


def test_an_interrupt_before_anything_is_finished(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(LoadClient, "ask", interrupted)
    assert call(capsys, *flags(server, tasks, "--concurrency", "1"))[:2] == (130, "")


def test_the_key(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_API_KEY", "wrong")
    code, output, errors = call(capsys, *flags(server, tasks))
    assert (code, output) == (1, "")
    assert "status 401: a valid API key is needed" in errors
    # With the model given, every request fails, which is a report and no success.
    code, output, errors = call(capsys, *flags(server, tasks, "-m", "tiny", "--json"))
    found = json.loads(output)
    assert code == 1
    assert (found["answered"], found["errors"]) == (0, {"http_401": N_TASKS})
    assert (found["first_token_ms"], found["output_tokens_per_s"]) == (None, 0.0)
    assert "wrong" not in output
    assert "ERRORS: 6 http_401: a valid API key is needed\n" in call(capsys, *flags(server, tasks, "-m", "tiny"))[1]
    monkeypatch.setenv("MY_KEY", KEY)
    code, output, _ = call(capsys, *flags(server, tasks, "--api-key-env", "MY_KEY"))
    assert code == 0
    assert "--api-key-env MY_KEY" in output
    assert KEY not in output


def test_errors_of_requests_are_counted(capsys: pytest.CaptureFixture[str], server: LiveServer, folder: Path) -> None:
    mixed = folder / "mixed.jsonl"
    entries = [
        {"task_id": "good", "category": "a", "prompt": "Say", "max_tokens": 3},
        {"task_id": "long", "category": "a", "prompt": "Say " * 3000, "max_tokens": 3},
    ]
    mixed.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    found = reported(capsys, server, mixed, "--warmup", "0", "--target-ttft-ms", "100000")
    assert (found["answered"], found["errors"]) == (1, {"http_400": 1})
    assert "context" in found["examples"]["http_400"]
    assert (found["goodput"]["met"], found["goodput"]["share"]) == (1, 0.5)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--rate", "1", "--concurrency", "1"], 2, "either --rate"),
        (["--rate", "0"], 2, "above 0"),
        (["--rate", "nan"], 2, "above 0"),
        (["--concurrency", "0"], 2, "--concurrency"),
        (["--concurrency", "1", "--api", "responses"], 2, "chat or completions"),
        (["--concurrency", "1", "--extra-body", "{"], 2, "no JSON"),
        (["--concurrency", "1", "--extra-body", "[1]"], 2, "expected a JSON object"),
        (["--concurrency", "1", "--extra-body", '{"n": 2}'], 1, "can't set n"),
        (["--concurrency", "1", "--compare", "/nowhere/at.json"], 1, "can't be read"),
        ([], 2, "either --rate"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, arguments: list[str], code: int, words: str
) -> None:
    found, output, errors = call(capsys, server.url, "--tasks", str(tasks), *arguments)
    assert (found, output) == (code, "")
    assert words in errors


def test_nobody_there(capsys: pytest.CaptureFixture[str], tasks: Path) -> None:
    code, output, errors = call(capsys, "http://127.0.0.1:9", "--tasks", str(tasks), "--concurrency", "1")
    assert (code, output) == (1, "")
    assert "http://127.0.0.1:9/v1/models doesn't answer" in errors
    code, _, errors = call(capsys, "127.0.0.1:9", "--tasks", str(tasks), "--concurrency", "1")
    assert code == 1
    assert "is no address" in errors


def test_without_httpx(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    monkeypatch.delitem(sys.modules, "forerun.measure.load_client")
    code, output, errors = call(capsys, *flags(server, tasks))
    assert (code, output) == (1, "")
    assert "pip install 'forerun[bench]'" in errors


class Terminal(io.StringIO):
    """What looks like a terminal."""

    def isatty(self) -> bool:
        return True


def test_the_bar_is_on_standard_error_and_only_on_a_terminal(
    capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", screen)
    found = reported_on(capsys, server, tasks)
    assert found["answered"] == N_TASKS
    assert f"{N_TASKS}/{N_TASKS}" in screen.getvalue()


def reported_on(capsys: pytest.CaptureFixture[str], server: LiveServer, tasks: Path) -> Mapping[str, Any]:
    assert cli.dispatch(["bench", "serve", *flags(server, tasks, "--json")]) == 0
    found: Mapping[str, Any] = json.loads(capsys.readouterr().out)
    return found


# The scripts


BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def overhead() -> Iterator[ModuleType]:
    yield from loaded(BENCH / "serve_overhead.py")


@pytest.fixture(scope="module")
def peers(overhead: ModuleType) -> Iterator[ModuleType]:
    assert overhead.__name__ == "serve_overhead", "the scripts import each other by name"
    for _ in loaded(BENCH / "peers.py"):
        yield from loaded(BENCH / "serve_peers.py")


def exchange(*times: float, tokens: int | None, **fields: Any) -> measure.Exchange:
    arrivals = tuple(measure.Arrival(at, None) for at in times)
    values = {"sent": 0.0, "ended": times[-1], "arrivals": arrivals, "n_events": len(times), "output_tokens": tokens}
    return measure.Exchange("t", "a", due=None, **{**values, **fields})


def test_the_rate_while_all_of_a_batch_decodes(overhead: ModuleType) -> None:
    # The first has two tokens a second from 1 on, the second one a second from 2 on; both stream from 2 to 5.
    first = exchange(1.0, 3.0, 5.0, tokens=9)
    second = exchange(2.0, 3.0, 4.0, 5.0, 6.0, tokens=5)
    assert overhead.rate_of_all([first, second]) == pytest.approx(3.0)
    assert overhead.rate_of_all([first]) == pytest.approx(2.0)
    with pytest.raises(overhead.ServeError, match="larger --max-tokens"):
        overhead.rate_of_all([first, exchange(5.0, 6.0, tokens=2)])


@pytest.mark.usefixtures("server")
def test_the_overhead_is_measured_against_a_real_server(folder: Path) -> None:
    command = [sys.executable, str(BENCH / "serve_overhead.py"), "-m", str(folder / "tiny.gguf"), "--rounds", "1"]
    command += ["--batch", "1,3", "--prompt-tokens", "20", "--max-tokens", "60", "--at-least", "1000", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FORERUN_CACHE": str(folder / "cache")}
    environment["FORERUN_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    # No share is that large, which is an error that comes with the figures.
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert [row["batch"] for row in found["rows"]] == [1, 3]
    for row in found["rows"]:
        assert len(row["round_shares"]) == 1
        assert row["share"] == pytest.approx(row["http_tokens_per_s"] / row["engine_tokens_per_s"])


def test_lengths_of_the_peers_answers(peers: ModuleType) -> None:
    ways = peers.Ways({}, [7, 9], 4)
    theirs = json.loads(ways.order("llama.cpp", Task("t", "a", "text", 2), "turn 1").body)
    assert (theirs["prompt"], theirs["max_tokens"]) == ("turn 1\ntext", 4)
    assert theirs["logit_bias"] == {"7": -1000.0, "9": -1000.0}
    ours = json.loads(ways.order("Forerun plain", Task("t", "a", "text", 2), "turn 1").body)
    assert (ours["ignore_eos"], ours["speculate"], ours["user"]) == (True, False, "turn 1")
    assert "speculate" not in json.loads(ways.order("Forerun", Task("t", "a", "text", 2), "turn 1").body)
    # Without usage, an answer that ended by its length has that many tokens; nothing else is believed.
    assert ways._checked("llama.cpp", exchange(1.0, tokens=None, finish_reason="length")).output_tokens == 4
    for wrong in (
        exchange(1.0, tokens=None, finish_reason="stop"),
        exchange(1.0, tokens=3, finish_reason="length"),
        exchange(1.0, tokens=4, finish_reason="length", error="cut_off"),
    ):
        with pytest.raises(peers.ServeError):
            ways._checked("Forerun", wrong)


def test_throughput_of_turns(peers: ModuleType) -> None:
    turns = peers.Turns()
    turns.add([exchange(1.0, 2.0, tokens=4), exchange(1.0, 4.0, tokens=4, sent=2.0)])
    turns.add([exchange(1.0, tokens=4)])
    turns.add([exchange(8.0, tokens=4)])
    row = turns.row()
    assert turns.rates == [2.0, 4.0, 0.5]
    assert row["output_tokens_per_s"] == 2.0
    assert row["requests"] == 4
    assert row["between_events_ms"]["p50"] == 2000.0
