"""The work behind the endpoints: understand a request, submit it, and turn its events into answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from forerun.engine.output import Piece, RequestOutput
from forerun.engine.spans import DraftMarks
from forerun.models.tokenizer import Tokenizer
from forerun.serve.convert import Asked, chat_params, completion_params
from forerun.serve.driver import Ended, EngineDriver, Job, Ticket
from forerun.serve.errors import ApiError, api_error
from forerun.serve.ids import answer_id
from forerun.serve.protocol import ChatCompletionRequest, CompletionRequest, Sampling
from forerun.serve.replies import DONE, Logprobs, ToolText, event, finish_reason, usage_of

MAX_PROMPTS = 128


class Service:
    """Answers requests with one driver.

    name: of the model, as clients call it. aliases: other names that are accepted. tool_format: how the model writes
    calls.
    """

    def __init__(
        self, driver: EngineDriver, name: str, *, aliases: Sequence[str] = (), tool_format: str = "qwen"
    ) -> None:
        self.driver = driver
        self.name = name
        self.names = (name, *aliases)
        self.tool_format = tool_format
        self.created = int(time.time())
        self.logprobs = Logprobs(self.tokenizer)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's."""
        return self.driver.engine.tokenizer

    def check_model(self, model: str | None) -> None:
        """Raises ApiError unless the request means the model that is served."""
        if model is not None and model not in self.names:
            raise ApiError(
                404, f"the model {model!r} isn't served here; this server has {self.name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip

    async def complete(self, request: CompletionRequest) -> Answer:
        """Begins a text completion. Raises ApiError or what the engine refuses."""
        self.check_model(request.model)
        asked, prompts, echoes = await asyncio.to_thread(self._completion, request)
        tickets = self._submit(request, asked, prompts)
        return CompletionAnswer(self, request, asked, tickets, echoes)

    async def chat(self, request: ChatCompletionRequest) -> Answer:
        """Begins a chat completion. Raises ApiError or what the engine refuses."""
        self.check_model(request.model)
        asked, ids = await asyncio.to_thread(self._conversation, request)
        return ChatAnswer(self, request, asked, self._submit(request, asked, [ids]), [])

    def _completion(self, request: CompletionRequest) -> tuple[Asked, list[list[int]], list[str]]:
        """Parameters, prompts and what is echoed of them; may take a while."""
        asked = completion_params(request)
        prompts = self._prompts(request.prompt)
        return asked, prompts, [self.decoded(ids, "prompt") for ids in prompts] if request.echo else []

    def _conversation(self, request: ChatCompletionRequest) -> tuple[Asked, list[int]]:
        """Parameters and prompt; may take a while."""
        return chat_params(request, self.tool_format), self.chat_ids(request)

    def decoded(self, ids: Sequence[int], param: str) -> str:
        """The text of tokens that a client sent as `param`. Raises ApiError for what is no token."""
        size = self.tokenizer.vocab_size
        wrong = next((token for token in ids if not 0 <= token < size), None)
        if wrong is not None:
            raise ApiError(400, f"token {wrong} is not allowed; expected 0 to {size - 1}", param=param)
        return self.tokenizer.decode(ids, skip_special=False)

    def chat_ids(self, request: ChatCompletionRequest) -> list[int]:
        """The tokens of a conversation; may take a while."""
        options: dict[str, Any] = dict(request.chat_template_kwargs or {})
        taken = options.keys() & {"messages", "tools", "add_generation_prompt", "self"}
        if taken:
            raise ApiError(
                400,
                f"chat_template_kwargs can't set {min(taken)}; the request has it, or the server",
                param="chat_template_kwargs",
            )
        if request.tools and request.tool_choice != "none":
            options["tools"] = [tool.model_dump(exclude_none=True) for tool in request.tools]
        return self.driver.engine.chat_ids(request.messages, options)

    def _prompts(self, prompt: str | list[str] | list[int] | list[list[int]]) -> list[list[int]]:
        if isinstance(prompt, str):
            prompts: list[str | list[int]] = [prompt]
        elif prompt and all(isinstance(item, int) for item in prompt):
            prompts = [prompt]  # type: ignore[list-item]
        else:
            prompts = list(prompt)  # type: ignore[arg-type]
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise ApiError(400, f"{len(prompts)} prompts; expected 1 to {MAX_PROMPTS}", param="prompt")
        return [self.tokenizer.encode(item) if isinstance(item, str) else item for item in prompts]

    def _submit(self, request: Sampling, asked: Asked, prompts: Sequence[Sequence[int]]) -> list[Ticket]:
        if request.timeout is not None and not 0 < request.timeout < 1e6:
            raise ApiError(400, f"timeout={request.timeout} is not allowed; expected seconds above 0", param="timeout")
        if request.show_drafts and not request.stream:
            raise ApiError(400, "show_drafts needs stream: true", param="show_drafts")
        tickets: list[Ticket] = []
        try:
            for index, ids in enumerate(prompts):
                params = asked.params
                if params.seed is not None and index:
                    params = replace(params, seed=(params.seed + index) % 2**64)
                job = Job(ids, params, request.speculate, request.draft_len, request.user, request.timeout)
                tickets.append(self.driver.submit(job))
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets


class Answer:
    """An answer that is being made: whole (`body`), or as a stream (`events`). `cancel` ends it."""

    kind: str
    chunk_object: str
    whole_object: str

    def __init__(
        self, service: Service, request: Sampling, asked: Asked, tickets: Sequence[Ticket], echoes: Sequence[str]
    ) -> None:
        self.service = service
        self.request = request
        self.asked = asked
        self.tickets = tickets
        self.echoes = echoes
        self.id = answer_id(self.kind)
        self.created = int(time.time())
        self._marks: dict[int, DraftMarks] = {}

    def cancel(self) -> None:
        """Ends what hasn't ended."""
        for ticket in self.tickets:
            ticket.cancel()

    async def body(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError."""
        try:
            outputs = [await ticket.result() for ticket in self.tickets]
        except Exception as error:
            raise api_error(error) from error
        finally:
            self.cancel()
        n = self.asked.params.n
        choices = [
            self.choice(which * n + sample.sample_index, which, sample)
            for which, output in enumerate(outputs)
            for sample in output.samples
        ]
        return {**self._head(self.whole_object), "choices": choices, "usage": usage_of(outputs)}

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: one for each step and text. Raises ApiError before the first; later errors are events."""
        began = False
        outputs: list[RequestOutput] = []
        options = self.request.stream_options
        n = self.asked.params.n
        try:
            async for which, happening in _merged(self.tickets):
                if isinstance(happening, Ended):
                    if happening.output is None:
                        assert happening.error is not None
                        raise happening.error
                    outputs.append(happening.output)
                    continue
                if not began:
                    began = True
                    for index in range(len(self.tickets) * n):
                        opening = self.opening(index, index // n)
                        if opening is not None:
                            yield self._chunk(index, opening, None, None)
                for piece in happening:
                    index = which * n + piece.sample_index
                    delta, logprobs, reason = self.delta(index, piece)
                    drafts = self._drafts(index, piece) if self.request.show_drafts else None
                    if delta is not None or logprobs is not None or reason is not None or drafts:
                        yield self._chunk(index, delta or {}, logprobs, reason, drafts)
            if options is not None and options.include_usage:
                yield event({**self._head(self.chunk_object), "choices": [], "usage": usage_of(outputs)})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            refused = api_error(error)
            if not began:
                raise refused from error
            yield event(refused.body)
        finally:
            self.cancel()
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.name,
            "system_fingerprint": None,
        }

    def _drafts(self, index: int, piece: Piece) -> list[dict[str, str]]:
        """The piece's text in stretches of where its tokens came from."""
        marks = self._marks.get(index)
        if marks is None:
            params = self.asked.params
            marks = self._marks[index] = DraftMarks(
                self.service.tokenizer,
                skip_special=params.skip_special_tokens,
                keep_space=params.constraint is not None,
            )
        return [{"text": span.text, "origin": span.origin} for span in marks.spans(piece)]

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: str | None,
        drafts: list[dict[str, str]] | None = None,
    ) -> bytes:
        choice = {"index": index, **self.wrapped(delta), "logprobs": logprobs, "finish_reason": reason}
        if drafts is not None:
            choice["drafts"] = drafts
        return event({**self._head(self.chunk_object), "choices": [choice]})

    def wrapped(self, delta: dict[str, Any]) -> dict[str, Any]:
        """A chunk's delta where its kind of answer has it."""
        raise NotImplementedError

    def opening(self, index: int, which: int) -> dict[str, Any] | None:
        """The delta before a text's first piece, if there is one."""
        raise NotImplementedError

    def delta(self, index: int, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any] | None, str | None]:
        """What a piece adds: delta, log-probabilities, finish reason."""
        raise NotImplementedError

    def choice(self, index: int, which: int, sample: RequestOutput) -> dict[str, Any]:
        """A finished text."""
        raise NotImplementedError


