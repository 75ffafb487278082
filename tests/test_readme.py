"""What the README shows is run, so that it can't rot."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from forerun.cli import dispatch
from forerun.models.catalog import Catalog

README = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.model
def test_python_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    examples = blocks("python")
    assert examples
    for example in examples:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme"})
    assert "Paris" in capsys.readouterr().out


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    """Every command line's command and options are ones that its --help lists."""
    lines = re.findall(r"\.venv/bin/forerun ([^`\n]+)", README)
    assert len(lines) >= 5
    for line in lines:
        words = shlex.split(line, comments=True)
        depth = 2 if words[0] in ("bench", "models", "plan") else 1
        assert dispatch([*words[:depth], "--help"]) == 0
        shown = capsys.readouterr().out
        for word in words[depth:]:
            if word.startswith("-"):
                assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", shown), f"{word} of {line!r}"


def test_model_table_is_the_catalog() -> None:
    listed = re.findall(r"^\| `([\w.-]+)` \|", README, flags=re.MULTILINE)
    assert listed == [entry.name for entry in Catalog.load()]
