"""The short form of bench/serve_soak.py, what it would find, and an event loop that nothing holds up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from forerun import Engine
from reference.live_server import LiveServer
from reference.tiny import TinySpec, write_tiny_gguf

OPTIONS = ("--kv-tokens", "2048", "--max-rows", "8", "--threads", "1")
MOST_SECONDS = 2.0
"""Between two beats of the event loop. Whatever may block it here takes longer."""


def test_mixed_requests_and_cancels(soak: ModuleType, served: Path) -> None:
    """KV for 2,048 tokens and 32 clients: requests are preempted, too."""
    asked = soak.requests(120, seed=5)
    assert sum(request.cancelled for request in asked) == 40
    assert soak.soak(str(served), asked, 32, 96, None, OPTIONS) == []


def test_the_same_seed_is_the_same_mixture(soak: ModuleType) -> None:
    assert soak.requests(50, seed=3) == soak.requests(50, seed=3) != soak.requests(50, seed=4)


def test_what_the_soak_would_find(soak: ModuleType) -> None:
    def reply(**changes: Any) -> Any:
        text = {"text": "ab", "calls": [], "logprobs": [("a", -1.0, [])], "reason": "stop", **changes}
        return soak.Reply({0: text}, (3, 2))

    assert soak.difference(reply(), reply()) is None
    for change in ({"text": "ac"}, {"reason": "length"}, {"logprobs": [("a", -1.1, [])]}, {"calls": [("f", "{}")]}):
        assert next(iter(change)) in soak.difference(reply(**change), reply())
    assert "texts" in soak.difference(soak.Reply(), reply())
    assert "usage" in soak.difference(soak.Reply(reply().texts, (3, 3)), reply())
    assert "under load: x" in soak.difference(soak.Reply(problem="x"), reply())
    assert soak.growth([90, 90, 100, 100, 103, 103]) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (['{"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}'], "without [DONE]"),
        (['{"error": {"message": "x"}}', "[DONE]"], "an error in the stream"),
        (['{"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}'] * 2 + ["[DONE]"], "after the end"),
        (["[DONE]", "[DONE]"], "unexpected line"),
    ],
)
def test_streams_that_the_soak_refuses(soak: ModuleType, lines: list[str], problem: str) -> None:
    body = "".join(f"data: {line}\n\n" for line in lines)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=body))

    async def asked() -> Any:
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await soak.ask(client, soak.Request("/v1/completions", {"stream": True}))

    assert problem in asyncio.run(asked()).problem


class Watched(LiveServer):
    """A server whose event loop is known."""

    loop: asyncio.AbstractEventLoop

    def _run(self) -> None:
        async def serve() -> None:
            self.loop = asyncio.get_running_loop()
            await self._server.serve(sockets=[self._socket])

        asyncio.run(serve())

    def largest_gap(self, ended: Future[Any]) -> float:
        """Seconds between two beats of the loop, until something has ended."""

        async def beat() -> float:
            largest, last = 0.0, self.loop.time()
            while not ended.done():
                await asyncio.sleep(0.005)
                largest, last = max(largest, self.loop.time() - last), self.loop.time()
            return largest

        return asyncio.run_coroutine_threadsafe(beat(), self.loop).result(300)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    path = write_tiny_gguf(tmp_path_factory.mktemp("model") / "t.gguf", TinySpec("llama", layers=1, context=8192))
    engine = Engine(path, kv_tokens=16384, threads=1, cache_weights=False, draft_len=4, max_rows=8)
    with Watched(engine) as live:
        yield live


async def heavy(url: str) -> None:
    """A prompt of 4,000 tokens, schemas of 20,000 values, a text of 4 MB that is too long, bodies of many items."""
    long = "x = y + 1\n" * 400
    values = [f"{n}-{'value' * 8}" for n in range(20_000)]
    bodies: list[tuple[dict[str, Any], int]] = [
        ({"prompt": long, "max_tokens": 30}, 200),
        ({"prompt": long, "max_tokens": 2, "echo": True, "stream": True}, 200),
        ({"prompt": "a", "max_tokens": 20, "guided_json": {"enum": values}}, 200),
        ({"prompt": "a", "max_tokens": 20, "guided_choice": values[::2]}, 200),
        ({"prompt": "Hello world, this is a text of words. " * 100_000}, 400),
        ({"prompt": [1] * 3_000_000}, 413),
        ({"prompt": "a", "logit_bias": {str(n): "x" for n in range(140_000)}}, 400),
        ({"prompt": "a", **{f"unknown_{n}": 1 for n in range(140_000)}}, 400),
    ]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", content=_json(body), headers=JSON) for body, _ in bodies)
        )
    assert [answer.status_code for answer in answers] == [status for _, status in bodies]


JSON = {"content-type": "application/json"}


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def run_heavy(watched: Watched) -> float:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(asyncio.run, heavy(watched.url))
        gap = watched.largest_gap(ended)
        ended.result()
    watched.check_idle()
    return gap


def test_nothing_holds_the_event_loop_up(watched: Watched) -> None:
    assert run_heavy(watched) < MOST_SECONDS


def test_a_call_on_the_event_loop_would_be_seen(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: prompts are tokenized on the loop."""

    async def here(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    monkeypatch.setattr("forerun.serve.service.asyncio.to_thread", here)
    assert run_heavy(watched) > MOST_SECONDS
