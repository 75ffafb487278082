#!/usr/bin/env python3
"""Whether compiling a large grammar holds up the requests that run: their time between tokens with and without.

    python bench/grammar_stall.py -m qwen2.5-coder-1.5b-instruct

One thread drives an engine with --requests running requests, without drafts, so that every step gives each of them one
token. In turns, --seconds at a time, another thread leaves the engine alone, or has it compile schemas of --values enum
values and --bytes bytes, one after the other and each with other content, so that no cache helps. Times between two
tokens of a request count as "compiling" if they overlap the time from a schema being handed over to its grammar being
ready, and as "quiet" if they lie in a quiet turn. The exit code is 1 if the 99th percentile rises by more than 20%.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import random
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from forerun import Engine, RequestHandle, SamplingParams
from forerun.cli.bench_setup import setup_of
from forerun.constrain.schema import JsonSchema
from forerun.errors import ForerunError
from forerun.measure.passage import PASSAGE, distinct_prompts
from forerun.measure.speculate import quantile
from forerun.measure.speed import Setup
from forerun.models.download import resolve

PROMPT_TOKENS = 32
MAX_TOKENS = 2048
MOST = 1.2
SETTLE = 0.2
"""Seconds at the beginning of a quiet turn that don't count."""


class Gap(NamedTuple):
    """The time between two tokens of one request; on the clock of time.perf_counter."""

    began: float
    ended: float


class Window(NamedTuple):
    """A stretch of time."""

    began: float
    ended: float


class Driver(threading.Thread):
    """Steps an engine with a fixed number of requests that begin anew when they end, and notes when tokens come."""

    def __init__(self, engine: Engine, n: int) -> None:
        super().__init__(name="driver")
        self._engine = engine
        ids = engine.tokenizer.encode(PASSAGE)
        self._prompts = distinct_prompts(ids, n, PROMPT_TOKENS)
        self._handles: list[RequestHandle] = [self._submit(prompt) for prompt in self._prompts]
        self._last: list[tuple[int, float]] = [(0, 0.0)] * n
        self._over = threading.Event()
        self.gaps: list[Gap] = []
        self.failure: BaseException | None = None

    def _submit(self, prompt: Sequence[int]) -> RequestHandle:
        return self._engine.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True), speculate=False)

    def run(self) -> None:
        """Until `stop`."""
        try:
            while not self._over.is_set():
                self._engine.step()
                self._note(time.perf_counter())
        except BaseException as error:
            self.failure = error

    def _note(self, now: float) -> None:
        for n, handle in enumerate(self._handles):
            count, at = self._last[n]
            produced = handle.live.request.n_output
            if produced > count:
                if count:
                    self.gaps.append(Gap(at, now))
                self._last[n] = (produced, now)
            if handle.finished:
                self._handles[n], self._last[n] = self._submit(self._prompts[n]), (0, 0.0)

    def stop(self) -> None:
        """Ends the thread and its requests; raises what made it fail."""
        self._over.set()
        self.join()
        for handle in self._handles:
            handle.cancel()
        if self.failure is not None:
            raise self.failure


