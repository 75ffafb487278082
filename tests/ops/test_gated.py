"""The MLP's two products with their gate: equal to linear and a NumPy gate, the same bits whoever computes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from forerun.ops.tape import Into, Tape, Weight
from forerun.ops.types import GGMLType
from reference.forward import activation
from reference.sets import SETS
from reference.tapes import activations, add_weight, product, random_tensor, run_without_outputs

Floats = npt.NDArray[np.float32]
Types = tuple[GGMLType, GGMLType]  # of gate and up
K = 256
ROWS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 130)
WIDTHS = (16, 48, 64, 80, 272)
PAIRS = [
    (GGMLType.F32, GGMLType.F32),
    (GGMLType.Q4_K, GGMLType.Q4_K),
    (GGMLType.Q6_K, GGMLType.Q5_K),
    (GGMLType.Q8_0, GGMLType.Q6_K),
    (GGMLType.BF16, GGMLType.Q5_1),
]


class Mlp:
    """The operation on random weights of `n` outputs and K inputs, and products of its result with a matrix of each
    type of `down`."""

    def __init__(
        self, types: Types, n: int, *, gelu: bool, threads: int = 2, isa: str = "", down: tuple[GGMLType, ...] = ()
    ) -> None:
        self.tape = Tape(max_tokens=ROWS[-1], max_outputs=1, threads=threads, isa=isa or None)
        self.x, out = self.tape.buffer(K), self.tape.buffer(n)
        weights = [add_weight(self.tape, random_tensor(t, n, K, seed)) for seed, t in enumerate(types)]
        self.tape.gated(self.x, *weights, out, gelu=gelu)
        self.results = [out, *(self.tape.buffer(48) for _ in down)]
        for type, buffer in zip(down, self.results[1:], strict=True):
            self.tape.linear(out, [Into(add_weight(self.tape, random_tensor(type, 48, n, 9)), buffer)])

    def __call__(self, x: Floats) -> list[Floats]:
        self.tape.write(self.x, x)
        run_without_outputs(self.tape, len(x))
        return [self.tape.read(buffer, len(x)) for buffer in self.results]


def same_bits(a: Floats, b: Floats) -> None:
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("types", PAIRS)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_equals_two_products_and_a_gate(types: Types, n: int, gelu: bool) -> None:
    mlp, x = Mlp(types, n, gelu=gelu), activations(ROWS[-1], K, 5)
    gate, up = (product(random_tensor(t, n, K, seed), x).astype(np.float64) for seed, t in enumerate(types))
    expected = activation("gelu_tanh" if gelu else "silu", gate) * up
    for rows in ROWS:
        got = mlp(x[:rows])[0]
        # Where the gate is nearly closed, float32 keeps the exponent's rounding: an error relative to gate * up.
        assert np.all(np.abs(got - expected[:rows]) <= 3e-6 * np.abs(expected[:rows]) + 1e-7 * np.abs(gate * up)[:rows])


@pytest.mark.parametrize("types", PAIRS)
@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("gelu", [False, True])
def test_gated_does_not_depend_on_rows_threads_or_set(types: Types, n: int, gelu: bool) -> None:
    x = activations(ROWS[-1], K, 6)
    whole = Mlp(types, n, gelu=gelu, threads=1)(x)[0]
    for isa in SETS:
        for threads in (1, 3, 5):
            mlp = Mlp(types, n, gelu=gelu, threads=threads, isa=isa)
            for rows in ROWS:
                same_bits(mlp(x[-rows:])[0], whole[-rows:])


@pytest.mark.parametrize(
    ("n", "down"),
    [
        (96, (GGMLType.Q8_0,)),
        (256, (GGMLType.Q4_K, GGMLType.Q8_0)),
        (768, (GGMLType.Q6_K,)),
        (1024, (GGMLType.Q5_0, GGMLType.Q4_K, GGMLType.F32)),
        (4448, (GGMLType.Q4_1,)),  # more than one piece for each thread, and a last one that isn't full
    ],
)
@pytest.mark.parametrize("rows", [1, 9, 17, 70])
def test_what_is_quantised_on_the_way_is_the_result(n: int, down: tuple[GGMLType, ...], rows: int) -> None:
    """A product behind it has the bits of one that quantises the result itself."""
    x = activations(rows, K, 7)
    for threads in (1, 3):
        out, *behind = Mlp((GGMLType.Q4_K, GGMLType.Q4_K), n, gelu=False, threads=threads, down=down)(x)
        for type, got in zip(down, behind, strict=True):
            same_bits(got, product(random_tensor(type, 48, n, 9), out))


def test_broken_activations_come_out_broken() -> None:
    for types in PAIRS:
        x = activations(20, K, 8)
        x[3, 77] = np.nan
        got = Mlp(types, 272, gelu=False)(x)[0]
        assert np.isnan(got[3]).all()
        assert np.isfinite(np.delete(got, 3, axis=0)).all()


@pytest.mark.parametrize(
    "wrong", ["gate's inputs", "up's inputs", "gate's outputs", "up's outputs", "rows", "the same buffer"]
)
def test_shapes_that_do_not_fit_are_refused(wrong: str) -> None:
    tape = Tape(max_tokens=4, max_outputs=4, threads=1)
    x, out = tape.buffer(64), tape.buffer(64, outputs=wrong == "rows")

    def weight(name: str) -> Weight:
        n, k = (48 if wrong == f"{name}'s outputs" else 64), (32 if wrong == f"{name}'s inputs" else 64)
        return add_weight(tape, random_tensor(GGMLType.F32, n, k, 1))

    with pytest.raises(ValueError, match="gated: shapes differ"):
        tape.gated(x, weight("gate"), weight("up"), x if wrong == "the same buffer" else out)
    right = [add_weight(tape, random_tensor(GGMLType.F32, 64, 64, 1)) for _ in range(2)]
    tape.gated(x, *right, tape.buffer(64))
