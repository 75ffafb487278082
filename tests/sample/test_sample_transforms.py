"""The NumPy definition against textbook float64, and the edges that it promises."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forerun.sample import NOT_FINITE, NOTHING_ALLOWED, transforms
from reference import sampling as reference

INF = math.inf


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def kept(logits: np.ndarray, temperature: float = 1.0, **knobs: Any) -> list[int]:
    return np.flatnonzero(transforms.transformed(logits, temperature=temperature, **knobs) > -INF).tolist()


logit_rows = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.integers(-3, 3).map(float)), min_size=1, max_size=40
).map(lambda row: np.array(row, dtype=np.float32))


@given(
    logit_rows,
    st.floats(0.125, 5, width=32),
    st.integers(0, 45),
    st.just(1.0) | st.floats(0, 1, width=32),
    st.just(0.0) | st.floats(0, 1, width=32),
)
def test_survivors_equal_the_textbook(logits, temperature, top_k, top_p, min_p):
    expected = reference.probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assume(expected.margin > 1e-5)
    possible = np.flatnonzero(expected.probabilities > 0).tolist()
    assert kept(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p) == possible


@given(logit_rows, st.integers(0, 45), st.floats(0, 1), st.floats(0, 1), st.floats(1e-6, 1e6))
def test_the_most_probable_token_always_stays(logits, top_k, top_p, min_p, temperature):
    assert int(np.argmax(logits)) in kept(logits, temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def test_hugging_face_order_is_temperature_top_k_top_p_min_p():
    """Six tokens for which every other order keeps another set."""
    logits = np.log(f32(0.40, 0.25, 0.15, 0.10, 0.06, 0.04))
    assert kept(logits, top_k=3) == [0, 1, 2]
    assert kept(logits, top_p=0.75) == [0, 1, 2]
    # top-k first leaves .5, .3125, .1875 of which the first two already hold .8
    assert kept(logits, top_k=3, top_p=0.8) == [0, 1]
    assert kept(logits, min_p=0.3) == [0, 1, 2]
    # a higher temperature flattens before top-p measures
    assert kept(logits, temperature=2.0, top_p=0.75) == [0, 1, 2, 3]
    assert kept(logits, temperature=0.5, top_p=0.75) == [0, 1]


def test_top_p_keeps_the_token_that_crosses():
    logits = np.log(f32(0.5, 0.25, 0.125, 0.125))
    assert kept(logits, top_p=0.49) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.76) == [0, 1, 2]
    assert kept(logits, top_p=0.0) == [0]
    assert kept(logits, top_p=1.0) == [0, 1, 2, 3]


def test_top_p_at_an_exact_boundary_stops():
    logits = np.zeros(4, dtype=np.float32)
    assert kept(logits, top_p=0.25) == [0]
    assert kept(logits, top_p=0.5) == [0, 1]
    assert kept(logits, top_p=np.nextafter(np.float32(0.5), np.float32(1))) == [0, 1, 2]


def test_ties_at_the_top_k_boundary_keep_the_lowest_ids():
    logits = f32(1, 2, 1, 2, 1, 0)
    assert kept(logits, top_k=3) == [0, 1, 3]
    assert kept(logits, top_k=1) == [1]
    assert kept(f32(-0.0, 0.0, -0.0), top_k=2) == [0, 1]


def test_min_p_is_relative_to_the_most_probable():
    logits = np.log(f32(0.5, 0.3, 0.14, 0.06))
    assert kept(logits, min_p=0.25) == [0, 1, 2]
    assert kept(logits, min_p=0.3) == [0, 1]
    assert kept(f32(0, 0, -1e-7), min_p=1.0) == [0, 1]
    assert kept(f32(0, -60, -80), min_p=1e-30) == [0, 1]


def test_exp32_is_accurate():
    z = np.linspace(-86, 0, 400_001, dtype=np.float32)
    assert np.all(np.abs(transforms.exp32(z) / np.exp(z.astype(np.float64)) - 1) < 2.4e-7)
    assert transforms.exp32(f32(0, -0.0, -86.01, -1e30, -INF)).tolist() == [1, 1, 0, 0, 0]


def test_masked_tokens_are_never_drawn():
    logits = f32(-INF, 0, -INF, 0, -INF)
    drawn = {
        transforms.sample(logits, temperature=t, seed=1, position=i) for t in (0.0, 1e-6, 1.0, 1e6) for i in range(50)
    }
    assert drawn == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1e-37, 1.0, 1e38])
def test_rows_without_a_distribution(temperature):
    draw = {"temperature": temperature, "seed": 1, "position": 1}
    assert transforms.sample(f32(0, math.nan, 1), **draw) == NOT_FINITE
    assert transforms.sample(f32(0, INF, 1), **draw) == NOT_FINITE
    assert transforms.sample(f32(-INF, -INF), **draw) == NOTHING_ALLOWED
    assert transforms.sample(f32(-3e38, 3e38), **draw) in (0, 1)


def test_tiny_temperature_still_tells_close_logits_apart():
    """Neighbours near 31.9 at 1.9e-6: a ratio of e, which dividing unshifted makes 1 or e^2."""
    low = np.float32(31.9)
    logits = np.array([low, np.nextafter(low, np.float32(32))])
    p = reference.softmax(logits.astype(np.float64) / np.float64(np.float32(1.9e-6)))
    tokens = [transforms.sample(logits, temperature=1.9e-6, seed=3, position=i) for i in range(1000)]
    assert reference.chi_square_score(tokens, p) < 4


def test_draws_depend_on_seed_and_position_alone():
    logits = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    first = [transforms.sample(logits, temperature=1.5, seed=9, position=i) for i in range(40)]
    again = [transforms.sample(logits, temperature=1.5, seed=9, position=i) for i in reversed(range(40))]
    other = [transforms.sample(logits, temperature=1.5, seed=8, position=i) for i in range(40)]
    assert first == again[::-1]
    assert first != other


@given(logit_rows, st.integers(0, 39), st.integers(1, 10))
def test_logprobs_equal_log_softmax(logits, chosen, top):
    chosen %= logits.size
    top = min(top, logits.size)
    result = transforms.top_logprobs(logits, top, chosen)
    exact = reference.log_softmax(logits)
    order = sorted(range(logits.size), key=lambda i: (-logits[i], i))[:top]
    assert result.ids.tolist() == order
    np.testing.assert_allclose(result.logprobs, exact[order], rtol=2e-7, atol=3e-7)
    assert result.chosen == pytest.approx(exact[chosen], rel=2e-7, abs=3e-7)


def test_log_mass():
    for total in (1, 3, 2**40, 2**40 + 2**17, 3 * 2**40 // 2, 151936 * 2**40):
        exact = math.log(total) - 40 * math.log(2)
        assert transforms.log_mass(total) == pytest.approx(exact, rel=4e-16, abs=1e-14)
    assert transforms.log_mass(2**40) == 0.0
