"""typical-p, order, bad words and allowed tokens in the engine: what each promises, with drafts and without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Engine, RequestOutput, SamplingParams
from forerun.draft.base import Drafter
from forerun.engine import choose
from forerun.errors import ConstraintError
from forerun.sample.arrays import SpecArrays
from forerun.sample.edits import LogitEdits
from reference.bigram import odds_table, write_table_gguf
from reference.drafters import Oracle, RandomTrees, Scripted
from reference.speculation import PROMPTS, Ask, Unspeculated, engine_for
from reference.tiny import TinySpec, write_tiny_gguf

HOT = SamplingParams(max_tokens=20, temperature=1.6, seed=5, ignore_eos=True)
KNOBS: dict[str, dict[str, Any]] = {
    "typical-p": {"typical_p": 0.4},
    "order": {"top_k": 30, "top_p": 0.6, "order": ("top_p", "temperature", "top_k")},
    "late penalties": {
        "frequency_penalty": 1.5, "repetition_penalty": 1.3, "top_k": 20,
        "order": ("temperature", "top_k", "penalties"),
    },
    "bad words": {
        "bad_words": [*((a, b) for a in range(60, 110) for b in range(a % 5 + 60, 110, 5)), (3, 70, 80), (90,), "d"],
        "allowed_token_ids": range(60, 110),
    },
    "allowed": {"allowed_token_ids": range(60, 110)},
    "all": {
        "typical_p": 0.9, "min_p": 0.01, "top_p": 0.95, "top_k": 40, "presence_penalty": 1.0, "logit_bias": {70: 2.0},
        "bad_words": [(70, 70)], "allowed_token_ids": range(50, 120), "min_tokens": 3,
        "order": ("top_k", "penalties", "typical_p", "temperature", "min_p", "top_p"),
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("llama", seed=3))


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Unspeculated:
    return Unspeculated(tiny)


@pytest.fixture(scope="module")
def plain(alone: Unspeculated) -> Engine:
    return alone.engine


def params_of(knobs: str, **others: Any) -> SamplingParams:
    return replace(HOT, **KNOBS[knobs], **others)


def drafters(alone: Unspeculated) -> list[Drafter]:
    return [Oracle(alone.truth), RandomTrees(alone.truth, 3)]


def disagreement(tiny: Path, alone: Unspeculated, knobs: str) -> bool:
    """Whether drafts change a text of these knobs."""
    asks = [Ask(prompt, params_of(knobs, seed=seed)) for prompt in PROMPTS for seed in (5, 6)]
    asks += [Ask(PROMPTS[0], params_of(knobs, temperature=0.0))]
    for ask in asks:
        alone.answer(ask.prompt, ask.params)
    for drafter in drafters(alone):
        engine = engine_for(tiny, drafter)
        outputs = engine.generate([list(ask.prompt) for ask in asks], [ask.params for ask in asks])
        assert sum(output.stats.speculation.accepted for output in outputs) > 0 or not isinstance(drafter, Oracle)
        try:
            alone.compare(asks, outputs)
        except AssertionError:
            return True
    return False


@pytest.mark.parametrize("knobs", KNOBS)
def test_drafts_do_not_change_the_text(tiny: Path, alone: Unspeculated, knobs: str) -> None:
    assert not disagreement(tiny, alone, knobs)


@pytest.mark.parametrize("knobs", KNOBS)
def test_every_knob_changes_some_text(plain: Engine, knobs: str) -> None:
    prompts = [list(prompt) for prompt in PROMPTS]
    assert [output.token_ids for output in plain.generate(prompts, params_of(knobs))] != [
        output.token_ids for output in plain.generate(prompts, HOT)
    ]


def holds(sequence: tuple[int, ...], output: RequestOutput) -> bool:
    text = (*output.prompt_token_ids, *output.token_ids)
    n = len(sequence)
    ends = range(max(n, len(output.prompt_token_ids) + 1), len(text) + 1)
    return any(text[end - n : end] == sequence for end in ends)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.6])
def test_bad_words_are_never_completed(tiny: Path, plain: Engine, temperature: float, verify: Any) -> None:
    """What the model would have written is banned, in pieces that begin in the prompt, and all drafts go there."""
    free = replace(HOT, temperature=temperature, verify=verify)
    for prompt in PROMPTS:
        [before] = plain.generate([list(prompt)], free)
        text = (*prompt, *before.token_ids)
        at = len(prompt)
        bad = [text[at - 1 : at + 1], text[at + 3 : at + 6], text[at + 8 : at + 9]]
        engine = engine_for(tiny, Scripted(lambda row, text=text: list(text[len(row.tokens) :][:4])))
        [after] = engine.generate([list(prompt)], replace(free, bad_words=bad))
        assert any(holds(word, before) for word in bad)
        assert not any(holds(word, after) for word in bad)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.6])
def test_nothing_but_allowed_tokens_is_chosen(tiny: Path, temperature: float, verify: Any) -> None:
    params = replace(HOT, temperature=temperature, verify=verify, allowed_token_ids=[70, 71, 80], logprobs=1)
    engine = engine_for(tiny, Scripted(lambda _: [70, 5, 71]))
    for output in engine.generate([list(prompt) for prompt in PROMPTS], params):
        assert set(output.token_ids) <= {70, 71, 80}
        assert len(output.token_ids) == 20


def test_a_text_is_banned_in_the_tokens_of_the_tokenizer(plain: Engine) -> None:
    tokenizer = plain.tokenizer
    params = replace(HOT, bad_words="e")
    for output in plain.generate([list(prompt) for prompt in PROMPTS], params):
        assert tokenizer.encode_plain("e")[-1] not in output.token_ids


def test_bans_that_leave_nothing_are_an_error(plain: Engine) -> None:
    params = replace(HOT, allowed_token_ids=[70, 71], bad_words=[(70,), (71,)])
    with pytest.raises(ConstraintError, match=r"no token may come next .*allowed_token_ids, bad_words"):
        plain.generate([[1, 2, 3]], params)


def test_typical_p_keeps_the_typical_tokens(tmp_path: Path) -> None:
    """Shares of .40, .25, .15, .10, .06 and .04: a share of 0.3 is held by the second and the third."""
    letters = dict(zip(b"abcdef", (0.40, 0.25, 0.15, 0.10, 0.06, 0.04), strict=True))
    path = write_table_gguf(tmp_path / "odds.gguf", odds_table({200: letters}))
    engine = Engine(path, kv_tokens=512, threads=1, cache_weights=False, draft="none")
    params = [SamplingParams(max_tokens=1, temperature=1.0, typical_p=0.3, seed=seed) for seed in range(100)]
    assert {output.token_ids for output in engine.generate([[200]] * 100, params)} == {(ord("b"),), (ord("c"),)}


# -- planted faults


class IgnoresThePath(LogitEdits):
    def late(self, path: Any = ()) -> Any:
        return super().late(path[:0])

    def _banned_after(self, path: Any) -> Any:
        return super()._banned_after([-1] * len(path))


@pytest.mark.parametrize("knobs", ["late penalties", "bad words"])
def test_edits_that_ignore_the_path_are_caught(
    tiny: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch, knobs: str
) -> None:
    asks = [Ask(prompt, params_of(knobs, seed=seed)) for prompt in PROMPTS for seed in (5, 6)]
    for ask in asks:
        alone.answer(ask.prompt, ask.params)
    monkeypatch.setattr("forerun.engine.live.LogitEdits", IgnoresThePath)
    assert disagreement(tiny, alone, knobs)


def test_late_edits_that_never_arrive_are_caught(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    params = params_of("late penalties")
    prompts = [list(prompt) for prompt in PROMPTS]
    right = [output.token_ids for output in plain.generate(prompts, params)]

    def without(walks: Any) -> SpecArrays:
        lives = [walk.live for walk in walks]
        return SpecArrays.of([p.params for p in lives], [p.seed for p in lives], [walk.position for walk in walks])

    monkeypatch.setattr(choose, "_spec", without)
    assert [output.token_ids for output in plain.generate(prompts, params)] != right


def test_a_mask_off_by_one_bit_is_caught(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from forerun.engine import live

    right = live.mask_of
    monkeypatch.setattr(live, "mask_of", lambda ids, V: right([token + 1 for token in ids], V))
    [output] = plain.generate([[1, 2, 3]], replace(HOT, allowed_token_ids=[70]))
    assert not set(output.token_ids) <= {70}
    assert np.all(np.array(output.token_ids) == 71)
