"""Suffix proposals against a reading of whole texts, with faults planted to show that the comparison sees them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp, inf, nan
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forerun import Engine, SamplingParams, _native
from forerun.draft import DraftRow, DraftTree
from forerun.draft.doubt import MOST, RATE, updated_doubt
from forerun.draft.suffix import ESCAPES, LENGTHS, SHARED_WEIGHT, SuffixDrafter, scope_key
from forerun.errors import ConfigurationError
from reference import suffixes

PARAMS = SamplingParams()
SMALL = 1 << 20

Texts = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=48))


def draft(drafter: SuffixDrafter, key: int, tokens: Sequence[int], budget: int = 16) -> DraftTree:
    (tree,) = drafter.propose([DraftRow(key, tokens, budget, PARAMS, 0)])
    return tree


def check_shape(tree: DraftTree, budget: int, min_survival: float) -> None:
    """What every proposal promises."""
    n = len(tree)
    assert n <= min(budget, 63)
    assert len(tree.parents) == len(tree.confidence) == n
    assert all(-1 <= parent < node for node, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == n, "two equal siblings"
    survival: list[float] = []
    for parent, confidence in zip(tree.parents, tree.confidence, strict=True):
        assert 0 < confidence < 1
        survival.append(confidence * (survival[parent] if parent >= 0 else 1.0))
    assert survival == sorted(survival, reverse=True)
    assert all(s >= min_survival for s in survival)
    for parent in {-1, *range(n)}:
        assert sum(c for p, c in zip(tree.parents, tree.confidence, strict=True) if p == parent) < 1


@settings(max_examples=250, derandomize=True, deadline=None)
@given(
    own=Texts,
    stored=st.lists(Texts, max_size=4),
    budget=st.integers(1, 63),
    min_survival=st.sampled_from([0.5, 0.1, 0.01, 0.001]),
    doubt=st.sampled_from([0.125, 1.0, 8.0]),
    limits=st.tuples(st.sampled_from([1, 3, 64]), st.sampled_from([1, 3, 32])),
    depth=st.sampled_from([1, 3, 63]),
)
def test_equals_a_reading_of_all_texts(
    own: list[int],
    stored: list[list[int]],
    budget: int,
    min_survival: float,
    doubt: float,
    limits: tuple[int, int],
    depth: int,
) -> None:
    text = _native.SuffixText(LENGTHS)
    text.follow(own)
    store = _native.SuffixStore(LENGTHS, SMALL)
    for tokens in stored:
        store.insert(b"scope", tokens)
    kept = [tokens for tokens in stored if len(tokens) > 1]
    assert store.documents(b"scope") == kept
    native = _native.SuffixRule(ESCAPES, SHARED_WEIGHT, min_survival, depth, *limits)
    rule = suffixes.Rule(LENGTHS, ESCAPES, SHARED_WEIGHT, min_survival, depth, *limits)
    found = _native.propose_suffix(text, store, b"scope", budget, native, doubt)
    expected = suffixes.propose(own, kept, budget, rule, doubt)
    assert found[:2] == expected[:2]
    assert found[2] == pytest.approx(expected[2], rel=1e-12)
    check_shape(DraftTree(*found), budget, min_survival)
    assert _native.propose_suffix(text, store, b"other", budget, native, doubt) == _native.propose_suffix(
        text, None, b"scope", budget, native, doubt
    )


def play(make: type[SuffixDrafter], seed: int) -> None:
    """A seeded session of several requests that grow, go back, fork and end; proposals must be the reference's."""
    rng = random.Random(seed)
    drafter = make(shared_bytes=SMALL, min_survival=0.02)
    rule = suffixes.Rule(LENGTHS, ESCAPES, SHARED_WEIGHT, 0.02)
    scopes: dict[int, str | None] = {}
    live: dict[int, list[int]] = {}
    ended: dict[str | None, list[list[int]]] = {}
    next_key = 0
    for _ in range(40):
        action = rng.randrange(6)
        if action == 0 or not live:
            scopes[next_key] = rng.choice([None, "", "a"])
            live[next_key] = []
            drafter.begin(next_key, scopes[next_key])
            next_key += 1
            continue
        key = rng.choice(sorted(live))
        tokens = live[key]
        if action == 1:
            back = max(0, len(tokens) - rng.randrange(6))
            drafter.truncate(key, back)
            del tokens[back:]
        elif action == 2:
            drafter.fork(key, next_key)
            live[next_key], scopes[next_key] = tokens.copy(), scopes[key]
            next_key += 1
        elif action == 3 and rng.random() < 0.5:
            drafter.free(key, tokens)
            if len(tokens) > 1:
                ended.setdefault(scopes[key], []).append(tokens)
            del live[key]
            continue
        tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
        if rng.random() < 0.7:
            tree = draft(drafter, key, tokens)
            expected = suffixes.propose(tokens, ended.get(scopes[key], []), 16, rule)
            assert (list(tree.tokens), list(tree.parents)) == expected[:2]
            assert list(tree.confidence) == pytest.approx(expected[2])
            check_shape(tree, 16, 0.02)
    for key, tokens in live.items():
        drafter.free(key, tokens)
    assert (drafter.n_requests, drafter.state_bytes) == (0, 0)
    assert drafter.store is not None
    drafter.store.check_integrity()


