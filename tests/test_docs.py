"""What docs/ shows is run, so that it can't rot: examples with their output, traces with their counts, links."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from forerun import Engine, SamplingParams
from forerun.cli import dispatch
from forerun.draft.base import DraftRow
from forerun.draft.combined import CombinedDrafter
from forerun.draft.lookup import PromptLookup
from forerun.draft.model import ModelDrafter
from forerun.draft.registry import ENTRY_POINTS
from forerun.draft.suffix import LENGTHS, SuffixDrafter
from forerun.engine import acceptance, auto, goodput
from forerun.engine.output import SpeculationStats
from forerun.sample.noise import gumbel
from forerun.sample.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_LENGTH
from reference.bigram import write_bigram_gguf
from reference.drafters import Scripted
from reference.tiny import TinySpec, write_tiny_gguf

DOCS = Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WITH_EXAMPLES = [
    "beam-search.md",
    "constraints.md",
    "counting.md",
    "draft-length.md",
    "drafting.md",
    "exactness.md",
    "measuring-a-server.md",
    "plan-calibrate.md",
    "plan-capacity.md",
    "plan-catalog.md",
    "plan-claim.md",
    "plan-export.md",
    "plan-policy.md",
    "plan-speculate.md",
    "plan-tree.md",
    "plan-worked-numbers.md",
    "plan.md",
    "sampling.md",
    "step-time.md",
    "verification.md",
]


def fences(page: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def tables(page: str) -> list[list[dict[str, str]]]:
    """The page's tables, each a list of rows by column name."""
    found: list[list[dict[str, str]]] = []
    for block in re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), flags=re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append([dict(zip(lines[0], line, strict=True)) for line in lines[2:]])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stands for the reader's own model in the examples."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("llama", layers=1))


