"""Endless digits: the limit counts outside of strings, leaves a way out and rolls back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from forerun.constrain.compiler import GrammarCompiler
from forerun.constrain.digits import MAX_DIGITS, START, JsonPlace, after
from reference.grammars import Written, WrittenJson, mask_of, rich_tokenizer, tokens_of

TOKENIZER = rich_tokenizer()
DIGITS = {token for token in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(token)[:1].isdigit()}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER)
    yield made
    made.close()


def text_of(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})


def slow_after(text: bytes) -> JsonPlace:
    """From the beginning, byte by byte."""
    inside = escaped = False
    digits = 0
    for byte in text.decode("latin-1"):
        if inside:
            if escaped:
                escaped = False
            elif byte == "\\":
                escaped = True
            elif byte == '"':
                inside = False
        elif byte == '"':
            inside, digits = True, 0
        else:
            digits = digits + 1 if byte in "0123456789" else 0
    return JsonPlace(inside, escaped, digits)


@pytest.mark.parametrize("seed", range(20))
def test_places_against_a_slow_reading(seed: int) -> None:
    """However a text is cut into pieces."""
    rng = random.Random(seed)
    for _ in range(50):
        text = "".join(
            rng.choices(['"', "\\", "1", "23", "a", ".", "é", '\\"', "{", " "], k=rng.randint(0, 30))
        ).encode()
        place, at = START, 0
        while at < len(text):
            stop = rng.randint(at, len(text))
            place = after(place, text[at:stop])
            at = stop
            assert place == slow_after(text[:at])


def test_digits_end_after_so_many(compiler: GrammarCompiler) -> None:
    """0.333...: after 64 digits the number ends, or goes on with an exponent; rolled back, it is open again."""
    state = compiler.compile(WrittenJson(text_of({"type": "number"}))).start()
    three = TOKENIZER.encode_plain("3")
    state.advance(TOKENIZER.encode_plain("0."))
    for n in range(MAX_DIGITS):
        assert DIGITS & mask_of(state), n
        state.advance(three)
    closed = mask_of(state)
    assert not DIGITS & closed
    assert TOKENIZER.eos_ids <= closed
    assert TOKENIZER.encode_plain("e")[0] in closed
    state.rollback(1)
    assert DIGITS & mask_of(state)
    twin = state.fork()
    twin.advance(three)
    assert mask_of(twin) == closed
    twin.advance(TOKENIZER.encode_plain("e"))
    assert DIGITS & mask_of(twin)


def test_every_node_of_a_draft_counts_its_own_digits(compiler: GrammarCompiler) -> None:
    """A draft can't go past the limit, and both ways to ask about it agree."""
    state = compiler.compile(WrittenJson(text_of({"type": "array", "items": {"type": "integer"}}))).start()
    three, comma = TOKENIZER.encode_plain("3") + TOKENIZER.encode_plain(",")
    state.advance(TOKENIZER.encode_plain("[") + [three] * (MAX_DIGITS - 2))
    tokens, parents = [three, three, three, comma, three], [-1, 0, 1, 1, 3]
    out = np.zeros((6, state.words), np.uint32)
    assert state.masks(tokens, parents, out) == [True, True, False, True, True]
    assert state.reachable(tokens, parents) == [True, True, False, True, True]
    assert [bool(DIGITS & tokens_of(row)) for row in out] == [True, True, False, False, True, True]
    assert DIGITS & mask_of(state)


def test_digits_in_strings_and_outside_of_json_are_free(compiler: GrammarCompiler) -> None:
    many = TOKENIZER.encode_plain("3") * (2 * MAX_DIGITS)
    for constraint, start in ((WrittenJson(text_of({"type": "string"})), '"'), (Written("start: /[0-9]+/\n"), "")):
        state = compiler.compile(constraint).start()
        state.advance(TOKENIZER.encode_plain(start) + many)
        assert DIGITS & mask_of(state)


def test_digits_go_on_where_nothing_else_can(compiler: GrammarCompiler) -> None:
    """An integer whose minimum has 70 digits is possible."""
    state = compiler.compile(WrittenJson("start: /[0-9]{70,}/\n")).start()
    four = TOKENIZER.encode_plain("4")
    state.advance(four * 69)
    assert mask_of(state) <= DIGITS
    state.advance(four)
    assert mask_of(state) == TOKENIZER.eos_ids