@pytest.mark.parametrize("seed", range(25))
def test_sessions_equal_the_reference(seed: int) -> None:
    play(SuffixDrafter, seed)


class NeverBack(SuffixDrafter):
    """Keeps what it should forget."""

    def truncate(self, key: int, n_tokens: int) -> None:
        """Forgets nothing."""


class ForkShares(SuffixDrafter):
    """A fork that writes into its parent's text."""

    def fork(self, key: int, child: int) -> None:
        self._states[child] = self._states[key]


class OneScope(SuffixDrafter):
    """Everybody's text is for everybody."""

    def begin(self, key: int, scope: str | None) -> None:  # noqa: ARG002
        super().begin(key, None)


class EmptyIsNone(SuffixDrafter):
    """The scope "" is taken for none."""

    def begin(self, key: int, scope: str | None) -> None:
        super().begin(key, scope or None)


class Forgets(SuffixDrafter):
    """Doesn't keep the text of requests that end."""

    def free(self, key: int, tokens: Sequence[int]) -> None:  # noqa: ARG002
        super().free(key, [])


class Leaks(SuffixDrafter):
    """Keeps the state of requests that end."""

    def free(self, key: int, tokens: Sequence[int]) -> None:
        kept = self._states[key]
        super().free(key, tokens)
        self._states[key] = kept


class Twins(SuffixDrafter):
    """Proposes its first node twice."""

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        trees = super().propose(rows)
        return [DraftTree([*t.tokens, *t.tokens[:1]], [*t.parents, -1], [*t.confidence, 0.02]) for t in trees]


@pytest.mark.parametrize("fault", [NeverBack, ForkShares, OneScope, EmptyIsNone, Forgets, Leaks, Twins])
def test_planted_faults_are_caught(fault: type[SuffixDrafter]) -> None:
    def many() -> None:
        for seed in range(25):
            play(fault, seed)

    with pytest.raises(AssertionError):
        many()


def test_a_tree_follows_the_counts() -> None:
    """After 1 2 came 3 three times, 4 twice and 5 once; after 3 always 7."""
    drafter = SuffixDrafter(shared=False, min_survival=0.05)
    drafter.begin(0, None)
    text = [1, 2, 3, 7, 8, 1, 2, 4, 9, 1, 2, 3, 7, 10, 1, 2, 5, 11, 1, 2, 4, 12, 1, 2, 3, 7, 13, 1, 2]
    tree = draft(drafter, 0, text, 63)
    roots = [node for node, parent in enumerate(tree.parents) if parent < 0]
    assert [tree.tokens[node] for node in roots] == [3, 4, 5]
    # Two tokens of context: 3 / (6 + 3 * 1), and so on. Shorter contexts have no occurrences of their own.
    assert [tree.confidence[node] for node in roots] == pytest.approx([3 / 9, 2 / 9, 1 / 9])
    seven = tree.tokens.index(7)
    assert tree.tokens[tree.parents[seven]] == 3
    assert tree.confidence[seven] == pytest.approx(3 / (3 + 1))


def test_a_longer_context_outweighs_frequency() -> None:
    drafter = SuffixDrafter(shared=False)
    drafter.begin(0, None)
    long = [21, 22, 23, 24, 25, 26, 27, 28]
    text = [*long, 99, *[28, 50] * 6, *long]
    assert draft(drafter, 0, text).tokens[0] == 99


def test_own_text_comes_before_finished_text() -> None:
    drafter = SuffixDrafter()
    drafter.begin(0, None)
    drafter.free(0, [1, 2, 3, 4, 70])
    drafter.begin(1, None)
    tree = draft(drafter, 1, [1, 2, 3, 4, 80, 1, 2, 3, 4])
    assert [tree.tokens[i] for i in range(len(tree)) if tree.parents[i] < 0] == [80, 70]


def test_finished_text_is_proposed_to_the_next_request() -> None:
    """Also of a request that never asked for a draft."""
    drafter = SuffixDrafter(min_survival=0.01)
    drafter.begin(0, "me")
    drafter.free(0, [5, 6, 7, 8, 9, 10])
    drafter.begin(1, "me")
    assert list(draft(drafter, 1, [1, 5, 6, 7], 3).tokens) == [8, 9, 10]


