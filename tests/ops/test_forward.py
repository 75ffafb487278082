"""The recorded forward pass against the slow reference, for every architecture, chains and trees."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.config import Architecture
from forerun.models.executor import Executor
from forerun.models.source import ModelSource, open_model
from forerun.ops import StepInput
from forerun.ops.types import GGMLType
from reference.activations import engine_hook
from reference.forward import dequantised, forward, tree_after
from reference.sets import SETS
from reference.tiny import ARCHITECTURES, VOCAB_SIZE, TinySpec, write_tiny_gguf

Floats = npt.NDArray[np.float32]
MIXED = {
    "": GGMLType.Q4_K,
    "attn_v": GGMLType.Q6_K,
    "ffn_down": GGMLType.Q6_K,
    "token_embd": GGMLType.Q8_0,
}
BLOCKS = 24


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSource]:
    folder = tmp_path_factory.mktemp("tiny")
    made = {}
    for architecture in ARCHITECTURES:
        for label, types, layers in (("f32", {}, 3), ("mixed", MIXED, 3), ("one layer", MIXED, 1)):
            spec = TinySpec(architecture, types=types, layers=layers)
            path = write_tiny_gguf(folder / f"{architecture}-{label}.gguf", spec)
            made[f"{architecture}-{label}"] = open_model(path)
    yield made
    for source in made.values():
        source.close()


def executor(source: ModelSource, *, cache: Path | None = None, threads: int = 2) -> Executor:
    return Executor(
        source,
        kv_blocks=BLOCKS,
        max_positions=512,
        max_tokens=256,
        max_outputs=256,
        threads=threads,
        cache=cache,
    )


class Sequence:
    """Feeds one sequence through an executor in chosen pieces, over chosen blocks."""

    def __init__(self, ex: Executor, blocks: list[int]) -> None:
        self.ex = ex
        self.table = np.array([blocks], dtype=np.int32)
        self.cached = 0

    def feed(self, tokens: list[int], parents: list[int] | None = None) -> Floats:
        """Logits after each token. `parents` makes the tokens a draft tree, which isn't committed."""
        n = len(tokens)
        positions, ancestors = [], []
        for i in range(n):
            parent = i - 1 if parents is None else parents[i]
            positions.append((positions[parent] if parent >= 0 else self.cached - 1) + 1)
            ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << i if parents is not None else 0)
        step = StepInput(
            tokens=np.array(tokens, dtype=np.int32),
            positions=np.array(positions, dtype=np.int32),
            row_start=np.array([0, n], dtype=np.int32),
            cached=np.array([self.cached], dtype=np.int32),
            is_tree=np.array([parents is not None], dtype=np.uint8),
            ancestors=np.array(ancestors, dtype=np.uint64),
            tables=self.table,
            table_row=np.zeros(1, dtype=np.int32),
            output=np.arange(n, dtype=np.int32),
        )
        logits = self.ex.forward(step, n, np.zeros(n, dtype=np.int32)).copy()
        if parents is None:
            self.cached += n
        return logits


