"""The native kernel decides as the NumPy definition does, on every instruction set."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from forerun import _native
from forerun.constrain.bits import pack, unpack
from forerun.sample import NOT_FINITE, NOTHING_ALLOWED, transforms
from forerun.sample.arrays import LateEdits, SpecArrays
from forerun.sample.masks import Masks
from forerun.verify import node, rejection
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
class Nodes:
    """Arguments of the native `reject`, one entry a node but for the children."""

    logits: np.ndarray
    rows: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    typical_p: np.ndarray
    order: np.ndarray
    seed: np.ndarray
    position: np.ndarray
    late: np.ndarray
    child_start: np.ndarray
    child_tokens: np.ndarray
    q: np.ndarray
    child_q: np.ndarray
    masks: np.ndarray
    mask_rows: np.ndarray

    def spec(self) -> SpecArrays:
        """The nodes' parameters."""
        knobs = {name: getattr(self, name) for name in SpecArrays._fields[:8]}
        return native.spec(len(self.rows), **knobs, late=list(self.late))

    def arguments(self) -> tuple[np.ndarray, ...]:
        children = (self.child_start, self.child_tokens, self.q, self.child_q)
        return (self.logits, self.rows, *self.spec(), *children, self.masks, self.mask_rows)

    def mask(self, r: int) -> np.ndarray | None:
        return None if self.mask_rows[r] < 0 else self.masks[self.mask_rows[r]]

    def only(self, r: int) -> Nodes:
        """The nodes without all but one, its logits and q where they were."""
        first, last = self.child_start[r : r + 2]
        columns = {f.name: getattr(self, f.name)[r : r + 1] for f in dataclasses.fields(self)}
        return Nodes(**{
            **columns,
            "logits": self.logits,
            "q": self.q,
            "masks": self.masks,
            "child_start": np.array([0, last - first], np.int32),
            "child_tokens": self.child_tokens[first:last],
            "child_q": self.child_q[first:last],
        })  # fmt: skip

    def defined(self, **changes: object) -> list[node.NodeChoice]:
        """What the NumPy definition decides."""
        return [
            node.reject(
                self.logits[self.rows[r]],
                self.mask(r),
                **{
                    "temperature": float(self.temperature[r]),
                    "top_k": int(self.top_k[r]),
                    "top_p": float(self.top_p[r]),
                    "min_p": float(self.min_p[r]),
                    "typical_p": float(self.typical_p[r]),
                    "order": stages_of(int(self.order[r])),
                    "edits": self.late[r],
                    "seed": int(self.seed[r]),
                    "position": int(self.position[r]),
                    "children": self.child_tokens[first:last].tolist(),
                    "q": [None if i < 0 else self.q[i] for i in self.child_q[first:last]],
                    **changes,
                },
            )
            for r, (first, last) in enumerate(zip(self.child_start[:-1], self.child_start[1:], strict=True))
        ]


def random_q(rng: np.random.Generator, logits: np.ndarray, temperature: float) -> np.ndarray:
    """A drafter's row: near the target, far from it, its equal, with zeros, one-hot, or no distribution at all."""
    V, kind = logits.size, rng.integers(0, 9)
    near = np.nan_to_num(logits, nan=0, posinf=0, neginf=-30).clip(-1e4, 1e4)
    spread = [0, 0.1, 1, 3][rng.integers(0, 4)]
    with np.errstate(over="ignore"):
        z = ((near - near.max()) / np.float32(temperature or 1)).clip(-80, 0)
    q = np.exp(z + spread * rng.standard_normal(V).astype(np.float32))
    if kind == 1:
        q = np.where(rng.random(V) < 0.7, 0, q)
    elif kind == 2:
        q = np.where(np.arange(V) == rng.integers(0, V), 1, 0)
    elif kind == 3:
        q = rng.choice([0, 0.5, 1.5, -1, np.nan, np.inf, -np.inf, 1e-30], V)
        return q.astype(np.float32)
    elif kind == 4:
        return np.zeros(V, np.float32)
    elif kind == 5:
        q = rng.random(V)
    total = q.sum()
    return (q / (total if total > 0 else 1)).astype(np.float32)


