"""What the draft model proposes: what the model itself would write, whoever else drafts, within every limit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import SamplingParams, _native
from forerun.draft.base import DraftTree
from forerun.draft.candidates import Place, draw
from forerun.draft.model import ModelDrafter
from forerun.draft.registry import drafter_factory
from forerun.errors import ConfigurationError, ModelNotFoundError
from forerun.models.download import resolve
from reference.plain_model import GREEDY, PlainModel, draft_context, draft_row
from reference.tiny import VOCAB_SIZE, TinySpec, write_tiny_gguf

HOT = SamplingParams(temperature=0.9)
SAMPLED = [
    HOT,
    SamplingParams(temperature=0.7, top_p=0.8, seed=3),
    SamplingParams(temperature=1.3, top_k=12, min_p=0.05),
    SamplingParams(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.4),
    SamplingParams(temperature=1.0, logit_bias={17: 9.0, 44: 9.5}, min_tokens=6),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("draft") / "tiny.gguf", TinySpec("qwen2", layers=2))


@pytest.fixture(scope="module")
def model(path: Path) -> PlainModel:
    return PlainModel(path)


def make(model: PlainModel, path: Path, changes: dict[str, Any] | None = None, **settings: Any) -> ModelDrafter:
    settings.setdefault("min_confidence", 0.0)
    return ModelDrafter(draft_context(model, path, **(changes or {})), **settings)


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 250, n).tolist() for n in lengths]


def assert_empty(drafter: ModelDrafter) -> None:
    drafter.check_integrity()
    assert len(drafter.sequences) == 0
    assert drafter.sequences.pool.n_free == drafter.sequences.pool.n_blocks


def same(one: DraftTree, other: DraftTree) -> bool:
    if (one.q is None) != (other.q is None):
        return False
    equal_q = one.q is None or other.q is None or np.array_equal(one.q, other.q)
    return equal_q and (list(one.tokens), list(one.parents), list(one.confidence)) == (
        list(other.tokens), list(other.parents), list(other.confidence),
    )  # fmt: skip


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(repetition_penalty=1.5, logit_bias={5: 2.0}), *SAMPLED])
def test_a_model_drafts_its_own_continuation(model: PlainModel, path: Path, params: SamplingParams) -> None:
    drafter = make(model, path)
    rows = [draft_row(key, ids, 7, params, seed=key) for key, ids in enumerate(prompts(1, 15, 16, 17, 60))]
    for row, tree in zip(rows, drafter.propose(rows), strict=True):
        assert tree.tokens == model.following(row.tokens, 7, params, row.seed)
        assert tree.is_chain
        assert tree.q is None
        assert tree.drafter == "model"
        assert len(tree.confidence) == 7
        assert all(0 < c <= 1 for c in tree.confidence)
    drafter.check_integrity()
    for row in rows:
        drafter.free(row.key, row.tokens)
    assert_empty(drafter)


def test_penalties_follow_the_committed_output(model: PlainModel, path: Path) -> None:
    params = SamplingParams(temperature=0.8, frequency_penalty=1.5, presence_penalty=0.7, min_tokens=40, max_tokens=99)
    drafter = make(model, path)
    row = draft_row(1, prompts(12)[0], 5, params, seed=9)
    n_prompt = len(row.tokens) - 1
    for step in range(8):
        tree = drafter.propose([row])[0]
        expected = model.following(row.tokens, 5, params, 9, n_prompt)
        assert tree.tokens == expected
        if step == 4:
            drafter.truncate(1, n_prompt + 2)
            del row.tokens[n_prompt + 2 :]  # type: ignore[attr-defined]
        else:
            row.tokens.extend([*expected[: step % 5], 33])  # type: ignore[attr-defined]


@pytest.mark.parametrize("params", [GREEDY, HOT, SamplingParams(temperature=0.9, verify="rejection")])
@pytest.mark.parametrize("width", [1, 3])
def test_a_tree_does_not_depend_on_the_other_rows(
    model: PlainModel, path: Path, params: SamplingParams, width: int
) -> None:
    rows = [draft_row(key, ids, 3 + 2 * key, params, seed=key) for key, ids in enumerate(prompts(5, 33, 16, 1))]
    drafter = make(model, path, width=width)
    alone = [drafter.propose([row])[0] for row in rows]
    assert all(len(tree) == row.budget for tree, row in zip(alone, rows, strict=True))
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 0]):
        together = make(model, path, width=width)
        for i, tree in zip(order, together.propose([rows[i] for i in order]), strict=True):
            assert same(tree, alone[i])
        together.check_integrity()
    # More rows than the engine was said to run are drafted in parts.
    few = make(model, path, {"max_rows": 2}, width=width)
    assert all(same(tree, own) for tree, own in zip(few.propose(rows), alone, strict=True))


def slow_tree(model: PlainModel, tokens: Sequence[int], budget: int, width: int) -> DraftTree:
    """The greedy tree by its rule: beams of the `width` likeliest paths of each length, the best `budget` nodes."""
    nodes: list[tuple[float, int, int, list[int], float]] = []  # worth, parent, token, path, confidence
    beams: list[tuple[int, list[int], float]] = [(-1, [], 1.0)]
    zero = np.zeros(1, dtype=np.int32)
    for _ in range(budget):
        level = len(nodes)
        for parent, before, worth in beams:
            ids, logprobs, _ = _native.top_logprobs(model.logits([*tokens, *before])[None], zero, width, zero)
            for token, p in zip(ids[0].tolist(), np.exp(logprobs[0]).tolist(), strict=True):
                nodes.append((worth * p, parent, token, [*before, token], p))
        best = sorted(range(level, len(nodes)), key=lambda i: -nodes[i][0])[:width]
        beams = [(i, nodes[i][3], nodes[i][0]) for i in best]
    order = sorted(range(len(nodes)), key=lambda i: -nodes[i][0])[:budget]
    at = {-1: -1} | {node: i for i, node in enumerate(order)}
    return DraftTree([nodes[i][2] for i in order], [at[nodes[i][1]] for i in order], [nodes[i][4] for i in order])


@pytest.mark.parametrize(("budget", "width"), [(1, 2), (5, 2), (12, 3), (20, 4)])
def test_a_greedy_tree_holds_the_likeliest_paths(model: PlainModel, path: Path, budget: int, width: int) -> None:
    """Each node's probability is, bit for bit, that of a plain forward over its own path: branches see only that."""
    drafter = make(model, path, width=width)
    for key, ids in enumerate(prompts(3, 14, 15, 31, seed=4)):
        tree = drafter.propose([draft_row(key, ids, budget)])[0]
        expected = slow_tree(model, ids, budget, width)
        assert same(tree, expected)
        assert max(tree.depths()) > 0 or budget == 1
        drafter.check_integrity()


