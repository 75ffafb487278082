"""What the status page shows: the last minutes of a server, second by second, and the page itself."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from importlib import resources
from itertools import pairwise, zip_longest
from typing import Any, Final, NamedTuple

from forerun import __version__
from forerun.engine.engine import Engine
from forerun.engine.output import EngineStats
from forerun.ops import BLOCK

SECONDS: Final = 180
"""How far back the history goes."""

PAGE_HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The page may load and ask nothing but its own server, and nobody may frame it."""

PAGE_FILES: Final = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
}
"""Path, file beside this module, and media type of each part of the page."""

_COUNTS: Final = ("decisions", "drafted", "proposed", "accepted", "emitted", "computed")
_LISTS: Final = ("accepted_by_position", "drafted_by_length")
_PHASES: Final = ("draft", "forward", "verify", "schedule")


class Moment(NamedTuple):
    """What an engine had done, and who was in it, when a step was over.

    lookups, hits: tokens that the prefix cache was asked for, and had. evictions: blocks that it forgot.
    """

    stats: EngineStats
    running: int
    waiting: int
    lookups: int
    hits: int
    evictions: int


def occupancy(engine: Engine) -> tuple[int, int, int]:
    """Requests that run, that wait, and KV blocks in use. Reads lengths only, so from any thread."""
    scheduler, pool = engine.scheduler, engine.pool
    waiting = scheduler.n_waiting + len(engine.loop.awaited.futures)
    return len(scheduler.running), waiting, pool.n_blocks - pool.n_free


def moment_of(engine: Engine) -> Moment:
    """The engine now; in the thread that steps it."""
    running, waiting, _ = occupancy(engine)
    prefix = engine.prefix_cache.stats if engine.prefix_cache is not None else (0, 0, 0)
    return Moment(engine.stats(), running, waiting, *prefix)


class _Second(NamedTuple):
    """A second with steps in it: the engine at its end, and the most that ran, waited and was in use when looked at."""

    at: int
    moment: Moment
    running: int
    waiting: int
    kv_used: int


class History:
    """Seconds in which steps ended, the last `SECONDS` of them at most. One thread at a time adds, any thread reads."""

    def __init__(self, start: Moment) -> None:
        self._lock = threading.Lock()
        self._closed: deque[_Second] = deque([_Second(0, start, 0, 0, 0)], maxlen=SECONDS + 1)
        self._open: _Second | None = None

    def add(self, moment: Moment, now: float) -> None:
        """Notes the engine after a step at `now`, in seconds since 1970."""
        second = int(now)
        running, waiting, used = moment.running, moment.waiting, moment.stats.kv_blocks_used
        last = self._open
        with self._lock:
            if last is None or second > last.at:
                if last is not None:
                    self._closed.append(last)
                self._open = _Second(second, moment, running, waiting, used)
            else:  # a clock that was set back makes a second long
                self._open = _Second(
                    last.at, moment, max(running, last.running), max(waiting, last.waiting), max(used, last.kv_used)
                )

    def seconds(self, since: int, now: float | None = None) -> list[dict[str, Any]]:
        """What was done in each second after `since` in which a step ended, oldest first; the last may not be over."""
        oldest = max(since, int(time.time() if now is None else now) - SECONDS)
        with self._lock:
            kept = [*self._closed, *([self._open] if self._open is not None else [])]
        return [_told(before.moment.stats, second) for before, second in pairwise(kept) if second.at > oldest]


def status(engine: Engine, history: History, name: str, *, accepting: bool, since: int = 0) -> dict[str, Any]:
    """The body of /status.json; seconds up to and including `since` are left out."""
    running, waiting, used = occupancy(engine)
    return {
        "model": name,
        "version": __version__,
        "now": time.time(),
        "accepting": accepting,
        "max_model_len": engine.max_model_len,
        "max_rows": engine.scheduler.max_rows,
        "kv_blocks": engine.pool.n_blocks,
        "block_tokens": BLOCK,
        "running": running,
        "waiting": waiting,
        "kv_used": used,
        "history_seconds": SECONDS,
        "seconds": history.seconds(since),
    }


def page(path: str) -> tuple[str, str]:
    """Text and media type of a part of the page, one of `PAGE_FILES`."""
    name, kind = PAGE_FILES[path]
    return (resources.files("forerun.serve") / name).read_text(encoding="utf-8"), kind


def _told(before: EngineStats, second: _Second) -> dict[str, Any]:
    stats, old = second.moment.stats.speculation, before.speculation
    return {
        "t": second.at,
        "steps": second.moment.stats.steps - before.steps,
        **{name: getattr(stats, name) - getattr(old, name) for name in _COUNTS},
        **{name: _grown(getattr(stats, name), getattr(old, name)) for name in _LISTS},
        "phase_seconds": {
            phase: round(getattr(stats, f"{phase}_seconds") - getattr(old, f"{phase}_seconds"), 6) for phase in _PHASES
        },
        "running": second.running,
        "waiting": second.waiting,
        "kv_used": second.kv_used,
    }


def _grown(now: Sequence[int], before: Sequence[int]) -> list[int]:
    return [new - old for new, old in zip_longest(now, before, fillvalue=0)]
