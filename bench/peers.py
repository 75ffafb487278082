#!/usr/bin/env python3
"""Forerun beside llama.cpp: same file, threads, prompts and lengths, in alternation.

    python bench/peers.py -m qwen2.5-coder-1.5b-instruct

Run it with the Python that has Forerun. llama.cpp comes as llama-cpp-python, built once into an
environment of its own in bench/.peers (some minutes, a C++ compiler and the network are needed).

Each engine lives in a worker process that loads the model once and then waits for its turns; one
computes at a time. Every round gives each test one turn in each engine, and the engine that goes
first changes from round to round. Figures are medians over all turns.

- forward of M tokens: M next tokens of one sequence after `context` cached ones, scores of all M.
  Forerun's time includes choosing the most probable token of each, llama.cpp's does not.
- prefill: a prompt from nothing to the scores of its last token.
- decode: greedy steps of one sequence, or of several in one batch, after `context` tokens each.

Forerun drafts nothing here; peers_tasks.py compares the two with drafts, on whole answers.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

PEER = "llama-cpp-python==0.3.36"
HOME = Path(__file__).resolve().parent / ".peers"
WORKER = Path(__file__).resolve().parent / "peers_worker.py"
ENGINES = ("llama.cpp", "forerun")
SETTLE_SECONDS = 0.05
"""Pause between turns: the threads of the one that has just computed go to sleep."""


@dataclass(frozen=True)
class Plan:
    """What is measured; lengths in tokens. `repeats`: forwards in one turn."""

    rounds: int = 7
    context: int = 128
    rows: tuple[int, ...] = (1, 5, 8)
    repeats: int = 3
    prefill: int = 512
    batches: tuple[int, ...] = (1, 8)
    decode: int = 64


QUICK = Plan(rounds=2, repeats=2, prefill=256, decode=16)


class PeersError(Exception):
    """A message for the user."""


class Worker:
    """The parent's end of a worker process."""

    def __init__(self, name: str, python: Path | str) -> None:
        self.name = name
        self.idle_seconds = self.idle_cpu_seconds = 0.0
        self._process = subprocess.Popen(
            [str(python), str(WORKER), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Sends a request and waits for its answer. Raises PeersError if there is none."""
        answer = ""
        # A worker that has died shows in its missing answer.
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).write(json.dumps({"do": do, **request}) + "\n")
            self._pipe(self._process.stdin).flush()
            answer = self._pipe(self._process.stdout).readline()
        if not answer:
            raise PeersError(f"the {self.name} worker ended with {self._process.wait()} in {do!r}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise PeersError(f"{self.name}: {found['error']}")
        self.idle_seconds += found.pop("idle_seconds", 0.0)
        self.idle_cpu_seconds += found.pop("idle_cpu_seconds", 0.0)
        return found

    def close(self) -> None:
        """Ends the process, kindly at first."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        self._pipe(self._process.stdout).close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


@dataclass
class Test:
    """One row of the result. `work`: tokens behind a rate; None where the time is the figure."""

    name: str
    do: str
    request: dict[str, Any]
    work: int | None = None
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in ENGINES})

    def figure(self, engine: str) -> float:
        """Milliseconds, or tokens per second."""
        typical = median(self.seconds[engine])
        return typical * 1e3 if self.work is None else self.work / typical

    @property
    def ratio(self) -> float:
        """How many times as fast as llama.cpp Forerun is."""
        return median(self.seconds["llama.cpp"]) / median(self.seconds["forerun"])

    @property
    def unit(self) -> str:
        return "ms" if self.work is None else "tokens/s"


def tests_of(plan: Plan) -> list[Test]:
    """The tests in the order of their turns."""
    tests = [
        Test(
            f"forward of {rows} token{'s' * (rows > 1)}",
            "forward",
            {"rows": rows, "repeats": plan.repeats},
        )
        for rows in plan.rows
    ]
    tests.append(Test(f"prefill of {plan.prefill}", "prefill", {}, plan.prefill))
    for batch in plan.batches:
        request = {"batch": batch, "steps": plan.decode}
        tests.append(Test(f"decode, batch {batch}", "decode", request, batch * plan.decode))
    return tests


def compare(workers: dict[str, Worker], plan: Plan, setup: dict[str, Any]) -> tuple[list[Test], int]:
    """All rounds; returns the tests with their times, and how many of batch 1's tokens agree."""
    tests, tokens = tests_of(plan), {}
    # Round 0 warms up and counts for nothing.
    for turn in range(plan.rounds + 1):
        print(f"round {turn} of {plan.rounds}", file=sys.stderr, flush=True)
        for test in tests:
            request = test.request
            if test.do == "prefill":
                request = {"tokens": setup["prefills"][turn]}
            for name in ENGINES if turn % 2 else reversed(ENGINES):
                time.sleep(SETTLE_SECONDS)
                answer = workers[name].ask(test.do, **request)
                if turn > 0:
                    test.seconds[name] += answer["seconds"]
                if request.get("batch") == 1:
                    tokens[name] = answer["tokens"]
    pairs = zip(*tokens.values(), strict=False)
    return tests, sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


