"""Drafts under a grammar: what it forces is a free draft, and what it forbids isn't worth verifying."""

from __future__ import annotations

from typing import Final

from forerun.constrain.state import GrammarState
from forerun.draft.base import NO_DRAFT, DraftTree

GRAMMAR: Final = "grammar"
"""Names the drafts of forced text, as a drafter's name does."""

_SETTLED, _GUESSED = 0.99, 0.9
"""Confidence in tokens whose text is forced: those that stay the same whatever follows, and the others."""


def forced_draft(grammar: GrammarState, budget: int) -> DraftTree:
    """The text that must come next, in the model's own tokenization, as a chain of at most `budget` tokens.

    It is verified like any draft. Tokens that may still change with what follows are the model's to choose.
    """
    tokens, settled = grammar.forced_text(budget)
    if not tokens:
        return NO_DRAFT
    confidence = [_SETTLED] * settled + [_GUESSED] * (len(tokens) - settled)
    return DraftTree(tokens, range(-1, len(tokens) - 1), confidence, drafter=GRAMMAR, settled=settled)


def joined(forced: DraftTree, tree: DraftTree) -> DraftTree:
    """A chain and the tree that a drafter proposed to follow it, under both names."""
    n = len(forced)
    if not n or not len(tree):
        return forced if n else tree
    return DraftTree(
        [*forced.tokens, *tree.tokens],
        [*forced.parents, *(parent + n for parent in tree.parents)],
        [*forced.confidence, *tree.confidence] if tree.confidence else (),
        drafter=f"{forced.drafter}+{tree.drafter}",
        settled=forced.settled,
    )


def cut_to_grammar(grammar: GrammarState, tree: DraftTree) -> DraftTree:
    """The nodes of a draft that the grammar can reach.

    A tree that was drawn at random (with its q) stays whole. Its verification is exact because p is 0 at a forbidden
    token, so that the residual takes its place; dropping the token would sample from p where the residual is due, and
    how much is verified must not depend on what was drawn.
    """
    if tree.q is not None:
        return tree
    reachable = grammar.reachable(tree.tokens, tree.parents)
    if all(reachable):
        return tree
    if tree.is_chain:
        return tree.first(reachable.index(False))
    kept = [node for node, reaches in enumerate(reachable) if reaches]
    if not kept:
        return NO_DRAFT
    place = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return DraftTree(
        [tree.tokens[node] for node in kept],
        [place[tree.parents[node]] for node in kept],
        [tree.confidence[node] for node in kept] if tree.confidence else (),
        drafter=tree.drafter,
        settled=tree.settled,
    )
