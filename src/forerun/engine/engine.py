"""The engine: one loop that plans, runs the model, chooses tokens and commits them."""

from __future__ import annotations

import itertools
import math
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.constrain.compiler import Grammar, GrammarCompiler
from forerun.constrain.spec import Constraint
from forerun.draft.base import MAX_NODES, Drafter
from forerun.draft.registry import DraftContext, DrafterFactory, drafter_factory
from forerun.engine.auto import AutoPace
from forerun.engine.batch import StepBatch
from forerun.engine.beam_output import BeamOutput
from forerun.engine.beam_rules import BeamRules, EarlyStopping
from forerun.engine.beams import LiveBeam, beam_params
from forerun.engine.checks import (
    Message,
    Prompt,
    check_ends,
    check_fork,
    checked_ids,
    checked_params,
    checked_scope,
    listed_conversations,
    listed_prompts,
    model_length,
    params_for_each,
)
from forerun.engine.choose import Chooser, not_numbers
from forerun.engine.fairness import PromptShare
from forerun.engine.handle import RequestHandle
from forerun.engine.live import LiveRequest
from forerun.engine.loop import Loop
from forerun.engine.masks import StepMasks
from forerun.engine.output import EngineStats, Piece, RequestOutput
from forerun.engine.pace import FixedPace, Pace
from forerun.engine.request import Request
from forerun.engine.scheduler import Scheduler
from forerun.engine.speculate import Speculator
from forerun.engine.steptime import StepTimes, step_times
from forerun.errors import CapacityError, ConfigurationError, InvalidRequestError, NumericalError
from forerun.kv import BlockPool, BlockTable, PoolExhausted, PrefixCache
from forerun.models.catalog import cache_dir
from forerun.models.checks import check_kv_memory, check_tokenizer, setting
from forerun.models.download import resolve
from forerun.models.executor import Executor
from forerun.models.source import open_model
from forerun.ops import BLOCK, StepInput
from forerun.sample.params import SamplingParams

_SCORE_CHUNK = 64


