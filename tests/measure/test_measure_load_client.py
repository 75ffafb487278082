"""A load's client: event streams read, times and errors attributed, by servers whose timing is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("httpx", reason="httpx is not installed (pip install 'forerun[bench]')")

from forerun.errors import InvalidRequestError
from forerun.measure.load import Arrival, Exchange, Load, LoadSetup, report_of
from forerun.measure.load_client import EndpointError, LoadClient, Order, base_url
from forerun.measure.load_run import run_closed
from forerun.measure.load_sse import EventReader, Reading, StreamError
from forerun.measure.tasks import Task

LOAD = Load("ab", None, "chat", "closed", None, 1, 1, 0, 16, 0.0, 0, {})
SETUP = LoadSetup("http://h/v1", "m", None, "unknown", "c", "d", "t", "forerun bench serve")
ORDER = Order.of(Task("t", "chat", "Hi", None), "chat", "m", max_tokens=8, temperature=0, seed=0, extra={})


TRICKY = (
    "\ufeffdata: one\n\n: a comment\r\n\r\ndata:two\ndata: lines\r\rdata\n\nevent: x\nid: 7\n\n"
    "data:  kept\u2028é🙂\r\n\r\nretry: 1\ndata: last\n\ndata: never ended"
)
EVENTS = ["one", "two\nlines", "", " kept\u2028é🙂", "last"]


@given(st.lists(st.integers(0, len(TRICKY.encode()))))
def test_events_are_the_same_wherever_the_bytes_are_cut(cuts: list[int]) -> None:
    data = TRICKY.encode()
    places = [0, *sorted(cuts), len(data)]
    reader = EventReader()
    assert [event for a, b in pairwise(places) for event in reader.push(data[a:b])] == EVENTS


def test_cuts_in_a_line_end_matter() -> None:
    """The planted fault: a reader that forgets that it saw a CR ends an event twice, or too soon."""
    reader = EventReader()
    found = reader.push(b"data: a\r")
    reader._after_cr = False
    assert found + reader.push(b"\ndata: b\r\n\r\n") != ["a\nb"]
    reader = EventReader()
    assert reader.push(b"data: a\r") + reader.push(b"\ndata: b\r\n\r\n") == ["a\nb"]


def chunk(content: str | None = None, **more: Any) -> bytes:
    delta = {} if content is None else {"content": content}
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def end(reason: str = "stop") -> bytes:
    return b'data: {"choices": [{"delta": {}, "finish_reason": "%s"}]}\n\n' % reason.encode()


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, **more}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_what_is_text_and_what_is_not() -> None:
    reading = Reading()
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    reading.push(role, 1.0)
    assert not reading.arrivals, "a role is no token"
    reading.push(chunk("a") + chunk("b"), 2.0)
    # What comes in one read came together.
    assert (reading.arrivals, reading.n_events) == ([Arrival(2.0, None)], 2)
    reading.push(chunk("c", usage=None), 3.0)
    assert not reading.complete
    reading.push(end("length"), 4.0)
    assert reading.complete
    assert reading.finish_reason == "length"
    reading.push(
        usage(7, 5, speculation={"drafted": 1, "proposed": 4, "accepted": 2, "other": 9, "emitted": True}), 5.0
    )
    reading.push(DONE + chunk("after the end"), 6.0)
    reading.push(chunk("later"), 7.0)
    assert (reading.prompt_tokens, reading.output_tokens, reading.n_events) == (7, 5, 3)
    assert reading.speculation == {"drafted": 1, "proposed": 4, "accepted": 2}
    assert (reading.done, reading.ended) == (True, 6.0)


@pytest.mark.parametrize(
    "delta", [{"reasoning_content": "x"}, {"tool_calls": [{"index": 0}]}, {"refusal": "no"}, {"content": "x"}]
)
def test_every_kind_of_text_counts(delta: dict[str, Any]) -> None:
    reading = Reading()
    reading.push(b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n", 1.0)
    assert len(reading.arrivals) == 1
    completion = Reading()
    completion.push(b'data: {"choices": [{"text": "x"}]}\n\n', 1.0)
    assert len(completion.arrivals) == 1


def test_a_server_that_tells_tokens_with_each_event() -> None:
    reading = Reading()
    for at, tokens in ((1.0, 1), (2.0, 4), (3.0, 5)):
        reading.push(chunk("x", usage={"prompt_tokens": 2, "completion_tokens": tokens}), at)
    assert [arrival.tokens for arrival in reading.arrivals] == [1, 4, 5]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"data: {\n\n", "malformed"),
        (b"data: [1]\n\n", "malformed"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "malformed"),
        (b'data: {"error": {"message": "out of\\n memory\\u001b[2J", "type": "x"}}\n\n', "error_event"),
        (b'data: {"error": "boom"}\n\n', "error_event"),
    ],
)
def test_streams_that_are_none(data: bytes, kind: str) -> None:
    with pytest.raises(StreamError) as caught:
        Reading().push(data, 0.0)
    assert caught.value.kind == kind
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"choices": 3}',
        '{"choices": [null]}',
        '{"choices": [{"delta": 4}]}',
        '{"usage": {"completion_tokens": -1}}',
    ],
)
def test_strange_events_count_for_nothing(body: str) -> None:
    reading = Reading()
    reading.push(f"data: {body}\n\n".encode(), 0.0)
    assert (reading.arrivals, reading.output_tokens, reading.complete) == ([], None, False)


class SteppedClock:
    """A clock that stands until the server moves it, and that knows when it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def scripted(script: Script, seen: list[bytes] | None = None) -> AsyncIterator[str]:
    """An address at which every request is answered by the script."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    (
                        int(line.split(b":")[1])
                        for line in head.lower().split(b"\r\n")
                        if line.startswith(b"content-length")
                    ),
                    0,
                )
                body = await reader.readexactly(length)
                if seen is not None:
                    seen.append(head + body)
                await script(writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def answer(status: str, body: bytes, kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


HEAD = b"HTTP/1.1 200 OK\r\nServer: fake\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def part(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def test_times_are_those_at_which_bytes_arrived() -> None:
    """The server moves the client's clock, and sends on only when the client has read it: no machine's speed shows."""
    clock = SteppedClock()
    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    schedule = [
        (0.5, role),
        (1.0, chunk("a")),
        (1.2, chunk("b") + chunk("c")),
        (1.25, b": keep-alive\n\n"),
        (2.0, chunk("d")[:20]),
        (2.5, chunk("d")[20:]),
        (2.75, end("length")),
        (3.0, usage(4, 9) + DONE),
    ]

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        for at, data in schedule:
            clock.now, before = at, clock.reads
            writer.write(part(data))
            await writer.drain()
            while clock.reads == before:
                await asyncio.sleep(0)
        clock.now = 99.0
        writer.write(part(b""))

    async def drive() -> list[Exchange]:
        async with scripted(script) as base, LoadClient(base, "chat", clock=clock) as client:
            found: list[Exchange] = []
            clock.now = 0.25
            await run_closed([ORDER], 1, client.ask, found.append)
            return found

    [found] = asyncio.run(drive())
    assert found.error is None, found.message
    assert (found.sent, found.ended, found.server) == (0.25, 3.0, "fake")
    assert [arrival.at for arrival in found.arrivals] == [1.0, 1.2, 2.5]
    assert (found.n_events, found.prompt_tokens, found.output_tokens, found.finish_reason) == (4, 4, 9, "length")
    figures = report_of([found], SETUP, LOAD)
    assert figures.first_token_ms is not None
    assert figures.first_token_ms.p50 == pytest.approx(750)
    assert figures.token_ms is not None
    assert figures.token_ms.p50 == pytest.approx(1500 / 8)
    assert figures.between_events_ms is not None
    assert figures.between_events_ms.mean == pytest.approx(750)
    assert figures.between_tokens_ms is not None
    # Eight tokens over two gaps: four of 0.05 s and four of 0.325 s.
    assert (figures.between_tokens_ms.p50, figures.between_tokens_ms.p90) == (pytest.approx(50), pytest.approx(325))
    assert figures.output_tokens_per_s == pytest.approx(9 / 2.75)


def ask_once(
    script: Script, *, timeout: float = 30.0, key: str | None = None, seen: list[bytes] | None = None
) -> Exchange:
    async def drive() -> Exchange:
        async with scripted(script, seen) as base, LoadClient(base, "chat", timeout=timeout, key=key) as client:
            return await client.ask(ORDER)

    return asyncio.run(drive())


def writes(data: bytes, then: str = "keep") -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if then == "close":
            writer.close()
        elif then == "hang":
            await asyncio.sleep(20)

    return script


STREAM = HEAD + part(chunk("a"))


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (writes(answer("429 Too Many", b'{"error": {"message": "too\\u001b[2J many"}}')), "http_429", "too[2J many"),
        (writes(answer("500 No", b"<html>oh no</html>", "text/html")), "http_500", "oh no"),
        (writes(answer("307 Go", b"", more="Location: http://127.0.0.1:9/\r\n")), "http_307", ""),
        (writes(answer("200 OK", b"{}")), "malformed", "no event stream, but application/json"),
        (writes(STREAM + part(b"")), "cut_off", "before the answer did"),
        (writes(STREAM, "close"), "cut_off", "closed"),
        (writes(STREAM + part(b'data: {"error": {"message": "lost"}}\n\n'), "close"), "error_event", "lost"),
        (writes(STREAM + part(b"data: {\n\n"), "close"), "malformed", "no JSON"),
        (writes(b"HTTP/9 what\r\n\r\n", "close"), "cut_off", ""),
        (writes(STREAM + part(end() + DONE) + part(b"")), None, ""),
        # Some servers don't announce the end, and one that breaks off after it has answered.
        (writes(STREAM + part(end()) + part(b"")), None, ""),
        (writes(STREAM + part(end() + DONE), "close"), None, ""),
    ],
)
def test_errors_by_kind(script: Script, kind: str | None, words: str) -> None:
    found = ask_once(script)
    assert found.error == kind, found.message
    assert words in found.message


def test_a_server_that_hangs() -> None:
    assert ask_once(writes(STREAM, "hang"), timeout=0.2).error == "timeout"
    assert ask_once(writes(b"", "hang"), timeout=0.2).error == "timeout"
    assert ask_once(writes(STREAM + part(end() + DONE), "hang"), timeout=0.5).error is None


def test_nobody_there() -> None:
    async def drive() -> Exchange:
        async with scripted(writes(b"")) as base:
            pass
        async with LoadClient(base, "chat") as client:
            with pytest.raises(EndpointError, match="doesn't answer"):
                await client.only_model()
            return await client.ask(ORDER)

    assert asyncio.run(drive()).error == "connect"


def test_the_key_is_sent_and_proxies_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    seen: list[bytes] = []
    assert ask_once(writes(STREAM + part(end() + DONE) + part(b"")), key="sesame", seen=seen).error is None
    assert b"authorization: bearer sesame" in seen[0].lower()
    with pytest.raises(InvalidRequestError, match="API key"):
        LoadClient("http://h/v1", "chat", key="a\nb")


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"data": [{"id": "one"}]}', "one"),
        (b'{"data": [{"id": "one"}, {"id": "two"}]}', "2 models (one, two); choose one with --model"),
        (b'{"data": []}', "0 models (none)"),
        (b'{"data": [{"id": "\\u001b[2J"}]}', "control characters"),
        (b'{"models": []}', "isn't a list of models; give --model"),
        (b"<html>", "isn't a list of models; give --model"),
    ],
)
def test_the_model_is_found_out(body: bytes, found: str) -> None:
    async def drive() -> str:
        async with scripted(writes(answer("200 OK", body))) as base, LoadClient(base, "chat") as client:
            return await client.only_model()

    if b'one"}]' in body:
        assert asyncio.run(drive()) == found
        return
    with pytest.raises(EndpointError) as caught:
        asyncio.run(drive())
    assert found in str(caught.value)


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://h:1", "http://h:1/v1"),
        ("http://h/", "http://h/v1"),
        ("https://h/v1/", "https://h/v1"),
        ("http://h/api/v3", "http://h/api/v3"),
        (" http://[::1]:80 ", "http://[::1]:80/v1"),
        ("h:1", None),
        ("ftp://h", None),
        ("http://", None),
        ("http://h:99999", None),
        ("http://user:secret@h", None),
        ("http://h/v1?key=secret", None),
    ],
)
def test_addresses(url: str, base: str | None) -> None:
    if base is not None:
        assert base_url(url) == base
        return
    with pytest.raises(InvalidRequestError) as caught:
        base_url(url)
    assert "secret" not in str(caught.value)
