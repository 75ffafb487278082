"""From committed tokens to text that may be released: whole characters, stop strings cut off."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.models.tokenizer import StreamDecoder, Tokenizer


class TextStream:
    """Decodes a request's output token by token and watches for its stop strings.

    Text that could be the beginning of a stop string is held back until it is clear that it isn't. `keep_space`: a
    leading space is the text's own, even where the tokenizer would take it for its own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        *,
        keep_stop: bool,
        skip_special: bool,
        keep_space: bool = False,
    ) -> None:
        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special, keep_space=keep_space)
        self._stops = tuple(stops)
        self._keep_stop = keep_stop
        self._longest = max((len(s) for s in stops), default=0)
        self.text = ""
        self._released = 0
        self._searched = 0
        self._ended = False

    def push(self, token: int, *, may_stop: bool) -> bool:
        """Adds a token's text; returns whether a stop string now ends the output (only where `may_stop`)."""
        added = self._decoder.push([token])
        self.text += added
        return bool(added) and self._stop(may_stop)

    def finish(self) -> None:
        """Adds what an unfinished character leaves behind; afterwards everything may be released."""
        if not self._ended:
            self.text += self._decoder.flush()
            self._ended = True

    def take(self) -> str:
        """Text that may be released and wasn't yet."""
        end = len(self.text) if self._ended else len(self.text) - self._held_back()
        piece = self.text[self._released : max(end, self._released)]
        self._released += len(piece)
        return piece

    def _stop(self, may_stop: bool) -> bool:
        if not self._stops:
            return False
        if not may_stop:
            # A stop string that is complete before it may take effect is ordinary text.
            self._searched = len(self.text)
            return False
        # The earliest occurrence that ends in new text; among those that begin together, the longest.
        best: tuple[int, int] | None = None
        for stop in self._stops:
            at = self.text.find(stop, max(0, self._searched - len(stop) + 1))
            if at >= 0 and (best is None or (at, -len(stop)) < best):
                best = (at, -len(stop))
        if best is None:
            self._searched = len(self.text)
            return False
        at, negative_length = best
        self.text = self.text[: at - negative_length if self._keep_stop else at]
        self._ended = True
        return True

    def _held_back(self) -> int:
        for n in range(min(self._longest - 1, len(self.text)), 0, -1):
            tail = self.text[-n:]
            if any(len(s) > n and s.startswith(tail) for s in self._stops):
                return n
        return 0
