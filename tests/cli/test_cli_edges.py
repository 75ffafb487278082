"""The command line where things go wrong at its edges: closed streams, early Ctrl-C, wrong usage, memory at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest

from forerun import cli
from reference.tiny import TinySpec, write_tiny_gguf

FORERUN = f"{sys.executable} -c 'from forerun.cli import main; main()'"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("edges") / "tiny.gguf", TinySpec("llama", seed=5))


def shell(command: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FORERUN_CACHE": str(cache), "FORERUN_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        ["sh", "-c", f"{FORERUN} {command}"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, env=environment,
    )  # fmt: skip


def test_a_closed_output_is_said(tmp_path: Path) -> None:
    done = shell("models list >&-", tmp_path)
    assert (done.returncode, done.stderr) == (
        1,
        "forerun: error: the output can't be written: standard output is closed\n",
    )


def test_closed_notices_cost_no_answer(model: Path, tmp_path: Path) -> None:
    command = f"run --max-tokens 6 -m {model} hello"
    expected = shell(command, tmp_path)
    assert (expected.returncode, expected.stderr.count("\n")) == (0, 1)
    done = shell(f"{command} 2>&-", tmp_path)
    assert (done.returncode, done.stdout) == (0, expected.stdout)


def test_ctrl_c_while_a_command_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "interrupted_import.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cli, "COMMANDS", MappingProxyType({"run": "interrupted_import"}))
    try:
        code = cli.dispatch(["run", "hello"])
    except KeyboardInterrupt:  # it would end the whole test run
        pytest.fail("the interrupt left the command")
    assert code == 130
    assert capsys.readouterr() == ("", "forerun: interrupted\n")


def test_an_error_within_an_answer_leaves_nothing_of_the_engine(model: Path, tmp_path: Path) -> None:
    """The native module would list on standard error what the interpreter's end finds alive."""
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps({"type": "integer", "minimum": 5, "maximum": 3}))
    done = shell(f"run -m {model} --json-schema {schema} hello", tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "leaves no valid value" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint", "called"),
    [
        (["rnu"], "No such command 'rnu'", "forerun"),
        (["run", "Why", "is"], "the prompt is one argument, in quotes; 'is' is a second one", "forerun run"),
        (["models", "rm"], "Missing argument", "forerun models rm"),
        (["plan", "nothing"], "No such command 'nothing'", "forerun plan"),
        (["serve", "--queue-seconds", "-1"], "--queue-seconds", "forerun serve"),
        (["serve", "--request-seconds", "0"], "--request-seconds", "forerun serve"),
        (["serve", "--served-model-name", ""], "a name has at least one character", "forerun serve"),
    ],
)
def test_wrong_usage_names_the_help_that_answers(
    capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str, called: str
) -> None:
    assert cli.dispatch(arguments) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert complaint in errors
    assert errors.endswith(f" (see {called} --help)\n")


@pytest.mark.parametrize("group", [[], ["bench"], ["models"], ["plan"]])
def test_lists_of_commands_are_not_cut_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, group: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.dispatch([*group, "--help"]) == 0
    _, _, commands = capsys.readouterr().out.partition("Commands:\n")
    assert commands
    assert "..." not in commands


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (["run"], "forerun run [OPTIONS] [PROMPT]"),
        (["models", "pull"], "forerun models pull [OPTIONS] [NAME]..."),
        (["models", "rm"], "forerun models rm [OPTIONS] {NAME}..."),
        (["plan", "models"], "forerun plan models [OPTIONS] [NAME|PATH]"),
    ],
)
def test_usage_has_each_bracket_once(capsys: pytest.CaptureFixture[str], command: list[str], usage: str) -> None:
    assert cli.dispatch([*command, "--help"]) == 0
    first = capsys.readouterr().out.splitlines()[0].replace("{", "").replace("}", "")  # older versions of Typer: none
    assert first == f"Usage: {usage}".replace("{", "").replace("}", "")
