"""Masks and forced text against languages written out in full, which need no grammar to know what may come next."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from forerun.constrain.compiler import GrammarCompiler
from forerun.constrain.spec import Choice
from reference.grammars import Language, check_place, mask_of, rich_tokenizer
from reference.vocabularies import sentencepiece

PIECES = [
    "a", "b", "ab", "abc", "the", " the", " quick", '{"', '":', '",', "12", "123", "4", "0", "é", "高", "领", "🙂",
    "\n", "  ", "日本", "fox", "x", "-", ".5", '"', "[", "]", "null", "true",
]  # fmt: skip


def random_texts(rng: random.Random) -> tuple[str, ...]:
    """A few texts that share beginnings; some are the beginning of another."""
    stem = "".join(rng.choices(PIECES, k=rng.randrange(5)))
    texts = set()
    for _ in range(rng.randint(1, 5)):
        text = stem[: rng.randint(0, len(stem))] if rng.random() < 0.3 else stem
        texts.add(text + "".join(rng.choices(PIECES, k=rng.randint(0, 6))))
    return tuple(sorted(text for text in texts if text)) or ("a",)


@pytest.fixture(scope="module", params=["qwen2", "gpt-2", "llama-bpe", "tekken", "smollm", "sentencepiece", "spaced"])
def compiler(request: pytest.FixtureRequest) -> Iterator[GrammarCompiler]:
    if request.param in ("sentencepiece", "spaced"):
        tokenizer = sentencepiece(add_space_prefix=request.param == "spaced")
    else:
        tokenizer = rich_tokenizer(request.param)
    made = GrammarCompiler(tokenizer)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(8))
def test_masks_and_forced_text_of_finite_languages(compiler: GrammarCompiler, seed: int) -> None:
    """Along random texts in the model's own tokenization: the mask has all that the bytes allow, or the one token that
    every text goes on with; the model's own next token is always in it."""
    rng = random.Random(seed)
    tokenizer = compiler.tokenizer
    for _ in range(4):
        texts = random_texts(rng)
        language = Language(tokenizer, texts)
        grammar = compiler.compile(Choice(texts))
        for text in texts:
            state = grammar.start()
            ids = language.encode(text)
            assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
            for n in range(len(ids) + 1):
                check_place(language, state, ids[:n])
                if n < len(ids):
                    state.advance([ids[n]])
            assert state.accepting
            assert state.advance([min(tokenizer.eos_ids)]) == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_text_in_any_tokenization_stays_within_its_language(compiler: GrammarCompiler, seed: int) -> None:
    """Along random tokens under the bytes alone, the mask or a tokenization that the model wouldn't choose."""
    rng = random.Random(seed)
    tokenizer = compiler.tokenizer
    for _ in range(8):
        texts = random_texts(rng)
        language = Language(tokenizer, texts)
        state = compiler.compile(Choice(texts)).start()
        done = b""
        while not state.ended:
            mask, possible = mask_of(state), language.by_bytes(done)
            forced = state.forced(99)
            assert mask
            assert mask <= possible
            assert (tokenizer.eos_ids <= mask) == (done in language.rest(done))
            if forced:
                assert mask == {forced[0]}
                text = done + b"".join(map(tokenizer.token_bytes, forced))
                assert all(rest.startswith(text) for rest in language.rest(done))
            else:
                assert mask == possible
            token = rng.choice(sorted(possible if rng.random() < 0.5 else mask))
            state.advance([token])
            done += tokenizer.token_bytes(token)
