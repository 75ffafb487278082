"""`forerun plan policy`: its tables, its JSON, its derivations, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from forerun.cli import dispatch
from forerun.cli.plan_drafters import default_drafters
from forerun.cli.plan_policy import HELP
from forerun.plan.catalog import PlanCatalog
from forerun.plan.policy import compare
from forerun.plan.policy_cost import roofline_cost
from forerun.plan.workload import CODE_AND_CHAT, LONGEST
from reference.derivations import evaluated
from reference.planning import PlanCommand

MODEL = ["-m", "llama-3.1-8b", "-g", "h100"]
QUICK = ["-n", "32"]
PAGE = (Path(__file__).parents[2] / "docs" / "plan-policy.md").read_text(encoding="utf-8")
POLICIES = ["per class", "adaptive", "oracle per request", "oracle per moment"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


COMMAND = PlanCommand("policy")
run, read = COMMAND.run, COMMAND.read


def cells(out: str, heading: str) -> list[list[str]]:
    """The rows of the table under a line that begins so."""
    lines = out[out.index(f"\n{heading}") :].splitlines()[4:]
    rows = lines[: lines.index("") if "" in lines else len(lines)]
    return [re.split(r"\s{2,}", line.strip()) for line in rows]


def test_the_tables_show_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    body, out = read(*QUICK, capsys=capsys), run(*QUICK, capsys=capsys)
    assert [(each["drafter"], each["batch"]) for each in body["comparisons"]] == [
        (f"c = {c}", batch) for batch in (1, 8) for c in ("0.007", "0.05", "0.2")
    ]
    shown = iter(cells(out, "the mix"))
    steadiest = iter(cells(out, "smallest p99"))
    for found in body["comparisons"]:
        assert [each["policy"] for each in found["policies"]] == POLICIES
        for each in (found["best_fixed"], *found["policies"]):
            lengths = ", ".join(map(str, each["lengths"])) if each["lengths"] else "varies"
            assert next(shown) == [
                found["drafter"], str(found["batch"]), each["policy"], lengths, f"{each['mean']:.3f}",
                f"{each['p50']:.3f}", f"{each['p99']:.3f}", f"{each['slower']:.0%}", f"{each['throughput_ratio']:.3f}",
                f"{each['gain']:+.1%}".replace("-0.0%", "+0.0%"),
            ]  # fmt: skip
        best = found["steadiest"]
        row = next(steadiest)
        assert row[:3] == [found["drafter"], str(found["batch"]), best["policy"]]
        assert row[4:] == [f"{best['p99']:.3f}", f"{best['slower']:.0%}", f"{best['throughput_ratio']:.3f}"]
    alone = [(found["drafter"], each) for found in body["comparisons"][:3] for each in found["alone"]]
    assert cells(out, "each class by itself at batch 1") == [
        [name, each["class"], str(each["length"]), f"{each['tokens_per_step']:.3f}", f"{each['cost']:.3f}",
         f"{each['speedup']:.3f}"]
        for name, each in alone
    ]  # fmt: skip
    assert [(name, each["class"], each["length"]) for name, each in alone][2:4] == [
        ("c = 0.05", "code", 8), ("c = 0.05", "chat", 2)
    ]  # fmt: skip


def test_the_numbers_are_those_of_the_library(capsys: pytest.CaptureFixture[str]) -> None:
    body = read(
        *QUICK, "--cost", "0.1", "--batches", "4", "--seed", "3", "--floor", "0.9", "--ridge-rows", "50", capsys=capsys
    )
    [found] = body["comparisons"]
    [expected] = compare(CODE_AND_CHAT, [roofline_cost(0.1, 4, ridge_rows=50)], requests=32, seed=3)
    assert [each["throughput_ratio"] for each in found["fixed"]] == [each.throughput for each in expected.fixed]
    assert [each["p99"] for each in found["policies"]] == [each.p99 for each in expected.others]
    assert found["steadiest"]["p99"] == expected.steadiest(0.9).p99
    assert body["ridge_rows"] == 50
    assert body["setup"] is body["context"] is found["plain_seconds"] is None


def test_keys_of_the_json_are_those_that_the_help_names(capsys: pytest.CaptureFixture[str]) -> None:
    body = read(*QUICK, "--explain", "--batches", "1", "--cost", "0.1", capsys=capsys)
    assert list(body) == [
        "command", "setup", "context", "ridge_rows", "requests", "seed", "floor", "classes", "comparisons",
        "derivations",
    ]  # fmt: skip
    assert body["command"] == "plan policy"
    assert list(body["classes"][0]) == ["name", "share", "acceptance", "spread", "swing", "dwell", "tokens"]
    [found] = body["comparisons"]
    assert list(found) == [
        "drafter", "batch", "requests", "plain_seconds", "alone", "best_fixed", "policies", "fixed", "steadiest"
    ]  # fmt: skip
    outcome = [
        "policy", "lengths", "mean", "p50", "p99", "slower", "throughput_ratio", "gain", "gain_error", "drafted",
        "mean_seconds",
    ]  # fmt: skip
    assert list(found["best_fixed"]) == list(found["policies"][0]) == list(found["steadiest"]) == outcome
    assert [each["lengths"] for each in found["fixed"]] == [[k] for k in range(LONGEST + 1)]
    named = set(re.findall(r"\w+", HELP))
    assert found["fixed"][0]["gain_error"] is found["best_fixed"]["gain_error"] is None
    assert 0 < found["policies"][1]["gain_error"] < 0.1
    derivation = body["derivations"][0]
    for keys in (body, body["classes"][0], found, found["alone"][0], outcome, derivation, derivation["lines"][0]):
        assert set(keys) <= named


@pytest.mark.parametrize(
    "words", [[], ["--batches", "64", "--cost", "0.3"], [*MODEL, "-d", "eagle3"], [*MODEL, "--cost", "0.1", "-b", "16"]]
)
def test_a_derivation_leads_to_the_number_of_the_table(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    body = read(*words, *QUICK, "--explain", capsys=capsys)
    out = run(*words, *QUICK, "--explain", capsys=capsys)
    *speedups, times, gain = body["derivations"]
    for derivation in body["derivations"]:
        assert derivation["title"] in out
    for derivation, each in zip(speedups, body["comparisons"][0]["alone"], strict=True):
        lines = derivation["lines"]
        evaluated(lines)
        assert lines[-1]["symbol"] == f"speedup_{each['length']}"
        assert lines[-1]["value"] == pytest.approx(each["speedup"], rel=1e-12)
        assert f"speedup of {each['class']} by itself at its best length, {each['length']}" in out
        assert f"{each['speedup']:.3f}" in [row[-1] for row in cells(out, "each class by itself")]
    adaptive = body["comparisons"][0]["policies"][1]
    known = evaluated(times["lines"])
    assert (known["mean"], known["p99"]) == pytest.approx((adaptive["mean"], adaptive["p99"]), rel=1e-12)
    assert times["lines"][-1]["symbol"] == "p99"
    known = evaluated(gain["lines"])
    assert known["throughput"] == pytest.approx(adaptive["throughput_ratio"], rel=1e-12)
    assert known["gain"] == gain["lines"][-1]["value"] == pytest.approx(adaptive["gain"], abs=1e-12)
    if adaptive["gain_error"] is None:
        assert "gain_error" not in known
    else:
        assert known["gain_error"] == pytest.approx(adaptive["gain_error"], rel=1e-12)


def test_the_table_of_the_page_is_what_its_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Digit by digit, signs and roundings included."""
    [words] = re.findall(r"^`forerun plan policy (.*)`, gain of the adaptive", PAGE, flags=re.MULTILINE)
    printed: dict[str, list[str]] = {}
    for row in cells(run(*words.split(), capsys=capsys), "the mix"):
        if row[2] == "fixed":
            slower = row[7]
        if row[2] == "adaptive":
            printed.setdefault(row[0].removeprefix("c = "), []).append(f"{row[9]} ({slower}, {row[7]})")
    rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines()]
    for cost in ("0.007", "0.05", "0.2"):
        assert [cost, *printed[cost]] in rows


