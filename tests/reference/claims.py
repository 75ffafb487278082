"""Conditions of claims, as the tests of `forerun plan claim` write them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from forerun.plan.catalog import PlanCatalog
from forerun.plan.claim import Assessment
from forerun.plan.claim_conditions import Condition
from forerun.plan.claim_setting import Setting
from forerun.plan.deployment import Deployment
from forerun.plan.hardware import Efficiency

CATALOG = PlanCatalog.load()
LATE = replace(Efficiency.ideal(), latency=1)
"""Peaks, and collectives that take as long as the catalog has it."""


def setting(model: str = "llama-3.3-70b", gpu: str = "h100", tensor: int = 1, **more: Any) -> Setting:
    """What is claimed of, by the catalog's names. more: fields of the deployment or of the setting."""
    names = ("pipeline", "activations", "kv", "expert")
    where = Deployment(
        hardware=CATALOG.gpu(gpu), tensor=tensor, **{name: more.pop(name) for name in names if name in more}
    )
    return Setting(model=CATALOG.model(model), deployment=where, **more)


def weights_in(given: Setting, linear: str, head: str | None = None) -> Setting:
    """The same with weights in other formats."""
    model = replace(given.model, formats=given.model.formats.quantized(linear, head))
    return replace(given, model=model)


def condition(found: Assessment, kind: str) -> Condition:
    """The condition of that kind. StopIteration if there is none."""
    return next(each for each in found.conditions if each.kind == kind)


def random_setting(rng: random.Random) -> Setting:
    """Any that the catalog has a model and a GPU for, whether it fits or not."""
    model = CATALOG.model(rng.choice(["llama-3.1-8b", "llama-3.3-70b", "deepseek-v3", "gpt-oss-20b", "mixtral-8x7b"]))
    where = Deployment(
        hardware=CATALOG.gpu(rng.choice(["h100", "h200", "b200", "mi300x"])), tensor=rng.choice([1, 2, 8]),
        pipeline=rng.choice([1, 1, 2]), kv=rng.choice(["bf16", "fp8"]),
    )  # fmt: skip
    return Setting(
        model=model, deployment=where, batch=rng.choice([1, 2, 7, 64]), context=rng.choice([0, 100, 5000]),
        tokens_per_step=rng.choice([1.0, 1.0, 2.5]), aggregate=rng.random() < 0.5,
    )  # fmt: skip
