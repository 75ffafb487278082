"""The command line as a process of its own: output, exit codes, and lines on standard error."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console

from forerun import cli
from forerun.cli.models import BarProgress, PlainProgress
from forerun.errors import ForerunError
from forerun.models.catalog import Catalog, cache_dir
from forerun.models.packed import packed_path
from forerun.models.source import open_model
from reference.model_server import ModelServer, catalog_text
from reference.tiny import TinySpec, write_tiny_gguf

CONTENT = random.Random(2).randbytes(200_000)
FORERUN = [sys.executable, "-c", "from forerun.cli import main; main()"]


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer().running() as running:
        yield running


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, a catalog with the model `tiny`, and the server as Hugging Face."""
    for name in ("FORERUN_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    catalog = tmp_path / "extra.toml"
    catalog.write_text('default = "tiny"\n' + catalog_text("tiny", CONTENT))
    monkeypatch.setenv("FORERUN_CATALOG", str(catalog))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    server.reset(content=CONTENT)
    return tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of a command in this process."""
    code = cli.dispatch(arguments)
    output, errors = capsys.readouterr()
    return code, output, errors


def test_pull_list_show_rm(capsys: pytest.CaptureFixture[str], environment: Path) -> None:
    code, output, _ = call(capsys, "models", "list")
    rows = [line.split() for line in output.splitlines()]
    assert code == 0
    assert rows[0][0] == "NAME"
    assert [row[0] for row in rows[1:-1]] == list(Catalog.load().entries)
    assert ["tiny", "*", "llama", "F32", "200.0", "kB", "Apache-2.0", "absent"] in rows

    code, output, errors = call(capsys, "models", "pull")
    assert (code, output) == (0, f"tiny: {environment}\n")
    assert errors.splitlines()[0].startswith("tiny from Hugging Face owner/repo/model.gguf@main")
    assert "100% (200.0 kB)" in errors
    assert environment.read_bytes() == CONTENT

    code, output, _ = call(capsys, "models", "show", "tiny")
    entry = Catalog.load().get("tiny")
    assert code == 0
    for expected in (
        "architecture: llama",
        "licence:      Apache-2.0",
        "quantisation: F32",
        "size:         200,000 bytes",
        f"sha256:       {entry.sha256}",
        "state:        present",
        f"path:         {environment}",
        "source:       Hugging Face owner/repo/model.gguf@main",
    ):
        assert expected in output.splitlines()

    assert call(capsys, "models", "pull", "tiny", "--verify")[0] == 0
    code, output, _ = call(capsys, "models", "rm", "tiny")
    assert (code, output) == (0, "tiny: removed, 200.1 kB freed\n")
    assert not environment.exists()
    code, output, _ = call(capsys, "models", "rm", "tiny")
    assert (code, output) == (0, "tiny: not in the cache, nothing to remove\n")
    code, output, _ = call(capsys, "models", "show", "tiny")
    assert "path:         (not in the cache)" in output.splitlines()


def test_json(capsys: pytest.CaptureFixture[str], environment: Path) -> None:
    call(capsys, "models", "pull", "tiny")
    code, output, _ = call(capsys, "models", "list", "--json")
    listed = {row["name"]: row for row in json.loads(output)}
    assert code == 0
    assert list(listed) == list(Catalog.load().entries)
    assert [name for name, row in listed.items() if row["default"]] == ["tiny"]
    code, output, _ = call(capsys, "models", "show", "tiny", "--json")
    shown = json.loads(output)
    assert code == 0
    assert shown == listed["tiny"]
    assert (shown["state"], shown["path"], shown["size"]) == ("present", str(environment), 200_000)
    assert listed["gemma-3-270m"]["path"] is None
    assert len(listed["gemma-3-270m"]["sources"]) == 2


def test_a_partial_pull_is_listed(capsys: pytest.CaptureFixture[str], environment: Path) -> None:
    environment.parent.mkdir(parents=True)
    (environment.parent / ".tiny.gguf.0123.partial").write_bytes(bytes(1500))
    assert "partial (1.5 kB)" in call(capsys, "models", "list")[1]


def test_rm_takes_the_repacked_weights_of_the_model(
    capsys: pytest.CaptureFixture[str],
    server: ModelServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = write_tiny_gguf(tmp_path / "model.gguf", TinySpec(architecture="llama"))
    catalog = tmp_path / "extra.toml"
    catalog.write_text(catalog_text("tiny", model.read_bytes()))
    monkeypatch.setenv("FORERUN_CATALOG", str(catalog))
    server.reset(content=model.read_bytes())
    with open_model(model) as source:
        repacked = packed_path(cache_dir(), source.fingerprint())
    repacked.parent.mkdir(parents=True)
    repacked.write_bytes(b"weights")
    kept = repacked.with_name("another-model.packed")
    kept.write_bytes(b"weights")
    assert call(capsys, "models", "pull", "tiny")[0] == 0
    assert call(capsys, "models", "rm", "tiny")[0] == 0
    assert list(repacked.parent.iterdir()) == [kept]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["models", "pull", "tini"], 1, "no model is named 'tini'; did you mean tiny?"),
        (["models", "show", "nothing"], 1, "no model is named 'nothing'"),
        (["models", "show"], 2, "Missing argument"),
        (["models", "list", "--jsn"], 2, "No such option"),
        (["models", "pul"], 2, "No such command 'pul'"),
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["--frobnicate"], 2, "No such option"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, complaint: str
) -> None:
    found, output, errors = call(capsys, *arguments)
    assert (found, output) == (code, "")
    assert errors.startswith("forerun: error: ")
    assert complaint in errors
    assert errors.count("\n") == 1


def test_a_failed_pull_ends_in_one_error_line(
    capsys: pytest.CaptureFixture[str], server: ModelServer, environment: Path
) -> None:
    server.reset(statuses=[404])
    code, output, errors = call(capsys, "models", "pull")
    assert (code, output) == (1, "")
    assert [line[:15] for line in errors.splitlines()].count("forerun: error:") == 1
    assert errors.splitlines()[-1].startswith("forerun: error: the model 'tiny' isn't in the cache")
    assert not environment.exists()


def test_a_bad_environment_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_OFFLINE", "perhaps")
    code, _, errors = call(capsys, "models", "pull")
    assert code == 1
    assert "forerun: error: FORERUN_OFFLINE is 'perhaps'; expected 1 or 0" in errors


@pytest.mark.parametrize("arguments", [[], ["--help"], ["models"], ["models", "--help"]])
def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, output, errors = call(capsys, *arguments)
    assert (code, errors) == (0, "")
    assert "Usage: forerun" in output
    wanted = ["list", "pull", "show", "rm"] if "models" in arguments else list(cli.COMMANDS)
    listed = [line.split()[0] for line in output.splitlines() if line.startswith("  ")]
    assert [name for name in wanted if name not in listed] == []


def test_version_needs_no_command_module() -> None:
    code = (
        "import sys; from forerun.cli import dispatch; code = dispatch(['--version']); "
        "sys.exit(code or ('numpy' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("forerun ")


def test_only_the_called_command_is_imported() -> None:
    script = (
        "import sys\nfrom types import MappingProxyType\nfrom forerun import cli\n"
        "cli.COMMANDS = MappingProxyType({**cli.COMMANDS, 'other': 'no_such_module'})\n"
        "sys.exit(cli.dispatch(['models', 'list']))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_leaves_no_traceback(server: ModelServer, environment: Path) -> None:
    server.reset(content=CONTENT, hang=True)
    with subprocess.Popen(
        [*FORERUN, "models", "pull"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 20
        while not server.behaviour.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert (process.returncode, output) == (130, "")
    assert errors.splitlines()[-1] == "forerun: interrupted"
    assert "Traceback" not in errors
    assert not environment.exists()


def test_a_reader_that_goes_away_is_no_error() -> None:
    # What a command still prints while it winds down must not fail the interpreter's last flush.
    script = (
        "import typer\nfrom forerun import cli\napp = typer.Typer()\n"
        "@app.command()\ndef command():\n"
        "    try:\n        print('word', flush=True)\n    finally:\n        print('rest')\n"
        "cli.build_app = lambda _: app\ncli.main([])"
    )
    for command in ([sys.executable, "-c", script], [*FORERUN, "models", "list"]):
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
        os.close(writing)
        assert (done.returncode, done.stderr) == (141, "")


def test_a_terminal_gets_a_bar(server: ModelServer) -> None:
    server.reset(content=CONTENT, pace=0.005)
    terminal, end = pty.openpty()
    shown = io.BytesIO()

    def read() -> None:
        try:
            while data := os.read(terminal, 4096):
                shown.write(data)
        except OSError:
            return

    reader = threading.Thread(target=read)
    reader.start()
    environ = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    done = subprocess.run([*FORERUN, "models", "pull"], stdout=subprocess.PIPE, stderr=end, env=environ, text=True)
    os.close(end)
    reader.join()
    os.close(terminal)
    text = shown.getvalue().decode()
    assert done.returncode == 0
    assert done.stdout.startswith("tiny: ")
    assert "━" in text
    assert "kB" in text
    assert "\x1b[?25h" in text, "the cursor is shown again"


def test_plain_progress_prints_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress = PlainProgress()
    progress.start("work", 1000)
    for done in (0, 50, 100, 101, 990, 40, 1000):
        progress.update(done)
    progress.stop()
    assert capsys.readouterr().err.splitlines() == [
        "work (1.0 kB)",
        "  10% (100 B)",
        "  99% (990 B)",
        "  100% (1.0 kB)",
    ]


def test_bar_progress_may_stop_at_any_time() -> None:
    progress = BarProgress(Console(file=io.StringIO(), force_terminal=True))
    progress.stop()
    progress.update(3)
    progress.start("a", 10)
    progress.note("[b]not markup[/b]")
    progress.start("b", 10)
    progress.update(10)
    progress.stop()
    progress.stop()


def test_messages_stay_on_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ForerunError("two\nlines \x1b[31mred")

    def build(_: list[str]) -> typer.Typer:
        app = typer.Typer()
        app.command()(fail)
        return app

    monkeypatch.setattr(cli, "build_app", build)
    assert call(capsys) == (1, "", "forerun: error: two lines [31mred\n")
