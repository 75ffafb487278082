"""What a beam search gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forerun.engine.request import FinishReason


@dataclass(frozen=True, slots=True)
class BeamSequence:
    """One of the texts that a beam search found.

    Attributes:
        text: the decoded tokens, without the end token.
        token_ids: all tokens, an end token included.
        logprobs: for each token the model's log-probability (natural logarithm), changed by penalties and bias if there
            are any, and not normalised again after that or after a constraint.
        logprob: their sum.
        score: logprob / len(token_ids) ** length_penalty.
        finish_reason: "stop" (end token, or nothing can follow in the grammar), or "length".
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


class BeamBlocks(NamedTuple):
    """KV blocks that a search needed.

    most: the most that its beams held at once; a block that several share counts once.
    separate: the most that they would have held if none were shared.
    """

    most: int
    separate: int


@dataclass(frozen=True, slots=True)
class BeamOutput:
    """The result of a beam search.

    Attributes:
        sequences: the texts found, best score first. Fewer than asked for only where a constraint allows no more.
        prompt_token_ids: the prompt.
        blocks: KV blocks held.
        steps: how often the beams went on by one token.
        preemptions: how often a beam's KV was dropped to make room, and computed again.
    """

    sequences: tuple[BeamSequence, ...]
    prompt_token_ids: tuple[int, ...]
    blocks: BeamBlocks
    steps: int
    preemptions: int

    @property
    def text(self) -> str:
        """The best text."""
        return self.sequences[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The best text's tokens."""
        return self.sequences[0].token_ids
