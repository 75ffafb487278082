"""Speculation can't change an answer: token ids, text, finish reason and log-probabilities equal those without it.

Each output is compared with that of the same request alone in an engine without a drafter, floats exactly: for every
drafter and draft length, greedy and sampled with all transforms, in mixes of up to 16 requests (some of which don't
draft), under preemption, with shared prefixes and for all chunk sizes. That the comparison can fail is shown with
planted faults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun import Engine, SamplingParams
from forerun.draft.base import Drafter, DraftTree
from forerun.engine.choose import Choice, Chooser, Walk
from forerun.engine.live import LiveRequest
from forerun.engine.loop import Loop
from forerun.errors import ConfigurationError
from forerun.kv import BlockTable, KVIntegrityError
from forerun.ops.kv import KvCache
from forerun.ops.types import GGMLType
from forerun.sample.edits import LogitEdits, Saved
from reference.drafters import Adversary, Oracle, RandomTrees, Watched
from reference.speculation import Ask, Unspeculated, check_sums, same
from reference.tiny import VOCAB_SIZE, TinySpec, write_tiny_gguf

pytestmark = pytest.mark.usefixtures("steady_times")

MIXED = {"": GGMLType.Q4_K, "attn_v": GGMLType.Q6_K, "token_embd": GGMLType.Q8_0}

DRAFTERS = ("none", "lookup", "suffix", "model", "other model", "combined", "adversary", "oracle", "random")
DRAFT_LENGTHS: tuple[int | str, ...] = ("auto", 1, 3, 8)

# A few favoured tokens make sampled text repeat itself, so that drafts that were looked up are accepted, too.
FAVOURED = dict.fromkeys(range(40, 43), 12.0)

PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
    "greedy, logprobs": SamplingParams(max_tokens=24, ignore_eos=True, logprobs=VOCAB_SIZE),
    "greedy, penalties": SamplingParams(
        max_tokens=24, ignore_eos=True, logprobs=2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6
    ),
    "greedy, bias": SamplingParams(max_tokens=48, ignore_eos=True, logit_bias={**FAVOURED, 7: -100.0}),
    "greedy, rewarded": SamplingParams(max_tokens=24, ignore_eos=True, frequency_penalty=-0.5),
    "greedy, rejection": SamplingParams(
        max_tokens=24, ignore_eos=True, verify="rejection", frequency_penalty=0.3, logprobs=1
    ),
    "0.8, one candidate, rejection": SamplingParams(
        max_tokens=24, ignore_eos=True, verify="rejection", temperature=0.8, top_k=1, logprobs=1, seed=10
    ),
    "0.3": SamplingParams(max_tokens=24, temperature=0.3, seed=1, ignore_eos=True, logprobs=VOCAB_SIZE),
    "0.3, top-p": SamplingParams(max_tokens=24, temperature=0.3, top_p=0.7, seed=2),
    "0.8": SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True),
    "0.8, top-k, min-p": SamplingParams(
        max_tokens=24, temperature=0.8, top_k=20, min_p=0.05, seed=4, ignore_eos=True, logprobs=0
    ),
    "0.8, penalties": SamplingParams(
        max_tokens=24, temperature=0.8, presence_penalty=1.0, frequency_penalty=0.7, seed=5, ignore_eos=True, logprobs=3
    ),
    "0.8, bias": SamplingParams(max_tokens=48, temperature=0.8, logit_bias=FAVOURED, top_k=4, seed=6, ignore_eos=True),
    "1.5, all": SamplingParams(
        max_tokens=24, temperature=1.5, top_k=30, top_p=0.9, min_p=0.02, repetition_penalty=1.2, presence_penalty=-0.3,
        frequency_penalty=0.5, logit_bias=FAVOURED, seed=7, ignore_eos=True, logprobs=VOCAB_SIZE,
    ),
    "stops": SamplingParams(
        max_tokens=24, min_tokens=5, stop_token_ids=[*range(0, 300, 9)], stop=["e", "\ufffd\ufffd"], ignore_eos=True
    ),
    "1.5, stops": SamplingParams(
        max_tokens=24, temperature=1.5, min_tokens=3, stop_token_ids=[*range(0, 300, 9)], stop=["a", "t"], seed=8,
        logprobs=1, include_stop_str_in_output=True,
    ),
    "one token": SamplingParams(max_tokens=1, temperature=0.8, seed=9),
    "two tokens": SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1),
}  # fmt: skip


def stem(seed: int) -> tuple[int, ...]:
    """40 tokens that repeat themselves with gaps, as text does."""
    rng = np.random.default_rng(seed)
    phrase = rng.integers(0, VOCAB_SIZE, 7).tolist()
    return tuple(t for _ in range(4) for t in (*phrase, *rng.integers(0, VOCAB_SIZE, 3).tolist()))


STEMS = tuple(stem(seed) for seed in range(3))


class Models:
    """A target, a smaller model that isn't at all alike, and the target's answers without speculation."""

    def __init__(self, folder: Path, spec: TinySpec) -> None:
        self.path = write_tiny_gguf(folder / "target.gguf", spec)
        self.other = write_tiny_gguf(folder / "other.gguf", TinySpec("llama", layers=1, seed=5, hidden=256, ffn=256))
        self.alone = Unspeculated(self.path)

    def drafter(self, name: str, seed: int = 0) -> str | Drafter:
        """What `Engine(draft=...)` gets."""
        truth = self.alone.truth
        match name:
            case "model":
                return f"model:{self.path}"
            case "other model":
                return f"model:{self.other}"
            case "combined":
                return f"combined:{self.path}"
            case "adversary":
                return Watched(Adversary(truth, right=seed % 4))
            case "oracle":
                return Watched(Oracle(truth))
            case "random":
                return Watched(RandomTrees(truth, seed))
        return name

    def engine(self, draft: str, *, seed: int = 0, **options: Any) -> Engine:
        """An engine for the target."""
        options = {"kv_tokens": 1024, "threads": 1} | options
        return Engine(self.path, draft=self.drafter(draft, seed), cache_weights=False, **options)

    def answers(self, asks: list[Ask]) -> None:
        """Sees to it that the truth about these requests is known before anyone drafts."""
        for ask in asks:
            self.alone.answer(ask.prompt, ask.params)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), TinySpec("llama", layers=2, types=MIXED))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Gemma 3 with a window of 8 tokens, which drafts and their ancestors straddle."""
    return Models(tmp_path_factory.mktemp("models"), TinySpec("gemma3", layers=3, types=MIXED))


