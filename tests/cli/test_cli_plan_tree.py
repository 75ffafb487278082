"""`forerun plan tree`: what it prints with and without a model, its JSON, its derivation, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.plan_tree import HELP, _where
from forerun.plan import drafters
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.speculate import TargetSteps
from forerun.plan.tree import RankAcceptance, best_tree
from forerun.plan.tree_price import TreePricer
from reference.derivations import evaluated
from reference.planning import PlanCommand

RATES = "0.6,0.15,0.06"
MODEL = ("-m", "llama-3.1-8b")


call = PlanCommand("tree").call


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, err = call(capsys, "-a", RATES, *arguments)
    assert code == 0, err
    return out


def data(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(shown(capsys, *arguments, "--json"))
    return found


def test_the_tree_is_drawn_and_given_in_the_forms_of_engines(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--nodes", "5", "--chain", "3")
    assert out == (
        """\
best tree of 5 nodes: 2.456 tokens a step; chain of 3: 2.176
nodes of each level 2 1 1 1; with children 1 1 1 0

root
├─ 0: rank 0, 0.6000
│  └─ 1: rank 0, 0.3600
│     └─ 2: rank 0, 0.2160
│        └─ 4: rank 0, 0.1296
└─ 3: rank 1, 0.1500

query  mask                sees root, 0, 1, ...
 root  0x0000000000000001  1.....
    0  0x0000000000000003  11....
    1  0x0000000000000007  111...
    2  0x000000000000000f  1111..
    3  0x0000000000000011  1...1.
    4  0x000000000000002f  1111.1
(bit 0 of a mask is the root, bit i + 1 node i)

