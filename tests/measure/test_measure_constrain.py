"""The comparison of the same texts with and without a constraint: turns, ratios, shares and verdicts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from forerun.measure.constrain import (
    Arm,
    Group,
    Phase,
    RecordResult,
    Trial,
    code_block,
    differing_of,
    json_schema_check,
    measure_group,
    results_of,
    rows_of,
)
from forerun.measure.speculate import Counts, Run
from forerun.measure.tasks import Task

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}


def task(name: str, category: str = "c") -> Task:
    return Task(name, category, "p", 4, SCHEMA)


def run(seconds: float, n_tokens: int = 11, *, first: float = 0.0, text: str = '{"n":1}', **more: Any) -> Run:
    reason = more.pop("finish_reason", "stop")
    ids = more.pop("ids", tuple(range(n_tokens)))
    counts = {"decisions": n_tokens, "emitted": n_tokens} | more
    return Run(text, ids, reason, seconds, first, Counts(**counts))


def group(name: str, runs: dict[Arm, Run], full: Phase = Phase(), category: str = "c") -> Group:  # noqa: B008
    return Group((task(name, category),), {arm: Trial((one,), full) for arm, one in runs.items()})


def runs(constrained: float, repeated: float, off: float = 1.0, **more: Any) -> dict[Arm, Run]:
    return {
        "constrained": run(constrained, **more),
        "repeated": run(repeated),
        "constrained_off": run(off),
        "repeated_off": run(2 * off),
    }


def forced(task: Task, token_ids: Sequence[int]) -> int:
    """Five of each text's tokens."""
    assert task.schema == SCHEMA
    return min(5, len(token_ids))


def test_the_text_is_recorded_first_and_the_pair_takes_turns() -> None:
    seen: list[tuple[list[str], Arm]] = []

    def trial(tasks: Sequence[Task], arm: Arm) -> Trial:
        seen.append(([one.task_id for one in tasks], arm))
        return Trial((run(1.0),) * len(tasks), Phase())

    for turn in range(2):
        found = measure_group([task("a"), task("b")], turn, trial)
        assert set(found.trials) == {"constrained", "repeated", "constrained_off", "repeated_off"}
    assert [arm for _, arm in seen] == [
        "constrained_off", "constrained", "repeated", "repeated_off",
        "constrained_off", "repeated", "constrained", "repeated_off",
    ]  # fmt: skip
    assert {tuple(names) for names, _ in seen} == {("a", "b")}


def test_a_record() -> None:
    one = runs(2.0, 4.0, 1.0, first=1.0, decisions=5)
    own = run(3.0, 20, text='```json\n{"n": 3}\n```')
    (result,) = results_of([group("a", one)], {"a": own}, forced, json_schema_check())
    assert result == RecordResult(
        task_id="a",
        category="c",
        tokens=11,
        finish_reason="stop",
        constrained_ms=pytest.approx(100.0),
        repeated_ms=pytest.approx(400.0),
        constrained_off_ms=pytest.approx(100.0),
        repeated_off_ms=pytest.approx(200.0),
        ratio=pytest.approx(0.25),
        total_ratio=0.5,
        constrained_tokens_per_step=11 / 5,
        repeated_tokens_per_step=1.0,
        forced=5,
        text='{"n":1}',
        valid=True,
        own_text=own.text,
        own_tokens=20,
        own_valid=False,
        own_valid_in_block=True,
    )


def test_only_texts_that_ended_are_judged() -> None:
    check = json_schema_check()
    cut = group("cut", runs(1, 1, text='{"n":', finish_reason="length"))
    bad = group("bad", runs(1, 1, text='{"n":1.5}'))
    found = results_of([cut, bad, group("good", runs(1, 1))], {}, forced, check)
    assert [(result.valid, result.own_valid, result.own_tokens) for result in found] == [
        (None, None, None), (False, None, None), (True, None, None),
    ]  # fmt: skip
    assert [result.valid for result in results_of([bad], {}, forced, None)] == [None]


