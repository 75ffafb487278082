"""What tests of the engine run on, unless they have a model of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from reference.speculation import Unspeculated
from reference.tiny import TinySpec, write_tiny_gguf


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights; nobody writes to it."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("llama", layers=2))


@pytest.fixture(scope="module")
def alone(model: Path) -> Unspeculated:
    """Its answers without speculation, each computed alone."""
    return Unspeculated(model)
