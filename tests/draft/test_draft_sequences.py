"""The draft model's memory: after accepting, taking back, forking, evicting, drafts are those of a fresh start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.draft.base import DraftTree
from forerun.draft.model import ModelDrafter
from forerun.draft.sequences import Sequences, SequenceState
from forerun.kv import KVIntegrityError
from forerun.ops import KvCache
from reference.plain_model import GREEDY, PlainModel, draft_context, draft_row
from reference.tiny import TinySpec, write_tiny_gguf

HOT = SamplingParams(temperature=0.9, top_p=0.9)
SMALL: dict[str, Any] = {
    "layers": 2, "hidden": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "context": 256,
}  # fmt: skip
STEPS = 45
DRAWN = SamplingParams(temperature=0.9, verify="rejection")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("draft") / "tiny.gguf", TinySpec("llama", **SMALL))


@pytest.fixture(scope="module")
def model(path: Path) -> PlainModel:
    return PlainModel(path, context=256)


def make(model: PlainModel, path: Path, changes: dict[str, Any] | None = None, **settings: Any) -> ModelDrafter:
    changes = {"max_step_tokens": 256} | (changes or {})  # any prompt at once
    return ModelDrafter(draft_context(model, path, **changes), min_confidence=0.0, **settings)


def random_path(tree: DraftTree, rng: np.random.Generator) -> list[int]:
    """Nodes that might have been accepted, root to leaf; about every second time all that there are."""
    path: list[int] = []
    to_the_end = rng.random() < 0.5
    while True:
        children = [i for i, p in enumerate(tree.parents) if p == (path[-1] if path else -1)]
        if not children or not (to_the_end or rng.random() < 0.6):
            return path
        path.append(int(rng.choice(children)))


class Walk:
    """Random lives of some requests, and how many drafts were not those of a fresh start."""

    def __init__(self, drafter: ModelDrafter, fresh: ModelDrafter, params: SamplingParams, seed: int) -> None:
        self.drafter = drafter
        self.fresh = fresh
        self.params = params
        self.rng = np.random.default_rng(seed)
        self.live: dict[int, list[int]] = {}
        self.next_key = 0
        self.wrong = 0
        self.drafted = 0
        self.common = self.rng.integers(0, 250, 40).tolist()

    def run(self, steps: int) -> int:
        """Runs some steps; returns the number of wrong drafts."""
        for _ in range(steps):
            self.step()
            self.drafter.check_integrity()
        for key, tokens in self.live.items():
            self.drafter.free(key, tokens)
        self.drafter.check_integrity()
        pool = self.drafter.sequences.pool
        assert pool.n_free == pool.n_blocks
        return self.wrong

    def step(self) -> None:
        rng = self.rng
        if len(self.live) < 2 or (len(self.live) < 4 and rng.random() < 0.2):
            self.begin()
        event = rng.random()
        key = int(rng.choice(list(self.live)))
        tokens = self.live[key]
        if event < 0.15:
            n = int(rng.integers(1, len(tokens) + 1))
            removed = len(tokens) - n
            del tokens[n:]
            self.drafter.truncate(key, n)
            if rng.random() < 0.5:  # other tokens follow before it drafts again
                tokens += rng.integers(0, 250, removed + 3).tolist()
        elif event < 0.3 and len(self.live) < 5:
            self.drafter.fork(key, self.next_key)
            self.live[self.next_key] = list(tokens)
            self.next_key += 1
        elif event < 0.4 or len(tokens) > 150:
            self.drafter.free(key, self.live.pop(key))
        elif event < 0.5:
            tokens += rng.integers(0, 250, int(rng.integers(1, 20))).tolist()
        self.draft()

    def begin(self) -> None:
        shared = self.common[: int(self.rng.integers(1, 41))]
        self.live[self.next_key] = [*shared, *self.rng.integers(0, 250, int(self.rng.integers(0, 9))).tolist()]
        self.drafter.begin(self.next_key, None)
        self.next_key += 1

    def draft(self) -> None:
        keys = [key for key in self.live if self.rng.random() < 0.8]
        rows = [
            draft_row(key, self.live[key], int(self.rng.integers(1, 9)), self.params, seed=len(self.live[key]))
            for key in keys
        ]
        for row, tree in zip(rows, self.drafter.propose(rows), strict=True):
            self.drafted += len(tree)
            # A fresh start: another drafter that knows nothing, one row, no cached prefix.
            self.fresh.sequences.prefix.clear()
            expected = self.fresh.propose([row._replace(key=-1)])[0]
            self.fresh.free(-1, row.tokens)
            self.wrong += (list(tree.tokens), list(tree.parents)) != (list(expected.tokens), list(expected.parents))
            self.wrong += list(tree.confidence) != list(expected.confidence)
            if tree.q is not None:
                self.wrong += not np.array_equal(tree.q, expected.q)
            path = random_path(tree, self.rng)
            self.drafter.observe(row.key, tree, path)
            self.live[row.key] += [*(tree.tokens[i] for i in path), int(self.rng.integers(0, 250))]


@pytest.mark.parametrize("params", [GREEDY, HOT, DRAWN])
@pytest.mark.parametrize("width", [1, 3])
def test_drafts_are_those_of_a_fresh_start(model: PlainModel, path: Path, params: SamplingParams, width: int) -> None:
    """Exactly equal, q and confidences included."""
    walk = Walk(make(model, path, width=width), make(model, path, width=width), params, seed=width)
    assert walk.run(STEPS) == 0
    assert walk.drafted > 300


def test_drafts_of_a_model_with_windows_are_those_of_a_fresh_start(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "gemma.gguf", TinySpec("gemma3", **SMALL))
    model = PlainModel(path, context=256)
    assert Walk(make(model, path), make(model, path), HOT, seed=5).run(STEPS) == 0


@pytest.mark.parametrize(("params", "width"), [(GREEDY, 1), (DRAWN, 1), (HOT, 3)])
def test_drafts_with_little_memory_are_right_or_missing(
    model: PlainModel, path: Path, params: SamplingParams, width: int
) -> None:
    walk = Starved(make(model, path, width=width, kv_tokens=192), make(model, path, width=width), params, seed=width)
    assert walk.run(STEPS) == 0
    assert walk.drafted > 100
    assert walk.starved > 0


class Starved(Walk):
    """A walk that lets rows go without a draft, or with a shorter one, as a full memory makes them."""

    starved = 0

    def draft(self) -> None:
        rows = [draft_row(key, tokens, 4, self.params, seed=1) for key, tokens in self.live.items()]
        for row, tree in zip(rows, self.drafter.propose(rows), strict=True):
            self.drafted += len(tree)
            self.fresh.sequences.prefix.clear()
            expected = self.fresh.propose([row._replace(key=-1)])[0]
            self.fresh.free(-1, row.tokens)
            self.starved += len(tree) < len(expected)
            # Paths that are there are right ones; drawn q are those of the same places.
            paths, right = _paths(tree), _paths(expected)
            self.wrong += not all(right.get(p, c) == c for p, c in paths.items())
            if tree.is_chain and expected.is_chain:
                self.wrong += not set(paths) <= set(right)
            self.live[row.key] += [*(tree.tokens[i] for i in random_path(tree, self.rng)), 9]


def _paths(tree: DraftTree) -> dict[tuple[int, ...], float]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    values = list(tree.confidence) or ([0.0] * len(tree) if tree.q is None else tree.q.max(axis=1).tolist())
    return dict(zip(paths, values, strict=True))


def _truncate_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequences, "truncate", lambda *_: None)


def _catch_up_slot_skipped(patch: pytest.MonkeyPatch) -> None:
    """After full acceptance the last draft has no slot yet; this one gives it a slot with whatever is in it."""
    honest = Sequences.open

    def skipping(self: Sequences, key: int, tokens: list[int]) -> SequenceState:
        known = self._states.get(key)
        had_tail = known is not None and any(branch.tail for branch in known.branches)
        state = honest(self, key, tokens)
        if had_tail and len(tokens) - state.agreed == 2:
            self.reserve(state.branches[0].table, 1, {key})
            state.agreed += 1
        return state

    patch.setattr(Sequences, "open", skipping)


def _every_draft_believed(patch: pytest.MonkeyPatch) -> None:
    def believing(_self: Sequences, state: SequenceState, _tokens: list[int], most: int) -> None:
        if state.branches:
            first, *others = state.branches
            for branch in others:
                branch.table.free()
            state.agreed = min(state.agreed + len(first.tail), most)
            first.table.truncate(state.agreed)
            first.tail.clear()
            state.branches = [first]

    patch.setattr(Sequences, "_settle", believing)


def _first_branch_kept(patch: pytest.MonkeyPatch) -> None:
    """Which branch agrees is seen, another one's blocks are kept."""
    honest = Sequences._settle

    def mixing(self: Sequences, state: SequenceState, tokens: list[int], most: int) -> None:
        if len(state.branches) > 1:
            one, two = state.branches[:2]
            n = min(len(one.tail), len(two.tail))
            if n:
                one.tail[:n], two.tail[:n] = two.tail[:n], one.tail[:n]
        honest(self, state, tokens, most)

    patch.setattr(Sequences, "_settle", mixing)


