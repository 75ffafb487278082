"""Drafters that fail in every way: one warning, no changed answer, and the engine goes on without them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Piece, SamplingParams
from forerun.draft.base import NO_DRAFT, DraftRow, DraftTree
from forerun.errors import DraftError, DraftWarning, ForerunError, NumericalError
from reference.drafters import Oracle, Scripted
from reference.gguf_writer import write_gguf
from reference.quant import make_tensor
from reference.speculation import FREE, PROMPTS, SAMPLED, Unspeculated, check_sums, emptied, engine_for, same
from reference.tiny import VOCAB_SIZE, TinySpec, tiny_metadata, tiny_weights, write_tiny_gguf


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Unspeculated:
    return Unspeculated.of_prompts(tiny)


class Faulty(Scripted):
    """A drafter that does one thing wrong the second time that it is called for it; otherwise it is right."""

    def __init__(self, alone: Unspeculated, where: str, what: Any) -> None:
        super().__init__(lambda row: alone.truth(row)[:3], name="faulty")
        self.calls: list[str] = []
        self._where = where
        self._what = what

    def _call(self, where: str) -> bool:
        self.calls.append(where)
        wrong = where == self._where and self.calls.count(where) == 2
        if wrong and isinstance(self._what, type):
            raise self._what("made to fail")
        return wrong

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        trees = super().propose(rows)
        return self._what(rows, trees) if self._call("propose") else trees

    def begin(self, *_: Any) -> None:
        self._call("begin")

    def observe(self, *_: Any) -> None:
        self._call("observe")

    def fork(self, *_: Any) -> None:
        self._call("fork")

    def free(self, *_: Any) -> None:
        self._call("free")

    def close(self) -> None:
        self._call("close")


def instead(tree: Callable[[DraftRow], Any]) -> Callable[..., list[Any]]:
    """The last row's tree is replaced."""
    return lambda rows, trees: [*trees[:-1], tree(rows[-1])]


MALFORMED: dict[str, Callable[..., Any]] = {
    "one tree too few": lambda _, trees: trees[1:],
    "one tree too many": lambda _, trees: [*trees, NO_DRAFT],
    "no list": lambda *_: None,
    "no tree": instead(lambda _: [1, 2, 3]),
    "nothing": instead(lambda _: None),
    "parent after its child": instead(lambda _: DraftTree([1, 2], [1, -1])),
    "own parent": instead(lambda _: DraftTree([1, 2], [-1, 1])),
    "parent before the root": instead(lambda _: DraftTree([1, 2], [-1, -2])),
    "fewer parents": instead(lambda _: DraftTree([1, 2], [-1])),
    "more parents": instead(lambda _: DraftTree([1, 2], [-1, 0, 1])),
    "parents in quarters": instead(lambda _: DraftTree([1, 2], [-1, 0.25])),  # type: ignore[list-item]
    "token past the vocabulary": instead(lambda _: DraftTree.chain([1, VOCAB_SIZE])),
    "negative token": instead(lambda _: DraftTree.chain([1, -1])),
    "huge token": instead(lambda _: DraftTree.chain([2**40])),
    "token in quarters": instead(lambda _: DraftTree.chain([1.25])),  # type: ignore[list-item]
    "token as text": instead(lambda _: DraftTree.chain(["a"])),  # type: ignore[list-item]
    "token that is no number": instead(lambda _: DraftTree.chain([float("nan")])),  # type: ignore[list-item]
    "more than the budget": instead(lambda row: DraftTree.chain([1] * (row.budget + 1))),
    "far more than the budget": instead(lambda _: DraftTree.chain([1] * 5000)),
    "fewer confidences": instead(lambda _: DraftTree.chain([1, 2], [0.5])),
    "confidence as text": instead(lambda _: DraftTree.chain([1], ["a"])),  # type: ignore[list-item]
    "confidence that is no number": instead(lambda _: DraftTree.chain([1], [float("nan")])),
    "confidence above 1": instead(lambda _: DraftTree.chain([1], [1.5])),
    "confidence below 0": instead(lambda _: DraftTree.chain([1], [-0.5])),
    "no confidence": instead(lambda _: DraftTree.chain([1], [None])),  # type: ignore[list-item]
    "drafter without a name": instead(lambda _: DraftTree.chain([1], drafter=["a"])),  # type: ignore[arg-type]
    "q as text": instead(lambda _: DraftTree.chain([1], (), np.full((1, VOCAB_SIZE), "a"))),
    "q as a list": instead(lambda _: DraftTree.chain([1], (), [[0.5] * VOCAB_SIZE])),  # type: ignore[arg-type]
    "q of complex numbers": instead(lambda _: DraftTree.chain([1], (), np.ones((1, VOCAB_SIZE), dtype=complex))),
    "q of another vocabulary": instead(lambda _: DraftTree.chain([1], (), np.ones((1, 7), dtype=np.float32))),
    "q of fewer nodes": instead(lambda _: DraftTree.chain([1, 2], (), np.ones((1, VOCAB_SIZE), dtype=np.float32))),
}


