"""`forerun models`: list, pull, show and remove the models of the catalog."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as RichBar

from forerun.errors import ForerunError
from forerun.models import download
from forerun.models.catalog import Catalog, CatalogEntry
from forerun.models.fetch import Progress
from forerun.models.partial import human_bytes

_JSON = typer.Option(False, "--json", help="Print JSON.")


def register(app: typer.Typer) -> None:
    """Add the group `models` to the application."""
    group = typer.Typer(
        help="List, fetch, describe and remove models.",
        rich_markup_mode=None,
        no_args_is_help=False,
    )
    group.callback(invoke_without_command=True)(_root)
    group.command("list", help="List the known models and what the cache holds.")(_list)
    group.command("pull", help="Fetch models into the cache; a cut-short pull goes on.")(_pull)
    group.command("show", help="Print all that the catalog knows of a model.")(_show)
    group.command("rm", help="Remove models from the cache, repacked weights included.")(_remove)
    app.add_typer(group, name="models")


def pull_progress() -> Progress:
    """The display of a download, on standard error: a bar on a terminal, lines elsewhere."""
    return BarProgress() if sys.stderr.isatty() else PlainProgress()


class PlainProgress:
    """A line when work begins and one at every tenth of it."""

    def __init__(self) -> None:
        self._total = 1
        self._tenths = 0

    def start(self, label: str, total: int) -> None:
        self._total, self._tenths = max(total, 1), 0
        self.note(f"{label} ({human_bytes(total)})")

    def update(self, done: int) -> None:
        tenths = 10 * done // self._total
        if tenths > self._tenths:
            self.note(f"  {100 * done // self._total}% ({human_bytes(done)})")
        self._tenths = tenths

    def note(self, message: str) -> None:
        print(message, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Nothing stays open."""


class BarProgress:
    """A bar with bytes, rate and time left; it vanishes when the work ends."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bar: RichBar | None = None
        self._task = TaskID(0)

    def start(self, label: str, total: int) -> None:
        self.stop()
        self._console.print(label, markup=False, highlight=False)
        self._bar = RichBar(
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(label, total=total)

    def update(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)

    def note(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _list(as_json: bool = _JSON) -> None:
    catalog = Catalog.load()
    if as_json:
        typer.echo(json.dumps([_describe(catalog, entry) for entry in catalog], indent=2))
        return
    rows = [("NAME", "ARCHITECTURE", "TYPE", "SIZE", "LICENCE", "CACHE")]
    for entry in catalog:
        held = download.status(entry)
        state: str = held.state
        if state == "partial":
            state = f"partial ({human_bytes(held.bytes)})"
        mark = " *" if entry.name == catalog.default else ""
        rows.append(
            (
                f"{entry.name}{mark}",
                entry.architecture,
                entry.quantisation,
                human_bytes(entry.size),
                entry.licence,
                state,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells).rstrip())
    typer.echo("* the default model")


def _pull(
    names: list[str] | None = typer.Argument(
        None, metavar="NAME", help="Names from the catalog; none means the default model."
    ),
    verify: bool = typer.Option(False, "--verify", help="Hash files that are already there."),
) -> None:
    catalog = Catalog.load()
    for entry in [catalog.get(name) for name in names or [catalog.default]]:
        path = download.pull(entry, progress=pull_progress(), verify=verify)
        typer.echo(f"{entry.name}: {path}")


def _show(name: str = typer.Argument(..., metavar="NAME"), as_json: bool = _JSON) -> None:
    catalog = Catalog.load()
    facts = _describe(catalog, catalog.get(name))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    sources = facts.pop("sources")
    path = facts.pop("path")
    for key, value in facts.items():
        shown = f"{value:,} bytes" if key == "size" else "yes" if value is True else value
        if value is not False:
            typer.echo(f"{key + ':':<14}{shown}")
    typer.echo(f"{'path:':<14}{path or '(not in the cache)'}")
    assert isinstance(sources, list)
    for source in sources:
        typer.echo(f"{'source:':<14}{source}")


def _remove(names: list[str] = typer.Argument(..., metavar="NAME")) -> None:
    catalog = Catalog.load()
    for entry in [catalog.get(name) for name in names]:
        removed = download.remove(entry, progress=pull_progress(), fingerprint=_fingerprint)
        if removed.paths:
            typer.echo(f"{entry.name}: removed, {human_bytes(removed.bytes)} freed")
        else:
            typer.echo(f"{entry.name}: not in the cache, nothing to remove")


def _describe(catalog: Catalog, entry: CatalogEntry) -> dict[str, object]:
    held = download.status(entry)
    complete = held.state in ("present", "unverified")
    return {
        "name": entry.name,
        "default": entry.name == catalog.default,
        "description": entry.description,
        "architecture": entry.architecture,
        "licence": entry.licence,
        "quantisation": entry.quantisation,
        "size": entry.size,
        "sha256": entry.sha256,
        "file": entry.file,
        "state": held.state,
        "path": str(entry.path) if complete else None,
        "sources": [str(source) for source in entry.sources],
    }


def _fingerprint(path: Path) -> str | None:
    """The prefix of the model's repacked weights; None for a file that isn't a model."""
    from forerun.models.source import open_model

    try:
        model = open_model(path)
    except ForerunError:
        return None
    try:
        return model.fingerprint()
    finally:
        model.close()
