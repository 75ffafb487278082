"""Runs the target model over a step's tokens. The only part of the engine that holds tensors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from forerun.models.arch import ARCHITECTURES, Recorder
from forerun.models.arch.base import matrices
from forerun.models.checks import check_model
from forerun.models.packed import load_packed
from forerun.models.source import ModelSource
from forerun.ops import KvCache, StepInput, Tape


class Executor:
    """A model's weights, its key-value memory and its forward pass.

    A step has at most `max_tokens` query tokens and `max_outputs` tokens whose next-token distribution is wanted.
    Raises `UnsupportedModelError` for sizes that the kernels don't have, and what `load_packed` raises.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        kv_blocks: int,
        max_positions: int,
        max_tokens: int,
        max_outputs: int,
        threads: int | None,
        cache: Path | None,
    ) -> None:
        config = source.config
        check_model(config)
        self.config = config
        self.max_positions = max_positions
        self.tape = Tape(max_tokens=max_tokens, max_outputs=max_outputs, threads=threads)
        packed = load_packed(source, matrices(config), cache=cache, threads=self.tape.threads)
        self.weight_bytes = sum(p.data.size for p in packed.values())
        self.kv = KvCache(
            layers=config.n_layers,
            blocks=kv_blocks,
            n_kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
        )
        recorder = Recorder(self.tape, config, source, packed, max_positions)
        x = ARCHITECTURES[config.architecture](recorder)
        final = self.tape.buffer(config.hidden_size, outputs=True)
        recorder.norm(x, "output_norm.weight", final)
        self.tape.head(final, recorder.weight(matrices(config)[-1]))
        self.native_seconds = 0.0
        self._logits = np.empty((0, config.vocab_size), dtype=np.float32)

    def forward(self, step: StepInput, n_logits: int, argmax: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Runs one step.

        Returns logits float32[n_logits, vocabulary] of the first `n_logits` outputs, valid until the next call; for
        the other outputs `argmax` (int32[outputs]) receives the most probable token.
        """
        if len(self._logits) < n_logits:
            self._logits = np.empty((n_logits, self.config.vocab_size), dtype=np.float32)
        logits = self._logits[:n_logits]
        self.native_seconds += self.tape.run(self.kv, step, logits, argmax)
        return logits
