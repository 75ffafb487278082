"""Text from tokens: whole characters, stop strings, and no more held back than must be."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.engine.text import TextStream
from forerun.models.tokenizer import Tokenizer
from reference.tiny import EOS_ID, TinySpec, tiny_metadata, tiny_tokens

TOKENIZER = Tokenizer.from_gguf(tiny_metadata(TinySpec("llama")))
EMOJI = "😀".encode()  # byte tokens have the ids 0 to 255


class Cut(NamedTuple):
    """Where a text ends: after how many tokens, with which text, and whether a stop string did it."""

    n_tokens: int
    text: str
    stopped: bool


def whole_characters(tokens: Sequence[int]) -> str:
    """The text of tokens without an unfinished character at its end, decoded from the beginning."""
    data = b"".join(TOKENIZER.token_bytes(t) for t in tokens if not TOKENIZER.is_special(t))
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(data)


def expected_cut(tokens: Sequence[int], stops: Sequence[str], min_tokens: int, keep: bool) -> Cut:
    """The obvious reference: after each token, look for every stop string everywhere in the text."""
    for n in range(1, len(tokens) + 1):
        text, before = whole_characters(tokens[:n]), whole_characters(tokens[: n - 1])
        found = [
            (start, -len(stop))
            for stop in stops
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > len(before)
        ]
        if n >= min_tokens and found:
            start, negative = min(found)
            return Cut(n, text[: start - negative] if keep else text[:start], True)
    return Cut(len(tokens), TOKENIZER.decode(tokens), False)


def stream(stops: Sequence[str], keep: bool = False, skip_special: bool = True) -> TextStream:
    return TextStream(TOKENIZER, stops, keep_stop=keep, skip_special=skip_special)


# Parts of characters, characters, tokens of several, and a special token among them.
TOKENS = st.sampled_from(
    [*b"ab ", *EMOJI, *"é".encode(), 0xFF, tiny_tokens().index("in"), tiny_tokens().index("ing"), EOS_ID]
)
STOPS = st.text(st.sampled_from("abing é😀\ufffd"), min_size=1, max_size=4)


@given(
    tokens=st.lists(TOKENS, max_size=14),
    stops=st.lists(STOPS, max_size=3, unique=True),
    min_tokens=st.integers(0, 6),
    keep=st.booleans(),
)
@settings(max_examples=400, deadline=None)
def test_text_ends_where_the_reference_ends_it(
    tokens: list[int], stops: list[str], min_tokens: int, keep: bool
) -> None:
    expected = expected_cut(tokens, stops, min_tokens, keep)
    out, released, stopped = stream(stops, keep), "", False
    for n, token in enumerate(tokens, 1):
        stopped = out.push(token, may_stop=n >= min_tokens)
        released += out.take()
        if stopped:
            assert n == expected.n_tokens
            break
        # Held back is the longest end of the text that may become a stop string, and nothing else.
        unsure = [
            k
            for k in range(len(out.text) + 1)
            if any(len(s) > k and s.startswith(out.text[len(out.text) - k :]) for s in stops)
        ]
        assert released == out.text[: len(out.text) - max(unsure, default=0)]
    assert stopped == expected.stopped
    out.finish()
    released += out.take()
    assert out.text == released == expected.text
    assert out.take() == ""


@given(
    data=st.lists(st.sampled_from([*EMOJI, *"é".encode(), 0x41, 0xE2]), max_size=12),
    stops=st.lists(STOPS, max_size=2, unique=True),
)
@settings(max_examples=200, deadline=None)
def test_a_piece_never_holds_part_of_a_character(data: list[int], stops: list[str]) -> None:
    out = stream(stops)
    pieces = []
    for token in data:
        out.push(token, may_stop=False)
        pieces.append(out.take())
    out.finish()
    pieces.append(out.take())
    assert "".join(pieces) == bytes(data).decode("utf-8", errors="replace")


def test_a_character_spread_over_steps_comes_whole_with_its_last_byte() -> None:
    out = stream([])
    seen = []
    for token in [ord("a"), *EMOJI, ord("b")]:
        out.push(token, may_stop=True)
        seen.append(out.take())
    assert seen == ["a", "", "", "", "😀", "b"]


def test_a_text_that_ends_inside_a_character_ends_in_one_replacement() -> None:
    out = stream([])
    for token in (ord("a"), *EMOJI[:3]):
        out.push(token, may_stop=True)
    assert out.take() == "a"
    out.finish()
    assert (out.take(), out.text) == ("\ufffd", "a\ufffd")


def test_an_unfinished_character_at_the_end_completes_no_stop_string() -> None:
    """What ended the text was something else; its replacement character is no reason to cut."""
    out = stream(["a\ufffd"])
    for token in (ord("a"), *EMOJI[:2]):
        assert not out.push(token, may_stop=True)
    out.finish()
    assert out.text == "a\ufffd"


def test_what_was_held_back_is_released_once_it_is_no_stop_string() -> None:
    out = stream(["abc"])
    seen = []
    for character in b"ababd":
        out.push(character, may_stop=True)
        seen.append(out.take())
    assert seen == ["", "", "ab", "", "abd"]


@pytest.mark.parametrize("keep", [False, True])
def test_the_earliest_stop_string_wins_and_of_two_that_begin_together_the_longer(keep: bool) -> None:
    ing = tiny_tokens().index("ing")
    out = stream(["ng", "in", "ing"], keep)
    assert out.push(ing, may_stop=True)
    assert out.text == ("ing" if keep else "")


def test_a_stop_string_completed_too_early_is_text_and_may_overlap_the_one_that_counts() -> None:
    out = stream(["aa"])
    assert not out.push(ord("a"), may_stop=False)
    assert not out.push(ord("a"), may_stop=False)
    assert out.push(ord("a"), may_stop=True)
    assert out.text == "a"


@pytest.mark.parametrize(("skip_special", "expected"), [(True, "ab"), (False, "a<|im_end|>b")])
def test_special_tokens_are_left_out_or_written(skip_special: bool, expected: str) -> None:
    out = stream([], skip_special=skip_special)
    for token in (ord("a"), EOS_ID, ord("b")):
        out.push(token, may_stop=True)
    out.finish()
    assert out.text == expected
