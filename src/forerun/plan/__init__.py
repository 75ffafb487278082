"""The planner: what a step costs, whether speculation pays, how far to draft, and whether a claim can be true.

Everything is a function of frozen dataclasses: a model's shape and a deployment go in, seconds, bytes and tokens come
out. It needs no weights and no accelerator, and nothing of the engine. What most programs need can be imported from
here; each name is loaded from its module when it is first used:

- models and machines: `PlanCatalog`, `ModelShape`, `Experts`, `LatentAttention`, `WeightFormats`, `read_config`,
  `Hardware`, `Efficiency`, `Deployment`
- steps: `Load`, `forward_time`, `check_fits`, `Derivation`, `explain_forward`
- drafters: `Acceptance`, `ngram`, `medusa`, `draft_model`, `eagle`, `eagle3`, `mtp`, `PricedDrafter`, `Proposal`,
  `proposal_of`
- speculation: `price`, `best`, `break_even`, `schedule`, `explain_speedup`, `Capacity`, `Lengths`
- trees: `RankAcceptance`, `best_tree`, `TreePricer`, `TargetSteps`
- claims: `Setting`, `assess`

Errors are `PlanError`. docs/plan.md has an example.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forerun.errors import PlanError
    from forerun.plan.acceptance import Acceptance
    from forerun.plan.capacity import Capacity, Lengths
    from forerun.plan.catalog import PlanCatalog
    from forerun.plan.claim import assess
    from forerun.plan.claim_setting import Setting
    from forerun.plan.config_json import read_config
    from forerun.plan.deployment import Deployment
    from forerun.plan.derivation import Derivation
    from forerun.plan.drafters import PricedDrafter, eagle, eagle3, medusa, mtp, ngram
    from forerun.plan.drafters import model as draft_model
    from forerun.plan.explain import explain_forward
    from forerun.plan.explain_speculate import explain_speedup
    from forerun.plan.formats import WeightFormats
    from forerun.plan.hardware import Efficiency, Hardware
    from forerun.plan.memory import check_fits
    from forerun.plan.shapes import Experts, LatentAttention, ModelShape
    from forerun.plan.spec import proposal_of
    from forerun.plan.speculate import Proposal, TargetSteps, best, break_even, price, schedule
    from forerun.plan.steptime import Load, forward_time
    from forerun.plan.tree import RankAcceptance, best_tree
    from forerun.plan.tree_price import TreePricer

__all__ = [
    "Acceptance", "Capacity", "Deployment", "Derivation", "Efficiency", "Experts", "Hardware", "LatentAttention",
    "Lengths", "Load", "ModelShape", "PlanCatalog", "PlanError", "PricedDrafter", "Proposal", "RankAcceptance",
    "Setting", "TargetSteps", "TreePricer", "WeightFormats", "assess", "best", "best_tree", "break_even", "check_fits",
    "draft_model", "eagle", "eagle3", "explain_forward", "explain_speedup", "forward_time", "medusa", "mtp", "ngram",
    "price", "proposal_of", "read_config", "schedule",
]  # fmt: skip

_PLACES = {
    "forerun.errors": "PlanError",
    "forerun.plan.acceptance": "Acceptance",
    "forerun.plan.capacity": "Capacity Lengths",
    "forerun.plan.catalog": "PlanCatalog",
    "forerun.plan.claim": "assess",
    "forerun.plan.claim_setting": "Setting",
    "forerun.plan.config_json": "read_config",
    "forerun.plan.deployment": "Deployment",
    "forerun.plan.derivation": "Derivation",
    "forerun.plan.drafters": "PricedDrafter eagle eagle3 medusa mtp ngram draft_model=model",
    "forerun.plan.explain": "explain_forward",
    "forerun.plan.explain_speculate": "explain_speedup",
    "forerun.plan.formats": "WeightFormats",
    "forerun.plan.hardware": "Efficiency Hardware",
    "forerun.plan.memory": "check_fits",
    "forerun.plan.shapes": "Experts LatentAttention ModelShape",
    "forerun.plan.spec": "proposal_of",
    "forerun.plan.speculate": "Proposal TargetSteps best break_even price schedule",
    "forerun.plan.steptime": "Load forward_time",
    "forerun.plan.tree": "RankAcceptance best_tree",
    "forerun.plan.tree_price": "TreePricer",
}


def __getattr__(name: str) -> Any:
    for module, names in _PLACES.items():
        for entry in names.split():
            public, _, inner = entry.partition("=")
            if public == name:
                return getattr(importlib.import_module(module), inner or public)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
