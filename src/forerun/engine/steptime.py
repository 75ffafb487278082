"""What a step costs: seconds of the target's forward by query tokens, and seconds of drafting.

Both are measured. The table of the forward is taken once per model, threads, instruction set and processor, kept on
disk, and corrected by every step from then on. Only ratios decide a draft length, so a neighbour that slows everything
down alike changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from forerun import _native
from forerun.models.executor import Executor
from forerun.models.partial import write_atomically
from forerun.ops import BLOCK, StepInput, cpu_name

VERSION = 2
"""Of the cache file; another one is measured again."""

# In the order of their worth when time is short. Kernels work on 8 rows at a time, so the costs just behind a multiple
# of 8 say more than those between.
_SIZES = (1, 8, 4, 2, 16, 9, 3, 5, 6, 12, 32, 24, 17, 25, 64)
_SAMPLES = 7  # of a size; with as many, nothing more is measured
_MOST_BYTES = 1 << 16
_ESSENTIAL = 4  # sizes worth waiting for: what lies past them is only guessed
_UNKNOWN_SLOPE = 0.25  # of a table of one size: cheap enough that drafts are tried, and then corrected
_FAR = (64, 128, 256, 512, 1024, 2048, 4096)
_DENSE = 256
_MIN_SECONDS = 1e-9

_LEVEL_GAIN = 0.2
_SHAPE_GAIN = 0.1
_FAR_LEVEL_GAIN = 0.02
_FAR_SHAPE_GAIN = 0.3
_OUTLIER = 0.3  # one step's surprise moves the logarithm by a gain times this at most


class StepTimes:
    """T(n), the seconds of a forward over n query tokens, as of now.

    Seconds are `level` times a shape. The level follows every observation (other programs on the machine come and go);
    the shape only follows steps whose size differs from the one before, because only two sizes seen close together say
    how they compare. So growing contexts, which make each query token dearer, end up in the shape, and a slower clock
    in the level. One step's surprise is limited, so that a stall counts as little as any other outlier.

    Between the sizes that are known, T is linear; past the last one it goes on with the slope of the last eight tokens
    or more. It never falls.

    Args:
        seconds: measured seconds by size; size 1 must be there. Noise only ever adds time, so a time above that of a
            larger size is taken down to it.

    Raises `ValueError` for a table without size 1 or with times that are not positive and finite.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        known = sorted(seconds)
        if not known or known[0] != 1:
            raise ValueError("a step-time table starts at one token")
        if not all(math.isfinite(seconds[n]) and seconds[n] > 0 for n in known):
            raise ValueError("step times must be positive and finite")
        values = [seconds[n] / seconds[1] for n in known]
        for i in range(len(values) - 2, -1, -1):
            values[i] = min(values[i], values[i + 1])
        last = known[-1]
        back = max(i for i, n in enumerate(known) if n <= max(last - 8, 1))
        slope = (values[-1] - values[back]) / (last - known[back]) if last > 1 else values[0]
        # Sizes that were not measured are there to be corrected, too.
        sizes = sorted({*known, *_SIZES, *_FAR})
        self._measured = last
        self._shape = [
            float(np.interp(n, known, values)) if n <= last else values[-1] + slope * (n - last) for n in sizes
        ]
        self._sizes = sizes
        self._dense = [0.0] * (_DENSE + 1)
        for i in range(len(sizes) - 1):
            self._fill(i)
        self._fill_first()
        self._level = seconds[1]
        self._observed = 0
        self._last = -1
        self._outliers = [0] * len(sizes)  # in a row, by the size at or below; negative: too quick

    @property
    def level(self) -> float:
        """Seconds of a unit of `shape` now; about those of a step of one token."""
        return self._level

    def shape(self, base: int, count: int) -> list[float]:
        """T(base) .. T(base + count), count + 1 values, in units of `level`."""
        if base + count <= _DENSE:
            return self._dense[base : base + count + 1]
        return [self._at(n) for n in range(base, base + count + 1)]

    def seconds(self, n: int) -> float:
        """T(n)."""
        return self._level * self._at(n)

    def observe(self, n: int, seconds: float) -> None:
        """A forward over `n` query tokens took `seconds`. Times that are no times are ignored."""
        if n < 1 or not _MIN_SECONDS < seconds < math.inf:
            return
        error = math.log(seconds / (self._level * self._at(n)))
        near = n <= self._measured
        if near and self._observed == 0:
            self._level *= math.exp(error)  # the table may be from another day
            self._observed = 1
            self._last = n
            return
        # An outlier that repeats itself is none: what the same size may move grows each time.
        at = bisect_right(self._sizes, n) - 1
        run = self._outliers[at]
        limit = _OUTLIER * (1 + abs(run))
        if abs(error) <= _OUTLIER:
            self._outliers[at] = 0
        else:
            sign = 1 if error > 0 else -1
            self._outliers[at] = run + sign if run * sign >= 0 else sign
            if run * sign < 0:
                limit = _OUTLIER
            error = sign * min(abs(error), limit)
        if near:
            self._observed += 1
            self._level *= math.exp(error * max(_LEVEL_GAIN, 1.0 / self._observed))
            gain = _SHAPE_GAIN if n != self._last else 0.0
            self._last = n
        else:
            self._level *= math.exp(error * _FAR_LEVEL_GAIN)
            gain = _FAR_SHAPE_GAIN
        if gain:
            self._bend(n, gain * error)

    def _bend(self, n: int, change: float) -> None:
        """Changes the logarithm of the shape at `n`, through the sizes on either side."""
        sizes, shape = self._sizes, self._shape
        change = math.expm1(change)
        i = bisect_right(sizes, n) - 1
        low = high = i
        if sizes[i] == n or i == len(sizes) - 1:
            shape[i] *= 1.0 + change
        else:
            share = (n - sizes[i]) / (sizes[i + 1] - sizes[i])
            shape[i] *= 1.0 + change * (1.0 - share)
            shape[i + 1] *= 1.0 + change * share
            high = i + 1
            if shape[i] > shape[high]:
                shape[i] = shape[high] = max(shape[i], shape[high]) if change > 0 else min(shape[i], shape[high])
        # What was just seen outweighs what lies around it.
        while low > 0 and shape[low - 1] > shape[low]:
            low -= 1
            shape[low] = shape[low + 1]
        while high < len(shape) - 1 and shape[high + 1] < shape[high]:
            high += 1
            shape[high] = shape[high - 1]
        for segment in range(max(low - 1, 0), min(high + 1, len(sizes) - 1)):
            self._fill(segment)
        if low == 0:
            self._fill_first()

    def _fill(self, i: int) -> None:
        a, b = self._sizes[i], self._sizes[i + 1]
        if a > _DENSE:
            return
        start = self._shape[i]
        slope = (self._shape[i + 1] - start) / (b - a)
        count = min(b, _DENSE) - a + 1
        self._dense[a : a + count] = [start + slope * k for k in range(count)]

    def _fill_first(self) -> None:
        self._dense[0] = self._dense[1] = self._shape[0]

    def _at(self, n: int) -> float:
        if n <= _DENSE:
            return self._dense[n]
        sizes, shape = self._sizes, self._shape
        i = min(bisect_right(sizes, n) - 1, len(sizes) - 2)
        return shape[i] + (shape[i + 1] - shape[i]) * (n - sizes[i]) / (sizes[i + 1] - sizes[i])


