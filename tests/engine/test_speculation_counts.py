"""Counts of drafting and verification: worked traces number by number, and their identities whatever happens.

The models of the traces follow scripts; the step of the prompt writes one token and drafts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import RequestOutput, SamplingParams
from forerun.draft.base import Drafter, DraftRow, DraftTree
from forerun.engine.output import DrafterCounts, EngineStats, SpeculationStats
from forerun.engine.tally import Tally
from reference.bigram import write_bigram_gguf
from reference.drafters import Oracle, RandomTrees, Scripted, Silent, Watched
from reference.speculation import Unspeculated, check_identities, check_sums, engine_for

PROMPT = 200
LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz")
FREE = SamplingParams(max_tokens=13)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a follows the prompt, then the alphabet."""
    return write_bigram_gguf(tmp_path_factory.mktemp("model") / "b.gguf", [PROMPT, *LETTERS])


def right(row: DraftRow) -> list[int]:
    """The tokens that follow, as many as may be proposed."""
    script = [PROMPT, *LETTERS]
    return script[script.index(row.tokens[-1]) + 1 :][: row.budget]


def right_until(n: int) -> Callable[[DraftRow], list[int]]:
    """`n` right tokens, then wrong ones up to the budget."""
    return lambda row: [token if i < n else 255 for i, token in enumerate(right(row))]


def counted(path: Path, drafter: Drafter, params: SamplingParams, draft_len: int = 5) -> SpeculationStats:
    """Counts of one request, which are also the engine's."""
    engine = engine_for(path, drafter, draft_len)
    [output] = engine.generate([[PROMPT]], params)
    check_identities(output)
    stats = output.stats.speculation
    total = engine.stats()
    assert without_seconds(total.speculation) == without_seconds(stats)
    assert (total.computed_tokens, total.emitted_tokens) == (stats.computed, stats.emitted)
    return stats


def without_seconds(stats: SpeculationStats) -> dict[str, Any]:
    return {f.name: getattr(stats, f.name) for f in fields(stats) if not f.name.endswith("_seconds")}


def test_full_acceptance(letters: Path) -> None:
    """1 + (5 + bonus) + (5 + bonus) tokens in three steps."""
    stats = counted(letters, Scripted(right), FREE)
    assert without_seconds(stats) == {
        "steps": 3, "decisions": 3, "drafted": 2, "proposed": 10, "computed": 1 + 2 * 6, "accepted": 10, "cut": 0,
        "emitted": 13, "proposed_by_position": (2,) * 5, "accepted_by_position": (2,) * 5,
        "drafted_by_length": (0, 0, 0, 0, 2),
        "by_drafter": {"scripted": DrafterCounts(2, 10, 10)},
    }  # fmt: skip
    assert (stats.acceptance, stats.tokens_per_decision) == (1.0, 13 / 3)


def test_rejection(letters: Path) -> None:
    """Two of five accepted and a correction, four times."""
    stats = counted(letters, Scripted(right_until(2)), replace(FREE, max_tokens=13))
    # Drafts of 5, 5, 5 and, one token before the cap, of what the cap leaves: 2.
    assert without_seconds(stats) == {
        "steps": 5, "decisions": 5, "drafted": 4, "proposed": 17, "computed": 1 + 4 + 17, "accepted": 8, "cut": 0,
        "emitted": 13, "proposed_by_position": (4, 4, 3, 3, 3), "accepted_by_position": (4, 4, 0, 0, 0),
        "drafted_by_length": (0, 1, 0, 0, 3),
        "by_drafter": {"scripted": DrafterCounts(4, 17, 8)},
    }  # fmt: skip


def test_always_wrong(letters: Path) -> None:
    stats = counted(letters, Scripted(right_until(0)), replace(FREE, max_tokens=4))
    assert (stats.decisions, stats.drafted, stats.proposed, stats.accepted, stats.emitted) == (4, 2, 3, 0, 4)
    assert (stats.proposed_by_position, stats.accepted_by_position) == ((2, 1), (0, 0))
    assert (stats.acceptance, stats.tokens_per_decision) == (0.0, 1.0)


