"""Commands that a page of docs/ shows with their output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun import cli

DOCS = Path(__file__).parents[2] / "docs"


def shown_commands(page: str) -> list[tuple[list[str], list[str]]]:
    """Arguments and output lines of every console block; "..." stands for any lines."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE):
        command, *lines = block.splitlines()
        assert command.startswith("$ forerun ")
        found.append((command.split()[2:], lines))
    return found


def check_shown(capsys: pytest.CaptureFixture[str], arguments: list[str], lines: list[str]) -> None:
    """Runs it and compares line by line, blanks at the end of a line apart."""
    assert cli.dispatch(arguments) == 0
    output = "\n".join(line.rstrip() for line in capsys.readouterr().out.rstrip().splitlines())
    pattern = r"\n(?:.*\n)*?".join(re.escape(part) for part in re.split(r"\n?\.\.\.\n?", "\n".join(lines)) if part)
    start = r"(?:.*\n)*?" if lines[0] == "..." else ""
    end = r"(?:\n.*)*" if lines[-1] == "..." else ""
    assert re.fullmatch(start + pattern + end, output), output
