"""The picture of speedups: what is in it, that it is the same each time, and that nothing half-done is left."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from forerun.errors import PlanError
from forerun.plan import drafters, plot
from forerun.plan.acceptance import Acceptance
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Hardware
from forerun.plan.plot import Panel, check_target, panels, plot_speedup
from forerun.plan.shapes import ModelShape
from forerun.plan.speculate import Proposal, best, break_even, price
from forerun.plan.speculate_table import Speculations

GPU = Hardware(name="gpu", flops={"bf16": 1e15}, bandwidth=3.3e12, memory=80e9, link=4e11, link_us=8)
SHAPE = ModelShape(
    name="dense", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256, intermediate=14336
)
WHERE = Deployment(hardware=GPU)
PROPOSALS = [
    Proposal(drafters.ngram(), Acceptance.of(0.5)),
    Proposal(drafters.eagle3(SHAPE), Acceptance.of(0.7)),
]
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="forerun[plot] is not installed"
)


def drawn(length: int | None = None, contexts: tuple[int, ...] = (0, 4000)) -> list[Panel]:
    speculations = Speculations(SHAPE.network, WHERE, PROPOSALS, length=length, longest=6)
    return panels(speculations, speculations.table([1, 16, 256], contexts))


def test_curves_are_the_prices() -> None:
    for panel, proposal in zip(drawn(), PROPOSALS, strict=True):
        assert panel.drafter == proposal.drafter.name
        assert [curve.context for curve in panel.curves] == [0, 4000]
        for curve in panel.curves:
            where = {"context": curve.context, "longest": 6}
            assert curve.batches[:34] == (*range(1, 33), 34, 36)
            assert curve.full == (curve.context == 4000)
            assert (curve.batches[-1] == 256) == (curve.context == 0)
            expected = [best(SHAPE.network, WHERE, proposal, batch=batch, **where) for batch in curve.batches]
            assert curve.main.speedups == tuple(point.speedup for point in expected)
            assert curve.main.length is None
            assert curve.main.break_even == break_even(SHAPE.network, WHERE, proposal, **where, most=curve.batches[-1])
            assert curve.low_load is not None
            assert curve.low_load.length == expected[0].length
            last = {"batch": curve.batches[-1], "context": curve.context, "length": expected[0].length}
            assert curve.low_load.speedups[-1] == price(SHAPE.network, WHERE, proposal, **last).speedup
            assert curve.low_load.break_even == break_even(
                SHAPE.network, WHERE, proposal, **where, most=curve.batches[-1], length=expected[0].length
            )


def test_a_given_length_has_one_curve() -> None:
    curve = drawn(length=3)[0].curves[0]
    assert (curve.main.length, curve.low_load) == (3, None)


def test_what_does_not_fit_has_none() -> None:
    assert [panel.curves for panel in drawn(contexts=(10**9,))] == [(), ()]


@needs_matplotlib
@pytest.mark.parametrize("suffix", [".svg", ".png", ".SVG"])
def test_the_same_file_each_time(suffix: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for path in files:
        plot_speedup(path, drawn(), title="dense on gpu", notes=["assumed"])
    one, other = (path.read_bytes() for path in files)
    assert one == other
    if suffix == ".png":
        assert one.startswith(b"\x89PNG\r\n")
    else:
        root = ElementTree.fromstring(one)
        assert root.tag.endswith("svg")
        for text in ("dense on gpu", "assumed", "ngram", "eagle3", "context 4000 tokens", "break-even batch"):
            assert f"<!-- {text} -->".encode() in one
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in files)


@needs_matplotlib
def test_break_even_is_marked_where_it_is() -> None:
    found = drawn()
    figure: Any = plot._figure(found, "title", [])
    for ax, panel in zip(figure.axes, found, strict=True):
        marked = {float(line.get_xdata()[0]) for line in ax.lines if line.get_marker() == "o"}
        expected = {
            series.break_even
            for curve in panel.curves
            for series in (curve.main, curve.low_load)
            if series is not None and series.break_even is not None
        }
        assert marked == expected
        assert all(float(line.get_ydata()[0]) == 1 for line in ax.lines if line.get_marker() == "o")
        assert {text.get_text() for text in ax.texts} >= {str(batch) for batch in expected}
        assert ax.get_xscale() == "log"
    assert any(series.main.break_even for panel in found for series in panel.curves)


@needs_matplotlib
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_any_number_of_panels(count: int, tmp_path: Path) -> None:
    panel = drawn()[0]
    plot_speedup(tmp_path / "a.svg", [replace(panel, drafter=str(i)) for i in range(count)], title="many")
    text = (tmp_path / "a.svg").read_text()
    assert all(f"<!-- {i} -->" in text for i in range(count))


@needs_matplotlib
def test_nothing_is_left_of_what_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old file stays."""
    path = tmp_path / "a.svg"
    path.write_text("before")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(PlanError, match=r"plot: .*a\.svg can't be written: .*No space left"):
        plot_speedup(path, drawn(), title="title")
    assert [file.name for file in tmp_path.iterdir()] == ["a.svg"]
    assert path.read_text() == "before"


def test_where_no_picture_can_go(tmp_path: Path) -> None:
    for name in ("a.pdf", "a", "svg", ".svg"):
        with pytest.raises(PlanError, match=r"expected a name that ends in \.svg or \.png"):
            check_target(tmp_path / name)
    (tmp_path / "folder.svg").mkdir()
    for name in ("folder.svg", "missing/a.svg"):
        with pytest.raises(PlanError, match="expected a file in a folder that exists"):
            check_target(tmp_path / name)


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PlanError, match=r"plot: matplotlib is missing; install it with: pip install 'forerun\[plot\]'"):
        check_target(tmp_path / "a.svg")
    with pytest.raises(PlanError, match="matplotlib is missing"):
        plot_speedup(tmp_path / "a.svg", [], title="title")
    assert list(tmp_path.iterdir()) == []
