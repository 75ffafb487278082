"""What the options of `forerun serve` make of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun import Engine
from forerun.cli import dispatch
from forerun.draft.suffix import SuffixDrafter


def engine_of(monkeypatch: pytest.MonkeyPatch, model: Path, *options: str) -> Engine:
    """The engine that would be served."""
    served: list[Engine] = []
    monkeypatch.setattr("forerun.serve.run.serve", lambda engine, *_: served.append(engine))
    command = ["serve", "-m", str(model), "--kv-tokens", "256", "--threads", "1", "--draft-len", "4", *options]
    assert dispatch(command) == 0
    [engine] = served
    return engine


@pytest.mark.parametrize(("options", "size"), [((), 64 << 20), (("--shared-mib", "0.5"), 1 << 19)])
def test_memory_of_finished_texts(
    monkeypatch: pytest.MonkeyPatch, served: Path, options: tuple[str, ...], size: int
) -> None:
    speculator = engine_of(monkeypatch, served, *options).speculator
    assert speculator is not None
    assert isinstance(speculator.drafter, SuffixDrafter)
    assert speculator.drafter.store is not None
    assert speculator.drafter.store.max_bytes == size


def test_no_memory_of_finished_texts(monkeypatch: pytest.MonkeyPatch, served: Path) -> None:
    speculator = engine_of(monkeypatch, served, "--shared-mib", "0").speculator
    assert speculator is not None
    assert isinstance(speculator.drafter, SuffixDrafter)
    assert speculator.drafter.store is None


@pytest.mark.parametrize(
    ("options", "slowdown"), [((), 1.6), (("--prompt-slowdown", "3"), 3.0), (("--prompt-slowdown", "0"), None)]
)
def test_prompts_beside_decodes(
    monkeypatch: pytest.MonkeyPatch, served: Path, options: tuple[str, ...], slowdown: float | None
) -> None:
    share = engine_of(monkeypatch, served, *options).loop.prompt_share
    assert (None if share is None else share.slowdown) == slowdown
