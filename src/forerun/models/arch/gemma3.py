"""Gemma 3, text (arXiv 2503.19786): norms before and after each block, GELU, scaled embeddings, and most layers
looking through a sliding window with a rotary embedding of their own."""

from __future__ import annotations

from forerun.models.arch.base import Recorder
from forerun.ops import Buffer


def record(r: Recorder) -> Buffer:
    """Writes the forward pass on the tape; returns the residual stream before the final norm, of
    the tokens whose next one is wanted."""
    t, x, y = r.tape, r.embed(), r.tape.buffer(r.config.hidden_size)
    for layer in range(r.config.n_layers):
        at = f"blk.{layer}."
        a = r.attention(layer, r.norm(x, f"{at}attn_norm.weight", r.h))
        if layer == r.config.n_layers - 1:
            x, a = r.only_outputs(x, a)
            y = t.buffer(x.width, outputs=True)
        r.project(a, f"{at}attn_output.weight", y)
        t.add(x, r.norm(y, f"{at}post_attention_norm.weight", r.h))
        m = r.gated(layer, r.norm(x, f"{at}ffn_norm.weight", r.h), gelu=True)
        r.project(m, f"{at}ffn_down.weight", y)
        t.add(x, r.norm(y, f"{at}post_ffw_norm.weight", r.h))
    return x
