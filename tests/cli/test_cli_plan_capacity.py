"""`forerun plan capacity`: what it prints, its JSON, its derivation, and what it refuses."""

from __future__ import annotations

import re

import pytest

from forerun.cli.plan_capacity import HELP, binary
from reference.derivations import evaluated
from reference.planning import PlanCommand
from reference.shown import check_shown, shown_commands

MODEL = ("--model", "llama-3.3-70b", "--tensor", "4")


COMMAND = PlanCommand("capacity")
call, data = COMMAND.call, COMMAND.data


def test_a_70b_on_four_h100(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = call(capsys, *MODEL)
    assert (code, errors) == (0, "")
    assert "KV a token: 320 KiB" in output
    assert "90% of 4 x 80 GB - 141.1 GB of weights = 146.9 GB, 448,281 tokens" in output
    assert "444 at the start (315 MiB each), 356 on average (393.1 MiB), 298 to the end (470 MiB)" in output
    rows = {row[0]: row for row in (line.split() for line in output.splitlines()) if row and row[0].isdecimal()}
    assert rows["298"][-2:] == ["-", "-"]
    assert rows["356"][-2:] == ["249", "1249"]


def test_short_prompts_with_enormous_replies(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *MODEL, "--prompt", "100", "--reply", "30000", "--batch", "8,64")
    assert found["fitting"]["at_start"] > 100 * found["fitting"]["to_the_end"]
    eight, many = found["rows"]
    assert eight["fills_at"] is None
    assert 1 < many["fills_at"] < 30000
    assert many["fills_tokens"] == 100 + many["fills_at"]
    assert many["pool_start"] < 0.02 < 1 < many["pool_end"]


@pytest.mark.parametrize(
    "arguments",
    [
        MODEL,
        (*MODEL, "-d", "eagle3:0.8,0.7", "-k", "3", "--block", "32", "--chunk", "512", "--batch", "1,16,900"),
        ("-m", "gpt-oss-20b", "--prompt", "50", "--reply", "20000"),
        ("-m", "deepseek-v3", "-g", "h200", "-t", "8", "-d", "mtp", "--kv", "fp8", "--utilization", "0.95"),
    ],
)
def test_the_derivation_ends_in_the_number_of_the_table(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    found = data(capsys, *arguments)
    for row in found["rows"]:
        derivations = data(capsys, *arguments, "--explain-row", str(row["batch"]))["derivations"]
        fills = row["fills_at"] is not None
        fits, speed, *filling, again, swap = (evaluated(each["lines"]) for each in derivations)
        ends = [each["lines"][-1]["symbol"] for each in derivations]
        assert ends == [
            "to_the_end", "throughput", *["tokens_each"] * fills, "recompute_seconds", "swap_seconds"
        ]  # fmt: skip
        assert fits["to_the_end"] == found["fitting"]["to_the_end"]
        assert fits["pool"] == pytest.approx(found["pool_bytes"])
        assert fits["sequence_bytes"] == pytest.approx(found["sequence_bytes"]["at_end"])
        assert speed["at_tokens"] == row["context"]
        assert speed["step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-12)
        assert speed["tokens_per_s"] == pytest.approx(row["tokens_per_s"], rel=1e-12)
        assert speed["throughput"] == pytest.approx(row["throughput_tokens_per_s"], rel=1e-12)
        for values in filling:
            assert (values["full_at_step"], values["tokens_each"]) == (row["fills_at"], row["fills_tokens"])
        first = found["preemptions"][0]
        assert again["recompute_seconds"] == pytest.approx(first["recompute_seconds"], rel=1e-12)
        assert swap["swap_seconds"] == pytest.approx(first["swap_seconds"], rel=1e-12)
        assert swap["sequence_bytes"] == pytest.approx(first["swap_bytes"])
    _, output, _ = call(capsys, *arguments, "--explain")
    for each in data(capsys, *arguments, "--explain")["derivations"]:
        assert each["title"] in output
        for line in each["lines"]:
            assert line["symbol"] in output


def test_the_first_row_that_fills_the_pool_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *MODEL, "--batches", "8,356,400", "--explain")
    assert found["derivations"][2]["title"].startswith("the step at which 356 requests fill the pool")
    last = data(capsys, *MODEL, "--batches", "8,16", "--explain")["derivations"]
    assert last[1]["title"].startswith("16 requests at once")
    assert len(last) == 4


def test_json_has_the_documented_keys(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *MODEL, "--explain")
    drafter = data(capsys, *MODEL, "--drafter", "ngram")["drafters"][0]
    derivation = found["derivations"][0]
    keys = {
        *found, *found["sequence_bytes"], *found["fitting"], *found["preemptions"][0], *found["rows"][0], *drafter,
        *derivation, *derivation["lines"][0],
    }  # fmt: skip
    [sentence] = re.findall(r"--json prints .*?\)\)\.", HELP, flags=re.DOTALL)
    documented = set(re.findall(r"\w+", sentence))
    assert keys - drafter.keys() <= documented
    assert drafter.keys() <= set(re.findall(r"\w+", HELP))
    assert documented - keys == {"json", "prints", "beyond", "all", "windows", "and", "with", "explain"}
    for row in found["rows"]:
        assert row["throughput_tokens_per_s"] == pytest.approx(row["batch"] * row["tokens_per_s"])
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["step_seconds"])
    assert [each["tokens"] for each in found["preemptions"]] == [1001, 1250, 1500]


def test_windows_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = call(capsys, "-m", "gpt-oss-20b")
    assert "KV a token: 48 KiB, 24 KiB beyond the window" in output


def test_a_drafter_takes_memory_and_gives_speed(capsys: pytest.CaptureFixture[str]) -> None:
    plain = data(capsys, *MODEL, "--batch", "1,64")
    fast = data(capsys, *MODEL, "--batch", "1,64", "--drafter", "model=llama-3.1-8b:0.8")
    assert fast["drafter_bytes"] == plain["pool_bytes"] - fast["pool_bytes"] > 16e9
    assert fast["token_bytes"] == plain["token_bytes"] + 128 * 1024
    assert fast["fitting"]["to_the_end"] < plain["fitting"]["to_the_end"]
    assert fast["rows"][0]["tokens_per_s"] > 1.5 * plain["rows"][0]["tokens_per_s"]
    assert fast["rows"][0]["length"] > 0
    _, output, _ = call(capsys, *MODEL, "--drafter", "ngram")
    assert "acceptance by depth, assumed, not measured: ngram 0.22" in output


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("-m", "llama-3.3-70b"), "memory"),
        ((*MODEL, "--prompt", "0"), "prompt"),
        ((*MODEL, "--reply", "-1"), "reply"),
        ((*MODEL, "--prompt", "131072", "--reply", "1"), "reply"),
        ((*MODEL, "--prompt", "10000000000"), "prompt"),
        ((*MODEL, "--batch", "0,1"), "batches"),
        ((*MODEL, "--batches", "many"), "batches"),
        ((*MODEL, "--batches", ""), "batches"),
        ((*MODEL, "--batches", "1,2", "--explain-row", "3"), "explain-row"),
        ((*MODEL, "--prompt", "131073", "--reply", "1"), "prompt"),
        ((*MODEL, "--block", "0"), "block"),
        ((*MODEL, "--chunk", "0"), "chunk"),
        ((*MODEL, "--utilization", "nan"), "utilization"),
        ((*MODEL, "--utilization", "0"), "utilization"),
        ((*MODEL, "--length", "3"), "length"),
        ((*MODEL, "--length", "-1", "--drafter", "ngram"), "draft length"),
        ((*MODEL, "--length", "9", "--drafter", "medusa"), "draft length"),
        ((*MODEL, "--drafter", "mtp"), "drafter"),
        ((*MODEL, "--drafter", "model=llama-3.3-70b", "--utilization", "0.85"), "memory"),
        ((*MODEL, "--kv", "fp3"), "kv"),
    ],
)
def test_one_line_that_names_the_field(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], field: str
) -> None:
    code, output, errors = call(capsys, *arguments)
    assert code == 1
    assert output == ""
    assert errors.count("\n") == 1
    assert f"error: {field}: " in errors


def test_bytes_in_powers_of_1024() -> None:
    assert [binary(n) for n in (12, 327680, 315 << 20, 3 << 29)] == ["12 B", "320 KiB", "315 MiB", "1.5 GiB"]


@pytest.mark.parametrize(("arguments", "lines"), shown_commands("plan-capacity.md"))
def test_the_page_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], arguments: list[str], lines: list[str]
) -> None:
    check_shown(capsys, arguments, lines)
    changed = [re.sub(r"[0-9a-z]", "#", line, count=1) if line != "..." else line for line in lines]
    with pytest.raises(AssertionError):
        check_shown(capsys, arguments, changed)
