"""Real model files whose next token depends on the last one alone: by a script, or by a table of logits.

Embeddings are one-hot, attention and the gated MLP write zeros, and the head holds the logits of each last token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.gguf_writer import write_gguf
from reference.quant import make_tensor
from reference.tiny import VOCAB_SIZE, TinySpec, tiny_metadata, tiny_weights

HIDDEN = 304
NEVER = -60.0
"""Logit of a token that isn't written beside one of logit 0."""


def write_table_gguf(path: Path, table: npt.ArrayLike, *, metadata: Mapping[str, Any] | None = None) -> Path:
    """A model whose logits are float64[VOCAB_SIZE, VOCAB_SIZE] `table`: by the last token, then by the next one.

    `metadata` replaces entries, as in `TinySpec`.
    """
    spec = TinySpec(
        "llama", hidden=HIDDEN, ffn=16, layers=1, heads=1, kv_heads=1, head_dim=16, tied=False, metadata=metadata or {}
    )
    weights = {name: np.zeros_like(values) for name, values in tiny_weights(spec).items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] += 1
    tokens = np.arange(VOCAB_SIZE)
    weights["token_embd.weight"][tokens, tokens] = 1
    # The final norm makes sqrt(HIDDEN) of the 1 in a one-hot vector.
    weights["output.weight"][:, :VOCAB_SIZE] = np.asarray(table).T / math.sqrt(HIDDEN)
    return write_gguf(path, tiny_metadata(spec), [make_tensor(name, values) for name, values in weights.items()])


def odds_table(following: Mapping[int, Mapping[int, float]]) -> npt.NDArray[np.float64]:
    """Logits float64[VOCAB_SIZE, VOCAB_SIZE]: the next token has these probabilities; after all others comes 0."""
    table = np.full((VOCAB_SIZE, VOCAB_SIZE), NEVER)
    table[:, 0] = 0
    for token, odds in following.items():
        table[token, 0] = NEVER
        for after, p in odds.items():
            table[token, after] = math.log(p)
    return table


def write_bigram_gguf(path: Path, *scripts: Sequence[int], metadata: Mapping[str, Any] | None = None) -> Path:
    """A model in which the tokens of each script follow one another; unscripted tokens are followed by 0.

    A token may have only one successor, whose logit is about 17 above all others, which are equal. `metadata` replaces
    entries, as in `TinySpec`.
    """
    following: dict[int, int] = {}
    for script in scripts:
        for token, after in pairwise(script):
            assert following.setdefault(token, after) == after, f"token {token} would need two successors"
    table = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    for token in range(VOCAB_SIZE):
        table[token, following.get(token, 0)] = math.sqrt(HIDDEN)
    return write_table_gguf(path, table, metadata=metadata)
