#!/usr/bin/env python3
"""`forerun serve` beside llama.cpp's server: same file, threads, prompts and lengths, by number of clients.

    python bench/serve_peers.py -m qwen2.5-coder-1.5b-instruct --tasks tasks/code_edit.jsonl

Run it with the Python that has Forerun. llama.cpp's server is `llama_cpp.server` of llama-cpp-python[server], in the
environment of peers.py. Both servers run all the time, and one is asked at a time: in every round each number of
clients has one turn of every way, beginning with another way each time.

- llama.cpp: without the scores of every prompt token (--logits_all False), and told to finish what it streams before it
  begins another answer (--interrupt_requests False); otherwise its defaults. It answers one request at a time.
- Forerun plain: `speculate: false`. Forerun: the server's defaults.

Clients are a closed loop over /v1/completions, greedy. Every prompt begins with words of its own turn, so that nothing
is in a prefix cache, and each turn drafts from its own answers only. Answers have --max-tokens tokens exactly: Forerun
ignores the end, llama.cpp is kept from it by a bias. llama.cpp's streams have no usage; that an answer ended by its
length says how many tokens it has.

Throughput is output tokens over the time from a turn's first request to its last end; ratios are of medians over the
rounds. p99 is over the requests of all rounds. Exit code 1 if Forerun isn't --at-least so many times as fast at the
largest number of clients.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import forerun
from forerun import ops
from forerun.cli.bench_setup import file_hash, slots_for
from forerun.errors import ForerunError
from forerun.measure.load import Exchange, Times
from forerun.measure.load_client import LoadClient, Order
from forerun.measure.load_run import chosen_tasks, run_closed
from forerun.measure.tasks import Task, read_tasks
from forerun.models.download import resolve
from forerun.models.source import open_model
from peers import PEER, PeersError, peer_python
from serve_overhead import NAME, SETTLE_SECONDS, ServeError, ServerProcess, forerun_server

WAYS = ("llama.cpp", "Forerun plain", "Forerun")
SERVER_PEER = PEER.replace("==", "[server]==")
REQUESTS_PER_CLIENT = 2


@dataclass
class Turns:
    """All turns of one way with one number of clients."""

    rates: list[float] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)

    def add(self, exchanges: Sequence[Exchange]) -> None:
        """Counts a turn in."""
        seconds = max(each.ended for each in exchanges) - min(each.sent for each in exchanges)
        self.rates.append(sum(each.output_tokens or 0 for each in exchanges) / seconds)
        self.exchanges += exchanges

    def row(self) -> dict[str, Any]:
        """Throughput, and times in milliseconds."""
        firsts = [each.first_seconds for each in self.exchanges if each.first_seconds is not None]
        gaps = [gap for each in self.exchanges for gap in each.gaps()]
        tokens = [each.token_seconds for each in self.exchanges if each.token_seconds is not None]
        times = {
            "first_token_ms": Times.of(firsts),
            "between_events_ms": Times.of(gaps),
            "token_ms": Times.of(tokens),
            "end_to_end_ms": Times.of([each.total_seconds for each in self.exchanges]),
        }
        return {
            "output_tokens_per_s": median(self.rates),
            "round_output_tokens_per_s": self.rates,
            "requests": len(self.exchanges),
            "prompt_tokens": [each.prompt_tokens for each in self.exchanges if each.prompt_tokens is not None],
            **{name: None if each is None else vars(each) for name, each in times.items()},
        }


def server_python() -> Path:
    """The interpreter of peers.py's environment, with what llama.cpp's server needs."""
    python = peer_python()
    probe = [str(python), "-c", "import llama_cpp.server.app"]
    if subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return python
    print(f"installing {SERVER_PEER}", file=sys.stderr, flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", SERVER_PEER]
    if subprocess.run(pip, stdout=sys.stderr, check=False).returncode:
        raise PeersError(f"{SERVER_PEER} can't be installed; it needs the network")
    return python


@contextlib.contextmanager
def llama_server(path: Path, threads: int, context: int) -> Iterator[str]:
    """llama.cpp's server: the address that its clients use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(server_python()), "-m", "llama_cpp.server", "--model", str(path), "--model_alias", NAME]
    command += ["--n_threads", str(threads), "--n_threads_batch", str(threads), "--n_ctx", str(context)]
    command += ["--logits_all", "False", "--interrupt_requests", "False", "--verbose", "False"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    with ServerProcess(command, "Uvicorn running on"):
        yield f"http://127.0.0.1:{port}/v1"


@dataclass(frozen=True)
class Ways:
    """How each way is asked. bases: addresses. ends: tokens that would end an answer."""

    bases: Mapping[str, str]
    ends: Sequence[int]
    max_tokens: int

    def order(self, way: str, task: Task, turn: str) -> Order:
        """A request that begins with words of its turn."""
        extra: dict[str, Any] = {"user": turn, "ignore_eos": True}
        if way == "llama.cpp":
            extra = {"logit_bias": {str(token): -1000.0 for token in self.ends}}
        elif way == "Forerun plain":
            extra["speculate"] = False
        asked = task._replace(prompt=f"{turn}\n{task.prompt}", max_tokens=None)
        return Order.of(
            asked, "completions", NAME, max_tokens=self.max_tokens, temperature=0.0, seed=0, extra=extra
        )  # fmt: skip

    def answers(self, way: str, tasks: Sequence[Task], clients: int, turn: str) -> list[Exchange]:
        """Answers of a closed loop. Raises ServeError for one that failed or has another length."""
        orders = [self.order(way, task, turn) for task in tasks]
        found: list[Exchange] = []

        async def drive() -> None:
            async with LoadClient(self.bases[way], "completions", timeout=3600) as client:
                await run_closed(orders, clients, client.ask, found.append)

        asyncio.run(drive())
        return [self._checked(way, exchange) for exchange in found]

    def _checked(self, way: str, exchange: Exchange) -> Exchange:
        if exchange.error is not None:
            raise ServeError(f"{way}: a request failed: {exchange.error} {exchange.message}")
        if exchange.finish_reason != "length" or exchange.output_tokens not in (None, self.max_tokens):
            raise ServeError(
                f"{way}: an answer of {exchange.output_tokens} tokens ended by {exchange.finish_reason}; expected "
                f"{self.max_tokens}"
            )
        return replace(exchange, output_tokens=self.max_tokens)


def compare(ways: Ways, tasks: Sequence[Task], clients: Sequence[int], rounds: int) -> dict[tuple[int, str], Turns]:
    """All turns. Round 0 warms up, with one answer a way, and counts for nothing."""
    for way in WAYS:
        ways.answers(way, tasks[:1], 1, f"warm-up of {way}")
    found = {(n, way): Turns() for n in clients for way in WAYS}
    for number in range(rounds):
        for n in clients:
            for place in range(len(WAYS)):
                way = WAYS[(number + place) % len(WAYS)]
                print(f"round {number + 1} of {rounds}, {n} clients, {way}", file=sys.stderr, flush=True)
                time.sleep(SETTLE_SECONDS)
                _, asked = chosen_tasks(tasks, n * REQUESTS_PER_CLIENT, 0, seed=number)
                found[n, way].add(ways.answers(way, asked, n, f"Round {number}, {n} clients, {way}."))
    return found


def main() -> None:
    """Parses the command line and runs the comparison."""
    parser = argparse.ArgumentParser(description="forerun serve beside llama.cpp's server, in alternation.")
    parser.add_argument("-m", "--model", default="qwen2.5-coder-1.5b-instruct", help="name or path of a .gguf file")
    parser.add_argument("--tasks", type=Path, default=Path("tasks/code_edit.jsonl"), help="task file")
    parser.add_argument("--clients", default="1,4,8", help="default 1,4,8")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of every answer; default 64")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    parser.add_argument("--threads", type=int, default=ops.physical_cores(), help="default: one per physical core")
    parser.add_argument("--at-least", type=float, default=3.0, help="times as fast at the most clients; default 3")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    clients = [int(word) for word in options.clients.split(",")]
    if min(*clients, options.max_tokens, options.rounds, options.threads) < 1:
        parser.error("every number must be 1 or more")
    path = resolve(options.model)
    tasks = read_tasks(options.tasks)
    with open_model(path) as source:
        tokenizer = source.tokenizer()
        ends = sorted(tokenizer.eos_ids)
        longest = max(len(tokenizer.encode(task.prompt)) for task in tasks) + 64 + options.max_tokens
    kv_tokens = max(clients) * slots_for(longest)
    with (
        llama_server(path, options.threads, longest) as theirs,
        forerun_server(path, options.threads, max(4096, 2 * kv_tokens)) as ours,
    ):
        bases = {"llama.cpp": theirs, "Forerun plain": f"{ours.url}/v1", "Forerun": f"{ours.url}/v1"}
        turns = compare(Ways(bases, ends, options.max_tokens), tasks, clients, options.rounds)
    command = ["python", "bench/serve_peers.py", "-m", options.model, "--tasks", str(options.tasks)]
    command += ["--clients", options.clients, "--max-tokens", str(options.max_tokens)]
    command += ["--rounds", str(options.rounds), "--threads", str(options.threads)]
    command += ["--at-least", f"{options.at_least:g}"]
    setup = {
        "model": options.model, "sha256": file_hash(options.model, path), "cpu": ops.cpu_name(),
        "physical_cores": ops.physical_cores(), "threads": options.threads, "command": shlex.join(command),
        "versions": {"llama.cpp": SERVER_PEER, "forerun": f"forerun {forerun.__version__}"},
    }  # fmt: skip
    rows = [{"clients": n, "way": way, **each.row()} for (n, way), each in turns.items()]
    rate = {(row["clients"], row["way"]): row["output_tokens_per_s"] for row in rows}
    for row in rows:
        row["ratio"] = row["output_tokens_per_s"] / rate[row["clients"], "llama.cpp"]
    reached = rate[max(clients), "Forerun"] / rate[max(clients), "llama.cpp"]
    result = {"setup": setup, "rows": rows, "at_least": options.at_least, "reached": reached}
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)
    if reached < options.at_least:
        sys.exit(1)


def print_table(result: Mapping[str, Any]) -> None:
    """The result for people."""
    setup = result["setup"]
    print(f"{setup['model']}, sha256 {setup['sha256']}")
    print(f"{setup['cpu']}, {setup['physical_cores']} cores, {setup['threads']} threads")
    print(f"{setup['versions']['llama.cpp']}, {setup['versions']['forerun']}")
    print(setup["command"] + "\n")
    head = ("first token", "between events", "end to end")
    print(
        f"{'clients':>8}  {'':14}{'tokens/s':>9}{'ratio':>7}" + "".join(f"{f'{name} p50, p99 ms':>29}" for name in head)
    )
    for row in result["rows"]:
        print(f"{row['clients']:>8}  {row['way']:14}{row['output_tokens_per_s']:>9.1f}{row['ratio']:>7.2f}", end="")
        for name in ("first_token_ms", "between_events_ms", "end_to_end_ms"):
            times = row[name]
            shown = "-" if times is None else f"{times['p50']:.0f}, {times['p99']:.0f}"
            print(f"{shown:>29}", end="")
        print()


if __name__ == "__main__":
    try:
        main()
    except (PeersError, ServeError, ForerunError) as error:
        sys.exit(f"serve_peers: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
