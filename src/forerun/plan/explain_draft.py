"""The derivation of what a draft costs, for `--explain`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from forerun.plan.deployment import Deployment
from forerun.plan.derivation import Derivation, Line
from forerun.plan.drafters import PricedDrafter
from forerun.plan.explain import explain_forward

_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


def explain_draft(
    drafter: PricedDrafter,
    deployment: Deployment,
    *,
    batch: int,
    context: float,
    length: int,
    width: int = 1,
    prefix: str = "draft_",
    apart: bool = False,
) -> Derivation:
    """How `drafter.seconds(...)` comes about: the derivation of each of its forwards, then their sum.

    The first forward reads what was verified, the others a level each; lines that both have in common are there once.
    `prefix` goes before every symbol of the draft. Those of the machine go without, so that the lines join those of a
    target on the same one; `apart` gives them the prefix, too, for a drafter that runs elsewhere.

    Raises:
        PlanError: the drafter can't draft that far, or the load is out of range.
    """
    wide = f", {width} nodes a level" if width > 1 else ""
    d = Derivation(f"seconds of a draft of {length} tokens{wide} by {drafter.name}")
    times = drafter.times(deployment, batch, context, length, width)
    stages = [prefix] if len(times) == 1 else [f"{prefix}first_", f"{prefix}next_"][: len(times)]
    found = [explain_forward(forward, prefix=stage).lines for (forward, _), stage in zip(times, stages, strict=True)]
    if len(found) == 2:
        d.lines = merged(found[0], found[1], stages[0], stages[1], prefix)
    elif found:
        d.lines = found[0]
    d.given(f"{prefix}length", length, "tokens", "setting: of the draft, along a path")
    terms = [f"{stage}forward_seconds" for stage in stages]
    if len(terms) == 2:
        terms[1] = f"({prefix}length - 1) * {terms[1]}"
    if length and (drafter.host_us or not terms):
        d.given(f"{prefix}host_us", drafter.host_us, "us", "of a draft, outside of forwards")
        terms.insert(0, f"{prefix}host_us / 1e6")
    d.derived(f"{prefix}seconds", " + ".join(terms) or "0", "s", "docs/plan-worked-numbers.md, what a draft runs")
    if apart:
        names = {line.symbol: prefix + line.symbol.removeprefix(prefix) for line in d.lines}
        d.lines = [_renamed(line, names) for line in d.lines]
    return d


def merged(first: list[Line], further: list[Line], stage: str, next_stage: str, prefix: str) -> list[Line]:
    """The lines of two forwards, whose symbols begin with `stage` and `next_stage`; those that are the same number by
    the same formula take `prefix` instead, and stand once."""
    theirs = {line.symbol: line for line in further}
    shared: dict[str, str] = {}
    for line in first:
        other = theirs.get(next_stage + line.symbol.removeprefix(stage))
        if not line.symbol.startswith(stage) or other is None:
            continue
        name = prefix + line.symbol.removeprefix(stage)
        names = shared | {line.symbol: name, other.symbol: name}
        if _renamed(line, names) == _renamed(other, names):
            shared = names
    known = {line.symbol for line in first}
    lines = [*first, *(line for line in further if line.symbol not in known and line.symbol not in shared)]
    return [_renamed(line, shared) for line in lines]


def _renamed(line: Line, names: Mapping[str, str]) -> Line:
    formula = _NAME.sub(lambda found: names.get(found[0], found[0]), line.formula)
    return replace(line, symbol=names.get(line.symbol, line.symbol), formula=formula)
