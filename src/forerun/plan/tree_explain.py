"""The derivation of a tree's expected tokens and speedup, for `--explain`."""

from __future__ import annotations

import re
from dataclasses import replace

from forerun.plan.deployment import Deployment
from forerun.plan.derivation import Derivation
from forerun.plan.drafters import PricedDrafter
from forerun.plan.explain import explain_forward
from forerun.plan.shapes import Model
from forerun.plan.steptime import ForwardTime, Load, forward_time
from forerun.plan.tree import PlannedTree, RankAcceptance
from forerun.plan.tree_price import tree_forwards

_SYMBOL = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


def explain_tokens(tree: PlannedTree, acceptance: RankAcceptance) -> Derivation:
    """How `tree.expected_tokens` comes about: the survival of each node, then their sum."""
    d = Derivation(f"expected tokens of a step with a tree of {len(tree)} nodes")
    last = len(acceptance.rows) - 1
    for path in tree.paths:
        row, rank = min(len(path) - 1, last), path[-1]
        deeper = " and deeper" if row == last else ""
        rate = f"accept_{row}_{rank}"
        d.given(rate, acceptance.rows[row][rank], "", f"setting: accept, depth {row}{deeper}, rank {rank}")
        formula = f"{_survival(path[:-1])} * {rate}" if path[:-1] else rate
        d.derived(_survival(path), formula, "", "of the node at these ranks: the product along its path")
    total = " + ".join(["1", *(_survival(path) for path in tree.paths)])
    d.derived("expected_tokens", total, "tokens", "docs/plan-tree.md, expected tokens (Sequoia, arXiv 2402.12374)")
    return d


def explain_speedup(
    target: Model,
    deployment: Deployment,
    drafter: PricedDrafter,
    tree: PlannedTree,
    acceptance: RankAcceptance,
    *,
    batch: int,
    context: float,
) -> Derivation:
    """How the speedup of a tree comes about; of forwards that have numbers in common, later ones use the first's.

    Raises:
        PlanError: the drafter can't draft that far, or the load is out of range.
    """
    d = explain_tokens(tree, acceptance)
    d.title = f"speedup of a tree of {len(tree)} nodes at batch {batch}"
    d.given("step_us", deployment.eff.step_us, "us", "setting: of a step, beside its forwards")
    for name, queries in (("plain", 1), ("verify", len(tree) + 1)):
        forward = _add(d, forward_time(target, deployment, Load(batch, queries, context)), f"{name}_", "plain_")
        d.derived(f"{name}_seconds", f"{forward} + step_us / 1e6", "s", f"a step of {queries} queries a sequence")
    terms = []
    if len(tree):
        d.given("draft_host_us", drafter.host_us, "us", f"of a draft by {drafter.name}, outside of forwards")
        terms.append("draft_host_us / 1e6")
    for i, (network, queries, scored, repeats) in enumerate(tree_forwards(drafter, tree)):
        prefix = f"draft{i}_" if i else "draft_"
        forward = _add(d, forward_time(network, deployment, Load(batch, queries, context, scored)), prefix, "draft_")
        terms.append(f"{repeats} * {forward}" if repeats > 1 else forward)
    d.derived("draft_seconds", " + ".join(terms) or "0", "s", "docs/plan-tree.md, what a tree costs")
    formula = "expected_tokens / (draft_seconds / plain_seconds + verify_seconds / plain_seconds)"
    d.derived("speedup", formula, "", "docs/plan-tree.md, what a tree costs")
    return d


def _survival(path: tuple[int, ...]) -> str:
    return "_".join(["survival", *map(str, path)])


def _add(d: Derivation, forward: ForwardTime, prefix: str, like: str) -> str:
    """Adds the derivation of a forward and returns the symbol of its seconds. Lines that say the same as those of the
    forward with the prefix `like` aren't repeated; formulas name the latter."""
    known = {line.symbol: line for line in d.lines}
    names: dict[str, str] = {}
    lines = explain_forward(forward, prefix=prefix).lines
    for line in lines:
        line = replace(line, formula=_SYMBOL.sub(lambda found: names.get(found[0], found[0]), line.formula))
        twin = f"{like}{line.symbol.removeprefix(prefix)}"
        if line.symbol.startswith(prefix) and known.get(twin) == replace(line, symbol=twin):
            names[line.symbol] = twin
        else:
            d.extend([line])
    return names.get(lines[-1].symbol, lines[-1].symbol)
