"""What speculation gains: every task with and without, in alternation, and whether both texts are the same.

Times of a machine drift while one measures, so the two runs of a group of tasks follow each other at once, and which
goes first changes from group to group and from round to round. A ratio of summed times weighs long answers more, the
median of the pairs' ratios doesn't; both are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from types import MappingProxyType
from typing import NamedTuple

from forerun.engine.output import DrafterCounts
from forerun.measure.speed import Setup
from forerun.measure.tasks import Task, families, groups

ALL = "all"
"""The row over every task."""

ISOLATION = (
    "prefix cache off; every run has a scope of its own, so that no draft comes from another run's text; what the "
    "choice of draft lengths has learnt of times and acceptance goes on, as in any engine"
)

OnRun = Callable[[int, int, bool], None]
"""Called before each run of a group with its number, from 1, the number of runs, and whether it speculates."""


class Counts(NamedTuple):
    """Counts of one request or of several, as forerun.engine.output.SpeculationStats defines them."""

    decisions: int = 0
    drafted: int = 0
    proposed: int = 0
    computed: int = 0
    accepted: int = 0
    emitted: int = 0
    proposed_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()
    by_drafter: Mapping[str, DrafterCounts] = MappingProxyType({})


class Phases(NamedTuple):
    """Seconds of the parts of steps, each step counted once (see forerun.engine.output.SpeculationStats)."""

    draft: float = 0.0
    forward: float = 0.0
    verify: float = 0.0
    schedule: float = 0.0


class Run(NamedTuple):
    """One request. `first_token_seconds`: from submission to the first token; `seconds`: to the end."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seconds: float
    first_token_seconds: float
    counts: Counts

    @property
    def answer(self) -> tuple[str, tuple[int, ...], str]:
        """What must not differ."""
        return self.text, self.token_ids, self.finish_reason


class Trial(NamedTuple):
    """A group of tasks, answered together: seconds from the first submission to the last end, each request, and where
    the time of the steps went."""

    seconds: float
    runs: tuple[Run, ...]
    phases: Phases = Phases()


class Pair(NamedTuple):
    """A group of tasks of one category without and with speculation."""

    tasks: tuple[Task, ...]
    off: Trial
    on: Trial

    @property
    def differing(self) -> list[str]:
        """Ids of the tasks whose answers are not the same."""
        runs = zip(self.tasks, self.off.runs, self.on.runs, strict=True)
        return [task.task_id for task, off, on in runs if off.answer != on.answer]


@dataclass(frozen=True)
class Position:
    """Drafts at one depth d (0: right after the committed text).

    Attributes:
        proposed: draft tokens verified at this depth, whether or not the token before was accepted.
        accepted: rows that accepted at least d + 1 draft tokens.
        share: accepted over all drafted rows (not given that the token before was accepted), so it falls with d.
    """

    proposed: int
    accepted: int
    share: float | None


@dataclass(frozen=True)
class TaskResult:
    """One task in one round. `emitted`: tokens of the answer with speculation; seconds: from submission to the end."""

    task_id: str
    category: str
    off_seconds: float
    on_seconds: float
    emitted: int
    identical: bool


@dataclass(frozen=True)
class Difference:
    """Two answers to one task that should be the same.

    Attributes:
        token: index of the first token that differs, or of the first that only one of them has; None where only the
            texts or the finish reasons differ. character: likewise of the texts.
    """

    task_id: str
    token: int | None
    character: int | None
    off_text: str
    on_text: str
    off_finish_reason: str
    on_finish_reason: str


