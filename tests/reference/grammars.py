"""Grammars the slow way: tokens tried on a matcher that has read all again, and languages written out in full."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

from forerun.constrain.compiler import Grammar
from forerun.constrain.spec import Constraint
from forerun.constrain.state import GrammarState
from forerun.errors import ConstraintError
from forerun.models.tokenizer import Tokenizer
from reference.tiny import byte_alphabet
from reference.vocabularies import byte_level

_CORPUS = (
    '{"name":"Ada Lovelace","age":36,"tags":["first","second"],"ok":true,"none":null,"x":-12.5e10} '
    '{"type":"A","note":null,"population":2140000,"year":2024,"city":"Zürich","colour":"rouge"}, '
    '[1, 22, 333, 4444, 12345]\n  "key": "value",\n  "other": false\n'
    "高领 翻领 斜领 日本 the quick brown fox jumps over the lazy dog abc abab abcabc 🙂🙃 café cafés "
)


@cache
def rich_tokenizer(pre: str = "qwen2", merges: int = 180) -> Tokenizer:
    """A byte-level tokenizer whose tokens span JSON's punctuation, digits and parts of characters; two end tokens.

    `merges` pairs are learned from a few lines of text; V isn't a multiple of 32.
    """
    plain = byte_level(pre=pre)
    alphabet = byte_alphabet()
    base = plain.encode_plain("a")[0] - ord("a")
    assert base == 0
    words = [[alphabet[byte] for byte in part.encode()] for part in _CORPUS.split(" ")]
    words += [["Ġ", *word] for word in words]
    learned: list[tuple[str, str]] = []
    tokens = list(alphabet)
    for _ in range(merges):
        pairs = Counter(pair for word in words for pair in pairwise(word))
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        learned.append(best)
        tokens.append("".join(best))
        words = [_merged(word, best) for word in words]
    tokens = list(dict.fromkeys(tokens))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    kinds = [1] * len(tokens) + [3] * 3 + [4] + [5]
    tokens += [*special, "<tool_call>", "[PAD0]"]
    if len(tokens) % 32 == 0:
        tokens.append("[PAD1]")
        kinds.append(5)
    return byte_level(
        pre,
        tokens=tokens,
        token_type=np.array(kinds, np.int32),
        merges=[f"{a} {b}" for a, b in learned],
        bos_token_id=tokens.index("<|endoftext|>"),
        eos_token_id=tokens.index("<|im_end|>"),
    )


def _merged(word: list[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return out


@dataclass(frozen=True, eq=False)
class Written(Constraint):
    """A grammar of llguidance as it stands."""

    text: str
    is_json: ClassVar[bool] = False

    @property
    def content(self) -> str:
        return self.text

    def check(self) -> None:
        pass

    def grammar(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class WrittenJson(Written):
    is_json: ClassVar[bool] = True


def tokens_of(row: NDArray[np.uint32]) -> set[int]:
    """The tokens whose bit is set, padding included."""
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def mask_of(state: Any) -> set[int]:
    """What a state allows next."""
    out = np.full(state.words, 0xDEADBEEF, np.uint32)
    state.mask(out)
    return tokens_of(out)


def replayed(grammar: Grammar, history: Sequence[int]) -> set[int]:
    """What may follow `history`: a new matcher reads it, then every token is tried.

    Where the text is forced, its next token in the model's own tokenization alone is allowed.
    """
    vocabulary = grammar.vocabulary
    if any(token in vocabulary.ends for token in history):
        return set(vocabulary.ends)
    matcher = grammar.matcher()
    for token in history:
        assert matcher.consume_token(token), matcher.get_error()
    forced = matcher.deep_copy().compute_ff_tokens()
    if forced:
        return {forced[0]}
    words = [token for token in range(vocabulary.size) if vocabulary.token_bytes[token]]
    allowed = {token for token in words if matcher.validate_tokens([token])}
    for token in random.Random(len(history)).sample(words, 8):
        assert matcher.deep_copy().consume_token(token) == (token in allowed)
    return allowed | (set(vocabulary.ends) if matcher.is_accepting() else set())


def random_tree(rng: random.Random, state: Any, tokens: Sequence[int], n: int) -> tuple[list[int], list[int]]:
    """A draft tree of n nodes: mostly tokens that the grammar allows where they stand, some that it may not."""
    nodes: list[int] = []
    parents: list[int] = []
    paths: list[list[int]] = [[]]
    for _ in range(n):
        parent = rng.randrange(-1, len(nodes)) if rng.random() < 0.4 else len(nodes) - 1
        path = paths[parent + 1]
        token = rng.choice(tokens)
        if rng.random() < 0.8:
            twin = state.fork()
            with suppress(ConstraintError):
                twin.advance(path)
                token = rng.choice(sorted(mask_of(twin)))
        nodes.append(token)
        parents.append(parent)
        paths.append([*path, token])
    return nodes, parents


def check_tree(grammar: Grammar, state: GrammarState, history: Sequence[int], rng: random.Random) -> int:
    """Every row of a random tree against a matcher that reads the path; the state stays where it was."""
    tokens, parents = random_tree(rng, state, range(grammar.vocabulary.size), rng.randint(1, 9))
    out = np.full((len(tokens) + 1, state.words + 2), 0xDEADBEEF, np.uint32)
    reached = state.masks(tokens, parents, out)
    assert state.reachable(tokens, parents) == reached
    paths: list[list[int]] = [[]]
    expected: list[set[int]] = [replayed(grammar, history)]
    assert tokens_of(out[0]) == expected[0]
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        paths.append([*paths[parent + 1], token])
        legal = token in expected[parent + 1]
        expected.append(replayed(grammar, [*history, *paths[-1]]) if legal else set())
        assert reached[node] == legal
        assert tokens_of(out[node + 1]) == expected[-1]
    assert mask_of(state) == expected[0]
    return sum(reached)


def walk_at_random(tokenizer: Tokenizer, grammar: Grammar, rng: random.Random, steps: int) -> None:
    """Advance, take back, fork, try what is illegal and draft at random; every mask on the way is checked."""
    states: list[tuple[GrammarState, list[int]]] = [(grammar.start(), [])]
    for _ in range(steps):
        state, history = rng.choice(states)
        action = rng.random()
        if action < 0.5:
            token = rng.choice(sorted(mask_of(state)))
            if not state.ended:
                state.advance([token])
                history.append(token)
        elif action < 0.65 and history:
            n = rng.randint(1, len(history))
            state.rollback(n)
            del history[len(history) - n :]
        elif action < 0.75:
            states.append((state.fork(), history.copy()))
        elif action < 0.85 and not state.ended:
            token = rng.randint(-1, tokenizer.vocab_size)
            if not by_bytes(grammar, history, token):
                with pytest.raises(ConstraintError, match=f"token {token} isn't allowed"):
                    state.advance([token])
        else:
            check_tree(grammar, state, history, rng)
        assert all(other.n_tokens == len(text) for other, text in states)
        assert mask_of(state) == replayed(grammar, history)
    for state, history in states:
        assert mask_of(state) == replayed(grammar, history)
        state.rollback(state.n_tokens)
        assert mask_of(state) == replayed(grammar, [])


def by_bytes(grammar: Grammar, history: Sequence[int], token: int) -> bool:
    """Whether a token goes on with the text, in whatever tokenization."""
    matcher = grammar.matcher()
    assert matcher.try_consume_tokens(list(history)) == len(history)
    if token in grammar.vocabulary.ends:
        return bool(matcher.is_accepting())
    return 0 <= token < grammar.vocabulary.size and bool(matcher.consume_token(token))


@dataclass(frozen=True)
class Language:
    """A finite language, written out: what may come next follows from its texts alone."""

    tokenizer: Tokenizer
    texts: tuple[str, ...]

    def encode(self, text: str) -> list[int]:
        """A text as the model writes it behind other text, where SentencePiece has no leading space of its own."""
        if self.tokenizer.vocabulary.byte_level:
            return self.tokenizer.encode_plain(text)
        before = self.tokenizer.encode_plain("~")
        whole = self.tokenizer.encode_plain("~" + text)
        assert whole[: len(before)] == before
        return whole[len(before) :]

    def rest(self, history: bytes) -> list[bytes]:
        return [text.encode() for text in self.texts if text.encode().startswith(history)]

    def by_bytes(self, history: bytes) -> set[int]:
        """Tokens whose bytes go on with some text; the end tokens where a text ends."""
        rest = self.rest(history)
        allowed = {
            token
            for token in range(self.tokenizer.vocab_size)
            if not self.tokenizer.is_special(token)
            and any(text.startswith(history + self.tokenizer.token_bytes(token)) for text in rest)
        }
        return allowed | (set(self.tokenizer.eos_ids) if history in rest else set())

    def own(self, history: Sequence[int]) -> list[list[int]]:
        """The model's own tokenizations that go on from `history`, each with what is left of it."""
        whole = [self.encode(text) for text in self.texts]
        return [ids[len(history) :] for ids in whole if ids[: len(history)] == list(history)]


def check_place(language: Language, state: GrammarState, history: list[int]) -> None:
    """A place in a finite language, reached in the model's own tokenization: mask, forced text, ends."""
    tokenizer = language.tokenizer
    done = b"".join(map(tokenizer.token_bytes, history))
    mask = mask_of(state)
    own = language.own(history)
    assert own, "the walk is in the model's own tokenization"
    for rest in own:
        assert (rest[0] in mask) if rest else tokenizer.eos_ids <= mask
    forced = state.forced(99)
    if forced:
        assert mask == {forced[0]}
        for rest in own:
            assert rest[: len(forced)] == forced
    else:
        assert mask == language.by_bytes(done)
    assert state.accepting == (done in language.rest(done))
    assert state.forced(1) == forced[:1]