@pytest.mark.parametrize("budget", [1, 4, 9])
def test_a_coupled_tree_holds_the_token_that_the_seed_draws(model: PlainModel, path: Path, budget: int) -> None:
    drafter = make(model, path, width=3)
    for key, params in enumerate(SAMPLED):
        row = draft_row(key, prompts(11, seed=key)[0], budget, params, seed=key)
        tree = drafter.propose([row])[0]
        assert tree.q is None
        assert len(tree) == budget
        best = max((i for i, p in enumerate(tree.parents) if p < 0), key=lambda i: tree.confidence[i])
        assert tree.tokens[best] == model.following(row.tokens, 1, params, key)[0]
        siblings: dict[int, set[int]] = {}
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            assert token not in siblings.setdefault(parent, set())
            siblings[parent].add(token)


def test_a_chain_ends_where_confidence_falls(model: PlainModel, path: Path) -> None:
    ids = prompts(9, seed=2)[0]
    whole = make(model, path).propose([draft_row(1, ids, 12)])[0]
    for threshold in sorted({0.0, *whole.confidence, 1.0}):
        drafter = make(model, path, min_confidence=threshold)
        tree = drafter.propose([draft_row(1, ids, 12)])[0]
        n = next((i for i, c in enumerate(whole.confidence) if c < threshold), 12)
        assert (list(tree.tokens), list(tree.confidence)) == (whole.tokens[:n], whole.confidence[:n])
        # The token that was left out isn't run.
        assert drafter.fed_tokens == len(ids) + min(n, 11)


