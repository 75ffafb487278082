"""Who is asked, whose tree is taken, and that both parts hear everything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forerun.draft.base import NO_DRAFT, Drafter, DraftRow, DraftTree
from forerun.draft.combined import CombinedDrafter
from forerun.draft.model import ModelDrafter
from forerun.errors import ConfigurationError
from reference.plain_model import PlainModel, draft_context, draft_row
from reference.tiny import TinySpec, write_tiny_gguf


class Scripted(Drafter):
    """Proposes the tree that is noted for a key, and writes down all that it is told."""

    def __init__(self, name: str, trees: dict[int, DraftTree], *, fails_to: str = "") -> None:
        self.name = name
        self.trees = trees
        self.heard: list[tuple[Any, ...]] = []
        self.budgets: list[int] = []  # of the last call
        self._fails_to = fails_to

    def _hear(self, *what: Any) -> None:
        self.heard.append(what)
        if what[0] == self._fails_to:
            raise RuntimeError(self._fails_to)

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        self._hear("propose", [row.key for row in rows])
        self.budgets = [row.budget for row in rows]
        return [self.trees.get(row.key, NO_DRAFT) for row in rows]

    def begin(self, key: int, scope: str | None) -> None:
        self._hear("begin", key, scope)

    def observe(self, key: int, tree: DraftTree, accepted: Sequence[int]) -> None:
        self._hear("observe", key, tree.drafter, list(accepted))

    def truncate(self, key: int, n_tokens: int) -> None:
        self._hear("truncate", key, n_tokens)

    def fork(self, key: int, child: int) -> None:
        self._hear("fork", key, child)

    def free(self, key: int, tokens: Sequence[int]) -> None:
        self._hear("free", key, list(tokens))

    def close(self) -> None:
        self._hear("close")


def chain(*tokens: int, confidence: Sequence[float] = (), drafter: str = "") -> DraftTree:
    return DraftTree.chain(tokens, confidence, drafter=drafter)


def test_the_second_is_asked_where_the_first_is_unsure() -> None:
    first = Scripted("suffix", {
        1: chain(11, 12, confidence=(0.9, 0.1)), 2: chain(21, confidence=(0.5,)), 3: chain(31, confidence=(0.49,)),
        4: chain(41, confidence=(0.2,)), 6: chain(61), 7: chain(71, confidence=(0.1,), drafter="inner"),
    })  # fmt: skip
    second = Scripted("model", {key: chain(100 + key, drafter="big" if key == 5 else "") for key in (1, 2, 3, 5, 6)})
    combined = CombinedDrafter(first, second, confident=0.5)
    trees = combined.propose([draft_row(key, [1]) for key in (1, 2, 3, 4, 5, 6, 7, 8)])
    # 4 and 7: the second has nothing, so the first's guess is better than none. 6: no opinion counts as confident.
    assert [(list(tree.tokens), tree.drafter) for tree in trees] == [
        ([11, 12], "suffix"), ([21], "suffix"), ([103], "model"), ([41], "suffix"), ([105], "big"), ([61], "suffix"),
        ([71], "inner"), ([], ""),
    ]  # fmt: skip
    assert trees[0].confidence == (0.9, 0.1)
    assert second.heard == [("propose", [3, 4, 5, 7, 8])]
    assert combined.name == "combined"


def test_the_second_is_left_alone_where_the_first_is_sure() -> None:
    first, second = Scripted("a", {1: chain(3)}), Scripted("b", {})
    assert len(CombinedDrafter(first, second).propose([draft_row(1, [1])])[0]) == 1
    assert second.heard == []


def test_each_part_has_a_limit_of_its_own() -> None:
    first, second = Scripted("a", {}), Scripted("b", {})
    combined = CombinedDrafter(first, second)
    limits: list[dict[str, int] | None] = [{"a": 8, "b": 3}, {"a": 8, "b": 0}, {"a": 0, "": 2}, {"b": 20}, None]
    rows = [draft_row(key, [1], 9)._replace(limits=limit) for key, limit in enumerate(limits)]
    assert combined.propose(rows) == [NO_DRAFT] * 5
    assert first.heard == [("propose", [0, 1, 3, 4])]
    assert first.budgets == [8, 8, 9, 9]
    assert second.heard == [("propose", [0, 2, 3, 4])]
    assert second.budgets == [3, 2, 9, 9]
    outer = CombinedDrafter(Scripted("c", {}), combined)
    outer.propose([draft_row(6, [1], 9)._replace(limits={"a": 5, "b": 1, "combined": 0, "": 0})])
    assert (first.budgets, second.budgets) == ([5], [1])
    outer.propose([draft_row(7, [1], 9)._replace(limits={"": 0})])
    assert first.heard[-1] == second.heard[-1] == ("propose", [6])  # nobody has anything to do


@pytest.mark.parametrize(("confident", "taken"), [(0.0, "a"), (1.0, "b")])
def test_the_ends_of_the_threshold(confident: float, taken: str) -> None:
    first, second = Scripted("a", {1: chain(3, confidence=(0.99,))}), Scripted("b", {1: chain(4)})
    assert CombinedDrafter(first, second, confident=confident).propose([draft_row(1, [1])])[0].drafter == taken


def test_both_hear_everything() -> None:
    first, second = Scripted("a", {}), Scripted("b", {})
    combined = CombinedDrafter(first, second)
    combined.begin(1, "caller")
    combined.fork(1, 2)
    combined.observe(2, chain(5, 6, drafter="b"), [0])
    combined.truncate(2, 7)
    combined.free(1, [1, 2, 3])
    combined.close()
    expected = [
        ("begin", 1, "caller"), ("fork", 1, 2), ("observe", 2, "b", [0]), ("truncate", 2, 7), ("free", 1, [1, 2, 3]),
        ("close",),
    ]  # fmt: skip
    assert first.heard == expected
    assert second.heard == expected


@pytest.mark.parametrize("what", ["free", "close"])
def test_what_the_second_holds_is_given_back_even_if_the_first_fails(what: str) -> None:
    second = Scripted("b", {})
    combined = CombinedDrafter(Scripted("a", {}, fails_to=what), second)
    with pytest.raises(RuntimeError, match=what):
        combined.free(1, []) if what == "free" else combined.close()
    assert [heard[0] for heard in second.heard] == [what]


def test_arguments_are_checked() -> None:
    with pytest.raises(ConfigurationError, match="str"):
        CombinedDrafter("suffix", Scripted("b", {}))  # type: ignore[arg-type]
    for confident in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigurationError, match="confident"):
            CombinedDrafter(Scripted("a", {}), Scripted("b", {}), confident=confident)


def test_a_model_catches_up_on_what_the_first_drafted(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf", TinySpec("llama", layers=1))
    model = PlainModel(path)
    second = ModelDrafter(draft_context(model, path), min_confidence=0.0)
    first = Scripted("suffix", {})
    combined = CombinedDrafter(first, second)
    combined.begin(1, None)
    tokens = [1, 2, 3]
    for step in range(9):
        first.trees = {1: chain(7, 8, 9, 10, confidence=(0.9,) * 4)} if step % 3 else {}
        tree = combined.propose([draft_row(1, tokens, 4)])[0]
        assert tree.drafter == ("suffix" if step % 3 else "model")
        if not step % 3:
            assert tree.tokens == model.following(tokens, 4)
        accepted = list(range(step % 5))
        combined.observe(1, tree, accepted)
        tokens += [*(tree.tokens[i] for i in accepted), 77 + step]
        second.check_integrity()
    combined.free(1, tokens)
    assert second.sequences.pool.n_free == second.sequences.pool.n_blocks
