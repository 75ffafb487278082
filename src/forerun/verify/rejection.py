"""Verification by rejection sampling, for chains and trees, drawn and chosen drafts.

The rule (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318). A draft token x drawn from q is accepted
with probability min(1, p(x) / q(x)). If it is rejected, the token is drawn from the residual, norm(max(0, p - q)). Then
x is emitted with probability

    q(x) min(1, p(x) / q(x)) + P(rejected) max(0, p(x) - q(x)) / sum max(0, p - q)
    = min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x),

because P(rejected) = 1 - sum min(p, q) = sum max(0, p - q). Siblings (SpecInfer, arXiv 2305.09781; recursive rejection
sampling, Jeon et al., arXiv 2402.14160; multi-candidate sampling, Yang et al., arXiv 2401.06706) are tried in turn:
after a rejection the residual takes p's place, and q without the tokens drawn so far, renormalised, is what the next
sibling was drawn from. Each turn is lossless for its own p, so the whole is. A token that was chosen, not drawn, is the
case of a one-hot q: it is accepted with p(x), and otherwise the residual is p without x.

What must hold of the draft: given the tokens before it, a drawn token has the distribution q (without its earlier
siblings), and whether it is verified at all doesn't depend on what was drawn for it or after it. A drafter may stop
because q is flat, but not because the token that it drew has a small q.

**Arithmetic.** Masses are integers, round(p * 2^40), so that sums don't depend on their order; ratios are float64. So
the native kernel decides the same (csrc/verify.cpp). p and q need not be normalised. Tokens below 2^-41 have no mass,
and a residual is exact to 2^-51.
"""

from __future__ import annotations

from array_api_compat import array_namespace, device

from forerun.errors import VerificationError
from forerun.sample import NOT_FINITE, NOTHING_ALLOWED
from forerun.verify.trees import Array, Trees, Verdicts, checked

_SCALE = 2.0**40
_RESIDUAL_SCALE = 2.0**51
_MOST = 2.0
"""The largest entry of p that is taken for a probability, or for a weight beside a largest one of 1."""


def rejection(
    trees: Trees,
    p: Array,
    q: Array | None = None,
    *,
    accept: Array,
    final: Array,
    drawn: Array | None = None,
    own: Array | None = None,
) -> Verdicts:
    """Accepts or rejects drafts so that what is emitted has the target's distribution.

    p: floating [R, N + 1, V], the target's probabilities after all transforms. q: floating [R, N, V], what each node
        was drawn from after all transforms, its earlier siblings not yet taken out; None if all were chosen. What can't
        be a probability in q counts as 0 (negative, NaN) or 1.
    accept: floating [R, N] in [0, 1), independent and uniform. final: the same, [R, N + 1].
    drawn: bool[R, N], which nodes were drawn from q; None: all, if there is q.
    own: integers [R, N + 1], a sample of each column of p, taken where the walk ends at a node without children; None:
        it is drawn with `final`.

    A node with q = 0 was not drawn from it: it is refused, and changes nothing. If p - q has no positive part but by
    rounding, p stays. `next_token` is NOT_FINITE where p holds NaN, infinity or negative numbers, NOTHING_ALLOWED where
    it is all zero. Padding is never looked at.

    Raises `VerificationError` for arrays that don't fit together.
    """
    targets = {"p": (p, 1), "accept": (accept, 0), "final": (final, 1)}
    targets |= {} if q is None else {"q": (q, 0)}
    targets |= {} if own is None else {"own": (own, 1)}
    targets |= {} if drawn is None else {"drawn": (drawn, 0)}
    there = checked(trees, **targets)
    xp = array_namespace(*trees, p)
    n_rows, n = there.shape
    V = p.shape[2]
    if q is not None and q.shape[2] != V:
        raise VerificationError(f"q has {q.shape[2]} tokens and p has {V}; expected the same vocabulary")
    if bool(xp.any(there & (trees.tokens >= V))):
        raise VerificationError(f"a draft token is outside the vocabulary of {V} tokens")
    if q is not None and drawn is None:
        drawn = there
    ids = xp.arange(V, dtype=xp.int64, device=device(p))[None, :]

    # Where each row's walk stands, and what is left to draw from there.
    column = xp.zeros((n_rows,), dtype=xp.int64, device=device(p))
    weights, fault = _target_masses(p[:, 0, :])
    tried = xp.zeros((n_rows,), dtype=xp.bool, device=device(p))  # whether any child was
    taken = xp.zeros((n_rows, V), dtype=xp.bool, device=device(p))  # the tokens of those children
    accepted = []
    for node in range(n):  # a child comes after its parent, a sibling after the ones before it
        child = there[:, node] & (xp.astype(trees.parents[:, node], xp.int64) == column - 1)
        here = child[:, None] & (ids == xp.astype(trees.tokens[:, node], xp.int64)[:, None])
        rest = xp.where(here, 0, weights)  # the residual of a chosen child
        draft = xp.astype(here, xp.int64)
        refused = ~child
        if q is not None and drawn is not None:
            by_draw = drawn[:, node]
            draft = xp.where(by_draw[:, None], xp.where(taken, 0, _draft_masses(q[:, node, :])), draft)
            rest = xp.where(by_draw[:, None], xp.where(here, 0, _residual(weights, draft)), rest)
            refused = refused | (xp.sum(xp.where(here, draft, 0), axis=1) == 0)
        ratio_p = _double(xp.sum(xp.where(here, weights, 0), axis=1)) * _double(xp.sum(draft, axis=1))
        ratio_q = _double(xp.sum(weights, axis=1)) * _double(xp.sum(xp.where(here, draft, 0), axis=1))
        yes = ~refused & (xp.astype(accept[:, node], xp.float64) * ratio_q < ratio_p)
        no = ~refused & ~yes & (xp.sum(rest, axis=1) > 0)
        entered, entered_fault = _target_masses(p[:, node + 1, :])
        weights = xp.where(yes[:, None], entered, xp.where(no[:, None], rest, weights))
        fault = xp.where(yes, entered_fault, fault)
        tried = (tried | child) & ~yes
        taken = (taken | here) & ~yes[:, None]
        column = xp.where(yes, node + 1, column)
        accepted.append(yes)

    at = xp.arange(n + 1, dtype=xp.int64, device=device(p))[None, :] == column[:, None]
    token = _draw(weights, _at(xp.astype(final, xp.float64), at))
    if own is not None:
        token = xp.where(tried, token, _at(xp.astype(own, xp.int64), at))
    return Verdicts(xp.stack(accepted, axis=1) if accepted else there, xp.where(fault < 0, fault, token))


