"""The engine: one loop that plans, runs the model, chooses tokens and commits them."""

from __future__ import annotations

import itertools
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.engine.batch import StepBatch
from forerun.engine.checks import (
    Message,
    Prompt,
    check_kv_memory,
    check_tokenizer,
    checked_ids,
    checked_params,
    listed_conversations,
    listed_prompts,
    params_for_each,
    setting,
)
from forerun.engine.executor import Executor
from forerun.engine.live import LiveRequest
from forerun.engine.output import EngineStats, Piece, RequestOutput, TokenLogprob
from forerun.engine.request import FinishReason, Request, RowPlan
from forerun.engine.sampler import Sampler
from forerun.engine.scheduler import Scheduler
from forerun.errors import CapacityError, ConfigurationError, ForerunError, InvalidRequestError, NumericalError
from forerun.kv import BlockPool, BlockTable, PoolExhausted, PrefixCache
from forerun.models.catalog import cache_dir
from forerun.models.download import resolve
from forerun.models.source import open_model
from forerun.ops import StepInput
from forerun.sample.params import SamplingParams

BLOCK = 16
"""Tokens of a KV block."""

_SCORE_CHUNK = 64


class Scores(NamedTuple):
    """Teacher-forced scores: row t is about position t + 1.

    ids: int32[T, top], the most probable next tokens, best first. logprobs: float32[T, top], natural logarithms.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


class RequestHandle:
    """A submitted request. Iterate for its pieces, or ask for the `result`; both drive the engine as needed."""

    def __init__(self, engine: Engine, live: LiveRequest) -> None:
        self._engine = engine
        self._live = live

    @property
    def request_id(self) -> str:
        """The request's id."""
        return self._live.request.request_id

    def __iter__(self) -> Iterator[Piece]:
        while True:
            piece = self._engine._next_piece(self._live)
            if piece is None:
                return
            yield piece

    def result(self) -> RequestOutput:
        """The finished output. Raises what ended the request, if it was an error."""
        while not self._live.request.finished:
            self._engine._advance(self._live)
        return self._live.output()

    def cancel(self) -> None:
        """Ends the request now and frees its memory; other requests are not touched. A finished one stays as it is."""
        self._engine._cancel(self._live)


