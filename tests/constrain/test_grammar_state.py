"""A text's place in its grammar: masks for every node, exact rollback, ends; against a matcher that reads all again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from forerun.constrain.compiler import Grammar, GrammarCompiler
from forerun.errors import ConstraintError, InvalidConstraintError
from reference.grammars import Written, WrittenJson, mask_of, rich_tokenizer, walk_at_random
from reference.tiny import byte_alphabet
from reference.vocabularies import byte_level

TOKENIZER = rich_tokenizer()
ENDS = set(TOKENIZER.eos_ids)


def json_text(schema: dict[str, Any]) -> WrittenJson:
    return WrittenJson(LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False}))


def regex(pattern: str) -> Written:
    return Written(LLMatcher.grammar_from_regex(pattern))


GRAMMARS: dict[str, Written] = {
    "one of several ends": regex("ab(c|d)?"),
    "letters": regex("[a-c]{2,5}(x|yz)*"),
    "any": regex("(.|\n)*"),
    "digits": regex("[0-9]([0-9]|)"),
    "unicode": regex(r'\["(高领|翻领|斜领)"\]'),
    "emoji": regex("(🙂|🙃|é|e){1,3}!"),
    "recursive": Written('start: "(" start ")" | "a" | start "b"\n'),
    "words": Written('start: W (" " W)*\nW: /[a-z]+/\n'),
    "keywords": Written('start: "the" | "then" | "there" | /[a-t]{3}/ "x"\n'),
    "user-defined token": regex("(<tool_call>|<tool)x?"),
    "object": json_text(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    ),
    "enum": json_text({"enum": ["A", "AB", "first", 12, 123, None, {"a": [1, 2]}]}),
    "numbers": json_text({"type": "array", "items": {"type": "number"}}),
    "case 16": json_text(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["A", "B"]},
                "note": {"anyOf": [{"type": "string", "maxLength": 200}, {"type": "null"}]},
            },
            "required": ["type", "note"],
            "additionalProperties": False,
        }
    ),
    "tree": json_text(
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "type": "object",
                    "properties": {"v": {"type": "integer"}, "c": {"type": "array", "items": {"$ref": "#/$defs/n"}}},
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
        }
    ),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER)
    yield made
    made.close()


@pytest.fixture(params=GRAMMARS, scope="module")
def grammar(compiler: GrammarCompiler, request: pytest.FixtureRequest) -> Grammar:
    return compiler.compile(GRAMMARS[request.param])


@pytest.mark.parametrize("seed", range(3))
def test_random_walks_trees_rollbacks_and_forks(grammar: Grammar, seed: int) -> None:
    """The mask of every place equals what a new matcher that reads the text accepts, token by token."""
    walk_at_random(TOKENIZER, grammar, random.Random(seed), 14)


def test_what_follows_an_end_token_is_dropped(compiler: GrammarCompiler) -> None:
    """Case 15: one call accepts [.., EOS, extra]."""
    for end in sorted(ENDS):
        state = compiler.compile(regex("ab(c|d)?")).start()
        ids = TOKENIZER.encode_plain("ab")
        assert state.advance([*ids, end, 7, 8, end]) == len(ids) + 1
        assert state.ended
        assert state.complete
        assert state.accepting
        assert state.n_tokens == len(ids) + 1
        assert state.forced(9) == []
        assert mask_of(state) == ENDS
        assert state.advance([3, 4]) == 0
        state.rollback(1)
        assert not state.ended
        assert mask_of(state) > ENDS
        state.advance(TOKENIZER.encode_plain("c"))
        assert state.complete


def test_a_complete_grammar_allows_only_ends(compiler: GrammarCompiler) -> None:
    """Case 17; and where it is only accepting, more than that."""
    state = compiler.compile(json_text({"const": {"a": 1}})).start()
    state.advance(TOKENIZER.encode_plain('{"a":1'))
    assert not state.accepting
    assert not ENDS & mask_of(state)
    state.advance(TOKENIZER.encode_plain("}"))
    assert state.complete
    assert mask_of(state) == ENDS
    state = compiler.compile(json_text({"type": "integer"})).start()
    state.advance(TOKENIZER.encode_plain("1"))
    assert state.accepting
    assert not state.complete
    assert mask_of(state) > ENDS


def test_an_end_is_legal_after_one_digit_of_two(compiler: GrammarCompiler) -> None:
    """Case 33."""
    state = compiler.compile(regex("[0-9]([0-9]|)")).start()
    assert not ENDS & mask_of(state)
    state.advance(TOKENIZER.encode_plain("4"))
    assert mask_of(state) > ENDS


def test_an_illegal_token_changes_nothing(compiler: GrammarCompiler) -> None:
    """Case 16: wherever in a call it stands, end tokens out of place and ids that don't exist included."""
    state = compiler.compile(GRAMMARS["case 16"]).start()
    ids = TOKENIZER.encode_plain('{"type":"A"')
    wrong = TOKENIZER.encode_plain("C")[0]
    for bad in (wrong, min(ENDS), TOKENIZER.vocab_size, 2**31, 2**40, -1):
        for n in range(len(ids)):
            before = mask_of(state)
            with pytest.raises(ConstraintError, match="isn't allowed as number"):
                state.advance([*ids[:n], bad, *ids[n:]])
            assert state.n_tokens == 0
            assert mask_of(state) == before
    state.advance(ids)
    state.advance(TOKENIZER.encode_plain(',"note":null}'))
    assert state.complete


