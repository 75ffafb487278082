"""Prompt lookup against a scan of the text, with faults planted to show that the comparison sees them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forerun import SamplingParams
from forerun.draft import DraftRow, DraftTree
from forerun.draft.doubt import MOST
from forerun.draft.lookup import PromptLookup
from forerun.errors import ConfigurationError
from reference import suffixes

PARAMS = SamplingParams()


def row(key: int, tokens: Sequence[int], budget: int = 16) -> DraftRow:
    return DraftRow(key, tokens, budget, PARAMS, 0)


def draft(drafter: PromptLookup, key: int, tokens: Sequence[int], budget: int = 16) -> DraftTree:
    (tree,) = drafter.propose([row(key, tokens, budget)])
    return tree


def texts(max_size: int = 60) -> st.SearchStrategy[list[int]]:
    return st.integers(1, 5).flatmap(lambda size: st.lists(st.integers(0, size), max_size=max_size))


def check(
    make: Callable[[int, int], PromptLookup], text: list[int], cuts: list[int], low: int, high: int, most: int
) -> None:
    """Grow a text by several tokens at once, go back in it, fork it; each proposal must be the scan's."""
    drafter = make(low, high)
    drafter.begin(0, None)
    tokens: list[int] = []

    def same(key: int, now: list[int]) -> None:
        expected, match = suffixes.look_up(now, low, high, most)
        tree = draft(drafter, key, now, most)
        assert list(tree.tokens) == expected, f"after {now}"
        assert list(tree.parents) == list(range(-1, len(expected) - 1))
        escapes = [length**1.2 / (length**1.2 + 2.5) for length in range(match, match + len(expected))]
        assert list(tree.confidence) == pytest.approx(escapes)

    for i, cut in enumerate(cuts):
        tokens += text[len(tokens) : len(tokens) + cut % 7]
        same(0, tokens)
        if cut % 3 == 0:
            back = max(0, len(tokens) - cut % 5) if cut % 2 else len(tokens) * cut // 50
            drafter.truncate(0, back)
            tokens = tokens[:back]
            text = text[:back] + text[back:][::-1]
            if cut % 2 == 0:
                same(0, tokens)
        if cut % 5 == 0:
            drafter.fork(0, 1 + i)
            same(1 + i, [*tokens, 1, 0, 1])
    for key in range(len(cuts) + 1):
        if key == 0 or cuts[key - 1] % 5 == 0:
            drafter.free(key, tokens)
    assert (drafter.n_requests, drafter.state_bytes) == (0, 0)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    text=texts(), cuts=st.lists(st.integers(0, 49), max_size=12), low=st.integers(1, 3), more=st.integers(0, 4),
    most=st.integers(1, 63),
)  # fmt: skip
def test_equals_a_scan(text: list[int], cuts: list[int], low: int, more: int, most: int) -> None:
    check(PromptLookup, text, cuts, low, low + more, most)


class Earliest(PromptLookup):
    """Takes the earliest occurrence."""

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        trees = super().propose(rows)
        for i, r in enumerate(rows):
            t = list(r.tokens)
            for end in range(1, len(t) - 1):
                if trees[i] and t[end - 1 : end + 1] == t[-2:]:
                    trees[i] = DraftTree.chain((t + t)[end + 1 : end + 1 + len(trees[i])], trees[i].confidence)
                    break
        return trees


class Itself(PromptLookup):
    """Finds the end of the context and proposes the context's beginning."""

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [DraftTree.chain(list(r.tokens)[: r.budget]) for r in rows]


class NeverBack(PromptLookup):
    """Keeps what it should forget."""

    def truncate(self, key: int, n_tokens: int) -> None:
        """Forgets nothing."""


class ForkShares(PromptLookup):
    """A fork that writes into its parent's text."""

    def fork(self, key: int, child: int) -> None:
        self._states[child] = self._states[key]


class Leaks(PromptLookup):
    """Keeps finished requests."""

    def free(self, key: int, tokens: Sequence[int]) -> None:
        """Gives nothing back."""


@pytest.mark.parametrize("fault", [Earliest, Itself, NeverBack, ForkShares, Leaks])
def test_planted_faults_are_caught(fault: type[PromptLookup]) -> None:
    rng = random.Random(3)

    def many() -> None:
        for _ in range(200):
            text = [rng.randrange(3) for _ in range(60)]
            check(fault, text, [rng.randrange(50) for _ in range(12)], 2, 4, 8)

    with pytest.raises(AssertionError):
        many()


def test_the_longest_match_wins_and_then_the_latest() -> None:
    drafter = PromptLookup(2, 3)
    drafter.begin(0, None)
    assert list(draft(drafter, 0, [1, 2, 3, 50, 2, 3, 60, 2, 3, 70, 1, 2, 3], 2).tokens) == [50, 2]
    drafter.begin(1, None)
    assert list(draft(drafter, 1, [2, 3, 50, 2, 3, 60, 9, 2, 3], 2).tokens) == [60, 9]


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_repeating_text_goes_on(period: int) -> None:
    text = [10 + i % period for i in range(4 * period + 3)]
    drafter = PromptLookup()
    drafter.begin(0, None)
    expected = [10 + i % period for i in range(len(text), len(text) + 20)]
    assert list(draft(drafter, 0, text, 20).tokens) == expected