class Engine:
    """A model that answers requests together, in one batch that changes from step to step.

    Args:
        model: catalog name, path of a .gguf file, or a folder with config.json, safetensors and tokenizer.json.
        kv_tokens: tokens whose keys and values fit in memory at once, over all requests (rounded down to blocks of 16).
        threads: native threads; None: one per physical core (or FORERUN_THREADS).
        max_model_len: longest prompt plus answer; None: the model's context, at most `kv_tokens`.
        max_rows: requests that run at the same time.
        max_step_tokens: query tokens of one step: prompts longer than this are computed in chunks.
        prefix_cache: keep the KV of finished requests for prompts that begin alike.
        cache_weights: keep packed weights on disk, so that the next start maps them.

    Output is a function of the model, prompt, parameters and seed alone: not of the other requests, of chunking,
    preemption or cached prefixes. Methods may be called from several threads; steps run one at a time.

    Raises `ModelNotFoundError`, `ModelFormatError`, `UnsupportedModelError`, `DownloadError`, `CacheError` for the
    model and `ConfigurationError` for a setting.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        kv_tokens: int = 8192,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_rows: int = 32,
        max_step_tokens: int = 512,
        prefix_cache: bool = True,
        cache_weights: bool = True,
    ) -> None:
        kv_blocks = setting("kv_tokens", kv_tokens, BLOCK, 2**31 - BLOCK) // BLOCK
        max_rows = setting("max_rows", max_rows, 1, 4096)
        max_step_tokens = setting("max_step_tokens", max_step_tokens, 1, 1 << 16)
        if not isinstance(model, str | Path):
            raise ConfigurationError(
                f"model must be a catalog name or the path of a .gguf file or a folder, got {type(model).__name__}"
            )
        # Tensors that the executor keeps outlive the source.
        with open_model(resolve(model)) as source:
            self.config = source.config
            check_kv_memory(self.config, kv_blocks, BLOCK)
            self.tokenizer = source.tokenizer()
            check_tokenizer(self.tokenizer, self.config)
            self.chat_template = source.chat_template()
            self.max_model_len = _model_len(max_model_len, self.config.context_length, kv_blocks)
            self.pool = BlockPool(kv_blocks, BLOCK)
            self.prefix_cache = PrefixCache(self.pool) if prefix_cache else None
            self.scheduler = Scheduler(
                self.pool, self.prefix_cache,
                max_step_tokens=max_step_tokens, max_rows=max_rows, max_model_len=self.max_model_len,
            )  # fmt: skip
            max_outputs = max(max_rows, _SCORE_CHUNK)
            self.executor = Executor(
                source,
                kv_blocks=kv_blocks,
                max_positions=self.max_model_len,
                max_tokens=max(max_step_tokens, _SCORE_CHUNK),
                max_outputs=max_outputs,
                threads=threads,
                cache=cache_dir() if cache_weights else None,
            )
        width = min(kv_blocks, -(-self.max_model_len // BLOCK))
        self.batch = StepBatch(
            max_rows=max_rows,
            max_tokens=max_step_tokens,
            max_outputs=max_outputs,
            table_width=width,
        )
        self.sampler = Sampler()
        self._argmax = np.zeros(max_outputs, dtype=np.int32)
        self._live: dict[str, LiveRequest] = {}
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._stepping = False
        self._doomed: list[LiveRequest] = []  # cancelled within a step, by the thread that runs it
        self._steps = self._computed = self._emitted = self._preemptions = 0
        self._step_seconds = 0.0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts (text, or token ids) together; outputs are in the order of the prompts.

        A text prompt gets the tokens that the model expects at its start (a BOS token, for some). One set of
        parameters serves all prompts, or there is one for each. Raises `InvalidRequestError` or `CapacityError` before
        anything runs if a prompt can't be served.
        """
        return self._run(listed_prompts(prompts), params)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}. Raises `InvalidRequestError` when the model has no
        template or the template refuses the messages.
        """
        return self._run([self.chat_ids(c, template_options) for c in listed_conversations(messages)], params)

    def chat_ids(self, messages: Sequence[Message], template_options: Mapping[str, Any] | None = None) -> list[int]:
        """A conversation as prompt tokens, ready for the answer."""
        if self.chat_template is None:
            raise InvalidRequestError("this model has no chat template; use generate() or stream() with a plain prompt")
        text = self.chat_template.render(messages, add_generation_prompt=True, **(template_options or {}))
        # The template writes the special tokens itself, a BOS token included.
        ids = self.tokenizer.encode(text, add_special=False)
        bos = self.tokenizer.bos_id
        if self.tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields the answer as it grows, in pieces that never split a character; closing the iterator cancels it."""
        handle = self.submit(prompt, params)
        try:
            yield from handle
        finally:
            handle.cancel()

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
    ) -> Iterator[Piece]:
        """`stream` for a conversation."""
        return self.stream(self.chat_ids(messages, template_options), params)

    def submit(
        self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None
    ) -> RequestHandle:
        """Queues a request; it runs whenever the engine steps.

        Raises `InvalidRequestError` or `CapacityError` now if it can't be served as it is.
        """
        params = checked_params(params, self.config.vocab_size)
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequestError(f"request_id={request_id!r} is not allowed; expected a text, or None")
        ids = self._prompt_ids(prompt)
        with self._lock:
            name = request_id or self._unused_id()
            live = LiveRequest(Request(name, ids, params), params, _seed(params), self.tokenizer)
            self.scheduler.add(live.request)
            self._live[name] = live
        return RequestHandle(self, live)

    def fork(self, handle: RequestHandle, params: SamplingParams | None = None) -> RequestHandle:
        """A second request that goes on from a live one's tokens and shares their KV (copied only where they part).

        The output so far counts as the fork's own. `params` None continues exactly like the parent. Raises
        `InvalidRequestError` if the request has ended, or if log-probabilities are asked for that its output so far
        doesn't have.
        """
        twin = params is None
        params = handle._live.params if params is None else checked_params(params, self.config.vocab_size)
        with self._lock:
            parent = handle._live
            if parent.request.finished:
                raise InvalidRequestError(f"request {handle.request_id!r} has ended; only a live request can be forked")
            if params.logprobs is not None and parent.params.logprobs is None and parent.request.n_output:
                raise InvalidRequestError(
                    f"the output of request {handle.request_id!r} so far has no log-probabilities, so a fork can't "
                    "have them; ask for logprobs when the parent is submitted"
                )
            seed = parent.seed if twin else _seed(params)
            request = self.scheduler.fork(parent.request, self._unused_id(), params)
            live = parent.fork(request, params, seed)
            self._live[request.request_id] = live
        return RequestHandle(self, live)

    def score(self, token_ids: Sequence[int], top: int = 64) -> Scores:
        """The most probable next tokens after each token of a text, the text itself being given (teacher forcing).

        Returns ids int32[T, top] and natural log-probabilities float32[T, top]; row t is about position t + 1. Needs
        free KV for T tokens while it runs; raises `CapacityError` otherwise, `NumericalError` where the model's scores
        are not numbers.
        """
        vocabulary = self.config.vocab_size
        ids = checked_ids(token_ids, vocabulary, "what is scored must be a sequence of token ids")
        top = setting("top", top, 1, vocabulary, InvalidRequestError)
        if len(ids) > self.max_model_len:
            raise CapacityError(
                f"{len(ids)} tokens to score, but the context holds {self.max_model_len}; score fewer, or raise "
                "max_model_len"
            )
        all_ids = np.empty((len(ids), top), dtype=np.int32)
        all_logprobs = np.empty((len(ids), top), dtype=np.float32)
        with self._lock, BlockTable(self.pool) as table:
            try:
                table.append_slots(len(ids))
            except PoolExhausted:
                raise CapacityError(
                    f"{len(ids)} tokens to score, but KV for only {table.room(len(ids))} is free; raise kv_tokens "
                    f"(now {self.pool.capacity_tokens}), or wait for running requests"
                ) from None
            for start in range(0, len(ids), _SCORE_CHUNK):
                tokens = np.array(ids[start : start + _SCORE_CHUNK], dtype=np.int32)
                n = len(tokens)
                step = StepInput.chain(tokens, start, table.blocks, n)
                logits = self.executor.forward(step, n, self._argmax[:n])
                best = self.sampler.top_logprobs(logits, top, tokens)
                broken = np.flatnonzero(best.ids[:, 0] < 0)
                if len(broken):
                    raise NumericalError(f"scoring: {_not_numbers(start + int(broken[0]) + 1)}")
                all_ids[start : start + n] = best.ids
                all_logprobs[start : start + n] = best.logprobs
        return Scores(all_ids, all_logprobs)

    def step(self) -> bool:
        """Runs one step for whoever has work: plan, forward, choose, commit. Returns whether there was any."""
        with self._lock:
            if not self.scheduler.has_work:
                return False
            began = time.perf_counter()
            self._stepping = True
            try:
                self._step(began)
            except BaseException:
                self._abandon()
                raise
            finally:
                self._step_seconds += time.perf_counter() - began
                self._stepping = False
                while self._doomed:
                    self._cancel(self._doomed.pop())
            return True

    def _abandon(self) -> None:
        """Nothing that a broken step wrote is trusted: its requests wait, to be computed again."""
        self.scheduler.abandon()
        for request in self.scheduler.waiting:
            self.batch.leave(request)

    def _step(self, began: float) -> None:
        plan = self.scheduler.plan()
        for request in plan.preempted:
            self.batch.leave(request)
            self._preemptions += 1
        for copy in plan.copies:
            self.executor.kv.copy_block(copy.src_block, copy.dst_block)
        lives = [self._live[row.request.request_id] for row in plan.rows]
        for live in lives:
            live.started(began)
        # Rows whose logits are needed come first; the others only need the largest.
        outputs = [i for i, row in enumerate(plan.rows) if row.samples and lives[i].needs_logits]
        n_logits = len(outputs)
        outputs += [i for i, row in enumerate(plan.rows) if row.samples and not lives[i].needs_logits]
        step = self.batch.load(plan, outputs)
        chosen = self._argmax[: len(outputs)]
        logits = self.executor.forward(step, n_logits, chosen)
        logprobs = self.sampler.choose([lives[i] for i in outputs[:n_logits]], logits, chosen)
        tokens = dict(zip(outputs, chosen.tolist(), strict=True))
        details = dict(zip(outputs, logprobs, strict=False))
        now = time.perf_counter()
        for i, row in enumerate(plan.rows):
            self._commit(row, lives[i], tokens.get(i), details.get(i), now)
        self._steps += 1
        self._computed += plan.n_tokens

    def _commit(
        self,
        row: RowPlan,
        live: LiveRequest,
        token: int | None,
        detail: TokenLogprob | None,
        now: float,
    ) -> None:
        if token is None:
            self.scheduler.commit(row, ())
            return
        if token < 0:
            where = _not_numbers(len(live.request.tokens))
            live.fail(NumericalError(f"request {live.request.request_id!r}: {where}"))
            self._finish(live, "error", now)
            return
        self.scheduler.commit(row, (token,))
        self._emitted += 1
        try:
            reason = live.accept(token, detail, now)
        except BaseException as error:
            # The token is committed, its text isn't: such a request can't go on.
            live.fail(ForerunError(
                f"request {live.request.request_id!r}: {type(error).__name__} while its text was taken in; submit it "
                "again"
            ))  # fmt: skip
            self._finish(live, "error", now)
            raise
        if reason is not None:
            self._finish(live, reason, now)

    def _finish(self, live: LiveRequest, reason: FinishReason, now: float) -> None:
        self.scheduler.finish(live.request, reason)
        self.batch.leave(live.request)
        self._live.pop(live.request.request_id, None)
        live.ended(now)

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
        with self._lock:
            return EngineStats(
                steps=self._steps,
                computed_tokens=self._computed,
                emitted_tokens=self._emitted,
                step_seconds=self._step_seconds,
                native_seconds=self.executor.native_seconds,
                preemptions=self._preemptions,
                prefix_hit_tokens=self.prefix_cache.stats.hit_tokens if self.prefix_cache else 0,
                kv_blocks=self.pool.n_blocks,
                kv_blocks_used=self.pool.n_blocks - self.pool.n_free,
                weight_bytes=self.executor.weight_bytes,
                kv_bytes=self.executor.kv.bytes,
            )

    def check_integrity(self) -> None:
        """Verifies the books of the KV pool, prefix cache and scheduler; raises `KVIntegrityError`."""
        with self._lock:
            self.scheduler.check_integrity()

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestOutput]:
        each = params_for_each(params, len(prompts))
        handles: list[RequestHandle] = []
        try:
            for prompt, p in zip(prompts, each, strict=True):
                handles.append(self.submit(prompt, p))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def _next_piece(self, live: LiveRequest) -> Piece | None:
        while True:
            with self._lock:
                piece = live.take_piece()
                if piece is not None:
                    return piece
                if live.request.finished:
                    live.raise_error()
                    return None
            self._advance(live)

    def _advance(self, live: LiveRequest) -> None:
        with self._lock:
            if not live.request.finished:
                self.step()

    def _cancel(self, live: LiveRequest) -> None:
        with self._lock:
            if live.request.finished:
                return
            if self._stepping:
                # A generator that is collected, or a signal's handler, within this very thread's step.
                self._doomed.append(live)
            else:
                self._finish(live, "cancelled", time.perf_counter())

    def _unused_id(self) -> str:
        return next(name for n in self._ids if (name := f"request-{n}") not in self._live)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return checked_ids(prompt, self.config.vocab_size, "a prompt is text or a sequence of token ids")


def _model_len(wanted: int | None, context: int, kv_blocks: int) -> int:
    if wanted is None:
        return min(context, kv_blocks * BLOCK)
    length = setting("max_model_len", wanted, 1, 2**31 - 1)
    if length > context:
        raise ConfigurationError(
            f"max_model_len={length} is above the model's context of {context} tokens; lower it, or leave it out"
        )
    return length


def _seed(params: SamplingParams) -> int:
    return secrets.randbits(64) if params.seed is None else params.seed


def _not_numbers(position: int) -> str:
    return (
        f"the model's scores are not numbers at position {position}: the weights are damaged or the activations "
        "overflow; download the model again, or use another one"
    )