@dataclass(frozen=True)
class CategoryRow:
    """One category, over all rounds. None stands for "no data".

    Attributes:
        tasks, runs: tasks of the category; runs of them (tasks times rounds) behind each of the figures.
        output_tokens: tokens emitted by the runs without speculation (equal to those with it where `identical`).
        decisions, drafted, proposed, computed, accepted, emitted, by_drafter: counts of the runs with speculation, as
            forerun.engine.output.SpeculationStats defines them.
        off_seconds, on_seconds: summed times of the runs, prompts included.
        draft_seconds, forward_seconds, verify_seconds, schedule_seconds: parts of on_seconds.
        off_tokens_per_s, on_tokens_per_s: emitted tokens over the time of the runs, prompts included.
        ratio: summed time without over summed time with speculation.
        ratio_median: median over the groups of the same ratio.
        decode_ratio: like `ratio`, of the time after each request's first token.
        tokens_per_step: emitted tokens over rows that chose tokens (decisions), with speculation.
        acceptance: accepted over proposed draft tokens. wasted: the rest, 1 - acceptance.
        drafted_share: rows that verified a draft, over rows that chose tokens.
        positions: by depth in the draft.
        off_p50_s, ...: quantiles of a request's time, from submission to its end (interpolated between neighbours).
        p99_ratio: on_p99_s over off_p99_s.
        identical: whether text, token ids and finish reason agreed in every pair.
    """

    category: str
    tasks: int
    runs: int
    output_tokens: int
    decisions: int
    drafted: int
    proposed: int
    computed: int
    accepted: int
    emitted: int
    by_drafter: dict[str, dict[str, int]]
    off_seconds: float
    on_seconds: float
    draft_seconds: float
    forward_seconds: float
    verify_seconds: float
    schedule_seconds: float
    off_tokens_per_s: float
    on_tokens_per_s: float
    ratio: float
    ratio_median: float
    decode_ratio: float | None
    tokens_per_step: float | None
    acceptance: float | None
    wasted: float | None
    drafted_share: float | None
    positions: tuple[Position, ...]
    off_p50_s: float
    off_p99_s: float
    on_p50_s: float
    on_p99_s: float
    p99_ratio: float
    identical: bool


@dataclass(frozen=True)
class SpeculationReport:
    """The whole comparison.

    Attributes:
        date: when it began, UTC, ISO 8601.
        draft, draft_len: as they were asked for. tasks_sha256: of the task file.
        max_tokens: cap of an answer; a task's own counts where it is smaller.
        isolation: why no run could profit from another.
        left_out: ids of tasks that the model's context can't hold.
        complete: False where an interrupt ended it; the rest is over the groups that were finished.
        results: every task of every round, in the order of the runs.
        differences: answers that were not the same.
        differing: the ids of their tasks, each once.
    """

    setup: Setup
    date: str
    draft: str
    draft_len: str
    tasks_file: str
    tasks_sha256: str
    temperature: float
    max_tokens: int
    batch: int
    rounds: int
    isolation: str
    left_out: tuple[str, ...]
    complete: bool
    rows: tuple[CategoryRow, ...]
    results: tuple[TaskResult, ...]
    differences: tuple[Difference, ...]
    differing: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether every text was the same."""
        return not self.differing


def measure_pairs(
    tasks: Sequence[Task],
    *,
    batch: int,
    repeats: int,
    trial: Callable[[Sequence[Task], bool], Trial],
    on_run: OnRun | None = None,
) -> Iterator[Pair]:
    """Answers every group of up to `batch` tasks of a category twice, `repeats` times over; yields each pair once done.

    `trial(tasks, speculate)` answers these tasks together from nothing.
    """
    together = groups(tasks, batch)
    total, done = 2 * len(together) * repeats, 0
    for turn in range(repeats):
        for n, group in enumerate(together):
            trials: dict[bool, Trial] = {}
            first = bool((turn + n) % 2)
            for speculate in (first, not first):
                done += 1
                if on_run is not None:
                    on_run(done, total, speculate)
                trials[speculate] = trial(group, speculate)
            yield Pair(tuple(group), trials[False], trials[True])


def rows_of(pairs: Sequence[Pair]) -> tuple[CategoryRow, ...]:
    """A row for each category and family of categories in the order of appearance, and one over all of them."""
    by_category: dict[str, list[Pair]] = {}
    for pair in pairs:
        for name in families(pair.tasks[0].category):
            by_category.setdefault(name, []).append(pair)
    if len({pair.tasks[0].category for pair in pairs}) > 1 and not _is_one_family(by_category, len(pairs)):
        by_category[ALL] = list(pairs)
    return tuple(_row(name, found) for name, found in by_category.items())


def differing_of(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Ids of tasks whose answers differed in any round, each once."""
    return tuple(dict.fromkeys(task for pair in pairs for task in pair.differing))


def results_of(pairs: Sequence[Pair]) -> tuple[TaskResult, ...]:
    """Each task of each pair."""
    return tuple(
        TaskResult(task.task_id, task.category, off.seconds, on.seconds, on.counts.emitted, off.answer == on.answer)
        for pair in pairs
        for task, off, on in zip(pair.tasks, pair.off.runs, pair.on.runs, strict=True)
    )