def _at(values: Array, at: Array) -> Array:
    """The entries of [R, C] where `at`, one a row, is set."""
    xp = array_namespace(values, at)
    return xp.sum(xp.where(at, values, xp.zeros_like(values)), axis=1)


def _double(counts: Array) -> Array:
    xp = array_namespace(counts)
    return xp.astype(counts, xp.float64)


def _masses(shares: Array) -> Array:
    xp = array_namespace(shares)
    return xp.astype(xp.round(xp.astype(shares, xp.float64) * _SCALE), xp.int64)


def _target_masses(p: Array) -> tuple[Array, Array]:
    """(masses int64[R, V], fault int64[R]) of [R, V]; a row with a fault has no mass."""
    xp = array_namespace(p)
    good = (p >= 0) & (p <= _MOST)
    masses = _masses(xp.where(good, p, xp.zeros_like(p)))
    fine = xp.all(good, axis=1)
    masses = xp.where(fine[:, None], masses, 0)
    total = xp.sum(masses, axis=1)
    fault = xp.where(total > 0, xp.zeros_like(total), NOTHING_ALLOWED)
    return masses, xp.where(fine, fault, NOT_FINITE)


def _draft_masses(q: Array) -> Array:
    xp = array_namespace(q)
    bounded = xp.where(q < 1, q, xp.ones_like(q))
    return _masses(xp.where(q > 0, bounded, xp.zeros_like(q)))


def _residual(weights: Array, draft: Array) -> Array:
    """Masses of the positive part of the normalised difference."""
    xp = array_namespace(weights)
    one = xp.ones_like(weights[:, :1])
    p_scale = _RESIDUAL_SCALE / _double(xp.maximum(xp.sum(weights, axis=1, keepdims=True), one))
    q_scale = _RESIDUAL_SCALE / _double(xp.maximum(xp.sum(draft, axis=1, keepdims=True), one))
    difference = _double(weights) * p_scale - _double(draft) * q_scale
    positive = xp.where(difference > 0, difference, xp.zeros_like(difference))
    return xp.astype(xp.round(positive), xp.int64)


def _draw(weights: Array, uniform: Array) -> Array:
    """The token at which the masses int64[R, V], summed by ascending id, pass the share `uniform` float64[R]."""
    xp = array_namespace(weights)
    total = xp.sum(weights, axis=1)
    share = xp.astype(xp.floor(uniform * _double(total)), xp.int64)
    share = xp.minimum(share, total - 1)
    passed = xp.cumulative_sum(weights, axis=1) <= share[:, None]
    return xp.sum(xp.astype(passed, xp.int64), axis=1)
