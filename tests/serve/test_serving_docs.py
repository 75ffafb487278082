"""What docs/serving.md, docs/metrics.md and the README say of the server is what it does."""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shlex
import sys
from pathlib import Path

import httpx
import pytest

from forerun.cli import dispatch
from forerun.cli.serve import _serve as serve_command
from forerun.serve.metrics import Metrics
from forerun.serve.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampling,
    Strict,
    TokenizeRequest,
)
from forerun.serve.status import SECONDS
from reference.live_server import LiveServer

ROOT = Path(__file__).parents[2]
SERVING = (ROOT / "docs" / "serving.md").read_text()
METRICS = (ROOT / "docs" / "metrics.md").read_text()
README = (ROOT / "README.md").read_text()
SHOWN = "http://127.0.0.1:8000"
MODEL = "smollm2-135m-instruct"


def section(title: str) -> str:
    """The text under a heading of serving.md, up to the next of its level."""
    level, _, _ = title.partition(" ")
    [found] = re.findall(rf"^{re.escape(title)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", SERVING, re.MULTILINE | re.DOTALL)
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of tables, without heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]


def first_cells(text: str) -> list[str]:
    return [name for row in rows(text) for name in re.findall(r"`([^`]+)`", row[0])]


def test_every_parameter_is_documented_and_no_other() -> None:
    parameters = section("## Parameters")
    shared, chat, text = re.split(r"^(?:Only one constraint may|Of text completions:)", parameters, flags=re.MULTILINE)
    expected = set(Sampling.model_fields) | {"response_format"}
    assert set(first_cells(shared)) == expected
    assert len(first_cells(shared)) == len(expected)
    assert set(first_cells(chat)) == set(ChatCompletionRequest.model_fields) - expected
    assert set(first_cells(text.partition("### ")[0])) == set(CompletionRequest.model_fields) - expected
    others = text.partition("`/v1/tokenize` takes")[2]
    for model in (TokenizeRequest, DetokenizeRequest):
        assert all(f"`{name}`" in others for name in model.model_fields)


def test_defaults_of_parameters() -> None:
    """Those that the protocol itself has."""
    cells = {row[0].strip("`"): row[2] for row in rows(section("## Parameters")) if len(row) == 4}
    requests: tuple[type[Strict], ...] = (ChatCompletionRequest, CompletionRequest)
    for request in requests:
        for name, field in request.model_fields.items():
            if isinstance(field.default, bool):
                assert cells[name] == str(field.default).lower(), name
            elif field.is_required():
                assert cells[name] == "required"
            elif name != "logprobs":
                assert cells[name] not in ("true", "false") or name in ("stream", "parallel_tool_calls")


def test_every_endpoint_is_documented(server: LiveServer) -> None:
    paths = httpx.get(server.url + "/openapi.json").json()["paths"]
    real = {f"{method.upper()} {path}".replace(":path}", "}") for path, on in paths.items() for method in on}
    assert set(first_cells(section("## Endpoints"))) - {"?since=T"} == real | {"GET /", "GET /openapi.json"}


def test_every_option_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    option = r"(?<![\w-])(--[a-z][a-z-]*)"
    assert dispatch(["serve", "--help"]) == 0
    options = set(re.findall(option, capsys.readouterr().out)) - {"--help", "--no-lenient"}
    assert set(re.findall(option, SERVING)) == options
    defaults = {
        name: parameter.default.default
        for parameter in inspect.signature(serve_command).parameters.values()
        for name in parameter.default.param_decls
    }
    table = [row for row in rows(section("## The life of a request")) if row[0].startswith("`--")]
    assert len(table) == 10
    for name, default, _ in table:
        if defaults[name.strip("`")] is not None:
            assert default == f"{defaults[name.strip('`')]:g}", name


def test_every_error_code_is_documented() -> None:
    sources = [path.read_text() for path in (ROOT / "src" / "forerun" / "serve").glob("*.py")]
    codes = {code for text in sources for code in re.findall(r"\bcode=\"(\w+)\"", text)}
    table = rows(section("## Errors"))
    assert {row[1].strip("`") for row in table[1:] if row[1]} == codes
    statuses = {int(status) for text in sources for status in re.findall(r"ApiError\(\s*(\d{3})", text)}
    assert statuses <= {int(status) for row in table[1:] for status in row[0].split(", ")}


