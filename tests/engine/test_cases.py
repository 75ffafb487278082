"""What broke other engines, case by case: the right value of each, for stops, penalties, counting and state.

Numbers are those of the project's list; each docstring says what is right. The models follow scripts, so the values
are exact. The step of a prompt writes one token and drafts nothing; fuller tests of each kind are in the files beside
this one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Engine, RequestOutput, SamplingParams
from forerun.draft.base import Drafter, DraftTree
from forerun.draft.compat import check_compatible
from forerun.engine.output import RequestStats, SpeculationStats
from forerun.engine.tally import Tally
from forerun.errors import ConfigurationError
from reference.bigram import write_bigram_gguf
from reference.drafters import Scripted, Watched
from reference.speculation import Ask, Unspeculated, check_identities, check_sums
from reference.tiny import VOCAB_SIZE, TinySpec, tiny_tokens, write_tiny_gguf
from reference.vocabularies import byte_level

PROMPT, FIRST = 200, ord("!")
"""A prompt of one token, and the one that its own step writes."""
LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz")

Scripts = Callable[..., Path]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Scripts:
    """Models that write FIRST and a script after PROMPT."""

    def make(script: Sequence[int], **metadata: Any) -> Path:
        keys = {name.replace("__", "."): value for name, value in metadata.items()}
        folder = tmp_path_factory.mktemp("model")
        return write_bigram_gguf(folder / "b.gguf", [PROMPT, FIRST, *script], metadata=keys)

    return make


def engine_for(path: Path, drafter: str | Drafter, draft_len: Any = 6, **options: Any) -> Engine:
    options = {"kv_tokens": 512, "threads": 1} | options
    return Engine(path, cache_weights=False, draft=drafter, draft_len=draft_len, **options)


def block(script: Sequence[int]) -> Scripted:
    """Proposes what the script says next, as much as the budget allows."""
    after = [PROMPT, FIRST, *script]
    return Scripted(
        lambda row: after[after.index(row.tokens[-1]) + 1 :][: row.budget] if row.tokens[-1] in after else []
    )


def written(path: Path, script: Sequence[int], params: SamplingParams, draft_len: int = 6) -> RequestOutput:
    """The answer with the whole script drafted."""
    engine = engine_for(path, block(script), draft_len)
    [output] = engine.generate([[PROMPT]], params)
    check_identities(output)
    engine.check_integrity()
    return output


def test_case_01_a_stop_inside_the_block_and_one_past_the_budget(scripts: Scripts) -> None:
    """[10, 11, STOP, 20, 21, 22] with budget 5: "stop" and [10, 11, STOP]. STOP sixth: "length", exactly 5."""
    script = [10, 11, 42, 20, 21, 22]
    output = written(scripts(script), script, SamplingParams(max_tokens=6, stop_token_ids=[42]))
    assert (output.token_ids[1:], output.finish_reason) == ((10, 11, 42), "stop")
    script = [10, 11, 12, 13, 14, 42]
    output = written(scripts(script), script, SamplingParams(max_tokens=6, stop_token_ids=[42]))
    assert (output.token_ids[1:], output.finish_reason) == ((10, 11, 12, 13, 14), "length")


def test_case_02_the_first_of_several_stops(scripts: Scripts) -> None:
    """[EOS, 5, 44, 7, 43, 6] with stop ids {42, 43, 44}: [EOS]. Budget 2 with [4, 5, 43, 7, 42, 6]: [4, 5].

    (A scripted token has one successor, so the stops of a block differ.)
    """
    script = [42, 5, 44, 7, 43, 6]
    params = SamplingParams(max_tokens=9, stop_token_ids=[43, 44])
    output = written(scripts(script, tokenizer__ggml__eos_token_id=42), script, params)
    assert (output.token_ids[1:], output.finish_reason) == ((42,), "stop")
    script = [4, 5, 43, 7, 42, 6]
    output = written(scripts(script), script, SamplingParams(max_tokens=3, stop_token_ids=[42, 43, 44]))
    assert (output.token_ids[1:], output.finish_reason) == ((4, 5), "length")


def test_case_03_greedy_cut_at_every_position_of_the_end_token(scripts: Scripts) -> None:
    """Any token that greedy writes, declared the end token: the result is greedy cut there."""
    for place in range(12):
        path = scripts(LETTERS, tokenizer__ggml__eos_token_id=LETTERS[place])
        output = written(path, LETTERS, SamplingParams(max_tokens=20))
        assert (output.token_ids[1:], output.finish_reason) == (LETTERS[: place + 1], "stop")
        assert output.text == "!" + bytes(LETTERS[:place]).decode()
        whole = written(path, LETTERS, SamplingParams(max_tokens=13, ignore_eos=True))
        assert whole.token_ids[1:] == LETTERS[:12]


def test_case_04_a_budget_of_one(scripts: Scripts) -> None:
    """Budget 1 and four right drafts: exactly one token, whether it is the prompt's own or one drafted."""
    path = scripts(LETTERS)
    for budget in (1, 2):
        output = written(path, LETTERS, SamplingParams(max_tokens=budget), 4)
        assert (len(output.token_ids), output.finish_reason) == (budget, "length")


