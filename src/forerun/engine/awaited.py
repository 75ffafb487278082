"""Requests that can't be scheduled yet, because their grammar is still being compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple

from forerun.constrain.compiler import Grammar
from forerun.engine.live import LiveRequest


class Ready(NamedTuple):
    """A request whose grammar is there, or whose constraint turned out to be wrong (`grammar.exception()`)."""

    live: LiveRequest
    grammar: Future[Grammar]


class AwaitedGrammars:
    """Grammars that requests wait for, while others run. Not thread-safe; the loop's lock guards it."""

    def __init__(self) -> None:
        self._futures: dict[LiveRequest, Future[Grammar]] = {}

    def add(self, live: LiveRequest, grammar: Future[Grammar]) -> None:
        """The request waits for this."""
        self._futures[live] = grammar

    def drop(self, live: LiveRequest) -> None:
        """The request doesn't wait any more, if it did, nor need its grammar be compiled for it."""
        grammar = self._futures.pop(live, None)
        if grammar is not None:
            grammar.cancel()

    def ready(self) -> Iterator[Ready]:
        """Takes out the requests that have waited long enough, one by one in the order of their submission."""
        for live, grammar in tuple(self._futures.items()):
            if grammar.done():
                del self._futures[live]
                yield Ready(live, grammar)

    @property
    def futures(self) -> list[Future[Grammar]]:
        """What is waited for."""
        return list(self._futures.values())


def wait_for_one(futures: list[Future[Grammar]], seconds: float) -> None:
    """Waits until one of the grammars is there, or its constraint refused; at most `seconds`."""
    wait(futures, seconds, FIRST_COMPLETED)
