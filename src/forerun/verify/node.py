"""The readable definition of the native kernel: one node, from raw logits and the request's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forerun.sample.noise import Float32s, Stream, noise_key, stream_seed
from forerun.sample.transforms import check_row, exp32, sample, scale, survivors
from forerun.verify.draws import acceptance_uniforms, residual_uniforms
from forerun.verify.rejection import rejection
from forerun.verify.trees import Trees


class NodeChoice(NamedTuple):
    """choice: index of the accepted child, or -1. token: that child's, or the target's own (negative: none)."""

    choice: int
    token: int


def scores(logits: Float32s, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Float32s:
    """Logits float32[V] after the transforms: what stays is shifted to a maximum of 0, what goes is -inf.

    At temperature 0 only the highest logit stays, lowest id first. A row that has no distribution comes back as it is.
    Its exponentials (`forerun.sample.transforms.exp32`) are weights that `rejection` takes for p.
    """
    if check_row(logits):
        return logits
    if temperature == 0:
        only = np.full_like(logits, -np.inf)
        only[np.argmax(logits)] = 0
        return only
    z = scale(logits, np.float32(temperature))
    return np.where(survivors(logits, z, top_k=top_k, top_p=top_p, min_p=min_p), z, np.float32(-np.inf))


def reject(
    logits: Float32s,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int,
    position: int,
    children: Sequence[int],
    q: Sequence[Float32s | None],
) -> NodeChoice:
    """Rejection sampling of the children of a node with logits float32[V].

    position: of the token that is decided. children: their tokens, in the order in which they were drawn. q: for each
    child what it was drawn from, float32[V], its earlier siblings not yet taken out; None: it was chosen.

    Without children the token is that of `forerun.sample.transforms.sample`. At temperature 0 the first child that is
    the highest logit is accepted, whatever its q.
    """
    fault = check_row(logits)
    if fault:
        return NodeChoice(-1, fault)
    n = len(children)
    if n == 0:
        return NodeChoice(-1, sample(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=position
        ))  # fmt: skip
    if temperature == 0:
        best = int(np.argmax(logits))
        return NodeChoice(list(children).index(best) if best in children else -1, best)
    star = Trees(np.array([children]), np.full((1, n), -1), np.array([n]))
    weights = exp32(scores(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
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
