"""The noise: its floats are right, its distribution is Gumbel's, its keys are independent."""

from __future__ import annotations

import math

import numpy as np
import pytest

from forerun.sample import noise
from reference.sampling import chi_square_score, ks_score


def bits_of(seed: int, position: int, n: int, first: int = 0) -> np.ndarray:
    return noise.noise_bits(noise.noise_key(seed, position), np.arange(first, first + n))


def uniform_score(bits: np.ndarray, cells: int = 256) -> float:
    return chi_square_score(bits >> 23, np.full(cells, 1 / cells))


def correlation_score(a: np.ndarray, b: np.ndarray) -> float:
    """Correlation of two noise samples in standard deviations."""
    return float(np.corrcoef(a, b)[0, 1] * math.sqrt(a.size))


def test_pinned_values():
    """A seed given today must draw the same text in every later version."""
    assert noise.noise_key(0, 0) == noise.NoiseKey(4282176703, 1210155558)
    assert noise.noise_key(2**64 - 1, 12345) == noise.NoiseKey(3748594783, 1352156782)
    assert bits_of(1, 2, 4).tolist() == [532531711, 731385436, 707687826, 757616685]
    values = [float(x).hex() for x in noise.gumbel(1, 2, [0, 1, 2, 3])]
    assert values == [
        "0x1.415b100000000p+0",
        "0x1.c094140000000p-1",
        "0x1.d5671c0000000p-1",
        "0x1.aa16d20000000p-1",
    ]


def test_keys_wrap_at_64_bits():
    assert noise.noise_key(2**64 + 5, 7) == noise.noise_key(5, 7 + 2**64)
    assert noise.noise_key(2**64 - 1, 2**63) != noise.noise_key(2**64 - 2, 2**63)


@pytest.mark.parametrize("low", [1e-37, 1e-9, 1e-3, 0.5, 0.9])
def test_log32_is_accurate(low):
    x = np.geomspace(low, 20, 200_001, dtype=np.float32)
    exact = np.log(x.astype(np.float64))
    assert np.all(np.abs(noise.log32(x) - exact) <= 2 * np.spacing(np.abs(exact).astype(np.float32)))


def test_log1m32_is_accurate_for_tiny_and_large_arguments():
    v = np.concatenate(
        [
            np.geomspace(2.0**-32, 0.5, 200_001, dtype=np.float32),
            np.linspace(0.2, 1 - 2.0**-24, 200_001, dtype=np.float32),
        ]
    )
    exact = np.log1p(-v.astype(np.float64))
    assert np.all(np.abs(noise.log1m32(v) / exact - 1) < 3e-7)


def test_noise_at_the_ends_of_the_bits():
    ends = noise.gumbel_from_bits(np.array([0, 2**31 - 1], dtype=np.int32))
    assert ends[0] == pytest.approx(32 * math.log(2), abs=1e-5)
    assert ends[1] == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)


def test_noise_falls_with_its_bits():
    """The native kernel bounds a block's noise by that of its lowest bits, with a slack of 1e-4."""
    rng = np.random.default_rng(0)
    bits = np.sort(
        np.concatenate(
            [
                rng.integers(0, 2**31, 300_000),
                np.arange(100_000),
                np.arange(2**31 - 100_000, 2**31),
                np.arange(2**28, 2**28 + 100_000),
            ]
        ).astype(np.int32)
    )
    values = noise.gumbel_from_bits(bits)
    assert np.all(np.maximum.accumulate(values[::-1])[::-1] - values < 1e-5)


def test_distribution_is_gumbel():
    draws = np.sort(np.concatenate([noise.gumbel(5, t, np.arange(1000)) for t in range(200)]))
    cdf = np.exp(-np.exp(-draws.astype(np.float64)))
    assert ks_score(draws, cdf) < 1.95
    shifted = draws.astype(np.float64) + 0.02
    assert ks_score(shifted, np.exp(-np.exp(-shifted))) > 1.95


def test_upper_tail_is_gumbel():
    """Far out, where 1 - u would lose its bits, the noise must still be exponential."""
    bits = np.concatenate([bits_of(17, t, 2_000_000) for t in range(4)])
    rare = np.sort(noise.gumbel_from_bits(bits[bits < 2**18]))
    expected = bits.size * 2.0**-13
    assert abs(rare.size - expected) < 4 * math.sqrt(expected)
    exponential = np.exp(-rare.astype(np.float64)) * 2.0**13
    assert ks_score(rare, np.sort(1 - np.clip(exponential, 0, 1))) < 1.95


