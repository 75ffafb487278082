"""A real model file whose greedy answer is known in advance: each token has one successor.

Embeddings are one-hot, attention and the gated MLP write zeros, and the head's row of a token is the sum of its
predecessors' embeddings; so the successor's logit stands out by about 17 and the text follows the script.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from reference.gguf_writer import write_gguf
from reference.quant import make_tensor
from reference.tiny import VOCAB_SIZE, TinySpec, tiny_metadata, tiny_weights


def write_bigram_gguf(path: Path, *scripts: Sequence[int], metadata: Mapping[str, Any] | None = None) -> Path:
    """A model in which the tokens of each script follow one another; unscripted tokens are followed by 0.

    A token may have only one successor. `metadata` replaces entries, as in `TinySpec`.
    """
    following: dict[int, int] = {}
    for script in scripts:
        for token, after in pairwise(script):
            assert following.setdefault(token, after) == after, f"token {token} would need two successors"
    spec = TinySpec(
        "llama", hidden=304, ffn=16, layers=1, heads=1, kv_heads=1, head_dim=16, tied=False, metadata=metadata or {}
    )
    weights = {name: np.zeros_like(values) for name, values in tiny_weights(spec).items()}
    for name in weights:
        if name.endswith("norm.weight"):
            weights[name] += 1
    for token in range(VOCAB_SIZE):
        weights["token_embd.weight"][token, token] = 1
        weights["output.weight"][following.get(token, 0), token] = 1
    return write_gguf(path, tiny_metadata(spec), [make_tensor(name, values) for name, values in weights.items()])
