"""Answers in OpenAI's shape: whole ones, and streams with one event a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from forerun.constrain.tools import FORMATS, parse_tool_calls
from forerun.engine.output import Piece, RequestOutput, TokenLogprob
from forerun.models.tokenizer import Tokenizer
from forerun.serve.ids import call_id

DONE: Final = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


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
    """Log-probabilities as clients read them."""

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
            text = self._text(entry.token_id)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                {self._text(token): _finite(logprob) for token, logprob in entry.top} for entry in entries
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", errors="replace")

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {
            "token": data.decode("utf-8", errors="replace"),
            "logprob": _finite(logprob),
            "bytes": list(data),
        }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what can't happen."""
    return logprob if logprob > -9999.0 else -9999.0


class ToolText:
    """The text of an answer that may call tools: what is content, and the calls behind it.

    Text is content up to the first mark of a call, and what may be the beginning of one is held back. A call is passed
    on when it is complete.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self._mark = FORMATS[form].before.strip()
        self._text = ""
        self._sent = 0
        self._calls = 0

    def push(self, piece: str, *, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """New content, and the calls that are complete now, as OpenAI's deltas."""
        self._text += piece
        end = self._content_end(last)
        content = self._text[self._sent : max(end, self._sent)]
        self._sent = max(end, self._sent)
        if not last and "}" not in piece and "<" not in piece:
            return content, []
        calls = parse_tool_calls(self._text, self._form) if last or self._mark else []
        new = [
            {
                "index": index,
                "id": call_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for index, call in enumerate(calls)
            if index >= self._calls
        ]
        self._calls = max(self._calls, len(calls))
        if last and not self._mark and not calls:
            content = self._text[self._sent :]
        return content, new

    def _content_end(self, last: bool) -> int:
        if not self._mark:
            return 0  # all of the text is a call, or none of it: the end tells
        at = self._text.find(self._mark)
        if at >= 0:
            return len(self._text[:at].rstrip())
        if last:
            return len(self._text)
        held = next(
            (
                n
                for n in range(min(len(self._mark) - 1, len(self._text)), 0, -1)
                if self._mark.startswith(self._text[-n:])
            ),
            0,
        )
        # White space before a call belongs to neither.
        return len(self._text[: len(self._text) - held].rstrip()) if held else len(self._text.rstrip())

    @property
    def n_calls(self) -> int:
        """Calls passed on."""
        return self._calls


def finish_reason(piece_or_output: Piece | RequestOutput, n_calls: int = 0) -> str | None:
    """OpenAI's word for why a text ended."""
    reason = piece_or_output.finish_reason
    return "tool_calls" if reason == "stop" and n_calls else reason
