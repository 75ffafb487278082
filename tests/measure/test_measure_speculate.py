"""The comparison of runs with and without speculation: turns, ratios, counts and their denominators."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.engine.output import DrafterCounts
from forerun.measure.speculate import (
    Counts,
    Difference,
    Pair,
    Phases,
    Position,
    Run,
    TaskResult,
    Trial,
    differences_of,
    differing_of,
    measure_pairs,
    quantile,
    results_of,
    rows_of,
    total,
)
from forerun.measure.tasks import Task


def task(name: str, category: str = "c") -> Task:
    return Task(name, category, "p", 4)


def run(seconds: float, n_tokens: int = 10, *, first: float = 0.0, text: str = "t", **counts: Any) -> Run:
    ids = tuple(range(n_tokens))
    given_counts = {"decisions": n_tokens, "emitted": n_tokens} | counts
    return Run(text, ids, "stop", seconds, first, Counts(**given_counts))


def pair(tasks: Sequence[Task], off: Sequence[Run], on: Sequence[Run], off_s: float, on_s: float) -> Pair:
    return Pair(tuple(tasks), Trial(off_s, tuple(off)), Trial(on_s, tuple(on)))


def test_both_runs_of_a_group_follow_each_other_and_take_turns() -> None:
    tasks = [task("a"), task("b"), task("c"), task("x", "d")]
    seen: list[tuple[list[str], bool]] = []
    told: list[tuple[int, int, bool]] = []

    def trial(group: Sequence[Task], speculate: bool) -> Trial:
        seen.append(([one.task_id for one in group], speculate))
        return Trial(2.0 if speculate else 6.0, tuple(run(1.0) for _ in group))

    pairs = list(measure_pairs(tasks, batch=2, repeats=2, trial=trial, on_run=lambda *what: told.append(what)))
    together = [["a", "b"], ["c"], ["x"]]
    assert [ids for ids, _ in seen] == [ids for _ in range(2) for ids in together for _ in range(2)]
    # Off first, on first, ... and in the second round the other way round.
    assert [on for _, on in seen] == [False, True, True, False, False, True, True, False, False, True, True, False]
    assert told == [(n + 1, 12, on) for n, (_, on) in enumerate(seen)]
    assert [[one.task_id for one in found.tasks] for found in pairs] == together * 2
    # Whichever ran first, times are on their own side.
    assert all((found.off.seconds, found.on.seconds) == (6.0, 2.0) for found in pairs)


def test_ratios_are_of_sums_and_of_pairs() -> None:
    pairs = [
        pair([task("a")], [run(9.0, 90, first=1.0)], [run(3.0, 90, first=1.0)], 9.0, 3.0),
        pair([task("b")], [run(1.0, 10, first=0.5)], [run(1.0, 10, first=0.5)], 1.0, 1.0),
        pair([task("a")], [run(2.0, 20, first=1.0)], [run(2.5, 20, first=1.0)], 2.0, 2.5),
    ]
    (row,) = rows_of(pairs)
    assert (row.category, row.tasks, row.runs, row.output_tokens) == ("c", 2, 3, 120)
    assert row.off_tokens_per_s == pytest.approx(120 / 12)
    assert row.on_tokens_per_s == pytest.approx(120 / 6.5)
    assert row.ratio == pytest.approx(12 / 6.5)
    assert row.ratio_median == pytest.approx(1.0)
    assert row.decode_ratio == pytest.approx((8 + 0.5 + 1) / (2 + 0.5 + 1.5))
    assert (row.off_p50_s, row.on_p50_s) == (2.0, 2.5)
    assert row.off_p99_s == pytest.approx(2 + 0.98 * 7)
    assert row.on_p99_s == pytest.approx(2.5 + 0.98 * 0.5)
    assert row.p99_ratio == pytest.approx(row.on_p99_s / row.off_p99_s)
    assert row.identical


def test_a_batch_counts_its_time_once_and_its_tokens_all() -> None:
    tasks = [task("a"), task("b")]
    (row,) = rows_of([pair(tasks, [run(3.0, 30), run(4.0, 10)], [run(1.0, 30), run(2.0, 10)], 4.0, 2.0)])
    assert (row.tasks, row.runs, row.output_tokens) == (2, 2, 40)
    assert (row.off_tokens_per_s, row.on_tokens_per_s, row.ratio) == (10.0, 20.0, 2.0)
    assert (row.off_p50_s, row.on_p50_s) == (3.5, 1.5)


def test_counts_are_those_of_the_runs_with_speculation() -> None:
    wrong = {"decisions": 1, "drafted": 77, "proposed": 77, "accepted": 77}
    one = {"decisions": 4, "drafted": 3, "proposed": 8, "accepted": 5, "emitted": 9}
    pairs = [
        pair(
            [task("a")],
            [run(1.0, 9, **wrong)],
            [run(1.0, 9, **one, proposed_by_position=(3, 3, 2), accepted_by_position=(3, 2))],
            1.0,
            1.0,
        ),
        pair(
            [task("b")],
            [run(1.0, 2, **wrong)],
            [run(1.0, 2, decisions=2, drafted=1, proposed=1, accepted=0, emitted=2, proposed_by_position=(1,))],
            1.0,
            1.0,
        ),
    ]
    (row,) = rows_of(pairs)
    assert row.tokens_per_step == pytest.approx(11 / 6)
    assert row.acceptance == pytest.approx(5 / 9)
    assert row.wasted == pytest.approx(4 / 9)
    assert row.drafted_share == pytest.approx(4 / 6)
    # Shares are over all drafted rows, whether or not a draft was so long.
    assert row.positions == (Position(4, 3, 3 / 4), Position(3, 2, 2 / 4), Position(2, 0, 0.0))
    assert (row.decisions, row.drafted, row.proposed, row.accepted, row.emitted) == (6, 4, 9, 5, 11)


def test_drafters_and_phases_are_summed_over_the_runs_with_speculation() -> None:
    def trial(seconds: float, phases: Phases, **by_drafter: tuple[int, int, int]) -> Trial:
        counts = {name: DrafterCounts(*numbers) for name, numbers in by_drafter.items()}
        return Trial(seconds, (run(seconds, by_drafter=counts, computed=int(seconds)),), phases)

    wrong = trial(50.0, Phases(9, 9, 9, 9), z=(9, 9, 9))
    pairs = [
        Pair((task("a"),), wrong, trial(20.0, Phases(1, 2, 3, 4), x=(1, 2, 1), y=(3, 9, 4))),
        Pair((task("b"),), wrong, trial(5.0, Phases(0.5, 0.5, 0.25, 0.125), y=(1, 1, 0))),
    ]
    (row,) = rows_of(pairs)
    assert row.by_drafter == {
        "x": {"drafts": 1, "proposed": 2, "accepted": 1},
        "y": {"drafts": 4, "proposed": 10, "accepted": 4},
    }
    assert (row.draft_seconds, row.forward_seconds, row.verify_seconds, row.schedule_seconds) == (1.5, 2.5, 3.25, 4.125)
    assert (row.off_seconds, row.on_seconds, row.computed) == (100.0, 25.0, 25)
    json.dumps(dataclasses.asdict(row))


def test_every_result_and_both_sides_of_a_difference() -> None:
    off = run(3.0, text="one two", emitted=10)
    parts = {"text": "one too", "token_ids": (0, 1, 7, *range(3, 10))}
    shorter = {"token_ids": off.token_ids[:4], "text": "one", "finish_reason": "length"}
    variants = [{}, parts, shorter, {"finish_reason": "length"}]
    tasks = [task(name) for name in "abcd"]
    on = [off._replace(seconds=2.0, **change) for change in variants]
    pairs = [pair(tasks, [off] * 4, on, 3.0, 2.0)]
    results = results_of(pairs)
    assert results[0] == TaskResult("a", "c", 3.0, 2.0, 10, True)
    assert [(one.task_id, one.identical) for one in results] == [("a", True), ("b", False), ("c", False), ("d", False)]
    assert differences_of(pairs) == (
        Difference("b", 2, 5, "one two", "one too", "stop", "stop"),
        Difference("c", 4, 3, "one two", "one", "stop", "length"),
        Difference("d", None, None, "one two", "one two", "stop", "length"),
    )


def test_without_drafts_there_is_no_data() -> None:
    (row,) = rows_of([pair([task("a")], [run(1.0, 1, first=1.0)], [run(1.0, 1, first=1.0)], 1.0, 1.0)])
    assert row.acceptance is row.wasted is row.decode_ratio is None
    assert row.drafted_share == 0.0
    assert row.positions == ()


def test_rows_of_categories_families_and_all() -> None:
    def pairs(*names: str) -> list[Pair]:
        return [pair([task(str(n), name)], [run(1.0)], [run(1.0)], 1.0, 1.0) for n, name in enumerate(names)]

    found = rows_of(pairs("e/typo", "chat", "e/rename", "e/typo"))
    assert [(row.category, row.runs) for row in found] == [
        ("e", 3), ("e/typo", 2), ("chat", 1), ("e/rename", 1), ("all", 4),
    ]  # fmt: skip
    # A row over all would repeat what another says.
    assert [row.category for row in rows_of(pairs("e/typo", "e/rename"))] == ["e", "e/typo", "e/rename"]
    assert [row.category for row in rows_of(pairs("chat", "chat"))] == ["chat"]


@pytest.mark.parametrize(
    "change", [{"text": "u"}, {"token_ids": (0, 1)}, {"token_ids": (9, *range(1, 10))}, {"finish_reason": "length"}]
)
def test_any_difference_is_found_and_named(change: dict[str, Any]) -> None:
    same, other = run(1.0), run(1.0)._replace(**change)
    pairs = [
        pair([task("a"), task("b")], [same, same], [same, other], 1.0, 1.0),
        pair([task("x", "d")], [same], [same], 1.0, 1.0),
        pair([task("a"), task("b")], [same, same], [same, other], 1.0, 1.0),
    ]
    assert differing_of(pairs) == ("b",)
    assert [(row.category, row.identical) for row in rows_of(pairs)] == [("c", False), ("d", True), ("all", False)]


def test_times_are_no_difference() -> None:
    assert differing_of([pair([task("a")], [run(1.0, decisions=9)], [run(2.0, decisions=1)], 1.0, 2.0)]) == ()


@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=40),
    st.floats(0, 1),
)
def test_quantiles_lie_between_neighbours(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), abs=1e-9)


@given(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=6))
def test_positions_of_different_lengths_are_summed(lists: list[list[int]]) -> None:
    found = total(Counts(proposed_by_position=tuple(one), emitted=1) for one in lists)
    expected = [sum(one[d] for one in lists if d < len(one)) for d in range(max(map(len, lists), default=0))]
    assert list(found.proposed_by_position) == expected
    assert found.emitted == len(lists)
