#!/usr/bin/env python3
"""Whether a long prompt that arrives holds up the requests that run: their time between tokens with and without it.

    python bench/serve_fairness.py -m smollm2-135m-instruct

Starts `forerun serve` with its defaults and without drafts, so that every event carries one token, and keeps --requests
streams running. In turns, --seconds at a time, the server is left alone, or prompts of --prompt-tokens tokens, each
another, arrive one after the other. Times between two events count as "prompt" if they overlap a prompt's way from its
arrival to its first token, and as "quiet" if they lie in a quiet turn. The exit code is 1 if the 99th percentile of the
first is more than twice that of the second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import httpx

from forerun.measure.speculate import quantile
from serve_overhead import ForerunServer

MOST = 2.0
SETTLE = 0.3
"""Seconds at the beginning of a quiet turn that don't count."""


class Span(NamedTuple):
    """A stretch of time, on the clock of time.perf_counter."""

    began: float
    ended: float


@dataclass(frozen=True)
class Report:
    """What was found; times between events in milliseconds, of prompts to their first token in seconds."""

    model: str
    command: str
    requests: int
    prompt_tokens: int
    prompts: int
    first_token_s: float
    quiet: dict[str, float]
    prompt: dict[str, float]
    ratio_p50: float
    ratio_p99: float


class Streams:
    """Completions that run all the time, and when their tokens came."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.gaps: list[Span] = []

    async def run(self, number: int) -> None:
        """One stream after the other, until it is cancelled."""
        rng = random.Random(number)
        while True:
            body = {
                "prompt": [rng.randrange(1000, 20_000) for _ in range(32)], "max_tokens": 1024, "ignore_eos": True,
                "temperature": 0, "stream": True,
            }  # fmt: skip
            last: float | None = None
            async with self._client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    now = time.perf_counter()
                    if not line.startswith('data: {"id"'):
                        continue
                    if last is not None:
                        self.gaps.append(Span(last, now))
                    last = now


async def measure(url: str, arguments: argparse.Namespace) -> tuple[list[float], list[float], list[Span]]:
    """Gaps of quiet turns and beside prompts, in seconds, and the prompts."""
    quiet: list[Span] = []
    prompts: list[Span] = []
    rng = random.Random(0)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        streams = Streams(client)
        tasks = [asyncio.create_task(streams.run(number)) for number in range(arguments.requests)]
        try:
            while len(streams.gaps) < 20 * arguments.requests:
                await asyncio.sleep(0.1)
                _raise_failed(tasks)
            for turn in range(2 * arguments.rounds):
                until = time.perf_counter() + arguments.seconds
                if turn % 2 == 0:
                    began = time.perf_counter() + SETTLE
                    await asyncio.sleep(arguments.seconds)
                    quiet.append(Span(began, time.perf_counter()))
                    continue
                while time.perf_counter() < until:
                    ids = [rng.randrange(1000, 20_000) for _ in range(arguments.prompt_tokens)]
                    began = time.perf_counter()
                    body = {"prompt": ids, "max_tokens": 1, "temperature": 0}
                    (await client.post("/v1/completions", json=body)).raise_for_status()
                    prompts.append(Span(began, time.perf_counter()))
                _raise_failed(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    alone = [gap for gap in streams.gaps if any(s.began <= gap.began and gap.ended <= s.ended for s in quiet)]
    beside = [gap for gap in streams.gaps if any(gap.began < s.ended and s.began < gap.ended for s in prompts)]
    return [g.ended - g.began for g in alone], [g.ended - g.began for g in beside], prompts


def _raise_failed(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def _figures(seconds: Sequence[float]) -> dict[str, float]:
    found = {f"p{round(100 * q)}_ms": 1e3 * quantile(seconds, q) for q in (0.5, 0.9, 0.99, 1.0)}
    return {"count": len(seconds), **found}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="catalog name or path")
    parser.add_argument("--requests", type=int, default=4, help="streams that run")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of each prompt that arrives")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each kind")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a turn")
    parser.add_argument("--prompt-slowdown", type=float, help="of the server, in place of its default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if min(arguments.requests, arguments.rounds, arguments.prompt_tokens) < 1 or arguments.seconds <= 2 * SETTLE:
        parser.error(f"--requests, --rounds and --prompt-tokens must be at least 1, --seconds more than {2 * SETTLE}")
    options = ["--draft", "none"]
    if arguments.prompt_slowdown is not None:
        options += ["--prompt-slowdown", str(arguments.prompt_slowdown)]
    with ForerunServer(arguments.model, *options) as server:
        alone, beside, prompts = asyncio.run(measure(server.url, arguments))
    quiet, prompt = _figures(alone), _figures(beside)
    report = Report(
        model=arguments.model,
        command=" ".join(["python", "bench/serve_fairness.py", *sys.argv[1:]]),
        requests=arguments.requests,
        prompt_tokens=arguments.prompt_tokens,
        prompts=len(prompts),
        first_token_s=quantile([span.ended - span.began for span in prompts], 0.5),
        quiet=quiet,
        prompt=prompt,
        ratio_p50=prompt["p50_ms"] / quiet["p50_ms"],
        ratio_p99=prompt["p99_ms"] / quiet["p99_ms"],
    )
    if arguments.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(f"{report.model}: {report.command}")
        print(
            f"{report.requests} streams; {report.prompts} prompts of {report.prompt_tokens} tokens, "
            f"{report.first_token_s:.2f} s to the first token (median)"
        )
        for name, figures in (("quiet", quiet), ("prompt", prompt)):
            print(f"{name:>8s} " + "  ".join(f"{key} {value:.2f}" for key, value in figures.items()))
        print(f"prompt / quiet: {report.ratio_p50:.3f} at p50, {report.ratio_p99:.3f} at p99")
    if report.ratio_p99 > MOST:
        sys.exit(1)


if __name__ == "__main__":
    main()
