"""`forerun run`: answers one prompt, streaming, and says how fast it went."""

from __future__ import annotations

import json
import os
import select
import stat
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import typer
from rich.console import Console

from forerun.cli import run_view
from forerun.cli.constraint_options import ANY_JSON, CHOICE, LARK, REGEX, SCHEMA, WHITESPACE, constraint_of
from forerun.cli.draft_options import DRAFT, DRAFT_LENGTH, draft_warnings, engine_options
from forerun.cli.models import pull_progress
from forerun.errors import CacheError, ForerunError, InvalidRequestError
from forerun.models.catalog import Catalog
from forerun.models.download import resolve
from forerun.sample.params import STAGES, SamplingParams, Stage, Verify

if TYPE_CHECKING:
    from forerun.engine.engine import Engine
    from forerun.engine.output import Piece, RequestOutput, RequestStats

_PATIENCE_SECONDS = 2.0

# What a model writes must not drive the terminal: control characters appear as their pictures.
_VISIBLE: Mapping[int, str] = MappingProxyType(
    {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | dict.fromkeys(range(0x80, 0xA0), "\ufffd")
)

_HELP = """Answer a prompt.

The prompt is made of the argument, the text of --file, and what a pipe brings, in this order;
where there are several, an empty line comes between them. Standard input is read when it is a
pipe or a file, and to its end: give it /dev/null where it must not be. The text goes through the
model's chat template; --raw continues it instead, character for character as given.

The answer goes to standard output as it grows; statistics and notices go to standard error. Ctrl-C
ends the answer (exit code 130).

Drafts make the answer come sooner and never change it (but --verify rejection, which keeps only its
distribution). --show-drafts colours text on a terminal: accepted drafts green, the model's
correction of a wrong draft yellow, its bonus after a right one cyan. Elsewhere, or with NO_COLOR
set, they stand in brackets: <+accepted+> <!correction!> <*bonus*>. --trace tells on standard error
for each step how the number of draft tokens was chosen; if the answer goes to the same place, after
its end. With --json it is part of the object instead, with all lengths that were weighed.

An answer that ends by itself obeys the constraint (one of --json-schema and the like, and no --stop
beside it); one that --max-tokens cuts short says "finish: length"."""


def register(app: typer.Typer) -> None:
    """Add the command `run` to the application."""
    app.command("run", help=_HELP, context_settings={"allow_extra_args": True})(_run)


def _run(
    context: typer.Context,
    prompt: str | None = typer.Argument(None, metavar="PROMPT", help="What to answer."),
    model: str | None = typer.Option(
        None,
        "--model",
        "-m",
        metavar="MODEL",
        help="Catalog name, .gguf file or Hugging Face folder; none means the default model.",
    ),
    system: str | None = typer.Option(None, "--system", metavar="TEXT", help="System message before the prompt."),
    file: Path | None = typer.Option(
        None,
        "--file",
        "-f",
        metavar="PATH",
        exists=True,
        dir_okay=False,
        readable=True,
        help="File with the prompt, or with more of it.",
    ),
    raw: bool = typer.Option(False, "--raw", help="Continue the prompt as plain text, without the chat template."),
    max_tokens: int = typer.Option(512, "--max-tokens", help="Most tokens to generate."),
    min_tokens: int = typer.Option(0, "--min-tokens", help="Nothing ends the answer before so many tokens."),
    temperature: float = typer.Option(
        0.0, "--temperature", "-t", help="0 takes the most probable token, 1 samples as trained."
    ),
    top_k: int = typer.Option(0, "--top-k", help="Sample from the k most probable; 0 from all."),
    top_p: float = typer.Option(1.0, "--top-p", help="Sample from this much probability."),
    min_p: float = typer.Option(0.0, "--min-p", help="Least probability, as a share of the highest."),
    typical_p: float = typer.Option(
        1.0, "--typical-p", help="Sample from this much probability, of tokens as likely as is usual at their place."
    ),
    order: str | None = typer.Option(
        None,
        "--order",
        metavar="STAGE,...",
        help=f"In which order these run, separated by commas: {', '.join(STAGES)} (the default).",
    ),
    bad_word: list[str] | None = typer.Option(
        None, "--bad-word", metavar="TEXT", help="Never write this, as the tokenizer writes it; repeatable."
    ),
    repetition_penalty: float = typer.Option(
        1.0, "--repetition-penalty", help="Above 1: tokens of prompt and answer become less likely."
    ),
    presence_penalty: float = typer.Option(
        0.0, "--presence-penalty", help="Subtracted from the score of every token of the answer so far."
    ),
    frequency_penalty: float = typer.Option(
        0.0, "--frequency-penalty", help="Subtracted once for each time that a token is in the answer so far."
    ),
    seed: int | None = typer.Option(None, "--seed", help="Gives the same sampled text again."),
    stop: list[str] | None = typer.Option(
        None, "--stop", metavar="TEXT", help="End the answer where this appears; repeatable."
    ),
    ignore_eos: bool = typer.Option(False, "--ignore-eos", help="Go on where the model would end the answer."),
    json_schema: Path | None = SCHEMA,
    any_json: bool = ANY_JSON,
    regex: str | None = REGEX,
    choice: list[str] | None = CHOICE,
    lark: Path | None = LARK,
    whitespace: str = WHITESPACE,
    draft: str = DRAFT,
    draft_len: str = DRAFT_LENGTH,
    speculate: bool = typer.Option(True, "--speculate/--no-speculate", help="Whether drafts are made for this answer."),
    verify: str = typer.Option(
        "coupled",
        "--verify",
        metavar="coupled|rejection",
        help="With a temperature: keep the very text that the seed gives, or only its distribution.",
    ),
    show_drafts: bool = typer.Option(False, "--show-drafts", help="Mark accepted, corrected and bonus tokens."),
    trace: bool = typer.Option(False, "--trace", help="Say for each step why it drafted as it did."),
    kv_tokens: int = typer.Option(8192, "--kv-tokens", min=16, help="Tokens of prompt and answer that fit in memory."),
    threads: int | None = typer.Option(
        None, "--threads", min=1, max=256, help="Threads; by default one per physical core."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object at the end instead of the text."),
) -> None:
    if context.args:
        raise typer.BadParameter(f"the prompt is one argument, in quotes; {context.args[0]!r} is a second one")
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    if show_drafts and as_json:
        raise typer.BadParameter("--show-drafts marks the text as it streams, which --json leaves out")
    nothing_drafts = "--draft none" if draft == "none" else None if speculate else "--no-speculate"
    settings = engine_options(draft if speculate else "none", draft_len)
    constraint = constraint_of(json_schema, any_json, regex, choice, lark, whitespace)
    try:
        params = SamplingParams(
            max_tokens=max_tokens,
            constraint=constraint,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            typical_p=typical_p,
            order=STAGES
            if order is None
            else tuple(cast(Stage, name.strip()) for name in order.split(",")),  # checked there
            bad_words=bad_word or (),
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            verify=cast(Verify, verify),  # checked there
            seed=seed,
            min_tokens=min_tokens,
            stop=stop or (),
            ignore_eos=ignore_eos,
        )
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from None
    text = _prompt(prompt, file, raw=raw)
    name = model if model is not None else Catalog.load().default
    path = resolve(name, progress=pull_progress())

    from forerun.engine.engine import Engine

    with draft_warnings(_note):
        try:
            engine = Engine(path, kv_tokens=kv_tokens, threads=threads, **settings)
        except CacheError as error:
            # The cache only saves time: an answer doesn't wait for a writable disk.
            typer.echo(f"forerun: {error.args[0]}\nforerun: packing the weights in memory instead", err=True)
            engine = Engine(path, kv_tokens=kv_tokens, threads=threads, cache_weights=False, **settings)
        ids = _prompt_ids(engine, name, text, system=system, raw=raw)
        view = _View(engine, len(ids), silent=as_json, show_drafts=show_drafts, trace=trace)
        if nothing_drafts is not None and (trace or show_drafts) and not as_json:
            _note(f"nothing is drafted: {nothing_drafts}")
        output, interrupted = _answer(engine, ids, params, view)
    if as_json:
        speculation = run_view.describe(settings["draft"], draft_len, output.stats.speculation)
        found = {**_describe(name, output), "speculation": speculation}
        typer.echo(json.dumps(found | ({"trace": view.trace.describe()} if trace else {}), indent=2))
    else:
        _print_statistics(output, sampled=not params.greedy, why_nothing=view.trace.why_nothing)
    if constraint is not None and output.finish_reason == "length":
        _note("the answer was cut short, so it isn't complete: raise --max-tokens")
    if interrupted:
        raise typer.Exit(130)


def _prompt(argument: str | None, file: Path | None, *, raw: bool) -> str:
    parts = [] if argument is None else [argument]
    if file is not None:
        try:
            parts.append(_decoded(file.read_bytes(), str(file)))
        except OSError as error:
            raise InvalidRequestError(f"the prompt file {file} can't be read: {error.strerror}") from error
    parts.append(_decoded(_piped(), "standard input"))
    if not raw:
        # A file's last line end is no part of a message.
        parts = [stripped for part in parts if (stripped := part.strip("\r\n"))]
    text = ("" if raw else "\n\n").join(parts)
    if not (text if raw else text.strip()):
        raise typer.BadParameter("the prompt is empty: give it as an argument, with --file, or through a pipe")
    return text


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{where} isn't UTF-8 text (byte {error.start}); convert it first, e.g. with iconv"
        ) from error


def _piped() -> bytes:
    """What a pipe or a redirected file brings; nothing from a terminal or device."""
    if sys.stdin is None:
        return b""
    try:
        handle = sys.stdin.fileno()
    except (OSError, ValueError):
        # A stream without a descriptor stands in for it: this process is someone else's.
        return b""
    mode = os.fstat(handle).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return b""
    if not select.select([handle], [], [], _PATIENCE_SECONDS)[0]:
        _note("waiting for standard input to end (it is a pipe; </dev/null says that none is meant)")
    with open(handle, "rb", closefd=False) as stream:
        return stream.read()


def _prompt_ids(engine: Engine, name: str, text: str, *, system: str | None, raw: bool) -> list[int]:
    if not raw and engine.chat_template is None:
        if system is not None:
            raise InvalidRequestError(
                f"{name} has no chat template, so there is no place for a system message; leave "
                "--system out, or use an instruction-tuned model (forerun models list)"
            )
        _note(f"{name} has no chat template: it continues the prompt as plain text, as --raw does")
        raw = True
    if raw:
        return engine.tokenizer.encode(text)
    messages = [] if system is None else [{"role": "system", "content": system}]
    return engine.chat_ids([*messages, {"role": "user", "content": text}])


def _answer(engine: Engine, ids: list[int], params: SamplingParams, view: _View) -> tuple[RequestOutput, bool]:
    """The output, shown as it grows, and whether Ctrl-C ended it."""
    handle = engine.submit(ids, params, trace=True)
    interrupted = False
    try:
        for piece in handle:
            view.take(piece)
    except KeyboardInterrupt:
        interrupted = True
    except ForerunError:
        view.end()
        raise
    finally:
        handle.cancel()
    view.end()
    return handle.result(), interrupted


class _View:
    """What a user sees of an answer while it is made."""

    def __init__(self, engine: Engine, n_prompt: int, *, silent: bool, show_drafts: bool, trace: bool) -> None:
        colour = sys.stdout.isatty() and _may_style()
        self._marks = run_view.DraftMarks(engine.tokenizer) if show_drafts else None
        self._writer = _Writer(silent, colour=colour)
        self.trace = run_view.Trace(n_prompt)
        self._tells = trace and not silent
        # In one place, lines of the trace would tear the text apart.
        self._late = _one_place()
        self._lines: list[str] = []
        if show_drafts:
            print(run_view.legend(colour=colour and sys.stderr.isatty()), file=sys.stderr, flush=True)

    def take(self, piece: Piece) -> None:
        """Shows what is new."""
        self._writer.write(piece, () if self._marks is None else self._marks.spans(piece))
        lines = self.trace.lines(piece)
        if self._tells:
            self._lines += lines
            if not self._late:
                self._flush()

    def end(self) -> None:
        """Ends the last line and tells what was kept back."""
        self._writer.end()
        self._flush()

    def _flush(self) -> None:
        if self._lines:
            print("\n".join(self._lines), file=sys.stderr, flush=True)
            self._lines.clear()


class _Writer:
    """Writes text to standard output piece by piece and ends the last line."""

    def __init__(self, silent: bool, *, colour: bool = False) -> None:
        self._silent = silent
        self._colour = colour
        self._terminal = sys.stdout.isatty()
        self._last = "\n"

    def write(self, text: str, spans: Sequence[run_view.Span] = ()) -> None:
        """Writes a piece of text; as `spans`, which are the same text, with marks."""
        if self._silent or not text:
            return
        # First, since Ctrl-C may come while the text is on its way.
        self._last = text[-1]
        shown = [run_view.marked(span._replace(text=self._visible(span.text)), colour=self._colour) for span in spans]
        sys.stdout.write("".join(shown) if spans else self._visible(text))
        sys.stdout.flush()

    def end(self) -> None:
        """Ends the last line."""
        if self._last != "\n":
            self.write("\n")

    def _visible(self, text: str) -> str:
        return text.translate(_VISIBLE) if self._terminal else text


def _prefill_rate(stats: RequestStats) -> float | None:
    """Prompt tokens that were computed, per second from the first step to the first token."""
    if stats.first_token_seconds is None:
        return None
    seconds = stats.first_token_seconds - stats.queue_seconds
    return (stats.prompt_tokens - stats.cached_tokens) / seconds if seconds > 0 else None


def _describe(name: str, output: RequestOutput) -> dict[str, object]:
    stats = output.stats
    return {
        "model": name,
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "stats": {
            "prefill_tokens_per_s": _prefill_rate(stats),
            "decode_tokens_per_s": stats.decode_tokens_per_second,
            "first_token_s": stats.first_token_seconds,
            "total_s": stats.total_seconds,
            "steps": stats.steps,
            "preemptions": stats.preemptions,
        },
    }


def _print_statistics(output: RequestOutput, *, sampled: bool, why_nothing: str | None) -> None:
    stats = output.stats
    prefill, decode = _prefill_rate(stats), stats.decode_tokens_per_second
    first = stats.first_token_seconds
    parts = [
        f"prompt {_count(stats.prompt_tokens)}" + (f" at {prefill:.0f}/s" if prefill else ""),
        f"output {_count(stats.output_tokens)}" + (f" at {decode:.1f}/s" if decode else ""),
    ]
    if first is not None:
        parts.append(f"first token after {first:.2f} s")
    parts.append(run_view.summary(stats.speculation, why_nothing))
    if sampled:
        parts.append(f"seed {output.seed}")
    parts.append(f"finish: {output.finish_reason}")
    _note(", ".join(parts))


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _may_style() -> bool:
    """Whether a terminal understands colours, and its user wants them."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _one_place() -> bool:
    """Whether standard output and standard error are the same terminal, pipe or file."""
    try:
        first, second = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError):
        # A stream without a descriptor stands in: this process is someone else's.
        return False
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def _note(text: str) -> None:
    console = Console(stderr=True, highlight=False, soft_wrap=True, color_system="auto" if _may_style() else None)
    console.print(text, style="dim", markup=False)