@pytest.mark.parametrize("place", range(1, 7))
def test_an_end_inside_the_draft(letters: Path, place: int) -> None:
    """Cases 7 and 35: what the target agreed to is accepted, what follows the end is cut, the rest is emitted."""
    stats = counted(letters, Scripted(right), replace(FREE, stop_token_ids=[LETTERS[place]]))
    assert (stats.decisions, stats.drafted, stats.proposed, stats.accepted) == (2, 1, 5, 5)
    assert (stats.emitted, stats.cut) == (1 + place, 6 - place)
    assert stats.accepted_by_position == (1,) * 5


@pytest.mark.parametrize("cap", range(1, 14))
def test_the_output_cap(letters: Path, cap: int) -> None:
    """Drafts that can't be used aren't computed: one token of a step is the target's own."""
    stats = counted(letters, Scripted(right), replace(FREE, max_tokens=cap))
    assert (stats.emitted, stats.cut) == (cap, 0)
    full, rest = divmod(cap - 1, 6)
    assert stats.proposed == 5 * full + max(rest - 1, 0)
    assert stats.computed == 1 + (stats.decisions - 1) + stats.proposed


def test_trees_count_all_nodes_and_paths_by_depth(letters: Path) -> None:
    """Four candidates first, then two children of the right one: (4, 2) proposed, (1, 1) accepted."""

    def tree(row: DraftRow) -> DraftTree:
        first, second = right(row)[:2]
        return DraftTree([255, first, 254, 253, second, 252], [-1, -1, -1, -1, 1, 1])

    stats = counted(letters, Scripted(tree), replace(FREE, max_tokens=10, stop="d"), draft_len=6)
    assert (stats.drafted, stats.proposed, stats.accepted, stats.emitted, stats.cut) == (1, 6, 2, 4, 0)
    assert (stats.proposed_by_position, stats.accepted_by_position) == ((4, 2), (1, 1))
    assert stats.acceptance == 2 / 6


def test_drafters_are_told_apart(letters: Path) -> None:
    """A drafter that passes on others' trees names them; what it leaves unnamed is its own."""

    def tree(row: DraftRow) -> DraftTree:
        name = {0: "", 1: "first", 2: "second"}[len(row.tokens) % 3]
        tokens = right(row) if name == "first" else right_until(1)(row)
        return DraftTree.chain(tokens, drafter=name)

    engine = engine_for(letters, Scripted(tree), 2)
    [output] = engine.generate([[PROMPT]], FREE)
    check_identities(output)
    stats = output.stats.speculation
    # 2 tokens known: second, 1 + 1; 4: first, 2 + 1; 7: first; 10: first; 13: one token left, no draft.
    assert dict(stats.by_drafter) == {"second": DrafterCounts(1, 2, 1), "first": DrafterCounts(3, 6, 6)}
    assert engine.stats().speculation.by_drafter == stats.by_drafter
    [output] = engine.generate([[1, 1, PROMPT]], replace(FREE, max_tokens=8))
    assert output.stats.speculation.by_drafter["first"].drafts >= 1
    [output] = engine.generate([[1, PROMPT]], replace(FREE, max_tokens=8))
    assert output.stats.speculation.by_drafter["scripted"].drafts >= 1


def test_without_drafts_there_is_no_data(letters: Path) -> None:
    """Case 37: no drafts are None, not 0; and drafts that were never made are in no denominator."""
    empty = SpeculationStats()
    assert (empty.acceptance, empty.tokens_per_decision) == (None, None)
    for drafter in ("none", Silent()):
        engine = engine_for(letters, drafter)
        assert engine.stats().speculation.acceptance is None
        assert engine.stats().speculation.tokens_per_decision is None
        [output] = engine.generate([[PROMPT]], FREE)
        stats = output.stats.speculation
        assert (stats.drafted, stats.proposed, stats.accepted, stats.acceptance) == (0, 0, 0, None)
        assert (stats.proposed_by_position, stats.accepted_by_position, dict(stats.by_drafter)) == ((), (), {})
        assert (stats.decisions, stats.computed, stats.tokens_per_decision) == (13, 13, 1.0)
    # A drafter that is silent at first: the silent steps are decisions, and no drafts.
    shy = Scripted(lambda row: right(row)[:2] if len(row.tokens) > 6 else [])
    stats = counted(letters, shy, FREE)
    assert (stats.drafted, stats.proposed, stats.accepted, stats.acceptance) == (2, 4, 4, 1.0)
    # Never asked: off for this request.
    engine = engine_for(letters, Scripted(right))
    [output] = engine.generate([[PROMPT]], FREE, speculate=False)
    assert output.stats.speculation.acceptance is None
    assert engine.stats().speculation.drafted == 0


