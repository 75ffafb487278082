"""A ragged batch of draft trees, and what verification says about each.

The layout, for R rows of which the longest has N nodes:

- `tokens` and `parents` are integers [R, N]. Row r has `lengths[r]` nodes, the first ones; the rest is padding, which
  is never looked at. `parents[r, i] < i`; -1 is the root, the last committed token.
- What the target says is indexed by **column**: [R, N + 1, ...], column 0 at the root, column i + 1 after node i.
- What belongs to a node (its q, its acceptance number) is [R, N, ...].

Children of a node are in the order of their indices; where they were drawn, that is the order in which they were drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from array_api_compat import array_namespace, device, is_cupy_array, is_numpy_array, is_torch_array, to_device

from forerun.errors import VerificationError

if TYPE_CHECKING:
    from forerun.draft.base import DraftTree

Array: TypeAlias = Any
"""An array of any namespace that follows the array API standard (2024.12 or later), e.g. NumPy's or torch's."""


class Trees(NamedTuple):
    """Draft trees of R rows: tokens and parents integers [R, N], lengths integers [R]."""

    tokens: Array
    parents: Array
    lengths: Array

    @classmethod
    def of(cls, drafts: Sequence[DraftTree]) -> Trees:
        """NumPy arrays int64 of these trees, padded with -1."""
        n = max((len(draft) for draft in drafts), default=0)
        tokens = np.full((len(drafts), n), -1, dtype=np.int64)
        parents = np.full((len(drafts), n), -1, dtype=np.int64)
        for row, draft in enumerate(drafts):
            tokens[row, : len(draft)] = draft.tokens
            parents[row, : len(draft)] = draft.parents
        return cls(tokens, parents, np.array([len(draft) for draft in drafts], dtype=np.int64))


class DrawnFrom(NamedTuple):
    """What the nodes of a batch were drawn from.

    q: float32[R, N, V]. drawn: bool[R, N]; False where a node was chosen, not drawn (and in padding).
    """

    q: npt.NDArray[np.float32]
    drawn: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, drafts: Sequence[DraftTree], vocab_size: int) -> DrawnFrom:
        """The `q` of these trees, padded as `Trees.of` pads them."""
        n = max((len(draft) for draft in drafts), default=0)
        q = np.zeros((len(drafts), n, vocab_size), dtype=np.float32)
        drawn = np.zeros((len(drafts), n), dtype=np.bool_)
        for row, draft in enumerate(drafts):
            if draft.q is not None:
                q[row, : len(draft)] = draft.q
                drawn[row, : len(draft)] = True
        return cls(q, drawn)


class Verdict(NamedTuple):
    """What became of one draft.

    path: accepted nodes, root to leaf, int32[k]. next_token: the target's own token after them, or NOT_FINITE or
    NOTHING_ALLOWED of `forerun.sample` where its scores have no distribution.
    """

    path: npt.NDArray[np.int32]
    next_token: int

    @property
    def accepted(self) -> int:
        """How many draft tokens were accepted."""
        return len(self.path)


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """What became of the drafts of R rows.

    Attributes:
        mask: bool[R, N], the accepted nodes; from left to right they are the path from root to leaf.
        next_token: int64[R], as in `Verdict`.
    """

    mask: Array
    next_token: Array

    @property
    def accepted(self) -> Array:
        """Number of accepted draft tokens, int64[R]; the step emits one more."""
        xp = array_namespace(self.mask)
        return xp.sum(xp.astype(self.mask, xp.int64), axis=1)

    @property
    def path(self) -> Array:
        """Indices of the accepted nodes, int64[R, N], padded with -1."""
        xp = array_namespace(self.mask)
        n = self.mask.shape[1]
        nodes = xp.arange(n, dtype=xp.int64, device=device(self.mask))[None, :]
        front = xp.sort(xp.where(self.mask, nodes, n), axis=1) if n else nodes + xp.astype(self.mask, xp.int64)
        return xp.where(front < n, front, -1)

    def emitted(self, trees: Trees) -> Array:
        """Tokens that the step emits, int64[R, N + 1]: the accepted ones, the target's own, then -1."""
        xp = array_namespace(self.mask)
        path, n = self.path, self.mask.shape[1]
        flat = xp.reshape(xp.astype(trees.tokens, xp.int64), (-1,))
        rows = xp.arange(path.shape[0], dtype=xp.int64, device=device(self.mask))[:, None]
        columns = xp.arange(n + 1, dtype=xp.int64, device=device(self.mask))[None, :]
        last = xp.astype(self.next_token, xp.int64)[:, None]
        if n:
            drafted = xp.take(flat, xp.reshape(rows * n + xp.where(path < 0, 0, path), (-1,)))
            last = xp.concat([xp.reshape(drafted, path.shape), last], axis=1)
            own = xp.broadcast_to(xp.astype(self.next_token, xp.int64)[:, None], last.shape)
            last = xp.where(columns == self.accepted[:, None], own, last)
        return xp.where(columns <= self.accepted[:, None], last, -1)

    def __len__(self) -> int:
        return int(self.mask.shape[0])

    def __getitem__(self, row: int) -> Verdict:
        mask = numpy_of(self.mask[row, :])
        return Verdict(np.flatnonzero(mask).astype(np.int32), int(self.next_token[row]))

    def __iter__(self) -> Iterator[Verdict]:
        return (self[row] for row in range(len(self)))


def numpy_of(array: Array) -> npt.NDArray[Any]:
    """An array of any namespace as NumPy's; of torch and CuPy from any device, of others from main memory."""
    if is_torch_array(array) or is_cupy_array(array):
        array = to_device(array, "cpu")
    return np.asarray(array) if is_numpy_array(array) else np.asarray(np.from_dlpack(array))


def checked(trees: Trees, **targets: tuple[Array, int]) -> Array:
    """bool[R, N]: which nodes are there. Raises `VerificationError` if they are no trees.

    targets: arrays by name, each with the number of columns that it has to have beyond N.
    """
    xp = array_namespace(*trees)
    shape = tuple(trees.tokens.shape)
    if len(shape) != 2 or tuple(trees.parents.shape) != shape or tuple(trees.lengths.shape) != shape[:1]:
        raise VerificationError(
            f"tokens have shape {shape}, parents {tuple(trees.parents.shape)}, lengths {tuple(trees.lengths.shape)}; "
            "expected [R, N], [R, N] and [R]"
        )
    for name, (array, extra) in targets.items():
        expected = (shape[0], shape[1] + extra)
        if tuple(array.shape[:2]) != expected:
            raise VerificationError(
                f"{name} has shape {tuple(array.shape)} for drafts of shape {shape}; expected {expected} to begin with"
            )
    nodes = xp.arange(shape[1], dtype=trees.lengths.dtype, device=device(trees.tokens))[None, :]
    there = nodes < trees.lengths[:, None]
    wrong = there & ((trees.parents < -1) | (xp.astype(trees.parents, nodes.dtype) >= nodes) | (trees.tokens < 0))
    if bool(xp.any(trees.lengths < 0)) or bool(xp.any(trees.lengths > shape[1])) or bool(xp.any(wrong)):
        raise VerificationError(
            f"a draft is no tree; expected lengths from 0 to {shape[1]}, tokens from 0, and each parent from -1 to the "
            "index before its node"
        )
    return there
