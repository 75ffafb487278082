"""What `forerun bench constrain` runs: tasks with their constraint, and the same tokens without it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forerun.cli.bench_speculate import run_of
from forerun.constrain.schema import JsonSchema
from forerun.engine.choose import Chooser, Walk
from forerun.engine.engine import Engine
from forerun.engine.handle import RequestHandle
from forerun.measure import constrain as measure
from forerun.measure.speculate import Run
from forerun.measure.tasks import Task
from forerun.sample.params import SamplingParams

_WARM_TOKENS = 16


class Repeater(Chooser):
    """A chooser for which the target says recorded tokens, whatever it scores highest.

    Attributes:
        recorded: the tokens of a whole answer, by request id; other requests choose as ever.
    """

    def __init__(self) -> None:
        self.recorded: dict[str, Sequence[int]] = {}

    def greedy(self, walks: Sequence[Walk], argmax: npt.NDArray[np.int32]) -> None:
        """Walks rows as `Chooser` does, along the recorded tokens where there are some."""
        for walk in walks:
            tokens = self.recorded.get(walk.live.request.request_id)
            if tokens is None:
                super().greedy([walk], argmax)
                continue
            n_prompt = walk.live.request.n_prompt
            while walk.position - n_prompt < len(tokens) and walk.take(tokens[walk.position - n_prompt]):
                pass


def _phase(engine: Engine) -> measure.Phase:
    """All steps of an engine so far."""
    now = engine.stats()
    return measure.Phase(now.steps, now.step_seconds, now.speculation.mask_seconds)


class ArmRunner:
    """Answers tasks in each arm: constrained ones with one engine, the others with a second one of the same model."""

    def __init__(self, constrained: Engine, plain: Engine, max_tokens: int) -> None:
        self._constrained = constrained
        self._plain = plain
        self._max_tokens = max_tokens
        self._repeater = Repeater()
        plain.chooser = plain.loop.chooser = self._repeater
        self._prompts: dict[str, list[int]] = {}
        self._recorded: dict[str, tuple[int, ...]] = {}

    def prompt(self, task: Task) -> list[int]:
        """A task as prompt tokens: through the chat template, where the model has one."""
        if task.task_id not in self._prompts:
            engine = self._plain
            self._prompts[task.task_id] = (
                engine.tokenizer.encode(task.prompt)
                if engine.chat_template is None
                else engine.chat_ids([{"role": "user", "content": task.prompt}])
            )
        return self._prompts[task.task_id]

    def most(self, task: Task) -> int:
        """The most tokens of a task's answer."""
        return self._max_tokens if task.max_tokens is None else min(self._max_tokens, task.max_tokens)

    def fits(self, task: Task) -> bool:
        """Whether there is a schema, and room for prompt and answer."""
        return task.schema is not None and len(self.prompt(task)) + self.most(task) <= self._plain.max_model_len

    def warm_up(self, tasks: Sequence[Task]) -> None:
        """Maps weights, starts threads, compiles the schemas: a few tokens in each arm."""
        self._constrained.prepare_constraints()
        most, self._max_tokens = self._max_tokens, min(self._max_tokens, _WARM_TOKENS)
        try:
            measure.measure_group(tasks, 0, lambda group, arm: self._trial(group, arm, "warm"))
        finally:
            self._max_tokens = most
            self._recorded.clear()

    def trial(self, tasks: Sequence[Task], arm: measure.Arm) -> measure.Trial:
        """Answers tasks together in one arm; "constrained_off" records the tokens that the others repeat."""
        return self._trial(tasks, arm, "measured")

    def forced(self, task: Task, token_ids: Sequence[int]) -> int:
        """Tokens of a constrained text about which its grammar left no choice."""
        assert task.schema is not None
        state = self._constrained.compiler.compile(JsonSchema(task.schema)).start()
        n = 0
        for token in token_ids:
            n += state.forced(1) == [token]
            state.advance([token])
        return n

    def own(self, tasks: Sequence[Task]) -> dict[str, Run]:
        """What the model writes without constraint, with speculation, by task id."""
        params = [SamplingParams(max_tokens=self.most(task)) for task in tasks]
        runs, _ = self._run(self._plain, tasks, params, speculate=True, scope="own")
        return {task.task_id: run for task, run in zip(tasks, runs, strict=True)}

    def _trial(self, tasks: Sequence[Task], arm: measure.Arm, scope: str) -> measure.Trial:
        speculate = not arm.endswith("_off")
        if arm.startswith("repeated"):
            recorded = [self._recorded[task.task_id] for task in tasks]
            params = [SamplingParams(max_tokens=len(tokens)) for tokens in recorded]
            return measure.Trial(
                *self._run(self._plain, tasks, params, speculate=speculate, scope=scope, recorded=recorded)
            )
        params = [
            SamplingParams(max_tokens=self.most(task), constraint=JsonSchema(task.schema))
            for task in tasks
            if task.schema is not None
        ]
        trial = measure.Trial(*self._run(self._constrained, tasks, params, speculate=speculate, scope=scope))
        if arm == "constrained_off":
            self._recorded |= {task.task_id: run.token_ids for task, run in zip(tasks, trial.runs, strict=True)}
        return trial

    def _run(
        self,
        engine: Engine,
        tasks: Sequence[Task],
        params: Sequence[SamplingParams],
        *,
        speculate: bool,
        scope: str,
        recorded: Sequence[Sequence[int]] = (),
    ) -> tuple[tuple[Run, ...], measure.Phase]:
        handles: list[RequestHandle] = []
        prompts = [self.prompt(task) for task in tasks]
        try:
            for n, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                name = f"{tasks[n].task_id} {time.monotonic_ns()}"
                if recorded:
                    self._repeater.recorded[name] = recorded[n]
                handles.append(engine.submit(prompt, each, request_id=name, speculate=speculate, scope=scope))
            began: measure.Phase | None = None
            full = measure.Phase()
            while not all(handle.finished for handle in handles):
                engine.step()
                requests = [handle.live.request for handle in handles]
                if began is not None and not any(request.finished for request in requests):
                    full = _phase(engine).since(began)
                elif began is None and all(request.n_output for request in requests):
                    began = _phase(engine)
            outputs = [handle.result() for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()
            self._repeater.recorded.clear()
        failure = None if engine.speculator is None else engine.speculator.failure
        if failure is not None:
            raise failure
        return tuple(map(run_of, outputs)), full
