"""Grammar with speculation, case by case (facts/cases.md, 15 to 21, and their kind), through the whole engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.constrain import Choice, Json, JsonSchema, Regex
from forerun.constrain.spec import Constraint
from forerun.constrain.state import GrammarState
from forerun.draft.base import DraftRow, DraftTree
from forerun.engine.live import LiveRequest
from forerun.errors import ConstraintError
from reference.drafters import Scripted
from reference.speculation import Unspeculated, check_sums, emptied, engine_for, same
from reference.tiny import EOS_ID

pytestmark = pytest.mark.usefixtures("steady_times")

PROMPT = (250, 7, 33, 90, 120)
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["A", "B"]},
        "note": {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]},
    },
    "required": ["type", "note"],
    "additionalProperties": False,
}


def greedy(constraint: Constraint, max_tokens: int = 60) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, constraint=constraint, logprobs=1)


def test_15_an_end_inside_a_block_ends_the_text_and_drops_what_follows(model: Path, alone: Unspeculated) -> None:
    params = greedy(Regex("[ab]{1,3}c?"))
    truth = alone.answer(PROMPT, params)
    for tail in ([EOS_ID], [EOS_ID, 40], [EOS_ID, EOS_ID, EOS_ID]):
        drafter = Scripted(lambda row, tail=tail: [*truth.token_ids[len(row.tokens) - len(PROMPT) :], *tail])
        engine = engine_for(model, drafter, 8)
        [output] = engine.generate([PROMPT], params)
        same(output, truth)
        emptied(engine)


def test_15_no_mask_is_asked_for_after_the_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a text has ended, its grammar is never touched again."""
    asked: list[GrammarState] = []
    masks = GrammarState.masks

    def noted(self: GrammarState, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:
        assert not self.complete
        asked.append(self)
        return masks(self, tokens, parents, out)

    monkeypatch.setattr(GrammarState, "masks", noted)
    engine = engine_for(model, Scripted(lambda _: [EOS_ID, EOS_ID]), 4)
    engine.generate([PROMPT], greedy(Choice(["abc", "abd", "x"])))
    assert asked
    assert len(set(map(id, asked))) == 1


@pytest.mark.parametrize("illegal", [[0], [40, 41, 42], [EOS_ID], [65, 66, 67, 68], [123, 34, 120, 34]], ids=str)
def test_16_an_illegal_draft_is_a_rejection_and_nothing_else(
    model: Path, alone: Unspeculated, illegal: list[int]
) -> None:
    """Wrong text, a wrong key, an end that comes too early: the request goes on as if nothing had been drafted."""
    params = greedy(JsonSchema(NOTE), 120)
    engine = engine_for(model, Scripted(lambda _: illegal), 5)
    [output] = engine.generate([PROMPT], params)
    same(output, alone.answer(PROMPT, params))
    assert engine.speculator is not None
    assert engine.speculator.failure is None
    check_sums(output.stats.speculation)
    emptied(engine)


def test_16_what_is_forbidden_is_cut_before_it_is_verified(model: Path) -> None:
    engine = engine_for(model, Scripted(lambda _: [0, 1, 2, 3, 4]), 5)
    [output] = engine.generate([PROMPT], greedy(JsonSchema(NOTE)))
    assert set(output.stats.speculation.by_drafter) == {"grammar"}


def test_17_a_complete_text_ends_and_an_accepting_one_may(model: Path) -> None:
    engine = engine_for(model, "suffix", 4)
    [done] = engine.generate([PROMPT], greedy(Choice(["ab", "cd"])))
    assert (done.finish_reason, len(done.text)) == ("stop", 2)
    assert EOS_ID not in done.token_ids
    eager = SamplingParams(max_tokens=30, constraint=Regex("[ab]+"), logit_bias={EOS_ID: 100.0})
    [ended] = engine.generate([PROMPT], eager)
    assert (ended.finish_reason, ended.token_ids[-1], len(ended.text)) == ("stop", EOS_ID, 1)
    [early] = engine.generate([PROMPT], replace(eager, constraint=Regex("[ab]{4,9}")))
    assert (early.finish_reason, len(early.text)) == ("stop", 4)
    [never] = engine.generate([PROMPT], replace(eager, logit_bias=dict.fromkeys(engine.tokenizer.eos_ids, -100.0)))
    assert (never.finish_reason, len(never.token_ids)) == ("length", 30)
    emptied(engine)


def test_19_every_path_of_a_tree_has_its_own_mask(model: Path, alone: Unspeculated) -> None:
    """Two branches that agree on their last token but not on what led there: what may follow differs."""
    params = replace(greedy(Regex("(ab|bb)(c|d)|(aab)e|(bab)f"), 20), temperature=1.3)
    for seed in range(8):
        seeded = replace(params, seed=seed)
        truth = alone.answer(PROMPT, seeded)

        def tree(row: DraftRow) -> DraftTree:
            if len(row.tokens) > len(PROMPT):
                a, b, c, d = b"abcd"
                return DraftTree([a, b, b, a, c, d, b], [-1, -1, 0, 1, 2, 2, 3])
            return DraftTree.chain([])

        engine = engine_for(model, Scripted(tree), 8)
        [output] = engine.generate([PROMPT], seeded)
        same(output, truth)
        emptied(engine)


def test_20_a_grammar_goes_back_exactly(model: Path) -> None:
    """After each step, whatever was drafted and rejected, the mask is that of the committed text read afresh."""
    engine = engine_for(model, Scripted(lambda row: [*row.tokens[-2:], *row.tokens[-2:]]), 4)
    width = -(-engine.config.vocab_size // 32)
    n_compared = 0
    for seed in range(6):
        handle = engine.submit(PROMPT, replace(greedy(JsonSchema(NOTE), 50), temperature=1.3, seed=seed))
        while not handle.finished:
            engine.step()
            live = handle.live
            if live.grammar is None or not live.request.n_output:
                continue
            fresh = engine.compiler.compile(JsonSchema(NOTE)).start()
            fresh.advance(live.request.output_ids)
            now, again = np.zeros(width, dtype=np.uint32), np.ones(width, dtype=np.uint32)
            live.grammar.mask(now)
            fresh.mask(again)
            np.testing.assert_array_equal(now, again)
            n_compared += 1
    assert n_compared > 20


@pytest.mark.parametrize("seed", range(4))
def test_21_forced_text_gives_the_same_answer(model: Path, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "population": {"type": "integer"}},
        "required": ["name", "population"],
        "additionalProperties": False,
    }
    params = SamplingParams(max_tokens=90, temperature=1.0, seed=seed, constraint=JsonSchema(schema))
    engine = engine_for(model, "suffix", 6)
    on, off = (engine.generate([PROMPT], params, speculate=speculate)[0] for speculate in (True, False))
    same(on, off)
    assert on.stats.speculation.by_drafter
    if on.finish_reason == "stop":
        assert list(json.loads(on.text)) == ["name", "population"]


def test_21_a_forced_prefix_may_end_inside_a_character(model: Path, alone: Unspeculated) -> None:
    for constraint in (Regex('\\["(高领|翻领|斜领)"\\]'), Choice(["é", "è"]), Choice(["🙂", "🙃", "🚀"])):
        params = greedy(constraint)
        engine = engine_for(model, "suffix", 8)
        [output] = engine.generate([PROMPT], params)
        same(output, alone.answer(PROMPT, params))
        assert output.finish_reason == "stop"
        assert "\ufffd" not in output.text
        pieces = list(engine.stream(PROMPT, params))
        assert "".join(pieces) == output.text
        assert not any("\ufffd" in piece for piece in pieces)
        emptied(engine)


def test_a_text_cut_by_max_tokens_says_so(model: Path) -> None:
    engine = engine_for(model, "suffix", 8)
    [whole] = engine.generate([PROMPT], greedy(JsonSchema(NOTE), 300))
    assert whole.finish_reason == "stop"
    n = len(whole.token_ids)
    for budget in range(1, n + 2):
        [output] = engine.generate([PROMPT], greedy(JsonSchema(NOTE), budget))
        assert output.token_ids == whole.token_ids[:budget]
        assert output.finish_reason == ("stop" if budget >= n else "length")
    emptied(engine)


def test_json_of_any_kind_is_json(model: Path) -> None:
    engine = engine_for(model, "suffix", 5)
    params = [
        SamplingParams(max_tokens=120, temperature=1.0, seed=seed, constraint=Json(), logit_bias={34: 2.0, 125: 3.0})
        for seed in range(12)
    ]
    outputs = engine.generate([PROMPT] * len(params), params)
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert len(ended) >= 4
    for output in ended:
        json.loads(output.text)
    emptied(engine)


def test_a_failure_inside_the_grammar_library_is_one_requests_affair(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        """As Rust's panics arrive in Python."""

    engine = engine_for(model, "none")
    bad = engine.submit(PROMPT, greedy(Regex("[a-z]{30}")))
    other = engine.submit(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    while bad.live.request.n_output < 3:
        engine.step()
    grammar = bad.live.grammar

    def panics(self: GrammarState, *_: Any) -> list[bool]:
        assert self is grammar
        raise Panic("made to fail")

    monkeypatch.setattr(GrammarState, "masks", panics)
    with pytest.raises(ConstraintError, match="made to fail"):
        bad.result()
    assert len(other.result().token_ids) == 20
    emptied(engine)


def test_a_token_that_the_grammar_refuses_after_all_is_an_error(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: LiveRequest, token: int) -> bool:
        raise ConstraintError(f"{self.request.request_id}: token {token} is refused")

    engine = engine_for(model, "none")
    other = engine.submit(PROMPT, SamplingParams(max_tokens=20, ignore_eos=True))
    bad = engine.submit(PROMPT, greedy(Regex("[a-z]{30}")))
    completes = LiveRequest._completes
    monkeypatch.setattr(
        LiveRequest, "_completes", lambda self, token: (refuses if self is bad.live else completes)(self, token)
    )
    with pytest.raises(ConstraintError, match="is refused"):
        bad.result()
    assert len(other.result().token_ids) == 20
    emptied(engine)
