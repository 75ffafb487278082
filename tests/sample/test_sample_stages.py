"""typical-p and the order of transforms: against the definitions in float64, and that wrong ones would be noticed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from forerun import _native
from forerun.constrain import bits
from forerun.sample import NOTHING_ALLOWED, LogitEdits, SamplingParams, arrays, transforms
from forerun.sample.arrays import LateEdits, order_code
from forerun.sample.masks import Masks
from forerun.sample.params import STAGES, Stage
from reference import native
from reference import sampling as reference

SIX = np.log(np.array([0.40, 0.25, 0.15, 0.10, 0.06, 0.04], dtype=np.float32))
WARPERS = STAGES[1:]


def kept(logits: np.ndarray, temperature: float = 1.0, **knobs: Any) -> list[int]:
    return np.flatnonzero(transforms.transformed(logits, temperature=temperature, **knobs) > -math.inf).tolist()


def edits_of(changes: dict[int, tuple[float, float, float, float]]) -> LateEdits:
    """Bias, factor, what is subtracted by count and by presence, of each token."""
    columns = np.array(list(changes.values()), dtype=np.float32).reshape(-1, 4).T
    return LateEdits(np.array(list(changes), dtype=np.int32), *(np.ascontiguousarray(column) for column in columns))


logit_rows = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=30).map(lambda row: np.array(row, np.float32))
share = st.floats(0.015625, 1, width=32)
changes = st.dictionaries(
    st.integers(0, 29),
    st.tuples(
        st.floats(-3, 3, width=32), st.floats(0.5, 2, width=32), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32)
    ),
    max_size=8,
)


@given(
    logit_rows,
    st.floats(0.75, 4, width=32),
    st.integers(0, 31),
    st.just(1.0) | share,
    st.just(0.0) | st.floats(0, 0.5, width=32),
    st.just(1.0) | share,
    st.permutations(STAGES),
    changes,
)
def test_what_is_left_equals_the_definitions(logits, temperature, top_k, top_p, min_p, typical_p, order, changes):
    edits = edits_of({token: change for token, change in changes.items() if token < len(logits)})
    knobs = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "typical_p": typical_p, "order": order, "edits": edits}
    expected = reference.probabilities(logits, temperature=temperature, **knobs)
    assume(expected.margin > 1e-4)
    found = transforms.transformed(logits, temperature=temperature, **knobs)
    # z beyond this has no mass, and typical-p takes it out.
    assume(expected.probabilities[expected.probabilities > 0].min() > 1e-11)
    assert np.flatnonzero(found > -math.inf).tolist() == np.flatnonzero(expected.probabilities > 0).tolist()
    np.testing.assert_allclose(reference.softmax(found), expected.probabilities, rtol=1e-4, atol=1e-7)


@given(logit_rows, st.floats(0.75, 4, width=32), st.just(0.0) | share)
def test_typical_p_always_leaves_a_token(logits, temperature, typical_p):
    z = transforms.transformed(logits, temperature=temperature, typical_p=typical_p)
    assert z.max() == 0


def test_typical_p_by_hand():
    """Entropy 1.525, surprises .916, 1.386, 1.897, 2.303, 2.813, 3.219: nearest is token 1, then 2, 0, 3."""
    assert kept(SIX, typical_p=0.2) == [1]
    assert kept(SIX, typical_p=0.26) == [1, 2]
    assert kept(SIX, typical_p=0.41) == [0, 1, 2]
    assert kept(SIX, typical_p=0.81) == [0, 1, 2, 3]
    assert kept(SIX, typical_p=0.0) == [1]
    assert kept(SIX, typical_p=1.0) == [0, 1, 2, 3, 4, 5]


def test_typical_p_ties_are_decided_by_id():
    assert kept(np.zeros(4, np.float32), typical_p=0.5) == [0, 1]
    assert kept(np.array([0, -1, 0, -1, 0], np.float32), typical_p=0.1) == [0]


def test_min_p_after_typical_p_is_relative_to_what_is_left():
    order: tuple[Stage, ...] = ("typical_p", "min_p")
    assert kept(SIX, typical_p=0.26, min_p=0.7, order=order) == [1]
    assert kept(SIX, typical_p=0.26, min_p=0.59, order=order) == [1, 2]


def test_stages_do_not_commute():
    """For each pair of stages some row shows which came first; but temperature and min-p don't meet top-k."""
    rows = [(np.random.default_rng(seed).standard_normal(12) * 2).astype(np.float32) for seed in range(300)]
    knobs = {"top_k": 5, "top_p": 0.7, "min_p": 0.2, "typical_p": 0.6, "temperature": 1.8}
    edits = edits_of(dict.fromkeys(range(0, 12, 2), (0, 1.7, 0.3, 0.2)))
    for a, b in itertools.combinations(STAGES, 2):
        if {a, b} in ({"temperature", "top_k"}, {"top_k", "min_p"}):
            continue
        assert any(
            kept(row, **knobs, edits=edits, order=(a, b)) != kept(row, **knobs, edits=edits, order=(b, a))
            or not np.array_equal(
                transforms.transformed(row, **knobs, edits=edits, order=(a, b)),
                transforms.transformed(row, **knobs, edits=edits, order=(b, a)),
            )
            for row in rows
        ), (a, b)


