"""The `forerun` command: one module a command, imported only when it is called.

Each module has `register(app)`, which adds its command or group. Exit codes: 0 done, 1 a
ForerunError (one line on standard error), 2 wrong usage, 130 interrupted, 141 the reader of the
output went away.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from types import MappingProxyType

import typer

from forerun.errors import ForerunError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "forerun.cli.run",
        "models": "forerun.cli.models",
        "bench": "forerun.cli.bench",
        "plan": "forerun.cli.plan",
        "serve": "forerun.cli.serve",
    }
)

# Typer exports only this leaf of its usage errors, and from where depends on its version; the
# base of all of them (with `exit_code` and `format_message()`) is two steps up.
_TyperError: type[Exception] = typer.BadParameter.__mro__[2]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    sys.exit(dispatch(sys.argv[1:] if arguments is None else arguments))


def dispatch(arguments: Sequence[str]) -> int:
    """Run the command line and return its exit code; expected failures are one line each."""
    if sys.stderr is None:
        # Closed by who started this: notices go nowhere, and no file that is opened later takes their place.
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        _complain("error: the output can't be written: standard output is closed")
        return 1
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or file that isn't UTF-8 gets question marks, not the end of the command.
            stream.reconfigure(errors="replace")
    try:
        # Its imports take half a second, in which Ctrl-C may come too.
        command = typer.main.get_command(build_app(arguments))
        with command.make_context("forerun", list(arguments)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except typer.Exit as done:
        return _flushed(done.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        _complain("interrupted")
        return 130
    except BrokenPipeError:
        _silence_stdout()
        return 141
    except ForerunError as error:
        _complain(f"error: {error}")
        # The error's stack holds the engine; native memory has to be free before the interpreter ends.
        error.__traceback__ = None
        return _flushed(1)
    except OSError as error:
        # Everything expected is a ForerunError; what is left is a standard stream that can't take the output.
        _silence_stdout()
        _complain(f"error: the output can't be written: {error.strerror or error}")
        return 1
    except _TyperError as error:
        text = getattr(error, "format_message", error.__str__)()
        called = getattr(getattr(error, "ctx", None), "command_path", "forerun")
        _complain(f"error: {text} (see {called} --help)")
        return int(getattr(error, "exit_code", 2))


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """The Typer application with the called command, with all (for --help) or none (--version)."""
    app = typer.Typer(name="forerun", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(_root)
    called = next((word for word in arguments if not word.startswith("-")), None)
    for name, module in COMMANDS.items():
        if called == name or (called not in COMMANDS and "--version" not in arguments):
            importlib.import_module(module).register(app)
    return app


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Answers from a language model, sooner, without one changed character."""
    if version:
        typer.echo(f"forerun {_version()}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _version() -> str:
    try:
        return metadata.version("forerun")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _complain(message: str) -> None:
    # Names and reasons may come from a server: no control character reaches the terminal.
    line = "".join(letter for letter in " ".join(message.split()) if letter.isprintable())
    try:
        print(f"forerun: {line}", file=sys.stderr, flush=True)
    except BrokenPipeError:
        return


def _flushed(code: int) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return 141
    return code


def _silence_stdout() -> None:
    """Point standard output at nothing, so that the interpreter's last flush can't fail."""
    handle = os.open(os.devnull, os.O_WRONLY)
    os.dup2(handle, sys.stdout.fileno())
    os.close(handle)
