"""What broke other engines and a client can see, through HTTP with the right values; and input that is no request.

Numbers are those of the project's list. The models follow scripts and the drafts are known, so the values are exact;
tests/engine has the same cases below HTTP.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import Engine
from forerun.draft.base import Drafter
from forerun.serve.app import Settings
from forerun.serve.run import ServeOptions
from reference.bigram import write_bigram_gguf
from reference.drafters import Scripted
from reference.live_server import LiveServer

PROMPT, FIRST = 200, ord("!")
"""A prompt of one token, and the one that its own step writes."""
LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz")
Ask = Callable[..., dict[str, Any]]


def block(script: Sequence[int]) -> Scripted:
    """Proposes what the script says next, as much as the budget allows."""
    after = [PROMPT, FIRST, *script]
    return Scripted(
        lambda row: after[after.index(row.tokens[-1]) + 1 :][: row.budget] if row.tokens[-1] in after else []
    )


@contextlib.contextmanager
def scripted(
    folder: Path, script: Sequence[int], drafter: Drafter | str | None = None, draft_len: int = 6, **metadata: Any
) -> Iterator[Ask]:
    """Asks a server whose model writes FIRST and a script after PROMPT, all of it drafted."""
    keys = {name.replace("__", "."): value for name, value in metadata.items()}
    path = write_bigram_gguf(folder / "b.gguf", [PROMPT, FIRST, *script], metadata=keys)
    engine = Engine(
        path, kv_tokens=1024, threads=1, cache_weights=False, draft=drafter or block(script), draft_len=draft_len
    )
    with LiveServer(engine) as server:

        def ask(**fields: Any) -> dict[str, Any]:
            """The answer, which is the same as a stream."""
            body = {"prompt": [PROMPT], "temperature": 0, **fields}
            whole = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
            assert whole.status_code == 200, whole.text
            answer: dict[str, Any] = whole.json()
            [choice] = answer["choices"]
            streamed = streamed_choice(server, body)
            assert streamed["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
            for key in ("text", "finish_reason"):
                assert streamed[key] == choice[key]
            if choice["logprobs"]:
                assert streamed["tokens"] == choice["logprobs"]["tokens"]
            return {**choice, "usage": answer["usage"], "events": streamed["events"]}

        yield ask
        server.check_idle()


def streamed_choice(server: LiveServer, body: dict[str, Any]) -> dict[str, Any]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    text = httpx.post(server.url + "/v1/completions", json=body, timeout=30).text
    events = [json.loads(line[6:]) for line in text.split("\n\n") if line and line != "data: [DONE]"]
    usage = events.pop()["usage"]
    choices = [event["choices"][0] for event in events]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    return {
        "text": "".join(choice["text"] for choice in choices),
        "finish_reason": choices[-1]["finish_reason"],
        "tokens": [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]],
        "events": choices,
        "usage": usage,
    }


def test_case_01_a_stop_inside_the_block_and_one_past_the_budget(tmp_path: Path) -> None:
    """[a, b, STOP, ...] with the budget left: "stop" and three tokens. STOP past the budget: "length", exactly 5."""
    with scripted(tmp_path, LETTERS) as ask:
        answer = ask(max_tokens=6, stop_token_ids=[LETTERS[2]])
        # The token that stops isn't part of the text, but it was written.
        assert (answer["text"], answer["finish_reason"]) == ("!ab", "stop")
        assert answer["usage"]["completion_tokens"] == 4
        answer = ask(max_tokens=6, stop_token_ids=[LETTERS[5]])
        assert (answer["text"], answer["finish_reason"], answer["usage"]["completion_tokens"]) == (
            "!abcde",
            "length",
            6,
        )


def test_case_02_03_the_first_end_of_several(tmp_path: Path) -> None:
    """The model's own end token before other stops, at every place of the block: its text isn't part of the answer."""
    for place in range(7):
        with scripted(tmp_path, LETTERS, tokenizer__ggml__eos_token_id=LETTERS[place]) as ask:
            answer = ask(max_tokens=9, stop_token_ids=list(LETTERS[place + 1 : place + 3]))
            assert (answer["text"], answer["finish_reason"]) == ("!" + bytes(LETTERS[:place]).decode(), "stop")
            assert answer["usage"]["completion_tokens"] == place + 2
            whole = ask(max_tokens=9, ignore_eos=True)
            assert whole["text"] == "!abcdefgh"


def test_case_04_06_budgets_and_the_end_of_the_context(tmp_path: Path) -> None:
    """Budget 1 is one token; six drafts three tokens before the end of the context are clamped."""
    with scripted(tmp_path, LETTERS, llama__context_length=64) as ask:
        for budget in (1, 2):
            assert ask(max_tokens=budget)["usage"]["completion_tokens"] == budget
        answer = ask(prompt=[9] * 59 + [PROMPT], max_tokens=100)
        assert (answer["text"], answer["finish_reason"]) == ("!abc", "length")
        assert answer["usage"]["total_tokens"] == 64


def test_case_05_a_stop_string_in_the_middle_of_a_block(tmp_path: Path) -> None:
    """Text, tokens and log-probabilities end at one boundary, and the stop string never leaks into a stream."""
    with scripted(tmp_path, LETTERS) as ask:
        answer = ask(max_tokens=20, stop=["cd"], logprobs=1)
        assert (answer["text"], answer["finish_reason"]) == ("!ab", "stop")
        assert answer["logprobs"]["tokens"] == list("!abcd")
        assert answer["usage"]["completion_tokens"] == len(answer["logprobs"]["token_logprobs"]) == 5
        assert not any("c" in event["text"] for event in answer["events"])
        kept = ask(max_tokens=20, stop=["cd"], include_stop_str_in_output=True)
        assert kept["text"] == "!abcd"


def test_case_07_35_usage_counts_delivered_tokens(tmp_path: Path) -> None:
    """[d1, d2, EOS, d4, d5, bonus]: three committed, not six."""
    with scripted(tmp_path, LETTERS, draft_len=5, tokenizer__ggml__eos_token_id=LETTERS[2]) as ask:
        usage = ask(max_tokens=20)["usage"]
        assert usage["completion_tokens"] == usage["speculation"]["emitted"] == 1 + 3
        assert usage["speculation"]["proposed"] == usage["speculation"]["accepted"] == 5


def test_case_13_seeds(tmp_path: Path) -> None:
    """Unseeded answers in a row differ, seeded ones don't, alone and beside others."""
    with scripted(tmp_path, []) as ask:
        fields = {"max_tokens": 30, "temperature": 30.0, "prompt": [1]}
        assert ask(**fields, seed=7)["text"] == ask(**fields, seed=7)["text"] != ask(**fields, seed=8)["text"]


