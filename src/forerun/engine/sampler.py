"""Chooses tokens from logits for the rows of a step that need more than the largest score."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.engine.live import LiveRequest
from forerun.engine.output import TokenLogprob


class TopLogprobs(NamedTuple):
    """ids int32[R, top], logprobs float32[R, top] and the chosen token's own float32[R]."""

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    chosen: npt.NDArray[np.float32]


class Sampler:
    """Applies each row's parameters with the noise of (seed, position), in native code."""

    def top_logprobs(self, logits: npt.NDArray[np.float32], top: int, chosen: npt.NDArray[np.int32]) -> TopLogprobs:
        """Log-probabilities of raw logits float32[R, V]: the `top` best, and those of the tokens chosen int32[R]."""
        return TopLogprobs(*_native.top_logprobs(logits, top, chosen))

    def choose(
        self,
        rows: Sequence[LiveRequest],
        logits: npt.NDArray[np.float32],
        out: npt.NDArray[np.int32],
    ) -> list[TokenLogprob | None]:
        """Writes a token for each row of logits float32[R, V] into out[:R]; returns log-probabilities where asked for.

        A negative token means that the row's scores are not numbers. `logits` are restored before returning.
        """
        if not rows:
            return []
        n = len(rows)
        kept = [self._ban(row, logits[i]) for i, row in enumerate(rows)]
        out[:n] = _native.sample(
            logits,
            np.array([r.params.temperature for r in rows], dtype=np.float32),
            np.array([r.params.top_k for r in rows], dtype=np.int32),
            np.array([r.params.top_p for r in rows], dtype=np.float32),
            np.array([r.params.min_p for r in rows], dtype=np.float32),
            np.array([r.seed for r in rows], dtype=np.uint64),
            np.array([len(r.request.tokens) for r in rows], dtype=np.int64),
        )
        details: list[TokenLogprob | None] = []
        for i, row in enumerate(rows):
            values = kept[i]
            if values is not None:
                logits[i, row.banned] = values
            details.append(self._detail(row, logits[i : i + 1], out[i : i + 1]))
        return details

    def _ban(self, row: LiveRequest, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32] | None:
        if not row.bans_now:
            return None
        values: npt.NDArray[np.float32] = logits[row.banned].copy()
        logits[row.banned] = -np.inf
        return values

    def _detail(
        self, row: LiveRequest, logits: npt.NDArray[np.float32], chosen: npt.NDArray[np.int32]
    ) -> TokenLogprob | None:
        if row.params.logprobs is None or chosen[0] < 0:
            return None
        best = self.top_logprobs(logits, row.params.logprobs, np.ascontiguousarray(chosen))
        pairs = zip(best.ids[0].tolist(), best.logprobs[0].tolist(), strict=True)
        return TokenLogprob(int(chosen[0]), float(best.chosen[0]), tuple(pairs))
