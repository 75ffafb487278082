"""Several texts for one prompt (`SamplingParams.n`): each is one that its own seed gives, and the prompt is shared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forerun import Engine, Piece, SamplingParams
from forerun.constrain import Regex
from forerun.engine.live import LiveRequest
from forerun.sample.bad_words import token_sequences
from forerun.sample.noise import nth_seed
from reference.drafters import RandomTrees
from reference.speculation import Unspeculated, emptied, engine_for, same
from reference.tiny import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("steady_times")

PROMPT = tuple(range(70))
SAMPLED = SamplingParams(max_tokens=20, temperature=1.0, seed=11, n=4, logprobs=1)
WAYS: dict[str, SamplingParams] = {
    "sampled": SAMPLED,
    "stops": replace(SAMPLED, stop=("e", "a"), stop_token_ids=tuple(range(0, 300, 9)), min_tokens=2),
    "penalties": replace(SAMPLED, frequency_penalty=0.8, repetition_penalty=1.2, logit_bias={5: 3.0}),
    "bad words": replace(SAMPLED, bad_words=("e", [40, 41]), allowed_token_ids=tuple(range(0, 300, 2)), min_p=0.01),
    "greedy": replace(SAMPLED, temperature=0.0),
    "constraint": replace(SAMPLED, constraint=Regex("[a-m]{5,30}"), max_tokens=40),
    "one token": replace(SAMPLED, max_tokens=1),
    "eight": replace(SAMPLED, n=8, min_p=0.02),
}


def each_alone(alone: Unspeculated, params: SamplingParams, prompt: tuple[int, ...] = PROMPT) -> list[Any]:
    """The texts one by one, each as a request of its own."""
    assert params.seed is not None
    return [alone.answer(prompt, replace(params, n=1, seed=nth_seed(params.seed, index))) for index in range(params.n)]


@pytest.mark.parametrize("draft", ["none", "suffix", "trees"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [{}, {"max_rows": 2}, {"kv_tokens": 144, "max_rows": 3}, {"max_step_tokens": 40}, {"prefix_cache": False}],
    ids=str,
)
def test_each_text_is_the_one_that_its_seed_gives(
    model: Path, alone: Unspeculated, way: str, draft: str, options: dict[str, Any]
) -> None:
    params = WAYS[way]
    expected = each_alone(alone, params)
    engine = engine_for(model, RandomTrees(alone.truth, 2) if draft == "trees" else draft, 4, **options)
    other = engine.submit((1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True))
    [output] = engine.generate([PROMPT], params)
    assert [sample.sample_index for sample in output.samples] == list(range(params.n))
    for sample, truth in zip(output.samples, expected, strict=True):
        same(sample, truth)
        assert sample.seed == truth.seed
    same(other.result(), alone.answer((1, 2, 3), SamplingParams(max_tokens=9, ignore_eos=True)))
    emptied(engine)


def test_the_first_text_is_that_of_a_single_request(alone: Unspeculated) -> None:
    same(each_alone(alone, SAMPLED)[0], alone.answer(PROMPT, replace(SAMPLED, n=1)))
    texts = [sample.text for sample in each_alone(alone, replace(SAMPLED, n=8))]
    assert len(set(texts)) == 8


def test_wrong_seeds_show(model: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: all texts are drawn with the first one's noise."""
    monkeypatch.setattr("forerun.engine.live.nth_seed", lambda seed, _: seed)
    [output] = engine_for(model, "none").generate([PROMPT], SAMPLED)
    assert output.samples[1].token_ids != each_alone(alone, SAMPLED)[1].token_ids