def text(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, n).tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("label", ["f32", "mixed"])
def test_forward_equals_reference(sources: dict[str, ModelSource], architecture: Architecture, label: str) -> None:
    source = sources[f"{architecture}-{label}"]
    tokens = text(70)
    expected = forward(source.config, dequantised(source), tokens, hook=engine_hook(source)).logits
    got = Sequence(executor(source), list(range(BLOCKS))).feed(tokens)
    # With quantised weights, float32 and float64 agree until one of thousands of activations lies so close to the
    # middle of two int8 steps that they round it apart; from there on the results differ by that step's size.
    assert np.abs(got - expected).max() < (2e-3 if label == "f32" else 0.06) * np.abs(expected).max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_most_single_tokens_meet_no_rounding_apart(sources: dict[str, ModelSource], architecture: Architecture) -> None:
    source = sources[f"{architecture}-mixed"]
    weights, hook, ex = dequantised(source), engine_hook(source), executor(source)
    errors = []
    for token in range(0, VOCAB_SIZE, 20):
        expected = forward(source.config, weights, [token], hook=hook).logits
        got = Sequence(ex, list(range(BLOCKS))).feed([token])
        errors.append(np.abs(got - expected).max() / np.abs(expected).max())
    assert np.median(errors) < 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tree_equals_reference(sources: dict[str, ModelSource], architecture: Architecture) -> None:
    source = sources[f"{architecture}-f32"]
    prefix, parents = text(37), [-1, 0, 0, 1, -1, 4, 2, 6, 6]
    draft = text(len(parents), 1)
    tree = tree_after(len(prefix), parents)
    expected = forward(
        source.config, dequantised(source), prefix + draft, visible=tree.visible, positions=tree.positions,
        hook=engine_hook(source),
    ).logits  # fmt: skip
    sequence = Sequence(executor(source), list(range(BLOCKS)))
    sequence.feed(prefix)
    got = sequence.feed(draft, parents)
    assert np.abs(got - expected[len(prefix) :]).max() < 2e-3 * np.abs(expected).max()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_tree_path_has_the_bits_of_the_plain_sequence(
    sources: dict[str, ModelSource], architecture: Architecture, data: st.DataObject
) -> None:
    source = sources[f"{architecture}-mixed"]
    ex = executor(source)
    prefix = text(data.draw(st.integers(1, 60)), data.draw(st.integers(0, 5)))
    n = data.draw(st.integers(1, 20))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    draft = text(n, 9)
    sequence = Sequence(ex, list(range(BLOCKS)))
    sequence.feed(prefix)
    drafted = sequence.feed(draft, parents)
    node = data.draw(st.integers(0, n - 1))
    path = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    plain = Sequence(ex, data.draw(st.permutations(range(BLOCKS))))
    plain.feed(prefix)
    for i in path:
        np.testing.assert_array_equal(plain.feed([draft[i]])[0].view(np.uint32), drafted[i].view(np.uint32))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_chunks_and_blocks_do_not_change_a_bit(
    sources: dict[str, ModelSource], architecture: Architecture, data: st.DataObject
) -> None:
    source = sources[f"{architecture}-mixed"]
    ex = executor(source, threads=data.draw(st.integers(1, 3)))
    tokens = text(data.draw(st.integers(2, 90)), 3)
    whole = Sequence(ex, list(range(BLOCKS))).feed(tokens)
    pieces = Sequence(ex, data.draw(st.permutations(range(BLOCKS))))
    at = 0
    while at < len(tokens):
        n = data.draw(st.integers(1, len(tokens) - at))
        part = pieces.feed(tokens[at : at + n])
        np.testing.assert_array_equal(part.view(np.uint32), whole[at : at + n].view(np.uint32))
        at += n


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_instruction_sets_agree_on_a_whole_forward(
    sources: dict[str, ModelSource], architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for isa in SETS:
        monkeypatch.setenv("FORERUN_ISA", isa)
        ex = executor(sources[f"{architecture}-mixed"])
        assert ex.tape.isa == isa
        results.append(Sequence(ex, list(range(BLOCKS))).feed(text(40)))
    for other in results[1:]:
        np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


class Last(NamedTuple):
    """A step of two requests, the second a tree, and the bits of the logits after each of its tokens."""

    executor: Executor
    step: StepInput
    logits: Floats


def last_step(source: ModelSource, threads: int) -> Last:
    ex = executor(source, threads=threads)
    chain, tree = Sequence(ex, list(range(8))), Sequence(ex, list(range(8, 16)))
    chain.feed(text(21, 4))
    tree.feed(text(30, 5))
    parents = [-1, 0, 0, 1, 3, -1]
    masks = [1]
    for i in range(1, 6):
        masks.append((masks[parents[i]] if parents[i] >= 0 else 0) | 1 << i)
    tokens = text(40, 6)
    step = StepInput(
        tokens=np.array(tokens, dtype=np.int32),
        positions=np.array([*range(21, 55), *(30 + mask.bit_count() - 1 for mask in masks)], dtype=np.int32),
        row_start=np.array([0, 34, 40], dtype=np.int32),
        cached=np.array([21, 30], dtype=np.int32),
        is_tree=np.array([0, 1], dtype=np.uint8),
        ancestors=np.array([0] * 34 + masks, dtype=np.uint64),
        tables=np.array([range(8), range(8, 16)], dtype=np.int32),
        table_row=np.arange(2, dtype=np.int32),
        output=np.arange(40, dtype=np.int32),
    )
    expected = np.concatenate([Sequence(ex, list(range(16, 24))).feed([*text(21, 4), *tokens[:34]])[21:],
                               tree.feed(tokens[34:], parents)])  # fmt: skip
    return Last(ex, step, expected)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("label", ["mixed", "one layer"])
@given(data=st.data())
@settings(max_examples=10, deadline=None)
def test_any_outputs_have_the_bits_of_all(
    sources: dict[str, ModelSource], architecture: Architecture, label: str, data: st.DataObject
) -> None:
    """None, some, all, repeated and in any order: behind its attention the last layer computes them alone."""
    ex, step, expected = last_step(sources[f"{architecture}-{label}"], data.draw(st.integers(1, 4)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    for n in (7, 0, 90, data.draw(st.integers(1, 40))):  # 90: more outputs than tokens
        output = rng.integers(0, 40, n).astype(np.int32)
        n_logits = data.draw(st.integers(0, len(output)))
        argmax = np.full(len(output), -7, dtype=np.int32)
        logits = ex.forward(step._replace(output=output), n_logits, argmax)
        np.testing.assert_array_equal(logits.view(np.uint32), expected[output[:n_logits]].view(np.uint32))
        assert argmax[n_logits:].tolist() == expected[output[n_logits:]].argmax(axis=1).tolist()
        assert (argmax[:n_logits] == -7).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("label", ["mixed", "one layer"])
def test_a_step_without_outputs_leaves_the_keys_of_every_layer(
    sources: dict[str, ModelSource], architecture: Architecture, label: str
) -> None:
    ex, tokens = executor(sources[f"{architecture}-{label}"]), text(50, 7)
    expected = Sequence(ex, list(range(BLOCKS))).feed(tokens)[49]
    for block in range(8):
        ex.kv.copy_block(23, block)  # what the line above stored there is gone
    step = StepInput.chain(np.array(tokens[:49], dtype=np.int32), 0, list(range(BLOCKS)), 0)
    ex.forward(step, 0, np.zeros(0, dtype=np.int32))
    behind = Sequence(ex, list(range(BLOCKS)))
    behind.cached = 49
    np.testing.assert_array_equal(behind.feed(tokens[49:])[0].view(np.uint32), expected.view(np.uint32))


def test_moved_slot_and_copied_block_carry_their_content(sources: dict[str, ModelSource]) -> None:
    ex = executor(sources["qwen2-mixed"])
    tokens = text(20)
    expected = Sequence(ex, list(range(BLOCKS))).feed([*tokens, 5])
    # Token 19 computed as node 2 of a tree, then moved to where a plain sequence would have it.
    branched = Sequence(ex, list(range(BLOCKS)))
    branched.feed(tokens[:18])
    branched.feed([7, tokens[18], tokens[19]], [-1, -1, 1])
    ex.kv.move_slot(1, 3, 1, 2)
    ex.kv.move_slot(1, 4, 1, 3)
    branched.cached = 20
    np.testing.assert_array_equal(branched.feed([5])[0].view(np.uint32), expected[20].view(np.uint32))
    ex.kv.copy_block(1, 9)
    copied = Sequence(ex, [0, 9, 2])
    copied.cached = 20
    np.testing.assert_array_equal(copied.feed([5])[0].view(np.uint32), expected[20].view(np.uint32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.array([VOCAB_SIZE], dtype=np.int32)}, "vocabulary"),
        ({"tokens": np.array([-1], dtype=np.int32)}, "vocabulary"),
        ({"positions": np.array([512], dtype=np.int32)}, "position"),
        ({"row_start": np.array([0, 2], dtype=np.int32)}, "rows"),
        ({"cached": np.array([-1], dtype=np.int32)}, "negative"),
        ({"cached": np.array([16], dtype=np.int32)}, "too short"),
        ({"tables": np.array([[BLOCKS]], dtype=np.int32)}, "block out of range"),
        ({"table_row": np.array([1], dtype=np.int32)}, "no such block table"),
        ({"output": np.array([1], dtype=np.int32)}, "output"),
        ({"is_tree": np.array([1], dtype=np.uint8)}, "ancestor"),
    ],
)
def test_an_inconsistent_step_is_refused(
    sources: dict[str, ModelSource], change: dict[str, npt.NDArray[np.int32]], message: str
) -> None:
    one = np.zeros(1, dtype=np.int32)
    step = StepInput(
        one, one, np.array([0, 1], dtype=np.int32), one, np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.uint64),
        np.zeros((1, 1), dtype=np.int32), one, one,
    )  # fmt: skip
    ex = executor(sources["llama-f32"])
    ex.forward(step, 0, np.zeros(1, dtype=np.int32))
    with pytest.raises(ValueError, match=message):
        ex.forward(step._replace(**change), 0, np.zeros(1, dtype=np.int32))