class DraftCost:
    """Seconds of drafting as `per_row` for each request asked plus `per_node` for each node proposed.

    Least squares over the last ten steps or so, with neither part below 0. Where the steps don't tell the two apart
    (always as many nodes), both get a share. A step that took three times what was expected counts as three times:
    a draft model computes the whole prompt in its first call.
    """

    def __init__(self) -> None:
        self.known = False
        self.per_row = 0.0
        self.per_node = 0.0
        self._seen = 0
        self._rr = self._rn = self._nn = self._ry = self._ny = 0.0

    def observe(self, rows: int, nodes: int, seconds: float) -> None:
        """A call for `rows` requests proposed `nodes` and took `seconds`."""
        if rows < 1 or not 0 <= seconds < math.inf:
            return
        keep = 0.9
        if self._seen:
            expected = self.per_row * rows + self.per_node * nodes
            if self._seen < 4 and 3.0 * seconds < expected:
                keep = 0.0  # what came before was the prompt's
            elif self._seen > 1:
                seconds = min(seconds, 3.0 * expected + 1e-6)
        self._seen += 1
        self._rr = keep * self._rr + rows * rows
        self._rn = keep * self._rn + rows * nodes
        self._nn = keep * self._nn + nodes * nodes
        self._ry = keep * self._ry + rows * seconds
        self._ny = keep * self._ny + nodes * seconds
        rr, nn = self._rr * 1.001, self._nn * 1.001 + 1e-9
        det = rr * nn - self._rn * self._rn
        per_row = (self._ry * nn - self._ny * self._rn) / det
        per_node = (self._ny * rr - self._ry * self._rn) / det
        if per_node < 0:
            per_row, per_node = self._ry / rr, 0.0
        elif per_row < 0:
            per_row, per_node = 0.0, self._ny / nn
        self.per_row, self.per_node = per_row, per_node
        self.known = self._seen > 1


Samples = dict[int, list[float]]
"""By number of tokens: for 1, seconds; for others, times of the seconds that 1 took just before."""


