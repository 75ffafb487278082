"""The same text on a real model and real words, where much of what drafters propose is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun import Engine, RequestOutput, SamplingParams
from reference.speculation import check_identities, same

pytestmark = pytest.mark.model

MODEL = "smollm2-135m-instruct"
FUNCTION = '''def total(values):
    """Adds up all the values."""
    result = 0
    for value in values:
        result += value
    return result
'''
CHATS = (
    [{"role": "user", "content": f"Write this function again, word by word:\n\n{FUNCTION}"}],
    [{"role": "user", "content": "Count from one to twenty, then back to one."}],
    [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}],
)
GREEDY = SamplingParams(max_tokens=48, logprobs=3)
SAMPLED = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, frequency_penalty=0.2, seed=5, logprobs=3)
EACH = (GREEDY, replace(GREEDY, logprobs=None), SAMPLED)


@pytest.fixture(scope="module")
def plain() -> list[RequestOutput]:
    engine = Engine(MODEL, kv_tokens=1024, max_rows=1)
    return [engine.chat([chat], params)[0] for chat, params in zip(CHATS, EACH, strict=True)]


@pytest.mark.parametrize(
    ("draft", "draft_len"),
    [
        ("lookup", 6), ("suffix", 6), (f"model:{MODEL}", 6), (f"combined:{MODEL}", 6), ("suffix", "auto"),
        (f"combined:{MODEL}", "auto"),
    ],
)  # fmt: skip
def test_drafts_change_no_word_of_a_real_answer(plain: list[RequestOutput], draft: str, draft_len: int | str) -> None:
    """A model that drafts for itself is nearly always right, greedy and sampled; the others where text repeats."""
    engine = Engine(MODEL, kv_tokens=1024, draft=draft, draft_len=draft_len)
    outputs = engine.chat(CHATS, EACH)
    for output, expected in zip(outputs, plain, strict=True):
        same(output, expected)
        check_identities(output)
    if draft_len == 6:
        stats = engine.stats().speculation
        assert stats.accepted >= 8
        if draft.startswith("model:"):
            assert stats.acceptance is not None
            assert stats.acceptance > 0.8
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert engine.speculator.failure is None
