#!/usr/bin/env python3
"""Whether a server under mixed load answers as it answers each request alone, and keeps nothing.

    python bench/serve_soak.py -m smollm2-135m-instruct

Starts `forerun serve` and sends --requests mixed requests from --clients clients: chat and completions, streams and
whole answers, several texts, log-probabilities, stops, seeds, penalties, grammars, schemas and tools, with speculation.
A third of them is cancelled at random moments. Then the server has to be empty (no request, no KV, as many threads as
before), its resident memory must not have grown by more than --growth after the first third, and SIGTERM must end it
with exit code 0. A second server without drafts, given the other requests one after the other, says what the answers
should have been. The exit code is 1 if anything of that fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from serve_overhead import ForerunServer

GRAMMAR = 'start: "(" [start] ")"'
SCHEMA = {
    "type": "object",
    "properties": {"type": {"enum": ["A", "B"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["type", "count"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place.",
            "parameters": {
                "type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
]  # fmt: skip
WORDS = (
    "the",
    "of",
    "and",
    "def",
    "return",
    "for",
    "in",
    "range",
    "import",
    "self",
    "value",
    "key",
    "open",
    "read",
    "x",
)


@dataclass(frozen=True)
class Request:
    """One request. leave: seconds after which the client goes away, or None. events: or after as many events."""

    path: str
    body: dict[str, Any]
    leave: float | None = None
    events: int | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the client may go away before the end."""
        return self.leave is not None or self.events is not None


@dataclass
class Reply:
    """What came back: each text by its index, and what it ended with."""

    texts: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    problem: str | None = None
    left: bool = False


def requests(n: int, seed: int) -> list[Request]:
    """A mixture that is a function of the seed."""
    rng = random.Random(seed)
    made = []
    for number in range(n):
        chat = rng.random() < 0.5
        body = _sampling(rng)
        text = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 20, 80))))
        text = f"{text}\n" * rng.choice((1, 1, 3))
        body["stream"] = rng.random() < 0.6
        if body["stream"] and rng.random() < 0.7:
            body["stream_options"] = {"include_usage": True}
        if chat:
            body["messages"] = [{"role": "user", "content": text}]
            if rng.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": rng.choice((0, 3))}
        else:
            body["prompt"] = [text, text[: len(text) // 2] + "a"] if rng.random() < 0.2 else text
            if rng.random() < 0.3:
                body["logprobs"] = rng.choice((0, 2))
            elif rng.random() < 0.2:
                body["echo"] = True
        _constrain(rng, body, chat)
        leave = events = None
        if number % 3 == 2:
            if body["stream"] and rng.random() < 0.5:
                events = rng.randint(1, 12)
            else:
                leave = rng.choice((0.0, 0.01, 0.05, 0.2, 0.5)) * rng.random()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        made.append(Request(path, body, leave, events))
    return made


def _sampling(rng: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.choice((1, 4, 16, 16, 48, 96)), "temperature": 0}
    if rng.random() < 0.5:
        body |= {"temperature": rng.choice((0.7, 1.0, 1.5)), "seed": rng.randrange(2**32)}
        if rng.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": 40}
        if rng.random() < 0.2:
            body["min_p"] = 0.05
        if rng.random() < 0.2:
            body["verify"] = "coupled"
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "presence_penalty": -0.5, "repetition_penalty": 1.1}
    if rng.random() < 0.2:
        body["logit_bias"] = {str(rng.randrange(200)): rng.choice((-100, 5))}
    if rng.random() < 0.25:
        body["stop"] = rng.choice((["e"], ["\n", "the"], "a ", ["zzz"]))
        body["include_stop_str_in_output"] = rng.random() < 0.3
    if rng.random() < 0.2:
        body["n"] = rng.choice((2, 3))
    if rng.random() < 0.1:
        body |= {"min_tokens": 1, "ignore_eos": True}
    if rng.random() < 0.1:
        body["speculate"] = False
    elif rng.random() < 0.1:
        body["draft_len"] = rng.choice((0, 2))
    if rng.random() < 0.2:
        body["user"] = rng.choice(("ann", "bob"))
    return body


def _constrain(rng: random.Random, body: dict[str, Any], chat: bool) -> None:
    if rng.random() > 0.4:
        return
    for key in ("ignore_eos", "stop", "include_stop_str_in_output"):
        body.pop(key, None)
    kind = rng.randrange(6 if chat else 4)
    if kind == 0:
        body["guided_choice"] = ["yes", "no", "perhaps"]
    elif kind == 1:
        body["guided_regex"] = f"[a-z]{{{rng.randint(1, 3)}}}-[0-9]+"
    elif kind == 2:
        body["guided_grammar"] = GRAMMAR
    elif kind == 3:
        schema = json.loads(json.dumps(SCHEMA))
        schema["properties"]["count"]["maximum"] = rng.choice((9, 19, 29))
        body["guided_json"] = schema
    elif kind == 4:
        body["response_format"] = {"type": "json_object"}
    else:
        body |= {"tools": TOOLS, "tool_choice": rng.choice(("auto", "required")), "max_tokens": 96}


async def ask(client: httpx.AsyncClient, request: Request) -> Reply:
    """Sends a request and reads its answer, or leaves."""
    reply = Reply()
    try:
        async with asyncio.timeout(request.leave):
            if request.body.get("stream"):
                await _stream(client, request, reply)
            else:
                answer = await client.post(request.path, json=request.body)
                if answer.status_code != 200:
                    reply.problem = f"status {answer.status_code}: {answer.text[:300]}"
                else:
                    _whole(answer.json(), reply)
    except TimeoutError:
        reply.left = True
    except httpx.HTTPError as error:
        reply.problem = f"{type(error).__name__}: {error}"
    return reply


async def _stream(client: httpx.AsyncClient, request: Request, reply: Reply) -> None:
    done, n = False, 0
    async with client.stream("POST", request.path, json=request.body) as answer:
        if answer.status_code != 200:
            await answer.aread()
            reply.problem = f"status {answer.status_code}: {answer.text[:300]}"
            return
        async for line in answer.aiter_lines():
            if not line:
                continue
            if done or not line.startswith("data: "):
                reply.problem = f"unexpected line {line[:100]!r}"
                return
            if line == "data: [DONE]":
                done = True
                continue
            _event(json.loads(line[6:]), reply)
            n += 1
            if n == request.events:
                reply.left = True
                return
    if not done:
        reply.problem = "the stream ended without [DONE]"


def _event(event: dict[str, Any], reply: Reply) -> None:
    if "error" in event:
        reply.problem = f"an error in the stream: {event['error']}"
        return
    if event.get("usage"):
        reply.usage = _usage(event["usage"])
    for choice in event["choices"]:
        text = reply.texts.setdefault(choice["index"], _empty())
        delta = choice.get("delta") or {"content": choice.get("text")}
        if text["reason"] is not None:
            reply.problem = "a piece after the end of its text"
        text["text"] += delta.get("content") or ""
        text["calls"] += [_call(call) for call in delta.get("tool_calls") or []]
        text["logprobs"] += _logprobs(choice.get("logprobs"))
        text["reason"] = choice["finish_reason"]


def _whole(answer: dict[str, Any], reply: Reply) -> None:
    reply.usage = _usage(answer["usage"])
    for choice in answer["choices"]:
        message = choice.get("message") or {"content": choice.get("text")}
        text = reply.texts[choice["index"]] = _empty()
        text["text"] = message["content"] or ""
        text["calls"] = [_call(call) for call in message.get("tool_calls") or []]
        text["logprobs"] = _logprobs(choice.get("logprobs"))
        text["reason"] = choice["finish_reason"]


def _empty() -> dict[str, Any]:
    return {"text": "", "calls": [], "logprobs": [], "reason": None}


def _usage(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]


def _call(call: dict[str, Any]) -> tuple[str, str]:
    return call["function"]["name"], call["function"]["arguments"]


def _logprobs(found: dict[str, Any] | None) -> list[Any]:
    if not found:
        return []
    if "content" in found:
        return [(entry["token"], entry["logprob"], entry["top_logprobs"]) for entry in found["content"]]
    return list(zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True))


