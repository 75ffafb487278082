"""Model shapes from a Hugging Face config.json."""

from __future__ import annotations

from pathlib import Path

from forerun.errors import PlanError
from forerun.plan.shapes import ModelShape


def read_config(path: Path) -> ModelShape:
    """The shape of the model that a config.json describes; `path` is the file or its folder.

    Raises:
        PlanError: the file isn't there, isn't JSON, or lacks or contradicts a field, which is named.
    """
    raise PlanError("model", f"{path}: no config.json can be read yet")
