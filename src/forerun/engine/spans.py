"""A text in stretches of where its tokens came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from forerun.engine.output import Piece, TokenOrigin
    from forerun.models.tokenizer import Tokenizer


class Span(NamedTuple):
    """Text of tokens that came from the same place."""

    text: str
    origin: TokenOrigin


class DraftMarks:
    """Splits a request's text by where its tokens came from.

    A character whose bytes are spread over several tokens belongs to the token that completes it, so no character is
    ever split. Text comes with its piece, which may be later than its token (what may begin a stop string is held
    back) or never (a stop string is cut off).

    skip_special, keep_space: as the request's text is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, keep_space: bool = False) -> None:
        from forerun.models.tokenizer import StreamDecoder

        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special, keep_space=keep_space)
        self._waiting: list[Span] = []
        self._latest: TokenOrigin = "target"

    def spans(self, piece: Piece) -> list[Span]:
        """The piece's text in stretches of one origin; joined, they are the piece."""
        for token, origin in zip(piece.token_ids, piece.origins, strict=True):
            self._latest = origin
            text = self._decoder.push([token])
            if text:
                self._waiting.append(Span(text, origin))
        spans: list[Span] = []
        at = 0
        while at < len(piece):
            rest = len(piece) - at
            # With no token left it is what the end makes of an unfinished character.
            text, origin = self._waiting.pop(0) if self._waiting else Span(piece[at:], self._latest)
            if len(text) > rest:
                self._waiting.insert(0, Span(text[rest:], origin))
            text = piece[at : at + len(text)]
            at += len(text)
            if spans and spans[-1].origin == origin:
                text = spans.pop().text + text
            spans.append(Span(text, origin))
        return spans