def step_times(executor: Executor, fingerprint: str, cache: Path | None, *, budget: float = 2.0) -> StepTimes:
    """The table of a model on this machine: from the cache, or measured (and cached) now.

    Call it before the first request: it uses the first blocks of the executor's KV. `budget` is the time in seconds
    that measuring may take, about; while a size has few samples, later starts add some in a sixth of that, so that one
    bad moment isn't believed for good. A file that is damaged or of another version, model, processor, instruction set,
    number of threads or build of the kernels is measured again. A cache that can't be read or written is no error: the
    next start measures.
    """
    tape = executor.tape
    identity: dict[str, object] = {
        "version": VERSION,
        "fingerprint": fingerprint,
        "threads": tape.threads,
        "isa": tape.isa,
        "kernels": kernels(),
        "processor": cpu_name(),
    }
    path = None if cache is None else cache / "steptime" / f"{fingerprint}-{tape.isa}-{tape.threads}.json"
    samples = {} if path is None else read_samples(path, identity)
    if any(len(samples.get(n, ())) < _SAMPLES for n in measurable(executor)[:_ESSENTIAL]):
        measure_samples(executor, samples, budget=budget / 6 if samples else budget)
        if path is not None:
            save_samples(path, identity, samples)
    return StepTimes(table_of(samples))


def table_of(samples: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Seconds by number of tokens: the least seen of 1, and the median of how many times as long others took."""
    alone = min(samples[1])
    return {n: alone if n == 1 else alone * statistics.median(samples[n]) for n in sorted(samples)}


def measurable(executor: Executor) -> list[int]:
    """Sizes that this executor can run on an empty KV, in the order of their worth."""
    tape = executor.tape
    limit = min(tape.max_tokens, tape.max_outputs, executor.kv.blocks * BLOCK, executor.max_positions)
    return [n for n in _SIZES if n <= limit]


def measure_samples(
    executor: Executor, samples: Samples, *, budget: float = 2.0, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Adds samples of forwards over 1, 2, ... tokens after an empty context.

    Each size is timed right after a single token: what other programs take slows both alike, and the ratio stays.
    Sizes are measured in the order of their worth while `budget` seconds last, then again. The first few of a new
    table may take four times the budget; 1 is always measured.
    """
    sizes = measurable(executor)
    chosen = np.zeros(max(sizes), dtype=np.int32)
    blocks = list(range(-(-max(sizes) // BLOCK)))

    def forward(n: int) -> float:
        step = StepInput.chain(np.zeros(n, dtype=np.int32), 0, blocks, n)
        began = clock()
        executor.forward(step, 0, chosen[:n])
        return max(clock() - began, _MIN_SECONDS)

    end = clock() + budget
    first, others = sizes[1:_ESSENTIAL], sizes[_ESSENTIAL:]
    parts = [(sizes[1:], _SAMPLES, end)]
    if not samples:
        parts = [(first, 2, end + 3 * budget), (others, 1, end), *parts]
    forward(1)  # pages of the weights and of the KV are touched for the first time
    alone = samples.setdefault(1, [])
    alone.append(forward(1))
    for part, passes, latest in parts:
        for n in part * passes:
            known = samples.setdefault(n, [])
            ratio = known[-1] if known else _guess(samples, n)
            if len(known) < _SAMPLES and clock() + alone[-1] * (1 + ratio) <= latest:
                alone.append(forward(1))
                known.append(forward(n) / alone[-1])
    samples[1] = sorted(alone)[:1] * _SAMPLES  # only the least is of use
    for n in [n for n, known in samples.items() if not known]:
        del samples[n]


def _guess(samples: Mapping[int, Sequence[float]], n: int) -> float:
    """Times as long as 1 a size may take that was not measured yet, on the safe side."""
    below = max((m for m, known in samples.items() if 1 < m < n and known), default=1)
    return n / below * (samples[below][-1] if below > 1 else 1.0)


def read_samples(path: Path, identity: Mapping[str, object]) -> Samples:
    """The samples of a cache file with that identity; empty where there is no such file."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return {}
        content = json.loads(path.read_bytes())
        if {key: content[key] for key in identity} != dict(identity):
            return {}
        samples = {int(n): [float(t) for t in known] for n, known in content["samples"].items()}
        StepTimes(table_of(samples))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return {}
    return samples


def save_samples(path: Path, identity: Mapping[str, object], samples: Samples) -> None:
    """Keeps samples for the next start, if the cache can be written."""
    content = {**identity, "samples": {str(n): known for n, known in samples.items()}}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(content).encode())


def kernels() -> int:
    """A checksum of the native module: other kernels take other times."""
    return zlib.crc32(Path(_native.__file__ or "").read_bytes())
