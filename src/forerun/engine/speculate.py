"""Between the scheduler and the drafter: who drafts, how much, and what happens when a drafter fails."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar, overload

import numpy as np

from forerun.constrain.state import GrammarState
from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree
from forerun.engine.forced import cut_to_grammar, forced_draft, joined
from forerun.engine.live import LiveRequest
from forerun.engine.pace import Pace
from forerun.engine.request import Request, RequestState, RowPlan
from forerun.engine.tally import StepSeconds
from forerun.errors import DraftError, DraftWarning

T = TypeVar("T")


class _Committed(Sequence[int]):
    """A request's tokens as a drafter sees them: the live list, but not to be written to."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)


def _grammatical(live: LiveRequest, draft: Callable[[GrammarState], DraftTree]) -> DraftTree:
    """A draft that looks at the request's grammar, if it has one; the time is the grammar's."""
    if live.grammar is None:
        return NO_DRAFT
    began = time.perf_counter()
    try:
        return draft(live.grammar)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the library's panics are no Exceptions
        return NO_DRAFT  # the mask of the step itself will say so
    finally:
        live.grammar_seconds += time.perf_counter() - began


class Speculator:
    """Asks a drafter for trees, at the pace that `Pace` chooses.

    A drafter can make an answer faster or slower, never different, and so it can't make one fail either: the first
    exception or malformed tree turns drafting off for good, with a `DraftWarning` that says why.

    Attributes:
        failure: what turned drafting off, or None.
    """

    def __init__(self, drafter: Drafter, pace: Pace, vocab_size: int) -> None:
        self.drafter = drafter
        self.pace = pace
        self.failure: DraftError | None = None
        self._vocab_size = vocab_size
        self._name = str(drafter.name)
        # A drafter that serves two engines must not take one's requests for the other's.
        self._keys = itertools.count(secrets.randbits(48) << 16)
        self._n_proposed = 0  # nodes of this step, before the cut
        self._setup = 0.0  # seconds of this step that were no part of drafting

    def _begin(self, live: LiveRequest) -> int:
        key = live.draft_key = next(self._keys)
        self.pace.begin(key, live.request.tokens)
        self.drafter.begin(key, live.request.salt)
        return key

    def fork(self, live: LiveRequest, child: LiveRequest) -> None:
        """The child continues from the same tokens, if the parent may draft."""
        if self.failure is not None or live.draft_key is None:
            return
        parent_key, key = live.draft_key, next(self._keys)
        child.draft_key = key
        self._guarded(lambda: self.pace.fork(parent_key, key, child.request.tokens))
        self._guarded(lambda: self.drafter.fork(parent_key, key))

    def free(self, live: LiveRequest) -> None:
        """The request has ended."""
        key, live.draft_key = live.draft_key, None
        if key is None:
            return
        self._guarded(lambda: self.pace.free(key))
        self._guarded(lambda: self.drafter.free(key, tuple(live.request.tokens)))

    def wishes(self, lives: Iterable[LiveRequest]) -> dict[Request, int]:
        """The most draft tokens that each request could use: those whose next step is a decode, and those whose prompt
        may end in it and whose text has a forced beginning."""
        return self._guarded(lambda: self._wishes(lives)) or {}

    def _wishes(self, lives: Iterable[LiveRequest]) -> dict[Request, int]:
        wishes: dict[Request, int] = {}
        for live in lives:
            request = live.request
            if not live.speculate:
                continue
            if live.draft_key is None and not request.n_output:
                if live.opening is None:
                    live.opening = _grammatical(live, partial(forced_draft, budget=self.pace.max_draft))
                if live.opening:
                    wishes[request] = min(len(live.opening), live.max_draft)
                    continue
            if request.state is RequestState.RUNNING and len(request.tokens) - request.num_computed == 1:
                key = self._begin(live) if live.draft_key is None else live.draft_key
                wish = min(self.pace.wish(key), live.max_draft)
                if wish > 0:
                    wishes[request] = wish
        return wishes

    def draft(self, rows: Sequence[RowPlan], lives: Sequence[LiveRequest]) -> list[DraftTree]:
        """A tree for each row of the plan, no larger than the row's draft count."""
        trees = [NO_DRAFT] * len(rows)
        self._n_proposed = 0
        self._setup = 0.0
        asked = [
            (i, live.draft_key) for i, live in enumerate(lives) if rows[i].draft_count and live.draft_key is not None
        ]
        for i, live in enumerate(lives):
            if rows[i].draft_count and live.draft_key is None and live.opening is not None:
                trees[i] = live.opening.first(rows[i].draft_count)
        if asked:
            self._guarded(lambda: self._fill(trees, asked, rows, lives))
            for i, key in asked:
                if lives[i].traced:
                    decision = self.pace.decision(key)
                    if decision is not None and decision.position == len(lives[i].request.tokens):
                        lives[i].decided(decision)
        return trees

    def _fill(
        self,
        trees: list[DraftTree],
        asked: Sequence[tuple[int, int]],
        rows: Sequence[RowPlan],
        lives: Sequence[LiveRequest],
    ) -> None:
        n_tokens = sum(row.count for row in rows)
        n_deciding = sum(row.samples for row in rows)
        granted = [rows[i].draft_count for i, _ in asked]
        proposed: dict[int, DraftTree] = {}
        for place, (i, _) in enumerate(asked):
            # It is free and all but certain; a drafter can at best say what follows it.
            forced = _grammatical(lives[i], partial(forced_draft, budget=granted[place]))
            if forced:
                proposed[i] = forced
                granted[place] = rows[i].draft_count - len(forced) if self.drafter.reads_ahead else 0
        budgets = self.pace.budget([key for _, key in asked], granted, n_tokens, n_deciding)
        wanted = [(i, key, budget) for (i, key), budget in zip(asked, budgets, strict=True) if budget > 0]
        views = [
            DraftRow(
                key, _Committed(lives[i].request.tokens), budget, lives[i].params, lives[i].seed,
                self.pace.limits(key), proposed.get(i, NO_DRAFT).tokens,
            )
            for i, key, budget in wanted
        ]  # fmt: skip
        if views:
            for (i, _, _), tree in zip(wanted, self._proposals(views), strict=True):
                self._n_proposed += len(tree)
                proposed[i] = joined(proposed.get(i, NO_DRAFT), tree)
                if lives[i].grammar is not None:
                    proposed[i] = _grammatical(lives[i], partial(cut_to_grammar, tree=proposed[i]))
        if not proposed:
            return
        drafted = [(i, key) for i, key in asked if i in proposed]
        lengths = [len(lives[i].request.tokens) for i, _ in drafted]
        kept = self.pace.cut([key for _, key in drafted], lengths, [proposed[i] for i, _ in drafted], n_tokens)
        chosen = [(i, proposed[i].first(n)) for (i, _), n in zip(drafted, kept, strict=True)]
        for i, tree in chosen:
            trees[i] = tree

    def verdict(self, live: LiveRequest, tree: DraftTree, path: Sequence[int]) -> None:
        """Tells drafter and pace which nodes were accepted."""
        key = live.draft_key
        if key is not None:
            self._guarded(lambda: self.pace.verdict(key, tree, path))
            self._guarded(lambda: self.drafter.observe(key, tree, tuple(path)))

    def step(self, n_tokens: int, seconds: StepSeconds) -> None:
        """Tells the pace what a step with so many query tokens, drafts included, took."""
        draft_seconds = max(0.0, seconds.draft - self._setup)
        self._guarded(lambda: self.pace.step(n_tokens, self._n_proposed, draft_seconds, seconds.forward))
        self._n_proposed = 0
        self._setup = 0.0

    def close(self) -> None:
        """Gives back what the drafter holds; nothing is drafted afterwards."""
        if self.failure is None:
            self._guarded(self.drafter.close)
            self.failure = DraftError("the engine is closed")

    def _proposals(self, views: Sequence[DraftRow]) -> list[DraftTree]:
        before = float(self.drafter.setup_seconds)
        trees = list(self.drafter.propose(views))
        setup = float(self.drafter.setup_seconds) - before
        if not 0 <= setup < math.inf:
            raise DraftError(f"its setup_seconds went from {before} to {before + setup}; they can only grow")
        self._setup = setup
        if len(trees) != len(views):
            raise DraftError(f"it returned {len(trees)} trees for {len(views)} rows; expected one for each")
        return [self._checked(tree, view) for tree, view in zip(trees, views, strict=True)]

    def _checked(self, tree: DraftTree, view: DraftRow) -> DraftTree:
        n = len(tree)
        if n == 0:
            return NO_DRAFT
        if n > view.budget or len(tree.parents) != n or len(tree.confidence) not in (0, n):
            raise DraftError(
                f"it proposed {n} tokens with {len(tree.parents)} parents and {len(tree.confidence)} confidences; "
                f"expected at most {view.budget}, with as many of both (confidences may be left out)"
            )
        # Raises TypeError for what is no integer; a NumPy integer must not reach an output.
        tokens, parents = [*map(operator.index, tree.tokens)], [*map(operator.index, tree.parents)]
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
            if not (0 <= token < self._vocab_size and -1 <= parent < node):
                raise DraftError(
                    f"node {node} of its draft has token {token} and parent {parent}; expected a token from 0 to "
                    f"{self._vocab_size - 1} and a parent from -1 to {node - 1}"
                )
        confidence = [*map(float, tree.confidence)]
        if not all(0 <= value <= 1 for value in confidence):
            raise DraftError(f"its confidences are {confidence}; expected numbers from 0 to 1")
        q, shape = tree.q, (n, self._vocab_size)
        if q is not None:
            if not isinstance(q, np.ndarray) or q.shape != shape or not np.can_cast(q.dtype, np.float32, "same_kind"):
                found = f"{q.dtype}{list(q.shape)}" if isinstance(q, np.ndarray) else f"a {type(q).__name__}"
                raise DraftError(f"its q is {found}; expected an array float32{list(shape)}")
            q = np.ascontiguousarray(q, dtype=np.float32)
        name = tree.drafter or self._name
        if not isinstance(name, str):
            raise DraftError(f"its name is {name!r}; expected a text")
        return DraftTree(tokens, parents, confidence, q, name)

    def _guarded(self, call: Callable[[], T]) -> T | None:
        if self.failure is not None:
            return None
        try:
            return call()
        except Exception as error:
            failure = DraftError(
                f"the drafter {self._name!r} failed and is turned off; answers go on without it "
                f"({type(error).__name__}: {error})"
            )
            failure.__cause__ = error
            self.failure = failure
            # What it does while it is put away can't matter any more.
            with contextlib.suppress(Exception):
                self.drafter.close()
        warnings.warn(str(self.failure), DraftWarning, stacklevel=4)
        return None