def test_a_longer_draft_has_a_lower_rate_by_arithmetic_alone(letters: Path) -> None:
    """Case 38: two tokens of each draft are right, whatever its length; so rates can't rank lengths."""
    params = replace(FREE, max_tokens=16, stop_token_ids=[LETTERS[9]])
    found = {k: counted(letters, Scripted(right_until(2)), params, draft_len=k) for k in (2, 4, 5)}
    assert [found[k].acceptance for k in found] == [1.0, 0.5, 0.4]
    assert len({stats.tokens_per_decision for stats in found.values()}) == 1


def test_acceptance_by_position_is_of_drafts_and_not_conditional(tmp_path: Path) -> None:
    """Case 36: 60 drafts of three tokens, of which 36, 23 and 9 accept at least one, two, three; 128 tokens in all.

    The 60 tokens of the target's own are in no draft: the rate is 68 / 180 and not 128 / 240.
    """
    script = [PROMPT, *(t for t in range(250) if t != PROMPT)]
    path = write_bigram_gguf(tmp_path / "b.gguf", script)
    lengths = [3] * 9 + [2] * 14 + [1] * 13 + [0] * 24
    queue = iter(np.random.default_rng(0).permutation(lengths).tolist())

    def chain(row: DraftRow) -> list[int]:
        accepted = next(queue)
        following = script[script.index(row.tokens[-1]) + 1 :][:3]
        return [token if i < accepted else 255 for i, token in enumerate(following)]

    engine = engine_for(path, Scripted(chain), 3)
    handle = engine.submit([PROMPT], SamplingParams(max_tokens=200))
    for _ in range(61):
        engine.step()
    stats = engine.stats().speculation
    assert (stats.drafted, stats.proposed, stats.accepted) == (60, 180, 68)
    assert stats.accepted_by_position == (36, 23, 9)
    assert stats.proposed_by_position == (60, 60, 60)
    assert stats.acceptance == pytest.approx(0.378, abs=5e-4)
    assert stats.emitted == 1 + 128
    handle.cancel()
    assert handle.result().stats.speculation.emitted == 129


def test_a_trace_tells_every_choice_of_a_length(letters: Path) -> None:
    """One decision for each step that asked the drafter; their lengths are what was verified."""
    engine = engine_for(letters, Scripted(right_until(2)), 4)
    pieces = list(engine.stream([PROMPT], FREE, trace=True))
    decisions = [decision for piece in pieces for decision in piece.decisions]
    stats = engine.stats().speculation
    assert len(decisions) == stats.drafted == 4
    assert sum(decision.length for decision in decisions) == stats.proposed
    # After the prompt and its token; then three more tokens each time.
    assert [decision.position for decision in decisions] == [2, 5, 8, 11]
    assert all(decision.reason for decision in decisions)
    assert not any(piece.decisions for piece in engine.stream([PROMPT], FREE))


class Recount(Watched):
    """Counts again, from what the drafter is told."""

    def expected(self, keys: Sequence[int]) -> tuple[int, int, int, list[int], list[int]]:
        """Drafts, proposed, accepted, and the last two by position."""
        proposed: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        drafts = 0
        for key, tree, path in self.observed:
            if key in keys:
                drafts += 1
                proposed.update(tree.depths())
                accepted.update(range(len(path)))
        positions = range(max(proposed, default=-1) + 1)
        return (
            drafts, proposed.total(), accepted.total(), [proposed[p] for p in positions],
            [accepted[p] for p in positions],
        )  # fmt: skip


