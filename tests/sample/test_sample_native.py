"""The native kernel gives the bits of the NumPy definition, on every instruction set."""

from __future__ import annotations

import dataclasses
import itertools
import time

import numpy as np
import pytest

from forerun import _native
from forerun.sample import NOT_FINITE, NOTHING_ALLOWED, noise, transforms
from forerun.sample.arrays import SpecArrays, order_code
from forerun.sample.masks import Masks
from forerun.sample.params import STAGES
from reference import native
from reference.rows import (
    random_late_edits,
    random_logits,
    random_masks,
    random_orders,
    random_typical_p,
    stages_of,
)

ISAS = _native.sample_isas()
TEMPERATURES = [0.0, 1e-37, 1e-6, 0.1, 0.7, 1.0, 1.7, 30.0, 1e6, 3e38]


@dataclasses.dataclass(frozen=True)
class Rows:
    """Arguments of the native `sample` for all rows of `logits` in turn, one entry a row."""

    logits: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    typical_p: np.ndarray
    order: np.ndarray
    seed: np.ndarray
    position: np.ndarray
    late: np.ndarray
    masks: np.ndarray
    mask_rows: np.ndarray

    def spec(self) -> SpecArrays:
        """The rows' parameters."""
        knobs = {name: getattr(self, name) for name in SpecArrays._fields[:8]}
        return native.spec(len(self.logits), **knobs, late=list(self.late))

    def arguments(self) -> tuple[np.ndarray, ...]:
        rows = np.arange(len(self.logits), dtype=np.int32)
        return (self.logits, rows, *self.spec(), self.masks, self.mask_rows)

    def mask(self, r: int) -> np.ndarray | None:
        return None if self.mask_rows[r] < 0 else self.masks[self.mask_rows[r]]

    def taken(self, rows: np.ndarray | slice) -> Rows:
        """The same arguments for some of the rows, copied."""
        columns = {f.name: np.ascontiguousarray(getattr(self, f.name)[rows]) for f in dataclasses.fields(self)}
        return Rows(**{**columns, "masks": self.masks})

    def defined(self) -> list[int]:
        """What the NumPy definition draws."""
        return [
            transforms.sample(
                self.logits[r],
                self.mask(r),
                temperature=float(self.temperature[r]),
                top_k=int(self.top_k[r]),
                top_p=float(self.top_p[r]),
                min_p=float(self.min_p[r]),
                typical_p=float(self.typical_p[r]),
                order=stages_of(int(self.order[r])),
                edits=self.late[r],
                seed=int(self.seed[r]),
                position=int(self.position[r]),
            )
            for r in range(len(self.logits))
        ]


def no_edits(n: int) -> np.ndarray:
    return np.full(n, None, dtype=object)


def rows_of(
    logits: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0, order=STAGES, seed=0
) -> Rows:
    n = len(logits)
    return Rows(
        np.ascontiguousarray(logits, dtype=np.float32),
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int32),
        np.full(n, top_p, np.float32),
        np.full(n, min_p, np.float32),
        np.full(n, typical_p, np.float32),
        np.full(n, 0 if order == STAGES else order_code(order), np.uint32),
        np.full(n, seed, np.uint64),
        np.arange(n, dtype=np.int64),
        no_edits(n),
        *Masks.none(n),
    )


def every_row(logits: np.ndarray) -> np.ndarray:
    return np.arange(len(logits), dtype=np.int32)


