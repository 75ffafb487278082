#!/usr/bin/env python3
"""What choosing a token costs, in milliseconds per row of logits, beside the time of merely reading the row.

    python bench/sampling.py
    python bench/sampling.py --vocab 128256 --isa avx2 --json

One call of the native `sample` per row, one thread. The rows are different ones and together larger than the second
level of cache, as rows are that a model's head has just written. Their logits are a normal bulk (standard deviation
2.5) and 60 tokens above it whose distances fall as those of a text's continuations do; "sharp" rows give their first
token about 80%, "open" ones about 10%. Masks are those of a grammar inside a string (19 tokens of 20 allowed) and at a
place where it leaves 40 tokens. Penalties are those of a history of 2,000 tokens, 700 of them different.

Settings take turns within each round; figures are medians over rounds of the thread's own time on the processor. "read"
is the fastest of a few ways to go over the row once (its maximum, its minimum), "of read" the share of it in the whole:
100% would be a kernel that costs nothing beyond the memory that it has to read.

The exit code is 1 if temperature, top-k and top-p, with or without a mask, take more than eight readings, which 0.3 ms
would be; a lost algorithm takes 25.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun import SamplingParams, _native
from forerun.constrain.bits import mask_of
from forerun.ops import cpu_name
from forerun.sample.arrays import SpecArrays
from forerun.sample.edits import LogitEdits
from forerun.sample.masks import Masks

ROWS = 16
MOST_READINGS = 8.0
"""What the usual settings may cost."""
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """What is timed: parameters by name, and which mask the rows have."""

    name: str
    knobs: dict[str, Any] = field(default_factory=dict)
    mask: str | None = None


USUAL: dict[str, Any] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.1, "frequency_penalty": 0.2}
SETTINGS = [
    Setting("greedy", {"temperature": 0.0}),
    Setting("temperature", {"temperature": 0.7}),
    Setting("temperature, top-k, top-p", USUAL),
    Setting("the same, mask of a string", USUAL, "string"),
    Setting("the same, mask of 40 tokens", USUAL, "few"),
    Setting("temperature, top-p", {"temperature": 0.7, "top_p": 0.9}),
    Setting("temperature, min-p", {"temperature": 0.7, "min_p": 0.05}),
    Setting("temperature, typical-p", {"temperature": 0.7, "typical_p": 0.9}),
    Setting("all four", {**USUAL, "min_p": 0.02, "typical_p": 0.9}),
    Setting("order: top-k, temperature, top-p", {**USUAL, "order": ("top_k", "temperature", "top_p")}),
    Setting("order: top-p, temperature, top-k", {**USUAL, "order": ("top_p", "temperature", "top_k")}),
    Setting("order: temperature, penalties, top-k, top-p",
            {**USUAL, **PENALTIES, "order": ("temperature", "penalties", "top_k", "top_p")}),
]  # fmt: skip


def logits_of(rng: np.random.Generator, vocab: int, kind: str) -> Floats:
    """float32[ROWS, vocab]."""
    rows = (rng.standard_normal((ROWS, vocab)) * 2.5).astype(np.float32)
    steepness = {"sharp": 2.7, "open": 0.6}[kind]
    heights = 22 - steepness * np.log(np.arange(1, 61))
    for row in rows:
        row[rng.permutation(vocab)[:60]] = heights + rng.standard_normal(60) * 0.3
    return rows


def calls(setting: Setting, logits: Floats, isa: str) -> list[Callable[[], object]]:
    """One call for each row."""
    vocab = logits.shape[1]
    rng = np.random.default_rng(7)
    params = SamplingParams(**setting.knobs)
    edits = LogitEdits.of(params, [], [])
    if edits is not None:
        edits.append((rng.zipf(1.4, 2_000) % min(vocab, 700)).tolist())
    late = [None if edits is None else edits.late()]
    spec = SpecArrays.of([params], [1], [100], late)
    masks = Masks.none(1)
    if setting.mask is not None:
        share = vocab // 20 * 19 if setting.mask == "string" else 40
        words = mask_of(rng.permutation(vocab)[:share].tolist(), vocab)
        masks = Masks(words[None], np.zeros(1, dtype=np.int32))
    at = [np.array([row], dtype=np.int32) for row in range(ROWS)]
    return [lambda row=row: _native.sample(logits, row, *spec, *masks, isa=isa) for row in at]


def reads(logits: Floats) -> list[list[Callable[[], object]]]:
    """Ways to go over a row once, each one call for each row."""
    return [[lambda row=row, way=way: way(row) for row in logits] for way in (np.max, np.min)]


def seconds(row_calls: list[Callable[[], object]]) -> float:
    """Per row."""
    start = time.thread_time()
    for call in row_calls:
        call()
    return (time.thread_time() - start) / len(row_calls)


def measure(logits: Floats, isa: str, rounds: int) -> dict[str, float]:
    """Median milliseconds a row by setting, and of "read"."""
    timed = {setting.name: [calls(setting, logits, isa)] for setting in SETTINGS}
    timed["read"] = reads(logits)
    found: dict[str, list[float]] = {name: [] for name in timed}
    for _ in range(rounds):
        for name, ways in timed.items():
            found[name].append(min(seconds(way) for way in ways))
    return {name: 1e3 * median(values) for name, values in found.items()}


def too_slow(found: dict[str, dict[str, float]]) -> list[str]:
    """The usual settings that cost more than MOST_READINGS, by kind of row."""
    return [
        f"{setting.name} ({kind})"
        for kind, times in found.items()
        for setting in SETTINGS
        if setting.knobs == USUAL and times[setting.name] > MOST_READINGS * times["read"]
    ]


def show(found: dict[str, dict[str, float]], arguments: argparse.Namespace) -> None:
    """For people."""
    print(f"ms per row of {arguments.vocab:,} logits, {arguments.isa}, medians of {arguments.rounds} rounds")
    print(f"{cpu_name()}\n")
    print(f"{'':46}{'sharp':>8}{'of read':>9}{'open':>8}{'of read':>9}")
    for name in ("read", *(setting.name for setting in SETTINGS)):
        cells = "".join(
            f"{times[name]:8.3f}{times['read'] / times[name]:9.0%}" for times in (found["sharp"], found["open"])
        )
        print(f"{name:46}{cells}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--isa", default="auto", choices=["auto", *_native.sample_isas()])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    found = {
        kind: measure(logits_of(rng, arguments.vocab, kind), arguments.isa, arguments.rounds)
        for kind in ("sharp", "open")
    }
    if arguments.json:
        command = " ".join(["python bench/sampling.py", *sys.argv[1:]])
        setup = {"processor": cpu_name(), "command": command, "vocab": arguments.vocab, "isa": arguments.isa}
        print(json.dumps(setup | {"rounds": arguments.rounds, "milliseconds_per_row": found}, indent=2))
    else:
        show(found, arguments)
    if slow := too_slow(found):
        sys.exit(f"sampling: more than {MOST_READINGS:g} readings: {', '.join(slow)}")


if __name__ == "__main__":
    main()
