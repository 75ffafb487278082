"""Single operations on a real tape: what goes in is written into buffers, what comes out is read from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun import ops
from forerun.ops.tape import Buffer, Into, StepInput, Tape, Weight
from forerun.ops.types import GGMLType, TensorData
from reference.forward import softmax
from reference.quant import random_blocks

Floats = npt.NDArray[np.float32]


def plain_step(rows: int) -> StepInput:
    """`rows` tokens of one request, nothing cached, an output for each."""
    ints = np.zeros(rows, dtype=np.int32)
    return StepInput.chain(ints, 0, [0], rows)._replace(positions=ints)


def run_without_outputs(tape: Tape, rows: int) -> None:
    """Runs operations that need no cache and score nothing."""
    step = plain_step(rows)._replace(output=np.zeros(0, dtype=np.int32))
    tape.run(None, step, np.empty((0, 1), dtype=np.float32), np.zeros(0, dtype=np.int32))


@lru_cache(64)
def random_tensor(type: GGMLType, n: int, k: int, seed: int, extreme: float = 0.0) -> TensorData:
    """Weights of n outputs x k inputs, the same for the same seed."""
    return TensorData("w", type, (n, k), random_blocks(type, (n, k), np.random.default_rng(seed), extreme=extreme))


def activations(rows: int, k: int, seed: int) -> Floats:
    """float32[rows, k] with outlier channels, as real activations have."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, k)).astype(np.float32)
    x *= np.exp(rng.normal(size=(1, k))).astype(np.float32)
    return x


def add_weight(tape: Tape, tensor: TensorData) -> Weight:
    """Packs a matrix and registers it."""
    n, k = tensor.shape
    packed = np.empty(ops.packed_bytes(tensor.type, n, k), dtype=np.uint8)
    ops.pack(tensor, packed, 1)
    return tape.weight(tensor.type, n, k, packed)


def product(
    tensor: TensorData, x: Floats, *, isa: str = "", bias: Floats | None = None, onto: Floats | None = None,
    threads: int = 2,
) -> Floats:  # fmt: skip
    """x W^T (+ bias) (+ onto) by `Tape.linear`."""
    n, k = tensor.shape
    tape = Tape(max_tokens=len(x), max_outputs=1, threads=threads, isa=isa or None)
    a, y = tape.buffer(k), tape.buffer(n)
    into = Into(add_weight(tape, tensor), y, tape.vector(bias) if bias is not None else None, onto is not None)
    tape.linear(a, [into])
    tape.write(a, x)
    if onto is not None:
        tape.write(y, onto)
    run_without_outputs(tape, len(x))
    return tape.read(y, len(x))


class Heads(NamedTuple):
    """Shapes of an attention: `n_kv` heads of keys and values, each read by `group` heads of queries."""

    n_kv: int
    group: int
    head_dim: int
    window: int = 0

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class Piece(NamedTuple):
    """Query tokens of one request: float32 q[T, n_kv * group, head_dim], k and v[T, n_kv, head_dim].

    They come after `cached` tokens, into the slots of `blocks`; `ancestors` (T bit masks) makes them a draft tree.
    """

    q: Floats
    k: Floats
    v: Floats
    cached: int
    blocks: Sequence[int]
    ancestors: Sequence[int] | None = None


