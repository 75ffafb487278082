"""The batch up to which drafts are verified for nothing."""

from __future__ import annotations

from itertools import count

import pytest

from forerun.errors import PlanError
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.formats import WeightFormats
from forerun.plan.hardware import Efficiency
from forerun.plan.network import Layers, Linear, Network
from forerun.plan.ridge import spare_batch
from forerun.plan.steptime import Load, forward_time

CATALOG = PlanCatalog.load()
H100 = CATALOG.gpu("h100")


def flips_at(network: Network, deployment: Deployment, queries: int) -> int:
    """The first batch whose linear layers wait for arithmetic, tried one after the other."""
    return next(
        batch
        for batch in count(1)
        if forward_time(network, deployment, Load(batch, queries)).part("linear").bound == "compute"
    )


def one_matrix(weights: str) -> Network:
    """So wide that what flows in and out doesn't count."""
    layer = Layers("layer", 1, (Linear("w", 2**20, 2**20),), None)
    return Network("one matrix", 2**20, (layer,), None, 0, False, WeightFormats(linear=weights))


@pytest.mark.parametrize("length", [0, 1, 4, 7, 15])
@pytest.mark.parametrize(("weights", "weight_bytes"), [("bf16", 2), ("fp8", 1), ("int4", 4.15625 / 8)])
def test_it_is_where_the_step_model_goes_from_memory_to_arithmetic(
    weights: str, weight_bytes: float, length: int
) -> None:
    for tensor in (1, 8):
        where = Deployment(hardware=H100, tensor=tensor, efficiency=Efficiency.ideal())
        spare = spare_batch(H100, draft_length=length, weight_bytes=weight_bytes)
        assert spare - 0.1 <= flips_at(one_matrix(weights), where, length + 1) <= spare + 1.1


def test_other_operands_have_another_ridge() -> None:
    assert spare_batch(H100, draft_length=4, weight_bytes=1, dtype="fp8") == pytest.approx(
        spare_batch(H100, draft_length=4), rel=1e-3
    )
    with pytest.raises(PlanError, match="doesn't compute in fp4"):
        spare_batch(H100, draft_length=4, dtype="fp4")


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="draft length: -1 is not allowed"):
        spare_batch(H100, draft_length=-1)
    for size in (0, -2, float("nan")):
        with pytest.raises(PlanError, match=r"weight bytes: .* is not allowed; expected above 0"):
            spare_batch(H100, draft_length=1, weight_bytes=size)
