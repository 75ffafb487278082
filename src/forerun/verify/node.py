"""The readable definition of the native kernel: one node, from raw logits and the request's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np

from forerun.constrain.bits import Words
from forerun.sample.noise import Float32s, Stream, noise_key, stream_seed
from forerun.sample.transforms import Knobs, check_row, exp32, masked, sample, transformed
from forerun.verify.draws import acceptance_uniforms, residual_uniforms
from forerun.verify.rejection import rejection
from forerun.verify.trees import Trees


class NodeChoice(NamedTuple):
    """choice: index of the accepted child, or -1. token: that child's, or the target's own (negative: none)."""

    choice: int
    token: int


def scores(logits: Float32s, **knobs: Unpack[Knobs]) -> Float32s:
    """Logits float32[V] after the transforms: what stays is shifted to a maximum of 0, what goes is -inf.

    At temperature 0 only the highest logit stays, lowest id first. A row that has no distribution comes back as it is.
    Its exponentials (`forerun.sample.transforms.exp32`) are weights that `rejection` takes for p.
    """
    return logits if check_row(logits) else transformed(logits, **knobs)


def reject(
    logits: Float32s,
    mask: Words | None = None,
    *,
    seed: int,
    position: int,
    children: Sequence[int],
    q: Sequence[Float32s | None],
    **knobs: Unpack[Knobs],
) -> NodeChoice:
    """Rejection sampling of the children of a node with logits float32[V], of which `mask` allows some.

    position: of the token that is decided. children: their tokens, in the order in which they were drawn. q: for each
    child what it was drawn from, float32[V], its earlier siblings not yet taken out; None: it was chosen.

    Without children the token is that of `forerun.sample.transforms.sample`. At temperature 0 the first child that is
    the highest logit is accepted, whatever its q.
    """
    logits = masked(logits, mask)
    fault = check_row(logits)
    if fault:
        return NodeChoice(-1, fault)
    n = len(children)
    if n == 0:
        return NodeChoice(-1, sample(logits, seed=seed, position=position, **knobs))
    if knobs["temperature"] == 0:
        best = int(np.argmax(logits))
        return NodeChoice(list(children).index(best) if best in children else -1, best)
    star = Trees(np.array([children]), np.full((1, n), -1), np.array([n]))
    weights = exp32(transformed(logits, **knobs))
    verdict = rejection(
        star,
        np.broadcast_to(weights, (1, n + 1, logits.size)),
        np.stack([np.zeros_like(logits) if row is None else row for row in q])[None],
        drawn=np.array([[row is not None for row in q]]),
        accept=acceptance_uniforms(noise_key(stream_seed(seed, Stream.ACCEPT), position), children)[None],
        final=residual_uniforms(noise_key(stream_seed(seed, Stream.RESIDUAL), position)).repeat(n + 1)[None],
    )[0]
    if verdict.accepted:
        child = int(verdict.path[0])
        return NodeChoice(child, children[child])
    return NodeChoice(-1, verdict.next_token)