def differences_of(pairs: Sequence[Pair]) -> tuple[Difference, ...]:
    """Both answers and where they part, for each that differs."""
    return tuple(
        Difference(
            task.task_id,
            _parting(off.token_ids, on.token_ids),
            _parting(off.text, on.text),
            off.text,
            on.text,
            off.finish_reason,
            on.finish_reason,
        )
        for pair in pairs
        for task, off, on in zip(pair.tasks, pair.off.runs, pair.on.runs, strict=True)
        if off.answer != on.answer
    )


def total(counts: Iterable[Counts]) -> Counts:
    """Counts of several requests as one."""
    every = list(counts)

    def summed(lists: list[tuple[int, ...]]) -> tuple[int, ...]:
        return tuple(sum(column) for column in zip_longest(*lists, fillvalue=0))

    return Counts(
        decisions=sum(one.decisions for one in every),
        drafted=sum(one.drafted for one in every),
        proposed=sum(one.proposed for one in every),
        computed=sum(one.computed for one in every),
        accepted=sum(one.accepted for one in every),
        emitted=sum(one.emitted for one in every),
        proposed_by_position=summed([one.proposed_by_position for one in every]),
        accepted_by_position=summed([one.accepted_by_position for one in every]),
        by_drafter={
            name: DrafterCounts(
                *map(sum, zip(*(one.by_drafter[name] for one in every if name in one.by_drafter), strict=True))
            )
            for name in dict.fromkeys(name for one in every for name in one.by_drafter)
        },
    )


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, 0 <= q <= 1, on the line between the two values next to rank q (n - 1)."""
    ordered = sorted(values)
    rank = q * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def _is_one_family(by_category: dict[str, list[Pair]], n_pairs: int) -> bool:
    """Whether some family already has every pair, so that a row over all would say the same."""
    return any(len(found) == n_pairs for found in by_category.values())


def _row(category: str, pairs: Sequence[Pair]) -> CategoryRow:
    off = [run for pair in pairs for run in pair.off.runs]
    on = [run for pair in pairs for run in pair.on.runs]
    off_seconds, on_seconds = (
        sum(pair.off.seconds for pair in pairs),
        sum(pair.on.seconds for pair in pairs),
    )
    off_decode, on_decode = (sum(run.seconds - run.first_token_seconds for run in runs) for runs in (off, on))
    tokens = sum(len(run.token_ids) for run in off)
    counts = total(run.counts for run in on)
    phases = Phases(*map(sum, zip(*(pair.on.phases for pair in pairs), strict=True)))
    off_times, on_times = [run.seconds for run in off], [run.seconds for run in on]
    off_p99, on_p99 = quantile(off_times, 0.99), quantile(on_times, 0.99)
    return CategoryRow(
        category=category,
        tasks=len({task.task_id for pair in pairs for task in pair.tasks}),
        runs=len(on),
        output_tokens=tokens,
        decisions=counts.decisions,
        drafted=counts.drafted,
        proposed=counts.proposed,
        computed=counts.computed,
        accepted=counts.accepted,
        emitted=counts.emitted,
        by_drafter={name: one._asdict() for name, one in counts.by_drafter.items()},
        off_seconds=off_seconds,
        on_seconds=on_seconds,
        draft_seconds=phases.draft,
        forward_seconds=phases.forward,
        verify_seconds=phases.verify,
        schedule_seconds=phases.schedule,
        off_tokens_per_s=tokens / off_seconds,
        on_tokens_per_s=sum(len(run.token_ids) for run in on) / on_seconds,
        ratio=off_seconds / on_seconds,
        ratio_median=median(pair.off.seconds / pair.on.seconds for pair in pairs),
        decode_ratio=off_decode / on_decode if on_decode > 0 else None,
        tokens_per_step=_share(counts.emitted, counts.decisions),
        acceptance=_share(counts.accepted, counts.proposed),
        wasted=_share(counts.proposed - counts.accepted, counts.proposed),
        drafted_share=_share(counts.drafted, counts.decisions),
        positions=tuple(
            Position(proposed, accepted, _share(accepted, counts.drafted))
            for proposed, accepted in zip_longest(counts.proposed_by_position, counts.accepted_by_position, fillvalue=0)
        ),
        off_p50_s=quantile(off_times, 0.5),
        off_p99_s=off_p99,
        on_p50_s=quantile(on_times, 0.5),
        on_p99_s=on_p99,
        p99_ratio=on_p99 / off_p99,
        identical=not any(pair.differing for pair in pairs),
    )


def _parting(one: Sequence[object], other: Sequence[object]) -> int | None:
    """The first index at which two sequences are not the same; None if they are."""
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return n
    return None if len(one) == len(other) else min(len(one), len(other))


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
