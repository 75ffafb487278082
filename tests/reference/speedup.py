"""What speculation wins, the slow way: every outcome of a step with its probability, every forward of a draft by name,
every length and every batch tried."""

from __future__ import annotations

from forerun.plan.deployment import Deployment
from forerun.plan.network import Network
from forerun.plan.speculate import Proposal
from forerun.plan.steptime import Load, forward_time


def expected_tokens(proposal: Proposal, length: int) -> float:
    """Mean over the outcomes: k accepted and then one of the target's own, for each k up to `length`."""
    rates = proposal.acceptance.rates
    mean, reached = 0.0, 1.0
    for k in range(length):
        rate = rates[k] if k < len(rates) else rates[-1]
        mean += reached * (1 - rate) * (k + 1)
        reached *= rate
    return mean + reached * (length + 1)


def draft_seconds(
    proposal: Proposal, where: Deployment, batch: int, context: float, length: int, hidden: int, vocab: int
) -> float:
    """One forward after the other; all of Medusa's heads at once."""
    drafter, kind = proposal.drafter, proposal.drafter.kind
    if kind == "ngram" or not length:
        return 0.0
    assert drafter.network is not None
    if kind == "medusa":
        return _medusa_seconds(where, batch, length, hidden, vocab)
    seconds = 0.0
    for i in range(length):
        if i:
            queries = 1
        elif kind == "model":
            queries = 2  # the last token that it proposed, and the target's
        else:
            queries = length + 1  # all that was verified, whose hidden states are new
        seconds += forward_time(drafter.network, where, Load(batch, queries, context, 1)).seconds
    return seconds


def _medusa_seconds(where: Deployment, batch: int, heads: int, hidden: int, vocab: int) -> float:
    """A square matrix with a bias and a vocabulary matrix for each head, in two bytes; scores in four."""
    eff, t, act = where.eff, where.tensor, where.act_bytes
    bandwidth = where.hardware.bandwidth * eff.bandwidth
    peak = where.hardware.rate(where.activations) * eff.compute
    blocks = heads * (hidden * hidden + hidden)
    flows = batch * heads * 2 * hidden * act
    seconds = max((2 * blocks + flows) / t / bandwidth, 2 * blocks * batch / t / peak)
    matrices = heads * hidden * vocab
    written = batch * (heads * vocab * 4 + hidden * act)
    seconds += max((2 * matrices + written) / t / bandwidth, 2 * matrices * batch / t / peak)
    if t > 1:
        reduced = 2 * heads * batch * hidden * act * 2 * (t - 1) / t
        gathered = batch * heads * vocab * act * (t - 1) / t
        seconds += (2 * heads + 1) * where.hardware.link_us / 1e6 + (reduced + gathered) / (
            where.hardware.link * eff.link
        )
    return seconds + (eff.launch_us + heads * eff.layer_us) / 1e6


def speedup(
    target: Network, deployment: Deployment, proposal: Proposal, batch: int, context: float, length: int
) -> float:
    """Tokens/s with speculation over tokens/s without."""
    besides = deployment.eff.step_us / 1e6
    plain = forward_time(target, deployment, Load(batch, 1, context)).seconds + besides
    verify = forward_time(target, deployment, Load(batch, length + 1, context)).seconds + besides
    assert target.head is not None
    draft = draft_seconds(proposal, deployment, batch, context, length, target.hidden, target.head.n_out)
    with_it = expected_tokens(proposal, length) / (draft + verify)
    return with_it * plain


def best_length(
    target: Network, deployment: Deployment, proposal: Proposal, batch: int, context: float, longest: int
) -> int:
    """The first of the lengths with the largest speedup."""
    best, found = -1.0, 0
    for length in range(min(longest, proposal.drafter.longest) + 1):
        now = speedup(target, deployment, proposal, batch, context, length)
        if now > best + 1e-12:
            best, found = now, length
    return found