def test_case_05_a_stop_string_in_the_middle_of_a_block(scripts: Scripts) -> None:
    """Text, token ids and log-probabilities end at one boundary: "cd" completes with the fourth letter of the block."""
    output = written(scripts(LETTERS), LETTERS, SamplingParams(max_tokens=20, stop="cd", logprobs=1))
    assert output.text == "!ab"
    assert output.token_ids[1:] == LETTERS[:4]
    assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)


def test_case_06_drafts_are_clamped_to_both_contexts(scripts: Scripts) -> None:
    """Context 4096, position 4092, five drafts: clamped. Draft model's limit 2048, prompt 2040: it falls back."""
    target = scripts(LETTERS, llama__context_length=4096)
    prompt = [9] * 4091 + [PROMPT]
    engine = engine_for(target, block(LETTERS), 5, kv_tokens=4096)
    [output] = engine.generate([prompt], SamplingParams(max_tokens=None))
    assert (output.token_ids, output.finish_reason) == ((FIRST, *LETTERS[:3]), "length")
    assert output.stats.speculation.proposed == 2  # and the last token is the target's own
    small = scripts(LETTERS, llama__context_length=2048)
    engine = engine_for(target, f"model:{small}", 5, kv_tokens=4096)
    params = SamplingParams(max_tokens=24, logprobs=0)
    [output] = engine.generate([[*prompt[-2040:]]], params)
    assert output.token_ids == (FIRST, *LETTERS[:23])
    stats = output.stats.speculation
    assert stats.accepted == stats.proposed
    # Its positions end at 2048, which the last draft token may follow: 2041 and what comes to 2049.
    assert 5 <= stats.accepted <= 8
    assert stats.decisions - stats.drafted > 10


def test_case_07_usage_counts_are_delivered_tokens(scripts: Scripts) -> None:
    """Whatever the block crossed: what is counted is what was delivered."""
    path = scripts(LETTERS)
    for params in (
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=20, stop="gh"),
        SamplingParams(max_tokens=20, stop_token_ids=[LETTERS[8]]),
    ):
        engine = engine_for(path, block(LETTERS))
        pieces = list(engine.stream([PROMPT], params))
        delivered = sum(len(piece.token_ids) for piece in pieces)
        output = written(path, LETTERS, params)
        assert output.stats.output_tokens == len(output.token_ids) == delivered == engine.stats().emitted_tokens
        assert output.stats.speculation.emitted == delivered


