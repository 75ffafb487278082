"""`forerun run` with drafts: marks in the text, the trace, counts, and what may not change."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun import Engine, SamplingParams, cli
from forerun.cli import draft_options, run_view
from forerun.cli.run_view import DraftMarks, Span, Trace
from forerun.draft import registry
from forerun.draft.base import MAX_NODES, Drafter, DraftRow
from forerun.engine.output import Piece, SpeculationStats, TokenOrigin
from forerun.engine.pace import Decision
from forerun.models.source import open_model
from forerun.models.tokenizer import Tokenizer
from reference.drafters import Adversary, Oracle
from reference.tiny import TinySpec, write_tiny_gguf

FORERUN = [sys.executable, "-c", "from forerun.cli import main; main()"]
ORIGINS: list[TokenOrigin] = ["target", "accepted", "correction", "bonus"]
PROMPT = "The sea"
TOKENS = 40
MARKS = re.compile(r"<[+!*]|[+!*]>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return str(write_tiny_gguf(folder / "tiny.gguf", TinySpec("llama", seed=5)))


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Tokenizer:
    with open_model(Path(model)) as source:
        return source.tokenizer()


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FORERUN_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for name in ("FORERUN_CATALOG", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@dataclass
class Entry:
    """An entry point of the group forerun.drafters."""

    name: str
    factory: Callable[[Any], Drafter]
    value: str = "tests"

    def load(self) -> Callable[[Any], Drafter]:
        return self.factory


class Broken(Drafter):
    """Raises as soon as it is asked."""

    name = "broken"

    def propose(self, rows: Sequence[DraftRow]) -> list[Any]:  # noqa: ARG002
        raise OSError("out of ideas")


@pytest.fixture
def known(model: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The greedy answer to `PROMPT`, and drafters that know it: "right", "wrong", "broken"."""
    engine = Engine(model, kv_tokens=1024, threads=1, cache_weights=False, draft="none")
    output = engine.generate(PROMPT, SamplingParams(max_tokens=TOKENS + 8, ignore_eos=True))[0]
    whole = [*output.prompt_token_ids, *output.token_ids]

    def truth(row: DraftRow) -> list[int]:
        return whole[len(row.tokens) :]

    entries = [
        Entry("right", lambda _context: Oracle(truth)),
        Entry("wrong", lambda _context: Adversary(truth, right=1)),
        Entry("broken", lambda _context: Broken()),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries if group == registry.ENTRY_POINTS else [])
    return list(output.token_ids[:TOKENS])


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.dispatch(["run", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


def flags(model: str, draft: str, *more: str) -> list[str]:
    return ["--raw", PROMPT, "-m", model, "--max-tokens", str(TOKENS), "--ignore-eos", "--draft", draft, *more]


@pytest.mark.parametrize("draft", ["suffix", "lookup", "right", "wrong"])
@pytest.mark.usefixtures("known")
def test_drafts_change_no_character(capsys: pytest.CaptureFixture[str], model: str, draft: str) -> None:
    plain = call(capsys, *flags(model, "none"))
    drafted = call(capsys, *flags(model, draft, "--draft-len", "3"))
    assert drafted[:2] == plain[:2]
    assert ", no drafts, " in plain[2]
    shown = call(capsys, *flags(model, draft, "--draft-len", "3", "--show-drafts"))
    assert MARKS.sub("", shown[1]) == plain[1]


@pytest.mark.usefixtures("known")
def test_the_statistics_say_what_became_of_drafts(capsys: pytest.CaptureFixture[str], model: str) -> None:
    # After the first token 39 more: in nine steps 3 + 1, in the last 2 + 1.
    _, _, right = call(capsys, *flags(model, "right", "--draft-len", "3"))
    assert re.search(r", draft tokens: (\d+) of \1 accepted, 3\.6 tokens a step, finish: length\n$", right), right
    # One right and two wrong in 18 steps, then with room for two, then for none.
    _, _, wrong = call(capsys, *flags(model, "wrong", "--draft-len", "3"))
    assert re.search(r", draft tokens: 19 of 56 accepted, 1\.9 tokens a step, finish: length\n$", wrong), wrong
    _, _, off = call(capsys, *flags(model, "right", "--no-speculate"))
    assert ", no drafts, finish" in off


def test_json_has_the_counts(capsys: pytest.CaptureFixture[str], model: str, known: list[int]) -> None:
    code, output, errors = call(capsys, *flags(model, "wrong", "--draft-len", "3", "--json"))
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert found["token_ids"] == known
    counts = found["speculation"]
    assert list(counts) == [
        "draft", "draft_len", "steps", "decisions", "drafted", "proposed", "computed", "accepted", "cut", "emitted",
        "proposed_by_position", "accepted_by_position", "drafted_by_length", "by_drafter", "draft_seconds",
        "forward_seconds", "verify_seconds", "schedule_seconds", "mask_seconds", "acceptance", "tokens_per_decision",
    ]  # fmt: skip
    assert (counts["draft"], counts["draft_len"]) == ("wrong", "3")
    assert counts["emitted"] == TOKENS == counts["accepted"] + counts["decisions"] - counts["cut"]
    assert counts["acceptance"] == pytest.approx(counts["accepted"] / counts["proposed"])
    assert counts["tokens_per_decision"] == pytest.approx(TOKENS / counts["decisions"])
    assert counts["accepted_by_position"][0] == counts["accepted"] > 0
    assert counts["by_drafter"] == {
        "adversary": {name: counts[of] for name, of in (("drafts", "drafted"), ("proposed",) * 2, ("accepted",) * 2)}
    }
    plain = json.loads(call(capsys, *flags(model, "none", "--json"))[1])["speculation"]
    assert plain["acceptance"] is None
    assert plain["proposed"] == 0


def test_marks_say_where_tokens_came_from(
    capsys: pytest.CaptureFixture[str], model: str, known: list[int], tokenizer: Tokenizer
) -> None:
    _, right, errors = call(capsys, *flags(model, "right", "--draft-len", "3", "--show-drafts"))
    assert errors.startswith("drafts: <+accepted+> <!correction!> <*bonus*>, unmarked: a step without a draft\n")
    assert right.count("<+") > 5
    assert "<*" in right
    assert "<!" not in right
    # What is unmarked is the first token's.
    assert re.sub(r"<\+.*?\+>|<\*.*?\*>", "", right, flags=re.DOTALL).rstrip("\n") == tokenizer.decode(known[:1])
    _, wrong, _ = call(capsys, *flags(model, "wrong", "--draft-len", "3", "--show-drafts"))
    assert wrong.count("<!") > 5
    assert "<*" not in wrong


@pytest.mark.usefixtures("known")
def test_the_trace_has_a_line_a_step(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, output, errors = call(capsys, *flags(model, "wrong", "--draft-len", "3", "--trace"))
    plain = call(capsys, *flags(model, "none"))[1]
    assert (code, output) == (0, plain)
    lines = [line for line in errors.splitlines() if line.startswith("step at ")]
    pattern = re.compile(r"step at (\d+): length (\d+) \(fixed at 3\)(?:, accepted (\d+))?")
    steps = [pattern.fullmatch(line) for line in lines]
    assert all(steps), lines
    found = [tuple(int(number) for number in step.groups("0")) for step in steps if step is not None]
    # Each step begins where the one before has ended: its accepted tokens and one more.
    n_prompt = json.loads(call(capsys, *flags(model, "none", "--json"))[1])["prompt_tokens"]
    assert found[0][0] == n_prompt + 1
    assert [at + accepted + 1 for at, _, accepted in found[:-1]] == [at for at, _, _ in found[1:]]
    assert {accepted for _, _, accepted in found[:-1]} == {1}


@pytest.mark.usefixtures("known")
def test_the_trace_of_auto_shows_what_was_weighed(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, _, errors = call(capsys, *flags(model, "right", "--trace"))
    assert code == 0
    rate = r"[\d.]+/s"
    weighed = rf"expected [\d.]+ tokens in [\d.]+ ms \({rate}; without {rate}\), accepted \d+"
    line = re.compile(rf"step at \d+: length \d+( of \d+ proposed)?( \([^()]+\))?(, {weighed})?")
    *steps, _statistics = errors.splitlines()
    assert len(steps) > 1
    assert all(line.fullmatch(step) for step in steps), steps


@pytest.mark.usefixtures("known")
def test_a_broken_drafter_costs_no_answer(capsys: pytest.CaptureFixture[str], model: str) -> None:
    plain = call(capsys, *flags(model, "none"))
    code, output, errors = call(capsys, *flags(model, "broken", "--draft-len", "3"))
    assert (code, output) == plain[:2]
    first, second = errors.splitlines()
    assert "the drafter 'broken' failed and is turned off" in first
    assert "OSError: out of ideas" in first
    assert ", no drafts, " in second


def test_penalties_and_verification_reach_the_engine(capsys: pytest.CaptureFixture[str], model: str) -> None:
    engine = Engine(model, kv_tokens=1024, threads=1, cache_weights=False, draft="none")
    ids: list[list[int]] = []
    for field, value in (("repetition_penalty", 5.0), ("presence_penalty", 2.0), ("frequency_penalty", -2.0)):
        params = SamplingParams(max_tokens=24, temperature=0.7, seed=3, **{field: value})
        expected = list(engine.generate(PROMPT, params)[0].token_ids)
        option = "--" + field.replace("_", "-")
        arguments = ["--raw", PROMPT, "-m", model, "--max-tokens", "24", "-t", "0.7", "--seed", "3", option, str(value)]
        _, output, _ = call(capsys, *arguments, "--json")
        assert json.loads(output)["token_ids"] == expected
        ids.append(expected)
    assert len({tuple(one) for one in ids}) == 3, "these penalties change nothing"
    code, _, _ = call(capsys, "--raw", PROMPT, "-m", model, "--max-tokens", "4", "-t", "1", "--verify", "rejection")
    assert code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--draft-len", "many"], 2, "'many' is neither auto nor a whole number"),
        (["--draft-len", "-1"], 2, "--draft-len"),
        (["--draft-len", "0"], 2, "'0' is neither auto nor a whole number from 1 to 63"),
        (["--draft-len", "64"], 2, "'64' is neither auto nor a whole number from 1 to 63"),
        (["--draft", "psychic"], 1, "draft='psychic' is not known; expected one of none, lookup, suffix, model:NAME, "),
        (["--draft", "model:"], 1, "draft='model:' is not allowed"),
        (["--verify", "maybe"], 2, "verify='maybe' is not allowed"),
        (["--frequency-penalty", "3"], 2, "frequency_penalty=3.0 is not allowed"),
        (["--show-drafts", "--json"], 2, "--show-drafts marks the text as it streams"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], code: int, complaint: str
) -> None:
    found, output, errors = call(capsys, "x", "-m", model, *arguments)
    assert (found, output) == (code, "")
    assert complaint in errors
    assert errors.count("\n") == 1


def on_terminal(*arguments: str, separate_errors: bool = False, **environment: str) -> tuple[str, str]:
    """What a terminal shows of a run, and what is on standard error where that goes elsewhere."""
    master, slave = pty.openpty()
    errors = subprocess.PIPE if separate_errors else slave
    with subprocess.Popen(
        [*FORERUN, "run", *arguments], stdin=slave, stdout=slave, stderr=errors, env={**os.environ, **environment}
    ) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            shown += piece
        told = process.stderr.read() if process.stderr is not None else b""
    os.close(master)
    return shown.decode().replace("\r\n", "\n"), told.decode()


REPEATS = ["--raw", "a b a b a b a b a b a b", "--max-tokens", "60", "--ignore-eos"]
MARKED = [*REPEATS, "--draft", "lookup", "--draft-len", "4", "--show-drafts"]


def test_a_terminal_gets_colours(capsys: pytest.CaptureFixture[str], model: str) -> None:
    _, plain, _ = call(capsys, *REPEATS, "-m", model)
    shown, told = on_terminal(*MARKED, "-m", model, separate_errors=True)
    assert "\x1b[33m" in shown, "this text corrects no draft"
    assert "<!" not in shown
    # A terminal that isn't where the answer goes is not coloured.
    assert "\x1b" not in told
    assert len(re.sub(r"\x1b\[\d+m", "", shown)) == len(plain)
    # Colours are closed where they are opened.
    assert re.fullmatch(r"([^\x1b]|\x1b\[3[236]m[^\x1b]+\x1b\[0m)*", shown)


def test_no_colour_where_it_is_not_wanted(model: str) -> None:
    shown, _ = on_terminal(*MARKED, "-m", model, separate_errors=True, NO_COLOR="1")
    assert "\x1b" not in shown
    assert "<!" in shown


def test_on_one_terminal_the_trace_comes_after_the_answer(model: str) -> None:
    shown, _ = on_terminal(*MARKED, "-m", model, "--trace", NO_COLOR="1")
    lines = shown.splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith("step at "))
    steps = [line.startswith("step at ") for line in lines[first:]]
    assert steps == [True] * (len(steps) - 1) + [False]
    assert not any("step at" in line for line in lines[:first])


def test_colours_and_dim_are_left_out_where_they_are_not_understood(model: str) -> None:
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        shown, _ = on_terminal(*MARKED, "-m", model, **environment)
        assert "\x1b" not in shown
        assert "<!" in shown
        assert "draft tokens: " in shown
    shown, _ = on_terminal(*MARKED, "-m", model, TERM="xterm")
    assert "\x1b[2m" in shown, "dim is never shown, so the check above can't fail"


def test_into_one_pipe_the_trace_comes_after_the_answer(model: str) -> None:
    command = [*FORERUN, "run", *REPEATS, "--draft", "lookup", "--draft-len", "4", "--trace", "-m", model]
    apart = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, check=True)
    together = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=True
    )
    *steps, _statistics = apart.stderr.splitlines()
    assert len(steps) > 10
    assert together.stdout.startswith(apart.stdout + b"\n".join(steps) + b"\n")


