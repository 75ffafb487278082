"""Speedup over batch as a picture: a panel for each drafter, a curve for each context. Needs the extra `plot`."""

from __future__ import annotations

import importlib.util
import io
import math
import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forerun.errors import PlanError
from forerun.plan.shown import shown
from forerun.plan.speculate import Speculation, batches_up_to, first_loss
from forerun.plan.speculate_table import Speculations, SpeculationTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

SUFFIXES = (".svg", ".png")

# Inches.
_WIDE, _WIDE_ALONE, _HIGH, _GAP_X, _GAP_Y, _LEFT = 3.7, 5.9, 2.5, 0.4, 0.85, 0.65
_LINE = 0.18

_NOTE_LETTERS = 15
"""Of a note, that fit in an inch."""

_KEYS_A_ROW = 3
_PANELS_A_ROW = 3
_DOTS_PER_INCH = 150

_Color = tuple[float, float, float, float]


class Series(NamedTuple):
    """Speedups at the curve's batches. length: the draft length; None: the best at each batch. break_even: the smallest
    batch at which it doesn't pay, None if it does up to the last one."""

    speedups: tuple[float, ...]
    length: int | None
    break_even: int | None


@dataclass(frozen=True)
class Curve:
    """One context. low_load: the length that is best at batch 1, kept; None where the length was given.
    full: no more sequences fit than the last batch."""

    context: float
    batches: tuple[int, ...]
    main: Series
    low_load: Series | None
    full: bool


@dataclass(frozen=True)
class Panel:
    """One drafter."""

    drafter: str
    curves: tuple[Curve, ...]


def check_target(path: Path) -> None:
    """Raises PlanError unless a picture can be made and put there: matplotlib is missing, the suffix isn't known, the
    folder isn't there."""
    if path.suffix.lower() not in SUFFIXES:
        raise PlanError("plot", f"{path} is not allowed; expected a name that ends in {' or '.join(SUFFIXES)}")
    try:
        there = path.parent.is_dir() and (path.is_file() or not path.exists())
    except OSError as error:
        raise PlanError("plot", f"{shown(str(path))} can't be written: {error.strerror}") from error
    if not there:
        raise PlanError("plot", f"{path} can't be written; expected a file in a folder that exists")
    if importlib.util.find_spec("matplotlib") is None:
        raise PlanError("plot", "matplotlib is missing; install it with: pip install 'forerun[plot]'")


def panels(speculations: Speculations, table: SpeculationTable) -> list[Panel]:
    """What there is to draw of a table: all its drafters and contexts, up to the largest batch that fits."""
    largest = max(row.batch for row in table.rows)
    found: dict[str, list[Curve]] = {}
    for summary in table.summaries:
        curves = found.setdefault(summary.drafter, [])
        last = min(largest, summary.most)
        if not last:
            continue
        speculation, context = speculations.of(summary.drafter), summary.context
        batches = _drawn_batches(last)
        fixed = speculations.fixed(summary.drafter)
        kept = speculation.best(1, context).length
        main = _series(speculation, context, batches, fixed)
        low_load = _series(speculation, context, batches, kept) if fixed is None and kept else None
        curves.append(Curve(context, tuple(batches), main, low_load, last == summary.most))
    return [Panel(drafter, tuple(curves)) for drafter, curves in found.items()]


def _series(speculation: Speculation, context: float, batches: Sequence[int], length: int | None) -> Series:
    most = batches[-1]
    return Series(
        tuple(speculation.at(batch, context, length).speedup for batch in batches),
        length,
        first_loss(speculation.runs(context, length=length, most=most), most),
    )


def plot_speedup(path: Path, panels: Sequence[Panel], *, title: str, notes: Sequence[str] = ()) -> None:
    """Draws the panels into an .svg or .png. The same panels give the same file with the same matplotlib.

    Raises:
        PlanError: it can't be drawn or written; nothing is left behind then.
    """
    check_target(path)
    import matplotlib

    picture = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "forerun", "font.size": 9, "font.family": "DejaVu Sans"}):
        figure = _figure(panels, title, notes)
        if path.suffix.lower() == ".svg":
            from matplotlib.backends.backend_svg import FigureCanvasSVG

            FigureCanvasSVG(figure)
            figure.savefig(picture, format="svg", metadata={"Date": None})
        else:
            from matplotlib.backends.backend_agg import FigureCanvasAgg

            FigureCanvasAgg(figure)
            figure.savefig(picture, format="png", metadata={"Software": None})
    # Beside the file and then moved, so that a full disk leaves no half of it.
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(picture.getvalue())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise PlanError("plot", f"{path} can't be written: {error.strerror}") from error


