"""From the target's scores to tokens: verification of draft trees, of which plain decoding is the empty case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.draft.base import DraftTree
from forerun.engine.output import TokenLogprob
from forerun.errors import ConstraintError, ForerunError, NumericalError
from forerun.sample.arrays import SpecArrays
from forerun.sample.transforms import NOT_FINITE

if TYPE_CHECKING:
    from forerun.engine.live import LiveRequest


class TopLogprobs(NamedTuple):
    """ids int32[R, top], logprobs float32[R, top] and the chosen token's own float32[R]."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    chosen: npt.NDArray[np.float32]


class Choice(NamedTuple):
    """What the target says about a row.

    path: accepted nodes of its tree, root to leaf.
    tokens: theirs, then the target's own. Without the latter if none could be chosen there; empty if none could at the
        root.
    logprobs: one for each token, if the request asked for them, else empty.
    """

    path: list[int]
    tokens: list[int]
    logprobs: list[TokenLogprob]


class Walk:
    """A row's way down its tree: at each node the target chooses a token, and the child that has it comes next.

    Args:
        output: index of the root among the step's outputs; node i is output + 1 + i.

    Attributes:
        mask: the root's row among the step's masks, or -1; mask_per_node: whether node i has row mask + 1 + i, and not
            the root's.
        error: why no token could be chosen at the root.
    """

    __slots__ = (
        "_children", "error", "live", "logprobs", "mask", "mask_per_node", "node", "output", "path", "tokens", "tree",
    )  # fmt: skip

    def __init__(self, live: LiveRequest, tree: DraftTree, output: int) -> None:
        self.live = live
        self.tree = tree
        self.output = output
        self.node = -1
        self.path: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.mask = -1
        self.mask_per_node = False
        self.error: ForerunError | None = None
        # Of siblings with the same token, the first.
        self._children: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(tree.parents, tree.tokens, strict=True)):
            self._children.setdefault(key, node)

    @property
    def at(self) -> int:
        """The output of the node where the walk stands."""
        return self.output + 1 + self.node

    @property
    def mask_row(self) -> int:
        """The mask of the node where the walk stands, or -1."""
        return self.mask + 1 + self.node if self.mask_per_node else self.mask

    def take(self, token: int) -> bool:
        """Notes the target's token at this node (negative: none); goes on to the child that has it, if there is one."""
        return self.enter(self._children.get((self.node, token), -1), token)

    def enter(self, child: int, token: int) -> bool:
        """Notes a token (negative: none could be chosen) and goes on to the child that has it, if there is one (-1)."""
        if token < 0:
            if not self.tokens:
                self.error = nothing_chosen(self.live, token)
            return False
        self.tokens.append(token)
        if child < 0:
            return False
        self.path.append(child)
        self.node = child
        return True

    def children(self) -> list[int]:
        """Nodes that follow the one where the walk stands."""
        return [child for child, parent in enumerate(self.tree.parents) if parent == self.node]

    @property
    def position(self) -> int:
        """Index in the sequence of the token that is chosen next."""
        return len(self.live.request.tokens) + len(self.tokens)

    @property
    def rejects(self) -> bool:
        """Whether drafts are verified by rejection; at temperature 0 that is the greedy rule."""
        return self.live.params.verify == "rejection" and not self.live.params.greedy

    def choice(self) -> Choice:
        """The outcome."""
        return Choice(self.path, self.tokens, self.logprobs)