def random_nodes(rng: np.random.Generator, n: int, V: int) -> Nodes:
    edges = np.array([1, 2, 3, 40, 64, V // 2, V - 1, V, V + 1, 2**31 - 1]).clip(1)
    logits = random_logits(rng, n, V)
    temperature = rng.choice(np.array(TEMPERATURES, np.float32), n)
    rows = rng.permutation(n).astype(np.int32)
    start, tokens, q, child_q = [0], [], [], []
    for r in range(n):
        count = int(rng.choice([0, 1, 1, 2, 3, 6]))
        q_row = random_q(rng, logits[rows[r]], temperature[r])
        law = np.nan_to_num(q_row.astype(np.float64), nan=0, posinf=0, neginf=0).clip(0) + 1e-12
        kind = rng.integers(0, 4)
        finite = np.nan_to_num(logits[rows[r]], nan=-3e38, posinf=3e38, neginf=-3e38)
        for _ in range(count):
            likely = rng.random()
            if likely < 0.4:
                token = int(np.argpartition(-finite, min(3, V - 1))[: min(4, V)][rng.integers(0, min(4, V))])
            elif likely < 0.8:
                token = int(rng.choice(V, p=law / law.sum()))
            else:
                token = int(rng.integers(0, V))
            tokens.append(token)
            if kind == 0 or (kind == 1 and rng.random() < 0.5):
                child_q.append(-1)
            else:
                child_q.append(len(q))
                q.append(q_row if rng.random() < 0.9 else random_q(rng, logits[rows[r]], temperature[r]))
        start.append(len(tokens))
    masks, mask_rows = random_masks(rng, n, V)
    return Nodes(
        logits,
        rows,
        temperature,
        np.where(rng.random(n) < 0.5, 0, rng.choice(edges, n)).astype(np.int32),
        np.where(rng.random(n) < 0.5, 1, rng.choice([0, 1e-9, 0.3, 0.5, 0.9, 0.99, 1 - 2**-24], n)).astype(np.float32),
        np.where(rng.random(n) < 0.6, 0, rng.choice([1e-30, 0.01, 0.1, 0.5, 1], n)).astype(np.float32),
        random_typical_p(rng, n),
        random_orders(rng, n),
        rng.integers(0, 2**64, n, dtype=np.uint64),
        rng.integers(0, 2**40, n),
        random_late_edits(rng, n, V),
        np.array(start, np.int32),
        np.array(tokens, np.int32),
        np.array(q, np.float32).reshape(-1, V),
        np.array(child_q, np.int32),
        masks,
        mask_rows,
    )


def decided(nodes: Nodes, isa: str = "auto") -> list[tuple[int, int]]:
    choice, token = _native.reject(*nodes.arguments(), isa=isa)
    assert (choice.dtype, token.dtype) == (np.int32, np.int32)
    return list(zip(choice.tolist(), token.tolist(), strict=True))


def assert_native_equals_definition(nodes: Nodes) -> list[node.NodeChoice]:
    expected = nodes.defined()
    for isa in ISAS:
        found = decided(nodes, isa)
        wrong = [(r, a, tuple(b)) for r, (a, b) in enumerate(zip(found, expected, strict=True)) if a != tuple(b)]
        assert not wrong, (isa, wrong[:3])
    return expected


@pytest.mark.parametrize("V", [1, 2, 7, 63, 64, 65, 130, 1000])
def test_random_nodes_equal_the_definition(V):
    expected = assert_native_equals_definition(random_nodes(np.random.default_rng(V), 300, V))
    if V > 2:
        assert {choice.choice for choice in expected} >= {-1, 0, 1, 2}


@pytest.mark.slow
def test_twenty_thousand_nodes_equal_the_definition():
    rng = np.random.default_rng(1)
    for V in [1, 3, 5, 64, 130, 777]:
        for _ in range(7):
            assert_native_equals_definition(random_nodes(rng, 500, V))


@pytest.mark.parametrize("V", [49152, 262144])
def test_vocabularies_of_real_models_equal_the_definition(V):
    assert_native_equals_definition(random_nodes(np.random.default_rng(V), 10, V))


def test_close_distributions_equal_the_definition():
    """p and q that differ by roundings: residuals of few units, or none."""
    rng = np.random.default_rng(3)
    nodes = random_nodes(rng, 400, 40)
    nodes.logits[:] = rng.standard_normal(nodes.logits.shape)
    nodes.temperature[:], nodes.top_k[:], nodes.top_p[:], nodes.min_p[:] = 1, 0, 1, 0
    for r in range(400):
        p = transforms.exp32(node.scores(nodes.logits[nodes.rows[r]], temperature=1))
        for c in range(nodes.child_start[r], nodes.child_start[r + 1]):
            if nodes.child_q[c] >= 0:
                noise = np.float32(1) + np.float32(1e-7) * rng.integers(-2, 3, 40).astype(np.float32)
                nodes.q[nodes.child_q[c]] = p / p.sum() * (noise if c % 2 else 1)
    assert_native_equals_definition(nodes)


FAULTS = {
    "residual of absolute values": ("_residual", lambda w, d: np.abs(_shares(w) - _shares(d)).astype(np.int64)),
    "correction drawn from p": ("_residual", lambda w, _: w),
    "residual not renormalised": ("_residual", lambda w, d: np.maximum(w - d, 0)),
    "q not renormalised": ("_residual", lambda w, d: np.maximum(_shares(w) - d * 2.0**11, 0).astype(np.int64)),
    "q of another temperature": ("_draft_masses", lambda q: _draft_masses(np.sqrt(np.where(q > 0, q, 0)))),
    "draw passes one token late": (
        "_draw",
        lambda w, u: (np.cumsum(w, axis=1) < (u * w.sum(axis=1))[:, None]).sum(axis=1) + 1,
    ),
}


def _shares(masses: np.ndarray) -> np.ndarray:
    return masses / np.maximum(masses.sum(axis=1, keepdims=True), 1) * 2.0**51


_draft_masses = rejection.__globals__["_draft_masses"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_definition_is_seen(fault, monkeypatch):
    """So the comparison would see the same fault in the kernel."""
    nodes = random_nodes(np.random.default_rng(4), 300, 20)
    name, wrong = FAULTS[fault]
    monkeypatch.setitem(rejection.__globals__, name, wrong)
    assert [tuple(choice) for choice in nodes.defined()] != decided(nodes)


@pytest.mark.parametrize(
    "changes",
    [{"position": 7}, {"seed": 7}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"temperature": 0.8}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_parameter_that_is_lost_is_seen(changes):
    nodes = random_nodes(np.random.default_rng(5), 300, 20)
    assert [tuple(choice) for choice in nodes.defined(**changes)] != decided(nodes)


def test_a_node_is_independent_of_its_neighbours():
    nodes = random_nodes(np.random.default_rng(6), 80, 333)
    assert [decided(nodes.only(r))[0] for r in range(80)] == decided(nodes)


def test_logits_are_not_changed():
    nodes = random_nodes(np.random.default_rng(7), 50, 100)
    before = nodes.logits.tobytes(), nodes.q.tobytes()
    decided(nodes)
    assert (nodes.logits.tobytes(), nodes.q.tobytes()) == before


def test_without_children_the_token_is_that_of_plain_sampling():
    nodes = random_nodes(np.random.default_rng(8), 200, 50)
    childless = dataclasses.replace(
        nodes, child_start=np.zeros(201, np.int32), child_tokens=np.empty(0, np.int32), child_q=np.empty(0, np.int32)
    )
    tokens = _native.sample(childless.logits, childless.rows, *childless.spec(), childless.masks, childless.mask_rows)
    assert decided(childless) == [(-1, token) for token in tokens.tolist()]


def test_at_temperature_0_the_highest_logit_is_taken_whatever_q():
    nodes = random_nodes(np.random.default_rng(9), 200, 6)
    nodes.temperature[:] = 0
    nodes.q[:] = 0
    accepted = 0
    for r, (choice, token) in enumerate(decided(nodes)):
        children = nodes.child_tokens[nodes.child_start[r] : nodes.child_start[r + 1]].tolist()
        logits = transforms.masked(nodes.logits[nodes.rows[r]], nodes.mask(r))
        best = transforms.check_row(logits) or int(logits.argmax())
        assert token == best
        assert choice == (children.index(best) if best in children else -1)
        accepted += choice >= 0
    assert accepted > 20


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
def test_scores_that_are_no_numbers_are_reported(fault):
    nodes = random_nodes(np.random.default_rng(10), 60, 30)
    nodes.logits[:] = fault
    nodes.mask_rows[:] = -1
    expected = NOTHING_ALLOWED if fault == -np.inf else NOT_FINITE
    for isa in ISAS:
        assert decided(nodes, isa) == [(-1, expected)] * 60


def test_what_a_mask_forbids_is_neither_accepted_nor_drawn():
    nodes = random_nodes(np.random.default_rng(14), 300, 70)
    masked = 0
    for isa in ISAS:
        for r, (choice, token) in enumerate(decided(nodes, isa)):
            mask = nodes.mask(r)
            if mask is None or token < 0:
                continue
            assert unpack(mask, 70)[token]
            masked += choice >= 0
    assert masked > 20


def test_a_mask_off_by_one_bit_is_caught():
    nodes = random_nodes(np.random.default_rng(15), 100, 70)
    shifted = dataclasses.replace(nodes, masks=pack(np.roll(unpack(nodes.masks, 70), 1, axis=1)))
    assert decided(shifted) != decided(nodes)


def test_no_nodes():
    nodes = random_nodes(np.random.default_rng(11), 3, 5)
    empty = Nodes(
        nodes.logits, *(getattr(nodes, f.name)[:0] for f in dataclasses.fields(Nodes)[1:11]), np.zeros(1, np.int32),
        np.empty(0, np.int32), np.empty((0, 5), np.float32), np.empty(0, np.int32), *Masks.none(0),
    )  # fmt: skip
    assert decided(empty) == []


@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (np.nan, np.inf, -0.1)),
        ("top_k", -1),
        ("order", 0x22),
        *((name, value) for name in ("top_p", "min_p", "typical_p") for value in (np.nan, np.inf, 1.5, -0.1)),
    ],
)
def test_parameters_outside_their_range_are_refused(name, value, drawn):
    """They may leave no mass to draw from: the kernel used to read past its arrays."""
    nodes = random_nodes(np.random.default_rng(12), 40, 300)
    if not drawn:
        nodes.child_q[:] = -1
    expected = decided(nodes)
    column = getattr(nodes, name)
    before = column[7]
    for isa in ISAS:
        column[7] = value
        with pytest.raises(ValueError, match=rf"^{name}\[7\] is .*; it must be "):
            _native.reject(*nodes.arguments(), isa=isa)
        column[7] = before
        assert decided(nodes, isa) == expected


def test_wrong_arguments_are_refused():
    one = np.ones(1, np.float32)
    edit = LateEdits(np.array([4], np.int32), one, one, one, one)
    good = {
        "logits": np.zeros((2, 5), np.float32), "rows": np.arange(2, dtype=np.int32),
        **native.spec(2, late=[edit, None])._asdict(), "child_start": np.array([0, 1, 2], np.int32),
        "child_tokens": np.array([0, 4], np.int32), "q": np.zeros((1, 5), np.float32),
        "child_q": np.array([-1, 0], np.int32),
        "masks": np.full((1, 1), 31, np.uint32), "mask_rows": np.array([-1, 0], np.int32),
    }  # fmt: skip
    _native.reject(**good)
    for name in SpecArrays._fields[:8]:
        with pytest.raises(ValueError, match=f"{name} has 1 entries for 2 rows"):
            _native.reject(**{**good, name: good[name][:1]})
    for name, value, message in [
        ("rows", [0, 2], r"rows\[1\] is 2, outside the 2 rows of logits"),
        ("child_start", [0, 2, 1], "child_start must rise from 0 to the number of children, 2, in 3 entries"),
        ("child_start", [0, 1, 3], "child_start must rise"),
        ("child_start", [1, 1, 2], "child_start must rise"),
        ("child_start", [0, 2], "child_start must rise"),
        ("child_tokens", [0, 5], r"child_tokens\[1\] is 5, outside the vocabulary of 5 tokens"),
        ("child_tokens", [-1, 0], r"child_tokens\[0\] is -1, outside"),
        ("child_q", [-1], "child_q has 1 entries for 2 children"),
        ("child_q", [-1, 1], r"child_q\[1\] is 1; expected -1 or one of the 1 rows of q"),
        ("child_q", [-2, 0], r"child_q\[0\] is -2"),
        ("edit_start", [0, 1], "edit_start must rise from 0 to the number of edits, 1, in 3 entries"),
        ("edit_start", [0, 2, 1], "edit_start must rise"),
        ("edit_start", [1, 1, 1], "edit_start must rise"),
        ("edit_ids", [5], r"edit_ids\[0\] is 5, outside the vocabulary of 5 tokens"),
        ("edit_ids", [-1], r"edit_ids\[0\] is -1, outside"),
        ("mask_rows", [0], "mask_rows has 1 entries for 2 rows"),
        ("mask_rows", [0, 1], r"mask_rows\[1\] is 1; expected -1 or one of the 1 masks"),
        ("mask_rows", [-2, 0], r"mask_rows\[0\] is -2"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.reject(**{**good, name: np.array(value, np.int32)})
    for name in ("edit_bias", "edit_factor", "edit_count", "edit_presence"):
        with pytest.raises(ValueError, match=f"{name} has 2 entries for 1 edits"):
            _native.reject(**{**good, name: one.repeat(2)})
        with pytest.raises(ValueError, match=rf"{name}\[0\] is nan; it must be finite"):
            _native.reject(**{**good, name: one * np.nan})
    with pytest.raises(ValueError, match=r"edit_factor\[0\] is 0.0+; it must be finite, and a factor above 0"):
        _native.reject(**{**good, "edit_factor": 0 * one})
    with pytest.raises(ValueError, match="masks have 2 words a row; a vocabulary of 5 tokens takes 1"):
        _native.reject(**{**good, "masks": np.zeros((1, 2), np.uint32)})
    with pytest.raises(ValueError, match="q has 4 columns for a vocabulary of 5 tokens"):
        _native.reject(**{**good, "q": np.zeros((1, 4), np.float32)})
    with pytest.raises(TypeError):
        _native.reject(**{**good, "q": np.zeros((1, 5))})
    with pytest.raises(ValueError, match="unknown instruction set: sse"):
        _native.reject(**good, isa="sse")
