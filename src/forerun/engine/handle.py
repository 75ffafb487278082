"""What a caller holds of a submitted request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from forerun.engine.live import LiveRequest
from forerun.engine.loop import Loop
from forerun.engine.output import Piece, RequestOutput


class RequestHandle:
    """A submitted request. Iterate for its pieces, or ask for the `result`; both drive the engine as needed.

    A request for several texts (`SamplingParams.n`) begins as one; the others branch off when its prompt is computed.
    """

    def __init__(self, loop: Loop, live: LiveRequest) -> None:
        self._loop = loop
        self._live = live

    @property
    def live(self) -> LiveRequest:
        """The engine's own view of the request: of its first text, if there are several."""
        return self._live

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._live.request.request_id

    @property
    def finished(self) -> bool:
        """Whether all of its texts have ended."""
        return all(live.request.finished for live in self._live.group)

    @property
    def started(self) -> bool:
        """Whether a step has run it."""
        return self._live.has_started

    def poll(self) -> list[Piece]:
        """The pieces of its texts that are there, without a step. Raises what ended the request, if it was an error."""
        pieces: list[Piece] = []
        with self._loop.lock:
            for live in self._live.group:
                piece = live.take_piece()
                if piece is not None:
                    pieces.append(piece)
                live.raise_error()
        return pieces

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self._next_piece()
            if piece is None:
                return
            yield piece

    def _next_piece(self) -> Piece | None:
        """The next piece of any of its texts, stepping as needed; None after the last."""
        group = self._live.group
        while True:
            with self._loop.lock:
                for live in group:
                    piece = live.take_piece()
                    if piece is not None:
                        return piece
                    live.raise_error()
                if self.finished:
                    return None
            self._advance()

    def _advance(self) -> None:
        """One step, unless the request has ended."""
        if not self.finished:
            self._loop.step()

    def result(self) -> RequestOutput:
        """The finished output. Raises what ended the request, if it was an error."""
        while not self.finished:
            self._advance()
        with self._loop.lock:  # another thread may be in the midst of the step that ends it
            first, *others = [live.output() for live in self._live.group]
        return replace(first, others=tuple(others))

    def cancel(self) -> None:
        """Ends the request now and frees its memory; other requests are not touched. A finished one stays as it is."""
        with self._loop.lock:
            self._loop.cancel(*self._live.group)
