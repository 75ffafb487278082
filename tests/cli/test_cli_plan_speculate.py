"""`forerun plan speculate`: its table, its JSON, its derivation, and what it refuses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.cli import dispatch
from forerun.cli.plan_drafters import default_drafters
from forerun.cli.plan_speculate import HELP
from forerun.cli.plan_speculate_explain import PARTS
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.spec import proposal_of
from forerun.plan.speculate import best, price
from reference.derivations import evaluated
from reference.planning import PlanCommand

MODEL = ["-m", "llama-3.3-70b", "-g", "h100", "-t", "8"]
SMALL = ["--batches", "1,16,256", "--contexts", "1000,32000"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


COMMAND = PlanCommand("speculate")
run, read = COMMAND.run, COMMAND.read


def cells(out: str, heading: str) -> list[list[str]]:
    """The rows of the table under a line."""
    lines = out[out.index(f"\n{heading}\n") :].splitlines()[4:]
    return [line.split() for line in lines[: lines.index("") if "" in lines else len(lines)]]


def test_the_table_shows_the_rows_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, *SMALL, "-d", "eagle3:0.8,0.7", "-d", "model=llama-3.1-8b:0.75"]
    body, out = read(*words, capsys=capsys), run(*words, capsys=capsys)
    shown = [row for name in ("eagle3", "llama-3.1-8b") for row in cells(out, name)][: len(body["rows"])]
    shown = [row for row in shown if row[0].isdigit()]
    assert len(shown) == len(body["rows"]) == 12
    for cell, row in zip(shown, body["rows"], strict=True):
        assert cell[:2] == [str(row["context"]), str(row["batch"])]
        if not row["fits"]:
            assert cell[2:] == ["-"] * 10
            continue
        assert cell[2:7] == [
            str(row["length"]), f"{row['tokens_per_step']:.2f}", f"{row['draft_cost']:.3f}",
            f"{row['verify_ratio']:.2f}", f"{row['speedup']:.2f}",
        ]  # fmt: skip
        assert cell[7:9] == [f"{row['tokens_per_s']:.4g}", f"{row['throughput_tokens_per_s']:.5g}"]
        assert cell[9] == f"{row['acceptance_needed']:.2f}"
        assert cell[10:] == [
            f"{row['low_load_length']}:", f"{row['low_load_speedup']:.2f}", f"{row['low_load_loss']:.0%}"
        ]  # fmt: skip
    assert "acceptance by depth, given: eagle3 0.8,0.7; llama-3.1-8b 0.75" in out
    assert "- : the KV of so many sequences doesn't fit" in out


def test_the_json_is_the_model_s(capsys: pytest.CaptureFixture[str]) -> None:
    catalog = PlanCatalog.load()
    shape, where = catalog.model("llama-3.3-70b"), Deployment(hardware=catalog.gpu("h100"), tensor=8)
    body = read(*MODEL, *SMALL, "-d", "eagle3:0.8,0.7", capsys=capsys)
    proposal = proposal_of("eagle3:0.8,0.7", shape, catalog.shape)
    for row in body["rows"]:
        if not row["fits"]:
            assert row["context"] * row["batch"] > 1e6
            assert all(row[key] is None for key in list(row)[4:])
            continue
        where_at = {"batch": row["batch"], "context": row["context"]}
        point = best(shape.network, where, proposal, **where_at)
        assert (row["length"], row["speedup"]) == (point.length, point.speedup)
        assert row["throughput_tokens_per_s"] == pytest.approx(row["batch"] * row["tokens_per_s"])
        assert row["tokens_per_s"] == pytest.approx(row["plain_tokens_per_s"] * row["speedup"])
        kept = price(shape.network, where, proposal, **where_at, length=row["low_load_length"])
        assert row["low_load_speedup"] == kept.speedup


def test_the_keys_of_the_json_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-d", "eagle3:0.8", "-d", "medusa:0.65,0.55,0.5,0.45", "-d", "model=llama-3.1-8b:0.85"]
    body = read(*MODEL, *SMALL, *words, "--explain", capsys=capsys)
    text = " ".join(HELP.split("--json prints ")[1].split("\n\n")[0].split())
    listed = re.sub(r" \([^)]*\)", "", text.replace("and with --explain ", "").rstrip("."))
    assert listed.split(", ") == list(body)
    for key in ("drafters", "rows", "summaries", "derivation"):
        inner = re.search(rf"\b{key} \(([^)]*)\)", text)
        assert inner is not None
        assert inner[1].split(", ") == list(body[key][0])
    assert list(body["overtakes"][0]) == ["context", "batch", "ahead", "behind"]
    summary = body["summaries"][0]
    assert list(summary["buckets"][0]) == ["lo", "hi", "length", "loss"]
    assert list(summary["peak"]) == ["batch", *list(body["rows"][0])[4:]]


def test_without_drafters_those_that_go_with_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(*MODEL, *SMALL, capsys=capsys)
    line = next(line for line in out.splitlines() if "assumed, not measured" in line)
    assert line.endswith("(sources: docs/plan-speculate.md)")
    assert re.findall(r"(?:: |; )(\S+) \d", line) == ["ngram", "medusa-4", "eagle3", "llama-3.1-8b"]
    catalog = PlanCatalog.load()
    assert "mtp" in default_drafters(catalog.model("deepseek-v3"), catalog)
    assert default_drafters(catalog.model("qwen2.5-14b"), catalog)[-1] == "model=qwen2.5-1.5b"
    assert not any(text.startswith("model") for text in default_drafters(catalog.model("mixtral-8x7b"), catalog))
    for name, shape in catalog.models.items():
        assert [proposal_of(text, shape, catalog.shape) for text in default_drafters(shape, catalog)], name


def test_a_fixed_length_and_its_loss(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, "--batches", "1,128", "--contexts", "1000", "-d", "eagle3", "-d", "medusa=2", "--length", "6"]
    body, out = read(*words, capsys=capsys), run(*words, capsys=capsys)
    eagle, medusa = body["rows"][:2], body["rows"][2:]
    assert [row["length"] for row in eagle] == [6, 6]
    assert [row["length"] for row in medusa] == [2, 2]
    assert "medusa-2 drafts 2 tokens at most" in out
    assert eagle[1]["loss"] > 0.3
    catalog = PlanCatalog.load()
    shape, where = catalog.model("llama-3.3-70b"), Deployment(hardware=catalog.gpu("h100"), tensor=8)
    proposal = proposal_of("eagle3", shape, catalog.shape)
    chosen = best(shape.network, where, proposal, batch=128, context=1000)
    assert (eagle[1]["best_length"], eagle[1]["loss"]) == (chosen.length, 1 - eagle[1]["speedup"] / chosen.speedup)
    assert cells(out, "eagle3")[1][10:] == [f"{chosen.length}:", f"{chosen.speedup:.2f}", f"{eagle[1]['loss']:.0%}"]
    assert "at peak load 6 draft tokens" in out


@pytest.mark.parametrize(
    ("words", "symbols"),
    [
        (["--explain"], {"batch": 1, "context": 1000}),
        (["--explain-at", "eagle3,64,8000"], {"batch": 64, "context": 8000}),
        (["--explain-at", "llama-3.1-8b,4,32000", "--draft-tensor", "1"], {"batch": 4, "context": 32000}),
        (["--explain-at", "medusa-4,300,1000"], {"batch": 300, "context": 1000}),
    ],
)
def test_the_derivation_ends_in_the_table_s_speedup(
    words: list[str], symbols: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    batch, context = symbols["batch"], symbols["context"]
    body = read(*MODEL, "--batches", f"1,{batch}", "--contexts", f"1000,{context}", *words, capsys=capsys)
    name = words[1].split(",")[0] if len(words) > 1 else body["drafters"][0]["drafter"]
    values = evaluated(body["derivation"])
    assert (values["target_batch"], values["target_context"]) == (batch, context)
    row = next(row for row in body["rows"] if (row["drafter"], row["batch"], row["context"]) == (name, batch, context))
    last = body["derivation"][-1]
    assert last["symbol"] == "speedup"
    assert last["value"] == pytest.approx(row["speedup"], rel=1e-12)


def test_the_derivation_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(*MODEL, *SMALL, "-d", "ngram:0.5", "--explain-at", "ngram,16,1000", capsys=capsys)
    lines = out[out.index("\nspeedup by ngram") :].splitlines()[1:]
    assert lines[1].startswith("speedup = tokens_per_step / (draft_length * draft_cost + verify_ratio) = ")
    assert lines[4].split()[0] == "speedup"
    body = read(*MODEL, *SMALL, "-d", "ngram:0.5", "--explain-at", "ngram,16,1000", capsys=capsys)
    assert lines[1].endswith(f" = {body['derivation'][-1]['value']:.5g} x")
    shown = [line.split()[0] for line in lines[3:] if re.match(r"[a-z]\w+ .*\S  ", line)]
    assert sorted(word for word in shown if word != "symbol") == sorted(line["symbol"] for line in body["derivation"])
    parts = [title for _, title in PARTS]
    assert [line for line in lines if line in parts] == parts


def test_buckets_and_where_it_pays(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, "--batches", "4,64,100", "--contexts", "1000", "-d", "ngram:0.45"]
    body, out = read(*words, capsys=capsys), run(*words, capsys=capsys)
    (summary,) = body["summaries"]
    assert [(found["lo"], found["hi"]) for found in summary["buckets"]] == [(1, 4), (5, 64), (65, 100)]
    assert summary["pays"] == [[1, summary["break_even"] - 1]]
    assert summary["searched"] == summary["fit_sequences"] > 1000
    assert f"1-{summary['break_even'] - 1}" in out
    assert "1-4   5-64   65-100" in out
    assert "where it pays (with the best length of each batch)" in out
    assert "draft length by batch" not in run(*words[:7], "4,64", *words[8:], capsys=capsys)


def test_a_question_about_one_batch_gets_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "qwen3-32b", "-g", "h200", "-t", "2", "-b", "40", "-c", "6000"]
    spec = "eagle3:0.8,0.76,0.73"
    body, out = read(*words, "-d", spec, capsys=capsys), run(*words, "-d", spec, capsys=capsys)
    (row,), (summary,) = body["rows"], body["summaries"]
    assert out.rstrip().splitlines()[-1] == (
        f"batch 40, context 6000: eagle3 with {row['length']} drafts, {row['speedup']:.2f} times as fast; "
        f"with the best length of each batch it pays at every batch up to {summary['searched']}"
    )
    assert summary["break_even"] is None
    page = (Path(__file__).parents[2] / "docs" / "plan-speculate.md").read_text()
    assert f"`{out.rstrip().splitlines()[-1]}`" in " ".join(page.split())
    last = [
        run(*words[:7], *more, capsys=capsys).rstrip().splitlines()[-1]
        for more in (
            ["400", "-c", "6000", "-d", spec], ["100", "-c", "100", "-d", spec], ["200", "-c", "100", "-d", "ngram:0"],
            ["200", "-c", "100", "-d", spec, "-k", "6"],
        )
    ]  # fmt: skip
    assert last[0] == f"batch 400, context 6000: eagle3 doesn't fit; {summary['fit_sequences']} sequences do"
    assert re.fullmatch(r".*: eagle3 with 1 draft, 1\.\d\d times as fast; with the best .* up to( batch)? \d+", last[1])
    assert last[2] == "batch 200, context 100: ngram doesn't pay at any draft length; it pays at no batch"
    assert re.fullmatch(r".*: eagle3 with 6 drafts, 0\.\d\d times as fast; with that length .* to batch \d+", last[3])


def test_contexts_that_the_model_cannot_have(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["-m", "smollm2-135m-instruct", "-g", "h100", "-d", "ngram:0.5"]
    body, out = read(*words, capsys=capsys), run(*words, capsys=capsys)
    assert body["contexts"] == [1000, 8000]
    assert "left out: contexts of 32000 tokens; smollm2-135m-instruct has at most 8192" in out
    assert dispatch(["plan", "speculate", *words, "-c", "9000"]) == 1
    assert "contexts: 9000 tokens are more than the 8192 of smollm2-135m-instruct" in capsys.readouterr().err


def test_one_and_many_name_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    one = read(*MODEL, "--batch", "3", "--context", "500", "-d", "ngram:0.5", capsys=capsys)
    assert one == read(*MODEL, "--batches", "3", "--contexts", "500", "-d", "ngram:0.5", capsys=capsys)
    assert (one["batches"], one["contexts"]) == ([3], [500])


def test_the_acceptance_that_breaks_even(capsys: pytest.CaptureFixture[str]) -> None:
    """Drafting at a little more of it pays, at a little less doesn't; with --length that length breaks even."""
    words = [*MODEL, "--batches", "100", "--contexts", "1000"]
    (row,) = read(*words, "-d", "eagle3:0.7", capsys=capsys)["rows"]
    needed = row["acceptance_needed"]
    assert 0.1 < needed < 0.7
    for factor, pays in ((1.001, True), (0.999, False)):
        (found,) = read(*words, "-d", f"eagle3:{needed * factor}", capsys=capsys)["rows"]
        assert (found["length"] > 0) == pays
        assert found["acceptance_needed"] == needed
    (fixed,) = read(*words, "-d", "eagle3:0.7", "--length", "4", capsys=capsys)["rows"]
    assert fixed["acceptance_needed"] > needed
    (even,) = read(*words, "-d", f"eagle3:{fixed['acceptance_needed']}", "--length", "4", capsys=capsys)["rows"]
    assert even["speedup"] == pytest.approx(1)
    (never,) = read(*words, "-d", "eagle3:1", "--length", "4", "-b", "1000", "-c", "0", capsys=capsys)["rows"]
    assert (never["acceptance_needed"] is None) == (never["speedup"] < 1)