def _figure(panels: Sequence[Panel], title: str, notes: Sequence[str]) -> Figure:
    """Laid out by hand: matplotlib's own layouts draw everything twice, which takes longer than the rest."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    n_columns = {1: 1, 2: 2, 4: 2}.get(len(panels), _PANELS_A_ROW)
    n_rows = math.ceil(len(panels) / n_columns)
    wide = _WIDE_ALONE if n_columns == 1 else _WIDE
    width = _LEFT + n_columns * (wide + _GAP_X)
    curves = [curve for panel in panels for curve in panel.curves]
    contexts = sorted({curve.context for curve in curves})
    shades = colormaps["viridis"]
    colors = {context: shades(0.8 * i / max(len(contexts) - 1, 1)) for i, context in enumerate(contexts)}
    series = [series for curve in curves for series in (curve.main, curve.low_load) if series is not None]
    handles = _handles(colors, curves)
    below = 0.15 + _LINE * math.ceil(len(handles) / _KEYS_A_ROW)
    lines = [line for note in notes for line in textwrap.wrap(note, int(_NOTE_LETTERS * width))]
    height = n_rows * (_HIGH + _GAP_Y)
    total = 0.45 + _LINE * len(lines) + height + below
    figure = Figure((width, total), dpi=_DOTS_PER_INCH)
    ticks = list(batches_up_to(max((curve.batches[-1] for curve in curves), default=1)))
    top = 1.08 * max((speed for one in series for speed in one.speedups), default=1.0)
    for index, panel in enumerate(panels):
        row, column = divmod(index, n_columns)
        left = _LEFT + column * (wide + _GAP_X)
        bottom = below + height - (row + 1) * (_HIGH + _GAP_Y) + 0.75 * _GAP_Y
        ax = figure.add_axes((left / width, bottom / total, wide / width, _HIGH / total))
        _draw(ax, panel, colors)
        ax.set(xscale="log", xlim=(0.9, 1.15 * ticks[-1]), ylim=(0, top))
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(tick) for tick in ticks])
        ax.set_xlabel("batch (sequences)")
        if column == 0:
            ax.set_ylabel("speedup (times plain decoding)")
    figure.text(0.5, 1 - 0.2 / total, title, ha="center", va="center", fontsize=11)
    for i, line in enumerate(lines):
        figure.text(0.5, 1 - (0.42 + _LINE * i) / total, line, ha="center", va="center", fontsize=8, color="0.3")
    figure.legend(handles=handles, loc="lower center", ncols=min(len(handles), _KEYS_A_ROW), frameon=False)
    return figure


def _handles(colors: Mapping[float, _Color], curves: Sequence[Curve]) -> list[Line2D]:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=color, label=f"context {context:.0f} tokens") for context, color in colors.items()]
    if any(curve.low_load for curve in curves):
        handles.append(Line2D([], [], color="0.3", linestyle=":", label="draft length as best at batch 1"))
    if any(one.break_even for curve in curves for one in (curve.main, curve.low_load) if one):
        handles.append(
            Line2D([], [], linestyle="", marker="o", color="0.3", markerfacecolor="white", label="break-even batch")
        )
    if any(curve.full for curve in curves):
        handles.append(Line2D([], [], linestyle="", marker="|", color="0.3", label="no more sequences fit"))
    return handles


def _draw(ax: Axes, panel: Panel, colors: Mapping[float, _Color]) -> None:
    ax.set_title(panel.drafter, fontsize=10, fontweight="bold")
    ax.grid(color="0.92", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.axhline(1.0, color="0.35", linewidth=0.8)
    for level, curve in enumerate(panel.curves):
        color = colors[curve.context]
        # The kept length falls below 1 before the best one gets there: its number goes below the line, to the left.
        for series, style, width, offset, side in (
            (curve.low_load, ":", 1.2, (-4, -11 - 10 * level), "right"),
            (curve.main, "-", 1.6, (4, 5 + 10 * level), "left"),
        ):
            if series is None:
                continue
            ax.plot(curve.batches, series.speedups, color=color, linestyle=style, linewidth=width)
            if series.break_even is not None:
                at = (series.break_even, 1.0)
                ax.plot(*at, marker="o", markersize=5, color=color, markerfacecolor="white", zorder=3)
                ax.annotate(
                    str(series.break_even), at, offset, textcoords="offset points", ha=side, fontsize=8, color=color,
                    bbox={"boxstyle": "square,pad=0.05", "facecolor": "white", "edgecolor": "none", "alpha": 0.8},
                )  # fmt: skip
        if curve.full:
            ax.plot(curve.batches[-1], curve.main.speedups[-1], marker="|", markersize=9, color=color)
    if not panel.curves:
        ax.text(0.5, 0.5, "does not fit the memory", ha="center", transform=ax.transAxes)


def _drawn_batches(most: int) -> list[int]:
    """Close enough for a smooth curve: all up to 32, then 16 for each doubling, and `most`."""
    found = list(range(1, min(most, 32) + 1))
    while found[-1] < most:
        found.append(min(found[-1] + (1 << (found[-1].bit_length() - 1)) // 16, most))
    return found
