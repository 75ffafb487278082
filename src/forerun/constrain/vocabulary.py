"""A model's tokens as llguidance needs them: the bytes of each, which end a text, and how a text is cut into tokens."""

from __future__ import annotations

from typing import Final

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from forerun.constrain.bits import mask_of, mask_width
from forerun.models.tokenizer import Tokenizer, literal_backend

_GUARD: Final = "\x02"
"""Stands before a text that is encoded as the middle of one: no SentencePiece vocabulary joins it to what follows."""


class GrammarVocabulary:
    """Everything about a tokenizer that grammars share; immutable, safe to share among threads.

    Building it takes about a second for 152k tokens and holds the GIL for parts of that: do it once, off the loop.
    """

    size: Final[int]
    """V, the number of token ids."""
    words: Final[int]
    """W = ceil(V / 32), the length of a mask."""
    ends: Final[frozenset[int]]
    """Tokens that end a text."""
    end_bits: Final[NDArray[np.uint32]]
    """uint32[W]: the tokens that end a text."""
    digit_bits: Final[NDArray[np.uint32]]
    """uint32[W]: the tokens that begin with a digit."""
    token_bytes: Final[tuple[bytes, ...]]
    """What each token adds to a text; b"" for a special token."""
    backend: Final[LLTokenizer]

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.size = tokenizer.vocab_size
        self.words = mask_width(self.size)
        self.ends = tokenizer.eos_ids
        special = [index for index in range(self.size) if tokenizer.is_special(index)]
        pieces = [tokenizer.token_bytes(index) for index in range(self.size)]
        for index in special:
            pieces[index] = b""
        self.token_bytes = tuple(pieces)
        digits = [index for index, piece in enumerate(pieces) if piece[:1].isdigit()]
        self.end_bits = mask_of(self.ends, self.size)
        self.digit_bits = mask_of(digits, self.size)
        for bits in (self.end_bits, self.digit_bits):
            bits.setflags(write=False)
        self.backend = LLTokenizer(
            TokenizerWrapper(_Face(tokenizer, pieces, special)),
            eos_token=sorted(self.ends),
            slices=LLTokenizer.json_slices(),
        )


class _Face:
    """The tokenizer in the shape that `TokenizerWrapper` takes."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], special: list[int]) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = tokenizer.bos_id
        # 0xFF stands in no text, so that no grammar over text can produce a special token.
        self.tokens = list(pieces)
        for index in special:
            self.tokens[index] = b"\xff[%d]" % index
        self.special_token_ids = special
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._ids = {piece: index for index, piece in reversed(list(enumerate(pieces))) if piece}
        self._longest_piece = max(map(len, pieces))
        self._guard = [] if tokenizer.vocabulary.byte_level else tokenizer.encode_plain(_GUARD)
        backend = tokenizer.vocabulary.backend
        changes = tokenizer.vocabulary.byte_level and backend.normalizer is not None
        self._unnormalized = literal_backend(backend, normalizes=False) if changes else None

    def __call__(self, text: str | bytes) -> list[int]:
        """Ids of a text as the model writes it in the middle of a longer one, of just these bytes where possible."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        ids = self._tokenizer.encode_plain(_GUARD + text)[len(self._guard) :] if self._guard else self._own(text)
        return ids if self._spell(ids) == text.encode() else self._longest(text.encode())

    def _own(self, text: str) -> list[int]:
        """The model's own ids of a text, of the characters that stand there and not what they are normalised to."""
        ids = self._tokenizer.encode_plain(text)
        if self._unnormalized is None or self._spell(ids) == text.encode():
            return ids
        return list(self._unnormalized.encode(text, add_special_tokens=False).ids)

    def _longest(self, text: bytes) -> list[int]:
        """The longest token each time, for what the model's tokenizer can't write as it is; up to a missing byte."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            stops = range(min(len(text), at + self._longest_piece), at, -1)
            stop = next((stop for stop in stops if text[at:stop] in self._ids), None)
            if stop is None:
                break
            ids.append(self._ids[text[at:stop]])
            at = stop
        return ids

    def _spell(self, ids: list[int]) -> bytes:
        return b"".join(map(self._pieces.__getitem__, ids))
