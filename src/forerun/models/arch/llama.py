"""Llama (arXiv 2302.13971) and what follows it: Llama 2 and 3, SmolLM2, Mistral without a window."""

from __future__ import annotations

from forerun.models.arch.base import Recorder
from forerun.ops import Buffer


def record(r: Recorder) -> Buffer:
    """Writes the forward pass on the tape; returns the residual stream before the final norm, of
    the tokens whose next one is wanted."""
    return r.pre_norm_layers()
