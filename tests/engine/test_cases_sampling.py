"""What broke other engines, case by case: the right value of each, for acceptance, seeds and log-probabilities.

Numbers are those of the project's list; each docstring says what is right. One model has a given table of next-token
probabilities, so the shares are known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Piece, RequestOutput, SamplingParams
from forerun.draft.base import Drafter, DraftRow, DraftTree
from forerun.sample.noise import Stream, gumbel, stream_seed
from reference.bigram import odds_table, write_table_gguf
from reference.drafters import Oracle, Scripted
from reference.speculation import Unspeculated, engine_for, same
from reference.tiny import VOCAB_SIZE

PROMPT, FIRST = 200, ord("!")
"""A prompt of one token, and the one that its own step writes."""
A, B, C = 97, 98, 99
P = {A: 0.3, B: 0.5, C: 0.2}


@pytest.fixture(scope="module")
def odds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """PROMPT, FIRST, then A, B or C with the probabilities of `P`, then 0 forever."""
    path = tmp_path_factory.mktemp("model") / "odds.gguf"
    return write_table_gguf(path, odds_table({PROMPT: {FIRST: 1.0}, FIRST: P}))


def second_tokens(odds: Path, drafter: Drafter, params: SamplingParams, n: int) -> list[RequestOutput]:
    """`n` answers of two tokens, the second of which may be a draft."""
    engine = engine_for(odds, drafter, 1, max_rows=64, max_step_tokens=256)
    each = [replace(params, seed=seed, max_tokens=3) for seed in range(n)]
    return engine.generate([[PROMPT]] * n, each)


def drafted(token: int, q: dict[int, float] | None = None) -> Scripted:
    """Proposes `token` after FIRST; with q it says that it was drawn from it."""
    row_q = None
    if q is not None:
        row_q = np.zeros((1, VOCAB_SIZE), dtype=np.float32)
        row_q[0, list(q)] = list(q.values())
    return Scripted(lambda row: DraftTree.chain([token], (), row_q) if row.tokens[-1] == FIRST else [])


def shares(outputs: Sequence[RequestOutput]) -> dict[int, float]:
    counts = Counter(output.token_ids[1] for output in outputs)
    return {token: count / len(outputs) for token, count in counts.items()}


def distance(found: dict[int, float], expected: dict[int, float]) -> float:
    """Total variation."""
    return sum(abs(found.get(t, 0) - expected.get(t, 0)) for t in {*found, *expected}) / 2


def test_case_10_at_temperature_0_the_answer_is_the_argmax(odds: Path) -> None:
    """q(a) = .2 is the draft's argmax, p(a) = .3, p(b) = .5: at temperature 0 the answer is b, by every rule. Both are
    the distributions after all transforms: with top_k 1 p is b alone at any temperature."""
    drafter = drafted(A, {A: 0.2, B: 0.15, C: 0.15})
    for verify in ("coupled", "rejection"):
        for params in (SamplingParams(verify=verify), SamplingParams(verify=verify, temperature=1.0, top_k=1)):
            outputs = second_tokens(odds, drafter, params, 30)
            assert shares(outputs) == {B: 1.0}
            assert all(output.stats.speculation.accepted == 0 for output in outputs)
            assert all(output.stats.speculation.drafted == 1 for output in outputs)


@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_case_11_a_chosen_draft_is_accepted_with_p(odds: Path, verify: Any) -> None:
    """A draft taken by argmax while the request samples: q is one-hot, so it is accepted with p(x) = .3, and answers
    keep the target's distribution."""
    params = SamplingParams(temperature=1.0, verify=verify)
    outputs = second_tokens(odds, drafted(A), params, 1000)
    accepted = [output for output in outputs if output.stats.speculation.accepted]
    # Four standard deviations of a share of 1000 are below .06.
    assert abs(len(accepted) / 1000 - 0.3) < 0.06
    assert distance(shares(outputs), P) < 0.06
    assert {output.token_ids[1] for output in accepted} == {A}
    # At another temperature it is p at that temperature.
    hot = {token: p**0.5 for token, p in P.items()}
    outputs = second_tokens(odds, drafted(A), replace(params, temperature=2.0), 1000)
    share = sum(output.stats.speculation.accepted for output in outputs) / 1000
    assert abs(share - hot[A] / sum(hot.values())) < 0.06


def test_case_12_q_is_what_the_draft_was_drawn_from(odds: Path) -> None:
    """A draft drawn from the top two, with q of the top two, keeps the target's distribution; with q of all three it
    would be off by .125, which this test would see."""
    q = {A: 0.5, C: 0.3, B: 0.2}
    top = {A: 0.625, C: 0.375}

    def drawn(named: dict[int, float]) -> Scripted:
        def chain(row: DraftRow) -> DraftTree | list[int]:
            if row.tokens[-1] != FIRST:
                return []
            ids = np.array(list(top))
            noise = gumbel(stream_seed(row.seed, Stream.DRAFT), len(row.tokens), ids)
            token = int(ids[np.argmax(np.log([top[int(t)] for t in ids]) + noise)])
            row_q = np.zeros((1, VOCAB_SIZE), dtype=np.float32)
            row_q[0, list(named)] = list(named.values())
            return DraftTree.chain([token], (), row_q)

        return Scripted(chain)

    params = SamplingParams(temperature=1.0, verify="rejection")
    right, wrong = (shares(second_tokens(odds, drawn(named), params, 800)) for named in (top, q))
    assert distance(right, P) < 0.04
    assert distance(wrong, P) > 0.08


def test_case_13_seeds(tiny: Path) -> None:
    """Unseeded requests in a row differ; the same seed gives the same text through batching, preemption and drafts."""
    alone = Unspeculated(tiny)
    params = SamplingParams(max_tokens=30, temperature=1.0, ignore_eos=True)
    engine = engine_for(tiny, Oracle(alone.truth), 4, kv_tokens=16 * 6, max_rows=4)
    outputs = engine.generate([[1, 2, 3]] * 5, params)
    assert len({output.token_ids for output in outputs}) == len({output.seed for output in outputs}) == 5
    prompts = [tuple(range(i, i + 20)) for i in range(4)]
    seeded = replace(params, seed=11)
    expected = [alone.answer(prompt, seeded) for prompt in prompts]
    again = engine.generate(prompts, seeded)
    assert engine.stats().preemptions > 0
    assert engine.stats().speculation.accepted > 0
    for output, other in zip(again, expected, strict=True):
        same(output, other)


def test_case_14_log_probabilities(tiny: Path) -> None:
    """At temperature 0 they aren't all 0 and equal teacher-forced scores; each token of a chunk has its own
    alternatives."""
    alone = Unspeculated(tiny)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=5)
    alone.answer((1, 2, 3), params)
    engine = engine_for(tiny, Oracle(alone.truth), 3)
    pieces: list[Piece] = list(engine.stream([1, 2, 3], params))
    tokens = [token for piece in pieces for token in piece.token_ids]
    entries = [entry for piece in pieces for entry in piece.logprobs]
    assert max(len(piece.token_ids) for piece in pieces) >= 3
    scores = alone.engine.score([1, 2, 3, *tokens], top=5)
    for i, (token, entry) in enumerate(zip(tokens, entries, strict=True)):
        assert entry.token_id == token
        assert [t for t, _ in entry.top] == scores.ids[2 + i].tolist()
        assert [p for _, p in entry.top] == scores.logprobs[2 + i].tolist()
        assert entry.logprob == scores.logprobs[2 + i, 0] < 0
