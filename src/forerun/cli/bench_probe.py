"""What the benchmarks time of an engine: one forward, decode steps, a batch from start to end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from forerun.engine.engine import Engine
from forerun.engine.request import Request
from forerun.kv import BlockTable
from forerun.measure.speed import DecodeTrial, StepTime
from forerun.ops import StepInput
from forerun.sample.params import SamplingParams


class ForwardProbe:
    """Forwards of one request's next tokens over its first `context`, as a verify step has them.

    `tokens` are the context and then the tokens to forward. The KV of the context is computed once
    and held until the scope ends; that of the others is overwritten each time.

    Attributes:
        argmax: int32[tokens after the context], the most probable next tokens of the last forward.
    """

    def __init__(self, engine: Engine, tokens: Sequence[int], context: int) -> None:
        self._engine = engine
        self._tokens = np.array(tokens, dtype=np.int32)
        self._context = context
        self.argmax = np.zeros(len(tokens) - context, dtype=np.int32)
        self._steps: dict[int, StepInput] = {}
        self._table = BlockTable(engine.pool)
        try:
            self._table.append_slots(len(tokens))
            chunk = engine.scheduler.max_step_tokens
            for start in range(0, context, chunk):
                count = min(chunk, context - start)
                engine.executor.forward(self._step(start, count, 0), 0, self.argmax[:0])
        except BaseException:
            self._table.free()
            raise

    def forward(self, rows: int) -> float:
        """Seconds of a forward of `rows` tokens, the most probable next token of each included."""
        step = self._steps.get(rows)
        if step is None:
            step = self._steps[rows] = self._step(self._context, rows, rows)
        began = time.perf_counter()
        self._engine.executor.forward(step, 0, self.argmax[:rows])
        return time.perf_counter() - began

    def _step(self, start: int, count: int, outputs: int) -> StepInput:
        return StepInput.chain(self._tokens[start : start + count], start, self._table.blocks, outputs)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._table.free()


class Generated(NamedTuple):
    """Seconds of a batch's steps, and the first request's tokens: the one of its prefill first."""

    seconds: float
    tokens: list[int]


def run_decode_steps(engine: Engine, prompt: Sequence[int], steps: int) -> StepTime:
    """Times `steps` engine steps of one greedy request that decodes behind `prompt`."""
    with _Batch(engine, [prompt], steps + 1) as batch:
        batch.prefill()
        before = engine.stats()
        for _ in range(steps):
            engine.step()
        after = engine.stats()
    return StepTime(after.step_seconds - before.step_seconds, after.native_seconds - before.native_seconds)


def run_batch(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> DecodeTrial:
    """Times greedy requests that start together and each generate `max_tokens` tokens."""
    with _Batch(engine, prompts, max_tokens) as batch:
        began = time.perf_counter()
        batch.prefill()
        prefilled = time.perf_counter()
        steps = 0
        while not batch.any_finished:
            engine.step()
            steps += 1
        return DecodeTrial(prefilled - began, time.perf_counter() - prefilled, steps)


def run_steps(engine: Engine, prompts: Sequence[Sequence[int]], steps: int) -> Generated:
    """Times `steps` steps of greedy requests that all decode."""
    # The first of them decode while the last are still prefilled.
    spare = 1 + sum(map(len, prompts)) // engine.scheduler.max_step_tokens + len(prompts)
    with _Batch(engine, prompts, steps + spare) as batch:
        batch.prefill()
        began = time.perf_counter()
        for _ in range(steps):
            engine.step()
        seconds = time.perf_counter() - began
        return Generated(seconds, batch.requests[0].output_ids[: steps + 1])


class _Batch:
    """Greedy requests without drafts that no end token ends, for as long as the scope lasts."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._engine = engine
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._handles = [engine.submit(prompt, params, speculate=False) for prompt in prompts]
        found = [engine.scheduler.get(handle.request_id) for handle in self._handles]
        self.requests: list[Request] = [request for request in found if request is not None]

    def prefill(self) -> None:
        """Steps until every request has its first token."""
        while any(request.n_output == 0 for request in self.requests):
            self._engine.step()

    @property
    def any_finished(self) -> bool:
        return any(request.finished for request in self.requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.cancel()
