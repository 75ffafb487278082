"""Beam search the slow way: every sequence is run through the model from its beginning, and all tokens are ranked.

`beam_search` is written after Hugging Face's, with its slots for finished texts that begin with a score of -1e9;
`exhaustive` doesn't search at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.sample.transforms import top_logprobs
from reference.plain_model import PlainModel

NOTHING = -1e9

LogProbs = Callable[[Sequence[int]], npt.NDArray[np.float32]]


class Found(NamedTuple):
    """A text: its score, the sum of its log-probabilities, its tokens, and why it ended."""

    score: float
    total: float
    tokens: tuple[int, ...]
    reason: str


def log_probabilities(model: PlainModel) -> LogProbs:
    """The model's float32[V] after a sequence."""

    def after(tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        logits = model.logits(tokens)
        best = top_logprobs(logits, len(logits), 0)
        row = np.empty(len(logits), dtype=np.float32)
        row[best.ids] = best.logprobs
        return row

    return after


def beam_search(
    after: LogProbs,
    prompt: Sequence[int],
    ends: Collection[int],
    *,
    beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: Any = False,
) -> list[Found]:
    """The texts that the search returns, best first."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    slots = [Found(NOTHING, NOTHING, (), "none")] * beams
    length = 0
    while True:
        candidates = []
        for index, (total, tokens) in enumerate(running):
            row = after([*prompt, *tokens]).tolist()
            candidates += [(-(total + logprob), index, token) for token, logprob in enumerate(row)]
        candidates.sort()
        length += 1
        following, new = [], []
        for rank, (negative, index, token) in enumerate(candidates[: max(2, 1 + len(ends)) * beams]):
            total, tokens = -negative, (*running[index][1], token)
            if token in ends or length == max_tokens:
                if rank < beams:
                    reason = "stop" if token in ends else "length"
                    new.append(Found(total / length**length_penalty, total, tokens, reason))
            else:
                following.append((total, tokens))
        slots = sorted([*slots, *new], key=lambda found: -found.score)[:beams]
        running = following[:beams]
        full = slots[-1].score > NOTHING
        if not running or (full and early_stopping is True):
            break
        hoped = max_tokens if early_stopping == "never" and length_penalty > 0 else length
        if running[0][0] / hoped**length_penalty <= slots[-1].score:
            break
    return [found for found in slots if found.score > NOTHING]


def exhaustive(
    after: LogProbs,
    prompt: Sequence[int],
    alphabet: Sequence[int],
    ends: Collection[int],
    *,
    max_tokens: int,
    length_penalty: float = 1.0,
) -> list[Found]:
    """Every text of these tokens that ends with one of `ends` or has `max_tokens` tokens, best first."""
    found = []
    for length in range(1, max_tokens + 1):
        for tokens in itertools.product(alphabet, repeat=length):
            if any(token in ends for token in tokens[:-1]):
                continue
            ended = tokens[-1] in ends
            if ended or length == max_tokens:
                total = sum(float(after([*prompt, *tokens[:at]])[token]) for at, token in enumerate(tokens))
                found.append(Found(total / length**length_penalty, total, tokens, "stop" if ended else "length"))
    return sorted(found, key=lambda text: -text.score)
