"""The planner is a room of its own: it needs nothing of the engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forerun.plan

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
heavy = {"numpy", "forerun._native", "forerun.engine", "forerun.ops", "tokenizers", "llguidance", "matplotlib"}
print(*sorted(heavy & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
