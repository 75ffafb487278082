"""bench/sampling.py: that it times what it names, beside the reading of the row."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from reference.scripts import loaded

PATH = Path(__file__).parents[2] / "bench" / "sampling.py"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    yield from loaded(PATH)


def test_every_setting_is_printed_beside_the_reading(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--vocab", "500", "--rounds", "2"])
    monkeypatch.setattr(bench, "MOST_READINGS", float("inf"))  # of 500 logits, a call costs more than reading them
    bench.main()
    shown = capsys.readouterr().out
    for setting in bench.SETTINGS:
        assert shown.count(f"\n{setting.name} ") == 1
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--vocab", "500", "--rounds", "2", "--json"])
    bench.main()
    found = json.loads(capsys.readouterr().out)
    assert found["command"] == "python bench/sampling.py --vocab 500 --rounds 2 --json"
    assert found["processor"]
    for times in found["milliseconds_per_row"].values():
        assert list(times) == [*(setting.name for setting in bench.SETTINGS), "read"]
        assert min(times.values()) > 0


def test_the_settings_choose_as_their_names_say(bench: ModuleType) -> None:
    """Greedy takes the maximum, a mask leaves its tokens, top-k its number."""
    logits = bench.logits_of(np.random.default_rng(0), 3_000, "open")
    chosen = {
        setting.name: [int(call()[0]) for call in bench.calls(setting, logits, "auto")] for setting in bench.SETTINGS
    }
    assert chosen["greedy"] == logits.argmax(axis=1).tolist()
    ranks = (-logits).argsort(axis=1).argsort(axis=1)
    usual = chosen["temperature, top-k, top-p"]
    assert all(ranks[row, token] < 50 for row, token in enumerate(usual))
    allowed = set(np.random.default_rng(7).permutation(3_000)[:40].tolist())
    assert set(chosen["the same, mask of 40 tokens"]) <= allowed
    assert not set(usual) <= allowed


def test_the_usual_settings_may_cost_a_few_readings_of_the_row(bench: ModuleType) -> None:
    """Those alone, in rows of every kind."""
    times = {"read": 0.03} | {setting.name: 0.2 for setting in bench.SETTINGS}
    assert not bench.too_slow({"sharp": times, "open": times})
    usual = [setting.name for setting in bench.SETTINGS if setting.knobs == bench.USUAL]
    assert len(usual) == 3
    for name in times:
        slow = bench.too_slow({"sharp": times, "open": times | {name: 0.3}})
        assert slow == ([f"{name} (open)"] if name in usual else [])


def test_what_costs_too_much_is_the_exit_code(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling.py", "--vocab", "500", "--rounds", "2"])
    monkeypatch.setattr(bench, "MOST_READINGS", 0.0)
    with pytest.raises(SystemExit, match="more than 0 readings: temperature, top-k, top-p"):
        bench.main()
    assert "temperature, top-k, top-p" in capsys.readouterr().out
