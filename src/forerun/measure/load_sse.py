"""Server-sent events, and what OpenAI's streams say in them."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping
from typing import Any, Final

from forerun.measure.load import Arrival
from forerun.measure.speculate import Counts

DONE: Final = "[DONE]"
_TEXTS: Final = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls", "function_call")
"""Fields of a chat delta that hold something of the answer."""
_MOST_CHARACTERS: Final = 64 << 20
"""Of one event: what is longer is no stream of tokens."""


class StreamError(Exception):
    """A stream isn't as it should be. kind: as in `Exchange.error`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EventReader:
    """Splits bytes into events' data, as the HTML standard's event streams have it.

    Lines end with LF, CR or CRLF, wherever the bytes are cut; a byte order mark, comments and other fields are passed
    over; several data lines of an event are joined by LF. An event that no blank line ends is dropped.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._line = ""
        self._data: list[str] = []
        self._after_cr = False

    def push(self, chunk: bytes) -> list[str]:
        """The data of events that are complete now. Raises StreamError for an event that is far too long."""
        text = self._decoder.decode(chunk)
        if self._after_cr and text:
            # A CRLF that was cut in the middle is one end of a line.
            text = text.removeprefix("\n")
            self._after_cr = False
        self._after_cr = self._after_cr or text.endswith("\r")
        *lines, rest = (self._line + text).replace("\r\n", "\n").replace("\r", "\n").split("\n")
        self._line = rest
        if len(rest) > _MOST_CHARACTERS:
            raise StreamError("malformed", f"an event of more than {_MOST_CHARACTERS} characters")
        return [data for line in lines if (data := self._take(line)) is not None]

    def _take(self, line: str) -> str | None:
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))
        return None


class Reading:
    """An answer as it streams in.

    Attributes:
        arrivals, n_events: of text, as in `Exchange`.
        finish_reason: once there is one.
        done: whether the end of the stream was announced.
        ended: when the last event came, in seconds.
    """

    def __init__(self) -> None:
        self._events = EventReader()
        self.arrivals: list[Arrival] = []
        self.n_events = 0
        self.finish_reason: str | None = None
        self.done = False
        self.ended: float | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.speculation: dict[str, int] | None = None

    def push(self, chunk: bytes, at: float) -> None:
        """Takes what one read brought at that time. Raises StreamError."""
        texts = 0
        for data in self._events.push(chunk):
            if self.done:
                return
            self.ended = at
            if data.strip() == DONE:
                self.done = True
            else:
                texts += self._take(data)
        if texts:
            self.n_events += texts
            self.arrivals.append(Arrival(at, self.output_tokens))

    @property
    def complete(self) -> bool:
        """Whether the answer has ended as it should; some servers leave out the last event."""
        return self.done or self.finish_reason is not None

    def _take(self, data: str) -> bool:
        """Reads an event; returns whether it has text."""
        try:
            body = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise StreamError("malformed", f"an event is no JSON: {data[:80]!r}") from error
        if not isinstance(body, dict):
            raise StreamError("malformed", f"an event is no JSON object: {data[:80]!r}")
        if body.get("error"):
            raise StreamError("error_event", error_text(body))
        self._usage(body.get("usage"))
        choices = body.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return False
        reason = choice.get("finish_reason")
        if isinstance(reason, str):
            self.finish_reason = reason
        delta = choice.get("delta")
        if isinstance(delta, dict):
            return any(delta.get(field) for field in _TEXTS)
        return bool(choice.get("text"))

    def _usage(self, usage: object) -> None:
        """The latest usage; servers that send it with every event count up."""
        if not isinstance(usage, dict):
            return
        self.prompt_tokens = _count(usage, "prompt_tokens")
        self.output_tokens = _count(usage, "completion_tokens")
        counts = usage.get("speculation")
        if isinstance(counts, dict):
            names = (name for name in Counts._fields if _count(counts, name) is not None)
            self.speculation = {name: counts[name] for name in names}


def _count(values: Mapping[str, Any], name: str) -> int | None:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def error_text(body: object, most: int = 300) -> str:
    """What an error's body says, in one line."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    text = message if isinstance(message, str) else json.dumps(message, ensure_ascii=False)
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:most]