@pytest.mark.parametrize("tokens", [[], [5], [5, 5], [1, 2, 3, 4, 5]])
def test_nothing_is_found_in_short_or_new_texts(tokens: list[int]) -> None:
    drafter = PromptLookup(2, 4)
    drafter.begin(0, None)
    assert len(draft(drafter, 0, tokens)) == 0


def colliding(buckets: int) -> tuple[int, int]:
    """Two tokens whose contexts of one token share a bucket of an index of so many (`context_hashes` in suffix.cpp)."""
    seen: dict[int, int] = {}
    for token in range(buckets + 1):
        h = token + 1
        bucket = ((h ^ h >> 32) * 0xD6E8FEB86659FD93 % 2**64 >> 32) % buckets
        if bucket in seen:
            return seen[bucket], token
        seen[bucket] = token
    raise AssertionError("more tokens than buckets")


@pytest.mark.parametrize(("strangers", "found"), [(1, True), (64, True), (65, False), (200, False)])
def test_a_lookup_gives_up_after_64_collisions(strangers: int, found: bool) -> None:
    """So that no text can make it walk a long chain of occurrences of something else."""
    wanted, stranger = colliding(256)
    drafter = PromptLookup(1, 1)
    drafter.begin(0, None)
    tree = draft(drafter, 0, [wanted, 7_000_000, *[stranger] * strangers, wanted], 1)
    assert list(tree.tokens) == ([7_000_000] if found else [])


def test_budget_and_limit_cut_the_chain() -> None:
    drafter = PromptLookup(max_draft=5)
    drafter.begin(0, None)
    text = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2]
    assert list(draft(drafter, 0, text, 3).tokens) == [3, 4, 5]
    assert list(draft(drafter, 0, text, 63).tokens) == [3, 4, 5, 6, 7]


def test_rows_keep_their_order_and_their_texts() -> None:
    drafter = PromptLookup()
    texts_of = {7: [1, 2, 3, 1, 2], 3: [4, 4, 4], 5: [9]}
    for key in texts_of:
        drafter.begin(key, "any")
    trees = drafter.propose([row(key, tokens, 2) for key, tokens in texts_of.items()])
    assert [list(tree.tokens) for tree in trees] == [[3, 1], [4, 4], []]
    assert [tree.drafter for tree in trees] == ["lookup", "lookup", ""]


def test_confidence_follows_what_was_accepted() -> None:
    drafter = PromptLookup()
    drafter.begin(0, None)
    tokens = [1, 2, 3, 4, 1, 2]
    before = draft(drafter, 0, tokens, 2)
    drafter.observe(0, before, [])
    worse = draft(drafter, 0, tokens, 2)
    assert list(worse.tokens) == list(before.tokens)
    assert worse.confidence[0] < before.confidence[0]
    for _ in range(100):
        drafter.observe(0, before, [0, 1])
    better = draft(drafter, 0, tokens, 2)
    assert better.confidence[0] == pytest.approx(2**1.2 / (2**1.2 + 2.5 / MOST))
    drafter.observe(0, DraftTree.chain([3, 4], [0.9, 0.9], drafter="model:other"), [])
    assert draft(drafter, 0, tokens, 2).confidence == better.confidence


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"min_match": 0}, "min_match=0"),
        ({"min_match": 5, "max_match": 4}, "min_match=5 and max_match=4"),
        ({"max_match": 33}, "max_match=33"),
        ({"max_draft": 0}, "got 0"),
        ({"max_draft": 64}, "got 64"),
    ],
)
def test_bad_settings_are_refused(arguments: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        PromptLookup(**arguments)


def test_close_gives_everything_back() -> None:
    drafter = PromptLookup()
    drafter.begin(0, None)
    draft(drafter, 0, list(range(1000)))
    assert drafter.state_bytes > 0
    drafter.close()
    assert (drafter.n_requests, drafter.state_bytes) == (0, 0)


def seconds_of_lookup(propose: Callable[[list[int]], object], context: int) -> float:
    """Median of single lookups after one more token, in a text without repeats: the longest way for a scan."""
    tokens = list(range(context))
    propose(tokens)
    times = []
    for i in range(41):
        tokens.append(context + i)
        start = time.perf_counter()
        propose(tokens)
        times.append(time.perf_counter() - start)
    return median(times)


def test_a_lookup_costs_the_same_at_32k_tokens() -> None:
    drafter = PromptLookup()
    drafter.begin(0, None)
    drafter.begin(1, None)
    short = seconds_of_lookup(lambda tokens: draft(drafter, 0, tokens), 256)
    long = seconds_of_lookup(lambda tokens: draft(drafter, 1, tokens), 32_768)
    print(f"lookup: {short * 1e6:.1f} us at 256 tokens, {long * 1e6:.1f} us at 32,768")
    assert long < 16 * short

    def scan(tokens: list[int]) -> object:
        return any(tokens[i : i + 2] == tokens[-2:] for i in range(len(tokens) - 2))

    assert seconds_of_lookup(scan, 32_768) > 16 * seconds_of_lookup(scan, 256), "a scan would have been noticed"
