"""The planner is a room of its own: it needs nothing of the engine."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forerun.plan
from forerun.errors import PlanError
from forerun.plan import memory
from forerun.plan.acceptance import Acceptance
from forerun.plan.capacity import Capacity, Lengths
from forerun.plan.deployment import Deployment
from forerun.plan.drafters import eagle3
from forerun.plan.explain_speculate import explain_speedup
from forerun.plan.policy_cost import modelled_cost
from forerun.plan.speculate import Proposal, best, break_even, most_that_fit, price, schedule
from forerun.plan.speculate_table import Speculations
from forerun.plan.steptime import Load, forward_time
from forerun.plan.steptime_fast import ForwardSeconds

ROOM = Path(forerun.plan.__file__).parent
ALLOWED = ("forerun.plan", "forerun.errors")


def imported(path: Path) -> set[str]:
    """Modules of other packages, and of this one, that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.stem)
def test_it_imports_nothing_of_the_engine(path: Path) -> None:
    for name in imported(path):
        if name.startswith("forerun"):
            assert name.startswith(ALLOWED), name
        else:
            assert name.partition(".")[0] in {*sys.stdlib_module_names, "numpy", "matplotlib"}, name


def test_using_it_loads_nothing_else() -> None:
    """Not through the package, either, and NumPy only where it is needed."""
    script = """
import sys
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.steptime import Load, forward_time
catalog = PlanCatalog.load()
where = Deployment(hardware=catalog.gpu("h100"))
assert forward_time(catalog.model("llama-3.1-8b").network, where, Load(1)).seconds > 0
import forerun.plan
from forerun.plan import best, eagle3, read_config
heavy = {"numpy", "forerun._native", "forerun.engine", "forerun.ops", "tokenizers", "llguidance", "matplotlib"}
print(*sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_package_itself_loads_nothing() -> None:
    script = """
import sys
import forerun
before = set(sys.modules)
import forerun.plan
print(*sorted(name for name in set(sys.modules) - before if name.startswith("forerun")))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["forerun.plan"]


def test_every_public_name_is_there_and_told() -> None:
    assert forerun.plan.__doc__
    listed = set(re.findall(r"`(\w+)`", forerun.plan.__doc__))
    assert listed == set(forerun.plan.__all__)
    assert set(forerun.plan.__all__) <= set(dir(forerun.plan))
    for name in forerun.plan.__all__:
        found = getattr(forerun.plan, name)
        assert found.__module__.startswith(ALLOWED), name
        assert found.__name__ in (name, name.removeprefix("draft_")), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = forerun.plan.nothing


def test_a_shape_stands_for_its_network() -> None:
    """In every function that prices a model."""
    catalog = forerun.plan.PlanCatalog.load()
    shape = catalog.model("llama-3.1-8b")
    where = Deployment(hardware=catalog.gpu("h100"))
    proposal = Proposal(eagle3(shape), Acceptance.of(0.8, 0.7))
    calls: list[Callable[[Any], object]] = [
        lambda model: forward_time(model, where, Load(4, 2, 100)),
        lambda model: ForwardSeconds(model, where)(4, 2, 100),
        lambda model: price(model, where, proposal, batch=4, context=100, length=3),
        lambda model: best(model, where, proposal, batch=4, context=100),
        lambda model: break_even(model, where, proposal, context=1000),
        lambda model: schedule(model, where, proposal, context=1000, most=8),
        lambda model: most_that_fit(model, where, proposal.drafter, 1000),
        lambda model: Speculations(model, where, [proposal]).table([1], [1000]).rows,
        lambda model: proposal.drafter.fraction(model, where, 4, 100, 3),
        lambda model: explain_speedup(model, where, proposal, batch=4, context=100, length=3).lines,
        lambda model: modelled_cost(model, where, 4, 100, drafter=proposal.drafter).verify.tolist(),
        lambda model: memory.weight_bytes_per_gpu(model, where),
        lambda model: memory.kv_token_bytes(model, where),
        lambda model: memory.sequence_bytes(model, where, 1000),
        lambda model: memory.pool_bytes(model, where, proposal.drafter),
        lambda model: memory.check_fits(model, where),
        lambda model: Capacity(network=model, deployment=where, lengths=Lengths(1000, 500)).fitting,
    ]
    for call in calls:
        assert call(shape) == call(shape.network)
        with pytest.raises(PlanError, match="expected a ModelShape or a Network") as caught:
            call("llama-3.1-8b")
        assert caught.value.field == "model"