def _no_copy_on_write(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KvCache, "copy_block", lambda *_: None)


@pytest.mark.parametrize(
    ("fault", "width"),
    [(_truncate_ignored, 1), (_catch_up_slot_skipped, 1), (_every_draft_believed, 1), (_first_branch_kept, 3),
     (_no_copy_on_write, 1), (_no_copy_on_write, 3)],
)  # fmt: skip
def test_planted_faults_are_caught(
    model: PlainModel, path: Path, fault: Callable[[pytest.MonkeyPatch], None], width: int
) -> None:
    """The walk above sees each of these."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        walk = Walk(make(model, path, width=width), make(model, path, width=width), GREEDY, seed=width)
        assert walk.run(STEPS) > 0


@pytest.mark.parametrize("accepted", range(7))
def test_what_is_kept_after_a_draft(model: PlainModel, path: Path, accepted: int) -> None:
    """Case 40: a of n accepted keep a + 1 entries after the root's predecessor; full acceptance leaves one to run."""
    drafter = make(model, path)
    tokens = [5, 6, 7, 8]
    tree = drafter.propose([draft_row(1, tokens, 6)])[0]
    assert drafter.fed_tokens == 4 + 5
    grown = [*tokens, *tree.tokens[:accepted], 99]
    before = drafter.fed_tokens
    again = drafter.propose([draft_row(1, grown, 1)])[0]
    kept = 3 + min(accepted + 1, 6)
    assert drafter.fed_tokens - before == len(grown) - kept == (2 if accepted == 6 else 1)
    assert again.tokens == model.following(grown, 1)