def run(models: Models, engine: Engine, asks: list[Ask]) -> None:
    """Runs the requests together and compares; afterwards nothing is left."""
    models.answers(asks)
    handles = [engine.submit(ask.prompt, ask.params, speculate=ask.speculate) for ask in asks]
    outputs = [handle.result() for handle in handles]
    models.alone.compare(asks, outputs)
    for ask, output in zip(asks, outputs, strict=True):
        assert ask.speculate or output.stats.speculation.proposed == 0
    engine.check_integrity()
    assert engine.stats().kv_blocks_used == 0
    assert not engine.step()
    check_sums(engine.stats().speculation)


def mix(n: int, *, offset: int = 0, quiet: bool = True) -> list[Ask]:
    """`n` requests with parameters of all kinds over prompts that share beginnings; every fifth doesn't draft."""
    kinds = list(PARAMS.values())
    return [
        Ask(
            (*STEMS[i % 3][: 1 + (i * 11 + offset) % 40], *STEMS[(i + 1) % 3][: i % 9]),
            kinds[(i + offset) % len(kinds)],
            not quiet or i % 5 != 3,
        )
        for i in range(n)
    ]


@st.composite
def random_asks(draw: st.DrawFn) -> Ask:
    prompt = STEMS[draw(st.integers(0, 2))][: draw(st.integers(1, 40))] + tuple(
        draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8))
    )
    params = PARAMS[draw(st.sampled_from(sorted(PARAMS)))]
    return Ask(
        prompt, replace(params, max_tokens=max(draw(st.integers(1, 24)), params.min_tokens)), draw(st.booleans())
    )


@given(
    draft=st.sampled_from(DRAFTERS),
    draft_len=st.sampled_from(DRAFT_LENGTHS),
    asks=st.lists(random_asks(), min_size=1, max_size=6),
    kv_blocks=st.integers(7, 20),
    max_rows=st.integers(1, 5),
    spare=st.integers(1, 60),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 99),
    threads=st.integers(1, 2),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_any_mix_gets_the_unspeculated_answers(
    models: Models, draft: str, draft_len: int | str, asks: list[Ask], kv_blocks: int, max_rows: int, spare: int,
    prefix_cache: bool, seed: int, threads: int,
) -> None:  # fmt: skip
    engine = models.engine(
        draft, seed=seed, draft_len=draft_len, kv_tokens=16 * kv_blocks, max_rows=max_rows,
        max_step_tokens=max_rows + spare, prefix_cache=prefix_cache, threads=threads,
    )  # fmt: skip
    run(models, engine, asks)
    watched_is_balanced(engine)


