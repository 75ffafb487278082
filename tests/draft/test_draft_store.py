"""The store of finished texts: what it keeps, what it drops first, who sees it, and how much memory it takes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from resource import getpagesize

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from forerun import SamplingParams, _native
from forerun.draft import DraftRow, DraftTree
from forerun.draft.suffix import ESCAPES, LENGTHS, MIN_SHARED_BYTES, SHARED_WEIGHT, SuffixDrafter, scope_key

PARAMS = SamplingParams()
PAGE = 64


def small_store() -> _native.SuffixStore:
    """Room for a few dozen pages of 64 tokens."""
    return _native.SuffixStore(LENGTHS, 4 * MIN_SHARED_BYTES)


def capacity() -> int:
    """Pages of a small store."""
    store = small_store()
    store.insert(b"", list(range(PAGE)))
    one = store.used_bytes
    return store.bytes // one - 1


def draft(drafter: SuffixDrafter, key: int, tokens: Sequence[int], budget: int = 63) -> DraftTree:
    (tree,) = drafter.propose([DraftRow(key, tokens, budget, PARAMS, 0)])
    return tree


def serve(drafter: SuffixDrafter, key: int, scope: str | None, tokens: Sequence[int]) -> None:
    """A request from its start to its end."""
    drafter.begin(key, scope)
    drafter.free(key, tokens)


class Model:
    """What a small store must hold: texts in order of use."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self.texts: list[tuple[bytes, list[int]]] = []

    def insert(self, scope: bytes, tokens: list[int]) -> None:
        if len(tokens) < 2:
            return
        while sum(-(-len(text) // PAGE) for _, text in self.texts) + -(-len(tokens) // PAGE) > self.pages:
            del self.texts[0]
        self.texts.append((scope, tokens))

    def use(self, scope: bytes, token: int) -> None:
        """A context that occurs in one text only was proposed from."""
        for i, (owner, text) in enumerate(self.texts):
            if owner == scope and token in text[:-1]:
                self.texts.append(self.texts.pop(i))
                return


def check_against_model(make: Callable[[], _native.SuffixStore], seed: int) -> None:
    """Texts of unique tokens come, are drafted from and leave; the store must hold what the model holds."""
    rng = random.Random(seed)
    store, model = make(), Model(capacity())
    rule = _native.SuffixRule(ESCAPES, SHARED_WEIGHT, 1e-6, 63, 64, 32)
    fresh = 0
    for _ in range(60):
        scope = rng.choice([b"a", b"b"])
        if rng.random() < 0.6 or fresh == 0:
            size = rng.choice([1, 2, 63, 64, 65, 200, rng.randrange(1, PAGE * capacity() // 2)])
            tokens = list(range(fresh, fresh + size))
            fresh += size
            store.insert(scope, tokens)
            model.insert(scope, tokens)
        else:
            token = rng.randrange(fresh)
            text = _native.SuffixText(LENGTHS)
            text.follow([token])
            _native.propose_suffix(text, store, scope, 4, rule)
            model.use(scope, token)
        store.check_integrity()
        for name in (b"a", b"b"):
            assert store.documents(name) == sorted(text for scope, text in model.texts if scope == name)
        assert store.n_tokens == sum(len(text) for _, text in model.texts)
        assert store.n_documents == len(model.texts)
        assert store.n_scopes == len({scope for scope, _ in model.texts})
        assert store.used_bytes <= store.bytes <= store.max_bytes


@pytest.mark.parametrize("seed", range(15))
def test_the_least_recently_used_text_leaves_first(seed: int) -> None:
    check_against_model(small_store, seed)


def test_a_store_that_forgets_by_age_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a draft from a text doesn't count as its use."""
    monkeypatch.setattr(Model, "use", lambda *_: None)
    with pytest.raises(AssertionError):
        for seed in range(15):
            check_against_model(small_store, seed)


def check_isolation(rounds: list[tuple[str | None, list[int]]]) -> None:
    """All scopes speak of the same contexts, tokens 0 to 2; what follows a 3 only its own scope may know."""
    secret = {scope: 1000 + 100 * i for i, scope in enumerate([None, "", "a", "b"])}
    together = SuffixDrafter(shared_bytes=MIN_SHARED_BYTES * 4, min_survival=0.001)
    apart = {scope: SuffixDrafter(shared_bytes=MIN_SHARED_BYTES * 4, min_survival=0.001) for scope in secret}
    for key, (scope, pattern) in enumerate(rounds):
        prompt = [token for token in pattern if token < 3]
        own = [token if token < 3 else secret[scope] + at for at, token in enumerate(pattern)]
        for drafter in (together, apart[scope]):
            drafter.begin(key, scope)
        mixed, alone = draft(together, key, prompt), draft(apart[scope], key, prompt)
        assert all(token < 3 or secret[scope] <= token < secret[scope] + 100 for token in mixed.tokens)
        # Not even a probability depends on what others wrote.
        assert (list(mixed.tokens), list(mixed.parents)) == (list(alone.tokens), list(alone.parents))
        assert list(mixed.confidence) == list(alone.confidence)
        for drafter in (together, apart[scope]):
            drafter.free(key, own)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([None, "", "a", "b"]), st.lists(st.integers(0, 3), min_size=2, max_size=30)),
        min_size=2,
        max_size=12,
    )
)
def test_text_of_one_scope_never_shows_in_another(rounds: list[tuple[str | None, list[int]]]) -> None:
    check_isolation(rounds)


@pytest.mark.parametrize("scopes", [("a", "b"), ("a", None), ("", None)])
def test_the_isolation_test_sees_a_leak(monkeypatch: pytest.MonkeyPatch, scopes: tuple[str | None, str | None]) -> None:
    rounds = [(scope, text) for scope in scopes for text in ([0, 1, 2, 3, 1], [0, 1, 2])]
    check_isolation(rounds)
    monkeypatch.setattr("forerun.draft.suffix.scope_key", lambda _: b"one for all")
    with pytest.raises(AssertionError):
        check_isolation(rounds)


def test_a_scope_may_come_back_after_its_texts_have_left() -> None:
    """Internal numbers of scopes are given to others when their texts are gone; texts aren't."""
    store = small_store()
    rule = _native.SuffixRule(ESCAPES, SHARED_WEIGHT, 1e-6, 63, 64, 32)
    text = _native.SuffixText(LENGTHS)
    text.follow([1, 2, 3])
    for i in range(500):
        store.insert(f"scope {i}".encode(), [1, 2, 3, 1000 + i])
        assert store.n_scopes <= capacity()
        tokens, _, _ = _native.propose_suffix(text, store, f"scope {i}".encode(), 8, rule)
        assert tokens == [1000 + i]
        assert _native.propose_suffix(text, store, f"scope {i - capacity()}".encode(), 8, rule)[0] == []
    store.check_integrity()


def test_a_text_longer_than_the_store_keeps_its_end() -> None:
    store = small_store()
    room = capacity() * PAGE
    store.insert(b"", list(range(10)))
    store.insert(b"", list(range(100, 100 + 3 * room)))
    assert store.documents(b"") == [list(range(100 + 2 * room, 100 + 3 * room))]
    store.check_integrity()


def test_a_known_beginning_is_kept_once() -> None:
    """Instructions before every request, and a conversation that comes back longer each time."""
    store = _native.SuffixStore(LENGTHS, 1 << 20)
    rng = random.Random(4)
    instructions = [rng.randrange(30_000) for _ in range(500)]
    talk = instructions.copy()
    store.insert(b"", talk)
    for turn in range(1, 11):
        talk += [rng.randrange(30_000) for _ in range(100)]
        store.insert(b"", talk)
        # Of each longer text the new part, and the context before it.
        assert store.documents(b"")[turn] == talk[-100 - LENGTHS[-1] :]
    store.insert(b"", talk)
    store.insert(b"", talk[:700])
    assert store.n_documents == 11
    store.insert(b"", [*instructions, 1, 2, 3])
    assert store.documents(b"")[11] == [*instructions[-LENGTHS[-1] :], 1, 2, 3]
    store.insert(b"other", instructions)
    assert store.documents(b"other") == [instructions]
    store.check_integrity()


def test_a_cut_text_is_continued_as_a_whole_one() -> None:
    """Where a text was kept from its middle on, drafts across the seam are the same."""
    rng = random.Random(6)
    beginning = [rng.randrange(30_000) for _ in range(200)]
    end = [rng.randrange(30_000) for _ in range(50)]
    cut, whole = SuffixDrafter(min_survival=0.01), SuffixDrafter(min_survival=0.01)
    serve(cut, 0, None, beginning)
    serve(cut, 1, None, [*beginning, *end])
    serve(whole, 1, None, [*beginning, *end])
    for drafter in (cut, whole):
        drafter.begin(2, None)
        assert list(draft(drafter, 2, beginning[150:], 20).tokens) == end[:20]


def test_memory_comes_with_the_first_text_and_goes_with_close() -> None:
    drafter = SuffixDrafter(shared_bytes=1 << 20)
    assert drafter.store is not None
    assert drafter.store.bytes == 0
    serve(drafter, 0, None, [1])
    assert drafter.store.bytes == 0, "one token has no continuation and isn't kept"
    serve(drafter, 1, None, [1, 2, 3])
    assert 0 < drafter.store.bytes <= 1 << 20
    drafter.begin(2, None)
    draft(drafter, 2, [1, 2, 3])
    drafter.close()
    assert (drafter.store.bytes, drafter.store.used_bytes, drafter.store.n_tokens) == (0, 0, 0)
    assert (drafter.store.n_documents, drafter.store.n_scopes, drafter.n_requests) == (0, 0, 0)
    drafter.store.check_integrity()
    serve(drafter, 3, None, [1, 2, 3])
    assert drafter.store.documents(scope_key(None)) == [[1, 2, 3]]


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * getpagesize()


def test_ten_thousand_requests_stay_under_the_cap() -> None:
    """Requests of many sizes and scopes, some cancelled, some forked, some that never draft."""
    cap = 2 << 20
    rng = random.Random(9)
    phrases = [[rng.randrange(32_000) for _ in range(rng.randrange(3, 40))] for _ in range(3000)]
    drafter = SuffixDrafter(shared_bytes=cap)
    store = drafter.store
    assert store is not None
    key = 0
    drafted = 0
    before = 0
    for request in range(10_000):
        if request == 2000:
            before = resident_bytes()
        scope = rng.choice([None, "a", "b", f"guest {request}"])
        tokens = [token for _ in range(rng.randrange(1, 16)) for token in rng.choice(phrases)]
        drafter.begin(key, scope)
        for _ in range(rng.randrange(3)):
            tree = draft(drafter, key, tokens)
            drafted += len(tree)
            drafter.observe(key, tree, [])
            tokens += rng.choice(phrases)
        if request % 50 == 0:
            drafter.fork(key, key + 1)
            drafter.truncate(key + 1, len(tokens) // 2)
            drafter.free(key + 1, tokens[: len(tokens) // 2])
        drafter.free(key, tokens[: rng.randrange(len(tokens) + 1)] if request % 7 == 0 else tokens)
        key += 2
        assert store.used_bytes <= store.bytes <= cap
        assert (drafter.n_requests, drafter.state_bytes) == (0, 0)
        if request % 1000 == 999:
            store.check_integrity()
    grown = resident_bytes() - before
    print(
        f"{store.evicted} of {store.evicted + store.n_documents} texts left, {drafted} nodes drafted, memory +{grown}"
    )
    assert store.evicted > 5000
    assert drafted > 1000
    assert grown < 4 * cap  # of the whole process; a store that forgot nothing would take ten times as much
