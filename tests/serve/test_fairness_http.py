"""Promises under load, through HTTP: long prompts stop nobody, who leaves frees everything, SIGTERM loses nothing."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from forerun import Engine
from reference.live_server import LiveServer
from reference.tiny import TinySpec, write_tiny_gguf


async def events(client: httpx.AsyncClient, body: dict[str, Any], seen: list[Any]) -> None:
    """Streams a completion; what comes is added to `seen` as it comes, "[DONE]" as a text."""
    async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            await answer.aread()
            seen.append(answer.json())
            return
        async for line in answer.aiter_lines():
            if line:
                data = line.removeprefix("data: ")
                seen.append(data if data == "[DONE]" else json.loads(data))


def text_of(seen: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in seen if event != "[DONE]" and event.get("choices"))


@pytest.mark.parametrize("slowdown", [1.6, None])
def test_a_long_prompt_comes_in_pieces_between_others_tokens(tmp_path: Path, slowdown: float | None) -> None:
    """A request that runs gets a token with each step of the 4,000-token prompt: at least as many as that has steps.

    Were the prompt computed at once, the other one would get nothing meanwhile.
    """
    path = write_tiny_gguf(tmp_path / "t.gguf", TinySpec("llama", layers=1, context=8192))
    engine = Engine(
        path, kv_tokens=16384, threads=1, cache_weights=False, draft="none", max_step_tokens=256, prefix_cache=False,
        prompt_slowdown=slowdown,
    )  # fmt: skip

    async def work(url: str) -> tuple[int, int]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            running: list[Any] = []
            arriving: list[Any] = []
            one = asyncio.create_task(events(client, {"prompt": [1], "max_tokens": 6000, "ignore_eos": True}, running))
            while len(running) < 5:
                await asyncio.sleep(0.002)
            [live] = list(engine.loop.live.values())
            before = live.request.n_output
            long = {"prompt": [n % 250 for n in range(4000)], "max_tokens": 1, "temperature": 0}
            two = asyncio.create_task(events(client, long, arriving))
            while len(engine.loop.live) < 2 and not arriving:
                await asyncio.sleep(0)
            other = list(engine.loop.live.values())[-1]
            await two
            assert not one.done()
            given = live.request.n_output - before
            one.cancel()
            return given, other.request.steps

    with LiveServer(engine) as server:
        given, steps = asyncio.run(work(server.url))
        server.check_idle()
    assert steps >= 4000 // 256
    assert given >= steps - 1


LONG = 300
"""Tokens of an answer that is still being written when the signal comes."""


def test_sigterm_loses_no_accepted_request(soak: ModuleType, tmp_path: Path) -> None:
    """Two rows and ten streams: those that run and those that wait end as they would have; nothing new is taken."""
    # Deep enough that steps, not events, take the time: what comes in has its turn between them.
    served = write_tiny_gguf(tmp_path / "t.gguf", TinySpec("llama", layers=6, context=512))
    options = ("--kv-tokens", "2048", "--max-rows", "2", "--threads", "1", "--grace", "60")
    rest = {"max_tokens": LONG, "temperature": 0, "ignore_eos": True, "speculate": False}
    bodies = [{"prompt": [n, n + 1], **rest} for n in range(10)]

    async def work(server: Any) -> list[list[Any]]:
        seen: list[list[Any]] = [[] for _ in bodies]
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            tasks = [asyncio.create_task(events(client, *both)) for both in zip(bodies, seen, strict=True)]
            while not any(seen) or sum((await asyncio.to_thread(server.gauges)).values()) < 9:
                assert not any(task.done() for task in tasks), "they end before all of them are there"
                await asyncio.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            refused = False
            while not refused:  # at once, but not before the signal has arrived
                assert not all(task.done() for task in tasks)
                try:
                    async with httpx.AsyncClient(base_url=server.url) as other:
                        await other.get("/health")
                    await asyncio.sleep(0.01)
                except httpx.TransportError:  # refused, or taken by a socket that closes
                    refused = True
            assert not all(task.done() for task in tasks)
            await asyncio.gather(*tasks)
        return seen

    with soak.Server(str(served), *options) as server:
        seen = asyncio.run(work(server))
        assert server.process.wait(30) == 0
        assert "Traceback" not in server.log
    alone = Engine(served, kv_tokens=2048, threads=1, cache_weights=False, draft="none")
    from forerun import SamplingParams

    for body, stream in zip(bodies, seen, strict=True):
        [expected] = alone.generate([body["prompt"]], SamplingParams(max_tokens=LONG, ignore_eos=True))  # type: ignore[arg-type]
        assert text_of(stream) == expected.text
        assert stream[-1] == "[DONE]"
        assert stream[-2]["choices"][0]["finish_reason"] == "length"


def test_what_outlives_the_grace_is_told_so(soak: ModuleType, served: Path) -> None:
    options = ("--kv-tokens", "4096", "--max-rows", "2", "--threads", "1", "--grace", "0")
    body = {"prompt": [1], "max_tokens": 2000, "temperature": 0, "ignore_eos": True}

    async def work(server: Any) -> list[list[Any]]:
        seen: list[list[Any]] = [[], [], []]
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            tasks = [asyncio.create_task(events(client, body, each)) for each in seen]
            while not (sum(map(bool, seen)) == 2 and sum((await asyncio.to_thread(server.gauges)).values()) > 2):
                await asyncio.sleep(0.005)
            server.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*tasks)
        return seen

    with soak.Server(str(served), *options) as server:
        # Any two of the three may be the ones that run.
        *begun, waited = sorted(asyncio.run(work(server)), key=lambda stream: stream[-1] != "[DONE]")
        assert server.process.wait(30) == 0
    for stream in begun:
        assert stream[-1] == "[DONE]"
        assert stream[-2]["error"]["code"] == "shutting_down"
    assert waited[-1]["error"]["code"] == "shutting_down"  # it never began: the status of the answer is 503
