"""What speculation is compared with: each request alone, without any, in an engine of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun import Engine, RequestOutput, SamplingParams
from forerun.draft.base import Drafter
from forerun.engine.output import SpeculationStats
from reference.drafters import Recorded

BEYOND = 8
"""Tokens recorded past the end of an answer, which drafts of the truth run into."""

PROMPTS = ((1, 2, 3), (250, 7), (99,), tuple(range(40)))
FREE = SamplingParams(max_tokens=16, ignore_eos=True, logprobs=1)
SAMPLED = replace(FREE, temperature=0.8, seed=3, frequency_penalty=0.5)


def engine_for(path: Path, drafter: str | Drafter, draft_len: Any = 5, **options: Any) -> Engine:
    """A small engine that drafts."""
    options = {"kv_tokens": 1024, "threads": 1} | options
    return Engine(path, cache_weights=False, draft=drafter, draft_len=draft_len, **options)


def emptied(engine: Engine) -> None:
    """Raises AssertionError unless an engine is in order, holds nothing and has nothing to do."""
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert not engine.step()


@dataclass(frozen=True)
class Ask:
    """One request of a mix."""

    prompt: tuple[int, ...]
    params: SamplingParams
    speculate: bool = True


class Unspeculated:
    """Answers of one model without speculation, each computed alone and once.

    Attributes:
        truth: all answers so far, and how the model would go on after them where a stop ended them.
    """

    def __init__(self, model: Path) -> None:
        self.engine = Engine(
            model, kv_tokens=1024, threads=1, max_rows=1, prefix_cache=False, cache_weights=False, draft="none"
        )
        self.truth = Recorded()
        self._known: dict[tuple[tuple[int, ...], str], RequestOutput] = {}

    @classmethod
    def of_prompts(cls, model: Path) -> Unspeculated:
        """With the answers to `PROMPTS` under `FREE` and `SAMPLED`."""
        known = cls(model)
        for prompt in PROMPTS:
            for params in (FREE, SAMPLED):
                known.answer(prompt, params)
        return known

    def answer(self, prompt: Sequence[int], params: SamplingParams) -> RequestOutput:
        """The output of a request whose seed is fixed."""
        assert params.greedy or params.seed is not None, "without a seed there's nothing to compare with"
        key = (tuple(prompt), repr(params))
        if key not in self._known:
            [output] = self.engine.generate([list(prompt)], params)
            self._known[key] = output
            self.truth.add(params, prompt, self._longer(prompt, params, output))
        return self._known[key]

    def _longer(self, prompt: Sequence[int], params: SamplingParams, output: RequestOutput) -> tuple[int, ...]:
        if params.constraint is not None:
            return output.token_ids  # nothing follows where its grammar ends
        room = self.engine.max_model_len - len(prompt)
        unstopped = replace(
            params, stop=(), stop_token_ids=(), ignore_eos=True, min_tokens=0, logprobs=None,
            max_tokens=min(len(output.token_ids) + BEYOND, room),
        )  # fmt: skip
        longer = self.engine.generate([list(prompt)], unstopped)[0].token_ids
        # Where min_tokens forbade a token, the two part.
        return longer if longer[: len(output.token_ids)] == output.token_ids else output.token_ids

    def compare(self, asks: Iterable[Ask], outputs: Iterable[RequestOutput]) -> None:
        """Raises AssertionError unless every output is what its request gets alone."""
        for ask, output in zip(asks, outputs, strict=True):
            same(output, self.answer(ask.prompt, ask.params))
            check_identities(output)


def same(output: RequestOutput, expected: RequestOutput) -> None:
    """Raises AssertionError unless two answers are equal in all that a caller sees; floats are compared exactly."""
    assert output.token_ids == expected.token_ids
    assert (output.text, output.finish_reason) == (expected.text, expected.finish_reason)
    assert output.logprobs == expected.logprobs


def check_identities(output: RequestOutput) -> None:
    """What `SpeculationStats` promises of one request's counts."""
    stats = output.stats.speculation
    assert stats.emitted == len(output.token_ids) == output.stats.output_tokens
    assert stats.steps == output.stats.steps
    check_sums(stats)
    if output.finish_reason != "cancelled" and not output.stats.preemptions:
        # Every token but the last was computed once as a known one, or is an accepted draft's.
        prompt = output.stats.prompt_tokens - output.stats.cached_tokens
        assert stats.computed - stats.proposed == prompt + stats.decisions - 1


def check_sums(stats: SpeculationStats) -> None:
    """What `SpeculationStats` promises of any counts."""
    assert stats.emitted == stats.accepted + stats.decisions - stats.cut
    assert stats.accepted == sum(stats.accepted_by_position) == sum(c.accepted for c in stats.by_drafter.values())
    assert stats.proposed == sum(stats.proposed_by_position) == sum(c.proposed for c in stats.by_drafter.values())
    assert stats.drafted == sum(c.drafts for c in stats.by_drafter.values()) <= stats.decisions <= stats.steps
    assert stats.drafted == sum(stats.drafted_by_length)
    assert stats.proposed == sum(n * count for n, count in enumerate(stats.drafted_by_length, 1))
    assert 0 <= stats.cut <= stats.accepted + stats.decisions
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    assert len(stats.accepted_by_position) == len(stats.proposed_by_position)
    for accepted, proposed in zip(stats.accepted_by_position, stats.proposed_by_position, strict=True):
        assert accepted <= min(proposed, stats.drafted)
    if stats.drafted:
        assert stats.proposed_by_position[0] >= stats.drafted
        assert stats.acceptance == stats.accepted / stats.proposed
    else:
        assert stats.acceptance is None
        assert stats.proposed == 0
    for seconds in (stats.draft_seconds, stats.forward_seconds, stats.verify_seconds, stats.schedule_seconds):
        assert seconds >= 0.0