def random_rows(rng: np.random.Generator, n: int, V: int) -> Rows:
    edges = np.array([1, 2, 3, 40, 64, V // 2, V - 1, V, V + 1, 2**31 - 1]).clip(1)
    return Rows(
        random_logits(rng, n, V),
        rng.choice(np.array(TEMPERATURES, np.float32), n),
        np.where(rng.random(n) < 0.4, 0, rng.choice(edges, n)).astype(np.int32),
        np.where(rng.random(n) < 0.4, 1, rng.choice([0, 1e-9, 0.3, 0.5, 0.9, 0.99, 1 - 2**-24], n)).astype(np.float32),
        np.where(rng.random(n) < 0.5, 0, rng.choice([1e-30, 0.01, 0.1, 0.5, 1], n)).astype(np.float32),
        random_typical_p(rng, n),
        random_orders(rng, n),
        rng.integers(0, 2**64, n, dtype=np.uint64),
        rng.integers(0, 2**40, n),
        random_late_edits(rng, n, V),
        *random_masks(rng, n, V),
    )


def assert_native_equals_definition(rows: Rows) -> None:
    expected = rows.defined()
    for isa in ISAS:
        drawn = _native.sample(*rows.arguments(), isa=isa)
        assert drawn.dtype == np.int32
        wrong = np.flatnonzero(drawn != expected)
        assert wrong.size == 0, (isa, wrong[:3], drawn[wrong[:3]], np.array(expected)[wrong[:3]])


@pytest.mark.parametrize("V", [1, 2, 7, 63, 64, 65, 128, 300, 1000, 4097])
def test_random_cases_equal_the_definition(V):
    rng = np.random.default_rng(V)
    assert_native_equals_definition(random_rows(rng, 500 if V < 500 else 150, V))


@pytest.mark.slow
def test_a_hundred_thousand_cases_equal_the_definition():
    rng = np.random.default_rng(1)
    for V, _ in itertools.product([1, 5, 64, 130, 777], range(20)):
        assert_native_equals_definition(random_rows(rng, 1000, V))


@pytest.mark.parametrize("V", [49152, 151936, 262144])
def test_vocabularies_of_real_models_equal_the_definition(V):
    assert_native_equals_definition(random_rows(np.random.default_rng(V), 6, V))


def test_many_masses_in_one_histogram_bin():
    """Nearly equal logits make top-p halve a bin that holds the whole vocabulary."""
    logits = np.random.default_rng(0).standard_normal((6, 20_000)).astype(np.float32) * 1e-3
    rows = rows_of(logits, top_p=0.5)
    rows.top_p[:] = [0.001, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24]
    assert_native_equals_definition(rows)


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75])
def test_top_p_boundary_on_a_token_of_equal_logits(top_p):
    """The mass of a whole number of tokens is reached exactly: the next one stays out."""
    rows = rows_of(np.zeros((300, 128)), top_p=top_p)
    assert_native_equals_definition(rows)
    assert max(_native.sample(*rows.arguments())) < 128 * top_p


def test_top_p_boundary_between_histogram_bins():
    """Pairs of logits (0, z) with a float32 top_p whose share is the first token's to the bit."""
    z = np.linspace(-1.2, -0.5, 1_000_000, dtype=np.float32)
    first = 2**40
    total = first + transforms.mass(transforms.exp32(z))
    top_p = (first / total).astype(np.float32)
    exact = np.ceil(top_p.astype(np.float64) * total) == first
    assert exact.sum() > 2
    for pair_z, pair_p in zip(z[exact], top_p[exact], strict=True):
        rows = rows_of(np.tile(np.array([0, pair_z], np.float32), (50, 1)), top_p=pair_p)
        assert_native_equals_definition(rows)
        assert not _native.sample(*rows.arguments()).any()


def test_noise_equals_the_definition_bit_for_bit():
    rng = np.random.default_rng(2)
    for seed, position, n in [(0, 0, 1), (2**64 - 1, 2**63, 70_001), (7, 123, 200_000)]:
        ids = rng.integers(0, 2**31, n).astype(np.int32)
        expected = noise.gumbel(seed, position, ids).view(np.int32)
        for isa in ISAS:
            found = _native.gumbel(seed, position, ids, isa=isa)
            assert np.array_equal(found.view(np.int32), expected), isa