def test_case_08_penalties_count_tokens_and_not_steps(tmp_path: Path) -> None:
    """frequency_penalty -2 and +2 differ at temperature 0; three accepted tokens raise it by three; min_tokens counts
    tokens.

    Token 10 follows itself by a score of 17.4 over the others: it is written nine times, until 2 n is above that. Were
    the penalty counted in steps of four tokens, it'd be written 36 times.
    """
    path = write_bigram_gguf(tmp_path / "b.gguf", [10, 10], metadata={"tokenizer.ggml.eos_token_id": 42})
    drafter = Scripted(lambda row: [10] * row.budget)
    for draft_len in (1, 3, 6):
        engine = engine_for(path, drafter, draft_len)
        params = SamplingParams(max_tokens=12, frequency_penalty=2.0)
        plus, minus = engine.generate([[10], [10]], [params, replace(params, frequency_penalty=-2.0)])
        assert plus.token_ids[:9] == (10,) * 9
        assert plus.token_ids[9] != 10
        assert minus.token_ids == (10,) * 12
        assert plus.stats.speculation.accepted > 0
        Unspeculated(path).compare([Ask((10,), params)], [plus])
    ends = write_bigram_gguf(tmp_path / "e.gguf", [0, 42], metadata={"tokenizer.ggml.eos_token_id": 42})
    engine = engine_for(ends, Scripted(lambda row: [0] * row.budget), 4)
    [output] = engine.generate([[0]], SamplingParams(max_tokens=20, min_tokens=7))
    assert output.token_ids == (0,) * 7 + (42,)


def test_case_09_min_p_and_bias_act_on_every_row(scripts: Scripts) -> None:
    """Not only on the bonus row: a forbidden token is refused in the middle of a draft; min_p 1 leaves only the most
    probable token at any temperature."""
    path = scripts(LETTERS)
    for place in range(1, 8):
        output = written(path, LETTERS, SamplingParams(max_tokens=9, logit_bias={LETTERS[place]: -100}))
        assert output.token_ids[1 : place + 1] == LETTERS[:place]
        assert output.token_ids[place + 1] == 0  # all others have the same score
    for seed in range(20):
        params = SamplingParams(max_tokens=14, temperature=20.0, min_p=1.0, seed=seed)
        output = written(path, LETTERS, params)
        assert output.token_ids[1:] == LETTERS[:13]
        assert output.stats.speculation.accepted == 11
    loose = written(path, LETTERS, SamplingParams(max_tokens=14, temperature=20.0, seed=1))
    assert loose.token_ids[1:] != LETTERS[:13]


def test_case_35_an_end_token_third_of_a_block_commits_three(scripts: Scripts) -> None:
    """[d1, d2, EOS, d4, d5, bonus]: three committed, not six."""
    script = [10, 11, 42, 13, 14, 15]
    output = written(scripts(script, tokenizer__ggml__eos_token_id=42), script, SamplingParams(max_tokens=20), 5)
    stats = output.stats.speculation
    assert output.token_ids[1:] == (10, 11, 42)
    assert (stats.proposed, stats.accepted, stats.cut, stats.emitted) == (5, 5, 3, 1 + 3)


def test_case_36_the_own_token_is_no_draft() -> None:
    """Per head [60, 36, 23, 9], 128 in all, 112 rejected: head 0 is the target's own token, so acceptance is 68 / 180 =
    .378 and not 128 / 240 = .533."""
    tally = Tally()
    for accepted, rows in ((3, 9), (2, 14), (1, 13), (0, 24)):
        for _ in range(rows):
            tally.row(1)
            tally.draft(DraftTree.chain([1, 2, 3], drafter="heads"), accepted)
            tally.decision(accepted + 1, accepted + 1)
    stats = tally.stats()
    check_sums(stats)
    assert (stats.decisions, *stats.accepted_by_position) == (60, 36, 23, 9)
    assert (stats.emitted, stats.proposed - stats.accepted) == (128, 112)
    assert stats.acceptance == pytest.approx(68 / 180)


def test_case_37_without_drafts_there_is_no_data(scripts: Scripts) -> None:
    """None: not 0, not NaN, no exception. Steps in which a drafter proposes nothing are in no denominator."""
    assert SpeculationStats().acceptance is None
    assert SpeculationStats().tokens_per_decision is None
    engine = engine_for(scripts(LETTERS), Scripted(lambda row: [LETTERS[5]] if row.tokens[-1] == LETTERS[4] else []))
    assert engine.stats().speculation.acceptance is None
    [output] = engine.generate([[PROMPT]], SamplingParams(max_tokens=12))
    stats = output.stats.speculation
    assert (stats.decisions, stats.drafted, stats.proposed, stats.acceptance) == (11, 1, 1, 1.0)