def test_case_13_unseeded_answers_differ(server: LiveServer) -> None:
    body = {"prompt": "a", "max_tokens": 20, "temperature": 2.0}
    texts = {httpx.post(server.url + "/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 4


def test_case_14_log_probabilities_at_temperature_0(server: LiveServer) -> None:
    """They are not all 0 and equal teacher-forced scores; in an event of several tokens each has its own."""
    ids = [5, 6, 7] * 4
    body = {
        "prompt": ids,
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 2,
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    answer = httpx.post(server.url + "/v1/completions", json=body).json()["choices"][0]["logprobs"]
    [output] = server.engine.generate([ids], _params())
    scores = server.engine.score([*ids, *output.token_ids], top=300)
    for n, (token, logprob) in enumerate(zip(output.token_ids, answer["token_logprobs"], strict=True)):
        row = len(ids) - 1 + n
        place = scores.ids[row].tolist().index(token)
        assert logprob == pytest.approx(float(scores.logprobs[row, place]), abs=1e-4)
    assert any(logprob < -0.01 for logprob in answer["token_logprobs"])
    assert [len(top) for top in answer["top_logprobs"]] >= [1] * 24


def _params() -> Any:
    from forerun import SamplingParams

    return SamplingParams(max_tokens=24, ignore_eos=True)


def test_case_14_each_token_of_an_event_has_its_own_alternatives(tmp_path: Path) -> None:
    with scripted(tmp_path, LETTERS) as ask:
        events = ask(max_tokens=15, logprobs=1)["events"]
        together = [event["logprobs"] for event in events if event["logprobs"] and len(event["logprobs"]["tokens"]) > 1]
        assert together
        for logprobs in together:
            for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
                assert max(top, key=top.__getitem__) == token


def test_case_15_16_17_grammars_and_drafts(tmp_path: Path) -> None:
    """A complete text ends, whatever is drafted behind it; an illegal draft is a rejection, never a failure."""
    with scripted(tmp_path, LETTERS) as ask:
        answer = ask(max_tokens=20, guided_regex="!abc")
        assert (answer["text"], answer["finish_reason"]) == ("!abc", "stop")
        answer = ask(max_tokens=20, guided_regex="!ab[0-9]+z")
        assert answer["text"].startswith("!ab")
        schema = {
            "type": "object",
            "properties": {
                "type": {"enum": ["A", "B"]},
                "note": {"anyOf": [{"type": "string", "maxLength": 20}, {"type": "null"}]},
            },
            "required": ["type"],
        }  # fmt: skip
        answer = ask(max_tokens=60, guided_json=schema, prompt=[ord("{")])
        assert answer["finish_reason"] in ("stop", "length")
        if answer["finish_reason"] == "stop":
            assert json.loads(answer["text"])["type"] in ("A", "B")


def test_case_18_constrained_and_free_rows_beside_each_other(server: LiveServer) -> None:
    """No mask or token crosses rows."""
    from concurrent.futures import ThreadPoolExecutor

    free = {"prompt": "abcabcabc", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    bound = {"prompt": "abcabcabc", "max_tokens": 40, "temperature": 0, "guided_regex": "[0-9]{30}"}

    def text(body: dict[str, Any]) -> str:
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        return str(answer["choices"][0]["text"])

    alone = [text(free), text(bound)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, [free, bound] * 8)) == alone * 8


@pytest.mark.parametrize("field", [{"guided_regex": "(a"}, {"guided_regex": "[z-a]"}, {"guided_grammar": "start: ("},
                                   {"guided_json": {"type": "nothing"}}, {"guided_choice": []}])  # fmt: skip
def test_case_32_what_cannot_be_parsed_is_refused(server: LiveServer, field: dict[str, Any]) -> None:
    """Never an unconstrained answer."""
    for extra in ({}, {"stream": True}):
        answer = httpx.post(server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 5, **field, **extra})
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] in ("invalid_constraint", None)


def test_case_37_without_drafts_there_are_none(tmp_path: Path) -> None:
    with scripted(tmp_path, LETTERS, "none") as ask:
        told = ask(max_tokens=12)["usage"]["speculation"]
        assert (told["drafted"], told["proposed"], told["accepted"]) == (0, 0, 0)
        assert told["emitted"] == told["decisions"] == 12


def test_case_39_an_event_is_a_step_and_not_a_token(tmp_path: Path) -> None:
    with scripted(tmp_path, LETTERS) as ask:
        answer = ask(max_tokens=15)
        assert len([event for event in answer["events"] if event["text"]]) == 3
        assert answer["usage"]["speculation"]["decisions"] == 3
        assert answer["usage"]["completion_tokens"] == 15


def test_case_41_an_emoji_over_two_steps(tmp_path: Path) -> None:
    """One emoji, never half of it; cut inside, no error."""
    script = list("😀é".encode())
    for drafter in (Scripted(lambda _: []), Scripted(lambda row: block(script).propose([row])[0].tokens[:2])):
        byte_ids = {byte: n for n, byte in enumerate(_bytes(tmp_path))}
        ids = [byte_ids[byte] for byte in script]
        with scripted(tmp_path, ids, drafter) as ask:
            whole = ask(max_tokens=1 + len(ids))
            assert whole["text"] == bytes_text(tmp_path, [FIRST, *ids])
            assert not any("\ufffd" in event["text"] for event in whole["events"])
            cut = ask(max_tokens=3)
            assert cut["finish_reason"] == "length"


def _bytes(folder: Path) -> list[int]:
    """The byte that each token of one byte stands for."""
    engine = Engine(
        write_bigram_gguf(folder / "v.gguf", [1, 2]), kv_tokens=64, threads=1, cache_weights=False, draft="none"
    )
    tokens = [engine.tokenizer.token_bytes(n) for n in range(256)]
    return [token[0] if len(token) == 1 else 256 + n for n, token in enumerate(tokens)]


def bytes_text(folder: Path, ids: Sequence[int]) -> str:
    known = _bytes(folder)
    return bytes(known[token] for token in ids).decode()


def test_case_43_who_leaves_touches_nobody(server: LiveServer) -> None:
    from concurrent.futures import ThreadPoolExecutor

    body = {"prompt": "abcd", "max_tokens": 300, "temperature": 1.0, "seed": 4, "ignore_eos": True}

    def text(_: int) -> str:
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()
        return str(answer["choices"][0]["text"])

    alone = text(0)
    with ThreadPoolExecutor(3) as pool:
        stays = [pool.submit(text, n) for n in range(3)]
        for _ in range(10):
            with httpx.stream("POST", server.url + "/v1/completions", json={**body, "seed": 5, "stream": True}) as left:
                next(left.iter_lines())
        assert [one.result() for one in stays] == [alone] * 3
    server.check_idle()


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
