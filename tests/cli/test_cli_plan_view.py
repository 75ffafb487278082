"""The planner's output on terminals of several widths, its help, and the options that its commands share."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest

from forerun import cli
from forerun.cli import plan_view
from forerun.cli.plan_view import print_table
from forerun.plan.hardware import Efficiency

LLAMA = ["-m", "llama-3.3-70b", "-t", "8"]
COMMANDS = [
    ["step", *LLAMA, "--explain"],
    ["speculate", "-m", "qwen3-32b", "-g", "h200", "-t", "2", "-d", "eagle3", "-b", "1,40", "-c", "6000"],
    ["speculate", *LLAMA, "--length", "4"],
    ["claim", "-m", "llama-3.3-70b", "--tokens-per-s", "1000", "--explain"],
    ["capacity", *LLAMA],
    ["tree", *LLAMA, "--accept", "0.6,0.15,0.06;0.55,0.12"],
    ["policy", *LLAMA],
    ["export", *LLAMA, "-d", "eagle3", "--for", "vllm"],
    ["models"],
    ["models", "deepseek-v3", "--explain"],
    ["hardware"],
    ["calibrate", "points.json", "-m", "llama-3.1-8b"],
]
SCRIPT = """
import json, sys
from forerun.cli import dispatch
for words in json.loads(sys.argv[1]):
    print("COMMAND", *words, flush=True)
    assert dispatch(["plan", *words]) == 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view")
    points = [
        {"batch": n, "tokens": 1, "context": 1000, "milliseconds": 6.5 + 0.05 * n} for n in (1, 2, 4, 8, 16, 32, 64)
    ]
    (folder / "points.json").write_text(json.dumps(points))
    return folder


def environment(folder: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "TERM": "xterm", "FORERUN_CACHE": str(folder / "cache"), "PYTHONUTF8": "1"}


def sections(output: str) -> dict[str, str]:
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output).replace("\r\n", "\n")
    return {name: body for name, _, body in (part.partition("\n") for part in plain.split("COMMAND ")[1:])}


@pytest.fixture(scope="module")
def piped(folder: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)],
        cwd=folder, env=environment(folder), capture_output=True, encoding="utf-8", check=True,
    )  # fmt: skip
    return sections(done.stdout)


def on_terminal(folder: Path, width: int) -> dict[str, str]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(COMMANDS)],
        cwd=folder, env=environment(folder), stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    read = bytearray()
    try:
        while chunk := os.read(ours, 1 << 16):
            read += chunk
    except OSError:  # Linux ends so where the other side is closed
        pass
    finally:
        os.close(ours)
    assert child.wait() == 0, read.decode()
    return sections(read.decode())


def words(output: str) -> Counter[str]:
    return Counter(word for word in output.split() if set(word) != {"─"})


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_terminal_shows_every_word_and_number_whole(width: int, folder: Path, piped: dict[str, str]) -> None:
    shown = on_terminal(folder, width)
    assert shown.keys() == piped.keys()
    assert len(shown) == len(COMMANDS)
    for command, output in piped.items():
        assert words(shown[command]) == words(output), command


def table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, columns: list[str],
    rows: list[list[str]], words: tuple[int, ...],
) -> list[str]:  # fmt: skip
    monkeypatch.setattr(plan_view, "_PLAIN_WIDTH", width)
    print_table(columns, rows, words=words)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_what_gives_way_first(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    columns, rows = ["name", "tokens each step", "about"], [["a", "123456", "some words that go on"]]
    assert table(capsys, monkeypatch, 47, columns, rows, (0, 2)) == [
        "name   tokens each step   about",
        "─" * 47,
        "a                123456   some words that go on",
    ]
    # Headings of numbers break before words do, and words only between each other.
    assert table(capsys, monkeypatch, 46, columns, rows, (0, 2)) == [
        "          tokens",
        "name   each step   about",
        "─" * 40,
        "a         123456   some words that go on",
    ]
    assert table(capsys, monkeypatch, 30, columns, rows, (0, 2)) == [
        "          tokens",
        "name   each step   about",
        "─" * 30,
        "a         123456   some words",
        "                   that go on",
    ]
    assert table(capsys, monkeypatch, 5, columns, rows, (0, 2))[3:] == [
        "a         123456   some",
        "                   words",
        "                   that",
        "                   go on",
    ]


def test_the_group_alone_prints_its_help_and_whole_summaries(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["plan"]) == 0
    bare, errors = capsys.readouterr()
    assert not errors
    assert bare.startswith("Usage: forerun plan [OPTIONS] COMMAND [ARGS]...\n\n  Price models")
    assert cli.dispatch(["plan", "--help"]) == 0
    assert capsys.readouterr().out.strip() == bare.strip()
    listed = bare.split("Commands:\n")[1].rstrip().splitlines()
    assert len(listed) == 10
    for line in listed:
        assert line.endswith("."), line
        assert "..." not in line


@pytest.mark.parametrize(
    "command",
    ["step", "calibrate", "models", "hardware", "speculate", "export", "claim", "tree", "capacity", "policy"],
)
def test_the_keys_of_the_json_stand_after_the_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["plan", command, "--help"]) == 0
    output = capsys.readouterr().out
    assert output.index("--json prints command") > output.index("--help  ")
    assert output.count("--json prints") == 1


def test_the_help_states_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["plan", "step", "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    eff = Efficiency()
    for option, value in (
        ("bandwidth-share", eff.bandwidth), ("compute-share", eff.compute), ("link-share", eff.link),
        ("order", eff.order), ("step-us", eff.step_us), ("launch-us", eff.launch_us), ("layer-us", eff.layer_us),
    ):  # fmt: skip
        about = output[output.index(f"--{option} <float>") :].partition("]")[0]
        assert about.endswith(f"[default: {value:g}, unless the hardware has its own"), option


def test_the_setup_is_some_short_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.dispatch(["plan", "step", *LLAMA]) == 0
    assert capsys.readouterr().out.splitlines()[:3] == [
        "llama-3.3-70b on 8 x h100 (tensor 8); weights bf16, head bf16, operands bf16, KV bf16",
        "reached of the peaks: bandwidth 80%, compute 60%, link 70%",
        "a phase takes the larger of both; fixed: 300 us a step, 30 us a forward, 5 us a layer",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-m", "qwen2.5-0.5b", "-t", "4"], "tensor: 4 doesn't split the 14 attention heads and 2 of keys and values"),
        (["-m", "qwen2.5-0.5b", "-t", "7"], "expected one of 1, 2, 14"),
        (["-m", "llama-3.2-1b", "--pipeline", "17"], "pipeline: 17 stages; expected at most the 16 layers"),
    ],
)
@pytest.mark.parametrize("command", [["step"], ["speculate"], ["capacity"], ["claim", "--tokens-per-s", "9"]])
def test_a_split_that_cannot_be_is_refused_by_all(
    options: list[str], said: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.dispatch(["plan", *command, *options]) == 1
    output, errors = capsys.readouterr()
    assert not output
    assert errors.startswith("forerun: error: ")
    assert said in errors
    assert errors.count("\n") == 1


def test_the_documentation_lists_the_keys_of_the_setup(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    listed = re.findall(r"`(\w+)`", page.split("`setup` has")[1].split("\n\n")[0])
    assert cli.dispatch(["plan", "step", *LLAMA, "--json"]) == 0
    setup = json.loads(capsys.readouterr().out)["setup"]
    assert list(setup) == [key for key in listed if key in setup]
    assert setup["order"] is None
