"""Faults planted in masks, rollback, ends and forced text: each is caught by the checks that the other tests make."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from forerun.constrain.compiler import GrammarCompiler
from forerun.constrain.digits import START
from forerun.constrain.spec import Choice
from forerun.constrain.state import GrammarState
from forerun.errors import ForerunError
from reference.grammars import Language, Written, WrittenJson, check_place, rich_tokenizer, walk_at_random

TOKENIZER = rich_tokenizer("llama-bpe")
GRAMMARS = (
    Written('start: "(" start ")" | "a" | start "b"\n'),
    Written('start: W (" " W)*\nW: /[a-z]+/\n'),
    Written('start: "ab" /c|d/ "the end"\n'),
    WrittenJson("start: /[0-9]*x/\n"),
)
TEXTS = ("-.5", "-.512]-123", "-.54123abcfox", "-.5the")


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER)
    yield made
    made.close()


def check(compiler: GrammarCompiler) -> None:
    """Random walks over some grammars, and all texts of a finite language."""
    for constraint in GRAMMARS:
        grammar = compiler.compile(constraint)
        for seed in range(3):
            walk_at_random(TOKENIZER, grammar, random.Random(seed), 14)
    language = Language(TOKENIZER, TEXTS)
    grammar = compiler.compile(Choice(TEXTS))
    for text in TEXTS:
        state = grammar.start()
        for token in language.encode(text):
            check_place(language, state, list(state._tokens))
            state.advance([token])
        check_place(language, state, list(state._tokens))


ORIGINAL = {name: getattr(GrammarState, name) for name in ("masks", "reachable", "_fill", "_pop", "_settled", "fork")}


def rollback_one_short(self: Any, n: int) -> None:
    if n > 1:
        del self._tokens[-1:], self._places[-1:]
        n -= 1
        ORIGINAL["_pop"](self, n)
        self._tokens.insert(0, 0)
        self._tokens.pop(0)
    else:
        ORIGINAL["_pop"](self, n)


def rows_off_by_one(self: Any, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:
    reached: list[bool] = ORIGINAL["masks"](self, tokens, parents, out)
    out[1:] = np.roll(out[1:], 1, axis=0)
    return reached


def siblings_share_a_row(self: Any, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:
    reached: list[bool] = ORIGINAL["masks"](self, tokens, parents, out)
    for node in range(1, len(tokens)):
        if parents[node] in list(parents[:node]):
            out[node + 1] = out[list(parents).index(parents[node]) + 1]
    return reached


def unreached_rows_keep_what_was_there(
    self: Any, tokens: Sequence[int], parents: Sequence[int], out: Any
) -> list[bool]:
    before = out.copy()
    reached: list[bool] = ORIGINAL["masks"](self, tokens, parents, out)
    for node, reach in enumerate(reached):
        if not reach:
            out[node + 1] = before[node + 1]
    return reached


def ends_always(self: Any, row: Any) -> bool:
    legal = bool(ORIGINAL["_fill"](self, row))
    row[: self.words] |= self._vocabulary.end_bits
    return legal


def one_end_only(self: Any, row: Any) -> bool:
    legal = bool(ORIGINAL["_fill"](self, row))
    last = max(self._vocabulary.ends)
    row[last >> 5] &= ~np.uint32(1 << (last & 31))
    return legal


def padding_set(self: Any, row: Any) -> bool:
    legal = bool(ORIGINAL["_fill"](self, row))
    row[self.words - 1] |= np.uint32(1 << 31)
    return legal


def words_past_the_end_left(self: Any, row: Any) -> bool:
    return bool(ORIGINAL["_fill"](self, row[: self.words]))


def forced_in_bytes(self: Any) -> list[int]:
    settled = ORIGINAL["_settled"](self)
    text = b"".join(map(self._vocabulary.token_bytes.__getitem__, settled))
    return [self._vocabulary.token_bytes.index(bytes([byte])) for byte in text]


def forced_without_context(self: Any) -> list[int]:
    return list(self._matcher.compute_ff_tokens())


def forced_too_far(self: Any) -> list[int]:
    settled = ORIGINAL["_settled"](self)
    return [*settled, 97] if settled else []


def forked_matcher_shared(self: Any) -> Any:
    twin = ORIGINAL["fork"](self)
    twin._matcher = self._matcher
    return twin


def drafts_stay_read(self: Any, tokens: Sequence[int], parents: Sequence[int], out: Any) -> list[bool]:
    reached: list[bool] = ORIGINAL["masks"](self, tokens, parents, out)
    if reached and reached[0] and tokens[0] not in self._vocabulary.ends:
        self._matcher.try_consume_tokens([tokens[0]])
    return reached


def reachable_by_anything(self: Any, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
    return [reach or True for reach in ORIGINAL["reachable"](self, tokens, parents)]


FAULTS: list[tuple[str, Callable[..., Any]]] = [
    ("masks", rows_off_by_one),
    ("masks", siblings_share_a_row),
    ("masks", unreached_rows_keep_what_was_there),
    ("masks", drafts_stay_read),
    ("reachable", reachable_by_anything),
    ("_fill", ends_always),
    ("_fill", one_end_only),
    ("_fill", padding_set),
    ("_fill", words_past_the_end_left),
    ("_settled", forced_in_bytes),
    ("_settled", forced_without_context),
    ("_settled", forced_too_far),
    ("_pop", rollback_one_short),
    ("fork", forked_matcher_shared),
]


def test_the_checks_pass_without_a_fault(compiler: GrammarCompiler) -> None:
    check(compiler)


@pytest.mark.parametrize(("name", "fault"), [pytest.param(n, f, id=f.__name__) for n, f in FAULTS])
def test_each_fault_is_caught(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]
) -> None:
    for constraint in GRAMMARS:
        compiler.compile(constraint)
    compiler.compile(Choice(TEXTS))
    monkeypatch.setattr(GrammarState, name, fault)
    with pytest.raises((AssertionError, ForerunError, pytest.fail.Exception)):
        check(compiler)


def test_digits_that_are_not_taken_back_are_caught(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count that stays after a rollback closes a number that isn't long."""
    state = compiler.compile(GRAMMARS[3]).start()
    three = TOKENIZER.encode_plain("3")

    def stale(self: Any, n: int) -> None:
        place = self._places[-1]
        ORIGINAL["_pop"](self, n)
        self._places[-1] = place

    def open_again() -> bool:
        state.advance(three * 64)
        state.rollback(64)
        out = np.zeros(state.words, np.uint32)
        state.mask(out)
        state._places = [START]
        return bool((out & state._vocabulary.digit_bits).any())

    assert open_again()
    monkeypatch.setattr(GrammarState, "_pop", stale)
    assert not open_again()
