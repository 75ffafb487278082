"""A tokenizer as grammars see it: canonical, byte for byte, its special tokens out of reach."""

from __future__ import annotations

import numpy as np
import pytest
from llguidance import LLMatcher

from forerun.constrain.compiler import GrammarCompiler
from forerun.constrain.vocabulary import GrammarVocabulary
from forerun.models.tokenizer import Tokenizer
from reference.grammars import Written, mask_of, rich_tokenizer, tokens_of
from reference.vocabularies import byte_level, sentencepiece

TEXTS = [
    "abc",
    " a ab",
    '{"name":"Ada"}',
    "  x",
    "é高",
    "12345",
    "\n\n a",
    "<|im_end|>",
    "<tool_call>x",
    "a▁b",
    "e\u0301",
]


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "llama-bpe", "tekken"])
def test_texts_are_cut_as_the_model_cuts_them(pre: str) -> None:
    tokenizer = rich_tokenizer(pre)
    vocabulary = GrammarVocabulary(tokenizer)
    assert vocabulary.backend.is_canonical
    assert vocabulary.words * 32 > vocabulary.size == tokenizer.vocab_size
    for text in TEXTS:
        ids = vocabulary.backend.tokenize_bytes(text.encode())
        assert b"".join(vocabulary.token_bytes[index] for index in ids) == text.encode()
        if text != "e\u0301":
            assert ids == tokenizer.encode_plain(text)


@pytest.mark.parametrize("spaced", [False, True])
def test_sentencepiece_has_no_leading_space_in_the_middle_of_a_text(spaced: bool) -> None:
    tokenizer = sentencepiece(add_space_prefix=spaced)
    vocabulary = GrammarVocabulary(tokenizer)
    for text in TEXTS:
        ids = vocabulary.backend.tokenize_bytes(text.encode())
        expected = text.replace("▁", " ").encode()
        if "▁" not in text:
            assert b"".join(vocabulary.token_bytes[index] for index in ids) == expected
    assert vocabulary.backend.tokenize_bytes(b"ab") == sentencepiece(add_space_prefix=False).encode_plain("ab")


@pytest.mark.parametrize("tokenizer", [rich_tokenizer(), byte_level(), sentencepiece()])
def test_special_tokens_are_never_text(tokenizer: Tokenizer) -> None:
    """Nor is an unused id; what looks like markup but is ordinary vocabulary is."""
    compiler = GrammarCompiler(tokenizer)
    special = {token for token in range(tokenizer.vocab_size) if tokenizer.is_special(token)}
    for text in ("(.|\n)*", r"<\|im_end\|>", "<s>|</s>|<unk>", r"\[PAD0\]"):
        state = compiler.compile(Written(LLMatcher.grammar_from_regex(text))).start()
        mask = mask_of(state)
        assert not (special - tokenizer.eos_ids) & mask
        assert (tokenizer.eos_ids <= mask) == state.accepting
        assert max(mask) < tokenizer.vocab_size
    compiler.close()


def test_user_defined_tokens_are_text() -> None:
    tokenizer = rich_tokenizer()
    [token] = tokenizer.encode_plain("<tool_call>")
    compiler = GrammarCompiler(tokenizer)
    state = compiler.compile(Written(LLMatcher.grammar_from_regex("<tool_call>(x|y)"))).start()
    assert state.forced(9) == [token]
    assert mask_of(state) == {token}
    compiler.close()


def test_bits_of_ends_and_digits() -> None:
    tokenizer = rich_tokenizer()
    vocabulary = GrammarVocabulary(tokenizer)
    assert tokens_of(vocabulary.end_bits) == tokenizer.eos_ids
    digits = {token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token)[:1].isdigit()}
    assert tokens_of(vocabulary.digit_bits) == digits
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.end_bits[0] = np.uint32(1)