def test_the_path_of_a_tree_that_was_accepted_is_kept(model: PlainModel, path: Path) -> None:
    drafter = make(model, path, width=3)
    tokens = [5, 6, 7, 8]
    for _ in range(6):
        tree = drafter.propose([draft_row(1, tokens, 16)])[0]
        # The deepest node that isn't on the path of the likeliest deepest one.
        best_path: set[int] = set()
        best = max(range(16), key=lambda i: (tree.depths()[i], -i))
        while best >= 0:
            best_path.add(best)
            best = tree.parents[best]
        node = max((i for i in range(16) if i not in best_path), key=lambda i: (tree.depths()[i], -i))
        path_tokens: list[int] = []
        while node >= 0:
            path_tokens.insert(0, tree.tokens[node])
            node = tree.parents[node]
        tokens = [*tokens, *path_tokens, 77]
        before = drafter.fed_tokens
        assert drafter.propose([draft_row(1, tokens, 1)])[0].tokens == model.following(tokens, 1)
        # The last node may not have been run; what is before it was.
        assert drafter.fed_tokens - before <= 2
        drafter.check_integrity()
    drafter.free(1, tokens)
    assert drafter.sequences.pool.n_free == drafter.sequences.pool.n_blocks


def test_the_least_recently_used_request_is_evicted(model: PlainModel, path: Path) -> None:
    drafter = make(model, path, kv_tokens=128)
    rng = np.random.default_rng(3)
    rows = [draft_row(key, rng.integers(0, 250, 50).tolist(), 4) for key in range(3)]
    expected = [model.following(row.tokens, 4) for row in rows]
    fed: list[int] = []
    for key in (0, 1, 1, 0, 2, 0, 1):
        before = drafter.fed_tokens
        assert drafter.propose([rows[key]])[0].tokens == expected[key]
        fed.append(drafter.fed_tokens - before - 3)
        drafter.check_integrity()
    # 8 blocks hold two of the three. 2 takes the place of 1, not of 0; the prefix cache may have kept blocks of 1.
    assert fed[:6] == [50, 50, 1, 1, 50, 1]
    assert fed[6] > 1
    for row in rows:
        drafter.free(row.key, row.tokens)
    assert drafter.sequences.pool.n_free == 8


