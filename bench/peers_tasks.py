#!/usr/bin/env python3
"""Forerun with drafts beside llama.cpp with its prompt lookup: same file, threads and tasks, greedy, in alternation.

    python bench/peers_tasks.py -m qwen2.5-coder-1.5b-instruct --tasks tasks/code_edit.jsonl

Run it with the Python that has Forerun; llama.cpp comes as for peers.py. Every task is answered once in each way, one
after the other, each time from nothing; which way goes first changes from task to task.

- llama.cpp plain: its C API, and the most probable token of each step.
- llama.cpp lookup N: `LlamaPromptLookupDecoding` with N draft tokens in llama-cpp-python's own loop; 10 is its default,
  2 what its documentation advises without a GPU. That loop computes and copies the scores of every prompt token, so
  rates after the first token are given, too.
- Forerun plain and with speculation: one engine, without prefix cache; every answer in a scope of its own, so that no
  draft comes from another answer.

Rates are tokens over summed seconds. Greedy texts of the two engines part where their rounding does, so each rate is
over the tokens of its own answers; Forerun's two answers must be equal (exit code 1 if not).
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forerun.draft.base import MAX_NODES
from peers import SETTLE_SECONDS, PeersError, Worker, peer_python, running

WAYS: tuple[tuple[str, str], ...] = (
    ("llama.cpp", "plain"),
    ("llama.cpp", "lookup 2"),
    ("llama.cpp", "lookup 10"),
    ("forerun", "plain"),
    ("forerun", "speculation"),
)
"""Engine and how it answers."""
WARM_TOKENS = 8


@dataclass
class Tally:
    """All answers given in one way."""

    tokens: int = 0
    seconds: float = 0.0
    later_tokens: int = 0
    later_seconds: float = 0.0
    answers: dict[str, list[int]] = field(default_factory=dict)

    def add(self, task_id: str, answer: Mapping[str, Any]) -> None:
        """Counts an answer in."""
        self.tokens += len(answer["tokens"])
        self.seconds += answer["seconds"]
        self.later_tokens += len(answer["tokens"]) - 1
        self.later_seconds += answer["seconds"] - answer["first_token_seconds"]
        self.answers[task_id] = answer["tokens"]

    @property
    def rate(self) -> float:
        """Tokens per second, prompts included."""
        return self.tokens / self.seconds

    @property
    def later_rate(self) -> float | None:
        """Tokens after the first of each answer, over the time after it; None where there were none."""
        return self.later_tokens / self.later_seconds if self.later_tokens and self.later_seconds > 0 else None


def compare(
    workers: Mapping[str, Worker], tasks: Sequence[Mapping[str, Any]], ways: Sequence[tuple[str, str]] = WAYS
) -> dict[tuple[str, str], Tally]:
    """Every task in every way."""
    for engine, way in ways:
        workers[engine].ask("answer", **(dict(tasks[0]) | {"way": way, "max_tokens": WARM_TOKENS}))
    tallies = {way: Tally() for way in ways}
    for n, task in enumerate(tasks):
        print(f"task {n + 1} of {len(tasks)}", file=sys.stderr, flush=True)
        for turn in range(len(ways)):
            engine, way = ways[(n + turn) % len(ways)]
            time.sleep(SETTLE_SECONDS)
            tallies[engine, way].add(task["task_id"], workers[engine].ask("answer", **task, way=way))
    return tallies


def report(tallies: Mapping[tuple[str, str], Tally], setup: Mapping[str, Any]) -> dict[str, Any]:
    """The result as JSON. `ratio`: Forerun's rate with speculation over that of each other way."""
    ours = tallies["forerun", "speculation"]
    plain = tallies["forerun", "plain"]
    rows = [
        {
            "engine": engine,
            "way": way,
            "tokens": tally.tokens,
            "tokens_per_s": tally.rate,
            "tokens_per_s_after_first": tally.later_rate,
            "ratio": ours.rate / tally.rate,
            "ratio_after_first": _ratio(ours.later_rate, tally.later_rate),
            "seconds": tally.seconds,
        }
        for (engine, way), tally in tallies.items()
    ]
    others = [tally for (engine, _), tally in tallies.items() if engine == "llama.cpp"]
    later = [tally.later_rate for tally in others if tally.later_rate is not None]
    return {
        "setup": dict(setup),
        "rows": rows,
        "ratio_to_fastest_llama_cpp": ours.rate / max(tally.rate for tally in others) if others else None,
        "ratio_to_fastest_llama_cpp_after_first": _ratio(ours.later_rate, max(later)) if later else None,
        "differing": [task for task, tokens in plain.answers.items() if ours.answers[task] != tokens],
        "same_greedy_answers": {
            f"{engine} {way}": _agreement(ours.answers, tally.answers) for (engine, way), tally in tallies.items()
        },
    }


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _agreement(ours: Mapping[str, list[int]], theirs: Mapping[str, list[int]]) -> float:
    """The share of our tokens that come before the first difference, over all answers."""
    same = 0
    for task, tokens in ours.items():
        pairs = zip(tokens, theirs[task], strict=False)
        same += sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same / sum(map(len, ours.values()))


