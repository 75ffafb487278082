"""`forerun plan claim`: what it prints, its JSON, its derivation, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.plan_claim import HELP
from forerun.plan.claim_conditions import KINDS
from reference.derivations import evaluated
from reference.planning import PlanCommand
from reference.shown import check_shown, shown_commands

CLAIM = ("--model", "llama-3.3-70b", "--gpu", "h100", "--tokens-per-s", "1000", "--batch", "1")


COMMAND = PlanCommand("claim")
call, data = COMMAND.call, COMMAND.data


def check_derivation(lines: list[dict[str, Any]]) -> float:
    return list(evaluated(lines).values())[-1]


def test_the_claim_of_the_issue(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = call(capsys, *CLAIM)
    assert (code, errors) == (0, "")
    assert "one division: 3.35 TB/s / (139 GB of weights + 328 MB of KV) = 24.04 tokens/s" in output
    assert "the claim is 41.6 times the ceiling" in output
    assert "it doesn't fit" in output
    assert "verdict: possible if: nvfp4 weights and 14 users together" in output
    assert "- Is it the speed of one user or of how many together?" in output
    for name in ("weight precision", "number of GPUs", "other hardware", "tokens of many users", "speculation",
                 "active parameters"):  # fmt: skip
        assert name in output


def test_a_settled_condition_makes_it_marketing(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = call(capsys, *CLAIM, "--stated", "batch, weights")
    assert code == 0
    assert "verdict: marketing: no plausible condition" in output
    assert len(re.findall(r" settled ", output)) == 2
    assert "how many together?" not in output
    assert "In which format are weights" not in output
    assert "what the claim settles goes into --stated" not in output
    assert "\n- How many h100" not in call(capsys, *CLAIM, "--stated", "batch,gpus")[1]


def test_the_tokens_of_all_users(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("-m", "llama-3.1-8b", "--tokens-per-s", "20000", "--aggregate")
    assert "claimed: 20,000 tokens/s of all together, batch 256" in call(capsys, *words, "--batch", "256")[1]
    assert "claimed: 20,000 tokens/s of all together, batch 1," in call(capsys, *words, "--batches", "1")[1]
    assert "1 sequences" not in call(capsys, "-m", "llama-3.3-70b", "--tokens-per-s", "20")[1]


def test_the_words_of_stated_are_in_the_rows(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = call(capsys, *CLAIM)
    for kind in KINDS:
        assert re.search(rf"^[\w ]+ \({kind}\) ", output, re.MULTILINE)
    assert 'what the claim settles goes into --stated; "on one card": --stated gpus,hardware' in output
    row = next(line for line in output.splitlines() if line.startswith("speculation"))
    assert "doesn't fit: 141.4 of 72.0 GB" in row
    assert "the limit is then memory bandwidth" in output


def test_the_shown_machine_runs_the_shown_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """wafer.toml as the page has it, and the command above it."""
    page = (Path(__file__).parents[2] / "docs" / "plan-claim.md").read_text()
    file = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    command = re.search(r"forerun plan claim ([^\n]*wafer\.toml[^\n]*\\\n[^\n]*)\n", page)
    assert file is not None
    assert command is not None
    path = tmp_path / "wafer.toml"
    path.write_text(file[1])
    words = command[1].replace("\\\n", " ").replace("wafer.toml", str(path)).split()
    found = data(capsys, *words)
    assert found["verdict"] == "physics"
    assert found["ratio"] < 0.01
    assert re.match(r"0\.\d+% of what the hardware allows", found["summary"])


def test_milliseconds_a_token_are_the_same_claim(capsys: pytest.CaptureFixture[str]) -> None:
    one = data(capsys, *CLAIM)
    other = data(capsys, "-m", "llama-3.3-70b", "--latency-ms", "1")
    assert one == other
    assert one["claim"]["tokens_per_s"] == 1000


def test_a_user_s_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text("[hardware.wafers]\nbandwidth_gb_s = 84e6\nmemory_gb = 176\ntflops = { bf16 = 500000 }\n")
    found = data(capsys, "-m", "llama-3.3-70b", "-g", "wafers", "--catalog", str(mine), "--tokens-per-s", "2100")
    assert found["verdict"] == "physics"
    assert found["conditions"] == found["pairs"] == []
    assert "of what the hardware allows" in found["summary"]


@pytest.mark.parametrize(
    "arguments",
    [
        CLAIM,
        (*CLAIM, "--drafter", "eagle3:0.8,0.7", "--aggregate", "--utilization", "0.95"),
        ("-m", "deepseek-v3", "-g", "h200", "-t", "8", "--latency-ms", "2.5", "-b", "4", "-c", "5000"),
        ("-m", "llama-3.1-8b", "--speedup", "3"),
        ("-m", "llama-3.1-8b", "--speedup", "3", "--tokens-per-step", "2.5"),
        ("-m", "llama-3.1-8b", "--speedup", "2.2", "--drafter", "eagle3", "-b", "8"),
        ("-m", "llama-3.1-8b", "--speedup", "2.2", "-b", "1024", "-c", "0"),
    ],
)  # fmt: skip
def test_json_has_the_documented_keys_and_the_derivation_ends_in_the_ratio(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    found = data(capsys, *arguments, "--explain")
    assert check_derivation(found["derivation"]) == pytest.approx(found["ratio"])
    words = set(re.findall(r"\w+", HELP))
    flat = {**found, **found["claim"], **found["memory"]}
    for row in (*found.get("conditions", []), *found.get("pairs", [])):
        flat |= row
    assert set(flat) <= words, set(flat) - words
    _, output, _ = call(capsys, *arguments, "--explain")
    assert f"verdict: {found['verdict']}: {found['summary']}" in output
    assert f"times {'that limit' if found['claim']['speedup'] else 'the ceiling'}" in output
    assert f"the claim is {found['ratio']:.3g} times" in output
    for line in found["derivation"]:
        assert line["symbol"] in output
    assert "derivation" not in data(capsys, *arguments)


def test_every_documented_key_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    speed = data(capsys, *CLAIM, "--explain")
    speedup = data(capsys, "-m", "llama-3.1-8b", "--speedup", "3", "--drafter", "eagle3", "--explain")
    documented = HELP[HELP.index("--json prints") :]
    keys = {
        *speed, *speedup, *speed["claim"], *speed["memory"], *speed["step_bytes"], *speed["conditions"][0],
        *speed["pairs"][0], *speedup["best"], *speedup["drafters"][0], *speedup["derivation"][0],
    }  # fmt: skip
    prose = {
        "json", "prints", "and", "with", "explain", "For", "a", "claimed", "speed", "also", "over", "or", "the",
        "limit", "drafter", "ceiling", "seconds", "by", "phase",
    }  # fmt: skip
    assert set(re.findall(r"\w+", documented)) - prose <= keys


def test_needing_more_than_any_number_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = call(capsys, "-m", "llama-3.1-8b", "--speedup", "2.2", "-b", "400", "-c", "100")
    assert "no number of tokens a step does" in output
    assert "verdict: marketing" in output


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("-m", "llama-3.3-70b"), "tokens-per-s"),
        ((*CLAIM, "--latency-ms", "1"), "tokens-per-s"),
        ((*CLAIM, "--speedup", "2"), "tokens-per-s"),
        (("-m", "llama-3.3-70b", "--tokens-per-s", "0"), "tokens-per-s"),
        (("-m", "llama-3.3-70b", "--tokens-per-s", "-3"), "tokens-per-s"),
        (("-m", "llama-3.3-70b", "--tokens-per-s", "nan"), "tokens-per-s"),
        (("-m", "llama-3.3-70b", "--tokens-per-s", "inf"), "tokens-per-s"),
        (("-m", "llama-3.3-70b", "--latency-ms", "0"), "latency-ms"),
        (("-m", "llama-3.3-70b", "--latency-ms", "nan"), "latency-ms"),
        (("-m", "llama-3.3-70b", "--latency-ms", "inf"), "latency-ms"),
        (("-m", "llama-3.3-70b", "--latency-ms", "1", "--aggregate"), "aggregate"),
        (("-m", "llama-3.3-70b", "--tokens-per-s", "900", "--aggregate"), "batch"),
        ((*CLAIM, "--context", "200000"), "context"),
        (("-m", "llama-3.3-70b", "--speedup", "0"), "speedup"),
        (("-m", "llama-3.3-70b", "--speedup", "nan"), "speedup"),
        (("-m", "llama-3.3-70b", "--speedup", "2", "--stated", "batch"), "stated"),
        ((*CLAIM, "--stated", "price"), "stated"),
        ((*CLAIM, "--stated", ""), "stated"),
        ((*CLAIM, "--tokens-per-step", "0.5"), "tokens-per-step"),
        ((*CLAIM, "--tokens-per-step", "2", "--drafter", "ngram"), "tokens-per-step"),
        ((*CLAIM, "--drafter", "oracle"), "drafter"),
        ((*CLAIM, "--context", "-1"), "context"),
        ((*CLAIM[:-1], "0"), "batch"),
        ((*CLAIM, "--utilization", "2"), "utilization"),
        (("-m", "llama-9", "--tokens-per-s", "5"), "model"),
        ((*CLAIM, "--gpu", "h1000"), "gpu"),
        ((*CLAIM, "--catalog", "nowhere.toml"), "catalog"),
    ],
)  # fmt: skip
def test_one_line_that_names_the_field(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], field: str
) -> None:
    code, output, errors = call(capsys, *arguments)
    assert code == 1
    assert output == ""
    assert errors.count("\n") == 1
    assert f"error: {field}: " in errors


@pytest.mark.parametrize("huge", ["1e9", "1e-6"])
def test_numbers_out_of_all_proportion_are_answered(capsys: pytest.CaptureFixture[str], huge: str) -> None:
    found = data(capsys, "-m", "llama-3.1-8b", "--tokens-per-s", huge, "--batch", "1000000", "--context", "100000")
    assert found["verdict"] in ("marketing", "possible if")


@pytest.mark.parametrize(("arguments", "lines"), shown_commands("plan-claim.md"))
def test_the_page_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], lines: list[str]
) -> None:
    check_shown(capsys, arguments, lines)
    changed = [re.sub(r"[0-9a-z]", "#", line, count=1) if line != "..." else line for line in lines]
    with pytest.raises(AssertionError):
        check_shown(capsys, arguments, changed)