@pytest.mark.parametrize("width", [1, 2])
def test_drawn_drafts_fill_the_budget_and_have_no_confidence(model: PlainModel, path: Path, width: int) -> None:
    """Their length must not depend on what was drawn: a rejection sampler would be biased by it."""
    params = SamplingParams(temperature=1.0, verify="rejection")
    drafter = make(model, path, width=width, min_confidence=1.0)
    for key, ids in enumerate(prompts(4, 20, 7)):
        tree = drafter.propose([draft_row(key, ids, 7, params, seed=key)])[0]
        assert len(tree) == 7
        assert len(tree.confidence) == 0
        assert tree.q is not None
        assert tree.parents == ([-1, 0, 1, 2, 3, 4, 5] if width == 1 else [-1, -1, 0, 0, 2, 2, 4])
        paths: list[list[int]] = []
        for token, parent, q in zip(tree.tokens, tree.parents, tree.q, strict=True):
            before = [] if parent < 0 else paths[parent]
            paths.append([*before, token])
            # Each q and token are those of the node's own place, bit for bit.
            place = Place(0, len(ids) + len(before), params, key)
            expected = draw(model.logits([*ids, *before]), place, width, VOCAB_SIZE)
            assert np.array_equal(q, expected.q)
            assert token in expected.tokens


def test_rejection_at_temperature_0_is_greedy(model: PlainModel, path: Path) -> None:
    ids = prompts(9)[0]
    plain = make(model, path).propose([draft_row(1, ids)])[0]
    assert same(make(model, path).propose([draft_row(1, ids, params=SamplingParams(verify="rejection"))])[0], plain)


def test_a_long_prompt_is_caught_up_in_parts_and_keeps_nobody_waiting(model: PlainModel, path: Path) -> None:
    drafter = make(model, path, {"max_step_tokens": 64, "max_rows": 4})
    long, short = prompts(200, 20)
    rows = [draft_row(1, long), draft_row(2, short)]
    lengths: list[int] = []
    for _ in range(6):
        before = drafter.fed_tokens
        trees = drafter.propose(rows)
        # 64 tokens to catch up, and 5 forwards of a chain of 6 for each row that is there.
        assert drafter.fed_tokens - before <= 64 + 5 * sum(len(tree) > 0 for tree in trees)
        drafter.check_integrity()
        assert trees[1].tokens == model.following(short, 6)
        lengths.append(len(trees[0]))
        short += model.following(short, 2)
        rows[1] = rows[1]._replace(tokens=short)
        if trees[0]:
            assert trees[0].tokens == model.following(long, 6)
    assert lengths == [0, 0, 0, 6, 6, 6]


def test_a_small_step_budget_still_lets_every_row_draft(model: PlainModel, path: Path) -> None:
    """Full acceptance leaves two tokens to run, a limit of one a step would never get there."""
    drafter = make(model, path, {"max_step_tokens": 1, "max_rows": 8})
    rows = [draft_row(key, ids, 2) for key, ids in enumerate(prompts(*[6] * 8))]
    for step in range(4):
        for row, tree in zip(rows, drafter.propose(rows), strict=True):
            assert len(tree) == 2, step
            row.tokens.extend([*tree.tokens, 5])  # type: ignore[attr-defined]


def test_equal_prompts_share_their_memory(model: PlainModel, path: Path) -> None:
    drafter = make(model, path)
    ids = prompts(100)[0]
    first = drafter.propose([draft_row(1, ids)])[0]
    assert drafter.fed_tokens == 105
    # While the first still runs, and after it has gone; the last block is computed anew.
    for key in (2, 3):
        before = drafter.fed_tokens
        assert same(drafter.propose([draft_row(key, ids)])[0], first)
        assert drafter.fed_tokens - before == 100 - 96 + 5
        drafter.check_integrity()
        drafter.free(key - 1, ids)
    drafter.free(3, ids)
    assert_empty(drafter)


def test_scopes_share_no_memory(model: PlainModel, path: Path) -> None:
    drafter = make(model, path)
    ids = prompts(100)[0]
    fed: list[int] = []
    for key, scope in enumerate(["one", "two", None, "one"]):
        before = drafter.fed_tokens
        drafter.begin(key, scope)
        drafter.propose([draft_row(key, ids, 1)])
        fed.append(drafter.fed_tokens - before)
    drafter.fork(0, 9)
    drafter.free(9, ids)
    drafter.check_integrity()
    assert fed == [100, 100, 100, 4]


def test_the_end_of_the_draft_models_context(model: PlainModel, tmp_path: Path) -> None:
    """Case 6: past it no draft, before it shorter ones, and never a token from a place that the model doesn't have."""
    spec = TinySpec("qwen2", layers=2, context=64)
    drafter = make(model, write_tiny_gguf(tmp_path / "short.gguf", spec))
    ids = prompts(50)[0]
    for n in range(50, 70):
        while len(ids) < n:
            ids += model.following(ids, 1)
        tree = drafter.propose([draft_row(1, ids)])[0]
        length = max(0, min(6, 64 - n + 1))
        assert tree.tokens == (model.following(ids, length) if length else ())
        drafter.check_integrity()
    drafter.free(1, ids)
    assert_empty(drafter)


