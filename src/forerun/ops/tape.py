"""A forward pass, recorded once as a list of operations and run natively for every step.

An architecture is a function that writes on a `Tape`. Buffers hold one float32 row for each token of the step (or for
each output token, after `gather`). Recording checks every shape; a run is one native call, without the GIL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.ops.kv import KvCache
from forerun.ops.settings import instruction_set, resolve_threads
from forerun.ops.types import GGMLType, TensorData

KINDS = ("embed", "norm", "linear", "rope", "attention", "gated", "add", "gather", "head", "quantize")


@dataclass(frozen=True)
class Buffer:
    """float32[rows, width]: a row per token of the step, or per output token."""

    id: int
    width: int
    outputs: bool


@dataclass(frozen=True)
class Weight:
    """A packed matrix of `n` outputs x `k` inputs."""

    id: int
    n: int
    k: int
    type: GGMLType


@dataclass(frozen=True)
class Vector:
    """float32[size] of parameters."""

    id: int
    size: int


class Into(NamedTuple):
    """One product of `Tape.linear`: out = x W^T (+ bias), or out += ... where `accumulate`."""

    weight: Weight
    out: Buffer
    bias: Vector | None = None
    accumulate: bool = False


class RopeTable(NamedTuple):
    """cos and sin as float32[positions * dims/2], registered with a tape."""

    cos: Vector
    sin: Vector
    positions: int
    dims: int
    interleaved: bool


class StepInput(NamedTuple):
    """A step's tokens, all arrays C-contiguous. T query tokens in R rows; row r owns row_start[r]..row_start[r+1].

    A query sees the row's `cached` keys, then the row's tokens of this step up to itself; in a tree row (at most 64
    tokens) only those whose bit is set in its `ancestors` mask, its own included.
    """

    tokens: npt.NDArray[np.int32]  # [T]
    positions: npt.NDArray[np.int32]  # [T] for the rotary embedding
    row_start: npt.NDArray[np.int32]  # [R + 1]
    cached: npt.NDArray[np.int32]  # [R] keys already in the cache
    is_tree: npt.NDArray[np.uint8]  # [R]
    ancestors: npt.NDArray[np.uint64]  # [T]
    tables: npt.NDArray[np.int32]  # [tables, blocks] block tables, padded
    table_row: npt.NDArray[np.int32]  # [R] each row's place in tables
    output: npt.NDArray[np.int32]  # [O] tokens whose next-token distribution is wanted

    @classmethod
    def chain(cls, tokens: npt.NDArray[np.int32], start: int, blocks: Sequence[int], outputs: int) -> StepInput:
        """One sequence's int32[T] tokens after `start` cached ones; the first `outputs` of them are scored."""
        count = len(tokens)
        return cls(
            tokens=tokens,
            positions=np.arange(start, start + count, dtype=np.int32),
            row_start=np.array([0, count], dtype=np.int32),
            cached=np.array([start], dtype=np.int32),
            is_tree=np.zeros(1, dtype=np.uint8),
            ancestors=np.zeros(count, dtype=np.uint64),
            tables=np.array([blocks], dtype=np.int32),
            table_row=np.zeros(1, dtype=np.int32),
            output=np.arange(outputs, dtype=np.int32),
        )


