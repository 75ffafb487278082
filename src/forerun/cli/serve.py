"""`forerun serve`: an OpenAI-compatible endpoint over one model."""

from __future__ import annotations

import os

import typer

from forerun.cli.draft_options import DRAFT, DRAFT_LENGTH, draft_warnings, engine_options
from forerun.errors import ConfigurationError

_HELP = """Serve a model to OpenAI's clients.

Endpoints: /v1/chat/completions, /v1/completions, /v1/models, /v1/tokenize, /v1/detokenize, /health, /ready, /metrics,
and a status page at /. SIGINT or SIGTERM stops: requests that run then have --grace seconds to end.

API keys come from FORERUN_API_KEYS, separated by commas, so that they stand in no process list."""


def register(app: typer.Typer) -> None:
    """Add the command `serve` to the application."""
    app.command("serve", help=_HELP)(_serve)


def _serve(
    model: str | None = typer.Option(
        None,
        "--model",
        "-m",
        metavar="MODEL",
        help="Catalog name, .gguf file or Hugging Face folder; none means the default model.",
    ),
    host: str = typer.Option("127.0.0.1", "--host", help="Address to listen at; 0.0.0.0 is every one."),
    port: int = typer.Option(8000, "--port", "-p", min=0, max=65535, help="Port; 0 takes a free one."),
    name: list[str] | None = typer.Option(
        None, "--served-model-name", metavar="NAME", help="What clients call the model; repeatable, the first is told."
    ),
    draft: str = DRAFT,
    draft_len: str = DRAFT_LENGTH,
    kv_tokens: int = typer.Option(32768, "--kv-tokens", help="Tokens of all requests together that KV has room for."),
    max_model_len: int | None = typer.Option(
        None, "--max-model-len", help="Longest prompt and answer. [default: the model's, at most --kv-tokens]"
    ),
    max_rows: int = typer.Option(32, "--max-rows", help="Requests that run at once."),
    shared_mib: float = typer.Option(
        64.0, "--shared-mib", min=0, help="Most memory of finished texts that later drafts may copy; 0: keep none."
    ),
    threads: int | None = typer.Option(None, "--threads", help="Native threads. [default: one per core]"),
    prompt_slowdown: float = typer.Option(
        1.6,
        "--prompt-slowdown",
        help="How many times as long steps may get by prompts; 0: no limit.",
    ),
    max_waiting: int = typer.Option(256, "--max-waiting", min=1, help="Requests that may wait; more get 429."),
    queue_seconds: float = typer.Option(60.0, "--queue-seconds", min=0.001, help="Longest wait before the first step."),
    request_seconds: float = typer.Option(600.0, "--request-seconds", min=0.001, help="Longest time of a request."),
    grace: float = typer.Option(30.0, "--grace", min=0, help="Seconds for running requests when told to stop."),
    max_body_mb: float = typer.Option(8.0, "--max-body-mb", min=0.001, help="Largest body of a request."),
    tool_format: str = typer.Option(
        "qwen", "--tool-format", help="How the model writes calls: qwen, hermes, llama3, json."
    ),
    cors: list[str] | None = typer.Option(None, "--cors", metavar="ORIGIN", help="Pages that may ask; repeatable."),
    lenient: bool = typer.Option(False, "--lenient", help="Drop unknown parameters instead of refusing them."),
) -> None:
    try:
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigurationError("serving needs FastAPI and uvicorn: pip install 'forerun[serve]'") from error
    from forerun.cli.models import pull_progress
    from forerun.constrain.tools import FORMATS
    from forerun.engine.engine import Engine
    from forerun.models.catalog import Catalog
    from forerun.models.download import resolve
    from forerun.serve.app import Settings
    from forerun.serve.driver import Limits
    from forerun.serve.run import ServeOptions, serve

    if "" in (name or []):
        raise typer.BadParameter("a name has at least one character", param_hint="--served-model-name")
    if tool_format not in FORMATS:
        raise ConfigurationError(f"--tool-format {tool_format!r} is unknown; expected {', '.join(FORMATS)}")
    keys = tuple(key.strip() for key in os.environ.get("FORERUN_API_KEYS", "").split(",") if key.strip())
    asked = model or Catalog.load().default
    options = ServeOptions(
        host=host,
        port=port,
        names=tuple(name or [asked]),
        tool_format=tool_format,
        grace_seconds=grace,
        cors=tuple(cors or ()),
        limits=Limits(max_waiting, queue_seconds, request_seconds),
        settings=Settings(keys, int(max_body_mb * (1 << 20)), lenient=lenient),
    )
    path = resolve(asked, progress=pull_progress())
    with draft_warnings(lambda text: typer.echo(f"forerun: {text}", err=True)):
        engine = Engine(
            path, kv_tokens=kv_tokens, max_model_len=max_model_len, max_rows=max_rows, threads=threads,
            prompt_slowdown=None if prompt_slowdown == 0 else prompt_slowdown,
            shared_bytes=int(shared_mib * (1 << 20)),
            **engine_options(draft, draft_len),
        )  # fmt: skip
        typer.echo(f"{options.names[0]}: {engine.max_model_len} tokens of context", err=True)
        serve(engine, options, lambda address: typer.echo(f"serving at {address}/v1", err=True))