def test_extreme_tail_keeps_its_resolution():
    """The 64 strongest of 2^31 values are distinct and lie where -log(v) puts them."""
    bits = np.arange(64, dtype=np.int32)
    values = noise.gumbel_from_bits(bits)
    assert np.unique(values).size == 64
    np.testing.assert_allclose(values, -np.log((bits + 0.5) * 2.0**-31), rtol=1e-6)


@pytest.mark.parametrize("vary", ["token", "position", "seed"])
def test_bits_are_uniform_along_each_key(vary):
    n = 100_000 if vary == "token" else 8_000
    if vary == "token":
        bits = bits_of(3, 9, n)
    elif vary == "position":
        bits = np.concatenate([bits_of(3, t, 1, first=7) for t in range(n)])
    else:
        bits = np.concatenate([bits_of(s, 9, 1, first=7) for s in range(n)])
    assert abs(uniform_score(bits)) < 4
    low = (bits & 0xFF).astype(np.int64)
    assert abs(chi_square_score(low, np.full(256, 1 / 256))) < 4
    pairs = (bits[:-1] >> 27).astype(np.int64) * 16 + (bits[1:] >> 27)
    assert abs(chi_square_score(pairs, np.full(256, 1 / 256))) < 4


def test_every_bit_is_fair_and_every_key_bit_matters():
    ids = np.arange(4096)
    base = bits_of(0, 0, 4096)
    for bit in range(64):
        for other in (bits_of(1 << bit, 0, 4096), bits_of(0, 1 << bit, 4096)):
            flipped = base ^ other
            share = np.array([((flipped >> k) & 1).mean() for k in range(31)])
            assert np.all(np.abs(share - 0.5) < 5 * 0.5 / math.sqrt(ids.size)), bit


def test_noise_of_related_keys_is_uncorrelated():
    n = 20_000
    base = noise.gumbel(11, 100, np.arange(n))
    others = {
        "next position": noise.gumbel(11, 101, np.arange(n)),
        "next seed": noise.gumbel(12, 100, np.arange(n)),
        "seed and position exchanged": noise.gumbel(100, 11, np.arange(n)),
        "same sum": noise.gumbel(10, 101, np.arange(n)),
        "next token": noise.gumbel(11, 100, np.arange(1, n + 1)),
        "far position": noise.gumbel(11, 100 + 2**32, np.arange(n)),
    }
    for name, other in others.items():
        assert abs(correlation_score(base, other)) < 4, name
    assert correlation_score(base, base) > 100


def test_both_halves_of_the_key_change_the_whole_noise():
    """Hashing id ^ key once would only permute the noise among tokens."""
    ids = np.arange(4096)
    base = noise.noise_bits(noise.NoiseKey(5, 9), ids)
    for key in (noise.NoiseKey(5, 8), noise.NoiseKey(5, 9 + 2**31), noise.NoiseKey(6, 8)):
        other = noise.noise_bits(key, ids)
        assert np.intersect1d(base, other).size < 5
        assert abs(correlation_score(base, other)) < 4


def test_no_two_positions_share_a_key():
    golden = 0x9E37_79B9_7F4A_7C15
    assert noise.noise_key(3 + golden, 7) != noise.noise_key(3, 8)
    keys = {noise.noise_key(s, t) for s in range(40) for t in range(2000)}
    assert len(keys) == 80_000
    for half in (0, 1):
        assert len({k[half] for k in keys}) > 79_990


def test_a_weak_generator_is_caught():
    """The scores above must fail for noise that ignores its position or mixes too little."""
    ids = np.arange(20_000)
    weak = ((ids.astype(np.uint32) * np.uint32(2654435761)) >> np.uint32(1)).astype(np.int32)
    assert abs(uniform_score(weak)) > 4
    same_for_all_positions = np.concatenate([bits_of(3, 0, 1, first=7)] * 20_000)
    assert uniform_score(same_for_all_positions) > 4
    coarse = np.sort(noise.gumbel_from_bits(bits_of(3, 9, 200_000) & ~np.int32(0x7F_FFFF)))
    assert ks_score(coarse, np.exp(-np.exp(-coarse.astype(np.float64)))) > 1.95