parents [-1, 0, 1, -1, 2]
ranks [0, 0, 0, 1, 0]
paths [[0], [0, 0], [0, 0, 0], [1], [0, 0, 0, 0]]
(paths: Medusa's choices, TensorRT-LLM's eagle_choices)
SGLang, room for it: --speculative-num-steps 4 --speculative-eagle-topk 2 --speculative-num-draft-tokens 6
"""
    )


def test_json_without_a_model_is_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--nodes", "10", "--depth", "4", "--branching", "2")
    tree = best_tree(RankAcceptance.by_rank(0.6, 0.15, 0.06), 10, depth=4, branching=2)
    assert found["command"] == "plan tree"
    assert found["accept"] == [[0.6, 0.15, 0.06]]
    assert found["limits"] == {"nodes": 10, "depth": 4, "branching": 2}
    shape = found["tree"]
    assert shape["nodes"] == len(tree) == 10
    assert shape["levels"] == tree.levels == 4
    assert shape["expected_tokens"] == tree.expected_tokens
    for name in ("parents", "ranks", "depths", "survivals", "widths", "expanded"):
        assert shape[name] == list(getattr(tree, name))
    assert shape["paths"] == [list(path) for path in tree.paths]
    assert [int(mask, 16) for mask in shape["masks"]] == list(tree.ancestors())
    assert [[key == "1" for key in row] for row in shape["matrix"]] == tree.visible()
    assert found["chain"]["length"] == 4
    assert "batches" not in found
    assert "setup" not in found


def test_prices_are_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *MODEL, "--chain", "5", "--batches", "64,1,16", "--context", "2000", "-d", "eagle")
    catalog = PlanCatalog.load()
    target = catalog.model("llama-3.1-8b")
    priced = TreePricer(TargetSteps(target.network, Deployment(hardware=catalog.gpu("h100"))), drafters.eagle(target))
    acceptance = RankAcceptance.by_rank(0.6, 0.15, 0.06)
    tree, chain = best_tree(acceptance, 10), best_tree(acceptance, 5, branching=1)
    assert found["setup"]["model"] == "llama-3.1-8b"
    assert (found["drafter"], found["context"]) == ("eagle", 2000)
    assert [row["batch"] for row in found["batches"]] == [1, 16, 64]
    for row in found["batches"]:
        for name, shape in (("tree", tree), ("chain", chain)):
            point = priced.price(shape, row["batch"], 2000)
            assert row["plain_seconds"] == point.plain_seconds
            assert row[name] == {
                "nodes": len(shape),
                "levels": 5,
                "branching": shape.branching,
                "tokens_per_step": point.tokens_per_step,
                "draft_seconds": point.draft_seconds,
                "verify_seconds": point.verify_seconds,
                "speedup": point.speedup,
            }
        assert row["best"]["speedup"] >= max(row["tree"]["speedup"], row["chain"]["speedup"], 1)
    [(first, last)] = found["tree_ahead"]
    assert first == 1
    assert 16 <= last < 64
    assert found["pays"][0][0] == 1


def test_the_end_of_the_gain_is_where_it_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    whole = data(capsys, *MODEL)
    assert whole["searched"] == whole["fit_sequences"] < 4096
    [(_, ahead)], [(_, branching)] = whole["tree_ahead"], whole["branching_best"]
    before, after = data(capsys, *MODEL, "-b", f"{ahead},{ahead + 1}")["batches"]
    assert before["tree"]["speedup"] > before["chain"]["speedup"]
    assert after["tree"]["speedup"] <= after["chain"]["speedup"]
    before, after = data(capsys, *MODEL, "-b", f"{branching},{branching + 1}")["batches"]
    assert before["best"]["branching"] > 1 >= after["best"]["branching"]
    out = shown(capsys, *MODEL)
    assert f"the tree is faster than the best chain up to batch {ahead}; from {ahead + 1} on" in out
    assert f"the best within the limits branches up to batch {branching}; from {branching + 1} on it is a chain" in out
    assert f"looked at: batches up to {whole['searched']}; {whole['fit_sequences']} sequences fit" in out
    assert "the tree or the best chain pays, at every batch" in out
    assert whole["pays"] == [[1, whole["fit_sequences"]]]


def test_several_runs_of_batches_are_listed() -> None:
    assert _where([(1, 3), (9, 12)], 12, "it is", "it isn't") == "it is at batches 1 to 3, 9 to 12; elsewhere it isn't"
    assert _where([(2, 4)], 12, "it is", "it isn't") == "it is at batches 2 to 4; elsewhere it isn't"
    assert _where([(1, 4)], 12, "it is", "it isn't") == "it is up to batch 4; from 5 on it isn't"
    assert _where([(1, 12)], 12, "it is", "it isn't") == "it is, at every batch"
    assert _where([], 12, "it is", "it isn't") == "it isn't, at every batch"


def test_the_table_shows_the_numbers_of_the_json(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, *MODEL, "--chain", "5")
    rows = {int(line.split()[0]): line.split() for line in out.splitlines() if re.match(r"\s*\d+\s+\d+\.\d{3} ", line)}
    whole = data(capsys, *MODEL, "--chain", "5")
    assert whole["tree_ahead"] == [[1, 28]]  # as docs/plan-tree.md says
    found = whole["batches"]
    assert sorted(rows) == [row["batch"] for row in found] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for row in found:
        cells = rows[row["batch"]]
        for cell, seconds in zip(
            cells[1:4], (row["plain_seconds"], row["tree"]["draft_seconds"], row["tree"]["verify_seconds"]), strict=True
        ):
            assert cell == f"{seconds * 1e3:.3f}"
        assert cells[4] == f"{row['tree']['speedup']:.3f}x"
        assert cells[5:8] == [f"{row['chain']['speedup']:.3f}x", "chain", "5"]
        assert cells[8] == f"{row['best']['speedup']:.3f}x"


def test_a_medusa_tree_is_as_deep_as_there_are_heads(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, *MODEL, "-d", "medusa=3", "--nodes", "30")
    assert found["drafter"] == "medusa-3"
    assert found["limits"]["depth"] == found["tree"]["levels"] == 3


def test_batches_that_dont_fit_are_left_out_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    long = ("--context", "100000")
    found = data(capsys, *MODEL, *long)
    assert 1 <= found["fit_sequences"] < 8
    assert [row["batch"] for row in found["batches"]] == [b for b in (1, 2, 4) if b <= found["fit_sequences"]]
    code, _, err = call(capsys, "-a", RATES, *MODEL, *long, "-b", "1,8")
    assert code == 1
    assert "memory: " in err
    code, _, err = call(capsys, "-a", RATES, "-m", "llama-3.3-70b")
    assert code == 1
    assert "memory: the weights of llama-3.3-70b" in err


@pytest.mark.parametrize(
    "arguments", [(), ("-m", "deepseek-v3", "-t", "8", "-g", "h200", "-d", "mtp", "--weights", "fp8")]
)
def test_the_last_line_of_the_derivation_is_the_number_of_the_table(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    found = data(capsys, *arguments, "--explain")
    evaluated(found["derivation"])
    last = found["derivation"][-1]
    if arguments:
        assert last["symbol"] == "speedup"
        assert last["value"] == pytest.approx(found["batches"][0]["tree"]["speedup"], rel=1e-12)
    else:
        assert last["symbol"] == "expected_tokens"
        assert last["value"] == found["tree"]["expected_tokens"]
    out = shown(capsys, *arguments, "--explain")
    assert "survival_0_0" in out
    assert "survival_0 * accept_0_0" in out


def test_more_nodes_than_a_mask_has_bits(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "--nodes", "64")
    assert found["tree"]["masks"] is None
    assert len(found["tree"]["matrix"]) == 65
    assert "64 nodes and the root don't fit 64 bits" in shown(capsys, "--nodes", "64")


def test_fewer_nodes_than_asked_for_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "--depth", "1")
    assert "best tree of 3 nodes" in out
    assert "(10 nodes were asked for; no more can be accepted within these rates and limits)" in out
    code, out, _ = call(capsys, "-a", "0", *MODEL, "--explain")
    assert code == 0
    assert "best tree of 0 nodes: 1 tokens a step" in out
    assert "neither does, at every batch" in out


def test_rates_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rates.toml"
    file.write_text("accept = [[0.6, 0.2], [0.5]]\n")
    code, out, _ = call(capsys, "-a", str(file), "-n", "3", "--json")
    assert code == 0
    assert json.loads(out)["tree"]["paths"] == [[0], [0, 0], [1]]


def test_the_shown_commands_run_with_the_shown_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """rates.toml as the page has it; it holds the rates of the second command."""
    page = (Path(__file__).parents[2] / "docs" / "plan-tree.md").read_text()
    file = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert file is not None
    path = tmp_path / "rates.toml"
    path.write_text(file[1])
    commands = re.findall(r"^    \.venv/bin/forerun plan tree (.*)$", page, re.MULTILINE)
    assert sum("rates.toml" in command for command in commands) == 2
    accepted = []
    for command in commands:
        code, out, err = call(capsys, *shlex.split(command.replace("rates.toml", str(path))), "--json")
        assert code == 0, err
        accepted.append(json.loads(out)["accept"])
    assert accepted[1] == accepted[2] == accepted[3]


def test_one_and_many_name_the_same_options(capsys: pytest.CaptureFixture[str]) -> None:
    one = data(capsys, *MODEL, "--batch", "3", "--contexts", "500")
    assert one == data(capsys, *MODEL, "--batches", "3", "--context", "500")
    assert ([row["batch"] for row in one["batches"]], one["context"]) == ([3], 500)


def test_a_context_that_the_model_cannot_have(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "-a", RATES, *MODEL, "-c", "200000")
    assert (code, err.count("\n")) == (1, 1)
    assert "context: 200000 tokens are more than the 131072 of llama-3.1-8b" in err


def test_every_key_of_the_json_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = re.sub(r"\((?:the largest|first and)[^)]*\)|, for the\sfirst batch", "", HELP.split("--json prints")[1])
    found = data(capsys, *MODEL, "--explain", "-b", "1")
    row = found["batches"][0]
    named = {*found, *found["tree"], *found["chain"], *found["sglang"], *found["limits"], *row, *row["best"]}
    named |= {*found["derivation"][0]}
    assert {name for name in named if not re.search(rf"\b{name}\b", text)} == set()
    words = set(re.findall(r"\w+", text)) - {"prints", "with", "model", "and", "under", "explain"}
    assert words <= named


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nodes", "0"), "nodes: 0 is not allowed; expected 1 to 256"),
        (("--nodes", "-3"), "nodes: -3 is not allowed"),
        (("--nodes", "100000"), "nodes: 100000 is not allowed; expected 1 to 256"),
        (("--depth", "0"), "depth: 0 levels are not possible; expected 1 to 256"),
        (("--branching", "0"), "branching: 0 is not allowed"),
        (("--chain", "0"), "chain: 0 levels are not possible"),
        (("--chain", "1000"), "chain: 1000 levels are not possible; expected 1 to 256"),
        ((*MODEL, "--chain", "70"), "chain: 70 levels of eagle3 are not possible; expected 1 to 63"),
        ((*MODEL, "-d", "medusa=3", "--depth", "4"), "depth: 4 levels of medusa-3 are not possible; expected 1 to 3"),
        ((*MODEL, "-d", "eagle3:0.8"), "drafter: 'eagle3:0.8' has rates, but --accept gives them here"),
        ((*MODEL, "-d", "oracle"), "drafter: 'oracle' is not allowed"),
        ((*MODEL, "-d", ""), "drafter: '' is not allowed"),
        ((*MODEL, "-d", "mtp"), "drafter: llama-3.1-8b comes without multi-token-prediction modules"),
        ((*MODEL, "-b", "0"), "batches: 0 is not allowed"),
        ((*MODEL, "-b", ""), "batches: '' is not a list of whole numbers"),
        ((*MODEL, "-b", "1,x"), "batches: '1,x' is not a list of whole numbers"),
        ((*MODEL, "-c", "-1"), "context: -1 is not allowed; expected 0 to 1000000000"),
        ((*MODEL, "-c", "9" * 400), "is not allowed; expected 0 to 1000000000"),
        (("-m", "gpt-9"), "model: 'gpt-9' is not in the catalog"),
        (("-m", ""), "model: '' is not in the catalog"),
        (("-d", "eagle3"), "model: missing; expected --model, since --drafter"),
        (("-b", "1"), "model: missing; expected --model, since --batches"),
        (("-c", "0"), "model: missing; expected --model, since --context"),
        (("-g", "h200"), "model: missing; expected --model, since --gpu"),
        (("--ideal",), "model: missing; expected --model, since --ideal"),
        (("--bandwidth-share", "0.5"), "model: missing; expected --model, since --bandwidth-share"),
    ],
)
def test_what_is_refused(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = call(capsys, "-a", RATES, *arguments)
    assert (code, out) == (1, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("rates", ["", "0.7,0.4", "nan", "-1", "nowhere.toml"])
def test_rates_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], rates: str) -> None:
    code, _, err = call(capsys, "-a", rates)
    assert code == 1
    assert re.match(r"(forerun: )?(error: )?accept: ", err)
    assert err.count("\n") == 1


def test_rates_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys)
    assert code == 2
    assert "--accept" in err
