"""Linear layers: right against dequantised weights, and the same bits for any number of rows and instruction set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun import ops
from forerun.ops.tape import Into, StepInput, Tape
from forerun.ops.types import GGMLType, TensorData
from reference.activations import block_of, quantised
from reference.dequant import dequantize
from reference.quant import random_blocks
from reference.sets import SETS

Floats = npt.NDArray[np.float32]


def plain_step(rows: int) -> StepInput:
    ints = np.zeros(rows, dtype=np.int32)
    return StepInput(
        tokens=ints,
        positions=ints,
        row_start=np.array([0, rows], dtype=np.int32),
        cached=np.zeros(1, dtype=np.int32),
        is_tree=np.zeros(1, dtype=np.uint8),
        ancestors=np.zeros(rows, dtype=np.uint64),
        tables=np.zeros((1, 1), dtype=np.int32),
        table_row=np.zeros(1, dtype=np.int32),
        output=np.arange(rows, dtype=np.int32),
    )


def product(
    tensor: TensorData, x: Floats, *, isa: str = "", bias: Floats | None = None, onto: Floats | None = None,
    threads: int = 2,
) -> Floats:  # fmt: skip
    n, k = tensor.shape
    packed = np.empty(ops.packed_bytes(tensor.type, n, k), dtype=np.uint8)
    ops.pack(tensor, packed, threads)
    tape = Tape(max_tokens=len(x), max_outputs=1, threads=threads, isa=isa or None)
    a, y = tape.buffer(k), tape.buffer(n)
    weight = tape.weight(tensor.type, n, k, packed)
    tape.linear(a, [Into(weight, y, tape.vector(bias) if bias is not None else None, onto is not None)])
    tape.write(a, x)
    if onto is not None:
        tape.write(y, onto)
    empty = plain_step(len(x))._replace(output=np.zeros(0, dtype=np.int32))
    tape.run(None, empty, np.empty((0, 1), dtype=np.float32), np.zeros(0, dtype=np.int32))
    return tape.read(y, len(x))


def make(type: GGMLType, n: int, k: int, seed: int, extreme: float = 0.0) -> TensorData:
    rng = np.random.default_rng(seed)
    return TensorData("w", type, (n, k), random_blocks(type, (n, k), rng, extreme=extreme))


def activations(rows: int, k: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, k)).astype(np.float32)
    x *= np.exp(rng.normal(size=(1, k))).astype(np.float32)  # outlier channels, as real activations have
    return x


@pytest.mark.parametrize("type", list(GGMLType))
@pytest.mark.parametrize("isa", SETS)
def test_product_equals_dequantised_weights_times_quantised_input(type: GGMLType, isa: str) -> None:
    tensor, x = make(type, 48, 768, 1), activations(11, 768, 2)
    block = block_of(type)
    exact_x = x if block is None else quantised(x.astype(np.float64), block)
    w = dequantize(tensor.data, type, tensor.shape).astype(np.float64)
    expected = exact_x.astype(np.float64) @ w.T
    size = np.abs(exact_x).astype(np.float64) @ np.abs(w).T
    error = np.abs(product(tensor, x, isa=isa) - expected) / size
    assert error.max() < 2e-6


@pytest.mark.parametrize("type", list(GGMLType))
def test_instruction_sets_give_the_same_bits(type: GGMLType) -> None:
    assert len(SETS) > 1 or SETS == ["portable"]
    x = activations(13, 512, 3)
    for extreme in (0.0, 0.2):
        tensor = make(type, 64, 512, 4, extreme)
        results = [product(tensor, x, isa=isa) for isa in SETS]
        for other in results[1:]:
            np.testing.assert_array_equal(results[0].view(np.uint32), other.view(np.uint32))


@given(
    type=st.sampled_from(list(GGMLType)),
    rows=st.integers(1, 40),
    row=st.integers(0, 39),
    threads=st.integers(1, 3),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    type: GGMLType, rows: int, row: int, threads: int, seed: int
) -> None:
    row %= rows
    tensor, x = make(type, 32, 256, seed), activations(rows, 256, seed + 1)
    together = product(tensor, x, threads=threads)
    alone = product(tensor, x[row : row + 1], threads=1)
    np.testing.assert_array_equal(together[row].view(np.uint32), alone[0].view(np.uint32))


def test_bias_and_residual_are_added_once() -> None:
    tensor, x = make(GGMLType.Q4_K, 32, 256, 5), activations(3, 256, 6)
    rng = np.random.default_rng(7)
    bias = rng.normal(size=32).astype(np.float32)
    onto = rng.normal(size=(3, 32)).astype(np.float32)
    bare = product(tensor, x)
    np.testing.assert_array_equal(product(tensor, x, bias=bias), bare + bias)
    np.testing.assert_array_equal(product(tensor, x, bias=bias, onto=onto), onto + (bare + bias))


@pytest.mark.parametrize("n", [16, 17, 40, 300])
def test_head_takes_any_vocabulary_and_the_lowest_id_on_ties(n: int) -> None:
    rng = np.random.default_rng(8)
    rows = rng.normal(size=(n, 64)).astype(np.float32)
    rows[n - 1] = rows[n // 2]  # a tie between two ids
    tensor = TensorData("w", GGMLType.F32, (n, 64), rows.reshape(-1).view(np.uint8))
    packed = np.empty(ops.packed_bytes(tensor.type, n, 64), dtype=np.uint8)
    ops.pack(tensor, packed, 1)
    x = np.concatenate([rng.normal(size=(9, 64)), rows[n // 2 : n // 2 + 1] * 100]).astype(np.float32)
    for n_logits in (0, 4, 10):
        tape = Tape(max_tokens=10, max_outputs=10, threads=2)
        a, out = tape.buffer(64), tape.buffer(64, outputs=True)
        tape.gather(a, out)
        tape.head(out, tape.weight(tensor.type, n, 64, packed))
        tape.write(a, x)
        logits, argmax = np.empty((n_logits, n), dtype=np.float32), np.full(10, -7, dtype=np.int32)
        tape.run(None, plain_step(10), logits, argmax)
        expected = x @ rows.T
        np.testing.assert_allclose(logits, expected[:n_logits], rtol=1e-4, atol=1e-4)
        assert argmax[n_logits:].tolist() == expected[n_logits:].argmax(axis=1).tolist()
        assert (argmax[:n_logits] == -7).all()
        if n_logits < 10:
            assert argmax[9] == n // 2


def test_broken_activations_reach_the_scores() -> None:
    for type in (GGMLType.Q4_K, GGMLType.Q4_1, GGMLType.Q8_0, GGMLType.F32):
        tensor, x = make(type, 32, 256, 9), activations(3, 256, 10)
        for poison in (np.nan, np.inf):
            x[1, 77] = poison
            result = product(tensor, x)
            assert not np.isfinite(result[1]).any()
            assert np.isfinite(result[[0, 2]]).all()


def test_tiny_and_zero_blocks_quantise_to_zero() -> None:
    tensor = make(GGMLType.Q4_K, 32, 256, 11)
    x = np.zeros((2, 256), dtype=np.float32)
    x[1] = 1e-38
    assert (product(tensor, x) == 0).all()
