"""Options that say what an answer must be."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from forerun.errors import ConstraintWarning, InvalidConstraintError, InvalidRequestError

if TYPE_CHECKING:
    from forerun.constrain import Constraint
    from forerun.constrain.schema import Whitespace

_PANEL = "What the answer must be"

SCHEMA = typer.Option(
    None, "--json-schema", metavar="FILE", exists=True, dir_okay=False, readable=True, rich_help_panel=_PANEL,
    help="JSON that a JSON Schema accepts.",
)  # fmt: skip
ANY_JSON = typer.Option(False, "--any-json", help="Any JSON value.", rich_help_panel=_PANEL)
REGEX = typer.Option(
    None,
    "--regex",
    metavar="PATTERN",
    rich_help_panel=_PANEL,
    help="What a regular expression (Rust's) matches.",
)
CHOICE = typer.Option(
    None, "--choice", metavar="TEXT", rich_help_panel=_PANEL, help="One of several texts; repeat it for each."
)
LARK = typer.Option(
    None, "--lark", metavar="FILE", exists=True, dir_okay=False, readable=True, rich_help_panel=_PANEL,
    help="What a Lark grammar derives.",
)  # fmt: skip
WHITESPACE = typer.Option(
    "compact", "--whitespace", metavar="compact|flexible", rich_help_panel=_PANEL, help="Between the parts of JSON."
)


def constraint_of(
    schema: Path | None,
    any_json: bool,
    regex: str | None,
    choices: list[str] | None,
    lark: Path | None,
    whitespace: str,
) -> Constraint | None:
    """The constraint that the options describe, None for none.

    Raises `typer.BadParameter` for more than one, and `InvalidConstraintError`, before a model is downloaded.
    """
    given = {
        "--json-schema": schema is not None, "--any-json": any_json, "--regex": regex is not None,
        "--choice": bool(choices), "--lark": lark is not None,
    }  # fmt: skip
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise typer.BadParameter(f"{' and '.join(names)} can't be combined: an answer obeys one constraint")
    if whitespace not in ("compact", "flexible"):
        raise typer.BadParameter(f"{whitespace!r} is neither compact nor flexible", param_hint="--whitespace")
    if whitespace == "flexible" and not (schema or any_json):
        raise typer.BadParameter("it goes with --json-schema or --any-json", param_hint="--whitespace")
    if not names:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)  # said when it is submitted
            constraint = _constraint(schema, any_json, regex, choices, lark, flexible=whitespace == "flexible")
            constraint.check()
    except InvalidConstraintError as error:
        file = schema or lark
        if file is None:
            raise
        raise InvalidConstraintError(f"{file}: {error}", keyword=error.keyword, path=error.path) from None
    return constraint


def _constraint(
    schema: Path | None,
    any_json: bool,
    regex: str | None,
    choices: list[str] | None,
    lark: Path | None,
    *,
    flexible: bool,
) -> Constraint:
    from forerun.constrain import Choice, Json, JsonSchema, Lark, Regex

    spacing: Whitespace = "flexible" if flexible else "compact"
    if schema is not None:
        return JsonSchema(_text(schema), whitespace=spacing)
    if any_json:
        return Json(whitespace=spacing)
    if regex is not None:
        return Regex(regex)
    return Lark(_text(lark)) if lark is not None else Choice(choices or ())


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} isn't UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise InvalidRequestError(f"{path} can't be read: {error.strerror}") from error