def run_examples(page: str, text: str, model: Path) -> None:
    """Runs a page's Python blocks in one namespace; a text block right after one has to be its output."""
    examples = list(re.finditer(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", text, re.DOTALL | re.MULTILINE))
    assert examples
    namespace: dict[str, object] = {"__name__": "docs", "model": model}
    for example in examples:
        line = text.count("\n", 0, example.start(1))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + example[1], page, "exec"), namespace)
        if example[2] is not None:
            assert printed.getvalue() == example[2], f"{page}:{line + 1} prints something else"


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_python_examples_run_and_print_what_is_shown(
    page: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    run_examples(page, (DOCS / page).read_text(), model)


def test_another_output_than_the_shown_one_is_noticed(model: Path) -> None:
    with pytest.raises(AssertionError, match="page:2 prints"):
        run_examples("page", "```python\nprint(1)\n```\n\n```text\n2\n```\n", model)


def test_every_page_with_an_example_is_tested() -> None:
    assert sorted(page.name for page in PAGES if "```python" in page.read_text()) == WITH_EXAMPLES


def test_links_lead_somewhere_and_every_page_is_in_the_index() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if not target.startswith("http"):
                path, _, anchor = target.partition("#")
                file = page.parent / path if path else page
                assert file.exists(), f"{page.name} links to {target}"
                if anchor:
                    titles = re.findall(r"^#+ (.+)$", file.read_text(), flags=re.MULTILINE)
                    assert anchor in {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
    listed = set(re.findall(r"\]\(([\w-]+\.md)\)", (DOCS / "README.md").read_text()))
    assert listed == {page.name for page in PAGES} - {"README.md"}


def test_files_that_the_pages_name_exist() -> None:
    root = DOCS.parent
    for page in PAGES:
        for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.(?:py|cpp|inc|hpp|md))`", page.read_text()):
            assert any((base / name).exists() for base in (root, root / "src" / "forerun")), f"{page.name}: {name}"


PROMPT = (198, 199, 200)
COUNTED = ("proposed", "computed", "accepted", "cut", "emitted")
TRACES = [table for table in tables("counting.md") if "step" in table[0]]


def unquoted(cell: str) -> str:
    return cell.strip("`")


def added(after: SpeculationStats, before: SpeculationStats | None) -> dict[str, int]:
    names = (*COUNTED, "steps", "decisions", "drafted")
    return {name: getattr(after, name) - (getattr(before, name) if before else 0) for name in names}


@pytest.fixture(scope="module")
def alphabet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of the traces: a letter follows the other, and the full stop ends the text."""
    return write_bigram_gguf(
        tmp_path_factory.mktemp("model") / "alphabet.gguf",
        [PROMPT[-1], *b"abcdefghijk.mnopq"],
        metadata={"tokenizer.ggml.eos_token_id": ord(".")},
    )


def check_trace(alphabet: Path, table: list[dict[str, str]], params: SamplingParams) -> None:
    """Runs the trace's drafts through an engine and compares every row of the table."""
    *steps, total = table
    text = [unquoted(row["output"]) for row in steps]
    # What is drafted after a letter; the prompt's step doesn't draft.
    drafts = {ord(text[i][-1]): unquoted(row["draft"]).encode() for i, row in enumerate(steps[1:])}
    for row in steps[1:]:
        assert len(unquoted(row["draft"])) == int(row["proposed"])

    def script(row: DraftRow) -> list[int]:
        return list(drafts.get(row.tokens[-1], b""))

    engine = Engine(alphabet, kv_tokens=256, threads=1, cache_weights=False, draft=Scripted(script), draft_len=4)
    handle = engine.submit(PROMPT, params)
    before: SpeculationStats | None = None
    for row in steps:
        assert engine.step()
        stats = handle.live.tally.stats()
        change = added(stats, before)
        before = stats
        assert {name: change[name] for name in COUNTED} == {name: int(row[name]) for name in COUNTED}, row
        assert change["decisions"] == change["steps"] == 1
        assert change["drafted"] == (change["proposed"] > 0)
        assert change["computed"] - change["proposed"] == int(row["known"])
        n = change["emitted"]
        assert bytes(handle.live.request.tokens[-n:]).decode() == unquoted(row["output"])
        kind, own = row["own token"].split()
        piece = handle.live.take_piece()
        if piece is not None and len(piece.token_ids) == n:
            kept = min(n, change["accepted"])
            assert piece.origins == ("accepted",) * kept + (kind,) * (n - kept)
        if not change["cut"]:
            assert unquoted(own) == unquoted(row["output"])[-1]
    output = handle.result()
    assert not engine.step()
    stats = output.stats.speculation
    assert {name: getattr(stats, name) for name in COUNTED} == {name: int(total[name]) for name in COUNTED}
    assert sum(int(row["known"]) for row in steps) == int(total["known"])
    assert bytes(output.token_ids).decode() == unquoted(total["output"])
    assert total["what happens"] == f"finish reason `{output.finish_reason}`"
    assert added(engine.stats().speculation, None) == added(stats, None)


def test_the_trace_is_what_the_engine_counts(alphabet: Path) -> None:
    first, second = TRACES
    check_trace(alphabet, first, SamplingParams(max_tokens=32))
    check_trace(alphabet, second, SamplingParams(max_tokens=6))


@pytest.mark.parametrize("column", [*COUNTED, "known"])
def test_a_wrong_count_in_the_trace_is_noticed(alphabet: Path, column: str) -> None:
    changed = [dict(row) for row in TRACES[0]]
    changed[4][column] = str(int(changed[4][column]) + 1)
    with pytest.raises(AssertionError):
        check_trace(alphabet, changed, SamplingParams(max_tokens=32))


def test_what_the_page_says_about_its_trace() -> None:
    """The figures of the text around the tables."""
    text = (DOCS / "counting.md").read_text()
    steps = TRACES[0][:-1]
    total = TRACES[0][-1]
    decisions = len(steps)
    assert f"{total['accepted']} + {decisions} - {total['cut']} = {total['emitted']}" in text
    assert f"{total['known']} + {total['proposed']} = {total['computed']}" in text
    accepted = [int(row["accepted"]) for row in steps if int(row["proposed"])]
    by_position = [sum(n > depth for n in accepted) for depth in range(4)]
    assert f"{', '.join(map(str, by_position))} in the first table" in text
    assert f"`drafted` ({len(accepted)})" in text


def test_every_counter_of_the_page_exists() -> None:
    fields = set(SpeculationStats.__dataclass_fields__)
    named = tables("counting.md")[0]
    assert {unquoted(row["count"]) for row in named} <= fields
    assert {
        name
        for name in fields
        if not name.endswith(("_seconds", "_by_position", "_by_length")) and name != "by_drafter"
    } == {unquoted(row["count"]) for row in named}


def test_the_drafter_of_the_page_is_found_by_its_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The example and its entry point, as an installed package."""
    code = next(block for kind, block in fences("drafting.md") if kind == "python" and "(Drafter)" in block)
    project = tomllib.loads(next(block for kind, block in fences("drafting.md") if kind == "toml"))
    [(name, target)] = project["project"]["entry-points"][ENTRY_POINTS].items()
    package = target.partition(":")[0]
    (tmp_path / f"{package}.py").write_text(code)
    info = tmp_path / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine = Engine(model, kv_tokens=256, threads=1, cache_weights=False, draft=name, draft_len=4)
    [plain] = engine.generate(["ab ab ab"], params, speculate=False)
    [output] = engine.generate(["ab ab ab"], params)
    assert output.token_ids == plain.token_ids
    assert output.stats.speculation.by_drafter.keys() == {name}


def prose(page: str) -> str:
    """The page in one line, for looking up what its sentences say."""
    return " ".join((DOCS / page).read_text().split())


def short(number: float, digits: int) -> str:
    """As the pages write numbers below 1."""
    return f"{number:.{digits}f}".removeprefix("0")


def test_the_figures_of_the_verification_page() -> None:
    text = prose("verification.md")
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.3, 0.2, 0.5])
    assert "With p = (.5, .3, .2) and q = (.3, .2, .5)" in text
    tv = float(np.maximum(p - q, 0).sum())
    shared = [1 / sum(max(p[j] / p[i], q[j] / q[i]) for j in range(3)) for i in range(3)]
    both = " + ".join(short(each, 3) for each in shared)
    bound = short((1 - tv) / (1 + tv), 3)
    assert f"TV is {short(tv, 1)}, the bound {bound}, the true value {both} = {short(sum(shared), 3)}" in text
    # Counted, with the noise itself: the standard deviation is .0033.
    noise = [gumbel(3, position, np.arange(3)) for position in range(20_000)]
    agreed = np.mean([np.argmax(np.log(p) + g) == np.argmax(np.log(q) + g) for g in noise])
    assert abs(agreed - sum(shared)) < 0.0165
    residual = np.maximum(p - q, 0) / tv
    left = q * [1, 1, 0] / (q[0] + q[1])
    second = float(np.minimum(residual, left).sum())
    pair = f"{short(1 - tv, 1)} + {short(tv, 1)} * {short(second, 3)} = {short(1 - tv + tv * second, 2)}"
    assert f"= {short(second, 3)}, so one of two stays with {pair}." in text
    assert f"K = 4 give {sum(0.8**k for k in range(5)):.2f}" in text
    # A draft of token 0 alone is verified, drawn with .8 where the target has .5.
    biased = 0.8 * min(1, 0.5 / 0.8) + 0.2 * 0.5
    assert f".8 * .625 + .2 * .5 = {short(biased, 1)}." in text


def test_the_constants_that_the_pages_name_are_those_of_the_code() -> None:
    text = prose("draft-length.md")
    assert f"promise {goodput.MARGIN:.1%} more than none" in text
    assert f"less than {auto._FREE:.1%} of the step" in text
    assert f"from {auto._FIRST_GAP:.0f} steps to {auto._MAX_GAP:.0f}" in text
    assert f"starts with at most {auto._ADVANCE}, gets {auto._CREDIT} a step" in text
    assert acceptance._STATES == (1 / 50, 1 / 4, 2, 40)
    assert "1/50, 1/4, 2 or 40 times" in text
    assert f"{acceptance._SHARE:.0%} of it ({acceptance._DRIFT:.1%} after a step without a trial) returns" in text
    assert acceptance._PRIOR == 3
    assert "worth three trials" in text
    text = prose("drafting.md")
    expected: dict[type, dict[str, float]] = {
        PromptLookup: {"min_match": 2, "max_match": 4},
        SuffixDrafter: {"min_survival": 0.1, "shared_bytes": 64 << 20, "own_limit": 64, "shared_limit": 32},
        ModelDrafter: {"min_confidence": 0.05},
        CombinedDrafter: {"confident": 0.3},
    }
    for drafter, values in expected.items():
        defaults = inspect.signature(drafter).parameters
        assert {name: defaults[name].default for name in values} == values
    for phrase in (
        "the last 4 down to 2 tokens",
        "at least a 10% chance",
        "at most 64 MiB",
        "64 occurrences of the own text and 32 of",
        "confidence under 5%",
        "a confidence of at least 0.3",
    ):
        assert phrase in text
    assert LENGTHS == (1, 2, 4, 8, 16)
    assert "the last 16, 8, 4, 2 and 1 tokens" in text


def test_the_rates_of_the_counting_page() -> None:
    table = next(t for t in tables("counting.md") if "K" in t[0])
    rows = {row["K"]: row for row in table}
    for k in (1, 2, 4, 8):
        accepted = sum(0.8**depth for depth in range(1, k + 1))
        assert rows["accepted per decision"][str(k)] == f"{accepted:.2f}"
        assert rows["acceptance rate (accepted / proposed)"][str(k)] == f"{100 * accepted / k:.0f}%"
        assert rows["tokens per decision"][str(k)] == f"{1 + accepted:.2f}"
    text = prose("counting.md")
    by_position = [60, 36, 23, 9]
    everything, rejected = sum(by_position), 4 * by_position[0] - sum(by_position)
    assert f"{by_position}, {everything} in all, and {rejected} rejected" in text
    assert f"{everything} / {everything + rejected} = {everything / (everything + rejected):.1%}" in text
    drafts = sum(by_position[1:])
    assert f"{drafts} / {3 * by_position[0]} = {drafts / (3 * by_position[0]):.1%}" in text


def test_the_figures_of_the_sampling_page() -> None:
    text = prose("sampling.md")
    p = np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04])
    surprise = -np.log(p)
    entropy = float((p * surprise).sum())
    assert f"the entropy is {entropy:.3f}" in text
    shown = [f"{x:.3f}".lstrip("0") for x in surprise]
    assert f"are {', '.join(shown[:-1])} and {shown[-1]}; nearest" in text
    nearest = [f"{abs(x - entropy):.3f}".lstrip("0") for x in surprise[1:3]]
    assert f"token 1 (by {nearest[0]}) and token 2 (by {nearest[1]})" in text
    left = p[:3] / p[:3].sum()
    assert f"lowers the entropy to {-(left * np.log(left)).sum():.3f}" in text
    assert f"token 1 ({-np.log(left[1]):.3f}) is now token 0 ({-np.log(left[0]):.3f})".replace("(0.", "(.") in text
    for value, what in [(MAX_BAD_WORDS, "bad words"), (MAX_LOGIT_BIAS, "entries of `logit_bias`")]:
        assert f"{value:,} {what}" in text
    assert f"of {MAX_STOP_LENGTH:,} characters or {MAX_BAD_WORD_TOKENS} tokens each" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_a_page_names_exist(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in re.findall(r"`forerun ([^`]+)`", page.read_text()):
        words = command.split()
        depth = 2 if words[0] in ("bench", "models", "plan") else 1
        assert dispatch([*words[:depth], "--help"]) == 0
        shown = capsys.readouterr().out
        for word in words[depth:]:
            if word.startswith("-"):
                assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", shown), f"{word} of {command!r}"
