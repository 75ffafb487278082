"""The promise of the engine: a request's output depends on nothing but the model, its prompt, parameters and seed.

Outputs are compared as token ids and as the bits of the model's log-probabilities over the whole vocabulary, for random
mixes of requests, chunk sizes, pool sizes (so that some are preempted) and shared prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun import Engine, RequestOutput, SamplingParams
from forerun.ops.types import GGMLType
from reference.tiny import ARCHITECTURES, VOCAB_SIZE, TinySpec, write_tiny_gguf

MIXED = {
    "": GGMLType.Q4_K,
    "attn_v": GGMLType.Q6_K,
    "ffn_gate": GGMLType.Q5_1,
    "token_embd": GGMLType.Q8_0,
}


@dataclass(frozen=True)
class Ask:
    """One request of a mix."""

    prompt: tuple[int, ...]
    params: SamplingParams


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinySpec(request.param, layers=2, types=MIXED)
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", spec)


@pytest.fixture(scope="module")
def alone(model: Path) -> Engine:
    """Runs one request at a time, the prompt in one piece, nothing cached."""
    return Engine(model, kv_tokens=1024, prefix_cache=False, cache_weights=False, threads=1, draft="none")


def asks() -> st.SearchStrategy[Ask]:
    # Prompts from a few stems, so that prefixes are shared and cached.
    stem = st.integers(0, 2).map(lambda seed: tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, 40).tolist()))
    prompt = st.builds(
        lambda s, cut, tail: (*s[:cut], *tail),
        stem, st.integers(1, 40), st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    )  # fmt: skip
    params = st.builds(
        SamplingParams,
        max_tokens=st.integers(1, 24),
        temperature=st.sampled_from([0.0, 0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.8]),
        seed=st.integers(0, 2**64 - 1),
        logprobs=st.just(VOCAB_SIZE),
        ignore_eos=st.booleans(),
    )
    return st.builds(Ask, prompt, params)


def same(a: RequestOutput, b: RequestOutput) -> None:
    assert a.token_ids == b.token_ids
    assert (a.text, a.finish_reason) == (b.text, b.finish_reason)
    assert a.logprobs == b.logprobs  # floats compared exactly


SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@given(
    mix=st.lists(asks(), min_size=1, max_size=6),
    kv_blocks=st.integers(6, 20),
    max_rows=st.integers(1, 5),
    spare=st.integers(0, 60),
    prefix_cache=st.booleans(),
    cancels=st.sets(st.integers(0, 5), max_size=2),
)
@SLOW
def test_output_does_not_depend_on_company(
    model: Path, alone: Engine, mix: list[Ask], kv_blocks: int, max_rows: int, spare: int, prefix_cache: bool,
    cancels: set[int],
) -> None:  # fmt: skip
    engine = Engine(
        model, kv_tokens=16 * kv_blocks, max_rows=max_rows, max_step_tokens=max_rows + spare,
        prefix_cache=prefix_cache, cache_weights=False, threads=2,
    )  # fmt: skip
    handles = [engine.submit(a.prompt, a.params) for a in mix]
    doomed = [engine.submit(mix[i].prompt, mix[i].params) for i in cancels if i < len(mix)]
    for i, handle in enumerate(doomed):
        for _ in range(3 * i):
            engine.step()
        handle.cancel()
    outputs = [h.result() for h in handles]
    for ask, output in zip(mix, outputs, strict=True):
        same(output, alone.generate([ask.prompt], ask.params)[0])
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert not engine.step()


def test_preemption_and_prefix_hits_do_happen_in_such_mixes(model: Path, alone: Engine) -> None:
    """The property above means something only if its events occur; here they are made to."""
    rng = np.random.default_rng(1)
    stem = rng.integers(0, VOCAB_SIZE, 33).tolist()
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=VOCAB_SIZE, temperature=0.9, seed=5)
    prompts = [[*stem, i] for i in range(4)]
    # Without drafts: how many are made depends on measured time, and a repetitive text could end before the KV is full.
    engine = Engine(
        model, kv_tokens=16 * 9, max_rows=4, max_step_tokens=24, cache_weights=False, threads=2, draft="none"
    )
    outputs = engine.generate(prompts, params)
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hit_tokens > 0
    assert any(o.stats.preemptions for o in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        same(output, alone.generate([prompt], params)[0])
    again = engine.generate(prompts, params)
    assert sum(o.stats.cached_tokens for o in again) > 0
    for first, second in zip(outputs, again, strict=True):
        same(first, second)


def test_fork_continues_like_its_parent(model: Path, alone: Engine) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=VOCAB_SIZE)
    prompt = np.random.default_rng(2).integers(0, VOCAB_SIZE, 21).tolist()
    engine = Engine(model, kv_tokens=512, cache_weights=False, threads=2, draft="none")
    parent = engine.submit(prompt, params)
    for _ in range(12):
        engine.step()
    child = engine.fork(parent)
    other = engine.fork(parent, replace(params, temperature=1.2, seed=9))
    outputs = [h.result() for h in (parent, child, other)]
    expected = alone.generate([prompt], params)[0]
    same(outputs[0], expected)
    assert outputs[1].token_ids == expected.token_ids
    assert outputs[2].token_ids[:12] == expected.token_ids[:12]
    assert outputs[2].token_ids != expected.token_ids
    continued = alone.generate(
        [[*prompt, *expected.token_ids[:12]]],
        replace(params, max_tokens=18, temperature=1.2, seed=9),
    )
    assert outputs[2].token_ids[12:] == continued[0].token_ids
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0


def test_scores_do_not_depend_on_what_ran_before(model: Path, alone: Engine) -> None:
    tokens = np.random.default_rng(3).integers(0, VOCAB_SIZE, 150).tolist()
    first = alone.score(tokens, top=VOCAB_SIZE)
    engine = Engine(model, kv_tokens=1024, cache_weights=False, threads=2)
    engine.generate([tokens[:50], tokens[20:90]], SamplingParams(max_tokens=5))
    second = engine.score(tokens, top=VOCAB_SIZE)
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.logprobs.view(np.uint32), second.logprobs.view(np.uint32))
    generated = engine.generate([tokens], SamplingParams(max_tokens=1, logprobs=8))[0]
    assert [t for t, _ in generated.logprobs[0].top] == first.ids[-1, :8].tolist()
    assert [p for _, p in generated.logprobs[0].top] == first.logprobs[-1, :8].tolist()
    engine.check_integrity()


def test_a_planted_dependence_on_the_batch_is_caught(
    model: Path, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key written to a neighbour's slot is what the comparisons above must notice."""
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=VOCAB_SIZE)
    prompts = [np.random.default_rng(i).integers(0, VOCAB_SIZE, 20).tolist() for i in range(3)]
    engine = Engine(model, kv_tokens=512, cache_weights=False, threads=1)
    run = engine.executor.forward

    def misplaced(step, n, argmax):  # type: ignore[no-untyped-def]
        if len(step.cached) > 1:
            engine.executor.kv.move_slot(int(step.tables[step.table_row[0], 0]), 3,
                                         int(step.tables[step.table_row[1], 0]), 3)  # fmt: skip
        return run(step, n, argmax)

    monkeypatch.setattr(engine.executor, "forward", misplaced)
    outputs = engine.generate(prompts, params)
    expected = alone.generate(prompts, params)

    def compare() -> None:
        for a, b in zip(outputs, expected, strict=True):
            same(a, b)

    with pytest.raises(AssertionError):
        compare()
