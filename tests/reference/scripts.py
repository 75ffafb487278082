"""Scripts of this tree that aren't part of the package, as modules."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


def loaded(path: Path) -> Iterator[ModuleType]:
    """A script as a module by its own name, for as long as a fixture that yields from this lives.

    Skips the test where the tree doesn't have it.
    """
    if not path.exists():
        pytest.skip(f"{path.parent.name}/ isn't part of this tree")
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[name]
