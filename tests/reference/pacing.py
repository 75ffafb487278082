"""A simulated engine for draft lengths: requests whose drafts succeed by a given process, steps of a given cost.

Time is in units of a step of one token. Everything is drawn from fixed seeds, so a run is a pure function.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from forerun.draft.base import NO_DRAFT, DraftTree
from forerun.engine.auto import AutoPace
from forerun.engine.pace import FixedPace, Pace
from forerun.engine.steptime import StepTimes

AVX2 = {1: 1.0, 2: 1.2, 3: 1.4, 4: 1.6, 5: 1.8, 8: 2.6, 16: 4.8, 32: 9.0}
AVX512 = {1: 1.0, 2: 1.05, 3: 1.15, 4: 1.25, 5: 1.35, 8: 1.9, 16: 3.7, 32: 7.0}

PROMPT = 10

Process = Callable[[int, int], float]
"""Probability that a draft token at an output position and a depth is right, its parent being accepted."""


def constant(p: float) -> Process:
    """The same everywhere."""
    return lambda position, depth: p  # noqa: ARG005


def phases(good: float, bad: float, length: int, *, first_good: bool = True) -> Process:
    """`length` output tokens of one kind, then as many of the other."""
    return lambda position, depth: good if (position // length % 2 == 0) is first_good else bad  # noqa: ARG005


def by_depth(*p: float) -> Process:
    """One probability for each depth, the last one for all deeper."""
    return lambda position, depth: p[min(depth, len(p) - 1)]  # noqa: ARG005


@dataclass(frozen=True)
class Spec:
    """A request: its process, its output tokens, and what the drafter says of itself (None: nothing).

    silent, second: where (output position) the drafter has nothing, and the process of a drafter "second" that is
    asked instead, as by `CombinedDrafter`.
    """

    process: Process
    length: int = 64
    confidence: Callable[[float], float] | None = None
    drafter: str = "scripted"
    silent: Callable[[int], bool] = lambda _: False
    second: Process | None = None


@dataclass
class _Live:
    key: int
    spec: Spec
    tokens: list[int]
    draws: list[float]
    done: int = 0


@dataclass
class Machine:
    """What things cost: T by query tokens (piecewise linear), drafting by row and node, and noise on what is measured.

    second: of a node of the second drafter.
    noise: the logarithm of a measured forward is off by up to this much; the simulated time is not.
    """

    table: Mapping[int, float]
    per_row: float = 0.0005
    per_node: float = 0.0
    second: float = 0.0
    noise: float = 0.0
    unit: float = 0.02

    def forward(self, n: int) -> float:
        """T(n)."""
        sizes = sorted(self.table)
        a, b = next(((a, b) for a, b in itertools.pairwise(sizes) if n <= b), (sizes[-2], sizes[-1]))
        return self.table[a] + (self.table[b] - self.table[a]) * (n - a) / (b - a)


@dataclass
class Result:
    """Of a run: time with drafts, time without any, and time of each request from start to end."""

    time: float
    plain: float
    steps: int
    emitted: int
    verified: int
    proposed: int

    @property
    def ratio(self) -> float:
        """Speed relative to no drafting."""
        return self.plain / self.time


class Simulation:
    """An engine with one `Pace`, over as many batches as are run.

    shadow: whether the pace sees the text. limited: whether the drafter keeps to the limits of its parts.
    """

    def __init__(
        self, pace: Pace | None, machine: Machine, *, seed: int = 0, shadow: bool = True, limited: bool = True
    ) -> None:
        self.limited = limited
        self.pace = pace
        self.machine = machine
        self.shadow = shadow
        self._seed = seed
        self._noise = random.Random(seed)
        self._keys = 0

    def run(self, specs: Sequence[Spec], *, chunks: Mapping[int, int] | None = None) -> Result:
        """All requests at once, until the last one ends. `chunks`: prompt tokens of others by step."""
        chunks = chunks or {}
        pace, machine = self.pace, self.machine
        lives: list[_Live] = []
        for spec in specs:
            draw = random.Random(self._seed * 1_000_003 + self._keys)  # the same for every pace
            draws = [draw.random() for _ in range(spec.length + 80)]
            live = _Live(self._keys, spec, list(range(PROMPT)), draws)
            self._keys += 1
            lives.append(live)
            if pace is not None:
                pace.begin(live.key, live.tokens) if self.shadow else pace.begin(live.key)
        time = plain = 0.0
        step = emitted = verified = n_proposed = 0
        for t in range(max(spec.length for spec in specs)):
            plain += machine.forward(sum(spec.length > t for spec in specs) + chunks.get(t, 0))
        while any(live.done < live.spec.length for live in lives):
            active = [live for live in lives if live.done < live.spec.length]
            base = len(active) + chunks.get(step, 0)
            step += 1
            draft = 0.0
            proposed = 0
            cut: dict[int, DraftTree] = {}
            if pace is not None:
                granted = {}
                for live in active:
                    wish = min(pace.wish(live.key), live.spec.length - live.done - 1)
                    if wish > 0:
                        granted[live.key] = wish
                by_key = {live.key: live for live in active}
                if granted:
                    asked = pace.budget(list(granted), list(granted.values()), base, len(active))
                    assert all(0 <= n <= g for n, g in zip(asked, granted.values(), strict=True))
                    wanted = [(by_key[key], n) for key, n in zip(granted, asked, strict=True) if n]
                    if wanted:
                        trees = [self._propose(live, n) for live, n in wanted]
                        proposed = sum(map(len, trees))
                        second = sum(len(tree) for tree in trees if tree.drafter == "second")
                        draft = machine.per_row * len(wanted) + machine.per_node * (proposed - second)
                        draft += machine.second * second
                        keys = [live.key for live, _ in wanted]
                        kept = pace.cut(keys, [len(live.tokens) for live, _ in wanted], trees, base)
                        assert all(0 <= n <= len(tree) for n, tree in zip(kept, trees, strict=True))
                        cut = {key: tree.first(n) for key, tree, n in zip(keys, trees, kept, strict=True)}
            n_tokens = base + sum(map(len, cut.values()))
            verified += n_tokens - base
            n_proposed += proposed
            forward = machine.forward(n_tokens)
            time += forward + draft
            for live in active:
                tree = cut.get(live.key)
                accepted: list[int] = []
                if tree is not None and len(tree):
                    while len(accepted) < len(tree) and tree.tokens[len(accepted)] == 1000 + live.done + len(accepted):
                        accepted.append(len(accepted))
                    assert pace is not None
                    pace.verdict(live.key, tree, accepted)
                for _ in range(min(len(accepted) + 1, live.spec.length - live.done)):
                    live.tokens.append(1000 + live.done)
                    live.done += 1
                    emitted += 1
                if live.done >= live.spec.length and pace is not None:
                    pace.free(live.key)
            if pace is not None:
                off = self._noise.uniform(-machine.noise, machine.noise)
                pace.step(n_tokens, proposed, draft * machine.unit, forward * machine.unit * (1 + off))
        return Result(time, plain, step, emitted, verified, n_proposed)

    def _propose(self, live: _Live, n: int) -> DraftTree:
        """As `CombinedDrafter` does where there is a second drafter."""
        spec, pace = live.spec, self.pace
        if spec.second is None:
            return self._draft(live, n, spec.process, spec.drafter)
        assert pace is not None
        limits = (pace.limits(live.key) if self.limited else None) or {}
        for name, process in ((spec.drafter, spec.process), ("second", spec.second)):
            limit = min(n, limits.get(name, limits.get("", n)))
            if limit and not (process is spec.process and spec.silent(live.done)):
                return self._draft(live, limit, process, name)
        return NO_DRAFT

    def _draft(self, live: _Live, n: int, process: Process, name: str) -> DraftTree:
        tokens: list[int] = []
        confidence: list[float] = []
        right = True
        for depth in range(n):
            position = live.done + depth
            p = process(position, depth)
            # Whether a token is right doesn't change when it is drafted again; behind a wrong one all are.
            right = right and live.draws[position] < p
            tokens.append(1000 + position if right else 1)
            if live.spec.confidence is not None:
                confidence.append(live.spec.confidence(p))
        return DraftTree.chain(tokens, confidence, drafter=name)


def auto(table: dict[int, float], unit: float = 0.02) -> AutoPace:
    """A fresh pace whose table is the machine's."""
    return AutoPace(StepTimes({n: unit * t for n, t in table.items()}))