class Scores(NamedTuple):
    """Teacher-forced scores: row t is about position t + 1.

    ids: int32[T, top], the most probable next tokens, best first. logprobs: float32[T, top], natural logarithms.
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]


class Engine:
    """A model that answers requests together, in one batch that changes from step to step.

    Args:
        model: catalog name, path of a .gguf file, or a folder with config.json, safetensors and tokenizer.json.
        kv_tokens: tokens whose keys and values fit in memory at once, over all requests (rounded down to blocks of 16).
        threads: native threads; None: one per physical core (or FORERUN_THREADS).
        max_model_len: longest prompt plus answer; None: the model's context, at most `kv_tokens`.
        max_rows: requests that run at the same time.
        max_step_tokens: query tokens of one step: prompts longer than this are computed in chunks.
        prompt_slowdown: how many times as long a step may take because it computes prompts beside requests that
            decode, by the step times of this machine: so a long prompt comes in smaller chunks and stops nobody. None:
            as much as the step has room for, which is over soonest.
        prefix_cache: keep the KV of finished requests for prompts that begin alike.
        cache_weights: keep packed weights on disk, so that the next start maps them.
        draft: what proposes tokens ahead of the model: "suffix", "lookup", "model:NAME", "combined:NAME", "none", the
            name of a registered drafter, or a `Drafter`.
            Where nothing can ever be drafted, "suffix" is off and the others are refused.
        draft_len: draft tokens per request and step; "auto" chooses them so that the expected speed is highest, from
            step times that the first start measures (about 2 s) and keeps beside the packed weights; with
            `cache_weights` off, every start measures.
        shared_bytes: the most memory that finished texts may take which later requests' drafts copy from, at least
            65,536; 0: none are kept. A `Drafter` that is handed over has its own.

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
        prompt_slowdown: float | None = None,
        prefix_cache: bool = True,
        cache_weights: bool = True,
        draft: str | Drafter = "suffix",
        draft_len: int | Literal["auto"] = "auto",
        shared_bytes: int = 64 << 20,
    ) -> None:
        kv_blocks = setting("kv_tokens", kv_tokens, BLOCK, 2**31 - BLOCK) // BLOCK
        max_rows = setting("max_rows", max_rows, 1, 4096)
        max_step_tokens = setting("max_step_tokens", max_step_tokens, 1, 1 << 16)
        if prompt_slowdown is not None and not 1 < prompt_slowdown < math.inf:
            raise ConfigurationError(f"prompt_slowdown={prompt_slowdown} is not allowed; expected above 1, or None")
        shared_bytes = setting("shared_bytes", shared_bytes, 0, 1 << 40)
        factory = drafter_factory(draft)
        length = (
            None
            if isinstance(draft_len, str) and draft_len == "auto"
            else setting("draft_len", draft_len, 1, MAX_NODES)
        )
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
            fingerprint = source.fingerprint()
            self.max_model_len = model_length(max_model_len, self.config.context_length, kv_blocks)
            self.pool = BlockPool(kv_blocks, BLOCK)
            self.prefix_cache = PrefixCache(self.pool) if prefix_cache else None
            self.scheduler = Scheduler(
                self.pool, self.prefix_cache,
                max_step_tokens=max_step_tokens, max_rows=max_rows, max_model_len=self.max_model_len,
            )  # fmt: skip
            max_outputs = max(max_step_tokens, _SCORE_CHUNK)
            self.executor = Executor(
                source,
                kv_blocks=kv_blocks,
                max_positions=self.max_model_len,
                max_tokens=max_outputs,
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
        self.chooser = Chooser()
        self._argmax = np.zeros(_SCORE_CHUNK, dtype=np.int32)
        self._ids = itertools.count()
        self.speculator: Speculator | None = None
        can_draft = max_step_tokens >= 2 and self.max_model_len >= 4
        if factory is not None and not can_draft and draft != "suffix":
            raise ConfigurationError(
                f"max_step_tokens={max_step_tokens} and max_model_len={self.max_model_len} leave no room for a draft, "
                "which takes at least 2 and 4; raise them, or set draft='none'"
            )
        if factory is not None and can_draft:
            context = DraftContext(
                argument="",
                config=self.config,
                tokenizer=self.tokenizer,
                kv_tokens=self.pool.capacity_tokens,
                max_model_len=self.max_model_len,
                max_rows=max_rows,
                max_step_tokens=max_step_tokens,
                threads=self.executor.tape.threads,
                cache=cache_dir() if cache_weights else None,
                shared_bytes=shared_bytes,
            )
            self.speculator = self._speculator(factory, length, fingerprint, context)
        masks = StepMasks(self.config.vocab_size)
        self.compiler = GrammarCompiler(self.tokenizer)
        share = None
        if prompt_slowdown is not None:
            times = self._times(fingerprint, cache_dir() if cache_weights else None)
            share = PromptShare(times, prompt_slowdown)
        self.loop = Loop(self.scheduler, self.batch, self.executor, self.chooser, self.speculator, masks, share)
        weakref.finalize(self.loop, _close, self.compiler, masks).atexit = False
        if self.speculator is not None:
            # The loop outlives the engine where a handle is still used.
            weakref.finalize(self.loop, self.speculator.close).atexit = False

    def _times(self, fingerprint: str, cache: Path | None) -> StepTimes:
        """The step times of this engine: those that choose draft lengths, too, if there are any."""
        pace = self.speculator.pace if self.speculator is not None else None
        if isinstance(pace, AutoPace):
            return pace.times
        times = step_times(self.executor, fingerprint, cache)
        self.executor.native_seconds = 0.0
        return times

    def _speculator(
        self, factory: DrafterFactory, length: int | None, fingerprint: str, context: DraftContext
    ) -> Speculator:
        drafter = factory(context)
        try:
            if length is None:
                # Measuring doesn't count as a step's time.
                pace: Pace = AutoPace(step_times(self.executor, fingerprint, context.cache))
                self.executor.native_seconds = 0.0
            else:
                pace = FixedPace(length)
            return Speculator(drafter, pace, self.config.vocab_size)
        except BaseException:
            drafter.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        scope: str | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts (text, or token ids) together; outputs are in the order of the prompts.

        A text prompt gets the tokens that the model expects at its start (a BOS token, for some). One set of
        parameters serves all prompts, or there is one for each. `speculate` and `scope` are those of `submit`. Raises
        `InvalidRequestError` or `CapacityError` before anything runs if a prompt can't be served.
        """
        return self._run(listed_prompts(prompts), params, speculate=speculate, scope=scope)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_options: Mapping[str, Any] | None = None,
        speculate: bool = True,
        scope: str | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or several, through the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}. Raises `InvalidRequestError` when the model has no
        template or the template refuses the messages.
        """
        prompts = [self.chat_ids(c, template_options) for c in listed_conversations(messages)]
        return self._run(prompts, params, speculate=speculate, scope=scope)

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

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        scope: str | None = None,
        trace: bool = False,
    ) -> Iterator[Piece]:
        """Yields the answer as it grows, in pieces that never split a character; closing the iterator cancels it."""
        handle = self.submit(prompt, params, speculate=speculate, scope=scope, trace=trace)
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
        speculate: bool = True,
        scope: str | None = None,
        trace: bool = False,
    ) -> Iterator[Piece]:
        """`stream` for a conversation."""
        prompt = self.chat_ids(messages, template_options)
        return self.stream(prompt, params, speculate=speculate, scope=scope, trace=trace)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        speculate: bool = True,
        draft_len: int | None = None,
        scope: str | None = None,
        trace: bool = False,
    ) -> RequestHandle:
        """Queues a request; it runs whenever the engine steps.

        speculate: False leaves the drafter out of it. draft_len: the most draft tokens of a step, where the engine
        itself would choose more; 0 for none. scope: names the caller; neither cached prefixes nor texts that drafters
        remember are shared between scopes (None is one, too). trace: each piece tells how its draft lengths were
        chosen.

        Raises `InvalidRequestError` or `CapacityError` now if it can't be served as it is.
        """
        params = checked_params(params, self.config.vocab_size)
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequestError(f"request_id={request_id!r} is not allowed; expected a text, or None")
        scope = checked_scope(scope)
        for flag, value in (("speculate", speculate), ("trace", trace)):
            if not isinstance(value, bool | np.bool_):
                raise InvalidRequestError(f"{flag}={value!r} is not allowed; expected True or False")
        most = MAX_NODES if draft_len is None else setting("draft_len", draft_len, 0, MAX_NODES, InvalidRequestError)
        ids = self._prompt_ids(prompt)
        grammar = self._grammar(params)
        with self.loop.lock:
            name = request_id or self._unused_id()
            if name in self.loop.live:
                raise InvalidRequestError(f"a request with id {name!r} is still live; use another id")
            live = LiveRequest(Request(name, ids, params, salt=scope), params, _seed(params), self.tokenizer)
            live.speculate = bool(speculate) and self.speculator is not None
            live.max_draft = most
            live.traced = bool(trace)
            self.loop.submit(live, grammar)
        return RequestHandle(self.loop, live)

    def beam_search(
        self,
        prompt: Prompt,
        beams: int = 4,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        n_return: int | None = None,
        scope: str | None = None,
        **params: Any,
    ) -> BeamOutput:
        """The most probable texts that beam search finds, best score first, with Hugging Face's rules and defaults.

        `beams`, `length_penalty`, `early_stopping` and `n_return` are explained at `BeamRules`. `params` are fields of
        `SamplingParams`: max_tokens, constraint, penalties, logit_bias, bad_words, allowed_token_ids, min_tokens,
        stop_token_ids, ignore_eos and skip_special_tokens. Beams share the KV of what they have in common, and run
        beside other requests. Speculation isn't applied to them.

        Raises `InvalidRequestError` or `CapacityError` if it can't be served, `ConstraintError` if no beam can go on.
        """
        rules, sampling = BeamRules(beams, length_penalty, early_stopping, n_return), beam_params(params)
        sampling = checked_params(sampling, self.config.vocab_size)
        ids = self._prompt_ids(prompt)
        scope = checked_scope(scope)
        grammar = self._grammar(sampling)
        with self.loop.lock:
            request = Request(self._unused_id(), ids, sampling, salt=scope)
            live = LiveBeam(request, sampling, self.tokenizer, rules)
            self.loop.submit(live, grammar)
        return live.search.run(self.loop)

    def prepare_constraints(self, *constraints: Constraint) -> None:
        """Builds what all constraints share, compiles these, and waits for it, so that no request has to.

        What is shared takes noticeably long for a large vocabulary, and no other thread gets on meanwhile: a server
        calls this before it serves. Compiled constraints are kept, as many as fit in a cache. Raises
        `InvalidConstraintError` for one that can't be compiled.
        """
        self.compiler.prepare().result()
        for constraint in constraints:
            self.compiler.compile(constraint)

    def fork(self, handle: RequestHandle, params: SamplingParams | None = None) -> RequestHandle:
        """A second request that goes on from a live one's tokens and shares their KV (copied only where they part).

        The output so far counts as the fork's own. `params` None continues exactly like the parent. Raises
        `InvalidRequestError` if the request has ended, or if log-probabilities are asked for that its output so far
        doesn't have.
        """
        twin = params is None
        params = handle.live.params if params is None else checked_params(params, self.config.vocab_size)
        with self.loop.lock:
            parent = handle.live
            check_fork(parent, params)
            check_ends(params, self.tokenizer.eos_ids)
            seed = parent.seed if twin else _seed(params)
            live = self.loop.fork(parent, self._unused_id(), params, seed)
        return RequestHandle(self.loop, live)

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
        with self.loop.lock, BlockTable(self.pool) as table:
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
                best = self.chooser.top_logprobs(logits, np.arange(n, dtype=np.int32), top, tokens)
                broken = np.flatnonzero(best.ids[:, 0] < 0)
                if len(broken):
                    raise NumericalError(f"scoring: {not_numbers(start + int(broken[0]) + 1)}")
                all_ids[start : start + n] = best.ids
                all_logprobs[start : start + n] = best.logprobs
        return Scores(all_ids, all_logprobs)

    def step(self) -> bool:
        """Runs one step for whoever has work: plan, draft, forward, verify, commit. Returns whether there was any."""
        return self.loop.step()

    def stats(self) -> EngineStats:
        """Totals since the engine was made."""
        with self.loop.lock:
            return EngineStats(
                steps=self.loop.steps,
                computed_tokens=self.loop.tally.computed,
                emitted_tokens=self.loop.tally.emitted,
                step_seconds=self.loop.step_seconds,
                native_seconds=self.executor.native_seconds,
                preemptions=self.loop.preemptions,
                prefix_hit_tokens=self.prefix_cache.stats.hit_tokens if self.prefix_cache else 0,
                kv_blocks=self.pool.n_blocks,
                kv_blocks_used=self.pool.n_blocks - self.pool.n_free,
                weight_bytes=self.executor.weight_bytes,
                kv_bytes=self.executor.kv.bytes,
                speculation=self.loop.tally.stats(),
            )

    def check_integrity(self) -> None:
        """Verifies the books of the KV pool, prefix cache and scheduler; raises `KVIntegrityError`."""
        with self.loop.lock:
            self.scheduler.check_integrity()

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        speculate: bool,
        scope: str | None,
    ) -> list[RequestOutput]:
        each = params_for_each(params, len(prompts))
        handles: list[RequestHandle] = []
        try:
            for prompt, p in zip(prompts, each, strict=True):
                handles.append(self.submit(prompt, p, speculate=speculate, scope=scope))
            return [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def _grammar(self, params: SamplingParams) -> Future[Grammar] | None:
        if params.constraint is None:
            return None
        check_ends(params, self.tokenizer.eos_ids)
        return self.compiler.submit(params.constraint)

    def _unused_id(self) -> str:
        return next(name for n in self._ids if (name := f"request-{n}") not in self.loop.live)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        return checked_ids(prompt, self.config.vocab_size, "a prompt is text or a sequence of token ids")


def _close(compiler: GrammarCompiler, masks: StepMasks) -> None:
    masks.close()
    compiler.close()


def _seed(params: SamplingParams) -> int:
    return secrets.randbits(64) if params.seed is None else params.seed
