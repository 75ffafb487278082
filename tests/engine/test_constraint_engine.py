"""Constrained requests through the whole engine: valid, the same with and without drafts, and nobody else's affair."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Engine, RequestOutput, SamplingParams
from forerun.constrain import Choice, Json, JsonSchema, Regex
from forerun.constrain.compiler import GrammarCompiler
from forerun.constrain.spec import Constraint
from forerun.constrain.state import GrammarState
from forerun.engine.live import LiveRequest
from forerun.engine.masks import StepMasks
from forerun.errors import ConstraintError, InvalidConstraintError, InvalidRequestError
from reference.drafters import RandomTrees, Scripted
from reference.speculation import Unspeculated, check_identities, emptied, engine_for, same
from reference.tiny import EOS_ID

pytestmark = pytest.mark.usefixtures("steady_times")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "type": {"enum": ["A", "B"]},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "redder"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}]},
        "size": {"type": "integer", "minimum": 0, "maximum": 9999},
    },
    "required": ["type", "tags", "note", "size"],
    "additionalProperties": False,
}
CONSTRAINTS: dict[str, Constraint] = {
    "schema": JsonSchema(SCHEMA),
    "flexible schema": JsonSchema(SCHEMA, whitespace="flexible"),
    "regex": Regex(r"(ab|cd){2,5} = [0-9]{1,4}(\.[0-9]{2})?"),
    "choice": Choice(["yes", "no", "yes, but not now", "mañana", "不 🙂"]),
    "bytes": Regex('\\["(高领|翻领|斜领)"\\]'),
    "open end": Regex("a[ab]*"),
}
WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=120, logprobs=2),
    "sampled": SamplingParams(max_tokens=120, temperature=1.2, top_p=0.95, seed=5, logprobs=1),
    "rejection, one candidate": SamplingParams(max_tokens=120, temperature=0.7, top_k=1, verify="rejection", seed=6),
    "penalties": SamplingParams(max_tokens=120, frequency_penalty=0.7, repetition_penalty=1.2, logit_bias={9: 3.0}),
    "short": SamplingParams(max_tokens=7, temperature=0.9, seed=8),
}
PROMPT = (250, 7, 33, 90, 120)


def check_text(name: str, output: RequestOutput) -> None:
    """A text that ended by itself is complete and valid, and one that didn't says so."""
    if output.finish_reason == "length":
        return
    assert output.finish_reason == "stop"
    constraint = CONSTRAINTS[name]
    if isinstance(constraint, Regex):
        assert re.fullmatch(constraint.pattern, output.text)
    elif isinstance(constraint, Choice):
        assert output.text in constraint.choices
    else:
        value = json.loads(output.text)
        assert list(value) == ["type", "tags", "note", "size"]
        assert value["type"] in ("A", "B")
        assert set(value["tags"]) <= {"red", "green", "redder"}
        assert value["note"] is None or len(value["note"]) <= 6
        assert 0 <= value["size"] <= 9999


def drafters(model: Path, alone: Unspeculated) -> dict[str, Any]:
    """Those that know the answer, know nothing, or propose what no grammar allows."""
    return {
        "suffix": "suffix",
        "lookup": "lookup",
        "model": f"model:{model}",
        "trees": RandomTrees(alone.truth, 3),
        "illegal": Scripted(lambda row: list(row.tokens[-1:]) * 4),
        "end": Scripted(lambda _: [EOS_ID] * 3),
    }


@pytest.mark.parametrize("draft_len", ["auto", 1, 6])
@pytest.mark.parametrize("drafter", ["suffix", "lookup", "model", "trees", "illegal", "end"])
def test_a_constrained_text_is_valid_and_the_same_with_drafts(
    model: Path, alone: Unspeculated, drafter: str, draft_len: Any
) -> None:
    asks = [
        (name, replace(params, constraint=constraint))
        for name, constraint in CONSTRAINTS.items()
        for params in WAYS.values()
    ]
    expected = [alone.answer(PROMPT, params) for _, params in asks]
    engine = engine_for(model, drafters(model, alone)[drafter], draft_len)
    handles = [engine.submit(PROMPT, params) for _, params in asks]
    outputs = [handle.result() for handle in handles]
    for (name, _), output, truth in zip(asks, outputs, expected, strict=True):
        check_text(name, output)
        same(output, truth)
        check_identities(output)
    emptied(engine)
    forced = engine.stats().speculation.by_drafter["grammar"]
    assert forced.accepted > 0.9 * forced.proposed > 0


