"""What broke other engines and a client can see, through HTTP with the right values.

Numbers are those of the project's list. The models follow scripts and the drafts are known, so the values are exact;
tests/engine has the same cases below HTTP.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun import Engine
from forerun.draft.base import Drafter
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