@pytest.mark.parametrize("V", [1, 64, 100, 5000, 151936])
def test_logprobs_equal_the_definition_bit_for_bit(V):
    rng = np.random.default_rng(V)
    n = 12 if V < 10_000 else 4
    logits = random_logits(rng, n, V)
    logits[1] = np.round(rng.standard_normal(V) * 3)
    if V > 1:
        logits[0, V // 2] = np.nan
    chosen = rng.integers(0, V, n).astype(np.int32)
    most = min(V, 3000)
    faults = [transforms.check_row(row) for row in logits]
    expected = [
        None if fault else transforms.top_logprobs(row, most, int(token))
        for row, token, fault in zip(logits, chosen, faults, strict=True)
    ]
    for top, isa in itertools.product({0, 1, min(20, V), most}, ISAS):
        ids, logprobs, of_chosen = _native.top_logprobs(logits, every_row(logits), top, chosen, isa=isa)
        assert (ids.dtype, logprobs.dtype, of_chosen.dtype) == (np.int32, np.float32, np.float32)
        assert ids.shape == logprobs.shape == (n, top)
        for r, row in enumerate(expected):
            if row is None:
                assert np.all(ids[r] == -1)
                assert np.isnan(logprobs[r]).all()
                assert np.isnan(of_chosen[r])
                continue
            assert ids[r].tolist() == row.ids[:top].tolist()
            found = logprobs[r].view(np.int32)
            assert np.array_equal(found, row.logprobs[:top].view(np.int32))
            assert of_chosen[r] == row.chosen


def test_a_row_is_independent_of_its_neighbours():
    rows = random_rows(np.random.default_rng(5), 60, 333)
    together = _native.sample(*rows.arguments())
    alone = [_native.sample(*rows.taken(slice(r, r + 1)).arguments())[0] for r in range(60)]
    assert together.tolist() == alone
    order = np.random.default_rng(6).permutation(60)
    shuffled = _native.sample(*rows.taken(order).arguments())
    assert shuffled.tolist() == together[order].tolist()


@pytest.mark.parametrize("picked", [[], [59], [3, 58, 0, 17], [7, 7, 7], list(range(60))], ids=str)
def test_some_rows_of_one_array_are_sampled_in_place(picked):
    """`rows` says which row of the logits each entry of the other arguments is about; a row may serve twice."""
    rows = random_rows(np.random.default_rng(5), 60, 333)
    index = np.array(picked, np.int32)
    expected = rows.taken(index)
    for isa in ISAS:
        drawn = _native.sample(rows.logits, index, *expected.arguments()[2:], isa=isa)
        assert drawn.tolist() == expected.defined()


@pytest.mark.parametrize("picked", [[], [11], [9, 2, 2, 0]], ids=str)
def test_log_probabilities_of_some_rows_of_one_array(picked):
    logits = np.random.default_rng(8).standard_normal((12, 200)).astype(np.float32)
    index = np.array(picked, np.int32)
    chosen = np.arange(len(picked), dtype=np.int32)
    for isa in ISAS:
        ids, logprobs, of_chosen = _native.top_logprobs(logits, index, 5, chosen, isa=isa)
        for r, row in enumerate(picked):
            expected = transforms.top_logprobs(logits[row], 5, r)
            assert ids[r].tolist() == expected.ids.tolist()
            assert np.array_equal(logprobs[r].view(np.int32), expected.logprobs.view(np.int32))
            assert of_chosen[r] == expected.chosen
        assert ids.shape == logprobs.shape == (len(picked), 5)


@pytest.mark.parametrize("wrong", [-1, 3, 2**31 - 1, -(2**31)])
def test_rows_outside_the_logits_are_refused(wrong):
    good = rows_of(np.zeros((3, 5)))
    index = np.array([0, wrong, 1], np.int32)
    with pytest.raises(ValueError, match=rf"rows\[1\] is {wrong}, outside the 3 rows of logits"):
        _native.sample(good.logits, index, *good.arguments()[2:])
    with pytest.raises(ValueError, match=rf"rows\[1\] is {wrong}, outside the 3 rows of logits"):
        _native.top_logprobs(good.logits, index, 1, np.zeros(3, np.int32))


def test_greedy_takes_the_lowest_id_on_ties():
    logits = np.full((3, 200), -5, np.float32)
    logits[0, [70, 130]] = 2
    logits[1, [0, 199]] = 2
    logits[2, 10:] = [-0.0, 0.0] * 95
    assert _native.sample(*rows_of(logits, temperature=0).arguments()).tolist() == [70, 0, 10]


@pytest.mark.parametrize("V", [1, 64, 100])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fault", [np.nan, -np.nan, np.inf])
def test_faults_are_reported_wherever_they_are(V, temperature, fault):
    rows = rows_of(np.zeros((V, V), np.float32), temperature=temperature)
    rows.logits[np.arange(V), np.arange(V)] = fault
    for isa in ISAS:
        assert set(_native.sample(*rows.arguments(), isa=isa).tolist()) == {NOT_FINITE}
        rows.logits[0] = -np.inf
        assert _native.sample(*rows.arguments(), isa=isa)[0] == NOTHING_ALLOWED
        rows.logits[0, 0] = fault


def test_no_rows_and_no_columns():
    assert _native.sample(*rows_of(np.zeros((0, 5))).arguments()).shape == (0,)
    assert _native.sample(*rows_of(np.zeros((2, 0))).arguments()).tolist() == [NOTHING_ALLOWED] * 2


def test_wrong_arguments_are_refused():
    good = rows_of(np.zeros((2, 5)))
    for index in (*range(2, 10), 17):
        arguments = list(good.arguments())
        arguments[index] = arguments[index][:1]
        with pytest.raises(ValueError, match="1 entries for 2 rows"):
            _native.sample(*arguments)
    with pytest.raises(TypeError):
        _native.sample(good.logits, np.arange(2), *good.arguments()[2:])
    with pytest.raises(TypeError):
        _native.sample(good.logits.astype(np.float64), *good.arguments()[1:])
    with pytest.raises(TypeError):
        _native.sample(good.logits[0], *good.arguments()[1:])
    with pytest.raises(ValueError, match="unknown instruction set: sse"):
        _native.sample(*good.arguments(), isa="sse")
    chosen = np.array([0, 5], np.int32)
    with pytest.raises(ValueError, match=r"chosen\[1\] is 5, outside the vocabulary of 5 tokens"):
        _native.top_logprobs(good.logits, every_row(good.logits), 1, chosen)
    with pytest.raises(ValueError, match="top must be"):
        _native.top_logprobs(good.logits, every_row(good.logits), 6, chosen[:1].repeat(2))
    with pytest.raises(ValueError, match="chosen has 1 entries for 2 rows"):
        _native.top_logprobs(good.logits, every_row(good.logits), 1, chosen[:1])


OUT_OF_RANGE = [
    *(("temperature", value, "nan|inf|-0.1") for value in (np.nan, np.inf, -np.inf, -0.1)),
    *(("top_k", value, str(value)) for value in (-1, -(2**31))),
    *(
        (name, value, "nan|inf|1.5|-0.1")
        for name in ("top_p", "min_p", "typical_p")
        for value in (np.nan, np.inf, 1.5, -0.1)
    ),
    *(("order", value, str(value)) for value in (7, 0x77, 0x101, 0x23423, 0xF, 0x20, 2**32 - 1)),
]


@pytest.mark.parametrize(("name", "value", "said"), OUT_OF_RANGE)
def test_parameters_outside_their_range_are_refused(name, value, said):
    """They would leave no token to draw: the kernel used to answer with one outside the vocabulary."""
    rows = rows_of(np.random.default_rng(0).standard_normal((3, 100)))
    column = getattr(rows, name)
    before = column[1]
    for isa in ISAS:
        column[1] = value
        with pytest.raises(ValueError, match=rf"^{name}\[1\] is (?:-?)(?:{said})\d*; it must be "):
            _native.sample(*rows.arguments(), isa=isa)
        column[1] = before
        assert set(_native.sample(*rows.arguments(), isa=isa).tolist()) <= set(range(100))


def test_the_ends_of_each_range_are_allowed():
    rows = rows_of(np.random.default_rng(0).standard_normal((6, 100)))
    rows.temperature[:3] = [0, np.finfo(np.float32).tiny, np.finfo(np.float32).max]
    rows.top_k[:2] = [0, 2**31 - 1]
    rows.top_p[:2] = [0, 1]
    rows.min_p[:] = [0, 1, 1, 1, 1, 0]
    assert_native_equals_definition(rows)


def test_speed_at_a_large_vocabulary():
    """Far above the measured 0.1 to 0.6 ms, so that only a lost algorithm fails."""
    logits = np.random.default_rng(0).standard_normal((1, 151936)).astype(np.float32) * 3
    logits[0, :40] += 12
    for knobs in ({}, {"top_k": 50, "top_p": 0.9}, {"top_p": 0.9}):
        arguments = rows_of(logits, **knobs).arguments()
        times = []
        for _ in range(15):
            start = time.perf_counter()
            _native.sample(*arguments)
            times.append(time.perf_counter() - start)
        assert min(times) < 5e-3, knobs