def listed(stats: SpeculationStats) -> tuple[int, int, int, list[int], list[int]]:
    return (
        stats.drafted, stats.proposed, stats.accepted, list(stats.proposed_by_position),
        list(stats.accepted_by_position),
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Unspeculated:
    return Unspeculated(tiny)


@given(
    seed=st.integers(0, 1000),
    kv_blocks=st.integers(5, 12),
    max_rows=st.integers(1, 4),
    spare=st.integers(1, 30),
    draft_len=st.integers(1, 10),
    cancels=st.dictionaries(st.integers(0, 5), st.integers(0, 20), max_size=3),
    chains=st.booleans(),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_identities_hold_whatever_happens(
    tiny: Path, alone: Unspeculated, seed: int, kv_blocks: int, max_rows: int, spare: int, draft_len: int,
    cancels: dict[int, int], chains: bool,
) -> None:  # fmt: skip
    """Stops, caps, preemption, chunks and cancellations; counted again from the drafter's and the model's side."""
    rng = np.random.default_rng(seed)
    asks = [
        (
            [i, *rng.integers(0, 300, rng.integers(0, 30)).tolist()],
            SamplingParams(
                max_tokens=int(rng.integers(1, 30)), temperature=[0.0, 0.9][i % 2], seed=seed, ignore_eos=i % 3 > 0,
                stop_token_ids=rng.integers(0, 300, 12).tolist(), stop=["e", "in"][: i % 3],
            ),
        )
        for i in range(6)
    ]  # fmt: skip
    for prompt, params in asks:
        alone.answer(prompt, params)
    drafter = Recount(Oracle(alone.truth) if chains else RandomTrees(alone.truth, seed))
    engine = engine_for(
        tiny, drafter, draft_len, kv_tokens=16 * kv_blocks, max_rows=max_rows, max_step_tokens=max_rows + spare
    )
    computed, forward = 0, engine.executor.forward

    def counting(step: Any, *rest: Any) -> Any:
        nonlocal computed
        computed += len(step.tokens)
        assert len(step.tokens) <= max_rows + spare  # draft tokens are tokens of the step's budget
        return forward(step, *rest)

    engine.executor.forward = counting  # type: ignore[method-assign,assignment]
    handles = [engine.submit(prompt, params) for prompt, params in asks]
    steps = 0
    while engine.step():
        steps += 1
        for i, when in cancels.items():
            if when == steps:
                handles[i].cancel()
    outputs = [handle.result() for handle in handles]
    for i, output in enumerate(outputs):
        check_identities(output)
        # Prompts begin with their number.
        assert listed(output.stats.speculation) == drafter.expected([k for k, t in drafter.ended.items() if t[0] == i])
    check_totals(engine.stats(), outputs)
    assert listed(engine.stats().speculation) == drafter.expected(list(drafter.ended))
    assert engine.stats().computed_tokens == computed
    assert engine.stats().steps == steps
    assert drafter.balanced()
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def check_totals(total: EngineStats, outputs: Sequence[RequestOutput]) -> None:
    """The engine's counts are the sum of its requests'."""
    check_sums(total.speculation)
    each = [output.stats.speculation for output in outputs]
    for name in ("steps", "decisions", "drafted", "proposed", "computed", "accepted", "cut", "emitted"):
        assert getattr(total.speculation, name) == sum(getattr(stats, name) for stats in each)
    for name in ("proposed_by_position", "accepted_by_position", "drafted_by_length"):
        summed: Counter[int] = Counter()
        for stats in each:
            summed.update(dict(enumerate(getattr(stats, name))))
        assert dict(enumerate(getattr(total.speculation, name))) == dict(summed)
    assert total.emitted_tokens == total.speculation.emitted == sum(len(output.token_ids) for output in outputs)
    assert total.computed_tokens == total.speculation.computed


def test_recomputed_tokens_count_as_computed(tiny: Path, alone: Unspeculated) -> None:
    """After preemption the known tokens run again; accepted drafts among them are known tokens then."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [[i, *range(20)] for i in range(4)]
    for prompt in prompts:
        alone.answer(prompt, params)
    engine = engine_for(tiny, Oracle(alone.truth), 6, kv_tokens=16 * 6, max_rows=4, prefix_cache=False)
    outputs = engine.generate(prompts, params)
    assert engine.stats().preemptions > 0
    check_totals(engine.stats(), outputs)
    for output in outputs:
        check_identities(output)
        stats = output.stats.speculation
        known = stats.computed - stats.proposed
        # Once: the prompt, and one known token for each later decision.
        once = output.stats.prompt_tokens + stats.decisions - 1
        assert (known > once) == (output.stats.preemptions > 0)


def test_cancelled_requests_are_counted_for_what_they_did(letters: Path) -> None:
    engine = engine_for(letters, Scripted(right), 3)
    handle = engine.submit([PROMPT], FREE)
    unstarted = engine.submit([PROMPT], FREE)
    unstarted.cancel()
    for _ in range(3):
        engine.step()
    handle.cancel()
    output = handle.result()
    assert output.finish_reason == "cancelled"
    check_identities(output)
    stats = output.stats.speculation
    assert (stats.decisions, stats.accepted, stats.emitted, len(output.token_ids)) == (3, 6, 9, 9)
    assert unstarted.result().stats.speculation == SpeculationStats()
    assert without_seconds(engine.stats().speculation) == without_seconds(stats)


def test_a_fork_counts_its_own_steps(letters: Path) -> None:
    """The output so far came from its parent's decisions."""
    engine = engine_for(letters, Scripted(right), 3)
    parent = engine.submit([PROMPT], FREE)
    for _ in range(2):
        engine.step()
    child = engine.fork(parent)
    outputs = [parent.result(), child.result()]
    assert outputs[0].token_ids == outputs[1].token_ids
    for output in outputs:
        check_sums(output.stats.speculation)
    check_identities(outputs[0])
    assert outputs[1].stats.speculation.emitted == 13 - 5
    assert outputs[1].stats.output_tokens == 13


def test_seconds_are_those_of_the_steps(tiny: Path, alone: Unspeculated) -> None:
    """The parts of a step make up the step; an engine counts each once, a request the steps that it had a row in."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [[1, 2, 3], [250, 7], [99]]
    for prompt in prompts:
        alone.answer(prompt, params)
    engine = engine_for(tiny, Oracle(alone.truth), 3)
    outputs = engine.generate(prompts, params)
    total = engine.stats()
    parts = ("draft_seconds", "forward_seconds", "verify_seconds", "schedule_seconds")
    for name in parts:
        assert getattr(total.speculation, name) > 0
        for output in outputs:
            # All three ran in every step.
            assert getattr(output.stats.speculation, name) == pytest.approx(getattr(total.speculation, name))
    assert sum(getattr(total.speculation, name) for name in parts) <= total.step_seconds
    assert total.native_seconds <= total.speculation.forward_seconds


DRAFT = Tally.draft


def own_token_accepted(tally: Tally, tree: DraftTree, accepted: int) -> None:
    DRAFT(tally, tree, accepted + 1)


def nodes_accepted(tally: Tally, tree: DraftTree, accepted: int) -> None:
    DRAFT(tally, tree, accepted)
    tally.accepted += len(tree) - accepted


def one_draft_short(tally: Tally, tree: DraftTree, accepted: int) -> None:
    DRAFT(tally, tree, accepted)
    tally.drafted -= 1


def drafts_not_computed(tally: Tally, tree: DraftTree, accepted: int) -> None:
    DRAFT(tally, tree, accepted)
    tally.computed -= len(tree)


def siblings_not_proposed(tally: Tally, tree: DraftTree, accepted: int) -> None:
    DRAFT(tally, tree, accepted)
    tally.proposed -= tree.depths().count(0) - 1


def two_drafts_a_row(tally: Tally, tree: DraftTree, accepted: int) -> None:
    DRAFT(tally, tree.first(1), 0)
    DRAFT(tally, tree, accepted)


@pytest.mark.parametrize(
    "fault",
    [own_token_accepted, nodes_accepted, one_draft_short, drafts_not_computed, siblings_not_proposed, two_drafts_a_row],
)
def test_planted_miscounts_break_an_identity(
    letters: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tally, DraftTree, int], None]
) -> None:
    """Each miscount is noticed by the checks that all tests of this file share."""

    def tree(row: DraftRow) -> DraftTree:
        tokens = right_until(2)(row)[: row.budget // 2]
        return DraftTree([254, *tokens], [-1, -1, *range(1, len(tokens))])

    params = replace(FREE, stop_token_ids=[LETTERS[8]])
    assert counted(letters, Scripted(tree), params, draft_len=8).cut > 0
    monkeypatch.setattr(Tally, "draft", fault)
    with pytest.raises(AssertionError):
        counted(letters, Scripted(tree), params, draft_len=8)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_planted_miscount_of_what_was_cut_breaks_an_identity(
    letters: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    decision = Tally.decision
    monkeypatch.setattr(Tally, "decision", lambda self, tokens, kept: decision(self, tokens + shift, kept))
    with pytest.raises(AssertionError):
        counted(letters, Scripted(right), FREE)
