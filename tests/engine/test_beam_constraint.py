"""Beam search under constraints: every text is valid, and the best one is found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Engine, SamplingParams
from forerun.constrain import Choice, JsonSchema, Regex
from forerun.constrain.state import GrammarState
from forerun.engine.beams import LiveBeam
from forerun.errors import ConstraintError, InvalidConstraintError, InvalidRequestError
from reference.beams import log_probabilities
from reference.plain_model import PlainModel
from reference.speculation import emptied
from reference.tiny import EOS_ID

PROMPT = (250, 7, 33, 90, 120)
CHOICES = ("yes", "no", "yes, but not now", "maybe", "mañana", "nothing")
SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["A", "B"]}, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["type", "size"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(model: Path) -> Engine:
    return Engine(model, kv_tokens=1024, threads=1, cache_weights=False, draft="none")


def test_a_choice_is_ranked_by_the_model(engine: Engine, model: Path) -> None:
    """All choices are found, each once, with the log-probability that the model gives to its tokens."""
    after = log_probabilities(PlainModel(model))
    output = engine.beam_search(PROMPT, 24, max_tokens=40, constraint=Choice(CHOICES), length_penalty=0.0)
    assert sorted({s.text for s in output.sequences}) == sorted(CHOICES)
    assert {s.finish_reason for s in output.sequences} == {"stop"}
    assert [s.score for s in output.sequences] == sorted((s.score for s in output.sequences), reverse=True)
    for sequence in output.sequences:
        tokens = sequence.token_ids
        total = sum(float(after([*PROMPT, *tokens[:at]])[token]) for at, token in enumerate(tokens))
        assert sequence.logprob == pytest.approx(total, abs=1e-4)
    emptied(engine)


@pytest.mark.parametrize(
    "constraint",
    [Choice(CHOICES), Regex(r"(ab|cd){2,5} = [0-9]{1,4}(\.[0-9]{2})?"), Regex("a[ab]*"), JsonSchema(SCHEMA)],
    ids=["choice", "regex", "open end", "schema"],
)
def test_texts_are_valid_and_one_beam_is_greedy(engine: Engine, constraint: Any) -> None:
    def check(text: str, reason: str) -> None:
        if reason == "length":
            return
        if isinstance(constraint, Choice):
            assert text in CHOICES
        elif isinstance(constraint, Regex):
            assert re.fullmatch(constraint.pattern, text)
        else:
            value = json.loads(text)
            assert value["type"] in ("A", "B")
            assert 0 <= value["size"] <= 99

    for beams in (1, 2, 5):
        output = engine.beam_search(PROMPT, beams, max_tokens=30, constraint=constraint)
        assert output.sequences
        assert len({s.token_ids for s in output.sequences}) == len(output.sequences)
        for sequence in output.sequences:
            check(sequence.text, sequence.finish_reason)
    greedy = engine.generate([PROMPT], SamplingParams(max_tokens=30, constraint=constraint))[0]
    [one] = engine.beam_search(PROMPT, 1, max_tokens=30, constraint=constraint, early_stopping=True).sequences
    assert (one.token_ids, one.text, one.finish_reason) == (greedy.token_ids, greedy.text, greedy.finish_reason)
    emptied(engine)


def test_a_constraint_on_everything_changes_nothing(engine: Engine) -> None:
    free = engine.beam_search(PROMPT, 4, max_tokens=10, ignore_eos=True)
    masked = engine.beam_search(PROMPT, 4, max_tokens=10, ignore_eos=True, allowed_token_ids=range(300))
    assert [s.token_ids for s in masked.sequences] == [s.token_ids for s in free.sequences]
    assert [s.score for s in masked.sequences] == pytest.approx([s.score for s in free.sequences], rel=1e-6)


def test_it_is_the_same_in_a_small_pool_with_few_rows(engine: Engine, model: Path) -> None:
    expected = engine.beam_search(PROMPT, 5, max_tokens=40, constraint=JsonSchema(SCHEMA))
    small = Engine(
        model, kv_tokens=64, threads=1, cache_weights=False, max_rows=3, max_step_tokens=4, prefix_cache=False
    )
    output = small.beam_search(PROMPT, 5, max_tokens=40, constraint=JsonSchema(SCHEMA))
    assert output.sequences == expected.sequences
    assert output.preemptions > 0
    emptied(small)


def test_a_beam_without_a_way_on_dies_and_the_others_go_on(engine: Engine) -> None:
    # After "a" nothing is allowed, after "bb" the text is complete.
    only = [engine.tokenizer.encode(c)[0] for c in "abx"]
    output = engine.beam_search(PROMPT, 3, constraint=Regex("ay|bb"), allowed_token_ids=only)
    assert [s.text for s in output.sequences] == ["bb"]
    with pytest.raises(ConstraintError, match="no beam can go on after 1 tokens"):
        engine.beam_search(PROMPT, 3, constraint=Regex("ay|cy"), allowed_token_ids=[*only, only[0] + 2])
    with pytest.raises(ConstraintError, match="no beam can go on after 0 tokens"):
        engine.beam_search(PROMPT, 3, constraint=Regex("d"), allowed_token_ids=only)
    with pytest.raises(ConstraintError, match="no beam can go on after 0 tokens"):
        engine.beam_search(PROMPT, 3, allowed_token_ids=[EOS_ID], min_tokens=2)
    emptied(engine)


def test_constraints_that_are_wrong_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidConstraintError):
        engine.beam_search(PROMPT, constraint=Regex("("))
    with pytest.raises(InvalidRequestError, match="stop_token_ids contains 5"):
        engine.beam_search(PROMPT, constraint=Regex("a"), stop_token_ids=[5])
    emptied(engine)


def _twin_shares_the_grammar(self: LiveBeam) -> LiveBeam:
    twin = _twin(self)
    twin.grammar = self.grammar
    return twin


def _scores_without_the_mask(self: LiveBeam, row: Any, best: float, mask: Any, n: int) -> Any:
    return _restricted(self, row, best, np.full_like(mask, 0xFFFFFFFF), n)


_twin, _restricted = LiveBeam.twin, LiveBeam._restricted

FAULTS: dict[str, tuple[object, str, object]] = {
    "forks share a grammar": (LiveBeam, "twin", _twin_shares_the_grammar),
    "the mask is ignored": (LiveBeam, "_restricted", _scores_without_the_mask),
    "a look at what a token completes isn't taken back": (GrammarState, "rollback", lambda _self, _n: None),
    "complete texts go on": (GrammarState, "complete", property(lambda _self: False)),
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_tests_catch(engine: Engine, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, name, planted = FAULTS[fault]
    expected = engine.beam_search(PROMPT, 5, max_tokens=40, constraint=Choice(CHOICES))
    monkeypatch.setattr(target, name, planted)
    try:
        output = engine.beam_search(PROMPT, 5, max_tokens=40, constraint=Choice(CHOICES))
    except ConstraintError:
        output = None
    emptied(engine)
    assert output is None or output.sequences != expected.sequences
