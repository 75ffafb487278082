"""Linear layers: right against dequantised weights, and the same bits for any number of rows and instruction set."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.ops.tape import Tape
from forerun.ops.types import GGMLType, TensorData
from reference.activations import block_of, quantised
from reference.dequant import dequantize
from reference.sets import SETS
from reference.tapes import activations, add_weight, plain_step, product, random_tensor


@pytest.mark.parametrize("type", list(GGMLType))
@pytest.mark.parametrize("isa", SETS)
def test_product_equals_dequantised_weights_times_quantised_input(type: GGMLType, isa: str) -> None:
    tensor, x = random_tensor(type, 48, 768, 1), activations(11, 768, 2)
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
        tensor = random_tensor(type, 64, 512, 4, extreme)
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
    tensor, x = random_tensor(type, 32, 256, seed), activations(rows, 256, seed + 1)
    together = product(tensor, x, threads=threads)
    alone = product(tensor, x[row : row + 1], threads=1)
    np.testing.assert_array_equal(together[row].view(np.uint32), alone[0].view(np.uint32))


def test_bias_and_residual_are_added_once() -> None:
    tensor, x = random_tensor(GGMLType.Q4_K, 32, 256, 5), activations(3, 256, 6)
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
    x = np.concatenate([rng.normal(size=(9, 64)), rows[n // 2 : n // 2 + 1] * 100]).astype(np.float32)
    for n_logits in (0, 4, 10):
        tape = Tape(max_tokens=10, max_outputs=10, threads=2)
        a, out = tape.buffer(64), tape.buffer(64, outputs=True)
        tape.gather(a, out)
        tape.head(out, add_weight(tape, tensor))
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
        tensor, x = random_tensor(type, 32, 256, 9), activations(3, 256, 10)
        for poison in (np.nan, np.inf):
            x[1, 77] = poison
            result = product(tensor, x)
            assert not np.isfinite(result[1]).any()
            assert np.isfinite(result[[0, 2]]).all()


def test_tiny_and_zero_blocks_quantise_to_zero() -> None:
    tensor = random_tensor(GGMLType.Q4_K, 32, 256, 11)
    x = np.zeros((2, 256), dtype=np.float32)
    x[1] = 1e-38
    assert (product(tensor, x) == 0).all()


def q6_k(levels: npt.NDArray[np.int64], scales: npt.NDArray[np.int64]) -> TensorData:
    """Q6_K of levels 0..63 int[n, k] with scales -128..127 int[n, k / 16], d = 1."""
    n, k = levels.shape
    p = levels.reshape(-1, 2, 4, 32)  # half, quarter, place
    low = (p[:, :, :2] & 15 | (p[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = (p >> 4 << 2 * np.arange(4)[:, None]).sum(axis=2).reshape(-1, 64)
    one = np.broadcast_to(np.frombuffer(np.float16(1).tobytes(), dtype=np.uint8), (len(p), 2))
    scale_bytes = scales.astype(np.int8).view(np.uint8).reshape(-1, 16)
    blocks = np.concatenate([low.astype(np.uint8), high.astype(np.uint8), scale_bytes, one], axis=1)
    return TensorData("w", GGMLType.Q6_K, (n, k), np.ascontiguousarray(blocks).reshape(-1))


@pytest.mark.parametrize("isa", SETS)
def test_the_largest_sums_of_q6_k_are_exact(isa: str) -> None:
    """Quants at both ends, scales at both ends and inputs of +-127: 16-bit sums come within 1 % of their limit."""
    rng = np.random.default_rng(12)
    n, k = 32, 256
    patterns = ([1] * 4, [-1] * 4, [1, -1] * 2, [1, 1, -1, -1])
    x = 127 * np.concatenate([[np.tile(p, k // 4) for p in patterns], rng.choice([-1, 1], (8, k))])
    levels = rng.choice([0, 63], (n, k))
    levels[0], levels[1] = 0, 63
    # Every product of a column as large as it gets for one of the rows, and of either sign.
    for column, row in enumerate((3, 4, 5), start=2):
        levels[column] = np.where(x[row] > 0, 63, 0)
        levels[column + 3] = np.where(x[row] > 0, 0, 63)
    for scales in (np.full((n, k // 16), -128), np.full((n, k // 16), 127), rng.choice([-128, 127, 1], (n, k // 16))):
        weights = (levels - 32) * np.repeat(scales, 16, axis=1)
        expected, size = x @ weights.T, np.abs(x) @ np.abs(weights).T
        got = product(q6_k(levels, scales), x.astype(np.float32), isa=isa)
        assert np.abs(got - expected).max() < 1e-6 * size.max()