class AttentionTape:
    """`Tape.attention` over a real cache whose slots hold NaN until a token is stored there."""

    def __init__(self, heads: Heads, *, blocks: int, threads: int = 1, isa: str = "") -> None:
        self.heads = heads
        tokens, n_heads, D = blocks * ops.BLOCK, heads.n_kv * heads.group, heads.head_dim
        self.kv = ops.KvCache(layers=1, blocks=blocks, n_kv_heads=heads.n_kv, head_dim=D)
        self.tape = Tape(max_tokens=tokens, max_outputs=1, threads=threads, isa=isa or None)
        self.q, self.k, self.v, self.out = (
            self.tape.buffer(n * D) for n in (n_heads, heads.n_kv, heads.n_kv, n_heads)
        )  # fmt: skip
        self._store(self.tape, self.q, self.k, self.v, n_heads)
        self.tape.attention(
            self.q, self.out, layer=0, n_heads=n_heads, n_kv_heads=heads.n_kv, head_dim=D, scale=heads.scale,
            window=heads.window,
        )  # fmt: skip
        self._filler = Tape(max_tokens=tokens, max_outputs=1, threads=1)
        self._filled = tuple(self._filler.buffer(heads.n_kv * D) for _ in "qkv")
        self._store(self._filler, *self._filled, heads.n_kv)
        nan = np.full((tokens, heads.n_kv, D), np.nan, dtype=np.float32)
        self.fill(nan, nan, range(blocks))

    def _store(self, tape: Tape, q: Buffer, k: Buffer, v: Buffer, n_heads: int) -> None:
        """Stores keys and values as they are: rotated by no angle."""
        half = np.ones((1, self.heads.head_dim // 2), dtype=np.float32)
        rope = tape.rope_table(half, half * 0, interleaved=False)
        tape.rope_store(
            q, k, v, layer=0, n_heads=n_heads, n_kv_heads=self.heads.n_kv, head_dim=self.heads.head_dim, rope=rope
        )

    def fill(self, k: Floats, v: Floats, blocks: Sequence[int]) -> None:
        """Keys and values float32[T, n_kv, head_dim] of a request's first T tokens."""
        T = len(k)
        _, keys, values = self._filled
        self._filler.write(keys, k.reshape(T, -1))
        self._filler.write(values, v.reshape(T, -1))
        zeros = np.zeros(T, dtype=np.int32)
        step = StepInput.chain(zeros, 0, blocks, 0)._replace(positions=zeros)
        self._filler.run(self.kv, step, np.empty((0, 1), dtype=np.float32), np.zeros(0, dtype=np.int32))

    def attend(self, pieces: Sequence[Piece]) -> list[Floats]:
        """One step; for each piece float32[T, n_kv * group, head_dim]."""
        T = sum(len(p.q) for p in pieces)
        for buffer, name in ((self.q, "q"), (self.k, "k"), (self.v, "v")):
            self.tape.write(buffer, np.concatenate([getattr(p, name).reshape(len(p.q), -1) for p in pieces]))
        starts = np.cumsum([0, *(len(p.q) for p in pieces)]).astype(np.int32)
        tables = np.zeros((len(pieces), max(len(p.blocks) for p in pieces)), dtype=np.int32)
        for row, p in enumerate(pieces):
            tables[row, : len(p.blocks)] = p.blocks
        zeros = np.zeros(T, dtype=np.int32)
        step = StepInput(
            tokens=zeros,
            positions=zeros,
            row_start=starts,
            cached=np.array([p.cached for p in pieces], dtype=np.int32),
            is_tree=np.array([p.ancestors is not None for p in pieces], dtype=np.uint8),
            ancestors=np.array([m for p in pieces for m in p.ancestors or [0] * len(p.q)], dtype=np.uint64),
            tables=tables,
            table_row=np.arange(len(pieces), dtype=np.int32),
            output=zeros[:0],
        )
        self.tape.run(self.kv, step, np.empty((0, 1), dtype=np.float32), zeros[:0])
        out = self.tape.read(self.out, T).reshape(T, -1, self.heads.head_dim)
        return np.split(out, starts[1:-1])


def attention(heads: Heads, piece: Piece, k: Floats, v: Floats) -> npt.NDArray[Any]:
    """What `AttentionTape.attend` should give for a piece, float64; k and v have the cached tokens' and the piece's."""
    keys, values = (x.astype(np.float16).astype(np.float64) for x in (k, v))
    out = np.empty(piece.q.shape, dtype=np.float64)
    for t, q in enumerate(piece.q):
        own = range(t + 1) if piece.ancestors is None else [i for i in range(t + 1) if piece.ancestors[t] >> i & 1]
        seen = [*range(piece.cached), *(piece.cached + i for i in own)][-heads.window :]
        for h in range(len(q)):
            scores = keys[seen, h // heads.group] @ q[h].astype(np.float64) * heads.scale
            out[t, h] = softmax(scores) @ values[seen, h // heads.group]
    return out