def test_rows() -> None:
    phase = Phase(10, 2.0, 0.1)
    groups = [
        group("a", runs(1.0, 2.0, proposed=8, accepted=6), phase, "e/x"),
        group("b", runs(3.0, 2.0), Phase(30, 2.0, 0.3), "e/y"),
        group("c", runs(2.0, 2.0, text="{}"), phase, "f"),
    ]
    own = {"a": run(1, text='{"n":1}'), "b": run(1, text="no")}
    rows = rows_of(groups, results_of(groups, own, forced, json_schema_check()))
    assert [(row.category, row.records, row.tokens) for row in rows] == [
        ("e", 2, 22), ("e/x", 1, 11), ("e/y", 1, 11), ("f", 1, 11), ("all", 3, 33),
    ]  # fmt: skip
    both, total = rows[0], rows[-1]
    assert (both.constrained_ms, both.repeated_ms) == (pytest.approx(200), pytest.approx(200))
    assert (both.ratio, both.ratio_median, both.ratio_mean) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
    assert both.ratio_p90 == pytest.approx(1.4)
    assert (both.off_ratio, both.gain) == (pytest.approx(0.5), pytest.approx(0.5))
    assert both.forced_share == pytest.approx(10 / 22)
    assert (both.mask_share, both.full_steps) == (pytest.approx(0.4 / 4), 40)
    assert (both.constrained_acceptance, both.repeated_acceptance) == (0.75, None)
    assert (both.own, both.own_valid, both.own_valid_in_block) == (2, 1, 1)
    assert (total.finished, total.valid) == (3, 2)
    assert rows_of(groups[:2], results_of(groups[:2], {}, forced, None))[-1].category == "e/y"


def test_a_text_of_one_token_has_no_time_between_tokens() -> None:
    one = {arm: run(1.0, 1) for arm in runs(1, 1)}
    groups = [group("a", one)]
    results = results_of(groups, {}, forced, None)
    assert (results[0].ratio, results[0].constrained_ms) == (None, None)
    row = rows_of(groups, results)[0]
    assert (row.ratio, row.ratio_p90, row.mask_share, row.valid) == (None, None, None, None)


@pytest.mark.parametrize("arm", ["constrained", "repeated", "constrained_off", "repeated_off"])
def test_other_tokens_in_any_arm_differ(arm: Arm) -> None:
    good = runs(1, 1)
    assert differing_of([group("a", good)]) == ()
    assert differing_of([group("a", {**good, arm: run(1, ids=(*range(10), 99))})]) == ("a",)
    # The repetition ends by its length; the constrained texts must end alike.
    ended = {**good, arm: run(1, finish_reason="length")}
    assert differing_of([group("a", ended)]) == (("a",) if arm.startswith("constrained") else ())


def test_phases() -> None:
    assert Phase(7, 3.0, 0.5).since(Phase(5, 1.0, 0.25)) == Phase(2, 2.0, 0.25)


def test_validity(monkeypatch: pytest.MonkeyPatch) -> None:
    check = json_schema_check()
    assert check is not None
    assert check('{"n": 1}', SCHEMA)
    for text in ("", "{", '{"n": "1"}', '{"n": 1, "m": 2}', '{"n": NaN}', "[" * 100_000, '{"n":1} x'):
        assert not check(text, SCHEMA)
    assert check("2.28", {"multipleOf": 0.01})
    assert not check("2.285", {"multipleOf": 0.01})
    assert check("[1.0, 1e2]", {"items": {"type": "integer", "enum": [1, 100]}})
    assert not check("1.5", {"type": "integer"})
    assert check("1e999999999", {"type": "number", "minimum": 0.5})
    assert not check('"2031-13-01"', {"type": "string", "format": "date"})
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert json_schema_check() is None


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```json\n{}\n```", "{}\n"),
        ("Here:\n```\n1\n```\n```\n2\n```", "1\n"),
        ("{}", "{}"),
        ("```json\n{}", "```json\n{}"),
    ],
)
def test_code_blocks(text: str, block: str) -> None:
    assert code_block(text) == block
