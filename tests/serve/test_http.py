"""What a client may do wrong, below what the official client can: status, message, and a server that goes on."""

from __future__ import annotations

import gc
import json
import socket
import time
import weakref
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import Engine
from reference.live_server import LiveServer

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


def post(server: LiveServer, path: str, body: object, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json", **options.pop("headers", {})}
    return httpx.post(server.url + path, content=content, headers=headers, timeout=60, **options)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "body"),
        (b"{", "isn't JSON"),
        (b"[1, 2]", "body"),
        (b'"text"', "body"),
        (b"\xff\xfe", "isn't JSON"),
        (b'{"messages": "Hi"}', "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [1]}', "messages"),
        (b'{"messages": [{"role": "user"}]}', "content"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": "4"}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e400}', "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "temperature"),
        (b'{"messages": [{"role": "user", "content": "a"}], "stop": [1]}', "stop"),
        (b'{"messages": [{"role": "user", "content": "a"}], "seed": 1.5}', "seed"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "user"),
    ],
)
def test_bodies_that_are_no_requests(server: LiveServer, body: bytes, words: str) -> None:
    answer = post(server, "/v1/chat/completions", body)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert words in error["message"] or words == "user"
    assert error["type"] == "invalid_request_error"


def test_deep_nesting(server: LiveServer) -> None:
    body = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert post(server, "/v1/chat/completions", body).status_code == 400
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    answer = post(server, "/v1/chat/completions", {**CHAT, "guided_json": schema})
    assert answer.status_code in (200, 400)


def test_large_bodies(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", b'{"prompt": "' + b"a" * (10 << 20) + b'"}')
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"


def test_other_content_types(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", {"prompt": "a"}, headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("DELETE", "/v1/models", 405), ("GET", "/health", 200),
     ("GET", "/ready", 200), ("GET", "/metrics", 200)],
)  # fmt: skip
def test_paths(server: LiveServer, method: str, path: str, status: int) -> None:
    answer = httpx.request(method, server.url + path)
    assert answer.status_code == status
    if status >= 400:
        assert answer.json()["error"]["message"]


def test_unknown_model(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", {"model": "gpt-4", "prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_tokens_there_and_back(server: LiveServer) -> None:
    text = "Héllo 😀 in the end"
    tokens = post(server, "/v1/tokenize", {"prompt": text, "add_special_tokens": False}).json()
    assert tokens["count"] == len(tokens["tokens"])
    assert post(server, "/v1/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = post(server, "/v1/tokenize", {"messages": CHAT["messages"]}).json()
    assert chat["tokens"] == server.engine.chat_ids(CHAT["messages"])  # type: ignore[arg-type]
    for wrong in ({"prompt": "a", "messages": CHAT["messages"]}, {}):
        assert post(server, "/v1/tokenize", wrong).status_code == 400
    assert post(server, "/v1/detokenize", {"tokens": [10**9]}).status_code == 400
    assert post(server, "/v1/detokenize", {"tokens": [-1]}).status_code == 400


def test_a_stream_ends_with_done(server: LiveServer) -> None:
    answer = post(server, "/v1/chat/completions", {**CHAT, "stream": True})
    lines = [line for line in answer.text.split("\n\n") if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)


def test_a_stream_that_cannot_begin_has_a_status(server: LiveServer) -> None:
    answer = post(server, "/v1/completions", {"prompt": [5] * 4000, "max_tokens": 4, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_memory(server: LiveServer, stream: bool) -> None:
    """Within a step: it is gone long before its text could have ended."""
    body = json.dumps({"prompt": "a", "max_tokens": 1900, "temperature": 1.0, "ignore_eos": True, "stream": stream})
    request = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request.encode())
        deadline = time.monotonic() + 10
        while not server.engine.loop.live and time.monotonic() < deadline:
            time.sleep(0.002)
        [live] = list(server.engine.loop.live.values())
        if stream:
            assert connection.recv(100)
    deadline = time.monotonic() + 10
    while not live.request.finished and time.monotonic() < deadline:
        time.sleep(0.002)
    assert live.request.finish_reason == "cancelled"
    assert live.request.n_output < 1900
    server.check_idle()


def test_metrics_count_what_was_done(server: LiveServer) -> None:
    def values() -> dict[str, float]:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    before = values()
    post(server, "/v1/completions", {"prompt": "abcabcabcabc", "max_tokens": 20, "temperature": 0})
    server.check_idle()
    after = values()

    def grown(name: str, labels: str = "") -> float:
        key = f'{name}{{{labels}model_name="tiny"}}'
        return after[key] - before.get(key, 0.0)

    assert grown("vllm:generation_tokens_total") == 20
    assert grown("vllm:request_success_total", 'finished_reason="length",') == 1
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    accepted = grown("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 <= accepted <= grown("vllm:spec_decode_num_draft_tokens_total")
    assert grown("forerun:steps_total") <= 20


def test_a_server_that_ended_is_freed(served: Path) -> None:
    """Libraries keep endpoint functions for as long as the process lives; engines must not hang on them."""
    engine = Engine(served, kv_tokens=256, threads=1, cache_weights=False, draft_len=4)
    with LiveServer(engine) as live:
        assert httpx.get(live.url + "/v1/models").status_code == 200
        assert httpx.get(live.url + "/metrics").status_code == 200
        httpx.post(live.url + "/v1/completions", json={"prompt": "a", "max_tokens": 2}).raise_for_status()
    gone = weakref.ref(engine)
    del engine, live
    gc.collect()
    assert gone() is None