def watched_is_balanced(engine: Engine) -> None:
    """Every state that the drafter was told to begin was freed."""
    if engine.speculator is not None and isinstance(engine.speculator.drafter, Watched):
        assert engine.speculator.drafter.balanced()


@pytest.mark.parametrize("draft", DRAFTERS)
def test_every_drafter_with_sixteen_requests_at_once(models: Models, draft: str) -> None:
    """All parameters in one batch, roomy and cramped; the drafter's work is seen in the counts."""
    for seed, draft_len, options in (
        (1, 8, {}),
        (2, 3, {"kv_tokens": 16 * 10, "max_rows": 6, "max_step_tokens": 30, "prefix_cache": False}),
        (3, "auto", {"kv_tokens": 16 * 16, "max_rows": 16, "max_step_tokens": 64}),
    ):
        engine = models.engine(draft, seed=seed, draft_len=draft_len, **options)
        run(models, engine, mix(16, offset=seed * 5))
        watched_is_balanced(engine)
        stats = engine.stats()
        if draft == "none":
            assert stats.speculation.proposed == 0
        elif draft_len != "auto":
            assert stats.speculation.drafted > 10
            if draft != "other model":
                assert stats.speculation.accepted > 0
        if draft == "oracle" and draft_len == 8:
            assert stats.speculation.accepted > stats.speculation.proposed / 2


@pytest.mark.parametrize("draft", DRAFTERS)
def test_preemption_between_and_within_drafts(models: Models, draft: str) -> None:
    """A pool too small for all: requests lose their KV, draft again from recomputed tokens, and find shared blocks."""
    kinds = [replace(PARAMS[kind], max_tokens=40) for kind in ("greedy, logprobs", "0.8", "1.5, all", "greedy, bias")]
    asks = [Ask((*STEMS[0][:20], i), kinds[i % 4]) for i in range(6)]
    for draft_len, prefix_cache in ((8, True), (3, False)):
        engine = models.engine(
            draft, seed=draft_len, draft_len=draft_len, kv_tokens=16 * 6, max_rows=4, prefix_cache=prefix_cache
        )
        run(models, engine, asks)
        watched_is_balanced(engine)
        assert engine.stats().preemptions > 0
        assert draft == "none" or engine.stats().speculation.drafted > 0


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("max_step_tokens", [1, 2, 5, 16, 17, 512])
def test_chunks_of_every_size(models: Models, draft: str, max_step_tokens: int) -> None:
    """Prompts in chunks of 1 to 512; steps as wide as the batch have room for drafts only when it isn't full."""
    for n, prefix_cache in ((1, True), (4, False)):
        if n > max_step_tokens or (max_step_tokens == 1 and draft not in ("none", "suffix")):
            with pytest.raises(ConfigurationError):
                models.engine(draft, max_rows=n, max_step_tokens=max_step_tokens)
            continue
        engine = models.engine(
            draft, seed=1, draft_len=3, max_rows=n, max_step_tokens=max_step_tokens, prefix_cache=prefix_cache
        )
        run(models, engine, mix(4, offset=max_step_tokens))
        assert max_step_tokens > n or engine.stats().speculation.proposed == 0


@pytest.mark.parametrize("draft", ["oracle", "random", "suffix"])
def test_windows_of_attention(windowed: Models, draft: str) -> None:
    """In a sliding window, what a node of a tree sees depends on its depth and not on its place among the nodes."""
    for seed, draft_len in enumerate((12, 5, 40)):
        engine = windowed.engine(draft, seed=seed, draft_len=draft_len, kv_tokens=16 * 24, max_rows=4)
        run(windowed, engine, mix(8, offset=seed * 3))
        assert engine.stats().speculation.accepted > 0