class Schemas:
    """Large schemas, each with other content."""

    def __init__(self, n_values: int, n_bytes: int) -> None:
        each = max(12, n_bytes // n_values - 3)
        rng = random.Random(1)
        self._values = [
            f"{n:06d}-" + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789 ", k=each - 7))
            for n in range(n_values)
        ]
        self._count = itertools.count()

    def next(self) -> dict[str, Any]:
        """One that was never there."""
        rotated = next(self._count)
        mark = hashlib.sha256(str(rotated).encode()).hexdigest()[:10]
        values = [f"{mark}{value[10:]}-{n}" if n % 7 == 0 else value for n, value in enumerate(self._values)]
        return {
            "type": "object",
            "properties": {"code": {"type": "string", "enum": values}, "checked": {"type": "boolean"}},
            "required": ["code", "checked"],
            "additionalProperties": False,
        }


class Figures(NamedTuple):
    """Milliseconds between tokens. count: how many gaps."""

    count: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Figures:
        """Of gaps in seconds."""
        return cls(len(seconds), *(1e3 * quantile(seconds, q) for q in (0.5, 0.99, 1.0)))


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        compile_s_p50, compile_s_max: from a schema's submission to its grammar being ready.
        ratio_p50, ratio_p99: compiling over quiet.
    """

    setup: Setup
    date: str
    requests: int
    rounds: int
    schema_bytes: int
    enum_values: int
    compiles: int
    compile_s_p50: float
    compile_s_max: float
    quiet: Figures
    compiling: Figures
    ratio_p50: float
    ratio_p99: float


def compile_once(engine: Engine, schema: dict[str, Any]) -> Window:
    """Has a schema compiled; returns from when to when."""
    began = time.perf_counter()
    engine.prepare_constraints(JsonSchema(schema))
    return Window(began, time.perf_counter())


def in_windows(gaps: Sequence[Gap], windows: Sequence[Window], *, whole: bool) -> list[float]:
    """Lengths of the gaps that overlap some window, or lie wholly in one."""
    found = []
    for gap in gaps:
        for window in windows:
            inside = (
                window.began <= gap.began and gap.ended <= window.ended
                if whole
                else gap.began < window.ended and window.began < gap.ended
            )
            if inside:
                found.append(gap.ended - gap.began)
                break
    return found


def measure(engine: Engine, arguments: argparse.Namespace, setup: Setup) -> Report:
    """Runs the turns."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    schemas = Schemas(arguments.values, arguments.bytes)
    n_bytes = len(json.dumps(schemas.next()))
    engine.prepare_constraints()
    driver = Driver(engine, arguments.requests)
    quiet: list[Window] = []
    compiling: list[Window] = []
    driver.start()
    try:
        for turn in range(2 * arguments.rounds):
            until = time.perf_counter() + arguments.seconds
            if turn % 2 == 0:
                began = time.perf_counter() + SETTLE
                time.sleep(arguments.seconds)
                quiet.append(Window(began, time.perf_counter()))
                continue
            while time.perf_counter() < until and driver.is_alive():
                compiling.append(compile_once(engine, schemas.next()))
    finally:
        driver.stop()
    without = Figures.of(in_windows(driver.gaps, quiet, whole=True))
    during = Figures.of(in_windows(driver.gaps, compiling, whole=False))
    took = [window.ended - window.began for window in compiling]
    return Report(
        setup=setup,
        date=date,
        requests=arguments.requests,
        rounds=arguments.rounds,
        schema_bytes=n_bytes,
        enum_values=arguments.values,
        compiles=len(compiling),
        compile_s_p50=quantile(took, 0.5),
        compile_s_max=max(took),
        quiet=without,
        compiling=during,
        ratio_p50=during.p50_ms / without.p50_ms,
        ratio_p99=during.p99_ms / without.p99_ms,
    )


def show(report: Report) -> None:
    """For people."""
    setup = report.setup
    print(f"{setup.model}, sha256 {setup.sha256}")
    print(f"{setup.cpu}, {setup.physical_cores} cores, {setup.isa}, {setup.threads} threads, forerun {setup.forerun}")
    print(setup.command)
    print(
        f"{report.requests} requests; {report.compiles} schemas of {report.schema_bytes} bytes with "
        f"{report.enum_values} enum values: {report.compile_s_p50:.2f} s each (median; at most "
        f"{report.compile_s_max:.2f} s)"
    )
    print(f"{'ms between tokens':>18s} {'count':>8s} {'p50':>9s} {'p99':>9s} {'max':>9s}")
    for name, figures in (("quiet", report.quiet), ("compiling", report.compiling)):
        cells = f"{figures.p50_ms:9.2f} {figures.p99_ms:9.2f} {figures.max_ms:9.2f}"
        print(f"{name:>18s} {figures.count:8d} {cells}")
    print(f"compiling / quiet: {report.ratio_p50:.3f} at p50, {report.ratio_p99:.3f} at p99")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="catalog name or path")
    parser.add_argument("--requests", type=int, default=4, help="requests that run")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each kind")
    parser.add_argument("--seconds", type=float, default=5.0, help="of a turn")
    parser.add_argument("--values", type=int, default=5000, help="enum values of a schema")
    parser.add_argument("--bytes", type=int, default=1_000_000, help="bytes of a schema")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if min(arguments.requests, arguments.rounds, arguments.values) < 1 or arguments.seconds <= 2 * SETTLE:
        parser.error(f"--requests, --rounds and --values must be at least 1, --seconds more than {2 * SETTLE}")
    try:
        path = resolve(arguments.model)
        room = arguments.requests * (MAX_TOKENS + 2 * PROMPT_TOKENS) + 256
        engine = Engine(path, kv_tokens=room, max_rows=arguments.requests, draft="none", prefix_cache=False)
        setup = setup_of(engine, arguments.model, path, [])
        setup = dataclasses.replace(setup, command=shlex.join(["python", "bench/grammar_stall.py", *sys.argv[1:]]))
        report = measure(engine, arguments, setup)
    except ForerunError as error:
        sys.exit(f"grammar_stall: {error}")
    if arguments.json:
        fields = dataclasses.asdict(report)
        fields |= {name: getattr(report, name)._asdict() for name in ("quiet", "compiling")}
        print(json.dumps(fields, indent=2))
    else:
        show(report)
    if report.ratio_p99 > MOST:
        sys.exit(1)


if __name__ == "__main__":
    main()