def test_rows_that_cannot_all_be_held_take_turns_without_an_error(model: PlainModel, path: Path) -> None:
    drafter = make(model, path, kv_tokens=80)
    rng = np.random.default_rng(4)
    rows = [draft_row(key, rng.integers(0, 250, 60).tolist(), 4) for key in range(2)]
    for _ in range(3):
        before = drafter.fed_tokens
        trees = drafter.propose(rows)
        assert [len(tree) for tree in trees] == [4, 0]
        drafter.check_integrity()
    # The one that has no room doesn't cost the other its place, or anything to compute.
    assert drafter.fed_tokens - before == 1 + 3
    drafter.free(0, rows[0].tokens)
    assert [len(tree) for tree in drafter.propose(rows[1:])] == [4]
    # Longer than the memory: no draft, no error.
    assert [len(tree) for tree in drafter.propose([draft_row(5, rng.integers(0, 250, 90).tolist())])] == [0]
    drafter.check_integrity()


def test_a_memory_that_is_full_in_the_middle_of_a_draft_cuts_it_there(model: PlainModel, path: Path) -> None:
    drafter = make(model, path, kv_tokens=32)
    tokens = np.random.default_rng(5).integers(0, 250, 30).tolist()
    tree = drafter.propose([draft_row(1, tokens, 8)])[0]
    assert tree.tokens == model.following(tokens, 3)
    drafter.check_integrity()


def test_a_request_that_is_unknown_or_gone(model: PlainModel, path: Path) -> None:
    drafter = make(model, path)
    drafter.free(1, [1, 2])
    drafter.truncate(1, 1)
    drafter.fork(1, 2)
    assert drafter.propose([draft_row(2, [1, 2, 3], 2)])[0].tokens == model.following([1, 2, 3], 2)
    drafter.begin(3, "someone")
    drafter.free(3, [])
    drafter.free(2, [1, 2, 3])
    drafter.check_integrity()
    assert len(drafter.sequences) == 0


def test_closing_gives_everything_back(model: PlainModel, path: Path) -> None:
    drafter = make(model, path, width=2)
    drafter.propose([draft_row(key, [1, 2, 3, key], 5) for key in range(4)])
    drafter.fork(1, 9)
    pool = drafter.sequences.pool
    assert pool.n_free < pool.n_blocks
    drafter.close()
    assert (pool.n_free, pool.n_retained, len(drafter.sequences)) == (pool.n_blocks, 0, 0)
    assert drafter.native_seconds == 0


def test_books_that_contradict_themselves_are_found(model: PlainModel, path: Path) -> None:
    for wrong in ("agreed", "tail", "block"):
        drafter = make(model, path)
        drafter.propose([draft_row(1, list(range(40)), 3)])
        state = drafter.sequences._states[1]
        if wrong == "agreed":
            state.agreed += 1
        elif wrong == "tail":
            state.branches[0].tail.pop()
        else:
            drafter.sequences.pool.incref(state.branches[0].table.blocks[0])
        with pytest.raises(KVIntegrityError):
            drafter.check_integrity()