def test_the_default_order_is_hugging_faces():
    assert STAGES == ("penalties", "temperature", "top_k", "top_p", "min_p", "typical_p")
    assert order_code(STAGES) == 0x654321
    row = (np.random.default_rng(3).standard_normal(40) * 3).astype(np.float32)
    knobs = {"temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.03, "typical_p": 0.8}
    explicit = transforms.transformed(row, **knobs, order=STAGES)
    assert np.array_equal(explicit, transforms.transformed(row, **knobs))


@pytest.mark.parametrize("order", [*itertools.permutations(WARPERS)][::7], ids=str)
def test_the_kernel_runs_the_order_that_params_ask_for(order):
    """From `SamplingParams` to the token, through the arrays that the engine passes."""
    rng = np.random.default_rng(11)
    rows = (rng.standard_normal((40, 300)) * 3).astype(np.float32)
    knobs = {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.7}
    place = int(rng.integers(0, 6))
    params = SamplingParams(**knobs, frequency_penalty=1.5, order=(*order[:place], "penalties", *order[place:]))
    output = [int(row.argmax()) for row in rows[:20]]
    edits = LogitEdits.of(params, [], [])
    assert edits is not None
    edits.append(output)
    for position, row in enumerate(rows):
        logits = row.copy()
        edits.apply(logits)
        late = edits.late()
        spec = arrays.SpecArrays.of([params], [5], [position], [late])
        token = _native.sample(logits[None], np.zeros(1, np.int32), *spec, *Masks.none(1))[0]
        everything = LateEdits(*(np.array(c) for c in late)) if late else None
        expected = transforms.sample(
            logits, seed=5, position=position, **knobs, order=params.late_order or WARPERS, edits=everything
        )
        assert token == expected
        assert (late is None) == (place == 0)


def test_greedy_takes_the_largest_logit_that_the_penalties_leave_in_any_order():
    for order in (STAGES, ("top_k", "temperature", "penalties")):
        params = SamplingParams(temperature=0, top_k=1, logit_bias={0: -3}, order=order)
        edits = LogitEdits.of(params, [], [])
        assert edits is not None
        logits = SIX.copy()
        edits.apply(logits)
        assert edits.late() is None
        spec = arrays.SpecArrays.of([params], [0], [0], [edits.late()])
        assert _native.sample(logits[None], np.zeros(1, np.int32), *spec, *Masks.none(1)).tolist() == [1]


# -- masks


@pytest.mark.parametrize("V", [1, 31, 32, 33, 63, 64, 65, 200])
def test_masks_are_packed_low_bits_first(V):
    rng = np.random.default_rng(V)
    allowed = rng.random((5, V)) < 0.4
    words = bits.pack(allowed)
    assert words.shape == (5, bits.mask_width(V))
    assert words.dtype == np.uint32
    for row, mask in zip(allowed, words, strict=True):
        assert row.tolist() == [bool(int(mask[t // 32]) >> t % 32 & 1) for t in range(V)]
        assert sum(int(word).bit_count() for word in mask) == row.sum()
        assert np.array_equal(bits.mask_of(np.flatnonzero(row).tolist(), V), mask)
    assert np.array_equal(bits.unpack(words, V), allowed)


@pytest.mark.parametrize("isa", _native.sample_isas())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_what_the_mask_allows_is_chosen(isa, temperature):
    rng = np.random.default_rng(4)
    logits = (rng.standard_normal((1, 131)) * 3).astype(np.float32)
    for token in range(131):
        only = Masks(bits.mask_of([token], 131)[None], np.zeros(1, np.int32))
        assert native.sample(logits, [0], masks=only, temperature=temperature, isa=isa)[0] == token
    nothing = Masks(np.zeros((1, 5), np.uint32), np.zeros(1, np.int32))
    assert native.sample(logits, [0], masks=nothing, temperature=temperature, isa=isa)[0] == NOTHING_ALLOWED


def test_bits_past_the_vocabulary_are_never_read():
    logits = np.zeros((1, 33), np.float32)
    words = np.array([[0, 0xFFFF_FFFE]], np.uint32)
    assert native.sample(logits, [0], masks=Masks(words, np.zeros(1, np.int32)))[0] == NOTHING_ALLOWED


def test_what_a_mask_forbids_may_be_no_number():
    logits = np.array([[np.nan, 1, np.inf, 0]], np.float32)
    only = Masks(bits.mask_of([1, 3], 4)[None], np.zeros(1, np.int32))
    assert set(native.sample(logits, [0] * 50, masks=Masks(only.words, np.zeros(50, np.int32)),
                             position=np.arange(50)).tolist()) == {1, 3}  # fmt: skip


# -- planted faults


def native_disagrees(change: Callable[[dict[str, Any]], None]) -> bool:
    """Whether the kernel, given changed arguments, chooses another token than the definition given the true ones."""
    rng = np.random.default_rng(21)
    for position in range(200):
        logits = (rng.standard_normal(90) * 2).astype(np.float32)
        order: tuple[Stage, ...] = tuple(rng.permutation(WARPERS))
        allowed = rng.random(90) < 0.5
        knobs: dict[str, Any] = {
            "temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_p": 0.05, "typical_p": 0.6, "order": order,
        }  # fmt: skip
        expected = transforms.sample(logits, bits.pack(allowed), seed=9, position=position, **knobs)
        given = {**knobs, "allowed": allowed}
        change(given)
        words = Masks(bits.pack(given.pop("allowed"))[None], np.zeros(1, np.int32))
        given["order"] = order_code(given["order"])
        if native.sample(logits[None], [0], masks=words, seed=9, position=position, **given)[0] != expected:
            return True
    return False


FAULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "order ignored": lambda given: given.update(order=WARPERS),
    "order reversed": lambda given: given.update(order=given["order"][::-1]),
    "typical-p off": lambda given: given.update(typical_p=1.0),
    "typical-p off by a little": lambda given: given.update(typical_p=0.59),
    "mask shifted by one bit": lambda given: given.update(allowed=np.roll(given["allowed"], 1)),
    "mask inverted": lambda given: given.update(allowed=~given["allowed"]),
    "mask ignored": lambda given: given.update(allowed=np.ones(90, dtype=bool)),
}


def test_nothing_planted_nothing_found():
    assert not native_disagrees(lambda _: None)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    assert native_disagrees(FAULTS[fault])


def one_token_too_many(kept: np.ndarray, z: np.ndarray, typical_p: np.float32) -> np.ndarray:
    """The token after the one that crosses is kept, too."""
    distance = np.abs(z + transforms.expected_surprise(z[kept]))
    by_distance = [token for token in np.argsort(distance, kind="stable") if kept[token]]
    found = RIGHT(kept, z, typical_p)
    found[by_distance[: int(found.sum()) + 1]] = True
    return found


def the_crossing_token_goes(kept: np.ndarray, z: np.ndarray, typical_p: np.float32) -> np.ndarray:
    distance = np.abs(z + transforms.expected_surprise(z[kept]))
    found = RIGHT(kept, z, typical_p)
    if found.sum() > 1:
        found[max(np.flatnonzero(found), key=lambda token: distance[token])] = False
    return found


def the_most_probable_first(kept: np.ndarray, z: np.ndarray, typical_p: np.float32) -> np.ndarray:
    return transforms.keep_top_p(kept, transforms.token_order(z), z, typical_p)


RIGHT = transforms.keep_typical


@pytest.mark.parametrize("fault", [one_token_too_many, the_crossing_token_goes, the_most_probable_first])
def test_a_fault_in_typical_p_is_caught(fault, monkeypatch):
    monkeypatch.setattr(transforms, "keep_typical", fault)
    with pytest.raises(AssertionError):
        test_typical_p_by_hand()
    assert native_disagrees(lambda _: None)
