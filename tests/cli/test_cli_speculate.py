"""`forerun bench speculate` and bench/peers_tasks.py: fair turns, no learning between runs, differences found."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.cells import cell_len

from forerun import Engine, SamplingParams, cli
from forerun.cli.bench_speculate import TaskRunner
from forerun.draft import registry
from forerun.draft.base import Drafter, DraftRow
from forerun.measure.tasks import Task
from reference.tiny import TinySpec, write_tiny_gguf

TASKS = [
    {"task_id": "e1", "category": "edit/one", "prompt": "a b a b a b a b a b", "max_tokens": 24},
    {"task_id": "e2", "category": "edit/one", "prompt": "the sea the sea the sea", "max_tokens": 20},
    {"task_id": "e3", "category": "edit/two", "prompt": "one two one two one two", "max_tokens": 24},
    {"question_id": 9, "category": "writing", "turns": ["Write on and on and on.", "more"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("speculate")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_tiny_gguf(folder / "tiny.gguf", TinySpec("llama", seed=5))


@pytest.fixture(scope="module")
def tasks(folder: Path) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return path


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FORERUN_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("FORERUN_CATALOG", raising=False)


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.dispatch(["bench", "speculate", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


def flags(model: Path, tasks: Path, *more: str) -> list[str]:
    return ["-m", str(model), "--tasks", str(tasks), "--max-tokens", "32", *more]


ROW = [
    "category", "tasks", "runs", "output_tokens", "decisions", "drafted", "proposed", "computed", "accepted", "emitted",
    "by_drafter", "off_seconds", "on_seconds", "draft_seconds", "forward_seconds", "verify_seconds", "schedule_seconds",
    "off_tokens_per_s", "on_tokens_per_s", "ratio", "ratio_median",
    "decode_ratio", "tokens_per_step", "acceptance", "wasted", "drafted_share", "positions", "off_p50_s", "off_p99_s",
    "on_p50_s", "on_p99_s", "p99_ratio", "identical",
]  # fmt: skip


@pytest.mark.parametrize("draft", ["lookup", "suffix"])
def test_the_report_as_json(capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, draft: str) -> None:
    arguments = flags(model, tasks, "--draft", draft, "--draft-len", "4", "--repeats", "2")
    code, output, errors = call(capsys, *arguments, "--json")
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert list(found) == [
        "setup", "date", "draft", "draft_len", "tasks_file", "tasks_sha256", "temperature", "max_tokens", "batch",
        "rounds", "isolation", "left_out", "complete", "rows", "results", "differences", "differing", "identical",
    ]  # fmt: skip
    assert (found["draft"], found["draft_len"], found["batch"], found["rounds"]) == (draft, "4", 1, 2)
    assert (found["left_out"], found["differing"], found["identical"]) == ([], [], True)
    assert (found["complete"], found["differences"]) == (True, [])
    assert abs(datetime.now(UTC) - datetime.fromisoformat(found["date"])) < timedelta(minutes=5)
    assert found["tasks_sha256"] == hashlib.sha256(tasks.read_bytes()).hexdigest()
    assert found["setup"]["sha256"] == hashlib.sha256(model.read_bytes()).hexdigest()
    assert "prefix cache off" in found["isolation"]
    assert found["setup"]["command"] == (
        f"forerun bench speculate -m {model} --tasks {tasks} --draft {draft} --draft-len 4 --max-tokens 32 "
        "--temperature 0 --batch 1 --repeats 2 --threads 1"
    )
    rows = {row["category"]: row for row in found["rows"]}
    assert list(rows) == ["edit", "edit/one", "edit/two", "chat", "all"]
    assert [list(row) for row in rows.values()] == [ROW] * 5
    assert [(row["tasks"], row["runs"]) for row in rows.values()] == [(3, 6), (2, 4), (1, 2), (1, 2), (4, 8)]
    # The random model ends no answer; its own cap counts, or the command line's where it is smaller.
    engine = Engine(model, kv_tokens=1024, threads=1, cache_weights=False, draft="none")
    lengths = {}
    for task, most in zip(TASKS, (24, 20, 24, 32), strict=True):
        text = str(task.get("prompt", "Write on and on and on."))
        output_ids = engine.chat([{"role": "user", "content": text}], SamplingParams(max_tokens=most))[0].token_ids
        lengths[text] = len(output_ids)
    assert rows["all"]["output_tokens"] == 2 * sum(lengths.values())
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["on_tokens_per_s"] / row["off_tokens_per_s"])
        assert row["tokens_per_step"] >= 1
        assert 0 < row["off_p50_s"] <= row["off_p99_s"]
        assert row["ratio"] == pytest.approx(row["off_seconds"] / row["on_seconds"])
        assert row["on_tokens_per_s"] == pytest.approx(row["emitted"] / row["on_seconds"])
        assert row["emitted"] == row["output_tokens"] >= row["decisions"]
        phases = [row[f"{phase}_seconds"] for phase in ("draft", "forward", "verify", "schedule")]
        assert min(phases) > 0
        assert sum(phases) <= row["on_seconds"]
        assert row["computed"] > row["output_tokens"] + row["proposed"]
        if not row["positions"]:
            assert row["acceptance"] is row["wasted"] is None
            assert (row["drafted"], row["proposed"], row["by_drafter"]) == (0, 0, {})
            continue
        for n, place in enumerate(row["positions"]):
            assert list(place) == ["proposed", "accepted", "share"]
            assert place["share"] == pytest.approx(place["accepted"] / row["drafted"])
            assert n == 0 or place["share"] <= row["positions"][n - 1]["share"]
        for name in ("proposed", "accepted"):
            assert row[name] == sum(place[name] for place in row["positions"])
            assert row[name] == sum(one[name] for one in row["by_drafter"].values())
        assert row["by_drafter"].keys() <= ({"suffix", "words"} if draft == "suffix" else {draft})
        assert row["acceptance"] == pytest.approx(row["accepted"] / row["proposed"])
        assert row["acceptance"] + row["wasted"] == pytest.approx(1)
    assert rows["all"]["positions"], "nothing was drafted"
    assert draft in rows["all"]["by_drafter"]
    results = found["results"]
    assert [result["task_id"] for result in results] == ["e1", "e2", "e3", "9"] * 2
    assert [result["category"] for result in results[:4]] == ["edit/one", "edit/one", "edit/two", "chat"]
    assert all(result["identical"] for result in results)
    assert sum(result["emitted"] for result in results) == rows["all"]["emitted"]
    for side in ("off_seconds", "on_seconds"):
        assert 0 < sum(result[side] for result in results) <= rows["all"][side]


def test_the_report_as_text(capsys: pytest.CaptureFixture[str], model: Path, tasks: Path) -> None:
    code, output, errors = call(capsys, *flags(model, tasks, "--draft", "lookup", "--draft-len", "4"))
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert lines[3].startswith("forerun bench speculate -m ")
    assert lines[4] == "draft lookup, length 4, greedy, batch 1, at most 32 tokens an answer, 1 round"
    assert max(len(line) for line in lines[4:]) <= 100
    head, times = (n for n, line in enumerate(lines) if "CATEGORY" in line)
    assert lines[head].split() == [
        "CATEGORY", "TASKS", "OFF", "TOKENS/S", "ON", "TOKENS/S", "RATIO", "DECODE", "TOKENS/STEP", "ACCEPTED", "SAME",
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines[times + 1 : times + 6]] == [
        ["edit", "3"], ["edit/one", "2"], ["edit/two", "1"], ["chat", "1"], ["all", "4"],
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[head + 1 : head + 6]] == ["edit", "edit/one", "edit/two", "chat", "all"]
    assert all(line.endswith(" yes") for line in lines[head + 1 : head + 6])
    assert lines[head + 6].startswith("ratio = time off / time on, prompts included; ")
    assert "A category a has the tasks of a/b, too." in output
    shares = next(n for n, line in enumerate(lines) if line.startswith("share of the drafted steps"))
    assert "(accepted_by_position / drafted;" in " ".join(lines[shares : shares + 2])
    found = json.loads(call(capsys, *flags(model, tasks, "--draft", "lookup", "--draft-len", "4", "--json"))[1])
    for row, line in zip(found["rows"], lines[shares + 2 : shares + 7], strict=True):
        percents = ", ".join(f"{place['accepted'] / row['drafted']:.0%}" for place in row["positions"])
        assert line == f"  {row['category']}: " + (f"{percents} (of {row['drafted']})" if percents else "no drafts")
    assert lines[-1] == "every text is the same with and without speculation"


class Spy:
    """Notes how requests are submitted, and may change their parameters."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, spoil: str = "") -> None:
        self.seen: list[tuple[bool, str | None, int]] = []
        submit = Engine.submit

        def spied(engine: Engine, prompt: Any, params: SamplingParams, **more: Any) -> Any:
            assert params.max_tokens is not None
            self.seen.append((more["speculate"], more["scope"], params.max_tokens))
            self.engine = engine
            if more["speculate"] and spoil and spoil in engine.tokenizer.decode(prompt):
                params = SamplingParams(max_tokens=params.max_tokens, logit_bias={11: 100.0})
            return submit(engine, prompt, params, **more)

        monkeypatch.setattr(Engine, "submit", spied)