def test_a_branch_that_keeps_the_first_token_shows(
    model: Path, alone: Unspeculated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a text begins with the token that the first one chose."""
    branch = LiveRequest.branch

    def wrong(self: LiveRequest, request: Any, index: int) -> LiveRequest:
        request.n_prompt -= 1
        return branch(self, request, index)

    monkeypatch.setattr(LiveRequest, "branch", wrong)
    [output] = engine_for(model, "none").generate([PROMPT], SAMPLED)
    with pytest.raises(AssertionError):
        for sample, truth in zip(output.samples, each_alone(alone, SAMPLED), strict=True):
            same(sample, truth)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_prompt_is_computed_once_and_kept_once(model: Path, prefix_cache: bool) -> None:
    engine = engine_for(model, "none", prefix_cache=prefix_cache)
    handle = engine.submit(PROMPT, replace(SAMPLED, n=5, ignore_eos=True, max_tokens=8))
    engine.step()
    while handle.live.request.n_output < 3:
        engine.step()
    # 70 tokens: four full blocks shared by all, and a fifth of each one's own.
    assert engine.stats().kv_blocks_used == 4 + 5
    engine.check_integrity()
    handle.result()
    assert engine.stats().computed_tokens == len(PROMPT) + 4 + 5 * 7
    emptied(engine)


def test_what_texts_have_in_common_is_prepared_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words become tokens with the first text; others that did it anew would hold up the step in which they begin."""
    prepared = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal prepared
        prepared += 1
        return token_sequences(*args, **options)

    monkeypatch.setattr("forerun.engine.live.token_sequences", counted)
    [output] = engine_for(model, "none").generate([PROMPT], replace(SAMPLED, bad_words=("e", "the"), n=6))
    assert len(output.samples) == 6
    assert prepared == 1


def test_pieces_say_whose_they_are(model: Path, alone: Unspeculated) -> None:
    engine = engine_for(model, "suffix", 4)
    pieces: dict[int, list[Piece]] = {}
    for piece in engine.stream(PROMPT, SAMPLED):
        pieces.setdefault(piece.sample_index, []).append(piece)
    for index, truth in enumerate(each_alone(alone, SAMPLED)):
        assert "".join(pieces[index]) == truth.text
        assert sum((piece.token_ids for piece in pieces[index]), ()) == truth.token_ids
        reasons = [piece.finish_reason for piece in pieces[index]]
        assert reasons[-1] == truth.finish_reason
        assert set(reasons[:-1]) <= {None}
    emptied(engine)


def test_cancelling_ends_all_texts(model: Path) -> None:
    engine = engine_for(model, "suffix", 4)
    before = engine.submit(PROMPT, SAMPLED)
    before.cancel()
    assert [sample.finish_reason for sample in before.result().samples] == ["cancelled"]
    handle = engine.submit(PROMPT, SAMPLED)
    for _ in handle:
        break
    handle.cancel()
    assert {sample.finish_reason for sample in handle.result().samples} <= {"cancelled", "stop"}
    emptied(engine)
    stream = engine.stream(PROMPT, SAMPLED)
    next(stream)
    stream.close()
    emptied(engine)


def test_names_of_further_texts_never_meet_those_of_requests(model: Path) -> None:
    engine = engine_for(model, "none")
    taken = engine.submit((1, 2), SamplingParams(max_tokens=50, ignore_eos=True), request_id="a/1")
    output = engine.submit(PROMPT, replace(SAMPLED, n=3), request_id="a").result()
    assert len(output.samples) == 3
    assert len(taken.result().token_ids) == 50
    emptied(engine)


def test_unseeded_texts_differ(model: Path) -> None:
    engine = engine_for(model, "none")
    [output] = engine.generate([PROMPT], SamplingParams(max_tokens=12, temperature=1.5, n=6, ignore_eos=True))
    assert len({sample.token_ids for sample in output.samples}) == 6
    assert all(max(sample.token_ids) < VOCAB_SIZE for sample in output.samples)


def test_a_fork_is_one_text(model: Path) -> None:
    engine = engine_for(model, "none")
    parent = engine.submit(PROMPT, SAMPLED)
    while not parent.live.request.n_output:
        engine.step()
    assert len(engine.fork(parent).result().samples) == 1
    assert len(parent.result().samples) == 4
    emptied(engine)


def test_an_engine_of_one_row_serves_several_texts(tiny: Path) -> None:
    engine = Engine(tiny, cache_weights=False, max_rows=1, kv_tokens=256, threads=1)
    [output] = engine.generate([(1, 2, 3)], SamplingParams(n=5, max_tokens=5, temperature=1.0, seed=1))
    assert len(output.samples) == 5
    emptied(engine)
