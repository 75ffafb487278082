"""Options about drafting that several commands have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import typer

from forerun.errors import DraftWarning

DEFAULT_DRAFT = "suffix"
"""The engine's."""

DRAFT = typer.Option(
    DEFAULT_DRAFT,
    "--draft",
    metavar="NAME",
    help="Who drafts: suffix, lookup, model:NAME, combined:NAME, none, or one that a package registers.",
)
DRAFT_LENGTH = typer.Option(
    "auto",
    "--draft-len",
    metavar="auto|N",
    help="Draft tokens per step: the most profitable number each time, or always N.",
)


def draft_length(text: str) -> Literal["auto"] | int:
    """What `--draft-len` says. Raises `typer.BadParameter` for anything but "auto" and a whole number."""
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise typer.BadParameter(f"{text!r} is neither auto nor a whole number", param_hint="--draft-len")
    return int(text)


def engine_options(draft: str, length: str) -> dict[str, Any]:
    """The two as arguments of `Engine`."""
    return {"draft": draft, "draft_len": draft_length(length)}


@contextmanager
def draft_warnings(tell: Callable[[str], None]) -> Iterator[None]:
    """Warnings about drafting go to `tell`, as one text each, while the scope lasts."""

    def show(message: Warning | str, *_where: object, **_more: object) -> None:
        tell(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always", DraftWarning)
        warnings.showwarning = show
        yield