@pytest.mark.parametrize(
    ("where", "what"),
    [
        *(pytest.param("propose", what, id=name) for name, what in MALFORMED.items()),
        *(
            pytest.param(where, error, id=f"{error.__name__} in {where}")
            for where in ("propose", "begin", "observe", "fork", "free")
            for error in (RuntimeError, ForerunError, MemoryError, AssertionError)
        ),
    ],
)
def test_a_drafter_that_fails_is_turned_off_and_no_answer_changes(
    tiny: Path, alone: Unspeculated, where: str, what: Any
) -> None:
    """One warning that names the drafter and the fault; every answer goes on without drafts, later ones begin so."""
    drafter = Faulty(alone, where, what)
    engine = engine_for(tiny, drafter, 4)
    assert engine.speculator is not None
    with pytest.warns(DraftWarning) as caught:  # noqa: PT031
        handles = [engine.submit(prompt, FREE) for prompt in PROMPTS]
        engine.step()
        engine.step()
        handles += [engine.fork(handles[0]), engine.fork(handles[1])]
        while engine.step():
            engine.check_integrity()
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "faulty" in message
    assert "turned off" in message
    assert isinstance(engine.speculator.failure, DraftError)
    assert str(engine.speculator.failure) == message
    if isinstance(what, type):
        assert isinstance(engine.speculator.failure.__cause__, what)
        assert "made to fail" in message
    for handle, prompt in zip(handles, (*PROMPTS, *PROMPTS[:2]), strict=True):
        same(handle.result(), alone.answer(prompt, FREE))
        check_sums(handle.result().stats.speculation)
    emptied(engine)
    before = len(drafter.calls)
    outputs = engine.generate(PROMPTS, SAMPLED)
    for output, prompt in zip(outputs, PROMPTS, strict=True):
        same(output, alone.answer(prompt, SAMPLED))
        assert output.stats.speculation.drafted == 0
    # It isn't called any more, but perhaps told to give its memory back.
    assert set(drafter.calls[before:]) <= {"close"}
    emptied(engine)


@pytest.mark.parametrize("where", ["propose", "begin", "observe", "fork", "free"])
def test_where_warnings_are_errors_the_engine_stays_usable(tiny: Path, alone: Unspeculated, where: str) -> None:
    """The call that met the fault raises; no request is lost or changed by it."""
    engine = engine_for(tiny, Faulty(alone, where, RuntimeError), 4)
    raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error", DraftWarning)
        handles = [engine.submit(prompt, FREE) for prompt in PROMPTS]

        def fork() -> bool:
            handles.append(engine.fork(handles[0]))
            return True

        going, steps = True, 0
        while going:
            act = fork if steps in (2, 3) else engine.step
            steps += 1
            try:
                going = act()
            except DraftWarning:
                raised += 1
            engine.check_integrity()
        assert raised == 1
        for handle in handles:
            same(handle.result(), alone.answer(tuple(handle.result().prompt_token_ids), FREE))
    emptied(engine)


def test_arrays_and_numpy_integers_are_tokens_too(tiny: Path, alone: Unspeculated) -> None:
    """What a drafter keeps in arrays may be proposed as it is; outputs are Python's integers all the same."""

    def tree(row: DraftRow) -> DraftTree:
        tokens = np.array([299, *alone.truth(row)][: row.budget], dtype=np.int64)
        parents = np.array([-1, -1, *range(1, row.budget)][: len(tokens)])
        return DraftTree(tokens, parents, np.full(len(tokens), 0.5))  # type: ignore[arg-type]

    # With a single candidate left, rejection has no choice, either.
    for params in (FREE, SAMPLED, replace(SAMPLED, verify="rejection", top_k=1)):
        expected = alone.answer(PROMPTS[0], params)
        engine = engine_for(tiny, Scripted(tree))
        [output] = engine.generate([PROMPTS[0]], params)
        same(output, expected)
        assert output.stats.speculation.accepted > 0
        assert all(type(token) is int for token in output.token_ids)
        assert all(type(entry.token_id) is int for entry in output.logprobs)
        emptied(engine)