def test_case_38_a_rate_falls_with_the_length_alone(scripts: Scripts) -> None:
    """The same drafter, two right tokens and then wrong ones, with a larger K: rates 1, 1/2, 1/3; as many tokens a
    step."""
    path = scripts(LETTERS)
    rates: list[float | None] = []
    per_step: list[float | None] = []
    for draft_len in (2, 4, 6):
        right = block(LETTERS)
        drafter = Scripted(lambda row, right=right: [*right.propose([row])[0].tokens[:2], *(255,) * 9])  # type: ignore[misc]
        engine = engine_for(path, drafter, draft_len)
        [output] = engine.generate([[PROMPT]], SamplingParams(max_tokens=20, stop_token_ids=[LETTERS[8]]))
        rates.append(output.stats.speculation.acceptance)
        per_step.append(output.stats.speculation.tokens_per_decision)
    assert rates == [1.0, pytest.approx(1 / 2), pytest.approx(1 / 3)]
    assert len(set(per_step)) == 1


def test_case_39_time_between_chunks_is_not_time_per_token(scripts: Scripts) -> None:
    """A chunk every 8.72 ms at 292 tokens/s: 3.42 ms a token. A rate is of tokens, however many come at once."""
    chunks = 1000
    stats = RequestStats(
        prompt_tokens=1, cached_tokens=0, output_tokens=1 + round(chunks * 8.72e-3 * 292), steps=1 + chunks,
        preemptions=0, queue_seconds=0.0, first_token_seconds=0.5, total_seconds=0.5 + chunks * 8.72e-3,
        speculation=SpeculationStats(),
    )  # fmt: skip
    assert stats.decode_tokens_per_second is not None
    assert stats.decode_tokens_per_second == pytest.approx(292, rel=1e-3)
    assert 1e3 / stats.decode_tokens_per_second == pytest.approx(3.42, abs=0.01)
    engine = engine_for(scripts(LETTERS), block(LETTERS))
    handle = engine.submit([PROMPT], SamplingParams(max_tokens=15))
    pieces = list(handle)
    stats = handle.result().stats
    assert stats.first_token_seconds is not None
    assert len(pieces) == stats.steps == 3
    assert stats.decode_tokens_per_second == pytest.approx(14 / (stats.total_seconds - stats.first_token_seconds))


