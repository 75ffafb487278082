"""How the planner shows numbers: tables, derivations, JSON."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from forerun.cli.plan_setup import PlanSetup
    from forerun.plan.derivation import Derivation

_PLAIN_WIDTH = 160
_GAP = 3
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_setup(setup: PlanSetup) -> None:
    """Some lines: what the numbers are about."""
    o = setup.options
    split = f"{setup.deployment.gpus} x {o['gpu']}" if setup.deployment.gpus > 1 else o["gpu"]
    if setup.deployment.gpus > 1:
        split += f" (tensor {o['tensor']}" + (f", pipeline {o['pipeline']}" if o["pipeline"] > 1 else "") + ")"
    weights = o["weights"] if o["experts"] in (None, o["weights"]) else f"{o['weights']}, experts {o['experts']}"
    typer.echo(
        f"{o['model']} on {split}; weights {weights}, head {o['head']}, operands {o['activations']}, KV {o['kv']}"
    )
    typer.echo(
        f"reached of the peaks: bandwidth {o['bandwidth_share']:.0%}, compute {o['compute_share']:.0%}, "
        f"link {o['link_share']:.0%}"
    )
    overlap = "the larger of both" if o["order"] is None else f"a smooth maximum of order {o['order']:g}"
    typer.echo(
        f"a phase takes {overlap}; fixed: {o['step_us']:g} us a step, {o['launch_us']:g} us a forward, "
        f"{o['layer_us']:g} us a layer"
    )
    measured = setup.deployment.hardware.measured
    if measured is not None and setup.deployment.efficiency is None:
        typer.echo(f"measured with {measured.ranges}; what lies outside is extrapolated")


def print_derivation(derivation: Derivation) -> None:
    """Every line: symbol, value, equation and source."""
    typer.echo(f"\n{derivation.title}")
    rows = [
        (line.symbol, quantity(line.value, line.unit), line.formula or "(given)", line.source)
        for line in derivation.lines
    ]
    print_table(("symbol", "value", "equation", "source"), rows, words=(0, 2, 3))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = (0,)) -> None:
    """A table. `words`: columns that stand to the left and may be wrapped between words; the others are numbers.

    Where the output is no terminal, lines are as long as they need to be, up to 160 characters. What doesn't fit is
    made narrower as far as nothing is lost (`_widths`); beyond that, lines are longer than the terminal.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    cells = [list(row) for row in rows]
    console = Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
    available = console.width if console.is_terminal else _PLAIN_WIDTH
    titles, widths = _widths(columns, cells, words, available - _GAP * (len(columns) - 1))
    table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
    for index, (title, width) in enumerate(zip(titles, widths, strict=True)):
        word = index in words
        table.add_column(
            title, justify="left" if word else "right", no_wrap=not word, overflow="fold", width=width,
            vertical="top",
        )  # fmt: skip
    for row in cells:
        table.add_row(*row)
    console.width = max(console.width, sum(widths) + _GAP * (len(columns) - 1))
    console.print(table)


def _widths(
    columns: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[int], available: int
) -> tuple[list[str], list[int]]:
    """Headings, broken into two lines where that saves room that is needed, and the width of each column.

    A column of numbers is as wide as its longest cell; one of words may shrink to its longest word, the widest first.
    """
    from rich.cells import cell_len

    titles, least, widths = list(columns), [], []
    for index, title in enumerate(columns):
        texts = [title, *(row[index] for row in rows)]
        body = max((cell_len(text) for text in texts[1:]), default=0)
        widths.append(max(body, cell_len(title)))
        if index in words:
            least.append(max((cell_len(word) for text in texts for word in text.split()), default=1))
        else:
            titles[index] = _broken(title)
            least.append(max(body, *(cell_len(line) for line in titles[index].split("\n"))))
    if sum(widths) <= available:
        return list(columns), widths
    for index, title in enumerate(columns):
        if index not in words and widths[index] > least[index]:
            widths[index] = least[index]
        elif index not in words:
            titles[index] = title
    while sum(widths) > available:
        room = [width if width > narrow else 0 for width, narrow in zip(widths, least, strict=True)]
        if not any(room):
            break
        widths[room.index(max(room))] -= 1
    return titles, widths


def _broken(title: str) -> str:
    """A heading in two lines, at the space that makes the longer of them shortest."""
    words = title.split()
    halves = [(" ".join(words[:n]), " ".join(words[n:])) for n in range(1, len(words))]
    return "\n".join(min(halves, key=lambda lines: max(map(len, lines)))) if halves else title


def quantity(value: float, unit: str = "") -> str:
    """A number with its unit, at most five digits: 3.35 TB/s, 12.4 ms, 70.55 G parameters."""
    if unit == "s":
        return milliseconds(value)
    if math.isfinite(value) and abs(value) >= 1e4:
        for size, prefix in _PREFIXES:
            if abs(value) >= size:
                joint = "" if unit[:1] in ("B", "F") else " "
                return f"{value / size:.4g} {prefix}{joint}{unit}".rstrip()
    return f"{value:.5g} {unit}".rstrip()


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds."""
    return f"{seconds * 1e3:.4g} ms"


def print_json(command: str, setup: PlanSetup | None, body: Mapping[str, Any]) -> None:
    """One object: the command, its shared options, then its own keys. Infinities and NaN become null."""
    head: dict[str, Any] = {"command": f"plan {command}"}
    if setup is not None:
        head["setup"] = setup.options
    typer.echo(json.dumps(_plain({**head, **body}), indent=2, allow_nan=False))


def derivation_json(derivation: Derivation) -> list[dict[str, Any]]:
    """A derivation's lines for JSON."""
    return [
        {
            "symbol": line.symbol,
            "value": line.value,
            "unit": line.unit,
            "formula": line.formula or None,
            "source": line.source or None,
        }
        for line in derivation.lines
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def numbers(text: str, option: str, least: int = 1) -> list[int]:
    """A list such as "1,2,4", each once and in order. Raises PlanError naming the option."""
    from forerun.errors import PlanError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 12 for word in words):
        raise PlanError(option, f"{text!r} is not a list of whole numbers such as 1,2,4")
    found = sorted({int(word) for word in words})
    if found[0] < least:
        raise PlanError(option, f"{found[0]} is not allowed; expected numbers of at least {least}")
    return found


def rates(text: str, option: str) -> tuple[float, ...]:
    """A list of shares such as "0.8,0.7". Raises PlanError naming the option."""
    from forerun.errors import PlanError

    try:
        found = tuple(float(word) for word in text.split(","))
    except ValueError as error:
        raise PlanError(option, f"{text!r} is not a list of rates such as 0.8,0.7") from error
    if not all(0 <= rate <= 1 for rate in found):
        raise PlanError(option, f"{text!r}: each rate must be from 0 to 1")
    return found
