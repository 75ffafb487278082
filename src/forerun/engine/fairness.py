"""How much of a prompt a step may compute while other requests wait for their next token."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from forerun.engine.steptime import StepTimes

_QUICK: Final = 0.2
_SLOW: Final = 0.02
"""Weights of a step in what is remembered of such steps."""
_MOST: Final = 4.0
"""A step may have taken that many times what the table says, or that part of it; beyond is an accident."""


class PromptShare:
    """Bounds the time by which prompts make a step longer for those that decode in it.

    A long prompt computed in large chunks would stop everyone else for as long as a chunk takes (Sarathi-Serve,
    arXiv 2403.02310, bounds the chunk for that reason). Here the bound is a time, from the step times of this machine:
    a step with decodes takes at most `slowdown` times what it would take without prompts.

    The table knows nothing of context, and the last tokens of a long prompt attend to all those before. So steps with
    prompts and decodes, and those with decodes alone, are each compared with the table as they happen; what the table
    says is corrected by either.

    Args:
        times: T(n) of the engine's model.
        slowdown: above 1.
    """

    def __init__(self, times: StepTimes, slowdown: float) -> None:
        self.times = times
        self.slowdown = slowdown
        self._level = times.level
        self._mixed = self._plain = 1.0  # seconds over the table's, in units of its level at the start
        self._seen = 0

    def tokens(self, n_decodes: int, most: int) -> int:
        """Prompt tokens that fit beside `n_decodes` decoding requests, 1 to `most`."""
        seconds = self.times.seconds
        sizes = range(n_decodes + 1, n_decodes + most + 1)
        limit = self.slowdown * seconds(n_decodes) * self._plain / self._mixed
        return max(1, bisect_right(sizes, limit, key=seconds))

    def observe(self, n_tokens: int, n_prompt: int, seconds: float) -> None:
        """A forward over `n_tokens` query tokens, `n_prompt` of them of prompts, took `seconds`."""
        unit = self._level * self.times.seconds(n_tokens) / self.times.level
        ratio = min(max(seconds / unit, 1 / _MOST), _MOST)
        if n_prompt == 0:
            gain = max(_SLOW, 1 / (self._seen + 1))
            self._plain += gain * (ratio - self._plain)
            if not self._seen:
                self._mixed = self._plain
            self._seen += 1
        elif n_prompt < n_tokens:
            self._mixed += _QUICK * (ratio - self._mixed)
