"""From a draft model's scores to the tokens that it proposes.

How a request is verified decides what is worth proposing:

- **greedy**: the target takes its most probable token, so the draft's most probable ones are proposed.
- **coupled**: the target adds the noise of (seed, position) to its own scores and takes the largest sum. The draft adds
  the same noise to its scores; where the two models agree about the distribution, they agree about the token (Daliri et
  al. 2024, arXiv:2408.07978).
- **rejection**: tokens have to be drawn, independently of the target's noise, from a distribution q that the verifier
  is told. Largest sums of log q and Gumbel noise are a draw without replacement (Kool et al. 2019, arXiv:1903.06059).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun import _native
from forerun.sample.arrays import SpecArrays
from forerun.sample.masks import Masks
from forerun.sample.noise import Stream, stream_seed
from forerun.sample.params import SamplingParams
from forerun.sample.transforms import check_row, scale

_NEAR = 64
"""Tokens among which the confidence of a coupled proposal is estimated."""

_FIRST_SORTED = 1024
"""Tokens that are sorted at first for top-p; more only where they don't hold its mass."""

_LEAST_WEIGHT = 1e-37
"""Relative to the most probable token's; what is below is never drawn."""

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


class Candidates(NamedTuple):
    """Tokens that may come next, best first (of drawn ones: in the order in which they were drawn).

    tokens: distinct ids; none where the scores are not numbers.
    confidence: estimate for each that the target takes it, in [0, 1]; empty for drawn ones.
    q: float32[vocabulary], the distribution that they were drawn from; None: they weren't drawn.
    """

    tokens: list[int]
    confidence: list[float]
    q: Floats | None = None


class Place(NamedTuple):
    """Where a candidate is wanted. row: of the logits. position: index of the wanted token in its sequence."""

    row: int
    position: int
    params: SamplingParams
    seed: int


def draws(params: SamplingParams) -> bool:
    """Whether proposals for a request are drawn; otherwise they are a function of its scores and noise."""
    return params.verify == "rejection" and not params.greedy


def candidates(logits: Floats, places: Sequence[Place], width: int, vocabulary: int) -> list[Candidates]:
    """Up to `width` candidates for each place, from logits float32[N, V].

    vocabulary: length of each q; logits of ids from there on must be -inf.
    """
    found = [Candidates([], [])] * len(places)
    greedy = [i for i, place in enumerate(places) if place.params.greedy]
    coupled = [i for i, place in enumerate(places) if not place.params.greedy and not draws(place.params)]
    for i, chosen in zip(greedy, _greedy(logits, [places[i] for i in greedy], width), strict=True):
        found[i] = chosen
    for i, chosen in zip(coupled, _coupled(logits, [places[i] for i in coupled], width), strict=True):
        found[i] = chosen
    for i, place in enumerate(places):
        if draws(place.params):
            found[i] = draw(logits[place.row, :vocabulary], place, width, vocabulary)
    return found


def draw(logits: Floats, place: Place, width: int, vocabulary: int) -> Candidates:
    """Up to `width` tokens drawn without replacement from q, what the request's parameters make of logits float32[V].

    V is at most `vocabulary`, the length of q. Fewer only where q has fewer tokens. There is no confidence: who cuts a
    draft by what was drawn changes the distribution of what is left.
    """
    if check_row(logits):
        return Candidates([], [])
    params = place.params
    z = scale(logits, np.float32(params.temperature))
    survivors = _survivors(logits, z, params)
    if survivors is None:
        ids = np.arange(len(z), dtype=np.int32)
    else:
        ids, z = survivors, z[survivors]
    weights = np.exp(z)
    likely = weights >= np.float32(max(params.min_p, _LEAST_WEIGHT))
    score = np.where(likely, z + _native.gumbel(_draft_seed(place), place.position, ids), np.float32(-np.inf))
    first = np.argsort(-score, kind="stable")[:width] if width > 1 else np.argmax(score, keepdims=True)
    weights *= likely
    q = np.zeros(vocabulary, dtype=np.float32)
    q[ids] = weights / weights.sum(dtype=np.float64)
    return Candidates(ids[first[likely[first]]].tolist(), [], q)


