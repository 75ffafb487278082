"""How much of a prompt a step may compute while other requests wait for their next token."""

from __future__ import annotations

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
        limit = self.slowdown * self.times.seconds(n_decodes)
        good, bad = 1, most + 1
        while bad - good > 1:
            middle = (good + bad) // 2
            if self.times.seconds(n_decodes + middle) <= limit:
                good = middle
            else:
                bad = middle
        return good
