"""The seconds of many forwards of one network: those of `forward_time`, without the account of where they go."""

from __future__ import annotations

import math

from forerun.plan.deployment import Deployment
from forerun.plan.shapes import Model, as_network
from forerun.plan.steptime import LOGIT_BYTES, busiest


class ForwardSeconds:
    """Seconds of a forward of a model on `deployment`, for any load: `seconds(batch, queries, context)`.

    Everything that a load doesn't change is worked out once; what is left is computed in `forward_time`'s order, so
    that the numbers are the same to the last bit (tests/plan/test_steptime_fast.py). Loads aren't checked.
    """

    def __init__(self, model: Model, deployment: Deployment) -> None:
        network = as_network(model)
        eff, t, head = deployment.eff, deployment.tensor, network.head
        dense, n_layers = network.dense, network.n_layers
        self._bandwidth = deployment.hardware.bandwidth * eff.bandwidth
        self._peak, self._wide = deployment.peak * eff.compute, deployment.wide_peak * eff.compute
        self._overlapped = max if math.isinf(eff.order) else eff.overlapped
        self._tensor, self._pipeline, self._expert = t, deployment.pipeline, deployment.expert
        self._act, self._kv = deployment.act_bytes, deployment.kv_bytes
        self._hidden, self._n_layers = network.hidden, n_layers
        self._linear = (dense.bytes / t, dense.io, 2 * dense.parameters) if dense.parameters else None
        self._mixtures = network.mixtures
        self._attention = [
            (
                group.attention,
                group.repeats * group.attention.kv_width,
                group.attention.kept_share(t),
                2 * group.repeats * group.attention.pair_width,
            )
            for group in network.layers
            if group.attention is not None
        ]
        self._n_scores = head.n_out if head else 0
        self._head = (
            (head.size * network.formats.bytes_of("head") / t, head.n_out * LOGIT_BYTES + head.n_in * self._act,
             2 * head.size)
            if head
            else None
        )  # fmt: skip
        self._link = deployment.hardware.link * eff.link
        calls = (2 * n_layers + (head is not None)) * deployment.collective_seconds if t > 1 else 0.0
        stages = self._pipeline * deployment.collective_seconds if self._pipeline > 1 else 0.0
        self._collectives = calls + stages
        self._fixed = (eff.launch_us + eff.layer_us * n_layers) * 1e-6

    def __call__(self, batch: int, queries: int, context: float, scored: int | None = None) -> float:
        """Seconds of a forward of `Load(batch, queries, context, scored)`."""
        t, act, bandwidth, peak, overlapped = self._tensor, self._act, self._bandwidth, self._peak, self._overlapped
        sequences = batch / min(self._pipeline, batch)
        tokens = sequences * queries
        phases: list[float] = []
        if self._linear is not None:
            weights, io, flops = self._linear
            phases.append(overlapped((weights + tokens * io * act / t) / bandwidth, flops * tokens / t / peak))
        if self._mixtures:
            phases.append(self._experts(tokens))
        if self._attention:
            kv = products = 0.0
            for attention, width, share, pair in self._attention:
                kept = attention.keys(context) + queries
                kv += width * kept * sequences * self._kv * share
                products += pair * attention.pairs(queries, context) * sequences / t
            phases.append(overlapped(kv / bandwidth, products / self._wide))
        scores = sequences * (queries if scored is None else scored)
        if self._head is not None:
            weights, written, flops = self._head
            phases.append(overlapped((weights + scores * written / t) / bandwidth, flops * scores / t / self._wide))
        if t > 1 or self._pipeline > 1:
            phases.append(self._communication(tokens, scores))
        phases.append(self._fixed)
        return sum(phases)

    def _experts(self, tokens: float) -> float:
        t, act = self._tensor, self._act
        weights = activations = flops = 0.0
        for mixture in self._mixtures:
            here = busiest(mixture.n, mixture.active, tokens, self._expert)
            weights += mixture.layers * mixture.bytes * here * self._expert / t
            activations += mixture.layers * mixture.active * mixture.io * tokens * act / t
            flops += 2 * mixture.layers * mixture.active * mixture.parameters * tokens / t
        return self._overlapped((weights + activations) / self._bandwidth, flops / self._peak)

    def _communication(self, tokens: float, scores: float) -> float:
        t, act, hidden = self._tensor, self._act, self._hidden
        sent = 0.0
        if t > 1:
            sent += (
                2 * self._n_layers * tokens * hidden * act * 2 * (t - 1) / t
                + scores * self._n_scores * act * (t - 1) / t
            )
        if self._pipeline > 1:
            sent += self._pipeline * tokens * hidden * act
        return self._collectives + sent / self._link