def test_an_interrupted_drafter_stays_on(tiny: Path, alone: Unspeculated) -> None:
    """An interruption is the user's, not the drafter's fault."""
    engine = engine_for(tiny, Faulty(alone, "propose", KeyboardInterrupt), 4)
    handle = engine.submit(PROMPTS[0], FREE)
    with pytest.raises(KeyboardInterrupt):
        handle.result()
    same(handle.result(), alone.answer(PROMPTS[0], FREE))
    assert handle.result().stats.speculation.drafted > 2
    emptied(engine)


@pytest.mark.parametrize(
    "kind", ["float64", "float16", "int64", "transposed", "broadcast", "read-only", "negative", "nan"]
)
def test_any_array_of_numbers_is_a_q(tiny: Path, alone: Unspeculated, kind: str) -> None:
    """Whatever its type and layout; a drafted token that it gives no chance is refused, and nothing fails."""
    made: dict[str, Any] = {
        "transposed": np.ones((VOCAB_SIZE, 2), dtype=np.float32).T,
        "broadcast": np.broadcast_to(np.float32(1), (2, VOCAB_SIZE)),
        "read-only": np.ones((2, VOCAB_SIZE), dtype=np.float32),
        "negative": -np.ones((2, VOCAB_SIZE), dtype=np.float32),
        "nan": np.full((2, VOCAB_SIZE), np.nan, dtype=np.float32),
    }
    q = made[kind] if kind in made else np.ones((2, VOCAB_SIZE), dtype=kind)
    if kind == "read-only":
        q.setflags(write=False)
    for params in (SAMPLED, replace(SAMPLED, verify="rejection", top_k=1), replace(FREE, verify="rejection")):
        expected = alone.answer(PROMPTS[0], params)
        engine = engine_for(tiny, Scripted(lambda row: DraftTree.chain([*alone.truth(row)[:1], 5], (), q)), 2)
        [output] = engine.generate([PROMPTS[0]], params)
        same(output, expected)
        assert output.stats.speculation.drafted > 2
        assert engine.speculator is not None
        assert engine.speculator.failure is None


def broken_model(path: Path, architecture: Any, bad: int) -> Path:
    """A tiny model in which nothing that sees the token `bad` gives numbers."""
    spec = TinySpec(architecture, layers=2, tied=False)
    weights = tiny_weights(spec)
    weights["token_embd.weight"][bad] = np.nan
    return write_gguf(path, tiny_metadata(spec), [make_tensor(name, values) for name, values in weights.items()])


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("params", [FREE, replace(FREE, logprobs=None), SAMPLED])
def test_a_draft_that_breaks_the_model_harms_nobody_unless_it_is_the_answer(
    tmp_path: Path, architecture: Any, params: SamplingParams
) -> None:
    """Rejected tokens whose scores are not numbers leave no trace, in their own row, in siblings or in blocks that are
    used again; accepted ones end the request where it would end without speculation."""
    whole = Unspeculated(write_tiny_gguf(tmp_path / "whole.gguf", TinySpec(architecture, layers=2, tied=False)))
    answers = {prompt: whole.answer(prompt, params) for prompt in PROMPTS}
    never = next(t for t in range(VOCAB_SIZE) if all(t not in (*p, *a.token_ids) for p, a in answers.items()))

    def tree(row: DraftRow) -> DraftTree:
        first, second = [*whole.truth(row), never, never][:2]
        tokens = [never, first, never, second, never]
        return DraftTree(tokens[: row.budget], [-1, -1, 0, 1, 1][: row.budget])

    path = broken_model(tmp_path / "never.gguf", architecture, never)
    for _ in range(2):
        engine = engine_for(path, Scripted(tree), 5, kv_tokens=16 * 10, prefix_cache=False)
        for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, params), strict=True):
            same(output, answers[prompt])
            assert output.stats.speculation.accepted > 0
        engine.check_integrity()

    expected = answers[PROMPTS[0]].token_ids
    place = next(i for i in range(4, 12) if expected[i] not in expected[:i] and expected[i] not in PROMPTS[0])
    path = broken_model(tmp_path / "answer.gguf", architecture, expected[place])
    found: list[tuple[str, tuple[int, ...], str]] = []
    for draft in ("none", Oracle(whole.truth)):
        engine = engine_for(path, draft, 8)
        handle = engine.submit(PROMPTS[0], params)
        pieces: list[Piece] = []
        with pytest.raises(NumericalError, match=f"at position {len(PROMPTS[0]) + place + 1}") as caught:
            pieces.extend(handle)
        engine.check_integrity()
        check_sums(engine.stats().speculation)
        assert engine.stats().kv_blocks_used == 0
        found.append(("".join(pieces), tuple(t for piece in pieces for t in piece.token_ids), str(caught.value)))
    assert found[0] == found[1]
    assert found[0][1] == expected[: place + 1]
