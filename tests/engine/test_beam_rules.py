"""The rules of beam search alone, and what a search refuses before anything runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from forerun import Engine
from forerun.engine.beam_rules import BeamRules, Candidate
from forerun.errors import CapacityError, InvalidRequestError
from reference.speculation import emptied
from reference.tiny import VOCAB_SIZE


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Engine:
    return Engine(tiny, kv_tokens=64, max_model_len=128, threads=1, cache_weights=False)


def test_only_ends_among_the_first_beams_count_and_as_many_go_on_as_there_are_beams() -> None:
    rules = BeamRules(beams=2, length_penalty=2.0)
    candidates = [Candidate(0, token, -token, -float(token)) for token in range(1, 8)]
    asked: list[int] = []

    def ends(candidate: Candidate) -> Any:
        asked.append(candidate.token)
        return "stop" if candidate.token in (2, 3, 4) else None

    choice = rules.choose(candidates, 3, ends)
    assert [(e.candidate.token, e.reason, e.score) for e in choice.ended] == [(2, "stop", -2 / 9)]
    assert [c.token for c in choice.going] == [1, 5]
    assert asked == [1, 2, 3, 4, 5]
    # Ends among the first are seen even when enough go on.
    both = BeamRules(beams=2).choose(candidates[:2], 1, lambda c: "length" if c.token == 2 else None)
    assert ([c.token for c in both.going], [e.candidate.token for e in both.ended]) == ([1], [2])


def test_score() -> None:
    assert BeamRules(length_penalty=0).score(-6, 3) == -6
    assert BeamRules(length_penalty=1).score(-6, 3) == -2
    assert BeamRules(length_penalty=-1).score(-6, 3) == -18
    assert BeamRules(length_penalty=0.5).score(-6, 4) == -3


@pytest.mark.parametrize(
    ("early", "penalty", "best", "finished", "over"),
    [
        (False, 1.0, -8.0, [-1.0], False),  # a place is left
        (True, 1.0, -8.0, [-1.0], False),
        (True, 1.0, -0.1, [-1.0, -2.0], True),
        (False, 1.0, -8.0, [-1.0, -2.0], True),  # -8 / 4 doesn't beat -2
        (False, 1.0, -7.9, [-1.0, -2.0], False),
        ("never", 1.0, -8.0, [-1.0, -2.0], False),  # -8 / 10 might
        ("never", 1.0, -20.0, [-1.0, -2.0], True),
        ("never", 0.0, -2.0, [-1.0, -2.0], True),
        ("never", -1.0, -0.5, [-1.0, -2.0], True),  # longer is only worse
        ("never", -1.0, -0.49, [-1.0, -2.0], False),
        (False, 1.0, None, [], True),  # nobody goes on
    ],
)
def test_when_a_search_is_over(early: Any, penalty: float, best: float | None, finished: Any, over: bool) -> None:
    assert BeamRules(2, penalty, early).over(best, 4, 10, finished) is over


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beams": 0}, "beams=0 is not allowed; expected an integer from 1 to 256"),
        ({"beams": 257}, "beams=257"),
        ({"beams": 2.0}, "beams=2.0"),
        ({"beams": True}, "beams=True"),
        ({"n_return": 0}, "n_return=0 is not allowed; expected an integer from 1 to 4"),
        ({"beams": 2, "n_return": 3}, "n_return=3 is not allowed; expected an integer from 1 to 2"),
        ({"length_penalty": math.nan}, "length_penalty=nan is not allowed; expected a number from -10 to 10"),
        ({"length_penalty": 11}, "length_penalty=11"),
        ({"length_penalty": "1"}, "length_penalty='1'"),
        ({"early_stopping": "always"}, "early_stopping='always' is not allowed; expected True, False or 'never'"),
        ({"early_stopping": None}, "early_stopping=None"),
        ({"early_stopping": 1}, "early_stopping=1"),
        ({"temperature": 0.5}, "beam search has no parameter 'temperature'"),
        ({"n": 2}, "beam search has no parameter 'n'"),
        ({"stop": "x"}, "beam search has no parameter 'stop'"),
        ({"max_token": 3}, "beam search has no parameter 'max_token'"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias contains 300"),
        ({"scope": 3}, "scope=3 is not allowed"),
    ],
)
def test_what_can_not_be_served_is_refused(engine: Engine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        engine.beam_search([1, 2, 3], **settings)
    emptied(engine)


def test_a_search_needs_room_for_one_of_its_beams(engine: Engine) -> None:
    with pytest.raises(CapacityError, match=r"needs KV for 65 tokens .* but the whole pool holds 64"):
        engine.beam_search(range(50), 8, max_tokens=16)
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        engine.beam_search([])
    assert len(engine.beam_search(range(50), 8, max_tokens=15).sequences) == 8
    # The end of the pool is an end like max_tokens.
    [first, *_] = engine.beam_search(range(50), 3, max_tokens=None).sequences
    assert (len(first.token_ids), first.finish_reason) == (15, "length")
    emptied(engine)
