"""`forerun plan tree`: the best draft tree, its mask and its price."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from forerun.cli.plan_setup import EXPLAIN, JSON, PlanSetup, planned
from forerun.cli.plan_view import derivation_json, numbers, print_derivation, print_json, print_setup, print_table
from forerun.errors import PlanError

if TYPE_CHECKING:
    from forerun.plan.drafters import PricedDrafter
    from forerun.plan.speculate import Point
    from forerun.plan.tree import PlannedTree, RankAcceptance

HELP = """The draft tree with the most expected tokens.

Of trees of so many nodes, by dynamic programming, for an acceptance by rank and depth; with --model also what it
costs, and at which batches it is faster than a chain.

--accept "0.6,0.15,0.06;0.55,0.12": ranks between commas, depths between semicolons, the last for all deeper; each is
the probability that the child of that rank is the accepted one, given that its parent was. Or a JSON or TOML file with
the key accept: a list by rank, or one such list for each depth.

--json prints command, setup (with --model), accept, limits (nodes, depth, branching), tree (nodes, levels, widths,
expanded, expected_tokens, parents, ranks, depths, survivals, paths, masks, matrix), chain (length, expected_tokens),
sglang (num_steps, eagle_topk, num_draft_tokens), and with --model drafter, context, fit_sequences, batches (batch,
plain_seconds, and under tree, chain and best: nodes, levels, branching, tokens_per_step, draft_seconds,
verify_seconds, speedup), searched (the largest batch of what follows), tree_ahead, branching_best and pays (first and
last of each run of batches where the tree is faster than the chain, where the best branches, where one of the tree and
the chain is faster than plain decoding); with --explain derivation (symbol, value, unit, formula, source), for the
first batch."""

_BATCHES = "1,2,4,8,16,32,64,128,256"
_MOST_CONTEXT = 10**9


def register(group: typer.Typer) -> None:
    """Add the command."""
    group.command("tree", help=HELP)(planned(tree, model_required=False))


@dataclass(frozen=True)
class _Row:
    """One batch: the tree, the chain, and the best of all trees and chains within the limits."""

    batch: int
    tree: Point
    chain: tuple[PlannedTree, Point]
    best: tuple[PlannedTree, Point]


@dataclass(frozen=True)
class _Priced:
    """fits: sequences whose KV fits. searched: the largest batch for the rest, which are first and last of each run of
    batches: where the tree is faster than the chain, where the best of all trees has a branch, and where one of the
    tree and the chain is faster than plain decoding."""

    drafter: PricedDrafter
    context: int
    fits: int
    rows: list[_Row]
    searched: int
    tree_ahead: list[tuple[int, int]]
    branching_best: list[tuple[int, int]]
    pays: list[tuple[int, int]]


def tree(
    setup: PlanSetup | None,
    accept: str = typer.Option(..., "--accept", "-a", metavar="RATES|FILE", help="Acceptance by rank and depth."),
    nodes: int = typer.Option(10, "--nodes", "-n", help="Nodes of the tree, the root not counted."),
    depth: int | None = typer.Option(
        None, "--depth", help="Levels at most: forwards of the drafter. [default: 16, or what the drafter can]"
    ),
    branching: int | None = typer.Option(None, "--branching", help="Children of a node at most. [default: any]"),
    chain: int | None = typer.Option(
        None, "--chain", metavar="K", help="The chain to compare with. [default: the best length at each batch]"
    ),
    drafter: str | None = typer.Option(
        None,
        "--drafter",
        "-d",
        metavar="SPEC",
        help="KIND[=ARGUMENT] as in `plan speculate`, without rates. [default: eagle3]",
    ),
    batches: str | None = typer.Option(
        None,
        "--batches",
        "--batch",
        "-b",
        metavar="LIST",
        help=f"Sequences that share a step. [default: those of {_BATCHES} that fit]",
    ),
    context: int | None = typer.Option(
        None, "--context", "--contexts", "-c", help="Cached tokens of each. [default: 1000]"
    ),
    explain: bool = EXPLAIN,
    as_json: bool = JSON,
) -> None:
    """The command."""
    from forerun.plan.memory import check_context
    from forerun.plan.speculate import LONGEST
    from forerun.plan.tree import MOST_NODES, best_tree
    from forerun.plan.tree_acceptance import read_acceptance
    from forerun.plan.tree_explain import explain_speedup, explain_tokens

    acceptance = read_acceptance(accept)
    if not 1 <= nodes <= MOST_NODES:
        raise PlanError("nodes", f"{nodes} is not allowed; expected 1 to {MOST_NODES}")
    drafts: PricedDrafter | None = None
    if setup is None:
        for name, value in (("drafter", drafter), ("batches", batches), ("context", context)):
            if value is not None:
                raise PlanError("model", f"missing; expected --model, since --{name} is about what a draft costs")
    else:
        drafts = _drafter(setup, "eagle3" if drafter is None else drafter)
    deepest, of = (drafts.longest, f" of {drafts.name}") if drafts else (MOST_NODES, "")
    for name, levels in (("depth", depth), ("chain", chain)):
        if levels is not None and not 1 <= levels <= deepest:
            raise PlanError(name, f"{levels} levels{of} are not possible; expected 1 to {deepest}")
    most = min(LONGEST, deepest) if depth is None else depth
    found = best_tree(acceptance, nodes, depth=most, branching=branching)
    compared = best_tree(acceptance, chain or len(found), depth=None if chain else most, branching=1)
    limits = {"nodes": nodes, "depth": most, "branching": branching}
    priced = derivation = None
    if setup is not None and drafts is not None:
        where = 1000 if context is None else context
        if not 0 <= where <= _MOST_CONTEXT:
            raise PlanError("context", f"{where} is not allowed; expected 0 to {_MOST_CONTEXT}")
        check_context(setup.model, where)
        priced = _price(setup, drafts, acceptance, limits, found, compared if chain else None, batches, where)
        if explain:
            derivation = explain_speedup(
                setup.model.network, setup.deployment, drafts, found, acceptance,
                batch=priced.rows[0].batch, context=where,
            )  # fmt: skip
    elif explain:
        derivation = explain_tokens(found, acceptance)
    if as_json:
        body = _tree_json(found, compared, acceptance, limits) | (_priced_json(priced, found) if priced else {})
        print_json("tree", setup, {**body, "derivation": derivation_json(derivation)} if derivation else body)
        return
    _print_tree(found, compared, nodes)
    if setup is not None and priced is not None:
        _print_priced(setup, priced, found, chain)
    if derivation is not None:
        print_derivation(derivation)


def _drafter(setup: PlanSetup, text: str) -> PricedDrafter:
    from forerun.plan.spec import proposal_of

    if ":" in text:
        raise PlanError("drafter", f"{text!r} has rates, but --accept gives them here; expected KIND[=ARGUMENT] alone")
    return proposal_of(text, setup.model, setup.catalog.shape).drafter


def _price(
    setup: PlanSetup,
    drafter: PricedDrafter,
    acceptance: RankAcceptance,
    limits: dict[str, Any],
    found: PlannedTree,
    fixed: PlannedTree | None,
    batches: str | None,
    context: int,
) -> _Priced:
    """The tree against the chain `fixed`, or the best chain of each batch, at every batch."""
    from forerun.plan.memory import check_fits
    from forerun.plan.speculate import MOST, TargetSteps, most_that_fit
    from forerun.plan.tree_price import TreePricer, batches_where, best_trees

    network, where = setup.model.network, setup.deployment
    tokens = context + len(found) + 1
    asked = numbers(batches if batches is not None else _BATCHES, "batches")
    needed = asked[0] if batches is None else asked[-1]
    check_fits(network, where, batch=needed, context=tokens, drafter=drafter)
    fits = max(most_that_fit(network, where, drafter, tokens), needed)
    pricer = TreePricer(TargetSteps(network, where), drafter)
    trees = best_trees(acceptance, limits["nodes"], depth=limits["depth"], branching=limits["branching"])

    def chain_at(batch: int) -> tuple[PlannedTree, Point]:
        if fixed is None:
            return pricer.best(trees[:1], batch, context)
        return fixed, pricer.price(fixed, batch, context)

    def speedups(batch: int) -> tuple[float, float]:
        return pricer.price(found, batch, context).speedup, chain_at(batch)[1].speedup

    def branches(batch: int) -> bool:
        return not pricer.best(trees, batch, context)[0].is_chain

    rows = [
        _Row(batch, pricer.price(found, batch, context), chain_at(batch), pricer.best(trees, batch, context))
        for batch in asked
        if batch <= fits
    ]
    searched = min(fits, MOST)
    return _Priced(
        drafter,
        context,
        fits,
        rows,
        searched,
        batches_where(lambda batch: speedups(batch)[0] > speedups(batch)[1], searched),
        batches_where(branches, searched),
        batches_where(lambda batch: max(speedups(batch)) > 1, searched),
    )


def _print_tree(found: PlannedTree, compared: PlannedTree, nodes: int) -> None:
    from forerun.plan.tree_text import drawing, hex_masks, matrix, sglang_tree

    typer.echo(
        f"best tree of {len(found)} nodes: {found.expected_tokens:.4g} tokens a step; "
        f"chain of {len(compared)}: {compared.expected_tokens:.4g}"
    )
    if len(found) < nodes:
        typer.echo(f"({nodes} nodes were asked for; no more can be accepted within these rates and limits)")
    typer.echo(f"nodes of each level {_words(found.widths)}; with children {_words(found.expanded)}\n")
    typer.echo("\n".join(drawing(found)))
    masks = hex_masks(found)
    if masks is None:
        typer.echo(f"\nmask: {len(found)} nodes and the root don't fit 64 bits; --json has the matrix")
    else:
        typer.echo("\nquery  mask                sees root, 0, 1, ...")
        for i, (mask, row) in enumerate(zip([f"0x{1:016x}", *masks], matrix(found), strict=True)):
            typer.echo(f"{'root' if i == 0 else i - 1:>5}  {mask}  {row.replace('0', '.')}")
        typer.echo("(bit 0 of a mask is the root, bit i + 1 node i)")
    room = sglang_tree(found)
    typer.echo(f"\nparents {list(found.parents)}")
    typer.echo(f"ranks {list(found.ranks)}")
    typer.echo(f"paths {[list(path) for path in found.paths]}")
    typer.echo("(paths: Medusa's choices, TensorRT-LLM's eagle_choices)")
    typer.echo(
        f"SGLang, room for it: --speculative-num-steps {room.num_steps} --speculative-eagle-topk {room.eagle_topk} "
        f"--speculative-num-draft-tokens {room.num_draft_tokens}"
    )


def _print_priced(setup: PlanSetup, priced: _Priced, found: PlannedTree, chain: int | None) -> None:
    typer.echo()
    print_setup(setup)
    typer.echo(f"drafter {priced.drafter.name}, {priced.context} cached tokens each")
    rows: list[Sequence[str]] = []
    for row in priced.rows:
        rows.append((
            str(row.batch), _ms(row.tree.plain_seconds), _ms(row.tree.draft_seconds), _ms(row.tree.verify_seconds),
            _times(row.tree), _times(row.chain[1]), _named(row.chain[0]), _times(row.best[1]), _named(row.best[0]),
        ))  # fmt: skip
    columns = ("batch", "plain ms", "draft ms", "verify ms", f"tree of {len(found)}", "chain", "", "best", "")
    print_table(columns, rows, words=(6, 8))
    compared = "the best chain" if chain is None else f"the chain of {chain}"
    typer.echo(f"looked at: batches up to {priced.searched}; {priced.fits} sequences fit")
    for runs, what, otherwise in (
        (priced.tree_ahead, f"the tree is faster than {compared}", f"{compared} is at least as fast"),
        (priced.branching_best, "the best within the limits branches", "it is a chain, or no draft"),
        (priced.pays, f"the tree or {compared} pays", "neither does"),
    ):
        typer.echo(_where(runs, priced.searched, what, otherwise))


def _where(runs: list[tuple[int, int]], most: int, what: str, otherwise: str) -> str:
    if not runs:
        return f"{otherwise}, at every batch"
    if runs == [(1, most)]:
        return f"{what}, at every batch"
    first, last = runs[0]
    if first == 1 and len(runs) == 1:
        return f"{what} up to batch {last}; from {last + 1} on {otherwise}"
    listed = ", ".join(f"{first} to {last}" for first, last in runs)
    return f"{what} at batches {listed}; elsewhere {otherwise}"


def _tree_json(
    found: PlannedTree, compared: PlannedTree, acceptance: RankAcceptance, limits: dict[str, Any]
) -> dict[str, Any]:
    from forerun.plan.tree_text import hex_masks, matrix, sglang_tree

    return {
        "accept": acceptance.rows,
        "limits": limits,
        "tree": {
            "nodes": len(found),
            "levels": found.levels,
            "widths": found.widths,
            "expanded": found.expanded,
            "expected_tokens": found.expected_tokens,
            "parents": found.parents,
            "ranks": found.ranks,
            "depths": found.depths,
            "survivals": found.survivals,
            "paths": found.paths,
            "masks": hex_masks(found),
            "matrix": matrix(found),
        },
        "chain": {"length": len(compared), "expected_tokens": compared.expected_tokens},
        "sglang": sglang_tree(found)._asdict(),
    }


def _priced_json(priced: _Priced, found: PlannedTree) -> dict[str, Any]:
    return {
        "drafter": priced.drafter.name,
        "context": priced.context,
        "fit_sequences": priced.fits,
        "batches": [
            {
                "batch": row.batch,
                "plain_seconds": row.tree.plain_seconds,
                "tree": _point_json(found, row.tree),
                "chain": _point_json(*row.chain),
                "best": _point_json(*row.best),
            }
            for row in priced.rows
        ],
        "searched": priced.searched,
        "tree_ahead": priced.tree_ahead,
        "branching_best": priced.branching_best,
        "pays": priced.pays,
    }


def _point_json(shape: PlannedTree, point: Point) -> dict[str, Any]:
    return {
        "nodes": len(shape),
        "levels": shape.levels,
        "branching": shape.branching,
        "tokens_per_step": point.tokens_per_step,
        "draft_seconds": point.draft_seconds,
        "verify_seconds": point.verify_seconds,
        "speedup": point.speedup,
    }


def _words(counts: Sequence[int]) -> str:
    return " ".join(map(str, counts)) or "none"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}"


def _times(point: Point) -> str:
    return f"{point.speedup:.3f}x"


def _named(tree: PlannedTree) -> str:
    if not len(tree):
        return "no draft"
    return (
        f"chain {len(tree)}"
        if tree.is_chain
        else f"{len(tree)} nodes, {tree.levels} level{'s' if tree.levels > 1 else ''}"
    )