def test_the_default_command_shows_the_stated_gains(capsys: pytest.CaptureFixture[str]) -> None:
    """About 5% with a cheap drafter and 19% with a dear one, within two of the standard errors that it states."""
    found = {each["drafter"]: each["policies"][1] for each in read("-b", "1", capsys=capsys)["comparisons"]}
    for cost, stated in (("c = 0.007", 0.05), ("c = 0.2", 0.19)):
        assert found[cost]["gain_error"] < 0.02
        assert abs(found[cost]["gain"] - stated) < 2 * found[cost]["gain_error"]


@pytest.mark.parametrize("words", [["--batch", "4"], ["--batches", "4"], ["-b", "4"]])
def test_both_spellings_of_an_option(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert [each["batch"] for each in read(*QUICK, *words, "--cost", "0.1", capsys=capsys)["comparisons"]] == [4]
    for name in ("--context", "--contexts"):
        body = read(*MODEL, "-n", "1", *words, "-d", "ngram", name, "300", capsys=capsys)
        assert body["context"] == 300


def test_steps_and_drafters_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, *QUICK, "--context", "2000", "-b", "8"]
    body = read(*words, "-d", "eagle3", "-d", "medusa=3", capsys=capsys)
    eagle, medusa = body["comparisons"]
    assert (eagle["drafter"], medusa["drafter"], body["context"], body["ridge_rows"]) == (
        "eagle3",
        "medusa-3",
        2000,
        None,
    )
    assert body["setup"]["model"] == "llama-3.1-8b"
    assert len(medusa["fixed"]) == 4
    step = json.loads(_step("--batch", "8", "--context", "2000", capsys=capsys))
    assert eagle["plain_seconds"] == pytest.approx(step["seconds"])
    adaptive = eagle["policies"][1]
    assert adaptive["mean_seconds"] == pytest.approx(adaptive["mean"] * step["seconds"])
    out = run(*words, "-d", "eagle3", capsys=capsys)
    assert "llama-3.1-8b on h100" in out
    assert cells(out, "the mix")[2][-1] == f"{adaptive['mean_seconds'] * 1e3:.3g}"


