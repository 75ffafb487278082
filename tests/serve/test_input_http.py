"""Input that is no request, through HTTP: heads and bodies that lie, come slowly or not at all, values out of range."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import Engine
from forerun.serve.app import Settings
from forerun.serve.run import ServeOptions
from reference.live_server import LiveServer


def raw(port: int, data: bytes, *, end: bool = False) -> bytes:
    """What a server answers to bytes, until it closes or is silent."""
    found = b""
    # A server that has refused what it read may close before it has read the rest.
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as connection,
        contextlib.suppress(TimeoutError, ConnectionError),
    ):
        connection.sendall(data)
        if end:
            connection.shutdown(socket.SHUT_WR)
        connection.settimeout(1.0)
        while chunk := connection.recv(65536):
            found += chunk
    return found


def head(length: int | None, *lines: str) -> bytes:
    rest = [f"Content-Length: {length}"] if length is not None else []
    return "\r\n".join(
        ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", *rest, *lines, "", ""]
    ).encode()


@pytest.fixture(scope="module")
def strict(served: Path) -> Iterator[LiveServer]:
    """Small limits and API keys."""
    engine = Engine(served, kv_tokens=1024, threads=1, cache_weights=False, draft_len=2)
    settings = Settings(api_keys=("right", "other"), max_body_bytes=1000, body_seconds=0.5)
    with LiveServer(engine, ServeOptions(names=("tiny",), settings=settings)) as live:
        yield live
        live.check_idle()


KEY = "Authorization: Bearer right"


def test_bodies_that_come_too_slowly_or_not_at_all(strict: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", strict.port), timeout=20) as connection:
        connection.sendall(head(100, KEY))
        deadline = time.monotonic() + 20
        found = b""
        connection.settimeout(0.05)
        while b"408" not in found and time.monotonic() < deadline:
            try:
                connection.sendall(b" ")
                found += connection.recv(1000)
            except TimeoutError:
                continue
        assert b" 408 " in found
    assert alive(strict)


def test_heads_that_come_byte_by_byte_keep_nobody_from_the_server(strict: LiveServer) -> None:
    slow = [socket.create_connection(("127.0.0.1", strict.port)) for _ in range(50)]
    for letter in b"POST /v1/comp":
        for connection in slow:
            connection.sendall(bytes([letter]))
        assert alive(strict)
    for connection in slow:
        connection.close()


def test_a_body_in_chunks_is_bounded_too(strict: LiveServer) -> None:
    chunk = b"400\r\n" + b"a" * 1024 + b"\r\n"
    found = raw(strict.port, head(None, KEY, "Transfer-Encoding: chunked") + chunk * 3)
    assert found.startswith(b"HTTP/1.1 413 ")
    assert alive(strict)


def test_lengths_that_lie(strict: LiveServer) -> None:
    assert raw(strict.port, head(10**12, KEY)).startswith(b"HTTP/1.1 413 ")
    assert raw(strict.port, head(None, KEY, "Content-Length: -5")).startswith(b"HTTP/1.1 400 ")
    raw(strict.port, head(500, KEY) + b'{"prompt"', end=True)
    assert alive(strict)


def test_heads_that_are_none(strict: LiveServer) -> None:
    for data in (b"\x00\xff\xfe\r\n\r\n", b"GET\r\n\r\n", head(0, "X: " + "a" * 200_000)):
        found = raw(strict.port, data)
        assert not found or found.startswith(b"HTTP/1.1 4")
    for garbage in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 5 + b"\x16\x03\x01garbage\r\n\r\n",):
        assert raw(strict.port, garbage).count(b'{"status":"ok"}') >= 1
    assert alive(strict)


@pytest.mark.parametrize(
    ("authorization", "status"),
    [("Bearer right", 200), ("Bearer other", 200), ("Bearer wrong", 401), ("right", 401), ("Basic right", 401),
     (None, 401), ("bearer right", 200), ("Bearer r\u00e9", 401)],
)  # fmt: skip
def test_api_keys(strict: LiveServer, authorization: str | None, status: int) -> None:
    headers = {} if authorization is None else {"authorization": authorization.encode()}
    answer = httpx.get(strict.url + "/v1/models", headers=headers)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(strict.url + "/health").status_code == 200


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "PUT", "PATCH", "TRACE", "BREW"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/nothing"])
def test_other_methods(server: LiveServer, method: str, path: str) -> None:
    answer = httpx.request(method, server.url + path)
    assert 200 <= answer.status_code < 500


def alive(server: LiveServer) -> bool:
    return httpx.get(server.url + "/health", timeout=20).status_code == 200


def test_a_thousand_idle_connections(server: LiveServer) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        pytest.skip("this system doesn't allow 4,096 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    idle: list[socket.socket] = []
    try:
        idle += [socket.create_connection(("127.0.0.1", server.port)) for _ in range(1000)]
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 3}, timeout=30)
        assert answer.status_code == 200
    finally:
        for connection in idle:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


DEEP: Any = "x"
for _ in range(400):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "\ud800"}, {"stop": "\udfff"}, {"stop": ["\ud800"]}, {"guided_regex": "\ud800"},
        {"guided_choice": ["\ud800"]}, {"guided_json": {"const": "\ud800"}}, {"bad_words": ["\ud800"]},
        {"user": "\ud800"}, {"model": "\ud800"}, {"\ud800": 1},
        {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": [10**9]}, {"prompt": [[1], [300]]},
        {"prompt": [[1], "a"]}, {"prompt": [1.5]}, {"prompt": [True]}, {"prompt": None}, {"prompt": {}},
        {"prompt": [[1], [-5]], "echo": True}, {"prompt": [10**30]}, {"prompt": ["a"] * 129},
        {"max_tokens": -1}, {"max_tokens": 2**70}, {"min_tokens": -1}, {"n": -1}, {"n": 10**9}, {"seed": 2**64},
        {"temperature": -0.1}, {"top_p": -1}, {"top_k": -2}, {"min_p": -1}, {"typical_p": -1},
        {"presence_penalty": -10**9}, {"repetition_penalty": -1}, {"logprobs": -1}, {"logprobs": 10**6},
        {"draft_len": -1}, {"draft_len": 10**9}, {"timeout": -1}, {"timeout": 0}, {"stop_token_ids": [-1]},
        {"allowed_token_ids": [-1]}, {"allowed_token_ids": []}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"1": True}},
        {"logit_bias": {"1": "x"}}, {"logit_bias": {"99999": 1}}, {"stop": [""]}, {"guided_json": DEEP},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": [DEEP]}}}},
    ],
)  # fmt: skip
def test_values_that_are_refused(server: LiveServer, fields: dict[str, Any]) -> None:
    """400 with a message, and never a failure of the server's."""
    content = json.dumps({"prompt": "a", "max_tokens": 3, **fields}).encode()
    answer = httpx.post(server.url + "/v1/completions", content=content, headers={"content-type": "application/json"})
    expected = (200, 400) if fields == {"guided_json": DEEP} else (400,)
    assert answer.status_code in expected, answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "value", ["1e400", "-1e400", "NaN", "Infinity", "-Infinity", "9" * 5000, "1" + "0" * 400 + ".5"]
)
@pytest.mark.parametrize("name", ["temperature", "seed", "max_tokens", "top_p", "timeout", "frequency_penalty"])
def test_numbers_that_are_none(server: LiveServer, name: str, value: str) -> None:
    content = f'{{"prompt": "a", "max_tokens": 2, "{name}": {value}}}'.encode()
    answer = httpx.post(server.url + "/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"a": DEEP}}, {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"range": 1, "self": 2, "0": 3}},
        {"chat_template_kwargs": {"add_generation_prompt": 0}},
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": DEEP}}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]}, {"tools": [], "tool_choice": "required"},
        {"tools": [{"type": "function", "function": {"name": "a"}}] * 2},
        {"messages": [{"role": "user", "content": DEEP}]}, {"messages": [{}]},
        {"messages": [{"role": 1, "content": 2}]},
        {"messages": [{"role": "user", "content": "\ud800"}]}, {"messages": [{"role": "user", "content": None}]},
    ],
)  # fmt: skip
def test_conversations_that_are_strange(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, **fields}
    content = json.dumps(body).encode()
    answer = httpx.post(
        server.url + "/v1/chat/completions", content=content, headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400), answer.text
    if answer.status_code == 400:
        assert answer.json()["error"]["message"]


def test_texts_that_are_no_utf_8(server: LiveServer) -> None:
    content = b'{"prompt": "\xff\xfe", "max_tokens": 2}'
    answer = httpx.post(server.url + "/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
