"""`forerun plan step`: its table, its JSON, its derivation, and what it refuses."""

from __future__ import annotations

import re

import pytest

from forerun import cli
from forerun.cli.plan_step import HELP
from reference.derivations import evaluated
from reference.planning import PlanCommand

MODEL = ("-m", "llama-3.1-8b")


COMMAND = PlanCommand("step")
call, data = COMMAND.call, COMMAND.data


@pytest.mark.parametrize(
    "arguments",
    [
        MODEL,
        (*MODEL, "-b", "64", "--ideal"),
        (*MODEL, "-b", "16", "-q", "5", "--order", "3"),
        ("-m", "llama-3.3-70b", "-t", "4", "--pipeline", "2", "-b", "7", "--step-us", "1234"),
        ("-m", "deepseek-v3", "-g", "h200", "-t", "8", "--expert", "8", "--kv", "fp8"),
    ],
)
def test_the_derivation_ends_in_the_numbers_under_the_table(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    found = data(capsys, *arguments, "--explain")
    values = evaluated(found["derivation"])
    assert values["forward_seconds"] == pytest.approx(found["forward_seconds"], rel=1e-12)
    assert values["step_seconds"] == pytest.approx(found["seconds"], rel=1e-12)
    output = call(capsys, *arguments, "--explain")[1]
    assert f"{values['step_seconds'] * 1e3:.4g} ms a step" in output
    if found["queries"] > 1:
        assert found["derivation"][-1]["symbol"] == "step_seconds"
        assert found["tokens_per_s"] is found["throughput_tokens_per_s"] is None
        assert "tokens/s each" not in output
        return
    assert found["derivation"][-1]["symbol"] == "throughput"
    assert values["tokens_per_s"] == pytest.approx(found["tokens_per_s"], rel=1e-12)
    assert values["throughput"] == pytest.approx(found["throughput_tokens_per_s"], rel=1e-12)
    assert f"{values['tokens_per_s']:.4g} tokens/s each, {values['throughput']:.5g} tokens/s all" in output


def test_the_help_names_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *MODEL, "--explain")
    named = set(re.findall(r"\w+", HELP[HELP.index("--json prints") :]))
    assert {*found, *found["parts"][0], *found["derivation"][0]} <= named


@pytest.mark.parametrize("batch", ["-b", "--batch", "--batches"])
@pytest.mark.parametrize("context", ["-c", "--context", "--contexts"])
def test_both_spellings_of_an_option(capsys: pytest.CaptureFixture[str], batch: str, context: str) -> None:
    found = data(capsys, *MODEL, batch, "3", context, "70")
    assert (found["batch"], found["context"]) == (3, 70)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-b", "0"), "batch: 0 is not allowed"),
        (("-b", "-1"), "batch: -1 is not allowed"),
        (("-q", "0"), "queries: 0 is not allowed"),
        (("-c", "-1"), "context: -1 is not allowed"),
        (("-c", "131073"), "context: 131073 tokens are more than the 131072 of llama-3.1-8b"),
        (("-b", "x"), "Invalid value for '--batch'"),
        (("-b", "500", "-c", "100000"), "memory: "),
    ],
)
def test_one_line_that_names_the_field(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, output, errors = call(capsys, *MODEL, *arguments)
    assert code != 0
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith(f"forerun: error: {said}")


BEYOND = {
    "drafter": ["speculate", "-m", "llama-3.1-8b", "-d", "eagle3=" + "9" * 5000],
    "tokens-per-s": ["claim", "-m", "llama-3.3-70b", "--tokens-per-s", "1e308"],
    "latency-ms": ["claim", "-m", "llama-3.3-70b", "--latency-ms", "1e-310"],
    "class a: share": ["policy", "--class", "a:acceptance=0.5,share=1e308"],
    "cost": ["policy", "-n", "20", "--cost", "1e308"],
    "bandwidth": ["step", "-m", "llama-3.1-8b", "--bandwidth-share", "1e-320"],
    "layer_us": ["step", "-m", "llama-3.1-8b", "--layer-us", "1e308"],
    "expert": ["step", "-m", "llama-3.1-8b", "-t", "8", "--expert", "8"],
    "out": ["export", "--for", "vllm", "-m", "llama-3.1-8b", "-d", "ngram", "--out", "a" * 5000],
    "plot": ["speculate", "-m", "llama-3.1-8b", "-d", "ngram", "--plot", "a" * 5000 + ".svg"],
}


@pytest.mark.parametrize("field", BEYOND)
def test_what_is_beyond_all_bounds_is_one_line_that_names_it(field: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["plan", *BEYOND[field]]) == 1
    told = capfd.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"forerun: error: {field}: ")
    assert told.err.count("\n") == 1
    assert len(told.err) < 400