def speed(simulation: Simulation, specs: Sequence[Spec], requests: int) -> float:
    """Relative to no drafting, over requests one after the other."""
    results = [simulation.run(specs) for _ in range(requests)]
    return sum(r.plain for r in results) / sum(r.time for r in results)


def best_fixed(machine: Machine, spec: Spec, requests: int = 4, warm_up: int = 2) -> float:
    """The speed of the best fixed length, chosen after the fact, on the very requests that `auto` gets."""
    speeds = [1.0]
    for n in (1, 2, 3, 5, 7, 16):
        simulation = Simulation(FixedPace(n), machine)
        speed(simulation, [spec], warm_up)
        speeds.append(speed(simulation, [spec], requests))
    return max(speeds)


def started(pace: AutoPace, *, record: int = 0, tokens: int = 10) -> list[int]:
    """Begins request 0 after `record` requests of which all drafts were accepted (or, if negative, none)."""
    machine = Machine(AVX2)
    for _ in range(abs(record)):
        Simulation(pace, machine).run([Spec(constant(1.0 if record > 0 else 0.0), 60)])
    live = list(range(tokens))
    pace.begin(0, live)
    return live


def chain(n: int, confidence: float | None = None) -> DraftTree:
    """A proposal of the drafter "scripted"."""
    return DraftTree.chain(range(100, 100 + n), () if confidence is None else [confidence] * n, drafter="scripted")
