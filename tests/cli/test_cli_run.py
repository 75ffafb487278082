"""`forerun run`: prompts from everywhere, the answer, the statistics, and every way to end."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from forerun import Engine, SamplingParams, cli
from forerun.cli import run
from forerun.models.executor import Executor
from reference.model_server import ModelServer, catalog_text
from reference.tiny import TinySpec, write_tiny_gguf

FORERUN = [sys.executable, "-c", "from forerun.cli import main; main()"]
SPEC = TinySpec("llama", seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def model(folder: Path) -> str:
    return str(write_tiny_gguf(folder / "tiny.gguf", SPEC))


@pytest.fixture(scope="module")
def base_model(folder: Path) -> str:
    spec = TinySpec("llama", seed=5, metadata={"tokenizer.chat_template": None})
    return str(write_tiny_gguf(folder / "base.gguf", spec))


@pytest.fixture(scope="module")
def long_model(folder: Path) -> str:
    """A model that can go on for seconds."""
    return str(write_tiny_gguf(folder / "long.gguf", TinySpec("llama", seed=5, context=40_000)))


@pytest.fixture(scope="module")
def engine(model: str) -> Engine:
    return Engine(model, kv_tokens=2048, threads=1, cache_weights=False)


@pytest.fixture(autouse=True)
def environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of the module's own, one thread, and nothing on standard input."""
    monkeypatch.setenv("FORERUN_CACHE", str(folder / "cache"))
    monkeypatch.setenv("FORERUN_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.delenv("FORERUN_CATALOG", raising=False)
    with open(os.devnull, encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


@contextmanager
def standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> Iterator[None]:
    """`data` in a pipe as this process's standard input."""
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        os.write(writer, data)
        os.close(writer)
        yield


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and error output of `forerun run` in this process."""
    code = cli.dispatch(["run", *arguments])
    output, errors = capsys.readouterr()
    return code, output, errors


def call_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, output, errors = call(capsys, *arguments, "--json")
    assert (code, errors) == (0, "")
    found: dict[str, Any] = json.loads(output)
    return found


def one_line(errors: str) -> str:
    assert errors.count("\n") == 1
    assert errors.startswith("forerun: error: ")
    return errors


def test_the_answer_is_the_engines(capsys: pytest.CaptureFixture[str], engine: Engine, model: str) -> None:
    message = [{"role": "user", "content": "What is in the sea?"}]
    expected = engine.chat(message, SamplingParams(max_tokens=24))[0]
    code, output, errors = call(capsys, "What is in the sea?", "-m", model, "--max-tokens", "24")
    end = "" if expected.text.endswith("\n") else "\n"
    assert (code, output) == (0, expected.text + end)
    prompt, answer = len(expected.prompt_token_ids), len(expected.token_ids)
    pattern = (
        rf"prompt {prompt} tokens at \d+/s, output {answer} tokens at [\d.]+/s, "
        rf"first token after [\d.]+ s, (no drafts( \(.+?\))?|draft tokens: \d+ of \d+ accepted, [\d.]+ tokens a step), "
        rf"finish: {expected.finish_reason}\n"
    )
    assert re.fullmatch(pattern, errors)


def test_a_system_message_goes_first(capsys: pytest.CaptureFixture[str], engine: Engine, model: str) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    expected = engine.chat(messages, SamplingParams(max_tokens=8))[0]
    found = call_json(capsys, "Why?", "-m", model, "--system", "Be brief.", "--max-tokens", "8")
    assert found["token_ids"] == list(expected.token_ids)
    assert found["prompt_tokens"] == len(expected.prompt_token_ids)


def test_json_says_everything(capsys: pytest.CaptureFixture[str], engine: Engine, model: str) -> None:
    found = call_json(capsys, "--raw", "one two", "-m", model, "--max-tokens", "5", "--seed", "9", "--no-speculate")
    expected = engine.generate("one two", SamplingParams(max_tokens=5, seed=9))[0]
    assert list(found) == [
        "model", "text", "token_ids", "finish_reason", "seed", "prompt_tokens", "output_tokens",
        "stats", "speculation",
    ]  # fmt: skip
    assert found["model"] == model
    assert found["text"] == expected.text
    assert tuple(found["token_ids"]) == expected.token_ids
    assert (found["finish_reason"], found["seed"]) == ("length", 9)
    assert (found["prompt_tokens"], found["output_tokens"]) == (
        len(expected.prompt_token_ids),
        5,
    )
    stats = found["stats"]
    assert list(stats) == [
        "prefill_tokens_per_s", "decode_tokens_per_s", "first_token_s", "total_s", "steps",
        "preemptions",
    ]  # fmt: skip
    assert 0 < stats["first_token_s"] <= stats["total_s"]
    assert stats["prefill_tokens_per_s"] > 0
    assert (stats["steps"], stats["preemptions"]) == (5, 0)


def test_raw_text_is_taken_character_for_character(
    capsys: pytest.CaptureFixture[str],
    engine: Engine,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "more.txt"
    file.write_bytes("\n  größer:\r\n".encode())
    whole = " def f():" + "\n  größer:\r\n" + "x = 1\n"
    expected = engine.generate(whole, SamplingParams(max_tokens=6))[0]
    with standard_input(monkeypatch, b"x = 1\n"):
        found = call_json(capsys, "--raw", " def f():", "-f", str(file), "-m", model, "--max-tokens", "6")
    assert found["prompt_tokens"] == len(expected.prompt_token_ids)
    assert found["text"] == expected.text


@pytest.mark.parametrize("argument", [None, "Explain this:"])
@pytest.mark.parametrize("in_file", [None, "from a file\n"])
@pytest.mark.parametrize("piped", [b"", b"from a pipe\n", b"\n"])
def test_a_message_is_put_together(
    argument: str | None,
    in_file: str | None,
    piped: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = None
    if in_file is not None:
        path = tmp_path / "prompt.txt"
        path.write_text(in_file)
    parts = [part for part in (argument, in_file and "from a file") if part]
    parts += ["from a pipe"] if len(piped) > 1 else []
    with standard_input(monkeypatch, piped):
        if parts:
            assert run._prompt(argument, path, raw=False) == "\n\n".join(parts)
        else:
            with pytest.raises(Exception, match="the prompt is empty"):
                run._prompt(argument, path, raw=False)


def test_standard_input_may_be_a_file_a_device_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "text"
    file.write_text("redirected")
    with file.open(encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert run._prompt("a", None, raw=False) == "a\n\nredirected"
    master, slave = pty.openpty()
    try:
        with open(slave, encoding="utf-8", closefd=False) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            assert run._prompt("a", None, raw=False) == "a"
    finally:
        os.close(master)
        os.close(slave)
    monkeypatch.setattr(sys, "stdin", None)
    assert run._prompt("a", None, raw=False) == "a"


def test_waiting_for_a_pipe_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_PATIENCE_SECONDS", 0.01)
    reader, writer = os.pipe()

    def feed() -> None:
        time.sleep(0.2)
        os.write(writer, b"late")
        os.close(writer)

    feeder = threading.Thread(target=feed)
    with open(reader, encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        feeder.start()
        assert run._prompt("a", None, raw=False) == "a\n\nlate"
        feeder.join()
    errors = capsys.readouterr().err
    assert errors.startswith("waiting for standard input to end")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "params"),
    [
        (["--temperature", "1.5", "--seed", "3"], {"temperature": 1.5, "seed": 3}),
        (
            ["-t", "2", "--seed", "4", "--top-k", "3"],
            {"temperature": 2.0, "seed": 4, "top_k": 3},
        ),
        (
            ["-t", "2", "--seed", "5", "--top-p", "0.3"],
            {"temperature": 2.0, "seed": 5, "top_p": 0.3},
        ),
        (
            ["-t", "2", "--seed", "6", "--min-p", "0.5"],
            {"temperature": 2.0, "seed": 6, "min_p": 0.5},
        ),
        (
            ["-t", "2", "--seed", "6", "--typical-p", "0.3"],
            {"temperature": 2.0, "seed": 6, "typical_p": 0.3},
        ),
        (
            ["-t", "3", "--seed", "6", "--top-p", "0.8", "--order", "top_p, temperature"],
            {"temperature": 3.0, "seed": 6, "top_p": 0.8, "order": ("top_p", "temperature")},
        ),
        (
            ["--bad-word", "e", "--bad-word", "th"],
            {"bad_words": ("e", "th")},
        ),
        (["--ignore-eos", "--min-tokens", "7"], {"ignore_eos": True, "min_tokens": 7}),
    ],
)
def test_sampling_flags_reach_the_engine(
    capsys: pytest.CaptureFixture[str],
    engine: Engine,
    model: str,
    flags: list[str],
    params: dict[str, Any],
) -> None:
    expected = engine.generate("the", SamplingParams(max_tokens=12, **params))[0]
    found = call_json(capsys, "--raw", "the", "-m", model, "--max-tokens", "12", *flags)
    assert tuple(found["token_ids"]) == expected.token_ids


def test_stops_are_repeatable(capsys: pytest.CaptureFixture[str], engine: Engine, model: str) -> None:
    whole = engine.generate("the", SamplingParams(max_tokens=30))[0].text
    stop = whole[9:12]
    assert "\0" not in stop
    expected = engine.generate("the", SamplingParams(max_tokens=30, stop=stop))[0]
    assert expected.finish_reason == "stop"
    flags = ["--stop", "never in the text", "--stop", stop]
    found = call_json(capsys, "--raw", "the", "-m", model, "--max-tokens", "30", *flags)
    assert (found["text"], found["finish_reason"]) == (expected.text, "stop")


def test_a_sampled_answer_names_its_seed(capsys: pytest.CaptureFixture[str], model: str) -> None:
    arguments = ["--raw", "the", "-m", model, "--max-tokens", "12", "-t", "1"]
    _, first, errors = call(capsys, *arguments)
    seed = re.search(r"seed (\d+)", errors)
    assert seed is not None
    assert call(capsys, *arguments, "--seed", seed[1])[1] == first


def test_a_base_model_continues_the_text(capsys: pytest.CaptureFixture[str], model: str, base_model: str) -> None:
    code, output, errors = call(capsys, "one two", "-m", base_model, "--max-tokens", "6")
    notice, _ = errors.splitlines()
    assert (code, notice) == (
        0,
        f"{base_model} has no chat template: it continues the prompt as plain text, as --raw does",
    )
    assert output == call(capsys, "one two", "--raw", "-m", model, "--max-tokens", "6")[1]
    code, output, errors = call(capsys, "one two", "-m", base_model, "--system", "no place")
    assert (code, output) == (1, "")
    assert "has no chat template" in one_line(errors)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ([], 2, "the prompt is empty"),
        ([""], 2, "the prompt is empty"),
        ([" \n"], 2, "the prompt is empty"),
        (["--raw", ""], 2, "the prompt is empty"),
        (["x", "--raw", "--system", "y"], 2, "--system needs the chat template"),
        (["x", "--temperature", "-1"], 2, "temperature=-1.0 is not allowed"),
        (["x", "--temperature", "nan"], 2, "temperature=nan is not allowed"),
        (["x", "--temperature", "warm"], 2, "--temperature"),
        (["x", "--top-p", "1.1"], 2, "top_p=1.1 is not allowed"),
        (["x", "--typical-p", "-1"], 2, "typical_p=-1.0 is not allowed"),
        (["x", "--order", "top_k,heat"], 2, "order='heat' is not allowed"),
        (["x", "--top-k", "5", "--order", "temperature"], 2, "order leaves out 'top_k'"),
        (["x", "--bad-word", ""], 2, "bad_words='' is not allowed"),
        (["x", "--max-tokens", "0"], 2, "max_tokens=0 is not allowed"),
        (["x", "--min-tokens", "600"], 2, "min_tokens=600 is above max_tokens=512"),
        (["x", "--stop", ""], 2, "stop='' is not allowed"),
        (["x", "--threads", "0"], 2, "--threads"),
        (["x", "--kv-tokens", "15"], 2, "--kv-tokens"),
        (["x", "--file", "no/such/file"], 2, "no/such/file"),
        (["x", "--no-such-flag"], 2, "--no-such-flag"),
        (["x", "y"], 2, "y"),
        (["x", "-m", "tini"], 1, "no model is named 'tini'"),
        (["x", "-m", "no/such.gguf"], 1, "there is no file or folder at no/such.gguf"),
    ],
)
def test_errors_are_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, complaint: str
) -> None:
    found, output, errors = call(capsys, *arguments)
    assert (found, output) == (code, "")
    assert complaint in one_line(errors)


def test_what_does_not_fit_is_one_line(capsys: pytest.CaptureFixture[str], model: str) -> None:
    code, output, errors = call(capsys, "word " * 600, "-m", model)
    assert (code, output) == (1, "")
    assert "the context holds 512" in one_line(errors)


@pytest.mark.parametrize("where", ["file", "pipe"])
def test_a_prompt_must_be_utf8(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    data = b"caf\xe9"
    file = tmp_path / "latin.txt"
    file.write_bytes(data if where == "file" else b"fine")
    with standard_input(monkeypatch, data if where == "pipe" else b""):
        code, output, errors = call(capsys, "-f", str(file))
    assert (code, output) == (1, "")
    assert "isn't UTF-8 text (byte 3)" in one_line(errors)


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("within", ["forward", "write"])
def test_an_interrupt_ends_the_answer_cleanly(
    capsys: pytest.CaptureFixture[str],
    model: str,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    within: str,
    as_json: bool,
) -> None:
    """SIGINT arrives inside a step, or between two."""
    calls = 0
    owner: Any = Executor if within == "forward" else run._Writer
    original = getattr(owner, within)

    def interrupted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*arguments)
        if calls == 10:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(owner, within, interrupted)
    # Without drafts: a step is a token.
    flags = ["--raw", "the", "-m", model, "--max-tokens", "100", "--ignore-eos", "--draft", "none"]
    code, output, errors = call(capsys, *flags, *["--json"] * as_json)
    monkeypatch.setattr(owner, within, original)
    assert code == 130
    whole = engine.generate("the", SamplingParams(max_tokens=100, ignore_eos=True))[0].text
    if as_json:
        found = json.loads(output)
        assert (found["finish_reason"], errors) == ("cancelled", "")
        assert 5 < found["output_tokens"] < 20
        assert whole.startswith(found["text"].rstrip("\ufffd"))
    else:
        assert output.endswith("\n")
        assert len(output) > 2
        assert whole.startswith(output.removesuffix("\n").rstrip("\ufffd"))
        assert errors.count("\n") == 1
        assert errors.endswith("finish: cancelled\n")


def test_every_piece_is_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    try:
        with open(writer, "w", encoding="utf-8") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            run._Writer(silent=False).write("a piece")
            assert os.read(reader, 100) == b"a piece"
    finally:
        os.close(reader)


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose answer would take long, ended with the scope."""
    process = subprocess.Popen(
        [*FORERUN, "run", *arguments, "--ignore-eos", "--max-tokens", "39000", "--kv-tokens", "40000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        with process:
            yield process
            process.wait(timeout=20)
    finally:
        process.kill()


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def test_ctrl_c_in_a_process_of_its_own(long_model: str) -> None:
    with started("a", "-m", long_model) as process:
        # The answer streams: its beginning is here while the rest is still being computed.
        first = os.read(pipe(process.stdout).fileno(), 1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert (first + output).endswith(b"\n")
    assert errors.decode().endswith("finish: cancelled\n")
    assert errors.count(b"\n") == 1


def test_a_reader_that_goes_away_is_no_error(long_model: str) -> None:
    with started("a", "-m", long_model) as process:
        os.read(pipe(process.stdout).fileno(), 1)
        pipe(process.stdout).close()
        errors = pipe(process.stderr).read()
    assert (process.returncode, errors) == (141, b"")


def test_a_pipe_is_read_in_a_process_of_its_own(engine: Engine, model: str) -> None:
    done = subprocess.run(
        [*FORERUN, "run", "-m", model, "--max-tokens", "8", "--json"],
        input=b"What is it?\n",
        capture_output=True,
        timeout=60,
        check=True,
    )
    message = [{"role": "user", "content": "What is it?"}]
    expected = engine.chat(message, SamplingParams(max_tokens=8))[0]
    assert json.loads(done.stdout)["token_ids"] == list(expected.token_ids)


def test_a_terminal_gets_no_control_characters(capsys: pytest.CaptureFixture[str], model: str) -> None:
    arguments = ["run", "--raw", "the", "-m", model, "--max-tokens", "200", "-t", "5"]
    arguments += ["--seed", "1", "--ignore-eos"]
    _, plain, _ = call(capsys, *arguments[1:])
    assert any(ord(letter) < 32 and letter not in "\n\t" for letter in plain), "this seed shows nothing"
    master, slave = pty.openpty()
    with subprocess.Popen([*FORERUN, *arguments], stdin=slave, stdout=slave, stderr=subprocess.PIPE) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            shown += piece
        pipe(process.stderr).read()
    os.close(master)
    text = shown.decode().replace("\r\n", "\n")
    assert not any(ord(letter) < 32 and letter not in "\n\t" for letter in text)
    assert not any(0x7F <= ord(letter) < 0xA0 for letter in text)
    assert len(text) == len(plain)


def test_the_default_model_is_pulled(
    capsys: pytest.CaptureFixture[str],
    engine: Engine,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = Path(model).read_bytes()
    catalog = tmp_path / "extra.toml"
    catalog.write_text('default = "tiny"\n' + catalog_text("tiny", content))
    monkeypatch.setenv("FORERUN_CATALOG", str(catalog))
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    for name in ("FORERUN_OFFLINE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with ModelServer().running() as server:
        server.reset(content=content)
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        code, output, errors = call(capsys, "--raw", "the", "--max-tokens", "6")
    expected = engine.generate("the", SamplingParams(max_tokens=6))[0].text
    assert (code, output.removesuffix("\n")) == (0, expected.removesuffix("\n"))
    assert errors.startswith("tiny from Hugging Face owner/repo/model.gguf@main")
    assert call_json(capsys, "--raw", "the", "--max-tokens", "6")["model"] == "tiny"


def test_help_says_how_prompts_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, _ = call(capsys, "--help")
    words = " ".join(output.split())
    assert code == 0
    assert "Standard input is read when it is a pipe or a file" in words
    assert "--raw continues it instead" in words


def test_a_cache_that_takes_nothing_costs_time_not_the_answer(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    expected = call(capsys, "--max-tokens", "6", "-m", model, "hello")
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    code, out, errors = call(capsys, "--max-tokens", "6", "-m", model, "hello")
    assert (code, out) == (0, expected[1])
    assert "packing the weights in memory" in errors


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_output_that_cannot_be_written_is_one_line(model: str) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*FORERUN, "run", "--max-tokens", "4", "-m", model, "hi"],
            stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip
    assert done.returncode == 1
    assert "the output can't be written" in done.stderr
    assert "Traceback" not in done.stderr
