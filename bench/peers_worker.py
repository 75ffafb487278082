"""The worker processes of peers.py and peers_tasks.py: one engine each, that answers JSON lines over its pipes.

Run by the Python that has the engine: `python peers_worker.py forerun` or `... llama.cpp`. All
times are wall-clock seconds.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

UBATCH = 512
GGML_LOG_LEVEL_ERROR = 4


class WorkerError(Exception):
    """A message for the user."""


class Forerun:
    """Forerun, through its engine."""

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        from forerun.cli.bench_probe import ForwardProbe
        from forerun.engine.engine import Engine
        from forerun.measure import passage

        plan = request["plan"]
        context, rows, batch = plan["context"], max(plan["rows"]), max(plan["batches"])
        path = _gguf(request["model"])
        sequence = context + plan["decode"] + 64
        self._engine = Engine(
            path,
            kv_tokens=batch * sequence + 2 * plan["prefill"] + context + rows + 64,
            threads=request["threads"],
            max_rows=max(32, batch),
            draft="none",
        )
        if self._engine.config.context_length < max(sequence, plan["prefill"] + 1):
            raise WorkerError(f"the model's context of {self._engine.config.context_length} is too short")
        ids = self._engine.tokenizer.encode(passage.PASSAGE)
        self._prompts = passage.distinct_prompts(ids, batch, context)
        # The first prompt and what follows it in the text.
        forward = passage.excerpt(ids, 0, context + rows)
        self._probe = ForwardProbe(self._engine, forward, context)
        return {
            **self._described(request["model"], path),
            "forward": forward[context:],
            "prompts": self._prompts,
            # One for each round, so that none is in the prefix cache.
            "prefills": passage.distinct_prompts(ids, plan["rounds"] + 1, plan["prefill"], batch),
        }

    def _described(self, model: str, path: Path) -> dict[str, Any]:
        """What ran: the file, the machine, the build."""
        import forerun
        from forerun import ops
        from forerun.cli.bench_setup import file_hash

        tape = self._engine.executor.tape
        return {
            "path": str(path.resolve()),
            "sha256": file_hash(model, path),
            "cpu": ops.cpu_name(),
            "physical_cores": ops.physical_cores(),
            "threads": tape.threads,
            "version": f"forerun {forerun.__version__} ({tape.isa})",
        }

    def forward(self, request: dict[str, Any]) -> dict[str, Any]:
        self._probe.forward(request["rows"])
        return {"seconds": [self._probe.forward(request["rows"]) for _ in range(request["repeats"])]}

    def prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        from forerun import SamplingParams

        began = time.perf_counter()
        output = self._engine.generate([request["tokens"]], SamplingParams(max_tokens=1))[0]
        seconds = time.perf_counter() - began
        if output.stats.cached_tokens:
            raise WorkerError("a prefill prompt was in the prefix cache; the figures would be wrong")
        return {"seconds": [seconds]}

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        from forerun.cli.bench_probe import run_steps

        prompts = self._prompts[: request["batch"]]
        seconds, tokens = run_steps(self._engine, prompts, request["steps"])
        return {"seconds": [seconds], "tokens": tokens}

    def load_tasks(self, request: dict[str, Any]) -> dict[str, Any]:
        """An engine for tasks, and their prompts as tokens, ready for the other engine, too."""
        from forerun import SamplingParams
        from forerun.cli.bench_speculate import TaskRunner
        from forerun.engine.engine import Engine
        from forerun.measure.tasks import read_tasks

        most = request["max_tokens"]
        tasks = [
            task._replace(max_tokens=min(most, task.max_tokens or most))
            for task in read_tasks(Path(request["tasks"]), request["limit"])
        ]
        path = _gguf(request["model"])
        self._engine = Engine(
            path,
            # A token has at least one byte; the template adds a few.
            kv_tokens=max(len(task.prompt.encode()) for task in tasks) + most + 1024,
            threads=request["threads"],
            prefix_cache=False,
            draft=request["draft"],
            draft_len=request["draft_len"],
        )
        self._runner = TaskRunner(self._engine, SamplingParams())
        self._tasks = {task.task_id: task for task in tasks if self._runner.fits(task)}
        if not self._tasks:
            raise WorkerError("no task fits the model's context")
        return {
            **self._described(request["model"], path),
            "ends": sorted(self._engine.tokenizer.eos_ids),
            "tasks": [
                {
                    "task_id": task.task_id,
                    "category": task.category,
                    "tokens": self._runner.prompt(task),
                    "max_tokens": task.max_tokens,
                }
                for task in self._tasks.values()
            ],
        }

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One task's answer; "way" is "speculation" or "plain"."""
        task = self._tasks[request["task_id"]]
        task = task._replace(max_tokens=request["max_tokens"])
        trial = self._runner.trial([task], request["way"] == "speculation")
        run = trial.runs[0]
        return {
            "seconds": trial.seconds,
            "first_token_seconds": run.first_token_seconds,
            "tokens": list(run.token_ids),
        }


