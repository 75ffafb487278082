"""Answers in OpenAI's shape: whole ones, and streams with one event a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from forerun.constrain.tools import FORMATS, ToolCall, parse_tool_calls
from forerun.engine.output import Piece, RequestOutput, TokenLogprob
from forerun.models.tokenizer import Tokenizer
from forerun.serve.ids import call_id

DONE: Final = b"data: [DONE]\n\n"

# Line ends to Python's str.splitlines and what is built on it (httpx's aiter_lines), though not to the event stream.
_LINE_ENDS: Final = str.maketrans({end: f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event: one line, also to a reader that ends lines where Unicode does."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    if not text.isascii():
        text = text.translate(_LINE_ENDS)
    return b"data: " + text.encode() + b"\n\n"


def usage_of(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """Tokens of requests that have ended, over all of their texts; each prompt counts once.

    `speculation`: drafted (steps of a text with at least one draft token), proposed (draft tokens that were verified),
    accepted (those that the model agreed to), emitted (tokens of the answer), decisions (steps that chose a token).
    """
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    samples = [sample for output in outputs for sample in output.samples]
    completion = sum(len(sample.token_ids) for sample in samples)
    counts = [sample.stats.speculation for sample in samples]
    accepted, proposed = sum(c.accepted for c in counts), sum(c.proposed for c in counts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.stats.cached_tokens for output in outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": proposed - accepted,
        },
        "speculation": {
            "drafted": sum(c.drafted for c in counts),
            "proposed": proposed,
            "accepted": accepted,
            "emitted": sum(c.emitted for c in counts),
            "decisions": sum(c.decisions for c in counts),
        },
    }


class Logprobs:
    """Tokens and their log-probabilities as clients read them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def chat(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """For chat: each token with its text and bytes, and its alternatives."""
        return {
            "content": [
                {
                    **self._token(entry.token_id, entry.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def completion(self, entries: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """For text completions: parallel lists; `offset` is where the first token's text begins."""
        tokens, offsets = [], []
        for entry in entries:
            text = self.text(entry.token_id)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [{self.text(token): _finite(logprob) for token, logprob in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def text(self, token: int) -> str:
        """A token by itself; U+FFFD stands for bytes that are no whole character."""
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {
            "token": self.text(token),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what can't happen."""
    return logprob if logprob > -9999.0 else -9999.0


class ToolText:
    """The text of an answer that may call tools: what is content, and the calls behind it.

    Text is content up to the first mark of a call, and what may be the beginning of one is held back. A call is passed
    on when it is complete. Takes time in proportion to the text.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._mark = FORMATS[form].before.strip()
        self._end_mark = FORMATS[form].after.strip()
        self._rest = ""  # neither passed on as content nor read as a call
        self._searched = 0  # characters of it in which no call ends
        self._calling = False
        self._calls = 0

    def push(self, piece: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """New content, and the calls that are complete now, as OpenAI's deltas."""
        self._rest += piece
        if self._mark:
            content = "" if self._calling else self._content(last)
            calls = self._complete() if self._calling else []
        elif last:  # all of the text is a call, or none of it: the end tells
            calls = parse_tool_calls(self._rest, self._form)
            content = "" if calls else self._rest
        else:
            return "", []
        first, self._calls = self._calls, self._calls + len(calls)
        return content, [
            {
                "index": first + n,
                "id": call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for n, call in enumerate(calls)
        ]

    def _content(self, last: bool) -> str:
        rest, mark = self._rest, self._mark
        at = rest.find(mark)
        if at >= 0:
            self._calling = True
            self._rest = rest[at:]
            return rest[:at].rstrip()
        end = len(rest)
        if not last:
            end -= next((n for n in range(min(len(mark) - 1, end), 0, -1) if mark.startswith(rest[-n:])), 0)
            # White space before a call belongs to neither.
            end = len(rest[:end].rstrip())
        self._rest = rest[end:]
        return rest[:end]

    def _complete(self) -> list[ToolCall]:
        calls: list[ToolCall] = []
        while (at := self._rest.find(self._end_mark, self._searched)) >= 0:
            self._searched = at + len(self._end_mark)
            found = parse_tool_calls(self._rest[: self._searched], self._form)
            if found:
                calls += found
                self._rest, self._searched = self._rest[self._searched :], 0
        self._searched = max(self._searched, len(self._rest) - len(self._end_mark) + 1)
        return calls

    @property
    def n_calls(self) -> int:
        """Calls passed on."""
        return self._calls


def finish_reason(piece_or_output: Piece | RequestOutput, n_calls: int = 0) -> str | None:
    """OpenAI's word for why a text ended."""
    reason = piece_or_output.finish_reason
    return "tool_calls" if reason == "stop" and n_calls else reason
