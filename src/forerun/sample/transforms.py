"""From logits to a token: the readable definition that the native kernel equals bit for bit.

What the request's history does to the logits comes first, at temperature 0 too: logit bias, repetition
penalty, frequency and presence penalty, end tokens before min_tokens (forerun.sample.edits). Then the
transforms run in Hugging Face's order, each on what the one before it kept:

1. **temperature**: z = (logit - max logit) / temperature, in float32. Subtracting the maximum
   first changes no probability, and keeps differences exact when the temperature is tiny.
   Temperature 0 is greedy: the highest logit, lowest id first.
2. **top_k**: the k tokens that come first by (logit descending, id ascending). Hugging Face keeps
   every token that ties with the k-th; here exactly k are kept, lowest ids first.
3. **top_p**: the shortest prefix of that order whose mass reaches top_p of the mass kept so far,
   with the token that crosses it; at least one token.
4. **min_p**: the tokens whose probability is at least min_p of the most probable one's.

What is kept is drawn by the Gumbel-max trick: the largest z + noise(seed, position, id), lowest
id first.

A token's weight is `exp32(z)`, 1 for the most probable. Mass is summed as integers,
round(weight * 2^40): sums are exact, so they don't depend on an order of summation, and the native
kernel may find the crossing token without sorting the vocabulary. Tokens of weight below 2^-41
(z < -28.4) have no mass; a vocabulary of 2^18 such tokens together would change the total by 2^-23
of the largest weight at most.

Logprobs are those of the model itself: log-softmax of the raw logits, before any edit or transform.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.sample.noise import LN2_HIGH, LN2_LOW, Float32s, Int32s, gumbel

NOT_FINITE: Final = -1
"""In place of a token id: a logit is NaN or +inf."""
NOTHING_ALLOWED: Final = -2
"""In place of a token id: every logit is -inf."""

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


def survivors(logits: Float32s, z: Float32s, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Bools:
    """Which tokens can be drawn from logits float32[V] that `scale` made z of: bool[V]."""
    kept = np.ones(logits.shape, dtype=np.bool_)
    order = token_order(logits)
    kept = keep_top_k(kept, order, top_k)
    kept = keep_top_p(kept, order, z, np.float32(top_p))
    return keep_min_p(kept, z, np.float32(min_p))


def check_row(logits: Float32s) -> int:
    """0, or NOT_FINITE or NOTHING_ALLOWED for logits float32[V] that no token can be drawn from."""
    if not bool(np.all(logits <= np.finfo(np.float32).max)):
        return NOT_FINITE
    if not bool(np.any(logits > -np.inf)):
        return NOTHING_ALLOWED
    return 0


def sample(
    logits: Float32s,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int,
    position: int,
) -> int:
    """The token id drawn from logits float32[V], or NOT_FINITE or NOTHING_ALLOWED.

    The parameters are used in float32 and are those of a valid `SamplingParams`.
    """
    fault = check_row(logits)
    if fault:
        return fault
    if temperature == 0:
        return int(np.argmax(logits))
    z = scale(logits, np.float32(temperature))
    kept = survivors(logits, z, top_k=top_k, top_p=top_p, min_p=min_p)
    score = z + gumbel(seed, position, np.arange(logits.size))
    return int(np.argmax(np.where(kept, score, np.float32(-np.inf))))


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
