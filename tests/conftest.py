"""Fixtures that tests of many modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.engine.auto import AutoPace
from forerun.engine.fairness import PromptShare
from forerun.engine.steptime import StepTimes
from reference.pacing import AVX2, Machine
from reference.tiny import TinySpec, write_tiny_gguf


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer of random weights; nobody writes to it."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TinySpec("llama", layers=1))


@pytest.fixture(scope="module")
def steady_times() -> Iterator[None]:
    """With draft_len="auto", no clock chooses how much is drafted: steps take what a table says, drafts nearly nothing.

    So what a test does is a function of its seeds alone.
    """
    step, machine = AutoPace.step, Machine(AVX2)

    def told(self: AutoPace, n_tokens: int, drafted: int, draft_seconds: float, forward_seconds: float) -> None:  # noqa: ARG001
        step(self, n_tokens, drafted, 1e-5, 0.02 * machine.forward(n_tokens))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.engine.engine.step_times", lambda *_: StepTimes({n: 0.02 * t for n, t in AVX2.items()}))
        patch.setattr(AutoPace, "step", told)
        patch.setattr(PromptShare, "observe", lambda *_: None)
        yield