def test_turns_scopes_and_caches(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    code, _, _ = call(capsys, *flags(model, tasks, "--draft", "lookup"))
    assert code == 0
    warm, timed = spy.seen[:2], spy.seen[2:]
    assert [(on, most) for on, _, most in warm] == [(False, 16), (True, 16)]
    assert [on for on, _, _ in timed] == [False, True, True, False, False, True, True, False]
    assert [most for _, _, most in timed] == [24, 24, 20, 20, 24, 24, 32, 32]
    scopes = [scope for _, scope, _ in spy.seen]
    assert None not in scopes
    assert len(set(scopes)) == len(scopes)
    assert spy.engine.prefix_cache is None


@pytest.mark.parametrize("as_json", [False, True])
def test_a_changed_text_is_found(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """The planted fault: with speculation, one task's tokens are chosen by other scores."""
    Spy(monkeypatch, spoil="the sea the sea")
    code, output, errors = call(capsys, *flags(model, tasks, "--draft", "lookup"), *["--json"] * as_json)
    assert (code, errors) == (1, "")
    if as_json:
        found = json.loads(output)
        assert (found["identical"], found["differing"]) == (False, ["e2"])
        [difference] = found["differences"]
        assert (difference["task_id"], difference["token"], difference["character"]) == ("e2", 0, 0)
        assert len(set(difference["on_text"])) == 1 < len(set(difference["off_text"]))
        assert [result["identical"] for result in found["results"]] == [True, False, True, True]
        assert {row["category"]: row["identical"] for row in found["rows"]} == {
            "edit": False, "edit/one": False, "edit/two": True, "chat": True, "all": False,
        }  # fmt: skip
    else:
        assert output.splitlines()[-1] == "TEXTS DIFFER: e2 (--json has both and where they part)"
        assert sum(line.endswith(" NO") for line in output.splitlines()) == 3


@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupt_keeps_what_is_finished(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    spy = Spy(monkeypatch)
    submit = Engine.submit

    def interrupted(*arguments: Any, **more: Any) -> Any:
        # Two for the warm-up, four for two whole groups, one for half a group.
        if len(spy.seen) == enough + 3:
            raise KeyboardInterrupt
        return submit(*arguments, **more)

    monkeypatch.setattr(Engine, "submit", interrupted)
    enough = 4
    code, output, _ = call(capsys, *flags(model, tasks, "--draft", "lookup"), *["--json"] * as_json)
    assert code == 130
    if as_json:
        found = json.loads(output)
        assert found["complete"] is False
        assert [result["task_id"] for result in found["results"]] == ["e1", "e2"]
        assert [row["category"] for row in found["rows"]] == ["edit", "edit/one"]
    else:
        assert "INTERRUPTED: only what was finished until then is counted\n" in output
        assert "chat" not in output
    # Before anything is finished there is nothing to print.
    spy.seen.clear()
    enough = 0
    assert call(capsys, *flags(model, tasks, "--draft", "lookup"))[:2] == (130, "")


def test_an_output_without_the_letters_gets_question_marks(model: Path, folder: Path) -> None:
    path = folder / "letters.jsonl"
    task = {"task_id": "a", "category": "編集/二つ" + "とても" * 9, "prompt": "one two", "max_tokens": 2}
    path.write_text(json.dumps(task, ensure_ascii=False), encoding="utf-8")
    command = [sys.executable, "-c", "from forerun.cli import main; main()", "bench", "speculate"]
    outputs = {}
    for encoding in ("cp1252", "utf-8"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([*command, *flags(model, path)], capture_output=True, env=environment, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
        outputs[encoding] = done.stdout.decode(encoding)
    assert "  ??/???" in outputs["cp1252"]
    # Long names are cut, and wide letters counted as the two columns that they take.
    table = [line for line in outputs["utf-8"].splitlines() if line.endswith((" yes", " SAME"))]
    assert len(table) == 3
    assert len({cell_len(line) for line in table}) == 1
    assert cell_len(table[0]) <= 100
    assert "編集/二つ" in table[2]
    assert table[2].count("...") == 1


def drafted(engine: Engine, runner: TaskRunner, task: Task) -> tuple[int, int]:
    counts = runner.trial([task], True).runs[0].counts
    engine.check_integrity()
    return counts.proposed, counts.accepted


def test_no_run_learns_from_another(model: Path) -> None:
    """The suffix drafter's shared store would know the whole answer the second time."""
    task = Task("t", "c", "Tell me about the sea.", 48)

    def engine() -> Engine:
        settings: dict[str, Any] = {"threads": 1, "cache_weights": False, "prefix_cache": False}
        return Engine(model, kv_tokens=1024, draft="suffix", draft_len=4, **settings)

    first = engine()
    runner = TaskRunner(first, SamplingParams())
    alone = drafted(first, runner, task)
    runner.trial([task], False)
    assert [drafted(first, runner, task) for _ in range(3)] == [alone] * 3
    # Without scopes of their own the runs do learn, so the check above can fail.
    second = engine()
    leaky = TaskRunner(second, SamplingParams())
    leaky._scopes = itertools.repeat("the same")
    assert drafted(second, leaky, task) == alone
    assert drafted(second, leaky, task)[1] > alone[1] + 20


def test_a_batch_is_answered_together(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    one = json.loads(call(capsys, *flags(model, tasks, "--draft", "lookup", "--json"))[1])
    before = len(spy.seen)
    arguments = flags(model, tasks, "--draft", "lookup", "--batch", "2", "--json")
    code, output, _ = call(capsys, *arguments)
    found = json.loads(output)
    assert (code, found["batch"]) == (0, 2)
    # e1 and e2 together, off and on, after the warm-up of the same two.
    assert [on for on, _, _ in spy.seen[before:]] == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [
        True, False, False, True,
    ]  # fmt: skip
    assert [row["output_tokens"] for row in found["rows"]] == [row["output_tokens"] for row in one["rows"]]


def test_sampled_texts_are_the_same_too(capsys: pytest.CaptureFixture[str], model: Path, tasks: Path) -> None:
    arguments = flags(model, tasks, "--draft", "suffix", "--temperature", "0.8", "--limit", "1", "--json")
    code, output, _ = call(capsys, *arguments)
    found = json.loads(output)
    assert (code, found["identical"], found["temperature"]) == (0, True, 0.8)
    assert [(row["category"], row["tasks"]) for row in found["rows"]] == [
        ("edit", 2), ("edit/one", 1), ("edit/two", 1), ("chat", 1), ("all", 3),
    ]  # fmt: skip


def test_tasks_that_do_not_fit_are_left_out_and_named(
    capsys: pytest.CaptureFixture[str], model: Path, folder: Path
) -> None:
    long = {"task_id": "long", "category": "c", "prompt": "word " * 200, "max_tokens": 8}
    path = folder / "long.jsonl"
    path.write_text("".join(json.dumps(task) + "\n" for task in (long, TASKS[0])))
    code, output, _ = call(capsys, *flags(model, path, "--draft", "lookup"))
    assert code == 0
    assert "left out, since the context can't hold them: long\n" in output
    path.write_text(json.dumps(long))
    code, output, errors = call(capsys, *flags(model, path, "--draft", "lookup"))
    assert (code, output) == (1, "")
    assert "no task fits the model's context of 512 tokens" in errors


def test_a_model_without_a_template_gets_plain_text(model: Path, folder: Path) -> None:
    spec = TinySpec("llama", seed=5, metadata={"tokenizer.chat_template": None})
    base = Engine(write_tiny_gguf(folder / "base.gguf", spec), kv_tokens=512, threads=1, cache_weights=False)
    task = Task("t", "c", "one two", 4)
    assert TaskRunner(base, SamplingParams()).prompt(task) == base.tokenizer.encode("one two")
    chat = Engine(model, kv_tokens=512, threads=1, cache_weights=False)
    assert TaskRunner(chat, SamplingParams()).prompt(task) == chat.chat_ids([{"role": "user", "content": "one two"}])


def test_drafts_that_are_always_wrong(capsys: pytest.CaptureFixture[str], model: Path, tasks: Path) -> None:
    arguments = flags(model, tasks, "--draft", "always-wrong", "--draft-len", "2", "--json")
    code, output, _ = call(capsys, *arguments)
    found = json.loads(output)
    assert (code, found["draft"]) == (0, "always-wrong")
    everything = found["rows"][-1]
    assert (everything["acceptance"], everything["wasted"], everything["tokens_per_step"]) == (0.0, 1.0, 1.0)
    # All but a request's first token, and its last, for which there is no room to draft.
    assert everything["drafted_share"] == pytest.approx(1 - 8 / everything["output_tokens"])


class Broken(Drafter):
    name = "broken"

    def propose(self, rows: Sequence[DraftRow]) -> list[Any]:  # noqa: ARG002
        raise OSError("out of ideas")


def test_a_drafter_that_fails_ends_the_benchmark(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Entry:
        name, value = "broken", "tests"

        def load(self) -> Any:
            return lambda _context: Broken()

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry()] * (group == registry.ENTRY_POINTS))
    code, output, errors = call(capsys, *flags(model, tasks, "--draft", "broken", "--draft-len", "4"))
    assert (code, output, errors.count("\n")) == (1, "", 1)
    assert "OSError: out of ideas" in errors


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--draft", "none"], 2, "none drafts nothing"),
        (["--draft", "psychic"], 1, "draft='psychic' is not known"),
        (["--draft-len", "x"], 2, "'x' is neither auto nor a whole number from 1 to 63"),
        (["--draft-len", "64"], 2, "'64' is neither auto nor a whole number from 1 to 63"),
        (["--limit", "0"], 2, "--limit"),
        (["--batch", "257"], 2, "--batch"),
        (["--temperature", "-1"], 2, "temperature=-1.0 is not allowed"),
        (["--tasks", "no/such/file"], 2, "no/such/file"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], model: Path, tasks: Path, arguments: list[str], code: int, complaint: str
) -> None:
    found, output, errors = call(capsys, *flags(model, tasks), *arguments)
    assert (found, output) == (code, "")
    assert complaint in errors
    assert errors.count("\n") == 1


def test_the_task_file_must_be_named(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    code, _, errors = call(capsys, "-m", str(model))
    assert code == 2
    assert "--tasks" in errors


@pytest.fixture(scope="module")
def peers_tasks() -> Iterator[ModuleType]:
    folder = Path(__file__).parents[2] / "bench"
    if not folder.exists():
        pytest.skip("bench/ isn't part of this tree")
    loaded = []
    try:
        for name in ("peers", "peers_tasks"):
            spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            loaded.append(name)
            spec.loader.exec_module(module)
        yield module
    finally:
        for name in loaded:
            del sys.modules[name]


def test_peers_answers_tasks_in_every_way(
    capsys: pytest.CaptureFixture[str], peers_tasks: ModuleType, model: Path, tasks: Path
) -> None:
    """Forerun in both seats: the whole comparison but for the other engine."""
    asked = {"model": str(model), "tasks": str(tasks), "limit": None, "max_tokens": 32, "threads": 1}
    asked |= {"draft": "lookup", "draft_len": 4}
    ways = [("llama.cpp", "plain"), ("forerun", "plain"), ("forerun", "speculation")]
    workers = {name: peers_tasks.Worker("forerun", sys.executable) for name in ("llama.cpp", "forerun")}
    try:
        setup, _ = (worker.ask("load_tasks", **asked) for worker in workers.values())
        tallies = peers_tasks.compare(workers, setup["tasks"], ways)
    finally:
        for worker in workers.values():
            worker.close()
    assert [task["task_id"] for task in setup["tasks"]] == ["e1", "e2", "e3", "9"]
    assert [task["max_tokens"] for task in setup["tasks"]] == [24, 20, 24, 32]
    about = {key: setup[key] for key in ("sha256", "cpu", "physical_cores", "threads")}
    about |= {"model": "m", "command": "c", "n_tasks": 4, "versions": {"forerun": "v"}}
    result = json.loads(json.dumps(peers_tasks.report(tallies, about)))
    assert result["differing"] == []
    assert set(result["same_greedy_answers"].values()) == {1.0}
    by_way = {(row["engine"], row["way"]): row for row in result["rows"]}
    assert list(by_way) == ways
    ours = by_way["forerun", "speculation"]
    assert ours["ratio"] == 1.0
    for row in by_way.values():
        assert row["tokens"] == ours["tokens"] > 60
        assert row["tokens_per_s"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["ratio"] == pytest.approx(ours["tokens_per_s"] / row["tokens_per_s"])
        assert row["tokens_per_s_after_first"] > 0
    assert result["ratio_to_fastest_llama_cpp"] == by_way["llama.cpp", "plain"]["ratio"]
    peers_tasks.print_table(result)
    assert "Forerun's texts are the same" in capsys.readouterr().out


def test_peers_tells_answers_that_differ(peers_tasks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def tally(seconds: float, *answers: list[int]) -> Any:
        found = peers_tasks.Tally()
        for n, tokens in enumerate(answers):
            found.add(f"t{n}", {"tokens": tokens, "seconds": seconds, "first_token_seconds": seconds / 2})
        return found

    tallies = {
        ("llama.cpp", "plain"): tally(2.0, [1, 2, 3, 4], [5]),
        ("llama.cpp", "lookup 2"): tally(1.0, [1, 2, 3, 4], [6]),
        ("forerun", "plain"): tally(2.0, [1, 2, 9, 4], [5]),
        ("forerun", "speculation"): tally(0.5, [1, 2, 9, 8], [5]),
    }
    setup = {"model": "m", "sha256": "0", "cpu": "c", "physical_cores": 1, "threads": 1, "versions": {}}
    result = peers_tasks.report(tallies, setup | {"command": "c", "n_tasks": 2})
    assert result["differing"] == ["t0"]
    assert result["ratio_to_fastest_llama_cpp"] == pytest.approx(2.0)
    # Three tokens after the first, in half a second and in a quarter.
    assert result["ratio_to_fastest_llama_cpp_after_first"] == pytest.approx(2.0)
    assert result["same_greedy_answers"]["llama.cpp plain"] == pytest.approx(3 / 5)
    assert result["same_greedy_answers"]["llama.cpp lookup 2"] == pytest.approx(2 / 5)
    peers_tasks.print_table(result)
    assert "FORERUN'S TEXTS DIFFER: t0" in capsys.readouterr().out
