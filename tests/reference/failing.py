"""Making a method of the real object fail."""

from __future__ import annotations

from typing import Any

import pytest


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: type[BaseException], after: bool) -> None:
    """The next call of a method raises, before it has done its work or after it."""
    run = getattr(owner, name)

    def failing(*args: Any) -> Any:
        monkeypatch.setattr(owner, name, run)
        if after:
            run(*args)
        raise error("made to fail")

    monkeypatch.setattr(owner, name, failing)