def _step(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert dispatch(["plan", "step", *MODEL, *words, "--json"]) == 0
    return capsys.readouterr().out


def test_without_a_drafter_those_that_go_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    body = read(*MODEL, *QUICK, "-b", "1", capsys=capsys)
    catalog = PlanCatalog.load()
    assert len(body["comparisons"]) == len(default_drafters(catalog.model("llama-3.1-8b"), catalog))


def test_classes_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    body = read(
        *QUICK, "--class", "edits:acceptance=0.95,share=3,tokens=64", "--class", "poems:acceptance=0.1,spread=inf",
        "-b", "1", "--cost", "0.05", capsys=capsys,
    )  # fmt: skip
    assert [(each["name"], each["share"], each["spread"]) for each in body["classes"]] == [
        ("edits", 3, 4), ("poems", 1, None)
    ]  # fmt: skip
    assert [each["class"] for each in body["comparisons"][0]["alone"]] == ["edits", "poems"]


def test_requests_fill_whole_batches(capsys: pytest.CaptureFixture[str]) -> None:
    body = read("-n", "10", "-b", "8", "--cost", "0", capsys=capsys)
    assert (body["requests"], body["comparisons"][0]["requests"]) == (10, 16)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-b", "0"], "batches: 0 is not allowed"),
        (["-b", "1,x"], "batches: '1,x' is not a list"),
        (["-b", ""], "batches: '' is not a list"),
        (["-b", "5000"], "batch: 5000 is not allowed"),
        (["--cost", "-1"], "cost: -1.0 is not allowed"),
        (["--cost", "nan"], "cost: nan is not allowed"),
        (["--cost", "inf"], "cost: inf is not allowed"),
        (["--cost", ""], "cost: '' is not a list"),
        (["--cost", "0.1,0.1"], "cost: '0.1,0.1' has one of them twice"),
        (["--floor", "1.5"], "floor: 1.5 is not allowed"),
        (["--floor", "nan"], "floor: nan is not allowed"),
        (["-n", "0"], "requests: 0 is not allowed"),
        (["-n", "99999999"], "requests: 99999999 is not allowed"),
        (["--seed", "-1"], "seed: -1 is not allowed"),
        (["--ridge-rows", "0"], "ridge-rows: 0.0 is not allowed"),
        (["--class", "code"], "class: 'code' lacks acceptance"),
        (["--class", "a:acceptance=0.5", "--class", "a:acceptance=0.6"], "class: 'a' is there more than once"),
        (["--class", "a:acceptance=2"], "class a: acceptance: 2.0 is not allowed"),
        (["-d", "eagle3"], "model: missing; expected --model, since --drafter"),
        (["-c", "500"], "model: missing; expected --model, since --context"),
        (["-t", "2"], "model: missing; expected --model, since --tensor"),
        (["-m", "nothing"], "model: 'nothing' is not in the catalog"),
        ([*MODEL, "--ridge-rows", "100"], "ridge-rows: not allowed with --model"),
        ([*MODEL, "-d", "eagle3", "--cost", "0.1"], "drafter: not allowed with --cost"),
        ([*MODEL, "-d", "eagle3:0.8"], "drafter: 'eagle3:0.8': rates are those of --class"),
        ([*MODEL, "-d", "luck"], "drafter: 'luck' is not allowed"),
        ([*MODEL, "-d", "eagle3", "-d", "eagle3"], "drafter: eagle3 is given twice"),
        ([*MODEL, "-d", "eagle3", "-c", "-5"], "context: -5 is not allowed"),
        ([*MODEL, "-d", "eagle3", "-c", "100000000"], "context: 1e+08 tokens are more than the 131072"),
        ([*MODEL, "--cost", "0.1", "-c", "131073"], "context: 131073 tokens are more than the 131072"),
        ([*MODEL, "-d", "eagle3", "-b", "1024", "-c", "100000"], "memory: "),
        (["-m", "llama-3.3-70b", "-d", "ngram"], "memory: the weights of llama-3.3-70b"),
        (["-m", "llama-3.3-70b", "--cost", "0.1"], "memory: the weights of llama-3.3-70b"),
    ],
)
def test_bad_input_is_one_line_that_names_the_option(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["plan", "policy", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1