def _draft_seed(place: Place) -> int:
    return stream_seed(place.seed, Stream.DRAFT)


def _survivors(logits: Floats, z: Floats, params: SamplingParams) -> Ints | None:
    """The ids that top-k and top-p leave, those of `forerun.sample.transforms` without a sort of the vocabulary; None
    if neither is on."""
    size = len(logits)
    k = min(params.top_k or size, size)
    if k == size and params.top_p >= 1:
        return None
    first = k if k < size else min(size, _FIRST_SORTED)
    mass = float(np.exp(z).sum(dtype=np.float64)) if first < k else 0.0
    while True:
        ids: Ints = _native.top_logprobs(logits[None], np.zeros(1, np.int32), first, np.zeros(1, np.int32))[0][0]
        if params.top_p >= 1:
            return ids
        weights = np.exp(z[ids]).astype(np.float64)
        limit = params.top_p * (mass if first < k else float(weights.sum()))
        sums = np.cumsum(weights)
        if first == k or sums[-1] >= limit:
            return ids[: 1 + int(np.searchsorted(sums[:-1], limit))]
        first = min(8 * first, k)


def _greedy(logits: Floats, places: Sequence[Place], width: int) -> list[Candidates]:
    if not places:
        return []
    rows = np.array([place.row for place in places], dtype=np.int32)
    ids, logprobs, _ = _native.top_logprobs(logits, rows, min(width, logits.shape[1]), np.zeros(len(rows), np.int32))
    return [
        _finite(tokens.tolist(), np.minimum(np.exp(of_row), 1).tolist())
        for tokens, of_row in zip(ids, logprobs, strict=True)
    ]


def _coupled(logits: Floats, places: Sequence[Place], width: int) -> list[Candidates]:
    if not places:
        return []
    rows = np.array([place.row for place in places], dtype=np.int32)
    spec = SpecArrays.of(
        (place.params for place in places), (place.seed for place in places), (place.position for place in places)
    )
    best = _native.sample(logits, rows, *spec, *Masks.none(len(rows)))
    near, logprobs, own = _native.top_logprobs(
        logits, rows, min(max(_NEAR, width), logits.shape[1]), np.maximum(best, 0)
    )
    return [
        _by_score(place, int(best[i]), near[i], logprobs[i], float(own[i]), width)
        if best[i] >= 0
        else Candidates([], [])
        for i, place in enumerate(places)
    ]


def _by_score(place: Place, best: int, ids: Ints, logprobs: Floats, own: float, width: int) -> Candidates:
    """The token of the largest score, then the next ones among the most probable; confidence: softmax of the scores."""
    params = place.params
    temperature = params.temperature
    z = (logprobs.astype(np.float64) - float(logprobs[0])) / temperature
    weights = np.exp(z)
    kept = (weights > 0) & (weights >= params.min_p)
    if params.top_k:
        kept[params.top_k :] = False
    kept &= np.cumsum(weights) - weights <= params.top_p * weights[kept].sum()
    kept &= ids != best
    others, scores = ids[kept], z[kept] + _native.gumbel(place.seed, place.position, ids[kept])
    best_score = (own - float(logprobs[0])) / temperature
    best_score += float(_native.gumbel(place.seed, place.position, np.array([best], dtype=np.int32))[0])
    order = np.argsort(-scores, kind="stable")[: width - 1]
    # Top-p among so few tokens may have let one through that the exact rule had not.
    relative = np.exp(np.minimum(scores - best_score, 0))
    total = 1 + float(relative.sum())
    return Candidates([best, *others[order].tolist()], [1 / total, *(relative[order] / total).tolist()])


def _finite(tokens: list[int], probabilities: list[float]) -> Candidates:
    n = next((i for i, p in enumerate(probabilities) if tokens[i] < 0 or not p > 0), len(tokens))
    return Candidates(tokens[:n], probabilities[:n])