def test_no_store_keeps_nothing() -> None:
    drafter = SuffixDrafter(shared=False)
    assert drafter.store is None
    drafter.begin(0, None)
    drafter.free(0, [5, 6, 7, 8, 9, 10])
    drafter.begin(1, None)
    assert len(draft(drafter, 1, [1, 5, 6, 7])) == 0


@pytest.mark.parametrize("tokens", [[], [3], [1, 2, 3, 4]])
def test_nothing_is_found_in_short_or_new_texts(tokens: list[int]) -> None:
    drafter = SuffixDrafter()
    drafter.begin(0, None)
    assert len(draft(drafter, 0, tokens)) == 0


@pytest.mark.parametrize("period", [1, 2, 3, 7])
def test_a_repeating_text_goes_on(period: int) -> None:
    text = [10 + i % period for i in range(40)]
    drafter = SuffixDrafter()
    drafter.begin(0, None)
    tree = draft(drafter, 0, text, 200)
    assert len(tree) > 2 * period
    assert tree.is_chain
    assert list(tree.tokens) == [10 + i % period for i in range(40, 40 + len(tree))]


def test_the_first_nodes_are_the_smaller_budget() -> None:
    rng = random.Random(5)
    text = [rng.randrange(3) for _ in range(300)]
    drafter = SuffixDrafter(min_survival=0.001)
    drafter.begin(0, None)
    whole = draft(drafter, 0, text, 63)
    assert len(whole) == 63
    for budget in range(1, 63):
        part = draft(drafter, 0, text, budget)
        assert (list(part.tokens), list(part.parents)) == (list(whole.tokens)[:budget], list(whole.parents)[:budget])


def test_long_prompts_and_tokens_that_come_in_groups() -> None:
    """At 32k tokens, in one piece and in groups of several: the same tree, and cutting back equals never having had."""
    rng = random.Random(8)
    words = [[rng.randrange(32_000) for _ in range(rng.randrange(1, 6))] for _ in range(800)]
    text: list[int] = []
    while len(text) < 33_000:
        text += words[min(int(rng.paretovariate(0.5)), 799)]
    drafter = SuffixDrafter()
    drafter.begin(0, None)
    drafter.begin(1, None)
    for end in range(1000, 32_001, 1000):
        piecewise = draft(drafter, 0, text[:end])
    at_once = draft(drafter, 1, text[:32_000])
    assert len(at_once) > 0
    assert (list(piecewise.tokens), list(piecewise.parents)) == (list(at_once.tokens), list(at_once.parents))
    assert list(piecewise.confidence) == list(at_once.confidence)
    draft(drafter, 1, text[:33_000])
    drafter.truncate(1, 31_500)
    for end in (31_501, 31_502, 31_505, 31_600, 32_000):
        again = draft(drafter, 1, text[:end])
    assert (list(again.tokens), list(again.parents)) == (list(at_once.tokens), list(at_once.parents))


def test_drafts_grow_when_accepted_and_shrink_when_not() -> None:
    drafter = SuffixDrafter(shared=False)
    drafter.begin(0, None)
    rng = random.Random(2)
    line = [rng.randrange(1000) for _ in range(100)]
    tokens = [*line, *line[:3]]
    lengths = [len(draft(drafter, 0, tokens, 63))]
    for _ in range(10):
        tree = draft(drafter, 0, tokens, 63)
        drafter.observe(0, tree, list(range(len(tree))))
    lengths.insert(0, len(draft(drafter, 0, tokens, 63)))
    for _ in range(60):
        drafter.observe(0, draft(drafter, 0, tokens, 63), [])
    lengths.append(len(draft(drafter, 0, tokens, 63)))
    assert lengths[0] > lengths[1] > lengths[2]


def test_doubt_is_one_step_of_logistic_regression() -> None:
    tree = DraftTree([1, 2, 3, 4], [-1, -1, 0, 2], [0.5, 0.25, 0.75, 0.9])
    # The root has an accepted child, node 0 has one, node 2 hasn't.
    assert updated_doubt(1.0, tree, [0, 2]) == pytest.approx(exp(RATE * ((0.75 - 1) + (0.75 - 1) + 0.9)))
    assert updated_doubt(1.0, tree, [1]) == pytest.approx(exp(RATE * (0.75 - 1)))
    assert updated_doubt(2.0, tree, []) == pytest.approx(2 * exp(RATE * 0.75))
    assert updated_doubt(2.0, DraftTree([1], [-1]), [0]) == 2.0
    assert updated_doubt(MOST, tree, []) == MOST
    assert updated_doubt(1 / MOST, tree, [0, 2, 3]) == 1 / MOST


