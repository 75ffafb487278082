"""Attention against NumPy for every number of queries that share keys, over a cache whose unused slots hold NaN."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops import BLOCK
from reference.sets import SETS
from reference.tapes import AttentionTape, Heads, Piece, attention

Floats = npt.NDArray[np.float32]


class Request:
    """Random keys and values of `cached` tokens and of a piece behind them, in blocks of their own."""

    def __init__(
        self, rng: np.random.Generator, heads: Heads, cached: int, count: int, blocks: list[int], tree: bool
    ) -> None:
        self.k, self.v = (
            rng.normal(size=(cached + count, heads.n_kv, heads.head_dim)).astype(np.float32) for _ in "kv"
        )
        q = 2 * rng.normal(size=(count, heads.n_kv * heads.group, heads.head_dim)).astype(np.float32)
        masks: list[int] = []
        for t in range(count):
            parent = int(rng.integers(-1, t)) if t else -1
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << t)
        self.piece = Piece(q, self.k[cached:], self.v[cached:], cached, blocks, masks if tree else None)

    def fill(self, tape: AttentionTape) -> None:
        if self.piece.cached:
            tape.fill(self.k[: self.piece.cached], self.v[: self.piece.cached], self.piece.blocks)


def blocks_of(tokens: int) -> int:
    return (tokens + BLOCK - 1) // BLOCK


def attended(
    heads: Heads, requests: list[Request], blocks: int, *, threads: int = 1, isa: str = "", together: bool = True
) -> list[Floats]:
    tape = AttentionTape(heads, blocks=blocks, threads=threads, isa=isa)
    for request in requests:
        request.fill(tape)
    if together:
        return tape.attend([request.piece for request in requests])
    return [tape.attend([request.piece])[0] for request in requests]


def close(got: Floats, expected: npt.NDArray[np.float64]) -> None:
    assert np.abs(got - expected).max() < 5e-6 * np.abs(expected).max() + 2e-6


def same_bits(a: Floats, b: Floats) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("queries", [*range(1, 17), 17, 21, 33, 40])
@pytest.mark.parametrize("isa", SETS)
def test_every_number_of_queries_a_call_equals_numpy(queries: int, isa: str) -> None:
    """One thread takes sixteen at a time and a rest: as heads of a token, as a chain's tokens, as a tree's."""
    rng = np.random.default_rng(queries)
    shapes = [(queries, 1, False), (1, queries, False), (1, queries, True)]
    if queries % 2 == 0:
        shapes += [(2, queries // 2, True), (queries // 2, 2, False)]
    for group, count, tree in shapes:
        for head_dim, window in ((16, 0), (80, 37), (256, 5)):
            heads = Heads(2, group, head_dim, window)
            cached = int(rng.integers(0, 120))
            blocks = blocks_of(cached + count) + 2
            request = Request(rng, heads, cached, count, rng.permutation(blocks).tolist(), tree)
            got = attended(heads, [request], blocks, isa=isa)[0]
            close(got, attention(heads, request.piece, request.k, request.v))


@given(
    seed=st.integers(0, 2**32),
    n_kv=st.integers(1, 4),
    group=st.sampled_from([1, 2, 3, 5, 7, 9, 12, 16, 19]),
    head_dim=st.sampled_from([16, 48, 64, 96, 128]),
    window=st.sampled_from([0, 0, 1, 4, 33]),
    lengths=st.lists(st.tuples(st.sampled_from([0, 3, 16, 90, 300]), st.integers(1, 20), st.booleans()), min_size=1,
                     max_size=4),
    threads=st.integers(2, 9),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_company_threads_and_sets_do_not_change_a_bit(
    seed: int, n_kv: int, group: int, head_dim: int, window: int, lengths: list[tuple[int, int, bool]], threads: int
) -> None:
    rng = np.random.default_rng(seed)
    heads = Heads(n_kv, group, head_dim, window)
    needed = [blocks_of(cached + count) for cached, count, _ in lengths]
    blocks = sum(needed) + 1
    tables = np.split(rng.permutation(blocks - 1), np.cumsum(needed)[:-1])
    requests = [Request(rng, heads, cached, count, table.tolist(), tree)
                for (cached, count, tree), table in zip(lengths, tables, strict=True)]  # fmt: skip
    alone = attended(heads, requests, blocks, together=False)
    for request, got in zip(requests, alone, strict=True):
        close(got, attention(heads, request.piece, request.k, request.v))
    for isa in SETS:
        for got, expected in zip(attended(heads, requests, blocks, threads=threads, isa=isa), alone, strict=True):
            same_bits(got, expected)


@pytest.mark.parametrize("group", [1, 4, 6, 16])
@pytest.mark.parametrize("window", [0, 20])
def test_a_broken_key_or_value_reaches_those_that_see_it_and_no_others(group: int, window: int) -> None:
    rng = np.random.default_rng(4)
    heads = Heads(1, group, 32, window)
    for position in (0, 5, 40, 42, 45, 49):
        for part in ("k", "v"):
            request = Request(rng, heads, 40, 10, [3, 1, 0, 2], tree=True)
            getattr(request, part)[position, :, 7] = np.nan
            got = attended(heads, [request], 4)[0]
            expected = attention(heads, request.piece, request.k, request.v)
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expected))
