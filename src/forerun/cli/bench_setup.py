"""What every `forerun bench` command needs: an engine with room, what a report begins with, and tables."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console

import forerun
from forerun import ops
from forerun.cli.models import pull_progress
from forerun.errors import InvalidRequestError
from forerun.measure import speed
from forerun.models.catalog import Catalog, CatalogEntry
from forerun.models.download import resolve, status

if TYPE_CHECKING:
    from forerun.engine.engine import Engine

MODEL = typer.Option(
    None,
    "--model",
    "-m",
    metavar="MODEL",
    help="Catalog name, .gguf file or Hugging Face folder; none means the default model.",
)
TASKS = typer.Option(
    ..., "--tasks", metavar="FILE.jsonl", exists=True, dir_okay=False, readable=True, help="The tasks."
)
LIMIT = typer.Option(None, "--limit", min=1, help="Only the first so many tasks of each category.")
BATCH = typer.Option(1, "--batch", min=1, max=256, help="Tasks of a category answered at a time.")
THREADS = typer.Option(None, "--threads", min=1, max=256, help="Threads; by default one per physical core.")
JSON = typer.Option(False, "--json", help="Print JSON.")


def open_engine(
    model: str | None, slots: int, threads: int | None, *, rows: int, prefix_cache: bool, **settings: Any
) -> tuple[Engine, str, Path]:
    """An engine with KV for `slots` tokens and `rows` requests, the model's name, and its path."""
    from forerun.engine.engine import Engine

    name = model if model is not None else Catalog.load().default
    path = resolve(name, progress=pull_progress())
    engine = Engine(
        path,
        kv_tokens=slots,
        threads=threads,
        max_rows=max(32, rows),
        max_step_tokens=max(512, rows),
        prefix_cache=prefix_cache,
        **settings,
    )
    return engine, name, path


def slots_for(tokens: int) -> int:
    """KV for one sequence of that length: whole blocks, and one that admission keeps in reserve."""
    return (-(-tokens // ops.BLOCK) + 1) * ops.BLOCK


def check_room(engine: Engine, tokens: int) -> None:
    """Raises `InvalidRequestError` for sequences that are longer than the model's context."""
    context = engine.config.context_length
    if tokens > context:
        raise InvalidRequestError(
            f"this needs sequences of {tokens} tokens, but the model's context holds {context}; ask for fewer"
        )


def setup_of(engine: Engine, name: str, path: Path, command: Sequence[str]) -> speed.Setup:
    """What a report begins with; `command` is what follows "forerun bench"."""
    tape = engine.executor.tape
    return speed.Setup(
        model=name,
        sha256=file_hash(name, path),
        architecture=engine.config.architecture,
        weight_bytes=engine.executor.weight_bytes,
        cpu=ops.cpu_name(),
        physical_cores=ops.physical_cores(),
        logical_cpus=speed.logical_cpus(),
        isa=tape.isa,
        threads=tape.threads,
        forerun=forerun.__version__,
        command=shlex.join(["forerun", "bench", *command]),
    )


def file_hash(name: str, path: Path) -> str:
    """The model's SHA-256: the catalog's where the cache's marker vouches for it, else computed."""
    entry: CatalogEntry | None = Catalog.load().entries.get(name)
    if entry is not None and entry.path == path and status(entry).state == "present":
        return entry.sha256
    return speed.model_sha256(path)


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's standard error that says what is being measured; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda _text: None
        return
    with Console(stderr=True).status("measuring") as shown:
        yield lambda text: shown.update(text)


def print_setup(setup: speed.Setup) -> None:
    """The lines that a report for people begins with."""
    typer.echo(f"{setup.model}, {setup.architecture}, {setup.weight_bytes / 1e6:.0f} MB of weights")
    typer.echo(f"sha256 {setup.sha256}")
    typer.echo(
        f"{setup.cpu}, {setup.physical_cores} cores, {setup.isa}, {setup.threads} threads, forerun {setup.forerun}"
    )
    typer.echo(setup.command)


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of cells, the first of them the head, in columns aligned to the right."""
    # Chinese and Japanese characters take two columns.
    widths = [max(cell_len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = (" " * (width - cell_len(cell)) + cell for cell, width in zip(row, widths, strict=True))
        typer.echo("  ".join(cells))
