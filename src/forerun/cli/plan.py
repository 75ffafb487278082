"""`forerun plan`: what a step costs, whether speculation pays, and how far to draft."""

from __future__ import annotations

import typer

from forerun.cli import (
    plan_calibrate,
    plan_capacity,
    plan_catalog,
    plan_claim,
    plan_export,
    plan_policy,
    plan_speculate,
    plan_step,
    plan_tree,
)

HELP = """Price models, drafters and claims from first principles: no GPU, no weights.

Each command prints a table; --explain prints how its numbers come about, --json the same as data."""


_KEYS = "\n\n--json prints "


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=HELP, rich_markup_mode=None)
    group.callback(invoke_without_command=True)(_root)
    for module in (
        plan_step,
        plan_calibrate,
        plan_catalog,
        plan_speculate,
        plan_export,
        plan_claim,
        plan_tree,
        plan_capacity,
        plan_policy,
    ):
        module.register(group)
    for command in group.registered_commands:
        # The keys of the JSON are long and for few; in each command's help they stand after the options.
        command.help, found, keys = str(command.help).partition(_KEYS)
        command.epilog = f"{found.strip()} {keys}" if found else None
    app.add_typer(group, name="plan", short_help="Price models, drafters and claims; needs no GPU.")


def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