@pytest.mark.parametrize("arguments", [["--draft", "none"], ["--no-speculate"]])
def test_without_drafts_the_trace_says_why(
    capsys: pytest.CaptureFixture[str], model: str, arguments: list[str]
) -> None:
    code, _, errors = call(capsys, *REPEATS, "-m", model, "--trace", *arguments)
    assert code == 0
    assert errors.splitlines()[0] == f"nothing is drafted: {' '.join(arguments)}"
    assert "step at" not in errors


def test_no_speculation_loads_no_draft_model(
    capsys: pytest.CaptureFixture[str], model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    make = Engine.__init__

    def spied(engine: Engine, *arguments: Any, **settings: Any) -> None:
        asked.append(settings["draft"])
        make(engine, *arguments, **settings)

    monkeypatch.setattr(Engine, "__init__", spied)
    code, output, _ = call(capsys, *REPEATS, "-m", model, "--draft", f"model:{model}", "--no-speculate", "--json")
    assert (code, asked) == (0, ["none"])
    assert json.loads(output)["speculation"]["draft"] == "none"


def test_an_unknown_drafter_is_refused_before_a_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = call(capsys, "x", "-m", "no-such-model", "--draft", "psychic")
    assert code == 1
    assert "draft='psychic' is not known" in errors


@pytest.mark.usefixtures("known")
def test_json_has_the_whole_trace(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, output, errors = call(capsys, *flags(model, "wrong", "--draft-len", "3", "--trace", "--json"))
    assert (code, errors) == (0, "")
    found = json.loads(output)
    assert sum(step["accepted"] for step in found["trace"]) == found["speculation"]["accepted"] > 10
    assert sum(step["length"] for step in found["trace"]) == found["speculation"]["proposed"]
    assert "trace" not in json.loads(call(capsys, *flags(model, "wrong", "--json"))[1])


def piece(text: str, ids: Sequence[int] = (), origins: Sequence[TokenOrigin] = (), *decisions: Decision) -> Piece:
    return Piece(text, tuple(ids), origins=tuple(origins), decisions=decisions)


def test_a_character_belongs_to_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é🙂x")
    emoji = tokenizer.encode("🙂")
    assert len(emoji) == 3, "the emoji is one token or two; choose another"
    marks = DraftMarks(tokenizer)
    origins: list[TokenOrigin] = ["accepted", "accepted", "correction", "bonus", "target"]
    assert len(ids) == len(origins)
    # The emoji's bytes come in two steps; the piece without it, first.
    assert marks.spans(piece("é", ids[:2], origins[:2])) == [Span("é", "accepted")]
    assert marks.spans(piece("🙂x", ids[2:], origins[2:])) == [Span("🙂", "bonus"), Span("x", "target")]


def test_text_that_was_held_back_keeps_its_origin(tokenizer: Tokenizer) -> None:
    marks = DraftMarks(tokenizer)
    ids = tokenizer.encode("abc")
    assert len(ids) == 3
    # "bc" might have begun a stop string; at the end "c" is cut off.
    assert marks.spans(piece("a", ids, ["accepted", "correction", "bonus"])) == [Span("a", "accepted")]
    assert marks.spans(piece("b")) == [Span("b", "correction")]


def test_what_an_unfinished_character_leaves_is_shown(tokenizer: Tokenizer) -> None:
    marks = DraftMarks(tokenizer)
    ids = tokenizer.encode("x🙂")[:3]
    found = marks.spans(piece("x\ufffd", ids, ["target", "correction", "accepted"]))
    assert found == [Span("x", "target"), Span("\ufffd", "accepted")]


@given(st.data())
def test_marks_never_change_the_text(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Any tokens, also such that break characters apart, in any steps, released as late as you like."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    whole = tokenizer.decode(ids)
    released, at, shown = 0, 0, ""
    marks = DraftMarks(tokenizer)
    while at < len(ids):
        step = ids[at : at + data.draw(st.integers(1, 5))]
        at += len(step)
        ready = len(tokenizer.decode(ids[:at]).rstrip("\ufffd"))
        until = len(whole) if at == len(ids) else data.draw(st.integers(released, max(released, ready)))
        origins = [data.draw(st.sampled_from(ORIGINS)) for _ in step]
        spans = marks.spans(piece(whole[released:until], step, origins))
        assert all(span.text for span in spans)
        shown += "".join(span.text for span in spans)
        released = until
    assert shown == whole


def test_marks_are_closed_and_target_text_is_bare() -> None:
    for colour in (False, True):
        assert run_view.marked(Span("a", "target"), colour=colour) == "a"
        for origin in ORIGINS[1:]:
            shown = run_view.marked(Span("a", origin), colour=colour)
            assert len(shown) > 3
            assert shown.endswith("\x1b[0m") == colour


def test_a_trace_line_says_what_was_weighed() -> None:
    trace = Trace(10)
    options = ((0, 1.0, 0.02), (1, 1.9, 0.0204), (2, 2.9, 0.025), (3, 4.0, 0.4))
    first = Decision(1, 11, 2, options, "most tokens per second")
    second = Decision(1, 14, 0, options, "no draft is worth its time")
    third = Decision(1, 15, 0, options[:1], "resting after losses")
    fourth = Decision(1, 16, 3, options, "a probe")
    assert trace.lines(piece("a", [1], ["target"])) == []
    origins: list[TokenOrigin] = ["accepted", "accepted", "correction", "target", "target"]
    lines = trace.lines(piece("b", [1, 2, 3, 4, 5], origins, first, second, third))
    lines += trace.lines(piece("b", [6], ["correction"], fourth))
    assert lines == [
        "step at 11: length 2 of 3 proposed, expected 2.9 tokens in 25.0 ms (116.0/s; without 50.0/s), accepted 2",
        "step at 14: length 0 of 3 proposed (no draft is worth its time; without 50.0/s)",
        "step at 15: length 0 (drafts cost more time than they won)",
        "step at 16: length 3 of 3 proposed (a probe), expected 4.0 tokens in 400 ms (10.0/s; without 50.0/s), "
        "accepted 0",
    ]
    found = trace.describe()
    assert [(one["position"], one["length"], one["accepted"]) for one in found] == [
        (11, 2, 2), (14, 0, 0), (15, 0, 0), (16, 3, 0),
    ]  # fmt: skip
    assert found[0]["options"] == [
        {"length": length, "expected_tokens": tokens, "expected_seconds": seconds}
        for length, tokens, seconds in options
    ]


def test_a_fixed_length_without_a_proposal_says_so() -> None:
    fixed = [Decision(1, 2, 0, (), "fixed at 4"), Decision(1, 3, 4, (), "fixed at 4")]
    assert Trace(1).lines(piece("ab", [1, 2], ["target", "target"], *fixed)) == [
        "step at 2: length 0 (nothing proposed)",
        "step at 3: length 4 (fixed at 4), accepted 0",
    ]


@pytest.mark.parametrize(
    ("decisions", "why"),
    [
        ([], None),
        ([Decision(1, 2, 0, (), "fixed at 4"), Decision(1, 3, 0, (), "nothing proposed")], "nothing proposed"),
        ([Decision(1, 2, 0, (), "nothing proposed"), Decision(1, 3, 0, (), "resting after losses")], "none was worth"),
        ([Decision(1, 2, 0, (), "the drafter's time isn't worth it")], "none was worth its time"),
        ([Decision(1, 2, 0, (), "no draft is worth its time"), Decision(1, 3, 1, (), "a probe")], None),
        ([Decision(1, 2, 0, (), "nothing proposed"), Decision(1, 3, 0, (), "something else")], None),
    ],
)
def test_why_nothing_was_drafted(decisions: list[Decision], why: str | None) -> None:
    trace = Trace(1)
    trace.lines(piece("ab", [1, 2], ["target", "target"], *decisions))
    found = trace.why_nothing
    assert found == why if why is None else found is not None and found.startswith(why)
    assert run_view.summary(SpeculationStats(), found) == ("no drafts" if why is None else f"no drafts ({found})")


def test_nothing_counted_is_no_data() -> None:
    assert run_view.summary(SpeculationStats()) == "no drafts"
    assert run_view.summary(SpeculationStats(proposed=4, accepted=0, decisions=3, emitted=3)) == (
        "draft tokens: 0 of 4 accepted, 1.0 tokens a step"
    )
    found = run_view.describe("none", "auto", SpeculationStats())
    assert found["acceptance"] is found["tokens_per_decision"] is None


def test_the_default_drafter_and_the_longest_draft_are_the_engines() -> None:
    assert draft_options.MAX_DRAFT == MAX_NODES
    assert inspect.signature(Engine).parameters["draft"].default == draft_options.DEFAULT_DRAFT
