"""The NumPy oracles for quantised tensors, and the table of types that the engine reads them by."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import ModelFormatError
from forerun.ops.types import GGMLType, row_bytes, unsupported_type_name
from reference.dequant import dequantize
from reference.quant import make_tensor, quantize, random_blocks

TYPES = list(GGMLType)
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
QUANTISED = [t for t in TYPES if t not in FLOATS]

HALF_FIELDS = {
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
}

# SHA-256 prefix of the float32 values, and value 77, that the dequantiser of llama.cpp's `gguf`
# package gives for `patterned_blocks`.
EXPECTED = {
    GGMLType.F32: ("4c0035c43eb695b8", 4.5390333852646236e-11),
    GGMLType.F16: ("24a537318eb53374", 0.00533294677734375),
    GGMLType.Q4_0: ("022b0dfd44418071", 1.3095703125),
    GGMLType.Q4_1: ("88d7b87ddd92227b", -6.95263671875),
    GGMLType.Q5_0: ("d41a4910e5ea3703", -3.9287109375),
    GGMLType.Q5_1: ("68d6ebcbc91887fa", -1.71435546875),
    GGMLType.Q8_0: ("68340df51e41c03c", -16.1513671875),
    GGMLType.Q4_K: ("7c10300f2677e7a5", -228.0),
    GGMLType.Q5_K: ("1f8587248dc0e95c", -228.0),
    GGMLType.Q6_K: ("cc88077417a27206", 414.0),
    GGMLType.BF16: ("fd6b7ed0b95ced9b", 3.255782891008717e-21),
}


def patterned_blocks(type: GGMLType) -> npt.NDArray[np.uint8]:
    """2048 weights whose bytes follow a fixed pattern and whose scales are moderate."""
    n = 2048 // type.block_size
    i = np.arange(n * type.block_bytes)
    blocks = ((i * 167 + i // 251 * 13) % 256).astype(np.uint8).reshape(n, -1)
    for k, at in enumerate(HALF_FIELDS.get(type, ())):
        scales = np.linspace(-0.5, 1.5 + k, n).astype("<f2")
        blocks[:, at : at + 2] = scales.reshape(n, 1).view(np.uint8)
    if type in FLOATS:
        blocks[:, -1] &= 0x3F  # no infinities
    return blocks.reshape(-1)


@pytest.mark.parametrize("type", TYPES)
def test_dequantize_equals_ggml(type: GGMLType) -> None:
    values = dequantize(patterned_blocks(type), type, (2048,))
    digest, sample = EXPECTED[type]
    assert float(values[77]) == sample
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()[:16] == digest


def levels(type: GGMLType) -> int:
    return (1 << int(type.name[1])) - 1


@pytest.mark.parametrize("type", QUANTISED)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([0.02, 1.0, 100.0]))
@settings(max_examples=15, deadline=None)
def test_quantize_is_close(type: GGMLType, seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.normal(rng.normal(), 1, (3, 512)) * scale).astype(np.float32)
    y = dequantize(quantize(x, type), type, x.shape)
    blocks = x.reshape(-1, type.block_size)
    reach = np.maximum(blocks.max(axis=1), 0) - np.minimum(blocks.min(axis=1), 0)
    if type in (GGMLType.Q4_0, GGMLType.Q5_0, GGMLType.Q8_0, GGMLType.Q6_K):
        reach = 2 * np.abs(blocks).max(axis=1)
    # Half a level is the rounding itself; the other half pays for a one-sided range and for scales
    # that are themselves rounded to float16 or 6 bits.
    error = np.abs(x - y).reshape(blocks.shape).max(axis=1)
    assert (error <= reach / levels(type) * 1.01).all()


@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_each_weight_lands_in_its_own_place(type: GGMLType, sign: float) -> None:
    # Row i is zero except for weight i.
    size = max(type.block_size, 32)
    x = np.eye(size, dtype=np.float32) * np.float32(sign * 15)
    y = dequantize(quantize(x, type), type, x.shape)
    assert np.array_equal(np.abs(y).argmax(axis=1), np.arange(size))
    np.testing.assert_allclose(y, x, atol=0.6)


@pytest.mark.parametrize("type", FLOATS)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=15, deadline=None)
def test_float_types_round_to_nearest(type: GGMLType, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(2, 64)).astype(np.float32)
    y = dequantize(quantize(x, type), type, x.shape)
    bits = {GGMLType.F32: 24, GGMLType.F16: 11, GGMLType.BF16: 8}[type]
    half_ulp = np.exp2(np.floor(np.log2(np.abs(x))) - bits)
    limit = np.maximum(half_ulp, 2.0**-25 if type is GGMLType.F16 else 0)
    assert (np.abs(x - y) <= limit).all()
    assert np.array_equal(dequantize(quantize(y, type), type, y.shape), y)


def test_bf16_ties_go_to_even() -> None:
    x = np.array([0x3F808000, 0x3F818000, 0x3F808001], np.uint32).view(np.float32)
    assert quantize(x, GGMLType.BF16).view("<u2").tolist() == [0x3F80, 0x3F82, 0x3F81]


@pytest.mark.parametrize("type", TYPES)
@given(seed=st.integers(0, 2**32 - 1), extreme=st.sampled_from([0.0, 0.1, 1.0]))
@settings(max_examples=10, deadline=None)
def test_random_blocks_are_finite(type: GGMLType, seed: int, extreme: float) -> None:
    shape = (2, 3, 256)
    data = random_blocks(type, shape, np.random.default_rng(seed), extreme=extreme)
    values = dequantize(data, type, shape)
    assert values.shape == shape
    assert np.isfinite(values).all()
    if extreme == 0:
        assert np.abs(values).max() < 0.2 * 32 * 128


@pytest.mark.parametrize("type", QUANTISED)
def test_random_blocks_reach_extremes(type: GGMLType) -> None:
    data = random_blocks(type, (64, 2048), np.random.default_rng(3), extreme=0.5)
    blocks = data.reshape(-1, type.block_bytes)
    for at in HALF_FIELDS[type]:
        halves = set(np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")[:, 0].tolist())
        # +0, -0, the smallest subnormal, and the largest value of either sign
        assert {0x0000, 0x8000, 0x0001, 0x7BFF, 0xFBFF} <= halves
    quants = blocks[:, 4:208] if type is not GGMLType.Q6_K else blocks[:, :208]
    assert (quants == 0).all(axis=1).any()
    assert (quants == 255).all(axis=1).any()


@pytest.mark.parametrize("type", TYPES)
def test_row_bytes(type: GGMLType) -> None:
    assert row_bytes(type, 512) == 512 // type.block_size * type.block_bytes
    assert make_tensor("w", np.zeros((3, 512)), type).data.shape == (3 * row_bytes(type, 512),)
    for wrong in (0, -type.block_size, *([type.block_size + 1] if type.block_size > 1 else [])):
        with pytest.raises(ModelFormatError, match=f"stored as {type.name}"):
            row_bytes(type, wrong)


def test_unsupported_names() -> None:
    assert unsupported_type_name(16) == "IQ2_XXS"
    assert unsupported_type_name(9999) is None
    assert all(unsupported_type_name(int(t)) is None for t in TYPES)
