#!/usr/bin/env python3
"""What HTTP costs: tokens/s of a streaming client beside those of the engine alone, in alternation.

    python bench/serve_overhead.py -m qwen2.5-coder-1.5b-instruct

Every round gives each batch size one turn with the engine in this process (what `forerun bench decode` times) and one
with `forerun serve` in a process of its own, whose client is this process. Which goes first changes. Both answer the
same prompts with the same number of tokens, greedy and without drafts; while one computes, the other's threads sleep.

Both rates are those of the time in which the whole batch decodes. For the engine: `batch` tokens a step. For HTTP: from
the last request's first text to the first request's last text, tokens as the usage has them, spread evenly over each
answer's events. Figures are medians over the rounds; exit code 1 if a share is below --at-least.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Self

import forerun
from forerun import ops
from forerun.cli.bench_probe import run_batch
from forerun.cli.bench_setup import file_hash, open_engine, slots_for
from forerun.engine.engine import Engine
from forerun.errors import ForerunError
from forerun.measure import passage
from forerun.measure.load import Exchange
from forerun.measure.load_client import LoadClient, Order
from forerun.measure.load_run import run_closed
from forerun.measure.tasks import Task

SETTLE_SECONDS = 0.1
"""Pause between turns: the threads of the one that has just computed go to sleep."""
START_SECONDS = 600
SAME = ("--draft", "none", "--prompt-slowdown", "0")
"""The server's engine as the other one: it drafts nothing, and computes prompts as fast as it can."""
NAME = "served"


class ServeError(Exception):
    """A message for the user."""