class CompletionAnswer(Answer):
    """A text completion."""

    kind = "cmpl"
    chunk_object = whole_object = "text_completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._offsets: dict[int, int] = {}

    def wrapped(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("text", "")}

    def opening(self, index: int, which: int) -> dict[str, Any] | None:  # noqa: ARG002
        return {"text": self.echoes[which]} if self.echoes else None

    def delta(self, index: int, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any] | None, str | None]:
        logprobs = None
        if piece.logprobs:
            logprobs = self.service.logprobs.completion(piece.logprobs, self._offsets.get(index, 0))
            self._offsets[index] = logprobs["text_offset"][-1] + len(logprobs["tokens"][-1])
        return ({"text": str(piece)} if piece else None), logprobs, finish_reason(piece)

    def choice(self, index: int, which: int, sample: RequestOutput) -> dict[str, Any]:
        logprobs = self.service.logprobs.completion(sample.logprobs, 0) if sample.logprobs else None
        text = (self.echoes[which] if self.echoes else "") + sample.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(sample)}


class ChatAnswer(Answer):
    """A chat completion."""

    kind = "chatcmpl"
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        form = self.asked.tools
        self._tools = {i: ToolText(form) for i in range(self.asked.params.n)} if form is not None else {}

    def wrapped(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def opening(self, index: int, which: int) -> dict[str, Any] | None:  # noqa: ARG002
        return {"role": "assistant", "content": ""}

    def delta(self, index: int, piece: Piece) -> tuple[dict[str, Any] | None, dict[str, Any] | None, str | None]:
        logprobs = self.service.logprobs.chat(piece.logprobs) if piece.logprobs else None
        tools = self._tools.get(index)
        if tools is None:
            return ({"content": str(piece)} if piece else None), logprobs, finish_reason(piece)
        content, calls = tools.push(piece, last=piece.finish_reason is not None)
        delta = {**({"content": content} if content else {}), **({"tool_calls": calls} if calls else {})}
        return delta or None, logprobs, finish_reason(piece, tools.n_calls)

    def choice(self, index: int, which: int, sample: RequestOutput) -> dict[str, Any]:  # noqa: ARG002
        message: dict[str, Any] = {"role": "assistant", "content": sample.text, "refusal": None}
        n_calls = 0
        if self.asked.tools is not None:
            content, calls = ToolText(self.asked.tools).push(sample.text, last=True)
            n_calls = len(calls)
            if calls:
                message["content"] = content or None
                message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        logprobs = self.service.logprobs.chat(sample.logprobs) if sample.logprobs else None
        return {
            "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason(sample, n_calls),
        }  # fmt: skip


async def _merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, list[Piece] | Ended]]:
    """Events of several requests as they come, each with the number of its request, until all have ended."""
    if len(tickets) == 1:
        async for happening in tickets[0]:
            yield 0, happening
        return
    waits: dict[asyncio.Task[Any], int] = {}
    try:
        for which, ticket in enumerate(tickets):
            waits[asyncio.ensure_future(ticket.events.get())] = which
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waits.__getitem__):
                which = waits.pop(task)
                happening = task.result()
                yield which, happening
                if not isinstance(happening, Ended):
                    waits[asyncio.ensure_future(tickets[which].events.get())] = which
    finally:
        for task in waits:
            task.cancel()