def test_texts_end_and_are_long_enough_to_mean_something(alone: Unspeculated) -> None:
    reasons = [
        alone.answer(PROMPT, replace(params, constraint=constraint)).finish_reason
        for constraint in CONSTRAINTS.values()
        for name, params in WAYS.items()
        if name != "short"
    ]
    assert reasons.count("stop") > 15


class _Broken:
    """Planted faults: each makes a constrained text wrong, or differ from the text without drafts."""

    @staticmethod
    def mask_of_the_root_everywhere(patch: pytest.MonkeyPatch) -> None:
        masks = GrammarState.masks

        def wrong(self: GrammarState, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:
            reached = masks(self, tokens, parents, out)
            out[1:] = out[0]
            return reached

        patch.setattr(GrammarState, "masks", wrong)

    @staticmethod
    def masks_shifted_by_a_row(patch: pytest.MonkeyPatch) -> None:
        begin = StepMasks.begin

        def wrong(self: StepMasks, walks: Sequence[Any]) -> None:
            begin(self, walks)
            for walk in walks:
                walk.mask = (walk.mask + 1) % max(1, len(self.words)) if walk.mask >= 0 else -1

        patch.setattr(StepMasks, "begin", wrong)

    @staticmethod
    def no_mask_on_draft_nodes(patch: pytest.MonkeyPatch) -> None:
        masks = GrammarState.masks

        def wrong(self: GrammarState, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:
            reached = masks(self, tokens, parents, out)
            out[1 : 1 + len(tokens)] = 0xFFFFFFFF
            return reached

        patch.setattr(GrammarState, "masks", wrong)

    @staticmethod
    def grammar_advanced_over_the_first_token_only(patch: pytest.MonkeyPatch) -> None:
        completes = LiveRequest._completes
        steps: dict[int, int] = {}

        def wrong(self: LiveRequest, token: int) -> bool:
            key, n = id(self), self.request.n_output
            if steps.get(key) == n:
                return False
            steps[key] = n
            return completes(self, token)

        patch.setattr(LiveRequest, "_completes", wrong)

    @staticmethod
    def no_mask_at_all(patch: pytest.MonkeyPatch) -> None:
        def wrong(self: GrammarState, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:  # noqa: ARG001
            out.fill(0xFFFFFFFF)
            return [True] * len(tokens)

        patch.setattr(GrammarState, "masks", wrong)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    name: getattr(_Broken, name) for name in vars(_Broken) if not name.startswith("_")
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(model: Path, alone: Unspeculated, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asks = [
        (name, replace(params, constraint=CONSTRAINTS[name]))
        for name in ("schema", "regex", "choice")
        for params in WAYS.values()
    ]
    expected = [alone.answer(PROMPT, params) for _, params in asks]
    engine = engine_for(model, RandomTrees(alone.truth, 3), 6)
    FAULTS[fault](monkeypatch)
    with pytest.raises((AssertionError, ConstraintError, json.JSONDecodeError)):
        for (name, params), truth in zip(asks, expected, strict=True):
            [output] = engine.generate([PROMPT], params)
            check_text(name, output)
            same(output, truth)


def test_constrained_and_free_requests_share_steps(model: Path, alone: Unspeculated) -> None:
    """No mask or token crosses rows, whatever the draft lengths (facts/cases.md, 18)."""
    free = [SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=40, temperature=1.0, seed=2)]
    mixed = [
        params
        for constraint in CONSTRAINTS.values()
        for params in (*free, *(replace(way, constraint=constraint) for way in WAYS.values()))
    ]
    prompts = [(*PROMPT, i) for i in range(len(mixed))]
    expected = [alone.answer(prompt, params) for prompt, params in zip(prompts, mixed, strict=True)]
    engine = engine_for(model, RandomTrees(alone.truth, 5), 7, max_rows=8, kv_tokens=160, max_step_tokens=64)
    handles = [
        engine.submit(prompt, params, speculate=i % 3 > 0)
        for i, (prompt, params) in enumerate(zip(prompts, mixed, strict=True))
    ]
    for handle, truth in zip(handles, expected, strict=True):
        same(handle.result(), truth)
    emptied(engine)
    assert engine.stats().preemptions > 0


def test_what_a_grammar_forces_is_drafted_for_nothing(model: Path) -> None:
    constraint = Choice(["the quick brown fox jumps over the lazy dog", "another thing altogether"])
    engine = engine_for(model, "suffix", "auto")
    [output] = engine.generate([PROMPT], SamplingParams(max_tokens=100, constraint=constraint))
    stats = output.stats.speculation
    assert output.text in constraint.choices
    assert stats.by_drafter["grammar"].accepted == stats.by_drafter["grammar"].proposed
    assert stats.decisions < len(output.token_ids) / 3
    assert stats.mask_seconds > 0


def test_without_drafting_nothing_is_forced_either(model: Path) -> None:
    constraint = Choice(["the quick brown fox jumps over the lazy dog", "another thing altogether"])
    params = SamplingParams(max_tokens=100, constraint=constraint)
    for engine, speculate in ((engine_for(model, "none", "auto"), True), (engine_for(model, "suffix", 4), False)):
        [output] = engine.generate([PROMPT], params, speculate=speculate)
        assert output.stats.speculation.proposed == 0
        assert output.stats.speculation.decisions == len(output.token_ids)


class Slow(Constraint):
    """Compiles when it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.go = threading.Event()

    @property
    def content(self) -> str:
        return self.name

    def check(self) -> None:
        return None

    def grammar(self) -> str:
        assert self.go.wait(60)
        return Choice(["slow", "slower"]).grammar()


def test_a_request_waits_for_its_grammar_and_holds_up_nobody(model: Path) -> None:
    engine = engine_for(model, "suffix", "auto")
    slow = Slow("waits")
    waiting = engine.submit(PROMPT, SamplingParams(max_tokens=20, constraint=slow))
    free = engine.submit(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    assert len(free.result().token_ids) == 30
    assert not waiting.finished
    assert engine.step()
    assert not waiting.finished
    slow.go.set()
    output = waiting.result()
    assert output.text in ("slow", "slower")
    assert output.stats.queue_seconds > 0
    emptied(engine)


def test_a_request_can_be_cancelled_while_it_waits(model: Path) -> None:
    engine = engine_for(model, "suffix", "auto")
    slow = Slow("is cancelled")
    waiting = engine.submit(PROMPT, SamplingParams(constraint=slow), request_id="same")
    with pytest.raises(InvalidRequestError, match="still live"):
        engine.submit(PROMPT, request_id="same")
    waiting.cancel()
    assert waiting.result().finish_reason == "cancelled"
    assert not engine.step()
    slow.go.set()
    assert engine.generate([PROMPT], SamplingParams(constraint=slow))[0].text in ("slow", "slower")
    emptied(engine)


def test_what_can_not_be_compiled_fails_its_own_request(model: Path) -> None:
    engine = engine_for(model, "suffix", "auto")

    class Wrong(Slow):
        def grammar(self) -> str:
            assert self.go.wait(60)
            return "start: no such thing"

    wrong = Wrong("is wrong")
    handle = engine.submit(PROMPT, SamplingParams(constraint=wrong))
    other = engine.submit(PROMPT, SamplingParams(max_tokens=5, ignore_eos=True))
    wrong.go.set()
    with pytest.raises(InvalidConstraintError):
        handle.result()
    assert len(other.result().token_ids) == 5
    with pytest.raises(InvalidConstraintError):
        engine.submit(PROMPT, SamplingParams(constraint=JsonSchema({"not": {"type": "string"}})))
    emptied(engine)


def test_a_dead_end_is_an_error_and_nobody_elses(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(model, "suffix", 4)
    masks = GrammarState.masks

    def dead(self: GrammarState, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:
        if self.n_tokens >= 4:
            raise ConstraintError("made to end here")
        return masks(self, tokens, parents, out)

    monkeypatch.setattr(GrammarState, "masks", dead)
    other = engine.submit(PROMPT, SamplingParams(max_tokens=30, ignore_eos=True))
    handle = engine.submit(PROMPT, SamplingParams(max_tokens=30, constraint=Regex("[a-z]{20}")))
    with pytest.raises(ConstraintError, match="made to end here"):
        handle.result()
    assert len(other.result().token_ids) == 30
    emptied(engine)


@pytest.mark.parametrize(
    "settings",
    [
        {"constraint": Choice(["ab", "cd"]), "min_tokens": 8},
        {"constraint": Regex("[ab]+"), "allowed_token_ids": [40, 41]},
    ],
    ids=["min_tokens", "allowed_token_ids"],
)
def test_settings_that_leave_no_token_are_an_error(model: Path, settings: dict[str, Any]) -> None:
    engine = engine_for(model, "suffix", 4)
    params = SamplingParams(max_tokens=9, **settings)
    with pytest.raises(ConstraintError, match="no token may come next"):
        engine.generate([PROMPT], params)
    emptied(engine)


@pytest.mark.parametrize("setting", [{"stop": "a"}, {"ignore_eos": True}, {"stop_token_ids": [5]}], ids=str)
def test_what_could_cut_a_text_short_is_refused(model: Path, setting: dict[str, Any]) -> None:
    engine = engine_for(model, "none", 4)
    with pytest.raises(InvalidRequestError, match="constraint"):
        engine.submit(PROMPT, SamplingParams(constraint=Choice(["yes", "no"]), **setting))
    engine.submit(PROMPT, SamplingParams(constraint=Choice(["yes", "no"]), stop_token_ids=[EOS_ID])).cancel()


def test_forks_follow_the_same_grammar(model: Path) -> None:
    engine = engine_for(model, "suffix", 4)
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=3, constraint=CONSTRAINTS["schema"])
    parent = engine.submit(PROMPT, params)
    while parent.live.request.n_output < 9:
        engine.step()
    twin, other = engine.fork(parent), engine.fork(parent, replace(params, seed=4))
    with pytest.raises(InvalidRequestError, match="fork"):
        engine.fork(parent, replace(params, constraint=Json()))
    same(twin.result(), parent.result())
    check_text("schema", other.result())
    emptied(engine)


def test_compiling_ahead(model: Path) -> None:
    engine = engine_for(model, "none", 4)
    engine.prepare_constraints(CONSTRAINTS["schema"])
    with pytest.raises(InvalidConstraintError):
        engine.prepare_constraints(Choice([]))
    handle = engine.submit(PROMPT, SamplingParams(max_tokens=2, constraint=CONSTRAINTS["schema"]))
    assert handle.live.grammar is not None


def test_the_mask_thread_ends_with_the_engine(model: Path) -> None:
    before = set(threading.enumerate())
    engine = engine_for(model, "suffix", 4)
    engine.generate([PROMPT], SamplingParams(constraint=Choice(["yes", "no"])))
    own = set(threading.enumerate()) - before
    assert "forerun-masks_0" in {thread.name for thread in own}
    del engine
    for thread in own:
        thread.join(5)
    assert not [thread.name for thread in own if thread.is_alive()]


def test_a_mask_of_allowed_tokens_alone(model: Path) -> None:
    engine = engine_for(model, "suffix", 6)
    allowed = [40, 41, 42, 77]
    params = SamplingParams(max_tokens=30, allowed_token_ids=allowed, temperature=1.0, seed=1)
    [output] = engine.generate([PROMPT], params)
    assert set(output.token_ids) <= set(allowed)
    assert len(set(output.token_ids)) > 1
    assert np.all(np.isin(output.token_ids, allowed))


def test_futures_stay_futures(model: Path) -> None:
    """A grammar that is already there isn't waited for."""
    compiler = GrammarCompiler(Engine(model, cache_weights=False, draft="none").tokenizer)
    future = compiler.submit(Choice(["yes", "no"]))
    assert isinstance(future, Future)
    assert future.result() is compiler.submit(Choice(["yes", "no"])).result()
    compiler.close()