class ServerProcess:
    """A server in a process of its own, from when its log has what `ready` looks for, for as long as the scope lasts.

    ready: the match of that regular expression. Raises ServeError if the server ends before, or takes too long.
    """

    def __init__(self, command: Sequence[str], ready: str) -> None:
        self.command = list(command)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(self.command, stdout=self._log, stderr=subprocess.STDOUT)
        try:
            self.ready = self._wait_for(ready)
        except BaseException:
            self.close()
            raise

    def _wait_for(self, ready: str) -> re.Match[str]:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if found := re.search(ready, self.log):
                return found
            if ended:
                raise ServeError(f"the server ended with {self.process.returncode}: {self.log[-2000:]}")
            time.sleep(0.05)
        raise ServeError(f"the server isn't ready after {START_SECONDS} s")

    @property
    def log(self) -> str:
        """What it wrote."""
        # Without a seek: the place in the file is the server's, too.
        file = self._log.fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def stop(self, seconds: float = 60) -> int:
        """SIGTERM; returns the exit code. Raises subprocess.TimeoutExpired if it goes on for longer than that."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        """Ends the process, kindly at first, and drops the log."""
        try:
            self.stop(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ForerunServer(ServerProcess):
    """`forerun serve` at a free port. url: without the path."""

    def __init__(self, model: str, *options: str) -> None:
        command = [sys.executable, "-c", "from forerun.cli import main; main()", "serve", "-m", model, "--port", "0"]
        super().__init__([*command, *options], r"serving at (\S+)/v1")
        self.url = self.ready[1]


def forerun_server(path: Path, threads: int, kv_tokens: int, *more: str) -> ForerunServer:
    """A server of that file, which it calls `NAME`."""
    sizes = ("--threads", str(threads), "--kv-tokens", str(kv_tokens))
    return ForerunServer(str(path), *sizes, "--served-model-name", NAME, *more)


def streamed(base: str, bodies: Sequence[dict[str, Any]]) -> list[Exchange]:
    """Answers to completions that are asked for together. Raises ServeError for one that failed or lacks usage."""
    task = Task("prompt", "prompt", "", None)
    orders = [
        Order(task, json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode())
        for body in bodies
    ]
    found: list[Exchange] = []

    async def drive() -> None:
        async with LoadClient(base, "completions") as client:
            await run_closed(orders, len(orders), client.ask, found.append)

    asyncio.run(drive())
    for exchange in found:
        if exchange.error is not None or exchange.output_tokens is None:
            raise ServeError(f"a request failed: {exchange.error or 'no usage'} {exchange.message}")
    return found


def rate_of_all(exchanges: Sequence[Exchange]) -> float:
    """Tokens/s of all answers while all of them stream."""
    begin = max(exchange.arrivals[0].at for exchange in exchanges)
    end = min(exchange.arrivals[-1].at for exchange in exchanges)
    if end <= begin:
        raise ServeError("one answer ended before another began; use a larger --max-tokens")
    tokens = 0.0
    for exchange in exchanges:
        times = [arrival.at for arrival in exchange.arrivals]
        for before, after, n in zip(times, times[1:], exchange.gap_tokens() or [], strict=False):
            # A gap that is only partly within counts by its part.
            tokens += n * max(0.0, min(after, end) - max(before, begin)) / (after - before)
    return tokens / (end - begin)


def measure(
    engine: Engine, base: str, prompts: Sequence[Sequence[int]], batches: Sequence[int], max_tokens: int, rounds: int
) -> dict[int, dict[str, list[float]]]:
    """Rates by batch size and way. Round 0 warms up and counts for nothing."""
    rates: dict[int, dict[str, list[float]]] = {batch: {"engine": [], "http": []} for batch in batches}

    def engine_rate(batch: int) -> float:
        trial = run_batch(engine, prompts[:batch], max_tokens)
        return batch * trial.decode_steps / trial.decode_seconds

    def http_rate(batch: int) -> float:
        body = {"model": NAME, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        exchanges = streamed(base, [{**body, "prompt": list(prompt)} for prompt in prompts[:batch]])
        short = [each for each in exchanges if each.output_tokens != max_tokens]
        if short:
            raise ServeError(f"an answer has {short[0].output_tokens} tokens instead of {max_tokens}")
        return rate_of_all(exchanges)

    ways = {"engine": engine_rate, "http": http_rate}
    for turn in range(rounds + 1):
        print(f"round {turn} of {rounds}", file=sys.stderr, flush=True)
        for batch in batches:
            for name in sorted(ways, reverse=bool(turn % 2)):
                time.sleep(SETTLE_SECONDS)
                rate = ways[name](batch)
                if turn:
                    rates[batch][name].append(rate)
    return rates


def main() -> None:
    """Parses the command line and runs the comparison."""
    parser = argparse.ArgumentParser(description="Tokens/s through HTTP beside the engine's own, in alternation.")
    parser.add_argument("-m", "--model", default="qwen2.5-coder-1.5b-instruct", help="name or path")
    parser.add_argument("--batch", default="1,8", help="requests at a time; default 1,8")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--max-tokens", type=int, default=128, help="default 128")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument(
        "--at-least", type=float, default=0.95, help="share that every batch has to reach; default 0.95"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    batches = [int(word) for word in options.batch.split(",")]
    if min(*batches, options.rounds, options.prompt_tokens) < 1 or options.max_tokens < 2:
        parser.error("every number must be 1 or more, and --max-tokens 2 or more")
    kv_tokens = max(batches) * slots_for(options.prompt_tokens + options.max_tokens)
    engine, name, path = open_engine(
        options.model, kv_tokens, options.threads, rows=max(batches), prefix_cache=False, draft="none"
    )
    ids = engine.tokenizer.encode(passage.PASSAGE)
    prompts = passage.distinct_prompts(ids, max(batches), options.prompt_tokens)
    threads = engine.executor.tape.threads
    with forerun_server(path, threads, max(4096, kv_tokens), *SAME) as server:
        rates = measure(engine, f"{server.url}/v1", prompts, batches, options.max_tokens, options.rounds)
    command = ["python", "bench/serve_overhead.py", "-m", options.model, "--batch", options.batch]
    command += ["--prompt-tokens", str(options.prompt_tokens), "--max-tokens", str(options.max_tokens)]
    command += ["--rounds", str(options.rounds), "--threads", str(threads), "--at-least", f"{options.at_least:g}"]
    rows = [
        {
            "batch": batch,
            "engine_tokens_per_s": median(each["engine"]),
            "http_tokens_per_s": median(each["http"]),
            "share": median(each["http"]) / median(each["engine"]),
            "round_shares": [http / alone for http, alone in zip(each["http"], each["engine"], strict=True)],
        }
        for batch, each in rates.items()
    ]
    result = {
        "setup": {
            "model": name, "sha256": file_hash(name, path), "cpu": ops.cpu_name(),
            "physical_cores": ops.physical_cores(), "threads": threads, "forerun": forerun.__version__,
            "command": shlex.join(command),
        },
        "at_least": options.at_least,
        "rows": rows,
    }  # fmt: skip
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)
    if any(row["share"] < options.at_least for row in rows):
        sys.exit(1)


def print_table(result: dict[str, Any]) -> None:
    """The result for people."""
    setup = result["setup"]
    print(f"{setup['model']}, sha256 {setup['sha256']}")
    print(f"{setup['cpu']}, {setup['physical_cores']} cores, {setup['threads']} threads, forerun {setup['forerun']}")
    print(setup["command"] + "\n")
    print(f"{'batch':>6}{'engine tokens/s':>18}{'HTTP tokens/s':>16}{'share':>9}   shares of the rounds")
    for row in result["rows"]:
        each = " ".join(f"{share:.3f}" for share in row["round_shares"])
        print(
            f"{row['batch']:>6}{row['engine_tokens_per_s']:>18.1f}{row['http_tokens_per_s']:>16.1f}"
            f"{row['share']:>9.3f}   {each}"
        )


if __name__ == "__main__":
    try:
        main()
    except (ServeError, ForerunError) as error:
        sys.exit(f"serve_overhead: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