def difference(got: Reply, alone: Reply) -> str | None:
    """What two answers to one request don't have in common; None if they are the same."""
    for name, reply in (("under load", got), ("alone", alone)):
        if reply.problem is not None:
            return f"{name}: {reply.problem}"
    if got.texts.keys() != alone.texts.keys():
        return f"texts {sorted(got.texts)} and {sorted(alone.texts)} alone"
    for index, text in got.texts.items():
        for key, value in alone.texts[index].items():
            if text[key] != value:
                return f"text {index}: {key} {str(text[key])[:200]!r}, and {str(value)[:200]!r} alone"
    if None not in (got.usage, alone.usage) and got.usage != alone.usage:
        return f"usage {got.usage}, and {alone.usage} alone"
    return None


class Server(ForerunServer):
    """`forerun serve`, and what can be seen of it from outside."""

    def _status(self, key: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{key}:\s+(\d+)", text, re.MULTILINE)
        assert found is not None
        return int(found[1])

    @property
    def rss_kb(self) -> int:
        """Resident memory."""
        return self._status("VmRSS")

    @property
    def threads(self) -> int:
        """Threads of the process."""
        return self._status("Threads")

    def gauges(self) -> dict[str, float]:
        """Requests and KV that the server holds, by its own account."""
        text = httpx.get(self.url + "/metrics", timeout=60).text
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        return {name: float(re.search(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)[1]) for name in names}  # type: ignore[index]


@dataclass
class Load:
    """What the clients saw. rss_kb: resident memory of the server after each fiftieth of the requests."""

    replies: list[Reply]
    seconds: float
    rss_kb: list[int]


async def load(server: Server, asked: Sequence[Request], clients: int) -> Load:
    """All requests, each sent as soon as one of the clients is free."""
    replies: list[Reply] = [Reply() for _ in asked]
    rss: list[int] = []
    queue = iter(range(len(asked)))
    began = time.perf_counter()

    async def one(client: httpx.AsyncClient) -> None:
        for number in queue:
            replies[number] = await ask(client, asked[number])
            if number % max(1, len(asked) // 50) == 0:
                rss.append(server.rss_kb)

    # Without a bound of its own: a request that is given up can keep its place in the client's pool.
    async with httpx.AsyncClient(base_url=server.url, limits=httpx.Limits(), timeout=120) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    return Load(replies, time.perf_counter() - began, rss)


def growth(rss_kb: Sequence[int]) -> float:
    """How much larger the last third's median is than the middle third's: 0.02 is 2%."""
    third = len(rss_kb) // 3
    return statistics.median(rss_kb[-third:]) / statistics.median(rss_kb[third : 2 * third]) - 1


def left_behind(server: Server, threads: int) -> list[str]:
    """What an idle server still holds."""
    deadline = time.monotonic() + 20
    found: list[str] = []
    while time.monotonic() < deadline:
        found = [f"{name} is {value:g} when idle" for name, value in server.gauges().items() if value]
        if server.threads > threads:
            found.append(f"{server.threads} threads, {threads} before")
        if not found:
            break
        time.sleep(0.1)
    return found


def soak(
    model: str, asked: Sequence[Request], clients: int, warm_up: int, most: float | None, options: Sequence[str]
) -> list[str]:
    """Everything that went wrong; prints counts.

    warm_up: requests before those that are looked at. most: growth of resident memory; None: not looked at.
    """
    problems: list[str] = []
    with Server(model, *options) as server:
        print(shlex.join(server.command))
        # What is made once: pools of threads, what all grammars share, connections; and the bounded caches get full.
        asyncio.run(load(server, requests(warm_up, seed=99), clients))
        threads = server.threads
        seen = asyncio.run(load(server, asked, clients))
        problems += left_behind(server, threads)
        grown = growth(seen.rss_kb)
        if most is not None and grown > most:
            problems.append(f"resident memory grew by {grown:.1%}; at most {most:.0%} is allowed")
        counts = Counter("left" if r.left else "problem" if r.problem else "answered" for r in seen.replies)
        print(
            f"{len(asked)} requests, {clients} clients, {seen.seconds:.1f} s: {dict(counts)}; resident "
            f"{seen.rss_kb[0] / 1024:.0f} to {seen.rss_kb[-1] / 1024:.0f} MiB, {grown:+.2%} from the middle third to "
            f"the last; {threads} threads"
        )
        code = server.stop()
        if code != 0:
            problems.append(f"SIGTERM ended the server with exit code {code}")
        if "Traceback" in server.log:
            problems.append(f"the server's log: {server.log[-3000:]}")
    finished = [n for n, reply in enumerate(seen.replies) if not reply.left]
    with Server(model, *options, "--draft", "none") as server:
        alone = asyncio.run(load(server, [Request(asked[n].path, asked[n].body) for n in finished], 1))
        server.stop()
    same = 0
    for n, reply in zip(finished, alone.replies, strict=True):
        found = difference(seen.replies[n], reply)
        same += found is None
        if found is not None:
            problems.append(f"request {n}: {found}\n    {json.dumps(asked[n].body)[:600]}")
    print(f"{same} of {len(finished)} finished answers are what they are alone ({alone.seconds:.1f} s)")
    return problems


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", required=True, help="catalog name or path")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--warm-up", type=int, default=300, help="requests before those that are looked at")
    parser.add_argument("--seed", type=int, default=1, help="of the mixture")
    parser.add_argument("--growth", type=float, default=0.02, help="of resident memory that is allowed")
    parser.add_argument("--kv-tokens", type=int, default=8192, help="of the server; few make it preempt")
    parser.add_argument("--max-rows", type=int, default=16, help="of the server")
    parser.add_argument(
        "--shared-mib",
        type=float,
        default=1,
        help="of the server: few, so that remembered texts soon take all they may",
    )
    arguments = parser.parse_args()
    if min(arguments.requests, arguments.clients, arguments.warm_up) < 1:
        parser.error("--requests, --clients and --warm-up must be at least 1")
    options = ["--kv-tokens", str(arguments.kv_tokens), "--max-rows", str(arguments.max_rows)]
    options += ["--shared-mib", str(arguments.shared_mib)]
    asked = requests(arguments.requests, arguments.seed)
    problems = soak(arguments.model, asked, arguments.clients, arguments.warm_up, arguments.growth, options)
    for problem in problems[:20]:
        print(problem, file=sys.stderr)
    if problems:
        sys.exit(f"serve_soak: {len(problems)} problems")


if __name__ == "__main__":
    main()
