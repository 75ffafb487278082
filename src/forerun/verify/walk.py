"""Verification by the target's own tokens: a draft token stays if it is the one that the target takes there.

`greedy` takes the highest score. `coupled` takes the target's sample, which is a pure function of scores, seed and
position (the Gumbel-max trick with counter-based noise, see `forerun.sample.noise`). Either way the target's token at a
node doesn't depend on the draft, so the emitted text is the one that the target would have written alone, token for
token: the walk only finds out how much of it the draft guessed. (Shared-randomness coupling: Daliri et al.,
arXiv 2408.07978. Prefix match along a tree: SpecInfer, arXiv 2305.09781.)
"""

from __future__ import annotations

from collections.abc import Sequence

from array_api_compat import array_namespace, device

from forerun.errors import VerificationError
from forerun.sample import NOT_FINITE, NOTHING_ALLOWED
from forerun.verify.draws import token_noise
from forerun.verify.trees import Array, Trees, Verdicts, checked


def greedy(trees: Trees, best: Array) -> Verdicts:
    """Walks each tree along `best`, the target's own token at every column: integers [R, N + 1].

    At each node the first child that has the target's token is accepted; the first token that no child has ends the
    walk and is `next_token` (the correction, or the bonus token after a leaf). A negative token ends it, too.

    Raises `VerificationError` for arrays that don't fit together.
    """
    there = checked(trees, best=(best, 1))
    xp = array_namespace(*trees, best)
    own = xp.astype(best[:, 0], xp.int64)  # at the column where the walk stands
    column = xp.zeros_like(own)
    hits = []
    for node in range(trees.tokens.shape[1]):  # a child comes after its parent, a sibling after the ones before it
        child = there[:, node] & (xp.astype(trees.parents[:, node], xp.int64) == column - 1)
        hit = child & (xp.astype(trees.tokens[:, node], xp.int64) == own)
        column = xp.where(hit, node + 1, column)
        own = xp.where(hit, xp.astype(best[:, node + 1], xp.int64), own)
        hits.append(hit)
    return Verdicts(xp.stack(hits, axis=1) if hits else there, own)


def own_tokens(logits: Array, noise: Array) -> Array:
    """The target's own token at each column, int64[R, N + 1]: the largest of logits + noise, lowest id first.

    logits: floating [R, N + 1, V] after all transforms, -inf for tokens that they removed. noise: the same shape,
    Gumbel(0, 1). A column with NaN or +inf gives NOT_FINITE, one of -inf alone NOTHING_ALLOWED.
    """
    xp = array_namespace(logits, noise)
    if tuple(logits.shape) != tuple(noise.shape):
        raise VerificationError(
            f"noise has shape {tuple(noise.shape)} for logits of shape {tuple(logits.shape)}; expected the same"
        )
    token = xp.argmax(logits + xp.astype(noise, logits.dtype), axis=-1)
    token = xp.where(xp.all(logits == -xp.inf, axis=-1), NOTHING_ALLOWED, xp.astype(token, xp.int64))
    return xp.where(xp.any(xp.isnan(logits) | (logits == xp.inf), axis=-1), NOT_FINITE, token)


def coupled(trees: Trees, logits: Array, seeds: Sequence[int], positions: Sequence[int]) -> Verdicts:
    """Walks each tree along the target's samples.

    logits: float32[R, N + 1, V] after all transforms (`forerun.verify.node.scores`); padding is never looked at.
    seeds: of each row, from 0 to 2^64 - 1. positions: of each row, the index in its sequence of the token that follows
    the root.

    The samples have the bits of `forerun.sample.transforms.sample`, so path and next token are what plain seeded
    sampling writes. Raises `VerificationError` for arrays that don't fit together.
    """
    checked(trees, logits=(logits, 1))
    xp = array_namespace(*trees, logits)
    noise = token_noise(trees, seeds, positions, logits.shape[2])
    return greedy(trees, own_tokens(logits, xp.asarray(noise, device=device(logits))))