class Chooser:
    """Applies each row's parameters with the noise of (seed, position), in native code.

    The rules are those of `forerun.verify`: greedy and coupled rows take the target's own token at each node; rejection
    rows (at a temperature) accept drafts with min(1, p/q). Only nodes on the accepted paths are sampled.
    """

    def top_logprobs(
        self, logits: npt.NDArray[np.float32], rows: npt.NDArray[np.int32], top: int, chosen: npt.NDArray[np.int32]
    ) -> TopLogprobs:
        """Log-probabilities of raw logits float32[N, V] in `rows` int32[R]: the `top` best, and those of `chosen`
        int32[R]."""
        return TopLogprobs(*_native.top_logprobs(logits, rows, top, chosen))

    def greedy(self, walks: Sequence[Walk], argmax: npt.NDArray[np.int32]) -> None:
        """Walks rows that take the most probable token; argmax is int32[outputs]."""
        for walk in walks:
            best: list[int] = argmax[walk.output : walk.output + 1 + len(walk.tree)].tolist()
            while walk.take(best[walk.node + 1]):
                pass

    def sampled(self, walks: Sequence[Walk], logits: npt.NDArray[np.float32], masks: npt.NDArray[np.uint32]) -> None:
        """Walks rows that need logits float32[N, V]; output i is logits[i]. Logits are as before on return.

        masks: uint32[M, ceil(V / 32)], of which each walk names its rows.
        """
        active = list(walks)
        while active:
            at = np.array([walk.at for walk in active], dtype=np.int32)
            saved = [
                (logits[row], walk.live.edits.apply(logits[row], walk.tokens))
                for walk, row in zip(active, at.tolist(), strict=True)
                if walk.live.edits is not None
            ]
            drawn = self._draw(active, at, logits, masks)
            for row, values in saved:
                values.restore(row)
            going: list[Walk] = []
            for walk, row, (token, child) in zip(active, at.tolist(), drawn, strict=True):
                if token >= 0:
                    self._detail(walk, logits, row, token)
                if walk.take(token) if child is None else walk.enter(child, token):
                    going.append(walk)
            active = going

    def _draw(
        self,
        walks: Sequence[Walk],
        at: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32],
        masks: npt.NDArray[np.uint32],
    ) -> list[tuple[int, int | None]]:
        """The token chosen at each walk's node, and for rejection rows the child that was accepted or -1."""
        rejecting = [walk.rejects for walk in walks]
        mask_rows = np.array([walk.mask_row for walk in walks], dtype=np.int32)
        drawn: list[tuple[int, int | None]] = [(-1, None)] * len(walks)
        if not all(rejecting):
            which = [i for i, rejects in enumerate(rejecting) if not rejects]
            spec = _spec([walks[i] for i in which])
            tokens = _native.sample(logits, at[which], *spec, masks, mask_rows[which])
            for i, token in zip(which, tokens.tolist(), strict=True):
                drawn[i] = (token, None)
        for i, rejects in enumerate(rejecting):
            if rejects:
                drawn[i] = self._reject(walks[i], at[i : i + 1], logits, masks, mask_rows[i : i + 1])
        return drawn

    def _reject(
        self,
        walk: Walk,
        at: npt.NDArray[np.int32],
        logits: npt.NDArray[np.float32],
        masks: npt.NDArray[np.uint32],
        mask_rows: npt.NDArray[np.int32],
    ) -> tuple[int, int | None]:
        tree, children = walk.tree, walk.children()
        n = len(children)
        if tree.q is None:
            q, q_rows = np.empty((0, logits.shape[1]), dtype=np.float32), np.full(n, -1, dtype=np.int32)
        else:
            q, q_rows = tree.q, np.array(children, dtype=np.int32)
        choice, tokens = _native.reject(
            logits, at, *_spec([walk]), np.array([0, n], dtype=np.int32),
            np.array([tree.tokens[child] for child in children], dtype=np.int32), q, q_rows,
            masks, mask_rows,
        )  # fmt: skip
        accepted = int(choice[0])
        return (tree.tokens[children[accepted]], children[accepted]) if accepted >= 0 else (int(tokens[0]), -1)

    def _detail(self, walk: Walk, logits: npt.NDArray[np.float32], row: int, token: int) -> None:
        top = walk.live.params.logprobs
        if top is None:
            return
        best = self.top_logprobs(logits, np.array([row], dtype=np.int32), top, np.array([token], dtype=np.int32))
        pairs = zip(best.ids[0].tolist(), best.logprobs[0].tolist(), strict=True)
        walk.logprobs.append(TokenLogprob(token, float(best.chosen[0]), tuple(pairs)))


def nothing_chosen(live: LiveRequest, fault: int) -> ForerunError:
    """Why the native sampler returned `fault` in place of a token."""
    name = f"request {live.request.request_id!r}"
    if fault == NOT_FINITE or (live.grammar is None and live.allowed is None and live.edits is None):
        return NumericalError(f"{name}: {not_numbers(len(live.request.tokens))}")
    return ConstraintError(
        f"{name}: no token may come next at position {len(live.request.tokens)}: constraint, allowed_token_ids, "
        "bad_words and min_tokens leave nothing together; loosen one of them"
    )


def not_numbers(position: int) -> str:
    """What to say when the scores of the token at `position` are not numbers."""
    return (
        f"the model's scores are not numbers at position {position}: the weights are damaged or the activations "
        "overflow; download the model again, or use another one"
    )


def _spec(walks: Sequence[Walk]) -> SpecArrays:
    return SpecArrays.of(
        (walk.live.params for walk in walks),
        (walk.live.seed for walk in walks),
        (walk.position for walk in walks),
        (None if walk.live.edits is None else walk.live.edits.late(walk.tokens) for walk in walks),
    )