def test_case_40_the_draft_model_keeps_what_was_accepted(scripts: Scripts, tmp_path: Path) -> None:
    """After a of n are accepted, a + 1 entries from the root on stay, and only what is missing is run again: the
    correction, or after full acceptance the last draft and the bonus token."""
    target = scripts([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
    # Agrees but for what follows 3 and 6.
    other = write_bigram_gguf(
        tmp_path / "d.gguf", [PROMPT, FIRST, 1, 2, 3, 50], [4, 5, 6, 51], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
    )
    engine = engine_for(target, f"model:{other}", 4)
    assert engine.speculator is not None
    drafter: Any = engine.speculator.drafter
    handle = engine.submit([PROMPT], SamplingParams(max_tokens=40))
    engine.step()
    fed, accepted = [0], [0]
    for _ in range(4):
        before = drafter.fed_tokens, handle.live.tally.accepted
        engine.step()
        fed.append(drafter.fed_tokens - before[0])
        accepted.append(handle.live.tally.accepted - before[1])
        drafter.check_integrity()
    # [PROMPT, FIRST] and 3 drafts run for 4; then 1 to 3 right and 4 the correction; 5, 6 right and 7; 8 to 11, all.
    assert accepted[1:] == [3, 2, 4, 4]
    assert fed[1:] == [2 + 3, 1 + 3, 1 + 3, 2 + 3]
    handle.cancel()


@pytest.mark.parametrize("draft_len", [1, 2, 3, 4, 6])
def test_case_41_a_character_split_over_steps(scripts: Scripts, draft_len: int) -> None:
    """Bytes of one emoji in two steps: one emoji. A text cut inside a character: no error."""
    emoji = "😀".encode()
    script = [*b"ab", *emoji, *b"cd"]
    path = scripts(script)
    engine = engine_for(path, block(script), draft_len)
    pieces = list(engine.stream([PROMPT], SamplingParams(max_tokens=9)))
    assert "".join(pieces) == "!ab😀cd"
    assert sum("😀" in piece for piece in pieces) == 1
    for cut in (4, 5, 6):
        [output] = engine.generate([[PROMPT]], SamplingParams(max_tokens=cut))
        assert output.text == "!ab\ufffd"


def test_case_42_vocabularies(tmp_path: Path) -> None:
    """Padded sizes may differ; the same size with another token 139 is refused, and so is a real id past the target's
    vocabulary."""
    target = byte_level()
    kinds = [1] * 292 + [3] * 3 + [5] * 5
    padded = byte_level(
        tokens=[*tiny_tokens(), "[MORE0]", "[MORE1]"], token_type=np.array([*kinds, 5, 5], dtype=np.int32)
    )
    assert check_compatible(target, padded, "d") == check_compatible(padded, target, "d") == VOCAB_SIZE
    longer = byte_level(tokens=[*tiny_tokens(), "[MORE0]", "real"], token_type=np.array([*kinds, 5, 1], dtype=np.int32))
    with pytest.raises(ConfigurationError, match="token 301"):
        check_compatible(target, longer, "d")
    tokens = tiny_tokens()
    tokens[139] = "other"
    path = write_tiny_gguf(tmp_path / "t.gguf", TinySpec("llama", layers=1))
    changed = TinySpec("llama", layers=1, metadata={"tokenizer.ggml.tokens": tokens})
    other = write_tiny_gguf(tmp_path / "d.gguf", changed)
    with pytest.raises(ConfigurationError, match=r"token 139 .*same tokenizer"):
        engine_for(path, f"model:{other}")


def test_case_43_cancelling_one_request_touches_no_other(scripts: Scripts) -> None:
    """Its row, KV and draft state are freed, also when a client just closes its stream; the others go on."""
    path = scripts(LETTERS)
    watched = Watched(block(LETTERS))
    engine = engine_for(path, watched, 3, max_rows=3)
    handles = [engine.submit([PROMPT], SamplingParams(max_tokens=20)) for _ in range(2)]
    stream: Any = engine.stream([PROMPT], SamplingParams(max_tokens=20))
    next(stream)
    engine.step()
    stream.close()
    handles[0].cancel()
    assert len(watched.live) == 1
    waiting = engine.submit([PROMPT], SamplingParams(max_tokens=20))
    assert handles[1].result().token_ids == waiting.result().token_ids == (FIRST, *LETTERS[:19])
    assert watched.balanced()
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def test_case_44_settings_that_can_never_draft_are_refused(scripts: Scripts) -> None:
    """Steps of one token, contexts without room for a draft, a draft length of 0: an error, not a silent cost."""
    path = scripts(LETTERS)
    narrow: list[dict[str, Any]] = [{"max_step_tokens": 1, "max_rows": 1}, {"max_model_len": 3}]
    for options in narrow:
        with pytest.raises(ConfigurationError, match="no room for a draft"):
            engine_for(path, block(LETTERS), **options)
        engine_for(path, "none", **options)
        # By default, nobody asked for it: there is no drafter, and nothing is paid.
        assert Engine(path, kv_tokens=64, threads=1, cache_weights=False, **options).speculator is None
    with pytest.raises(ConfigurationError, match="draft_len=0"):
        engine_for(path, block(LETTERS), 0)
    smallest = engine_for(path, block(LETTERS), max_step_tokens=2, max_rows=1, max_model_len=4)
    [output] = smallest.generate([[PROMPT]], SamplingParams(max_tokens=None))
    assert output.stats.speculation.accepted == 1


def test_case_45_speculation_that_is_off_does_nothing(scripts: Scripts) -> None:
    """Without a drafter there is nothing to call; a request that doesn't speculate never reaches the drafter."""
    path = scripts(LETTERS)
    assert engine_for(path, "none").speculator is None
    watched = Watched(block(LETTERS))
    engine = engine_for(path, watched)
    [output] = engine.generate([[PROMPT]], SamplingParams(max_tokens=20), speculate=False)
    assert output.token_ids == (FIRST, *LETTERS[:19])
    assert (watched.calls, watched.scopes) == (0, {})
