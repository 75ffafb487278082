"""A model run the slow way, one sequence at a time and from its beginning; and what a drafter is given of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.draft.base import DraftRow
from forerun.draft.registry import DraftContext
from forerun.models.executor import Executor
from forerun.models.source import open_model
from forerun.ops import StepInput
from forerun.sample.edits import LogitEdits
from forerun.sample.params import SamplingParams
from forerun.sample.transforms import sample

GREEDY = SamplingParams()


class PlainModel:
    """Next-token scores of whole sequences, with nothing remembered between calls but finished answers."""

    def __init__(self, path: Path, context: int = 512) -> None:
        with open_model(path) as source:
            self.config, self.tokenizer = source.config, source.tokenizer()
            self._executor = Executor(
                source, kv_blocks=-(-context // 16), max_positions=min(context, source.config.context_length),
                max_tokens=context, max_outputs=1, threads=1, cache=None,
            )  # fmt: skip
        self._known: dict[tuple[int, ...], npt.NDArray[np.float32]] = {}

    def logits(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """float32[V] after the last of these tokens."""
        key = tuple(tokens)
        if key not in self._known:
            n = len(key)
            blocks = range(-(-n // 16))
            step = StepInput.chain(np.array(key, dtype=np.int32), 0, blocks, 1)
            step = step._replace(output=np.array([n - 1], dtype=np.int32))
            self._known[key] = self._executor.forward(step, 1, np.zeros(1, dtype=np.int32))[0].copy()
        return self._known[key]

    def following(
        self, tokens: Sequence[int], n: int, params: SamplingParams = GREEDY, seed: int = 0, n_prompt: int | None = None
    ) -> list[int]:
        """The `n` tokens that the model writes after these; of them, the first `n_prompt` are the prompt (None: all but
        the last)."""
        start = len(tokens) - 1 if n_prompt is None else n_prompt
        written = list(tokens)
        for _ in range(n):
            logits = self.logits(written).copy()
            edits = LogitEdits.of(params, written[:start], self.tokenizer.eos_ids if params.min_tokens else ())
            if edits is not None:
                edits.append(written[start:])
                edits.apply(logits)
            written.append(
                sample(
                    logits,
                    temperature=params.temperature,
                    top_k=params.top_k,
                    top_p=params.top_p,
                    min_p=params.min_p,
                    seed=seed,
                    position=len(written),
                )
            )
        return written[len(tokens) :]


def draft_context(target: PlainModel, draft: Path, **changes: Any) -> DraftContext:
    """The context of a small engine with this target and one thread."""
    settings: dict[str, Any] = {
        "kv_tokens": 2048, "max_model_len": target.config.context_length, "max_rows": 8, "max_step_tokens": 128,
    }  # fmt: skip
    settings |= changes
    return DraftContext(
        shared_bytes=1 << 20,
        argument=str(draft),
        config=target.config,
        tokenizer=target.tokenizer,
        threads=1,
        cache=None,
        **settings,
    )


def draft_row(
    key: int, tokens: Sequence[int], budget: int = 6, params: SamplingParams = GREEDY, seed: int = 0
) -> DraftRow:
    """A row that may draft."""
    return DraftRow(key, list(tokens), budget, params, seed)