class Tape:
    """Records operations, then runs them. `max_tokens` and `max_outputs` bound a step.

    Raises `ValueError` (from the native side) when shapes don't fit, at recording or at the run; that is a bug of the
    caller, not of the user.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_outputs: int,
        threads: int | None = None,
        isa: str | None = None,
    ) -> None:
        self.max_tokens = max_tokens
        self.max_outputs = max_outputs
        self.threads = resolve_threads(threads)
        self.isa = isa or instruction_set()
        self.native = _native.Tape(max_tokens, max_outputs, self.threads, self.isa)
        self.vocabulary = 0

    @property
    def bytes(self) -> int:
        """Bytes of activation buffers."""
        return self.native.bytes

    def buffer(self, width: int, *, outputs: bool = False) -> Buffer:
        """A new buffer; `width` must be a multiple of 16."""
        return Buffer(self.native.buffer(width, outputs), width, outputs)

    def weight(self, tensor_type: GGMLType, n: int, k: int, packed: npt.NDArray[np.uint8]) -> Weight:
        """Registers a packed matrix; the array is kept alive and not copied."""
        return Weight(self.native.weight(int(tensor_type), n, k, packed), n, k, tensor_type)

    def vector(self, values: npt.NDArray[np.float32]) -> Vector:
        """Registers a copy of parameters."""
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        return Vector(self.native.vector(flat), flat.size)

    def embed(self, table: TensorData, out: Buffer, scale: float = 1.0) -> Buffer:
        """out = table[token] * scale; the table stays in its file's format."""
        n, k = table.shape
        self.native.embed(int(table.type), n, k, table.data, scale, out.id)
        return out

    def rms_norm(self, x: Buffer, weight: Vector, eps: float, out: Buffer) -> Buffer:
        """out = x / sqrt(mean(x^2) + eps) * weight, row by row."""
        self.native.rms_norm(x.id, weight.id, eps, out.id)
        return out

    def linear(self, x: Buffer, products: Sequence[Into]) -> None:
        """Several products of the same input as one operation.

        Activations become int8 where the weights are quantised: one scale per row and 32 inputs for types with
        blocks of 32, per row and 64 inputs for types with blocks of 256.
        """
        self.native.linear(
            x.id,
            [(p.weight.id, p.out.id, p.bias.id if p.bias else -1, p.accumulate) for p in products],
        )

    def rope_table(self, cos: npt.NDArray[np.float32], sin: npt.NDArray[np.float32], *, interleaved: bool) -> RopeTable:
        """Registers cos and sin, float32[positions, dims/2]."""
        positions, half = cos.shape
        return RopeTable(self.vector(cos), self.vector(sin), positions, 2 * half, interleaved)

    def rope_store(
        self,
        q: Buffer,
        k: Buffer,
        v: Buffer,
        *,
        layer: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rope: RopeTable,
        q_norm: Vector | None = None,
        k_norm: Vector | None = None,
        eps: float = 0.0,
    ) -> None:
        """Norms (where given) and rotates q and k in place, then writes k and v into the cache's slots."""
        self.native.rope_store(
            q.id, k.id, v.id, layer, n_heads, n_kv_heads, head_dim, rope.dims, rope.interleaved, rope.cos.id,
            rope.sin.id, rope.positions, q_norm.id if q_norm else -1, k_norm.id if k_norm else -1, eps,
        )  # fmt: skip

    def attention(
        self, q: Buffer, out: Buffer, *, layer: int, n_heads: int, n_kv_heads: int, head_dim: int, scale: float,
        window: int = 0,
    ) -> Buffer:  # fmt: skip
        """out = softmax(scale * q . keys) values over the keys that each query sees; `window` 0 means all."""
        self.native.attention(q.id, out.id, layer, n_heads, n_kv_heads, head_dim, window, scale)
        return out

    def gated(self, x: Buffer, gate: Weight, up: Weight, out: Buffer, *, gelu: bool = False) -> Buffer:
        """out = silu(x gate^T) * (x up^T), or gelu_tanh in place of silu; activations as for `linear`."""
        self.native.gated(x.id, gate.id, up.id, gelu, out.id)
        return out

    def add(self, x: Buffer, y: Buffer) -> Buffer:
        """x += y."""
        self.native.add(x.id, y.id)
        return x

    def gather(self, x: Buffer, out: Buffer) -> Buffer:
        """out = the rows of x that the step wants outputs for."""
        self.native.gather(x.id, out.id)
        return out

    def head(self, x: Buffer, weight: Weight) -> None:
        """Scores the vocabulary for each output: logits where asked for, otherwise only the largest is kept."""
        self.native.head(x.id, weight.id)
        self.vocabulary = weight.n

    def run(
        self,
        kv: KvCache | None,
        step: StepInput,
        logits: npt.NDArray[np.float32],
        argmax: npt.NDArray[np.int32],
    ) -> float:
        """Runs all operations; returns the seconds spent in native code.

        logits: float32[n, vocabulary], filled for the first n outputs. argmax: int32[O], filled for the others with
        the most probable token (the lowest id on ties), -1 where the scores are not numbers.
        """
        return self.native.run(kv.native if kv else None, *step, logits, argmax)

    def read(self, buffer: Buffer, rows: int) -> npt.NDArray[np.float32]:
        """A copy of the first rows of a buffer."""
        return self.native.read(buffer.id, rows)

    def write(self, buffer: Buffer, values: npt.NDArray[np.float32]) -> None:
        """Fills the first rows of a buffer, for tests of single operations."""
        self.native.write(buffer.id, np.ascontiguousarray(values, dtype=np.float32))

    def profile(self) -> dict[str, float]:
        """Seconds by kind of operation since the last call; the first call turns profiling on."""
        return dict(zip(KINDS, self.native.profile(), strict=False))
