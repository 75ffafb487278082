from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree
from forerun.engine.auto import AutoPace
from forerun.engine.pace import FixedPace
from forerun.engine.speculate import Speculator
from reference.pacing import AVX2, AVX512, Machine, Simulation, Spec, auto, chain, constant, speed, started

TABLES = pytest.mark.parametrize("table", [AVX2, AVX512], ids=["avx2", "avx512"])
SILENT = {"8 of 16": lambda t: t // 8 % 2 == 1, "later": lambda t: t >= 20, "always": lambda _: True}


@TABLES
@pytest.mark.parametrize("dear", [0.1, 0.3])
@pytest.mark.parametrize("silent", SILENT.values(), ids=SILENT)
def test_a_dear_drafter_behind_a_cheap_one_is_asked_for_what_it_is_worth(
    table: dict[int, float], dear: float, silent: Callable[[int], bool]
) -> None:
    machine = Machine(table, second=dear)
    for first, second in ((1.0, 0.0), (1.0, 0.3), (0.0, 0.0), (0.0, 0.3)):
        simulation = Simulation(auto(table), machine)
        spec = Spec(constant(first), 48, silent=silent, second=constant(second))
        assert simulation.run([spec]).ratio >= 1 / 1.06
        assert min(simulation.run([spec]).ratio for _ in range(5)) >= 0.965


@TABLES
def test_both_drafters_are_used_where_they_are_good(table: dict[int, float]) -> None:
    machine = Machine(table, second=0.1)
    silent = SILENT["8 of 16"]
    speeds = {}
    for second in (0.0, 0.95):
        simulation = Simulation(auto(table), machine)
        spec = Spec(constant(1.0), 128, silent=silent, second=constant(second))
        speed(simulation, [spec], 2)
        speeds[second] = speed(simulation, [spec], 4)
    assert speeds[0.0] > 1.5  # the cheap one isn't held back by the other's price
    simulation = Simulation(auto(table), machine)
    spec = Spec(constant(0.0), 128, silent=silent, second=constant(0.95))
    speed(simulation, [spec], 2)
    assert speed(simulation, [spec], 4) > 1.25
    assert speeds[0.95] > speeds[0.0]


def test_a_drafter_that_ignores_its_parts_limits_would_be_noticed() -> None:
    simulation = Simulation(auto(AVX2), Machine(AVX2, second=0.3), limited=False)
    spec = Spec(constant(1.0), 48, silent=SILENT["later"], second=constant(0.0))
    assert min(simulation.run([spec]).ratio for _ in range(6)) < 0.9


def test_what_a_dear_drafter_is_asked_for_is_covered_by_the_account() -> None:
    pace = auto(AVX512)
    machine = Machine(AVX512, per_node=0.05)
    for _ in range(3):
        Simulation(pace, machine).run([Spec(constant(1.0), 60)])
    pace.begin(0, list(range(10)))
    for account, most in ((4.0, 16), (0.3, 6), (0.02, 1)):
        pace._requests[0].account = account
        (asked,) = pace.budget([0], [16], 1, 1)
        assert 1 <= asked <= most
        assert (pace.limits(0) or {})["scripted"] == asked
    assert pace.limits(10**6) is None


def test_asking_in_vain_becomes_rare() -> None:
    """Only where it costs something: what is free is asked at every step."""
    for seconds, most in ((0.1, 12), (0.001, 400)):
        pace = auto(AVX2)
        pace.begin(0, tokens := list(range(10)))
        asked: list[int] = []
        for step in range(400):
            (n,) = pace.budget([0], [8], 1, 1)
            if n:
                asked.append(step)
                assert pace.cut([0], [len(tokens)], [NO_DRAFT], 1) == [0]
            pace.step(1, 0, 0.02 * seconds if n else 0.0, 0.02)
            tokens.append(1)
        assert 3 <= len(asked) <= most
        assert len(asked) == 400 or asked[-1] - asked[-2] >= 50
    assert len(asked) == 400


def test_many_neighbours_that_dont_draft_are_no_prompt() -> None:
    """40 more rows make a token of this one's worth what theirs are; 40 tokens of a prompt don't."""
    kept: dict[int, int] = {}
    for deciding in (1, 41):
        pace = auto(AVX2)
        tokens = started(pace)
        for _ in range(60):
            pace.budget([0], [8], 41, deciding)
            pace._requests[0].account = 4.0
            (n,) = pace.cut([0], [len(tokens)], [chain(8, 0.6)], 41)
            kept[deciding] = max(kept.get(deciding, 0), n)
            pace._requests[0].tree = None  # nothing is learnt from what isn't verified
    assert kept[1] > 0
    assert kept[41] == 0


def test_the_speculator_counts_who_chooses_a_token_and_hands_limits_on() -> None:
    """A drafting row, a prompt's chunk, a row that doesn't draft."""
    calls: list[tuple[int, int]] = []
    seen: list[DraftRow] = []

    class Pace(FixedPace):
        def budget(self, keys: Sequence[int], granted: Sequence[int], n_tokens: int, n_deciding: int) -> list[int]:
            calls.append((n_tokens, n_deciding))
            return super().budget(keys, granted, n_tokens, n_deciding)

        def limits(self, key: int) -> dict[str, int]:  # type: ignore[override]
            return {"a": key}

    class Watching(Drafter):
        name = "watching"

        def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
            seen.extend(rows)
            return [NO_DRAFT] * len(rows)

    speculator = Speculator(Watching(), Pace(4), 32)
    lives: Any = [
        SimpleNamespace(
            draft_key=key, request=SimpleNamespace(tokens=[1, 2]), params=None, seed=3, traced=False, grammar=None
        )
        for key in (7, None, None)
    ]
    rows: Any = [
        SimpleNamespace(count=count, draft_count=drafts, samples=samples)
        for count, drafts, samples in ((1, 4, True), (100, 0, False), (1, 0, True))
    ]
    assert speculator.draft(rows, lives) == [NO_DRAFT] * 3
    assert speculator.failure is None
    assert calls == [(102, 2)]
    assert [(row.key, row.budget, row.seed, row.limits) for row in seen] == [(7, 4, 3, {"a": 7})]


def with_a_probe() -> AutoPace:
    """A cheap drafter that is always right, a dear one that never is; request 0 is due to look at the latter again."""
    pace = auto(AVX512)
    simulation = Simulation(pace, Machine(AVX512, second=0.3))
    for _ in range(3):
        simulation.run([Spec(constant(1.0), 60, silent=lambda _: True, second=constant(0.0))])
        simulation.run([Spec(constant(1.0), 60, second=constant(0.0))])
    pace.begin(0, list(range(10)))
    request = pace._requests[0]
    request.account, request.idle, request.gap = 3.0, 10, 2.0
    assert pace.budget([0], [16], 1, 1) == [16]
    assert pace.limits(0) == {"scripted": 16, "second": 1, "": 2}
    return pace


def test_a_probe_of_one_drafter_doesnt_cut_anothers_tree() -> None:
    pace = with_a_probe()
    assert pace.cut([0], [10], [chain(16)], 1) > [4]
    pace = with_a_probe()
    assert pace.cut([0], [10], [DraftTree.chain([1], drafter="second")], 1) == [1]
    decision = pace.decision(0)
    assert decision is not None
    assert decision.reason == "a probe"


def test_a_dear_drafter_pays_for_what_it_was_asked_in_vain() -> None:
    pace = with_a_probe()
    pace.cut([0], [10], [NO_DRAFT], 1)
    before = {name: cost.per_row for name, cost in pace._costs.items()}
    pace.step(1, 0, 0.01, 0.02)
    after = {name: cost.per_row for name, cost in pace._costs.items()}
    assert after.pop("second") > before.pop("second")
    assert after == before
