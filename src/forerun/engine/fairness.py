"""How much of a prompt a step may compute while other requests wait for their next token."""

from __future__ import annotations

from bisect import bisect_right

from forerun.engine.steptime import StepTimes


class PromptShare:
    """Bounds the time by which prompts make a step longer for those that decode in it.

    A long prompt computed in large chunks would stop everyone else for as long as a chunk takes (Sarathi-Serve,
    arXiv 2403.02310, bounds the chunk for that reason). Here the bound is a time, from the step times of this machine:
    a step with decodes takes at most `slowdown` times what it would take without prompts, as the table has it.

    Args:
        times: T(n) of the engine's model.
        slowdown: above 1.
    """

    def __init__(self, times: StepTimes, slowdown: float) -> None:
        self.times = times
        self.slowdown = slowdown

    def tokens(self, n_decodes: int, most: int) -> int:
        """Prompt tokens that fit beside `n_decodes` decoding requests, 1 to `most`."""
        seconds = self.times.seconds
        sizes = range(n_decodes + 1, n_decodes + most + 1)
        return max(1, bisect_right(sizes, self.slowdown * seconds(n_decodes), key=seconds))
