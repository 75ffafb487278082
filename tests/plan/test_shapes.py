"""Networks that shapes make: which layers there are, what they keep, and which shapes are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import PlanError
from forerun.plan.network import Layers
from forerun.plan.shapes import MOST, Experts, LatentAttention, ModelShape

DENSE = ModelShape(
    name="m", hidden=64, layers=6, heads=4, kv_heads=2, head_dim=16, vocab=1000, intermediate=160, max_context=512
)
SPARSE = replace(DENSE, experts=Experts(n=8, active=2, intermediate=32, shared=48, dense_layers=2))
LATENT = replace(
    SPARSE, kv_heads=4, head_dim=24, latent=LatentAttention(q_rank=32, kv_rank=20, nope=16, rope=8, value=16)
)


@given(layers=st.integers(1, 7), data=st.data())
def test_every_layer_is_there_once_with_its_window_and_its_feed_forward(layers: int, data: st.DataObject) -> None:
    windowed, dense = (data.draw(st.integers(0, layers)) for _ in range(2))
    mixture = data.draw(st.booleans())
    experts = Experts(n=8, active=2, intermediate=32, dense_layers=dense) if mixture else None
    window = 5 if windowed else None
    shape = replace(DENSE, layers=layers, experts=experts, window=window, window_layers=windowed)
    network = shape.network
    assert network.n_layers == layers
    seen = {(_window(group), _sparse(group)): group.repeats for group in network.layers}
    assert len(seen) == len(network.layers), "two groups alike"
    assert all(repeats > 0 for repeats in seen.values())
    assert sum(count for (limit, _), count in seen.items() if limit == 5) == windowed
    assert sum(count for (_, sparse), count in seen.items() if not sparse) == (dense if mixture else layers)
    # A window changes what is kept, never what is stored.
    assert network.n_parameters == replace(shape, window=None, window_layers=0).network.n_parameters
    kept = [5] * windowed + [9] * (layers - windowed)
    assert network.kv_tokens(9) == sum(kept) * 2 * 2 * 16


def _window(group: Layers) -> int | None:
    assert group.attention is not None
    return group.attention.window


def _sparse(group: Layers) -> bool:
    return any(linear.experts > 1 for linear in group.linears)


def test_windows_reach_into_the_dense_layers_when_the_others_are_used_up() -> None:
    groups = replace(SPARSE, window=5, window_layers=5).network.layers
    assert [(group.name, group.repeats) for group in groups] == [
        ("dense layers", 1),
        ("windowed dense layers", 1),
        ("windowed layers", 4),
    ]


def test_parameters_by_hand() -> None:
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    norms = 2 * 64
    ends = 1000 * 64 * 2 + 64
    assert DENSE.network.n_parameters == 6 * (attention + 3 * 64 * 160 + norms) + ends
    assert replace(DENSE, tied=True).network.n_parameters == DENSE.network.n_parameters - 64_000
    assert replace(DENSE, gated=False).network.n_parameters == DENSE.network.n_parameters - 6 * 64 * 160
    assert replace(DENSE, qkv_bias=True).network.n_parameters == DENSE.network.n_parameters + 6 * (64 + 32 + 32)
    assert replace(DENSE, out_bias=True).network.n_parameters == DENSE.network.n_parameters + 6 * 64
    assert replace(DENSE, mlp_bias=True).network.n_parameters == DENSE.network.n_parameters + 6 * (160 + 160 + 64)
    assert replace(DENSE, qk_norm=True).network.n_parameters == DENSE.network.n_parameters + 6 * 2 * 16
    assert replace(DENSE, sandwich_norms=True).network.n_parameters == DENSE.network.n_parameters + 6 * 2 * 64
    assert replace(DENSE, sinks=True).network.n_parameters == DENSE.network.n_parameters + 6 * 4
    sparse = 8 * 64 + 8 * 3 * 64 * 32 + 3 * 64 * 48
    assert SPARSE.network.n_parameters == 2 * (3 * 64 * 160) + 4 * sparse + 6 * (attention + norms) + ends
    assert SPARSE.network.n_active == (
        2 * (3 * 64 * 160) + 4 * (8 * 64 + 2 * 3 * 64 * 32 + 3 * 64 * 48) + 6 * attention + 64_000
    )
    experts = replace(SPARSE.experts, shared_gate=True)  # type: ignore[type-var]
    assert replace(SPARSE, experts=experts).network.n_parameters == SPARSE.network.n_parameters + 4 * 64


def test_a_latent_is_kept_once_for_all_heads() -> None:
    network = LATENT.network
    attention = network.layers[0].attention
    assert attention is not None
    assert (attention.kv_width, attention.kv_shards) == (28, 1)
    # Scores are products over the latent and the rotary part, values over the latent, for each of four heads.
    assert attention.pair_width == 4 * (28 + 20)
    by_hand = 64 * 32 + 32 * 4 * 24 + 64 * 28 + 20 * 4 * 32 + 4 * 16 * 64
    linears, _ = LATENT.attention()
    assert sum(linear.size for linear in linears) == by_hand
    straight = replace(LATENT, latent=replace(LATENT.latent, q_rank=0))  # type: ignore[type-var]
    assert sum(linear.size for linear in straight.attention()[0]) == by_hand - 64 * 32 - 32 * 96 + 64 * 96


def experts(**changes: Any) -> dict[str, Any]:
    return {"experts": Experts(**({"n": 8, "active": 2, "intermediate": 32} | changes))}


NEEDED = ("hidden", "layers", "heads", "kv_heads", "head_dim", "vocab")
FAULTS: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in NEEDED for value in (0, -1)),
    ({"hidden": MOST + 1}, "hidden"),
    ({"intermediate": -1}, "intermediate"),
    ({"intermediate": 0}, "intermediate"),
    ({"kv_heads": 3}, "kv_heads"),
    ({"kv_heads": 8}, "kv_heads"),
    ({"window": 8, "window_layers": 7}, "window_layers"),
    ({"window_layers": 1}, "window"),
    ({"window": 0, "window_layers": 1}, "window"),
    ({"window": -4, "window_layers": 1}, "window"),
    ({"window": 8}, "window_layers"),
    ({"max_context": -1}, "max_context"),
    ({"mtp_layers": -1}, "mtp_layers"),
    (experts(active=9), "experts"),
    (experts(active=0), "experts.active"),
    (experts(n=0), "experts.n"),
    (experts(intermediate=0), "experts.intermediate"),
    (experts(shared=-1), "experts.shared"),
    (experts(shared_gate=True), "experts.shared"),
    (experts(dense_layers=7), "dense_layers"),
    (experts(dense_layers=-1), "experts.dense_layers"),
    ({"intermediate": 0, **experts(dense_layers=1)}, "intermediate"),
    ({"latent": LatentAttention(q_rank=-1, kv_rank=1, nope=1, rope=1, value=1)}, "latent.q_rank"),
    ({"latent": LatentAttention(q_rank=0, kv_rank=0, nope=1, rope=1, value=1)}, "latent.kv_rank"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "field"), FAULTS)
def test_a_shape_that_cannot_be_is_refused_by_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(PlanError) as caught:
        replace(DENSE, **changes)
    assert caught.value.field == f"m: {field}"


def test_a_model_whose_layers_are_all_dense_has_no_mixture() -> None:
    shape = replace(SPARSE, experts=replace(SPARSE.experts, dense_layers=6))  # type: ignore[type-var]
    assert not shape.network.mixtures
    assert shape.network.n_active == DENSE.network.n_active