@contextlib.contextmanager
def running(python: Path) -> Iterator[dict[str, Worker]]:
    """Both workers, ended with the scope."""
    workers: dict[str, Worker] = {}
    try:
        for name in ENGINES:
            workers[name] = Worker(name, python if name == "llama.cpp" else sys.executable)
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def peer_python() -> Path:
    """The interpreter of bench/.peers, which is made on first use."""
    python = HOME / "bin" / "python"
    version = PEER.partition("==")[2]
    probe = "import llama_cpp; print(llama_cpp.__version__)"
    if python.exists():
        found = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
        if found.stdout.strip() == version:
            return python
    print(f"building {PEER} in {HOME} (once; some minutes)", file=sys.stderr, flush=True)
    venv.create(HOME, with_pip=True, clear=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PEER]
    if subprocess.run(pip, stdout=sys.stderr, check=False).returncode:
        raise PeersError(f"{PEER} can't be installed; it needs the network, a C++ compiler and cmake")
    return python


def report(
    tests: list[Test], plan: Plan, setup: dict[str, Any], agree: int, workers: dict[str, Worker]
) -> dict[str, Any]:
    """The result as JSON."""
    ended = {name: worker.idle_cpu_seconds / worker.idle_seconds for name, worker in workers.items()}
    return {
        "setup": setup,
        "plan": asdict(plan),
        "rows": [
            {
                "test": test.name,
                "unit": test.unit,
                "llama_cpp": test.figure("llama.cpp"),
                "forerun": test.figure("forerun"),
                "ratio": test.ratio,
                "seconds": test.seconds,
            }
            for test in tests
        ],
        "same_greedy_tokens": agree,
        "idle_cpu_share": ended,
    }


def print_table(result: dict[str, Any]) -> None:
    """The result for people."""
    setup, plan = result["setup"], result["plan"]
    print(f"{setup['model']}, sha256 {setup['sha256']}")
    print(f"{setup['cpu']}, {setup['physical_cores']} cores, {setup['threads']} threads")
    for name in ENGINES:
        print(setup["versions"][name])
    print(setup["command"])
    print(f"{plan['context']} tokens in the cache, medians of {plan['rounds']} rounds\n")
    print(f"{'':20}{'llama.cpp':>20}{'Forerun':>20}{'times as fast':>16}")
    by_name = {row["test"]: row for row in result["rows"]}
    for row in result["rows"]:
        cells = [f"{row[key]:.1f} {row['unit']}" for key in ("llama_cpp", "forerun")]
        print(f"{row['test']:20}{cells[0]:>20}{cells[1]:>20}{row['ratio']:>16.2f}")
    one = by_name.get("forward of 1 token")
    for rows in plan["rows"]:
        if one is not None and rows > 1:
            row = by_name[f"forward of {rows} tokens"]
            costs = [f"{row[key] / one[key]:.2f}" for key in ("llama_cpp", "forerun")]
            print(f"{f'T({rows}) / T(1)':20}{costs[0]:>20}{costs[1]:>20}")
    same, of = result["same_greedy_tokens"], plan["decode"] + 1
    print(f"\nbatch 1 agrees on the first {same} of {of} tokens")
    for name, share in result["idle_cpu_share"].items():
        print(f"{name} used {share:.1%} of one core while the other computed")


def main() -> None:
    parser = argparse.ArgumentParser(description="Forerun beside llama.cpp, in alternation.")
    parser.add_argument("-m", "--model", default="qwen2.5-coder-1.5b-instruct", help="name or path")
    parser.add_argument("--rounds", type=int, help=f"default {Plan().rounds}")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument("--quick", action="store_true", help="shorter, for a first look")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    plan = QUICK if options.quick else Plan()
    if options.rounds is not None:
        if options.rounds < 1:
            parser.error("--rounds must be 1 or more")
        plan = Plan(**(asdict(plan) | {"rounds": options.rounds}))
    with running(peer_python()) as workers:
        asked = {"plan": asdict(plan), "threads": options.threads, "model": options.model}
        setup = workers["forerun"].ask("load", **asked)
        peer = workers["llama.cpp"].ask("load", **(setup | asked | {"threads": setup["threads"]}))
        tests, agree = compare(workers, plan, setup)
        command = ["python", "bench/peers.py", "-m", options.model, "--rounds", str(plan.rounds)]
        command += ["--threads", str(setup["threads"])] + ["--quick"] * options.quick
        kept = ("sha256", "cpu", "physical_cores", "threads")
        about = {"model": options.model, "command": shlex.join(command)} | {key: setup[key] for key in kept}
        about["versions"] = {"llama.cpp": peer["version"], "forerun": setup["version"]}
        result = report(tests, plan, about, agree, workers)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)


if __name__ == "__main__":
    try:
        main()
    except PeersError as error:
        sys.exit(f"peers: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
