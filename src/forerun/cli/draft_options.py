"""Options about drafting that several commands have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import typer

from forerun.errors import ConstraintWarning, DraftWarning

DEFAULT_DRAFT = "suffix"
MAX_DRAFT = 63
"""Both the engine's, which takes long to import."""

DRAFT = typer.Option(
    DEFAULT_DRAFT,
    "--draft",
    metavar="NAME",
    help="Who drafts: suffix, lookup, model:NAME, combined:NAME, none, or one that a package registers.",
)
DRAFT_LENGTH = typer.Option(
    "auto",
    "--draft-len",
    metavar=f"auto|1..{MAX_DRAFT}",
    help="Draft tokens per step: the most profitable number each time, or always so many.",
)


def draft_length(text: str) -> Literal["auto"] | int:
    """What `--draft-len` says. Raises `typer.BadParameter` for anything but "auto" and a number in the range."""
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_DRAFT):
        raise typer.BadParameter(
            f"{text!r} is neither auto nor a whole number from 1 to {MAX_DRAFT}", param_hint="--draft-len"
        )
    return int(text)


def engine_options(draft: str, length: str) -> dict[str, Any]:
    """The two as arguments of `Engine`. Raises `ConfigurationError` for a drafter that nobody knows, before a model is
    downloaded."""
    from forerun.draft.registry import drafter_factory

    options = {"draft": draft, "draft_len": draft_length(length)}
    drafter_factory(draft)
    return options


@contextmanager
def draft_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """Warnings about drafting and constraints go to `tell`, as one text each, while the scope lasts."""

    def show(message: Warning | str, *_where: object, **_more: object) -> None:
        tell(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", DraftWarning)
        warnings.simplefilter("always", ConstraintWarning)
        warnings.showwarning = show
        yield
