"""Copies of words in other tokens, against a reading of the whole text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from forerun import Engine, SamplingParams
from forerun.draft import DraftRow
from forerun.draft.suffix import SuffixDrafter
from forerun.draft.words import AFTER, BELIEFS, MAX_TOKENS, MOST_MATCHES, ON, WITHIN, WordCopies, WordIndex
from forerun.models.tokenizer import Tokenizer
from reference.tiny import byte_alphabet
from reference.vocabularies import byte_level, sentencepiece

SENTENCEPIECE = sentencepiece(add_space_prefix=True)
MERGES = ["Ġ W", "a n", "d a", "an da", "ĠW anda", "Ġ a", "a b", "Ġ ab", "c d", "ab cd"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes, and a few words that are one token behind a space and two without."""
    tokens = [*byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    tokens.append("ab.x")  # found whole, whatever is around it
    kinds = np.array([1] * (len(tokens) - 1) + [4], np.int32)
    return byte_level(tokens=tokens, token_type=kinds, merges=MERGES, bos_token_id=0, eos_token_id=1)


def texts(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token]) for token in tokens]


def test_the_rest_of_a_word_and_what_follows_it(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_plain("For Wanda Gre, 83")
    assert texts(tokenizer, prompt)[3] == " Wanda"
    copies = WordCopies(tokenizer)
    answer = tokenizer.encode_plain('{"n":"W')
    copy = copies.propose([*prompt, *answer][: len(prompt)], answer, 6)
    assert copy is not None
    assert texts(tokenizer, copy.tokens) == ["anda", " ", "G", "r", "e", ","]
    assert copy.confidence == [BELIEFS[0], AFTER, ON, ON, ON, ON]
    assert copies.propose(prompt, tokenizer.encode_plain('"X'), 6) is None
    assert copies.propose(prompt, tokenizer.encode_plain("Wanda,"), 6) is None


def test_a_whole_word_counts_only_in_other_tokens(tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode_plain("(for Wanda Gre)")
    copies = WordCopies(tokenizer)
    copies.propose(prompt, [], 4)
    copy = copies.propose(prompt, tokenizer.encode_plain('"Wanda'), 4)
    assert copy is not None
    assert texts(tokenizer, copy.tokens) == [" ", "G", "r", "e"]
    assert copy.confidence == [BELIEFS[0] * AFTER, ON, ON, ON]
    assert copies.propose(prompt, tokenizer.encode_plain('" Wanda'), 4) is None
    assert copies.propose(prompt, tokenizer.encode_plain('"for'), 4) is None
    # In the prompt it is the beginning of another token: what follows there isn't known.
    assert copies.propose(prompt, tokenizer.encode_plain('"Gre'), 4) is None


def test_a_word_that_ends_within_a_token(tokenizer: Tokenizer) -> None:
    copies = WordCopies(tokenizer)
    prompt = tokenizer.encode_plain("(ab.x) ")
    assert texts(tokenizer, prompt) == ["(", "ab.x", ")", " "]
    copy = copies.propose(prompt, tokenizer.encode_plain('"a'), 4)
    assert copy is not None
    assert texts(tokenizer, copy.tokens) == ["b"]
    assert copies.propose(prompt, tokenizer.encode_plain('"ab'), 4) is None


def test_words_in_their_order(tokenizer: Tokenizer) -> None:
    """The one behind the last that was copied; the latest, where nothing was."""
    prompt = tokenizer.encode_plain("xa1 xb2 xc3.")
    copies = WordCopies(tokenizer)
    text = [*prompt, *tokenizer.encode_plain('"x')]

    def next_letter() -> str:
        copies.propose(prompt, [], 1)
        copy = copies.propose(text, [], 1)
        assert copy is not None
        return texts(tokenizer, copy.tokens)[0]

    copies.propose(prompt, [], 1)
    assert next_letter() == "a"
    text += tokenizer.encode_plain('a1","x')
    assert next_letter() == "b"
    copies = copies.fork()
    text += tokenizer.encode_plain('b2","x')
    assert next_letter() == "c"
    text += tokenizer.encode_plain('c3","x')
    assert next_letter() == "c"


def test_many_words_are_believed_less(tokenizer: Tokenizer) -> None:
    for n in range(1, len(BELIEFS) + 2):
        prompt = tokenizer.encode_plain(" ".join(f"q{letter}" for letter in "uvwxyz"[:n]) + ".")
        copy = WordIndex(tokenizer, prompt).copy(b"q", tokenizer.encode_plain("q"), 0, 1)
        assert (copy.confidence[0] if copy else None) == (BELIEFS[n - 1] if n <= len(BELIEFS) else None)
    again = tokenizer.encode_plain("qu " * MOST_MATCHES)
    assert WordIndex(tokenizer, again).copy(b"q", (), 0, 1) is not None
    assert WordIndex(tokenizer, again + tokenizer.encode_plain("qu.")).copy(b"q", (), 0, 1) is None


def test_belief_follows_what_came_true(tokenizer: Tokenizer) -> None:
    """Also of proposals that nobody verified."""

    def belief_after(answers: Sequence[str]) -> float:
        copies = WordCopies(tokenizer)
        text = tokenizer.encode_plain("word.")
        for answer in (*answers, ""):
            text += tokenizer.encode_plain(" (w")
            copy = copies.propose(text, [], 3)
            assert copy is not None
            assert copy.confidence[1:] == [WITHIN, WITHIN]
            text += tokenizer.encode_plain(answer)
        return copy.confidence[0]

    copies = belief_after([])
    assert copies == BELIEFS[0]
    assert belief_after(["ish"] * 3) < belief_after(["ish"]) < copies < belief_after(["ord"]) <= WITHIN


def test_no_look_at_what_is_believed_less(tokenizer: Tokenizer) -> None:
    prompt, ahead = tokenizer.encode_plain("For Wanda."), tokenizer.encode_plain('"W')
    copies = WordCopies(tokenizer)
    assert copies.propose(prompt, ahead, 2, BELIEFS[0]) is None
    assert copies.propose(prompt, ahead, 2, BELIEFS[0] - 0.01) is not None
    whole = tokenizer.encode_plain('"Wanda')
    assert copies.propose(prompt, whole, 2, BELIEFS[0] * AFTER) is None
    assert copies.propose(prompt, whole, 2, BELIEFS[0] * AFTER - 0.01) is not None


def test_what_was_ahead_and_did_not_come_teaches_nothing(tokenizer: Tokenizer) -> None:
    copies = WordCopies(tokenizer)
    prompt, ahead = tokenizer.encode_plain("word."), tokenizer.encode_plain('"w')
    for _ in range(3):
        copy = copies.propose(prompt, ahead, 1)
        assert copy is not None
        assert copy.confidence == [BELIEFS[0]]
        prompt = [*prompt, *tokenizer.encode_plain("zzzz")]
    prompt = [*prompt, *ahead, *tokenizer.encode_plain("i")]
    copies.propose(prompt[:-3], ahead, 1)
    copy = copies.propose([*prompt, *tokenizer.encode_plain(" ")], ahead, 1)
    assert copy is not None
    assert copy.confidence[0] < BELIEFS[0]


def test_forks_and_truncation(tokenizer: Tokenizer) -> None:
    copies = WordCopies(tokenizer)
    assert not copies.ready
    prompt, ahead = tokenizer.encode_plain("Wanda wor d."), tokenizer.encode_plain('"w')
    first = copies.propose(prompt, ahead, 3)
    child = copies.fork()
    assert child.ready
    assert child.propose(prompt, ahead, 3) == first != None  # noqa: E711
    copies.truncate(len(prompt))
    assert copies.ready
    copies.truncate(len(prompt) - 1)
    assert not copies.ready
    copy = copies.propose(prompt[:-3], ahead, 3)
    assert copy is None  # what the text ends with may be the word that is being written
    copies.truncate(0)
    assert copies.propose(prompt[:-1], ahead, 3) == first


@pytest.mark.parametrize("prompt", [[], [255], [0xC3], [0xE2, 0x82], [0xF0] * 3])
def test_texts_without_words_or_letters(tokenizer: Tokenizer, prompt: list[int]) -> None:
    """Bytes of the alphabet have their own tokens, whatever they are part of."""
    copies = WordCopies(tokenizer)
    for ahead in ([], [1], tokenizer.encode_plain("é"), tokenizer.encode_plain("é")[:1], prompt[:1]):
        copy = copies.propose(prompt, ahead, 4)
        assert copy is None or copy.tokens


def test_only_the_end_of_a_long_prompt_is_read(tokenizer: Tokenizer) -> None:
    dot = tokenizer.encode_plain(".")
    word, beginning = tokenizer.encode_plain("word"), tokenizer.encode_plain("w")
    assert WordIndex(tokenizer, [*word, *dot * (MAX_TOKENS - 4)]).copy(b"w", beginning, 0, 1) is not None
    assert WordIndex(tokenizer, [*word, *dot * MAX_TOKENS]).copy(b"w", beginning, 0, 1) is None


Text = st.text(st.sampled_from('ab cd.Wn"é'), max_size=40)


def expected(data: bytes, beginning: bytes, after: int) -> tuple[int, int, int] | None:
    """Start and end of the word that should be copied, and how many different ones there are."""
    found = [m.span() for m in re.finditer(rb"[0-9A-Za-z\x80-\xff]+", data) if m.group().startswith(beginning)]
    found = [span for span in found if span[1] < len(data)]
    if not found:
        return None
    start, end = min((span for span in found if span[0] >= after), default=max(found))
    return start, end, len({data[a:b] for a, b in found})


@settings(max_examples=400, deadline=None)
@pytest.mark.parametrize("kind", ["byte level", "sentencepiece"])
@given(prompt=Text, answer=Text, after=st.integers(0, 40), budget=st.integers(1, 8), cut=st.integers(0, 3))
def test_against_a_reading_of_the_text(
    tokenizer: Tokenizer, kind: str, prompt: str, answer: str, after: int, budget: int, cut: int
) -> None:
    """What is proposed always spells what follows in the source; it is missing only where that can't be spelt."""
    tokenizer = tokenizer if kind == "byte level" else SENTENCEPIECE
    source = tokenizer.encode_plain(prompt)
    written = tokenizer.encode_plain(answer)
    written = written[: len(written) - cut]
    copies = WordCopies(tokenizer)
    copies.propose(source, [], 1)
    copies._after = after
    copy = copies.propose(source, written, budget)
    data = b"".join(map(tokenizer.token_bytes, source))
    pieces = [*map(tokenizer.token_bytes, source), *map(tokenizer.token_bytes, written)]
    tail = re.search(rb"[0-9A-Za-z\x80-\xff]*\Z", b"".join(pieces))
    assert tail is not None
    beginning = tail.group()
    span = expected(data, beginning, after) if beginning else None
    if span is None:
        assert copy is None
        return
    start, end, n_words = span
    behind = data[start + len(beginning) :]
    if copy is not None:
        spelt = b"".join(map(tokenizer.token_bytes, copy.tokens))
        assert spelt
        assert behind.startswith(spelt)
        assert len(copy.tokens) == len(copy.confidence) <= budget
        assert copy.end == end
        first = BELIEFS[n_words - 1] * (1 if end - start > len(beginning) else AFTER)
        assert copy.confidence[0] == pytest.approx(first)
        if len(copy.tokens) < budget:
            # It ends with the text, or within a token that begins in the word.
            assert spelt == behind or end not in boundaries(tokenizer, source)
    elif kind == "byte level" and n_words <= len(BELIEFS) and end - start > len(beginning):
        rest = data[start + len(beginning) : end]
        assert len(pieces) > 8 or not is_text(rest)


def boundaries(tokenizer: Tokenizer, tokens: Sequence[int]) -> set[int]:
    ends = [0]
    for token in tokens:
        ends.append(ends[-1] + len(tokenizer.token_bytes(token)))
    return set(ends)


def is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_the_suffix_drafter_takes_what_is_believed_more(tokenizer: Tokenizer) -> None:
    drafter = SuffixDrafter(shared=False, tokenizer=tokenizer)
    drafter.begin(0, None)
    prompt = tokenizer.encode_plain("For Wanda Gre. xyz xyz xyz xyz x")
    [tree] = drafter.propose([DraftRow(0, prompt, 4, SamplingParams(), 0)])
    assert (tree.drafter, texts(tokenizer, tree.tokens)[:2]) == ("suffix", ["y", "z"])
    text = [*prompt, *tokenizer.encode_plain('"W')]
    [tree] = drafter.propose([DraftRow(0, text, 4, SamplingParams(), 0)])
    assert tree.drafter == "words"
    assert tree.is_chain
    assert texts(tokenizer, tree.tokens) == ["anda", " ", "G", "r"]
    [ahead] = drafter.propose([DraftRow(0, prompt, 4, SamplingParams(), 0, None, tokenizer.encode_plain('"W'))])
    assert (ahead.drafter, ahead.tokens) == ("words", tree.tokens)
    assert drafter.setup_seconds > 0
    drafter.fork(0, 1)
    [forked] = drafter.propose([DraftRow(1, text, 4, SamplingParams(), 0)])
    assert forked.tokens == tree.tokens
    drafter.free(1, text)
    drafter.truncate(0, 3)
    rest = [*prompt[:3], *tokenizer.encode_plain(' "W')]
    [tree] = drafter.propose([DraftRow(0, rest, 4, SamplingParams(), 0)])
    assert tree.drafter != "words"  # the name is forgotten
    drafter.free(0, rest)
    assert (drafter.n_requests, drafter._states) == (0, {})
    plain = SuffixDrafter(shared=False)
    plain.begin(0, None)
    [tree] = plain.propose([DraftRow(0, text, 4, SamplingParams(), 0)])
    assert not len(tree)


def test_an_engine_copies_words(tiny: Path) -> None:
    engine = Engine(tiny, kv_tokens=256, threads=1, cache_weights=False, draft_len=4)
    assert engine.speculator is not None
    assert isinstance(engine.speculator.drafter, SuffixDrafter)
    assert engine.speculator.drafter._tokenizer is engine.tokenizer
