"""`forerun plan`, called in this process."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from forerun import cli


class Said(NamedTuple):
    """Exit code, output and error output."""

    code: int
    output: str
    errors: str


class PlanCommand:
    """`forerun plan` with the words that are always the same, such as the command's name."""

    def __init__(self, *words: str) -> None:
        self._words = ("plan", *words)

    def call(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
        """Whatever comes of it."""
        code = cli.dispatch([*self._words, *arguments])
        return Said(code, *capsys.readouterr())

    def run(self, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
        """Its output. Raises AssertionError if it fails or complains."""
        said = self.call(capsys, *arguments)
        assert (said.code, said.errors) == (0, "")
        return said.output

    def data(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
        """Its JSON. Raises AssertionError if it fails."""
        said = self.call(capsys, *arguments, "--json")
        assert said.code == 0, said.errors
        found: dict[str, Any] = json.loads(said.output)
        return found

    def read(self, *arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        """Its JSON. Raises AssertionError if it fails or complains."""
        body: dict[str, Any] = json.loads(self.run(*arguments, "--json", capsys=capsys))
        return body