def test_drafters_that_overtake(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*MODEL, "--batches", "1,64", "--contexts", "8000", "-d", "ngram:0.45", "-d", "model=llama-3.1-8b:0.75"]
    found = read(*words, capsys=capsys)["overtakes"]
    assert [(lead["ahead"], lead["behind"]) for lead in found] == [("ngram", "llama-3.1-8b")]
    line = f"context 8000: from batch {found[0]['batch']} on ngram is faster than llama-3.1-8b"
    assert line in run(*words, capsys=capsys)
    assert "no drafter overtakes another" in run(*words[:-1], "eagle3:0.9", capsys=capsys)


def test_drafters_of_one_name_go_by_their_texts(capsys: pytest.CaptureFixture[str]) -> None:
    body = read(*MODEL, *SMALL, "-d", "ngram:0.4", "-d", "ngram:0.5", "-d", "eagle3", capsys=capsys)
    assert [item["drafter"] for item in body["drafters"]] == ["ngram:0.4", "ngram:0.5", "eagle3"]
    assert [item["assumed"] for item in body["drafters"]] == [False, False, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batches", "0"], "batches: 0 is not allowed; expected numbers of at least 1"),
        (["--batches", ""], "batches: '' is not a list of whole numbers such as 1,2,4"),
        (["--batches", "1,nan"], "batches: '1,nan' is not a list"),
        (["--contexts", "1e3"], "contexts: '1e3' is not a list"),
        (["--contexts", "-5"], "contexts: '-5' is not a list"),
        (["--length", "0"], "length: 0 is not allowed; expected at least 1"),
        (["--longest", "0"], "longest: 0 is not allowed; expected at least 1"),
        (["--draft-tensor", "3"], "draft-tensor: 3 is not allowed; expected a divisor of tensor (8)"),
        (["--draft-tensor", "16"], "draft-tensor: 16 is not allowed"),
        (["--draft-tensor", "0"], "draft-tensor: 0 is not allowed"),
        (["-d", "ngram", "-d", "ngram"], "drafter: 'ngram' is there already"),
        (["-d", "ngram", "-d", "ngram:0.22"], "drafter: 'ngram:0.22' is there already"),
        (["-d", "eagle9"], "drafter: 'eagle9' is not allowed"),
        (["-d", "ngram:nan"], "acceptance: "),
        (["-d", "model=qwen2.5-7b"], "drafter: qwen2.5-7b has 152064 tokens and llama-3.3-70b 128256"),
        (["-d", "mtp"], "drafter: llama-3.3-70b comes without multi-token-prediction modules"),
        (
            ["-d", "ngram", "--explain-at", "eagle3,1,1000"],
            "explain-at: no drafter is called 'eagle3'; there are ngram",
        ),
        (["--explain-at", "ngram,1"], "explain-at: 'ngram,1' is not allowed; expected DRAFTER,BATCH,CONTEXT"),
        (["--explain-at", "ngram,0,1000"], "explain-at: 0 is not allowed"),
        (["--explain-at", "ngram,5000,32000"], "explain-at: 5000 sequences of 32000 tokens don't fit the memory"),
        (["--contexts", "99999999999"], "contexts: 1e+11 tokens are more than the 131072 of llama-3.3-70b"),
        (["--batches", "99999", "--explain"], "explain: there is nothing to explain: no row fits"),
        (["-t", "1"], "memory: the weights of llama-3.3-70b take 141.1 GB"),
        (["--plot", "speedup.pdf"], "plot: speedup.pdf is not allowed; expected a name that ends in .svg or .png"),
        (["--plot", "no/such/folder.svg"], "plot: no/such/folder.svg can't be written"),
    ],
)
def test_what_is_wrong_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch(["plan", "speculate", *MODEL, *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"forerun: error: {message}")
    assert captured.err.count("\n") == 1


def test_rows_that_do_not_fit_are_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(*MODEL, "--batches", "9999", "--contexts", "100000", "-d", "ngram", capsys=capsys)
    assert cells(out, "ngram")[0] == ["100000", "9999", *["-"] * 10]
    alone = ["-m", "llama-3.3-70b", "-g", "h100", "-t", "2", "-b", "1", "-c", "100000", "-d", "ngram"]
    out = run(*alone, capsys=capsys)
    assert "nowhere" in out
    assert out.rstrip().splitlines()[-1] == "batch 1, context 100000: ngram doesn't fit; 0 sequences do"


def test_a_picture_beside_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="forerun[plot] is not installed")
    path = tmp_path / "speedup.svg"
    out = run(*MODEL, *SMALL, "--plot", str(path), capsys=capsys)
    assert f"plotted in {path}" in out
    text = path.read_text()
    assert text.count("<svg") == 1
    for name in ("eagle3", "llama-3.1-8b", "context 32000 tokens", "llama-3.3-70b on 8 x h100"):
        assert name in text
