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


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help=HELP, no_args_is_help=True, rich_markup_mode=None)
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
    app.add_typer(group, name="plan")