def print_table(result: Mapping[str, Any]) -> None:
    """The result for people."""
    setup = result["setup"]
    print(f"{setup['model']}, sha256 {setup['sha256']}")
    print(f"{setup['cpu']}, {setup['physical_cores']} cores, {setup['threads']} threads")
    for version in setup["versions"].values():
        print(version)
    print(setup["command"])
    print(f"{setup['n_tasks']} tasks, greedy, batch 1, every answer from nothing\n")
    print(f"{'':24}{'tokens':>8}{'tokens/s':>10}{'after first':>13}{'Forerun is':>12}{'after first':>13}")
    for row in result["rows"]:
        later, ratio = row["tokens_per_s_after_first"], row["ratio_after_first"]
        print(
            f"{row['engine'] + ' ' + row['way']:24}{row['tokens']:>8}{row['tokens_per_s']:>10.1f}"
            f"{'-' if later is None else format(later, '.1f'):>13}{row['ratio']:>11.2f}x"
            f"{'-' if ratio is None else format(ratio, '.2f') + 'x':>13}"
        )
    fastest = result["ratio_to_fastest_llama_cpp"]
    if fastest is not None:
        print(f"\nForerun with speculation is {fastest:.2f} times as fast as the fastest of llama.cpp's ways")
    for name, share in result["same_greedy_answers"].items():
        print(f"{name}: {share:.0%} of Forerun's tokens before the first difference")
    if result["differing"]:
        print(f"FORERUN'S TEXTS DIFFER: {', '.join(result['differing'])}")
    else:
        print("Forerun's texts are the same with and without speculation")


def main() -> None:
    """Parses the command line, runs the comparison; exit code 1 where speculation changed a text."""
    parser = argparse.ArgumentParser(description="Forerun with drafts beside llama.cpp, in alternation.")
    parser.add_argument("-m", "--model", default="qwen2.5-coder-1.5b-instruct", help="name or path")
    parser.add_argument("--tasks", type=Path, default=Path("tasks/code_edit.jsonl"), help="task file")
    parser.add_argument("--limit", type=int, help="only the first so many tasks of each category")
    parser.add_argument("--max-tokens", type=int, default=256, help="cap of every answer; default 256")
    parser.add_argument("--draft", default="suffix", help="Forerun's drafter; default suffix")
    parser.add_argument("--draft-len", default="auto", help=f"auto or 1 to {MAX_NODES}")
    parser.add_argument("--threads", type=int, help="default: one per physical core")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if options.max_tokens < 1 or (options.limit is not None and options.limit < 1):
        parser.error("--limit and --max-tokens must be 1 or more")
    if options.draft_len != "auto" and options.draft_len not in map(str, range(1, MAX_NODES + 1)):
        parser.error(f"--draft-len must be auto or a number from 1 to {MAX_NODES}")
    length = options.draft_len if options.draft_len == "auto" else int(options.draft_len)
    asked = {"model": options.model, "tasks": str(options.tasks.resolve()), "limit": options.limit}
    asked |= {"max_tokens": options.max_tokens, "draft": options.draft, "draft_len": length}
    with running(peer_python()) as workers:
        setup = workers["forerun"].ask("load_tasks", **asked, threads=options.threads)
        tasks = setup["tasks"]
        kept = ("path", "threads", "ends", "tasks")
        peer = workers["llama.cpp"].ask("load_tasks", **{key: setup[key] for key in kept})
        tallies = compare(workers, tasks)
    command = ["python", "bench/peers_tasks.py", "-m", options.model, "--tasks", str(options.tasks)]
    command += ["--limit", str(options.limit)] if options.limit is not None else []
    command += ["--max-tokens", str(options.max_tokens), "--draft", options.draft]
    command += ["--draft-len", options.draft_len, "--threads", str(setup["threads"])]
    about = {"model": options.model, "command": shlex.join(command), "n_tasks": len(tasks)}
    about |= {key: setup[key] for key in ("sha256", "cpu", "physical_cores", "threads")}
    about["versions"] = {"llama.cpp": peer["version"], "forerun": setup["version"]}
    result = report(tallies, about)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        print_table(result)
    if result["differing"]:
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
    except PeersError as error:
        sys.exit(f"peers: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
