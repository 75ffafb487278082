"""Prompts beside requests that decode: how much of them a step takes, and that it changes nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun import Engine, SamplingParams
from forerun.engine.fairness import PromptShare
from forerun.engine.request import RowPlan, StepPlan
from forerun.engine.scheduler import Scheduler
from forerun.engine.steptime import StepTimes
from forerun.errors import ConfigurationError
from reference.pacing import AVX2
from reference.speculation import emptied

TIMES = {n: 0.02 * t for n, t in AVX2.items()}


@given(slowdown=st.floats(1.01, 20), n_decodes=st.integers(1, 64), most=st.integers(1, 512))
def test_the_share_is_the_most_that_keeps_the_bound(slowdown: float, n_decodes: int, most: int) -> None:
    times = StepTimes(TIMES)
    limit = slowdown * times.seconds(n_decodes)
    fitting = [m for m in range(1, most + 1) if times.seconds(n_decodes + m) <= limit]
    assert PromptShare(times, slowdown).tokens(n_decodes, most) == max(fitting, default=1)


@given(
    slowdown=st.floats(1.2, 8), n_decodes=st.integers(1, 32), plain=st.floats(0.5, 2), mixed=st.floats(0.5, 3),
    level=st.floats(0.5, 2),
)  # fmt: skip
def test_the_bound_is_of_the_steps_that_were_seen(
    slowdown: float, n_decodes: int, plain: float, mixed: float, level: float
) -> None:
    """A machine on which either kind of step takes another time than the table has, also if the table learns of it."""
    times = StepTimes(TIMES)
    share = PromptShare(times, slowdown)
    truth = StepTimes(TIMES).seconds
    for _ in range(60):
        share.observe(n_decodes, 0, plain * truth(n_decodes))
    times._level *= level
    for _ in range(60):
        n = share.tokens(n_decodes, 256)
        share.observe(n_decodes + n, n, mixed * truth(n_decodes + n))
    n = share.tokens(n_decodes, 256)
    bound = slowdown * plain * truth(n_decodes)
    assert n == 1 or mixed * truth(n_decodes + n) <= bound * 1.001
    assert n == 256 or mixed * truth(n_decodes + n + 1) > bound * 0.999


def test_steps_of_prompts_alone_and_accidents_teach_little() -> None:
    times = StepTimes(TIMES)
    share = PromptShare(times, 2.0)
    for _ in range(50):
        share.observe(4, 0, times.seconds(4))
    expected = share.tokens(4, 512)
    share.observe(100, 100, 9 * times.seconds(100))
    assert share.tokens(4, 512) == expected
    share.observe(4, 0, 1e9)
    assert share.tokens(4, 512) <= expected * 1.2


def planned(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Every plan from now on."""
    plans: list[StepPlan] = []
    plan = Scheduler.plan

    def noted(self: Scheduler, *arguments: object) -> StepPlan:
        plans.append(plan(self, *arguments))  # type: ignore[arg-type]
        return plans[-1]

    monkeypatch.setattr(Scheduler, "plan", noted)
    return plans


def run(engine: Engine) -> list[tuple[int, ...]]:
    """Two requests that decode, then two long prompts; tokens of each."""
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first = [engine.submit([7 + i], params) for i in range(2)]
    for _ in range(3):
        engine.step()
    later = [engine.submit(list(range(20 + i, 220 + i)), params) for i in range(2)]
    return [handle.result().token_ids for handle in (*first, *later)]


def decodes(rows: tuple[RowPlan, ...]) -> int:
    return sum(row.count == 1 and row.samples for row in rows)


@pytest.mark.usefixtures("steady_times")
@pytest.mark.parametrize("draft", ["none", "suffix"])
@pytest.mark.parametrize("slowdown", [1.2, 2.0])
def test_steps_with_decodes_keep_the_bound_and_texts_stay(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, draft: str, slowdown: float
) -> None:
    options = {"threads": 1, "cache_weights": False, "draft": draft, "max_rows": 4, "max_step_tokens": 128}
    expected = run(Engine(tiny, **options))  # type: ignore[arg-type]
    engine = Engine(tiny, prompt_slowdown=slowdown, **options)  # type: ignore[arg-type]
    plans = planned(monkeypatch)
    assert run(engine) == expected
    emptied(engine)
    share = PromptShare(StepTimes(TIMES), slowdown)
    beside = 0
    for plan in plans:
        n = decodes(plan.rows)
        prompt = sum(row.count for row in plan.rows if row.count > 1 or not row.samples)
        if n and prompt:
            beside += 1
            # What is admitted with one known token isn't told from a decode here; it counts as one of both.
            assert prompt <= max(share.tokens(k, 128) for k in range(1, n + 1))
    assert beside > 5


@pytest.mark.parametrize("draft", ["none", "suffix"])
def test_the_share_is_told_of_every_step(tiny: Path, monkeypatch: pytest.MonkeyPatch, draft: str) -> None:
    told: list[tuple[int, int, float]] = []
    monkeypatch.setattr(PromptShare, "observe", lambda _, *step: told.append(step))
    engine = Engine(
        tiny, prompt_slowdown=2.0, threads=1, cache_weights=False, draft=draft, draft_len=3, max_rows=4,
        max_step_tokens=128,
    )  # fmt: skip
    plans = planned(monkeypatch)
    run(engine)
    assert len(told) == len(plans) == engine.loop.steps
    for (n_tokens, n_prompt, seconds), plan in zip(told, plans, strict=True):
        assert n_prompt == sum(row.count for row in plan.rows if row.count > 1 or not row.samples)
        least = sum(row.count for row in plan.rows)
        assert least <= n_tokens <= least + sum(row.draft_count for row in plan.rows)
        assert seconds > 0
    assert any(0 < n_prompt < n_tokens for n_tokens, n_prompt, _ in told)
    assert any(n_prompt == 0 for _, n_prompt, _ in told)


def test_without_the_bound_a_prompt_comes_in_large_chunks(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = planned(monkeypatch)
    run(Engine(tiny, threads=1, cache_weights=False, draft="none", max_rows=4, max_step_tokens=128))
    assert max(row.count for plan in plans for row in plan.rows if decodes(plan.rows)) > 50


@pytest.mark.parametrize("slowdown", [1.0, 0.0, -1.0, float("nan"), float("inf")])
def test_bounds_that_cannot_be(tiny: Path, slowdown: float) -> None:
    with pytest.raises(ConfigurationError, match="prompt_slowdown"):
        Engine(tiny, prompt_slowdown=slowdown)
