"""What a constraint costs or gains: the same text with it and without, and which texts are valid.

Each task has a schema. Its constrained text is written down, and then the same text is decoded without the constraint:
the engine drafts, computes and verifies as ever, only that the target is taken to choose the recorded token wherever
the walk stands. So both times are over the same tokens, and what is compared isn't how long the model would have
talked. The text that the model writes by itself is measured for its validity alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from statistics import mean, median
from typing import Any, Literal, NamedTuple

from forerun.errors import ForerunError
from forerun.measure.speculate import ALL, Run, quantile, total
from forerun.measure.speed import Setup
from forerun.measure.tasks import Task, families

Arm = Literal["constrained", "repeated", "constrained_off", "repeated_off"]
"""With the constraint, and the same text without it; each with speculation and with speculation off."""

Check = Callable[[str, Mapping[str, Any]], bool]
"""Whether a text is JSON that a schema allows."""

_LONGEST = 400
"""Digits of the longest whole number with an exponent that is compared as an integer."""

ISOLATION = (
    "prefix cache off; one engine for constrained requests and one for the others, so that neither drafts from the "
    "other's texts nor learns from its acceptance; each may learn from its own earlier records"
)


class Phase(NamedTuple):
    """Steps in which every request of a group decoded: their number, seconds in all, and the seconds that grammars took
    without being hidden behind a forward."""

    steps: int = 0
    seconds: float = 0.0
    mask_seconds: float = 0.0

    def since(self, before: Phase) -> Phase:
        """What came after `before`."""
        return Phase(self.steps - before.steps, self.seconds - before.seconds, self.mask_seconds - before.mask_seconds)


class Trial(NamedTuple):
    """A group of tasks in one arm, answered together."""

    runs: tuple[Run, ...]
    full: Phase


class Group(NamedTuple):
    """Tasks of one category that were answered together, in every arm."""

    tasks: tuple[Task, ...]
    trials: dict[Arm, Trial]


@dataclass(frozen=True)
class RecordResult:
    """One task.

    Attributes:
        tokens: of the constrained text, an end token included.
        constrained_ms, repeated_ms, constrained_off_ms, repeated_off_ms: milliseconds per emitted token after the first
            one; None for a text of one token.
        ratio: constrained_ms over repeated_ms.
        total_ratio: the same of the times from submission to the end.
        constrained_tokens_per_step, repeated_tokens_per_step: emitted tokens over rows that chose tokens.
        forced: tokens about which the grammar left no choice (forerun.constrain.state.GrammarState.forced).
        valid: whether the constrained text obeys the schema; None where it was cut off or nothing can check it.
        own_text, own_valid, own_valid_in_block: what the model wrote by itself, whether it is a valid answer as it is,
            and whether the first code block of it is one (None where nothing can check it).
    """

    task_id: str
    category: str
    tokens: int
    finish_reason: str
    constrained_ms: float | None
    repeated_ms: float | None
    constrained_off_ms: float | None
    repeated_off_ms: float | None
    ratio: float | None
    total_ratio: float
    constrained_tokens_per_step: float
    repeated_tokens_per_step: float
    forced: int
    text: str
    valid: bool | None
    own_text: str | None
    own_tokens: int | None
    own_valid: bool | None
    own_valid_in_block: bool | None


@dataclass(frozen=True)
class ConstrainRow:
    """One category. None stands for "no data".

    Attributes:
        tokens: emitted in the constrained arm, and so in each of the four. forced_share: of them, those about which the
            grammar left no choice.
        constrained_ms, repeated_ms: milliseconds per emitted token after the first, over all tokens.
        ratio: the first over the second; ratio_median, ratio_mean, ratio_p90: of the records' own ratios.
        off_ratio: like `ratio`, with speculation off in both. gain: constrained with speculation off over constrained
            with it.
        total_ratio: ratio of the times from submission to the end, prompts included.
        acceptance: accepted over proposed draft tokens.
        mask_share: seconds that grammars took on the critical path over the seconds of the steps, in steps in which the
            whole group decoded, constrained with speculation. full_steps: how many those were.
        finished, valid: constrained texts that ended by themselves, and those of them that obey their schema.
        own, own_valid, own_valid_in_block: the model's own texts, those that obey the schema as they are, and those
            whose first code block does.
    """

    category: str
    records: int
    tokens: int
    forced_share: float | None
    constrained_ms: float | None
    repeated_ms: float | None
    ratio: float | None
    ratio_median: float | None
    ratio_mean: float | None
    ratio_p90: float | None
    off_ratio: float | None
    gain: float | None
    total_ratio: float
    constrained_tokens_per_step: float
    repeated_tokens_per_step: float
    constrained_acceptance: float | None
    repeated_acceptance: float | None
    mask_share: float | None
    full_steps: int
    finished: int
    valid: int | None
    own: int
    own_valid: int | None
    own_valid_in_block: int | None


@dataclass(frozen=True)
class ConstrainReport:
    """The whole comparison.

    Attributes:
        date: when it began, UTC, ISO 8601. draft, draft_len: as they were asked for.
        left_out: ids of tasks without a schema, or that the model's context can't hold.
        complete: False where an interrupt ended it.
        validated: whether texts were checked (with the package jsonschema, if it is there).
        differing: ids of tasks whose constrained text depends on speculation, or whose text wasn't repeated exactly.
        invalid: ids of tasks whose constrained text ended by itself and breaks the schema.
    """

    setup: Setup
    date: str
    draft: str
    draft_len: str
    tasks_file: str
    tasks_sha256: str
    max_tokens: int
    batch: int
    isolation: str
    left_out: tuple[str, ...]
    complete: bool
    validated: bool
    rows: tuple[ConstrainRow, ...]
    results: tuple[RecordResult, ...]
    differing: tuple[str, ...]
    invalid: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether every constrained text was valid and the same in every arm."""
        return not (self.differing or self.invalid)


