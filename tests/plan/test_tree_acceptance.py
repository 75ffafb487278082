"""Acceptance by rank and depth: how it is written, and what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forerun.errors import PlanError
from forerun.plan.tree import RankAcceptance
from forerun.plan.tree_acceptance import read_acceptance


def test_rates_on_a_line_and_in_files_are_the_same(tmp_path: Path) -> None:
    rows = ((0.6, 0.15, 0.06), (0.55, 0.12))
    expected = RankAcceptance(rows)
    assert read_acceptance("0.6,0.15,0.06;0.55,0.12") == expected
    assert read_acceptance(" .6, .15, 6e-2 ; .55, .12 ") == expected
    (tmp_path / "rates.json").write_text(json.dumps({"accept": rows}))
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "rates").write_text(json.dumps(rows))
    (tmp_path / "rates.toml").write_text("accept = [[0.6, 0.15, 0.06], [0.55, 0.12]]\n")
    for name in ("rates.json", "list.json", "rates", "rates.toml"):
        assert read_acceptance(str(tmp_path / name)) == expected
    (tmp_path / "rank.toml").write_text("accept = [1]\n")
    assert read_acceptance(str(tmp_path / "rank.toml")) == RankAcceptance.by_rank(1.0)
    assert read_acceptance("0.5") == RankAcceptance.by_rank(0.5)


def test_the_last_row_goes_on() -> None:
    acceptance = RankAcceptance(((0.6,), (0.5, 0.2)))
    assert acceptance.survival((0, 1, 0)) == pytest.approx(0.6 * 0.2 * 0.5)
    assert acceptance.survival((1,)) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a list of rates"),
        ("0.6,", "is not a list of rates"),
        ("0.6;;0.5", "is not a list of rates"),
        ("0.6,x", "is not a list of rates"),
        ("0.6,nan", "expected rates from 0 to 1"),
        ("nan", "expected rates from 0 to 1"),
        ("inf", "expected rates from 0 to 1"),
        ("-0.1", "expected rates from 0 to 1"),
        ("1e999", "expected rates from 0 to 1"),
        ("0.6,0.5", "the rates at depth 0 sum to 1.1"),
        ("0.6;0.5,0.3,0.3", "the rates at depth 1 sum to 1.1"),
        ("nowhere.json", "can't be read"),
        ("nowhere", "can't be read, and is no list of rates"),
        (".", "is not a list of rates"),
        ("..", "is not a list of rates"),
        ("\0", "can't be read"),
    ],
)
def test_rates_that_are_none_are_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        read_acceptance(text)
    assert caught.value.field == "accept"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "is not JSON"),
        ("a.json", "[" * 10**5, "is not JSON"),
        ("a.json", "{}", "is empty"),
        ("a.json", '{"accept": [0.5], "b": 1}', "unknown key b"),
        ("a.json", '{"accept": []}', "has no rates for depth 0"),
        ("a.json", '{"accept": [[0.5], []]}', "has no rates for depth 1"),
        ("a.json", '{"accept": "0.5"}', "'0.5' is not a list of rates"),
        ("a.json", '{"accept": [0.5, [0.4]]}', "is not a list of rates"),
        ("a.json", '{"accept": [true]}', "is not a list of rates"),
        ("a.json", '{"accept": [NaN]}', "expected rates from 0 to 1"),
        ("a.json", f'{{"accept": [1{"0" * 400}]}}', "far too large"),
        ("a.json", f'{{"accept": [1{"0" * 5000}]}}', "is not JSON"),
        ("a.json", "null", "None is not a list of rates"),
        ("a.toml", "accept", "is not TOML"),
        ("a.toml", "accept = 1979-05-27", "is not a list of rates"),
        ("a.toml", "", "is empty"),
    ],
)
def test_files_without_rates_are_refused(tmp_path: Path, name: str, content: str, message: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(PlanError, match=message):
        read_acceptance(str(file))
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PlanError, match="can't be read"):
        read_acceptance(str(file))


def test_rows_without_rates_are_refused() -> None:
    with pytest.raises(PlanError, match="accept: has no rates"):
        RankAcceptance(())
    assert RankAcceptance(((0.1,) * 10,)).row(9) == (0.1,) * 10
