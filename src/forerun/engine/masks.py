"""Masks of a step's constrained rows, computed beside the forward that they don't depend on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from forerun.constrain.bits import Words, mask_width
from forerun.errors import ConstraintError

if TYPE_CHECKING:
    from forerun.engine.choose import Walk


def grammar_failed(request_id: str, error: BaseException) -> ConstraintError:
    """What a failure of the grammar library itself means to the request."""
    failure = ConstraintError(
        f"request {request_id!r}: its grammar failed ({type(error).__name__}: {error}); simplify the constraint"
    )
    failure.__cause__ = error
    return failure


class StepMasks:
    """Which tokens each node of a step's trees allows, as packed bits.

    The paths to all nodes are known before the forward, so a thread of its own fills the masks while the forward runs:
    `begin`, forward, `finish`. Both let go of the GIL for nearly all of their time.

    Attributes:
        words: uint32[N, W]; bit t % 32 of word t // 32 is token t's. A walk's root has row `walk.mask`; node i has
            `walk.mask + 1 + i` if the walk has a mask for each node, else the root's.
        seconds: wall-clock time of the last step that masks took and no forward hid.
    """

    def __init__(self, vocab_size: int) -> None:
        self._width = mask_width(vocab_size)
        self.words: Words = np.zeros((0, self._width), dtype=np.uint32)
        self.seconds = 0.0
        self._worker: ThreadPoolExecutor | None = None
        self._filling: Future[None] | None = None

    def begin(self, walks: Sequence[Walk]) -> None:
        """Gives each constrained walk its rows and begins to fill them."""
        began = time.perf_counter()
        n_rows = 0
        grammatical: list[Walk] = []
        for walk in walks:
            live = walk.live
            if live.grammar is not None:
                walk.mask = n_rows
                walk.mask_per_node = True
                n_rows += 1 + len(walk.tree)
                grammatical.append(walk)
            elif live.allowed is not None:
                walk.mask = n_rows
                n_rows += 1
        if n_rows > len(self.words):
            self.words = np.zeros((2 * n_rows, self._width), dtype=np.uint32)
        for walk in walks:
            allowed = walk.live.allowed
            if allowed is not None and not walk.mask_per_node:
                self.words[walk.mask] = allowed
        if grammatical:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, "forerun-masks")
            self._filling = self._worker.submit(self._fill, grammatical)
        self.seconds = time.perf_counter() - began

    def finish(self) -> None:
        """Waits until all masks are there. A walk whose grammar failed has an `error`."""
        filling = self._filling
        if filling is not None:
            began = time.perf_counter()
            try:
                filling.result()
            finally:
                if filling.done():  # else the wait was interrupted, and is to be done again
                    self._filling = None
                self.seconds += time.perf_counter() - began

    def close(self) -> None:
        """Ends the thread."""
        if self._worker is not None:
            self._worker.shutdown(wait=False)

    def _fill(self, walks: Sequence[Walk]) -> None:
        for walk in walks:
            live, tree = walk.live, walk.tree
            assert live.grammar is not None
            words = self.words[walk.mask : walk.mask + 1 + len(tree)]
            try:
                live.grammar.masks(tree.tokens, tree.parents, words)
            except ConstraintError as error:
                walk.error = error
            except BaseException as error:  # the library's panics are no Exceptions; a thread gets no interrupts
                walk.error = grammar_failed(live.request.request_id, error)
            if live.allowed is not None:
                np.bitwise_and(words, live.allowed, out=words)