def measure_group(tasks: Sequence[Task], turn: int, trial: Callable[[Sequence[Task], Arm], Trial]) -> Group:
    """Answers tasks together in every arm, the two that are compared right after each other, in turns.

    The constrained text without speculation comes first: the others repeat it.
    """
    pair: tuple[Arm, Arm] = ("repeated", "constrained") if turn % 2 else ("constrained", "repeated")
    arms: tuple[Arm, ...] = ("constrained_off", *pair, "repeated_off")
    return Group(tuple(tasks), {arm: trial(tasks, arm) for arm in arms})


def json_schema_check() -> Check | None:
    """A check by the package jsonschema; None where it isn't installed.

    Numbers are compared as the decimals that are written: as binary floats, 2.28 would be no multiple of 0.01.
    """
    try:
        module: Any = import_module("jsonschema")
    except ImportError:
        return None

    def valid(text: str, schema: Mapping[str, Any]) -> bool:
        try:
            value = _exact(text)
        except (ValueError, RecursionError):
            return False
        exact = _exact(json.dumps(schema))
        checker = module.validators.validator_for(exact, default=module.Draft202012Validator)
        return bool(checker(exact, format_checker=checker.FORMAT_CHECKER).is_valid(value))

    return valid


def code_block(text: str) -> str:
    """The first code block of a Markdown text, or the text itself if it has none."""
    found = re.search(r"```[^\n`]*\n(.*?)```", text, flags=re.DOTALL)
    return found[1] if found else text


def results_of(
    groups: Sequence[Group], own: Mapping[str, Run], forced: Callable[[Task, Sequence[int]], int], check: Check | None
) -> tuple[RecordResult, ...]:
    """Each task of each group; `own` has the model's own texts by task id, `forced` counts the tokens of a constrained
    text about which its grammar left no choice."""
    return tuple(
        _result(task, {arm: trial.runs[n] for arm, trial in group.trials.items()}, own.get(task.task_id), forced, check)
        for group in groups
        for n, task in enumerate(group.tasks)
    )


def differing_of(groups: Sequence[Group]) -> tuple[str, ...]:
    """Ids of tasks whose four texts aren't the same tokens."""
    return tuple(
        task.task_id
        for group in groups
        for n, task in enumerate(group.tasks)
        if len({trial.runs[n].token_ids for trial in group.trials.values()}) > 1
        or len({group.trials[arm].runs[n].finish_reason for arm in _CONSTRAINED}) > 1
    )


def rows_of(groups: Sequence[Group], results: Sequence[RecordResult]) -> tuple[ConstrainRow, ...]:
    """A row for each category and family of categories, and one over all unless a family has them all."""
    by_category: dict[str, list[Group]] = {}
    for group in groups:
        for name in families(group.tasks[0].category):
            by_category.setdefault(name, []).append(group)
    if not any(len(found) == len(groups) for found in by_category.values()):
        by_category[ALL] = list(groups)
    by_id = {result.task_id: result for result in results}
    return tuple(
        _row(name, found, [by_id[task.task_id] for group in found for task in group.tasks])
        for name, found in by_category.items()
    )


_CONSTRAINED: tuple[Arm, ...] = ("constrained", "constrained_off")


