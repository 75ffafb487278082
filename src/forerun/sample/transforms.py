"""From logits to a token: the readable definition that the native kernel equals bit for bit.

First of all what may not be chosen gets the logit -inf, at temperature 0 too: tokens outside the mask
(a constraint's and `allowed_token_ids`), end tokens before min_tokens, bad words. Then the stages run, in
Hugging Face's order unless `SamplingParams.order` says otherwise, each on what the one before it left:

1. **penalties**: logit bias, repetition, frequency and presence penalty (forerun.sample.edits).
2. **temperature**: z = (logit - max logit) / temperature, in float32. Subtracting the maximum
   first changes no probability, and keeps differences exact when the temperature is tiny.
   Temperature 0 is greedy: the highest logit that bans and penalties leave, lowest id first, in any order.
3. **top_k**: the k tokens that come first by (logit descending, id ascending). Hugging Face keeps
   every token that ties with the k-th; here exactly k are kept, lowest ids first.
4. **top_p**: the shortest prefix of that order whose mass reaches top_p of the mass kept so far,
   with the token that crosses it; at least one token.
5. **min_p**: the tokens whose probability is at least min_p of the most probable one's.
6. **typical_p** (locally typical sampling; Meister, Pimentel, Wiher and Cotterell 2022): tokens by how
   far their surprise, -log p, is from the expected one, the entropy; of these the shortest prefix whose
   mass reaches typical_p of the mass kept so far; equal distances by id. log p and
   -entropy differ from z and its mean by the same constant, so the distance is |z - mean z|. Tokens
   without mass go first. The most probable token may go.

What is kept is drawn by the Gumbel-max trick: the largest z + noise(seed, position, id), lowest
id first.

A token's weight is `exp32(z)`, 1 for the most probable; after stages that change the maximum (penalties,
typical_p) z is shifted back to it. Mass is summed as integers,
round(weight * 2^40): sums are exact, so they don't depend on an order of summation, and the native
kernel may find the crossing token without sorting the vocabulary. Tokens of weight below 2^-41
(z < -28.4) have no mass; a vocabulary of 2^18 such tokens together would change the total by 2^-23
of the largest weight at most.

Logprobs are those of the model itself: log-softmax of the raw logits, before any edit or transform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Required, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from forerun.constrain.bits import Words, unpack
from forerun.sample.arrays import LateEdits
from forerun.sample.noise import LN2_HIGH, LN2_LOW, Float32s, Int32s, gumbel
from forerun.sample.params import STAGES, Stage

NOT_FINITE: Final = -1
"""In place of a token id: a logit is NaN or +inf."""
NOTHING_ALLOWED: Final = -2
"""In place of a token id: every logit is -inf, or forbidden by the mask."""

Bools = npt.NDArray[np.bool_]

_MASS_BITS: Final = 40
_LOG2_E: Final = np.float32(1.44269504088896341)
_EXP_LOWEST: Final = np.float32(-86)
_ROUNDING: Final = np.float32(1.5 * 2**23)
_EXP_POLYNOMIAL: Final = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


class Knobs(TypedDict, total=False):
    """What `transformed` takes beside the logits."""

    temperature: Required[float]
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    order: Sequence[Stage]
    edits: LateEdits | None


class TopLogprobs(NamedTuple):
    """Log-probabilities under the raw logits.

    ids: int32[top], most probable first, equal logits by ascending id; logprobs: float32[top];
    chosen: that of the token asked for.
    """

    ids: Int32s
    logprobs: Float32s
    chosen: np.float32


def exp32(z: Float32s) -> Float32s:
    """exp of float32[n] <= 0, within 2 units in the last place; 0 below -86.

    The polynomial is that of the Cephes library's expf (S. Moshier).
    """
    x = np.maximum(z, _EXP_LOWEST)
    n = (x * _LOG2_E + _ROUNDING) - _ROUNDING  # the nearest integer
    r = x - n * LN2_HIGH
    r = r - n * LN2_LOW
    p = np.full_like(r, _EXP_POLYNOMIAL[0])
    for coefficient in _EXP_POLYNOMIAL[1:]:
        p = p * r + np.float32(coefficient)
    p = (p * (r * r) + r) + np.float32(1)
    scale = ((n.astype(np.int32) + np.int32(127)) << np.int32(23)).view(np.float32)
    return np.where(z >= _EXP_LOWEST, p * scale, np.float32(0))


def mass(weights: Float32s) -> npt.NDArray[np.int64]:
    """Weights float32[n] in [0, 1] as integers round(weight * 2^40), half to even."""
    return np.rint(weights.astype(np.float64) * 2.0**_MASS_BITS).astype(np.int64)


def scale(logits: Float32s, temperature: np.float32) -> Float32s:
    """z = (logit - max) / temperature, float32[V]; what overflows is -inf and is never drawn."""
    with np.errstate(over="ignore"):
        z: Float32s = (logits - logits.max()) / temperature
    return z


def token_order(logits: Float32s) -> npt.NDArray[np.int64]:
    """Token ids by logit descending, then id ascending."""
    return np.argsort(-logits, kind="stable")


def keep_top_k(kept: Bools, order: npt.NDArray[np.int64], top_k: int) -> Bools:
    """`kept` without all but the first `top_k` tokens of `order`; 0 keeps all."""
    if top_k == 0:
        return kept
    first = np.zeros_like(kept)
    first[order[kept[order]][:top_k]] = True
    return first


def keep_top_p(kept: Bools, order: npt.NDArray[np.int64], z: Float32s, top_p: np.float32) -> Bools:
    """`kept` cut to the shortest prefix of `order` that holds `top_p` of its mass; 1 keeps all."""
    if top_p >= 1:
        return kept
    candidates = order[kept[order]]
    masses = mass(exp32(z[candidates]))
    limit = max(1, math.ceil(float(top_p) * float(masses.sum())))
    before = np.cumsum(masses) - masses
    prefix = np.zeros_like(kept)
    prefix[candidates[before < limit]] = True
    return prefix


def keep_min_p(kept: Bools, z: Float32s, min_p: np.float32) -> Bools:
    """`kept` without tokens of weight below `min_p`; the most probable token has weight 1."""
    return kept & (exp32(z) >= min_p)


def expected_surprise(z: Float32s) -> np.float32:
    """The mean of -z under the weights of z float32[n]: the entropy, less the surprise of the most probable token."""
    weights = exp32(z)
    positive = weights > 0
    surprise = mass(weights[positive] * -z[positive])
    return np.float32(float(surprise.sum()) / float(mass(weights).sum()))


def keep_typical(kept: Bools, z: Float32s, typical_p: np.float32) -> Bools:
    """`kept` cut to the tokens nearest to the expected surprise that hold `typical_p` of its mass; 1 keeps all."""
    if typical_p >= 1:
        return kept
    kept = kept & (mass(exp32(z)) > 0)
    distance = np.abs(z + expected_surprise(z[kept]))
    return keep_top_p(kept, np.argsort(distance, kind="stable"), z, typical_p)


def edit_late(
    logits: Float32s, z: Float32s, kept: Bools, edits: LateEdits, temperature: float, offset: float
) -> tuple[Float32s, float]:
    """Bias and penalties after other stages: z float32[V] with a largest kept one of 0, and what was subtracted.

    They see the logit as it stands, without the shift: x, or x / temperature after that stage. In float64, as
    forerun.sample.edits otherwise. offset: z + offset is the logit as it stands.
    """
    wide = z.astype(np.float64)
    x = logits[edits.ids].astype(np.float64) / temperature
    x = x + edits.bias
    factor = edits.factor.astype(np.float64)
    x = np.where(x < 0, x * factor, x / factor)
    x = x - edits.by_count
    x = x - edits.by_presence
    wide[edits.ids] = x - offset
    shift = float(wide[kept].max())
    with np.errstate(over="ignore"):
        return np.where(kept, wide - shift, -np.inf).astype(np.float32), shift


def transformed(
    logits: Float32s,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    order: Sequence[Stage] = STAGES,
    edits: LateEdits | None = None,
) -> Float32s:
    """z float32[V] after the stages of `order`, of logits that `check_row` passes; -inf for what they removed.

    What stays has a largest z of 0. edits: applied at "penalties"; None where they are in the logits already. The
    parameters are used in float32 and are those of a valid `SamplingParams`.
    """
    if temperature == 0:
        only = np.full_like(logits, -np.inf)
        only[np.argmax(logits)] = 0
        return only
    z = scale(logits, np.float32(1))
    kept = np.ones(logits.shape, dtype=np.bool_)
    rank = token_order(logits)
    scaled_by, offset = 1.0, float(logits.max())
    for stage in order:
        if stage == "penalties" and edits is not None and len(edits.ids):
            z, shift = edit_late(logits, z, kept, edits, scaled_by, offset)
            rank = token_order(z)
            offset += shift
        elif stage == "temperature":
            with np.errstate(over="ignore"):
                z = z / np.float32(temperature)
            scaled_by = float(np.float32(temperature))
            offset /= scaled_by
        elif stage == "top_k":
            kept = keep_top_k(kept, rank, top_k)
        elif stage == "top_p":
            kept = keep_top_p(kept, rank, z, np.float32(top_p))
        elif stage == "min_p":
            kept = keep_min_p(kept, z, np.float32(min_p))
        elif stage == "typical_p" and typical_p < 1:
            kept = keep_typical(kept, z, np.float32(typical_p))
            top = z[kept].max()
            z = np.where(kept, z - top, np.float32(-np.inf))
            offset += float(top)
    return np.where(kept, z, np.float32(-np.inf))


def masked(logits: Float32s, mask: Words | None) -> Float32s:
    """Logits float32[V] with -inf where `mask` uint32[W] (forerun.sample.masks) allows no token; None allows all."""
    return logits if mask is None else np.where(unpack(mask, logits.size), logits, np.float32(-np.inf))


def check_row(logits: Float32s) -> int:
    """0, or NOT_FINITE or NOTHING_ALLOWED for logits float32[V] that no token can be drawn from."""
    if not bool(np.all(logits <= np.finfo(np.float32).max)):
        return NOT_FINITE
    if not bool(np.any(logits > -np.inf)):
        return NOTHING_ALLOWED
    return 0


def sample(logits: Float32s, mask: Words | None = None, *, seed: int, position: int, **knobs: Unpack[Knobs]) -> int:
    """The token id drawn from what `mask` allows of logits float32[V], or NOT_FINITE or NOTHING_ALLOWED.

    knobs: those of `transformed`.
    """
    logits = masked(logits, mask)
    fault = check_row(logits)
    if fault:
        return fault
    z = transformed(logits, **knobs)
    return int(np.argmax(z + gumbel(seed, position, np.arange(logits.size))))


def log_mass(total: int) -> float:
    """ln(total / 2^40) in float64, written out because math libraries differ in the last bit."""
    mantissa, exponent = math.frexp(float(total))
    if mantissa < 0.70710678118654752:
        mantissa, exponent = mantissa * 2, exponent - 1
    s = (mantissa - 1) / (mantissa + 1)
    s2 = s * s
    series = 0.0
    for n in range(23, 0, -2):
        series = series * s2 + 1 / n
    return (exponent - _MASS_BITS) * 0.69314718055994531 + 2 * s * series


def top_logprobs(logits: Float32s, top: int, chosen: int) -> TopLogprobs:
    """Raw log-probabilities of the `top` most probable tokens and of `chosen` in float32[V]."""
    z = scale(logits, np.float32(1))
    log_total = log_mass(int(mass(exp32(z)).sum()))
    ids = token_order(logits)[:top]
    exact = logits.astype(np.float64) - float(logits.max()) - log_total
    logprobs = exact.astype(np.float32)
    return TopLogprobs(ids.astype(np.int32), logprobs[ids], logprobs[chosen])