def test_a_second_run_reads_what_drafts_left_in_the_prefix_cache(models: Models) -> None:
    """Blocks that were filled by accepted drafts are found by later requests, and are right."""
    for draft in ("oracle", "random"):
        engine = models.engine(draft, seed=3, draft_len=8)
        asks = mix(8, quiet=False)
        run(models, engine, asks)
        hits = engine.stats().prefix_hit_tokens
        longer = [
            Ask((*ask.prompt, *models.alone.answer(ask.prompt, ask.params).token_ids), PARAMS["greedy, logprobs"])
            for ask in asks
        ]
        run(models, engine, longer)
        assert engine.stats().prefix_hit_tokens > hits


@pytest.mark.slow
@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("draft_len", DRAFT_LENGTHS)
@pytest.mark.parametrize("n", [1, 4, 16])
def test_the_whole_matrix(models: Models, windowed: Models, draft: str, draft_len: int | str, n: int) -> None:
    """All drafters and draft lengths in batches of 1, 4 and 16, with preemption, cached prefixes and chunks of all
    sizes."""
    preemptions = 0
    for family in (models, windowed):
        for kv_blocks in (7, 64):
            for prefix_cache in (False, True):
                for chunk in (max(n, 1 if draft == "none" else 2), n + 15, 512):
                    engine = family.engine(
                        draft, seed=chunk + kv_blocks, draft_len=draft_len, kv_tokens=16 * kv_blocks, max_rows=n,
                        max_step_tokens=chunk, prefix_cache=prefix_cache, threads=1 + chunk % 2,
                    )  # fmt: skip
                    run(family, engine, mix(min(3 * n, 16), offset=chunk, quiet=n > 1))
                    preemptions += engine.stats().preemptions
    assert preemptions > 0 or n == 1


@pytest.mark.slow
@given(
    draft=st.sampled_from(DRAFTERS),
    draft_len=st.one_of(st.just("auto"), st.integers(1, 63)),
    asks=st.lists(random_asks(), min_size=1, max_size=16),
    kv_blocks=st.integers(7, 30),
    max_rows=st.integers(1, 16),
    spare=st.integers(1, 200),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_random_mixes(
    models: Models, draft: str, draft_len: int | str, asks: list[Ask], kv_blocks: int, max_rows: int, spare: int,
    prefix_cache: bool, seed: int,
) -> None:  # fmt: skip
    engine = models.engine(
        draft, seed=seed, draft_len=draft_len, kv_tokens=16 * kv_blocks, max_rows=max_rows,
        max_step_tokens=max_rows + spare, prefix_cache=prefix_cache,
    )  # fmt: skip
    run(models, engine, asks)
    watched_is_balanced(engine)


class Fault(NamedTuple):
    """A mistake to plant: what to patch with what, the drafter and the kind of request that it shows with."""

    plant: Callable[[pytest.MonkeyPatch], None]
    draft: str
    params: str


def one_too_many(patch: pytest.MonkeyPatch) -> None:
    choice = Walk.choice

    def wrong(self: Walk) -> Choice:
        path, tokens, logprobs = choice(self)
        children = self.children()
        if not children:
            return Choice(path, tokens, logprobs)
        return Choice([*path, children[0]], [*tokens[:-1], self.tree.tokens[children[0]], tokens[-1]], logprobs)

    patch.setattr(Walk, "choice", wrong)


def rejected_kv_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockTable, "truncate", lambda *_: None)


def moves_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Loop, "_settle", lambda *_: None)


def last_move_skipped(patch: pytest.MonkeyPatch) -> None:
    settle = Loop._settle
    patch.setattr(Loop, "_settle", lambda self, row, path: settle(self, row, path[:-1]))


def noise_off_by_one(patch: pytest.MonkeyPatch) -> None:
    position = Walk.position.fget  # type: ignore[attr-defined]
    patch.setattr(Walk, "position", property(lambda self: position(self) + (len(self.tokens) > 0)))


def penalties_without_the_path(patch: pytest.MonkeyPatch) -> None:
    apply = LogitEdits.apply
    patch.setattr(LogitEdits, "apply", lambda self, logits, *_: apply(self, logits))


def edits_left_in_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Saved, "restore", lambda *_: None)


def everything_before_is_an_ancestor(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftTree, "ancestors", lambda self: [(2 << (node + 1)) - 1 for node in range(len(self))])


def parents_are_not_ancestors(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftTree, "ancestors", lambda self: [1 | 2 << node for node in range(len(self))])


def positions_by_node(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DraftTree, "depths", lambda self: list(range(len(self))))