def test_a_forced_prefix_may_end_inside_a_character(compiler: GrammarCompiler) -> None:
    """Case 21: forced text on or off gives the same text, whichever of the three it is."""
    grammar = compiler.compile(GRAMMARS["unicode"])
    for text in ('["高领"]', '["翻领"]', '["斜领"]'):
        ids = TOKENIZER.encode_plain(text)
        step = grammar.start()
        jump = grammar.start()
        for n, token in enumerate(ids):
            assert token in mask_of(step)
            step.advance([token])
            if jump.n_tokens == n:
                if forced := jump.forced(99):
                    assert ids[n : n + len(forced)] == forced
                    jump.advance(forced)
                else:
                    assert token in mask_of(jump)
                    jump.advance([token])
        assert jump.n_tokens == len(ids)
        assert jump.complete
        assert step.complete


def test_numbers_are_not_cut_by_forced_text(compiler: GrammarCompiler) -> None:
    """Case 21: {"name": string, "population": integer} once gave 2 instead of 2140000."""
    grammar = compiler.compile(
        json_text(
            {
                "type": "object",
                "properties": {"name": {"type": "string"}, "population": {"type": "integer"}},
                "required": ["name", "population"],
                "additionalProperties": False,
            }
        )
    )
    text = '{"name":"Paris","population":2140000}'
    ids = TOKENIZER.encode_plain(text)
    state = grammar.start()
    while state.n_tokens < len(ids):
        forced = state.forced(99)
        assert ids[state.n_tokens :][: len(forced)] == forced
        state.advance(forced or [ids[state.n_tokens]])
    assert state.complete


@pytest.mark.parametrize("row", [np.zeros(3, np.uint32), np.zeros(99, np.int32), np.zeros((1, 99), np.uint32)])
def test_a_row_of_another_shape_or_type_is_refused(compiler: GrammarCompiler, row: Any) -> None:
    with pytest.raises(ValueError, match="expected a contiguous row of at least"):
        compiler.compile(regex("a")).start().mask(row)


def test_more_than_was_read_cannot_be_taken_back(compiler: GrammarCompiler) -> None:
    state = compiler.compile(regex("a*")).start()
    state.advance(TOKENIZER.encode_plain("a"))
    for n in (2, -1):
        with pytest.raises(ValueError, match=f"can't take back {n} of 1"):
            state.rollback(n)
    state.rollback(0)
    assert state.n_tokens == 1


def test_a_state_outlives_its_limits(compiler: GrammarCompiler) -> None:
    """Too costly a place is an error of that place alone: drafts stop before it, and the text may go another way."""
    properties = {f"property {n}": {"type": "integer"} for n in range(600)}
    costly = {"type": "object", "properties": properties, "additionalProperties": False}
    state = compiler.compile(json_text({"type": "array", "items": {"anyOf": [{"type": "integer"}, costly]}})).start()
    bracket, one, brace = (TOKENIZER.encode_plain(letter)[0] for letter in "[1{")
    state.advance([bracket])
    begin = mask_of(state)
    for _ in range(2):
        with pytest.raises(ConstraintError, match=r"costs more than the limits allow after \d tokens .* max is 2000"):
            state.advance([brace])
            mask_of(state)
        state.rollback(state.n_tokens - 1)
        assert mask_of(state) == begin
        out = np.full((5, state.words), 0xDEADBEEF, np.uint32)
        assert state.masks([brace, one, brace, one], [-1, -1, 0, 1], out) == [False, True, False, True]
        assert not out[[1, 3]].any()
        assert mask_of(state) == begin
    state.advance(TOKENIZER.encode_plain("1]"))
    assert state.complete


def test_a_dead_end_is_an_error() -> None:
    """Never a text that isn't valid: where the model has no token to go on with, not even an end is allowed."""
    alphabet = [*byte_alphabet(), "<|endoftext|>"]
    alphabet[ord("z")] = "ab"
    tokenizer = byte_level(tokens=alphabet, token_type=np.array([1] * 256 + [3], np.int32), merges=["a b"],
                           bos_token_id=256, eos_token_id=256)  # fmt: skip
    compiler = GrammarCompiler(tokenizer)
    state = compiler.compile(Written('start: "a" /z+/ | "b"\n')).start()
    out = np.zeros((3, state.words), np.uint32)
    assert state.masks([97, 98], [-1, -1], out) == [False, True]
    state.advance([97])
    for _ in range(2):
        with pytest.raises(ConstraintError, match="no way on after 1 tokens"):
            mask_of(state)
    state.rollback(1)
    state.advance([98])
    assert mask_of(state) == {256}
    with pytest.raises(InvalidConstraintError, match=r"no way on|can't be begun"):
        compiler.compile(Written('start: "az"\n'))
    compiler.close()