def test_the_fixed_limits() -> None:
    from forerun.serve import app, driver, protocol, run, service

    prose = " ".join(SERVING.split())
    limits = driver.Limits()
    assert f"has to arrive within {app.Settings().body_seconds:g} s" in prose
    assert f"idle connections close after {run.KEEP_ALIVE_SECONDS} s" in prose
    assert f"{service.MAX_PROMPTS} prompts" in prose
    assert f"| `--max-waiting` | {limits.max_waiting} |" in prose
    assert f"| `--queue-seconds` | {limits.queue_seconds:g} |" in prose
    assert f"| `--request-seconds` | {limits.request_seconds:g} |" in prose
    assert f"| `--max-body-mb` | {app.Settings().max_body_bytes >> 20} |" in prose
    assert f"| `--grace` | {run.ServeOptions().grace_seconds:g} |" in prose
    assert f"at most {app._MAX_ITEMS:,} lists" in prose
    schema = protocol.ChatCompletionRequest.model_json_schema()["properties"]
    assert f"{schema['messages']['maxItems']:,} messages" in prose
    assert f"{schema['tools']['anyOf'][0]['maxItems']} tools" in prose
    assert SECONDS == 180
    assert "last three minutes" in prose


def test_every_metric_is_documented_with_its_help_text(server: LiveServer) -> None:
    """Kind and words, so that neither changes alone."""
    shown = {row[0].strip("`"): row for row in rows(METRICS) if row[0].startswith(("`vllm:", "`forerun:"))}
    metrics = Metrics("tiny", server.engine)
    real = {f"{f.name}_total" if f.type == "counter" else f.name: f for f in metrics.families()}
    assert set(shown) == set(real)
    for name, family in real.items():
        assert shown[name][1] == family.type
        assert shown[name][3] == family.documentation.rstrip(".")
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        if family.samples:
            assert shown[name][2] == "".join(f"`{label}`" for label in labels)


def test_queries_name_real_series(server: LiveServer) -> None:
    httpx.post(server.url + "/v1/completions", json={"prompt": "abcabcabcabcabc", "max_tokens": 20, "temperature": 0})
    text = httpx.get(server.url + "/metrics").text
    names = set(re.findall(r"(?:vllm|forerun):\w+", METRICS))
    families = {f"{f.name}" for f in Metrics("tiny", server.engine).families()}
    for name in names:
        assert f"{name}{{" in text or name in families or name.removesuffix("_total") in families, name


def curls(text: str) -> list[str]:
    return re.findall(r"curl (http.*?[^\\])\n", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", ["docs/serving.md", "README.md"])
def test_curl_examples_run(server: LiveServer, page: str) -> None:
    commands = curls((ROOT / page).read_text())
    assert commands
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "))
        assert words[0].startswith(SHOWN)
        options = dict(zip(words[1::2], words[2::2], strict=True))
        name, _, value = options["-H"].partition(": ")
        body = options["-d"].replace(MODEL, "tiny")
        answer = httpx.post(words[0].replace(SHOWN, server.url), content=body, headers={name: value}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["message"]["role"] == "assistant"


def test_python_examples_run(server: LiveServer) -> None:
    examples = re.findall(r"```py\n(.*?)```", SERVING, flags=re.DOTALL)
    assert len(examples) >= 2
    namespace: dict[str, object] = {"__name__": "docs"}
    printed = io.StringIO()
    for example in examples:
        code = example.replace(SHOWN, server.url).replace(MODEL, "tiny")
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "serving.md", "exec"), namespace)
    shown = printed.getvalue()
    assert shown.startswith("Because ")
    assert "'accepted'" in shown
    assert "large=" in shown
    namespace["client"].close()  # type: ignore[attr-defined]


def test_lies_are_noticed(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter, an option, a code and a help text less."""
    here = sys.modules[__name__]
    for test, text in (
        (test_every_parameter_is_documented_and_no_other, "| `min_p` |"),
        (test_every_error_code_is_documented, "`overloaded`"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(here, "SERVING", SERVING.replace(text, "| x |" if "|" in text else "x"))
            with pytest.raises(AssertionError):
                test()
    with monkeypatch.context() as patch:
        patch.setattr(here, "METRICS", METRICS.replace("Of one step", "Of a step"))
        with pytest.raises(AssertionError):
            test_every_metric_is_documented_with_its_help_text(server)
