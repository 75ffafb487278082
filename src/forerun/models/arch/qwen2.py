"""Qwen2 and Qwen2.5 (arXiv 2407.10671): Llama's stack with biases on query, key and value."""

from __future__ import annotations

from forerun.models.arch.base import Recorder
from forerun.ops import Buffer


def record(r: Recorder) -> Buffer:
    """Writes the forward pass on the tape; returns the residual stream before the final norm, of
    the tokens whose next one is wanted.

    The configuration's `attention_bias` adds the biases.
    """
    return r.pre_norm_layers()