@pytest.mark.parametrize("width", [1, 3])
def test_the_end_of_the_targets_context(model: PlainModel, path: Path, width: int) -> None:
    drafter = make(model, path, {"max_model_len": 40}, width=width)
    for n in range(30, 42):
        tree = drafter.propose([draft_row(n, prompts(n)[0])])[0]
        assert len(tree) == 0 if n >= 40 else max(tree.depths()) <= 39 - n


def test_a_token_that_is_not_the_draft_models_stops_drafting(model: PlainModel, path: Path) -> None:
    context = draft_context(model, path)
    drafter = ModelDrafter(context, min_confidence=0.0)
    tokens = [1, 2, VOCAB_SIZE, 3]
    assert [len(tree) for tree in drafter.propose([draft_row(1, tokens), draft_row(2, [4, 5])])] == [0, 6]
    drafter.truncate(1, 2)
    assert drafter.propose([draft_row(1, [1, 2, 3])])[0].tokens == model.following([1, 2, 3], 6)
    drafter.check_integrity()


def test_q_reaches_over_the_targets_whole_vocabulary(model: PlainModel, path: Path) -> None:
    context = draft_context(model, path)
    wide = dataclasses.replace(context, config=dataclasses.replace(context.config, vocab_size=VOCAB_SIZE + 20))
    params = SamplingParams(temperature=1.0, verify="rejection", logit_bias={VOCAB_SIZE + 3: 50.0, 7: 1.0})
    tree = ModelDrafter(wide).propose([draft_row(1, [1, 2, 3], params=params)])[0]
    assert tree.q is not None
    assert tree.q.shape == (6, VOCAB_SIZE + 20)
    assert not tree.q[:, VOCAB_SIZE:].any()
    assert max(tree.tokens) < VOCAB_SIZE


def test_scores_that_are_not_numbers_end_a_draft(model: PlainModel, tmp_path: Path) -> None:
    from reference.gguf_writer import write_gguf
    from reference.quant import make_tensor
    from reference.tiny import tiny_metadata, tiny_weights

    spec = TinySpec("qwen2", layers=1)
    weights = tiny_weights(spec)
    weights["token_embd.weight"][40] = np.nan
    broken = write_gguf(
        tmp_path / "nan.gguf", tiny_metadata(spec), [make_tensor(name, values) for name, values in weights.items()]
    )
    drafter = make(model, broken)
    for params in (GREEDY, HOT, SamplingParams(temperature=0.9, verify="rejection")):
        key = id(params)
        rows = [draft_row(key, [3, 40], params=params), draft_row(key + 1, [3, 41], params=params)]
        trees = drafter.propose(rows)
        assert len(trees[0]) == 0
        assert len(trees[1]) > 0
        drafter.check_integrity()


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"width": 0}, "width"), ({"width": 17}, "width"), ({"min_confidence": 1.5}, "min_confidence"),
     ({"min_confidence": float("nan")}, "min_confidence"), ({"kv_tokens": 15}, "kv_tokens")],
)  # fmt: skip
def test_settings_are_checked(model: PlainModel, path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        make(model, path, **settings)


def test_by_name(model: PlainModel, path: Path) -> None:
    context = draft_context(model, path)
    factory = drafter_factory(f"model:{path}")
    assert factory is not None
    drafter = factory(context)
    assert isinstance(drafter, ModelDrafter)
    assert drafter.propose([draft_row(1, [1, 2, 3], 1)])[0].tokens == model.following([1, 2, 3], 1)
    drafter.close()
    with pytest.raises(ModelNotFoundError):
        factory = drafter_factory("model:nosuch")
        assert factory is not None
        factory(context)


@pytest.mark.model
def test_a_real_model_drafts_itself() -> None:
    path = resolve("smollm2-135m-instruct")
    model = PlainModel(path, context=64)
    drafter = ModelDrafter(draft_context(model, path, kv_tokens=256, max_model_len=64))
    tokens = model.tokenizer.encode("The capital of France is Paris. The capital of Italy is")
    row = draft_row(1, tokens, 5)
    tree = drafter.propose([row])[0]
    assert 0 < len(tree) <= 5
    assert tree.tokens == model.following(tokens, len(tree))
    tokens += tree.tokens
    again = drafter.propose([row._replace(tokens=tokens)])[0]
    assert list(again.tokens) == model.following(tokens, len(again))
    drafter.check_integrity()