def _result(
    task: Task,
    runs: Mapping[Arm, Run],
    own: Run | None,
    forced: Callable[[Task, Sequence[int]], int],
    check: Check | None,
) -> RecordResult:
    schema = task.schema
    if schema is None:
        raise ForerunError(f"the task {task.task_id!r} has no schema")
    constrained, repeated = runs["constrained"], runs["repeated"]
    times = {arm: _ms_per_token([run]) for arm, run in runs.items()}
    judged = check is not None and constrained.finish_reason == "stop"
    return RecordResult(
        task_id=task.task_id,
        category=task.category,
        tokens=len(constrained.token_ids),
        finish_reason=constrained.finish_reason,
        constrained_ms=times["constrained"],
        repeated_ms=times["repeated"],
        constrained_off_ms=times["constrained_off"],
        repeated_off_ms=times["repeated_off"],
        ratio=_over(times["constrained"], times["repeated"]),
        total_ratio=constrained.seconds / repeated.seconds,
        constrained_tokens_per_step=constrained.counts.emitted / constrained.counts.decisions,
        repeated_tokens_per_step=repeated.counts.emitted / repeated.counts.decisions,
        forced=forced(task, constrained.token_ids),
        text=constrained.text,
        valid=check(constrained.text, schema) if judged and check is not None else None,
        own_text=None if own is None else own.text,
        own_tokens=None if own is None else len(own.token_ids),
        own_valid=None if own is None or check is None else check(own.text, schema),
        own_valid_in_block=None if own is None or check is None else check(code_block(own.text), schema),
    )


def _row(category: str, groups: Sequence[Group], results: Sequence[RecordResult]) -> ConstrainRow:
    runs = {arm: [run for group in groups for run in group.trials[arm].runs] for arm in groups[0].trials}
    times = {arm: _ms_per_token(found) for arm, found in runs.items()}
    counts = {arm: total(run.counts for run in found) for arm, found in runs.items()}
    ratios = [result.ratio for result in results if result.ratio is not None]
    full = [group.trials["constrained"].full for group in groups]
    step_seconds = sum(phase.seconds for phase in full)
    own = [result for result in results if result.own_text is not None]
    judged = any(result.valid is not None or result.own_valid is not None for result in results)
    tokens = sum(result.tokens for result in results)
    constrained, repeated = counts["constrained"], counts["repeated"]
    return ConstrainRow(
        category=category,
        records=len(results),
        tokens=tokens,
        forced_share=sum(result.forced for result in results) / tokens if tokens else None,
        constrained_ms=times["constrained"],
        repeated_ms=times["repeated"],
        ratio=_over(times["constrained"], times["repeated"]),
        ratio_median=median(ratios) if ratios else None,
        ratio_mean=mean(ratios) if ratios else None,
        ratio_p90=quantile(ratios, 0.9) if ratios else None,
        off_ratio=_over(times["constrained_off"], times["repeated_off"]),
        gain=_over(times["constrained_off"], times["constrained"]),
        total_ratio=sum(run.seconds for run in runs["constrained"]) / sum(run.seconds for run in runs["repeated"]),
        constrained_tokens_per_step=constrained.emitted / constrained.decisions,
        repeated_tokens_per_step=repeated.emitted / repeated.decisions,
        constrained_acceptance=constrained.accepted / constrained.proposed if constrained.proposed else None,
        repeated_acceptance=repeated.accepted / repeated.proposed if repeated.proposed else None,
        mask_share=sum(phase.mask_seconds for phase in full) / step_seconds if step_seconds else None,
        full_steps=sum(phase.steps for phase in full),
        finished=sum(result.finish_reason == "stop" for result in results),
        valid=sum(bool(result.valid) for result in results) if judged else None,
        own=len(own),
        own_valid=sum(bool(result.own_valid) for result in own) if judged else None,
        own_valid_in_block=sum(bool(result.own_valid_in_block) for result in own) if judged else None,
    )


def _ms_per_token(runs: Sequence[Run]) -> float | None:
    """Milliseconds per emitted token after the first of each run."""
    tokens = sum(len(run.token_ids) - 1 for run in runs)
    return 1e3 * sum(run.seconds - run.first_token_seconds for run in runs) / tokens if tokens > 0 else None


def _over(one: float | None, other: float | None) -> float | None:
    return None if one is None or not other else one / other


def _exact(text: str) -> Any:
    """A JSON text with its numbers as integers and decimals."""
    return json.loads(text, parse_float=_number, parse_constant=_refuse)


def _number(text: str) -> int | Decimal:
    number = Decimal(text)
    whole = abs(number.adjusted()) < _LONGEST and number == number.to_integral_value()
    return int(number) if whole else number


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
