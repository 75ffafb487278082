"""How fast a model runs: cases in alternation, medians, and reports that say what they measured.

A machine's speed drifts while one measures (neighbours on the memory bus, clocks). So every case
has one turn in each round, beginning with another case each time, what it is compared to (the read
bandwidth) has its turn in the same rounds, and a figure is the median over the rounds.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from forerun.errors import CacheError

OnRound = Callable[[int, int], None]
"""Called before each round with its number, from 1, and the number of rounds."""


@dataclass(frozen=True)
class Setup:
    """What was measured, on what, and how to do it again.

    model: as it was asked for. sha256: `model_sha256` of its file or folder. weight_bytes: packed
    weights that every forward reads. command: gives these numbers again.
    """

    model: str
    sha256: str
    architecture: str
    weight_bytes: int
    cpu: str
    physical_cores: int
    logical_cpus: int
    isa: str
    threads: int
    forerun: str
    command: str


class StepTime(NamedTuple):
    """Wall-clock seconds of engine steps, and the part of them inside the native forward."""

    seconds: float
    native_seconds: float


@dataclass(frozen=True)
class StepRow:
    """One forward of `rows` query tokens of one request.

    ms, ms_best: median and least milliseconds over the rounds. ratio: `ms` over that of one row;
    None if one row wasn't measured. weight_gb_per_s: weight bytes over `ms`, in 1e9 bytes/s.
    bandwidth_share: that over the median read bandwidth of the same rounds.
    """

    rows: int
    ms: float
    ms_best: float
    ratio: float | None
    weight_gb_per_s: float
    bandwidth_share: float


@dataclass(frozen=True)
class StepReport:
    """Forwards of several widths after `context` cached tokens.

    read_gb_per_s, read_gb_per_s_best: read bandwidth, median and best over the rounds.
    decode_step_ms, outside_native_share: an engine step of one decoding request, whole, and the
    share of it spent outside native code (medians).
    """

    setup: Setup
    context: int
    repeats: int
    read_gb_per_s: float
    read_gb_per_s_best: float
    decode_step_ms: float
    outside_native_share: float
    rows: tuple[StepRow, ...]


class DecodeTrial(NamedTuple):
    """One run of a batch. `decode_steps` are those in which every request had exactly one token."""

    prefill_seconds: float
    decode_seconds: float
    decode_steps: int


@dataclass(frozen=True)
class DecodeRow:
    """A batch of equal requests that start together.

    prefill_tokens_per_s: all prompt tokens over the time until the last request has its first
    token. decode_tokens_per_s: output tokens of the whole batch over the time in which all of it
    decodes; per request, a `batch`-th of that. All three decode figures are None where some request
    ended before the last one had begun.
    """

    batch: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    decode_tokens_per_s_per_request: float | None
    decode_step_ms: float | None


@dataclass(frozen=True)
class DecodeReport:
    """Generation by batch size: `prompt_tokens` and `max_tokens` are per request."""

    setup: Setup
    prompt_tokens: int
    max_tokens: int
    repeats: int
    rows: tuple[DecodeRow, ...]


def rounds(n_cases: int, repeats: int, on_round: OnRound | None = None) -> Iterator[list[int]]:
    """For each round the order in which cases 0 .. n_cases - 1 have their turns."""
    for turn in range(repeats):
        if on_round is not None:
            on_round(turn + 1, repeats)
        yield [(turn + case) % n_cases for case in range(n_cases)]


def measure_steps(
    setup: Setup,
    *,
    context: int,
    rows: Sequence[int],
    repeats: int,
    forward: Callable[[int], float],
    decode_steps: Callable[[], StepTime],
    n_decode_steps: int,
    read_bandwidth: Callable[[], float],
    on_round: OnRound | None = None,
) -> StepReport:
    """Times forwards of `rows` query tokens each, `repeats` rounds of all of them.

    `forward(m)` runs one forward of m rows and returns its seconds; `decode_steps()` runs
    `n_decode_steps` engine steps; `read_bandwidth()` returns bytes per second.
    """
    seconds: list[list[float]] = [[] for _ in rows]
    steps: list[StepTime] = []
    bandwidths: list[float] = []
    for order in rounds(len(rows), repeats, on_round):
        bandwidths.append(read_bandwidth())
        steps.append(decode_steps())
        # What ran before has filled the caches with something else.
        forward(rows[order[0]])
        for case in order:
            seconds[case].append(forward(rows[case]))
    read = median(bandwidths)
    one = median(seconds[rows.index(1)]) if 1 in rows else None

    def row(m: int, times: list[float]) -> StepRow:
        typical = median(times)
        rate = setup.weight_bytes / typical
        return StepRow(
            rows=m,
            ms=typical * 1e3,
            ms_best=min(times) * 1e3,
            ratio=None if one is None else typical / one,
            weight_gb_per_s=rate / 1e9,
            bandwidth_share=rate / read,
        )

    return StepReport(
        setup=setup,
        context=context,
        repeats=repeats,
        read_gb_per_s=read / 1e9,
        read_gb_per_s_best=max(bandwidths) / 1e9,
        decode_step_ms=median(step.seconds for step in steps) / n_decode_steps * 1e3,
        outside_native_share=median(1 - step.native_seconds / step.seconds for step in steps),
        rows=tuple(row(m, times) for m, times in zip(rows, seconds, strict=True)),
    )


def measure_decode(
    setup: Setup,
    *,
    batches: Sequence[int],
    prompt_tokens: int,
    max_tokens: int,
    repeats: int,
    trial: Callable[[int], DecodeTrial],
    on_round: OnRound | None = None,
) -> DecodeReport:
    """Times generation at each batch size; `trial(batch)` runs one batch from start to end."""
    trials: list[list[DecodeTrial]] = [[] for _ in batches]
    for order in rounds(len(batches), repeats, on_round):
        for case in order:
            trials[case].append(trial(batches[case]))

    def row(batch: int, runs: list[DecodeTrial]) -> DecodeRow:
        prefill = batch * prompt_tokens / median(run.prefill_seconds for run in runs)
        per_step = [run.decode_seconds / run.decode_steps for run in runs if run.decode_steps]
        step = median(per_step) if per_step else None
        return DecodeRow(
            batch=batch,
            prefill_tokens_per_s=prefill,
            decode_tokens_per_s=None if step is None else batch / step,
            decode_tokens_per_s_per_request=None if step is None else 1 / step,
            decode_step_ms=None if step is None else step * 1e3,
        )

    return DecodeReport(
        setup=setup,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        repeats=repeats,
        rows=tuple(row(batch, runs) for batch, runs in zip(batches, trials, strict=True)),
    )


def logical_cpus() -> int:
    """Hardware threads of the machine, whether or not this process may use them."""
    return os.cpu_count() or 1


def model_sha256(path: Path) -> str:
    """SHA-256 of a model file, in hexadecimal.

    For a folder: of its one .safetensors file, or, where it has several, of the lines "HASH  NAME"
    that sha256sum prints for them in the order of their names. Raises CacheError for what can't be
    read.
    """
    if not path.is_dir():
        return _file_sha256(path)
    parts = sorted(path.glob("*.safetensors"))
    if len(parts) == 1:
        return _file_sha256(parts[0])
    lines = "".join(f"{_file_sha256(part)}  {part.name}\n" for part in parts)
    return hashlib.sha256(lines.encode()).hexdigest()


def _file_sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CacheError(f"{path} can't be read: {error.strerror}; check the file") from error