def scores_of_the_parent(patch: pytest.MonkeyPatch) -> None:
    at = Walk.at.fget  # type: ignore[attr-defined]
    patch.setattr(Walk, "at", property(lambda self: at(self) - (self.node >= 0)))


def logprobs_of_the_root(patch: pytest.MonkeyPatch) -> None:
    tell = Chooser._detail
    patch.setattr(Chooser, "_detail", lambda self, walk, logits, _, token: tell(self, walk, logits, walk.output, token))


def block_kept_past_its_end(patch: pytest.MonkeyPatch) -> None:
    accept = LiveRequest.accept

    def wrong(self: LiveRequest, choice: Choice, tree: DraftTree, now: float) -> tuple[int, Any]:
        kept, reason = accept(self, choice, tree, now)
        room = self.request.limit - len(self.request.tokens)
        return (min(len(choice.tokens), room) if reason == "stop" else kept), reason

    patch.setattr(LiveRequest, "accept", wrong)


def moves_from_the_slot_before(patch: pytest.MonkeyPatch) -> None:
    move = KvCache.move_slot

    def wrong(self: KvCache, *slots: int) -> None:
        source_block, source, target_block, target = slots
        move(self, source_block, max(source - 1, 0), target_block, target)

    patch.setattr(KvCache, "move_slot", wrong)


FAULTS = {
    "one node too many": Fault(one_too_many, "adversary", "greedy"),
    "one node too many, sampled": Fault(one_too_many, "random", "0.8"),
    "tree moves skipped": Fault(moves_skipped, "random", "greedy, logprobs"),
    "last tree move skipped": Fault(last_move_skipped, "random", "0.3"),
    "tree moves from the wrong slot": Fault(moves_from_the_slot_before, "random", "greedy, logprobs"),
    "noise off by one": Fault(noise_off_by_one, "oracle", "0.8"),
    "penalties without the path": Fault(penalties_without_the_path, "oracle", "greedy, penalties"),
    "sampled penalties without the path": Fault(penalties_without_the_path, "random", "1.5, all"),
    "ban without the path": Fault(penalties_without_the_path, "oracle", "all stop"),
    "edits left in place": Fault(edits_left_in_place, "oracle", "0.8, penalties"),
    "siblings seen": Fault(everything_before_is_an_ancestor, "random", "greedy, logprobs"),
    "parents not seen": Fault(parents_are_not_ancestors, "random", "greedy"),
    "positions by node": Fault(positions_by_node, "random", "greedy, logprobs"),
    "scores of the parent": Fault(scores_of_the_parent, "oracle", "0.3"),
    "log-probabilities of the root": Fault(logprobs_of_the_root, "oracle", "greedy, logprobs"),
    "block kept past its end": Fault(block_kept_past_its_end, "oracle", "stops"),
}

ALL_STOP = SamplingParams(max_tokens=24, min_tokens=6, stop_token_ids=[*range(0, 300, 2)], ignore_eos=True)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_caught(models: Models, monkeypatch: pytest.MonkeyPatch, name: str, planted: bool) -> None:
    """Each mistake makes the comparison fail, and without it the very same requests pass."""
    fault = FAULTS[name]
    params = ALL_STOP if fault.params == "all stop" else PARAMS[fault.params]
    asks = [Ask((*STEMS[i % 3][: 9 + i], i), params) for i in range(6)]
    models.answers(asks)
    engine = models.engine(fault.draft, seed=1, draft_len=6, prefix_cache=False)
    if planted:
        fault.plant(monkeypatch)
    outputs = engine.generate([ask.prompt for ask in asks], params)

    def compare() -> None:
        for ask, output in zip(asks, outputs, strict=True):
            same(output, models.alone.answer(ask.prompt, params))

    if planted:
        with pytest.raises(AssertionError):
            compare()
    else:
        compare()
        assert engine.stats().speculation.drafted > 0


def test_rejected_tokens_left_in_the_tables_are_noticed(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """The books say so, whatever the text."""
    models.answers(asks := [Ask(STEMS[0][:9], PARAMS["greedy"])])
    engine = models.engine("adversary", draft_len=6)
    handle = engine.submit(asks[0].prompt, asks[0].params)
    engine.step()
    engine.check_integrity()
    rejected_kv_kept(monkeypatch)
    with pytest.raises(KVIntegrityError, match="slots"):
        engine.step()
        engine.check_integrity()
    monkeypatch.undo()
    handle.cancel()