class LlamaCpp:
    """llama.cpp, through its C API; what isn't set here is its default."""

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        import llama_cpp

        self._api = llama_cpp
        self._log = llama_cpp.llama_log_callback(_log_errors)
        llama_cpp.llama_log_set(self._log, None)
        self._threads = request["threads"]
        plan = request["plan"]
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(request["path"].encode(), settings)
        if not self._model:
            raise WorkerError(f"llama.cpp can't load {request['path']}")
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)
        self._forward_tokens = request["forward"]
        self._prompts = request["prompts"]
        self._past = plan["context"]
        length = self._past + max(max(plan["rows"]), plan["decode"]) + 8
        self._contexts = {size: self._context(size, length) for size in {1, *plan["batches"]}}
        self._prefill_context = self._context(1, plan["prefill"])
        self._first: dict[int, list[int]] = {}
        info = llama_cpp.llama_print_system_info().decode()
        return {"version": f"llama-cpp-python {llama_cpp.__version__} ({info.strip()})"}

    def forward(self, request: dict[str, Any]) -> dict[str, Any]:
        rows, context = request["rows"], self._contexts[1]
        self._fill(1)
        following = self._forward_tokens[:rows]
        tokens = [(token, self._past + n, 0, True) for n, token in enumerate(following)]
        times = []
        for _ in range(1 + request["repeats"]):
            times.append(self._decode(context, tokens))
            self._forget(context, 1)
        return {"seconds": times[1:]}

    def prefill(self, request: dict[str, Any]) -> dict[str, Any]:
        tokens, context = request["tokens"], self._prefill_context
        self._api.llama_memory_clear(self._api.llama_get_memory(context), True)
        last = len(tokens) - 1
        items = [(token, at, 0, at == last) for at, token in enumerate(tokens)]
        return {"seconds": [self._decode(context, items)]}

    def decode(self, request: dict[str, Any]) -> dict[str, Any]:
        size, steps = request["batch"], request["steps"]
        context = self._contexts[size]
        self._fill(size)
        tokens = self._first[size]
        produced = [tokens[0]]
        began = time.perf_counter()
        for step in range(steps):
            items = [(token, self._past + step, n, True) for n, token in enumerate(tokens)]
            self._decode(context, items)
            tokens = [self._best(context, n) for n in range(size)]
            produced.append(tokens[0])
        seconds = time.perf_counter() - began
        self._forget(context, size)
        return {"seconds": [seconds], "tokens": produced}

    def load_tasks(self, request: dict[str, Any]) -> dict[str, Any]:
        """One model for both ways: plain decoding through the C API, drafts through the Python binding's own loop."""
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._api = llama_cpp
        self._threads = request["threads"]
        self._ends = frozenset(request["ends"])
        longest = max(len(task["tokens"]) + task["max_tokens"] for task in request["tasks"])
        length = -(-(longest + 64) // 256) * 256
        self._lookup = LlamaPromptLookupDecoding
        # Only with logits_all is there room for the scores of drafts beyond the first batch.
        self._llama = llama_cpp.Llama(
            request["path"],
            n_ctx=length,
            n_batch=UBATCH,
            n_ubatch=UBATCH,
            n_threads=self._threads,
            n_threads_batch=self._threads,
            logits_all=True,
            draft_model=LlamaPromptLookupDecoding(),
            verbose=False,
        )
        self._model = self._llama.model
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(UBATCH, 0, 1)
        self._plain = self._context(1, length)
        info = llama_cpp.llama_print_system_info().decode()
        return {"version": f"llama-cpp-python {llama_cpp.__version__} ({info.strip()})"}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """One greedy answer from nothing; "way" is "plain" or "lookup N", with N draft tokens."""
        way, _, drafts = request["way"].partition(" ")
        chosen = (
            self._drafted(request["tokens"], int(drafts)) if way == "lookup" else self._undrafted(request["tokens"])
        )
        tokens: list[int] = []
        began = time.perf_counter()
        first = began
        for token in chosen:
            if not tokens:
                first = time.perf_counter()
            tokens.append(token)
            if token in self._ends or len(tokens) == request["max_tokens"]:
                break
        seconds = time.perf_counter() - began
        chosen.close()
        return {"seconds": seconds, "first_token_seconds": first - began, "tokens": tokens}

    def _undrafted(self, prompt: list[int]) -> Generator[int, None, None]:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._plain), True)
        last = len(prompt) - 1
        for start in range(0, len(prompt), UBATCH):
            part = range(start, min(start + UBATCH, len(prompt)))
            self._decode(self._plain, [(prompt[at], at, 0, at == last) for at in part])
        for position in itertools.count(len(prompt)):
            token = self._best(self._plain, -1)
            yield token
            self._decode(self._plain, [(token, position, 0, True)])

    def _drafted(self, prompt: list[int], drafts: int) -> Generator[int, None, None]:
        self._llama.draft_model = self._lookup(num_pred_tokens=drafts)
        # Forgets the last prompt, so that no part of this one is found in the cache.
        self._llama.reset()
        found: Generator[int, None, None] = self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0)
        return found

    def _context(self, sequences: int, length: int) -> Any:
        api = self._api
        settings = api.llama_context_default_params()
        # Cells are dealt in 256s.
        settings.n_ctx = sequences * (-(-length // 256) * 256)
        settings.n_batch = settings.n_ubatch = UBATCH
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = self._threads
        context = api.llama_init_from_model(self._model, settings)
        if not context:
            raise WorkerError("llama.cpp can't make a context; is there enough memory?")
        return context

    def _fill(self, size: int) -> None:
        """Puts the prompts into the cache, unless they are there: every use leaves them there."""
        if size in self._first:
            return
        context, firsts = self._contexts[size], []
        for n, prompt in enumerate(self._prompts[:size]):
            for start in range(0, self._past, UBATCH):
                part = range(start, min(start + UBATCH, self._past))
                self._decode(context, [(prompt[at], at, n, at == self._past - 1) for at in part])
            firsts.append(self._best(context, -1))
        self._first[size] = firsts

    def _forget(self, context: Any, size: int) -> None:
        memory = self._api.llama_get_memory(context)
        for n in range(size):
            if not self._api.llama_memory_seq_rm(memory, n, self._past, -1):
                raise WorkerError("llama.cpp can't remove tokens of this model from its cache")

    def _decode(self, context: Any, items: list[tuple[int, int, int, bool]]) -> float:
        batch = self._batch
        batch.n_tokens = len(items)
        for i, (token, position, sequence, wanted) in enumerate(items):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
            batch.logits[i] = wanted
        began = time.perf_counter()
        failed = self._api.llama_decode(context, batch)
        self._api.llama_synchronize(context)
        seconds = time.perf_counter() - began
        if failed:
            raise WorkerError(f"llama_decode returned {failed} for {len(items)} tokens")
        return seconds

    def _best(self, context: Any, index: int) -> int:
        import numpy as np

        scores = self._api.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(scores, shape=(self._vocabulary,)).argmax())


def _gguf(model: str) -> Path:
    """The file of a model that both engines can read."""
    from forerun.cli.models import pull_progress
    from forerun.models.download import resolve

    path = resolve(model, progress=pull_progress())
    if path.is_dir():
        raise WorkerError(f"{path} is a folder; both engines read only .gguf files")
    return path


def _log_errors(level: int, text: bytes, _data: object) -> None:
    if level == GGML_LOG_LEVEL_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


def work(engine: Forerun | LlamaCpp) -> None:
    """Answers JSON lines on standard input until it ends.

    A request names a method in "do"; the answer is what the method returns, and the wall-clock and
    processor seconds between the last answer and this request.
    """
    # Libraries may print; only answers may reach the pipe.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    wall, cpu = time.perf_counter(), time.process_time()
    for line in sys.stdin:
        idle = {
            "idle_seconds": time.perf_counter() - wall,
            "idle_cpu_seconds": time.process_time() - cpu,
        }
        request = json.loads(line)
        try:
            answer = getattr(engine, request["do"])(request) | idle
        except Exception as error:
            kind = "" if isinstance(error, WorkerError) else f"{type(error).__name__}: "
            answer = {"error": f"{kind}{error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        wall, cpu = time.perf_counter(), time.process_time()


if __name__ == "__main__":
    try:
        work(Forerun() if sys.argv[1] == "forerun" else LlamaCpp())
    except KeyboardInterrupt:
        sys.exit(130)