def test_the_verdict_on_anothers_tree_teaches_nothing() -> None:
    drafter = SuffixDrafter()
    drafter.begin(0, None)
    tokens = [1, 2, 3, 4, 1, 2]
    before = draft(drafter, 0, tokens)
    drafter.observe(0, DraftTree([3], [-1], [0.9], drafter="model:other"), [])
    assert list(draft(drafter, 0, tokens).confidence) == list(before.confidence)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"min_survival": 0.0}, "min_survival"),
        ({"min_survival": 1.5}, "min_survival"),
        ({"max_depth": 0}, "max_depth"),
        ({"max_depth": 64}, "max_depth"),
        ({"own_limit": 0}, "own_limit"),
        ({"shared_limit": 5000}, "shared_limit"),
        ({"shared_bytes": 1000}, "shared=False"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        SuffixDrafter(**arguments)  # type: ignore[arg-type]


def test_scopes_have_different_names() -> None:
    scopes = [None, "", "a", "A", "None", "\ud800", "x" * 100_000, "x" * 100_001]
    names = [scope_key(scope) for scope in scopes]
    assert len(set(names)) == len(scopes)
    assert max(map(len, names)) <= 16


class Changing:
    """A token id that changes the list which it is in when it is asked for its number."""

    def __init__(self, tokens: list[object], change: Callable[[list[object]], object]) -> None:
        self._tokens = tokens
        self._change = change

    def __index__(self) -> int:
        self._change(self._tokens)
        return 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tokens: tokens.extend([3] * 100_000), [1, *[2] * 40, *[3] * 100_000]),
        (lambda tokens: tokens.__delitem__(slice(20, None)), [1, *[2] * 19]),
        (lambda tokens: tokens.clear(), [1]),
    ],
    ids=["grows", "shrinks", "empties"],
)
def test_a_list_that_changes_while_it_is_read(change: Callable[[list[object]], object], expected: list[int]) -> None:
    tokens: list[object] = []
    tokens += [Changing(tokens, change), *[2] * 40]
    store = _native.SuffixStore(LENGTHS, 1 << 25)
    store.insert(b"", tokens)  # type: ignore[arg-type]
    assert store.documents(b"") == ([expected] if len(expected) > 1 else [])
    tokens[:] = [Changing(tokens, change), *[2] * 40]
    text = _native.SuffixText(LENGTHS)
    text.follow(tokens)  # type: ignore[arg-type]
    assert len(text) == len(expected)


def test_native_values_are_checked() -> None:
    with pytest.raises(ValueError, match="ascend"):
        _native.SuffixText([2, 1])
    with pytest.raises(ValueError, match="from 1 to 32"):
        _native.SuffixText([33])
    text = _native.SuffixText(LENGTHS)
    with pytest.raises(ValueError, match="got -1"):
        text.follow([1, -1])
    with pytest.raises(TypeError):
        text.follow(["a"])  # type: ignore[list-item]
    assert len(text) == 0
    rule = _native.SuffixRule(ESCAPES, SHARED_WEIGHT, 0.1, 63, 64, 32)
    for doubt in (0.0, -1.0, inf, nan):
        with pytest.raises(ValueError, match="doubt must be positive and finite"):
            _native.propose_suffix(text, None, b"", 8, rule, doubt)
    for wrong in (0.0, -1.0, inf, nan):
        with pytest.raises(ValueError, match="escapes must be positive and finite"):
            _native.SuffixRule([*ESCAPES[:-1], wrong], SHARED_WEIGHT, 0.1, 63, 64, 32)
        with pytest.raises(ValueError, match="weights, thresholds and limits must be positive and finite"):
            _native.SuffixRule(ESCAPES, wrong, 0.1, 63, 64, 32)
        with pytest.raises(ValueError, match="weights, thresholds and limits must be positive and finite"):
            _native.SuffixRule(ESCAPES, SHARED_WEIGHT, wrong, 63, 64, 32)
    with pytest.raises(ValueError, match="one escape"):
        _native.propose_suffix(_native.SuffixText([1, 2]), None, b"", 8, rule)
    with pytest.raises(ValueError, match="different lengths"):
        _native.propose_suffix(text, _native.SuffixStore([1, 2], SMALL), b"", 8, rule)


@pytest.mark.parametrize(("size", "capacity"), [(0, None), (1 << 20, 1 << 20)])
def test_an_engine_says_how_much_is_remembered(tiny: Path, size: int, capacity: int | None) -> None:
    engine = Engine(tiny, kv_tokens=256, threads=1, cache_weights=False, draft_len=4, shared_bytes=size)
    assert engine.speculator is not None
    drafter = engine.speculator.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert (drafter.store.max_bytes if drafter.store is not None else None) == capacity
