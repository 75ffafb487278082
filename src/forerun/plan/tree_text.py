"""A planned tree as text: its drawing, its mask, and the forms that engines take."""

from __future__ import annotations

from typing import NamedTuple

from forerun.plan.tree import MASK_NODES, PlannedTree


class SglangTree(NamedTuple):
    """The smallest settings of SGLang's dynamic trees that have room for a tree.

    num_steps: levels. eagle_topk: candidates that are tried after each node, and nodes of a level that are continued.
    num_draft_tokens: queries of the verifying forward, the root included. SGLang then picks as many nodes by its own
    scores at every step, so this is the shape's size, not its form.
    """

    num_steps: int
    eagle_topk: int
    num_draft_tokens: int


def sglang_tree(tree: PlannedTree) -> SglangTree:
    """What to set for `--speculative-num-steps`, `--speculative-eagle-topk` and `--speculative-num-draft-tokens`."""
    topk = max((*(rank + 1 for rank in tree.ranks), *tree.expanded), default=1)
    return SglangTree(tree.levels, topk, len(tree) + 1)


def drawing(tree: PlannedTree) -> list[str]:
    """One line a node, siblings by survival: its number, rank and survival."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        children.setdefault(parent, []).append(node)
    lines = ["root"]
    todo = [(node, "") for node in reversed(children.get(-1, []))]
    while todo:
        node, indent = todo.pop()
        last = children[tree.parents[node]][-1] == node
        lines.append(f"{indent}{'└─' if last else '├─'} {node}: rank {tree.ranks[node]}, {tree.survivals[node]:.4f}")
        below = indent + ("   " if last else "│  ")
        todo += [(child, below) for child in reversed(children.get(node, []))]
    return lines


def hex_masks(tree: PlannedTree) -> list[str] | None:
    """`PlannedTree.ancestors` as 64-bit hexadecimal numbers; None where they don't fit."""
    return [f"0x{mask:016x}" for mask in tree.ancestors()] if len(tree) <= MASK_NODES else None


def matrix(tree: PlannedTree) -> list[str]:
    """`PlannedTree.visible`, a line for each query, a character for each that it may see: 1 if it does."""
    return ["".join("1" if seen else "0" for seen in row) for row in tree.visible()]
