"""Token sequences that are never completed.

The rule of Hugging Face's NoBadWordsLogitsProcessor: the last token of a sequence gets the logit -inf where the tokens
before it are the last ones of prompt and output, drafts on the way to a node of a draft tree included. A sequence of
one token is always banned. A text is banned as the model's tokenizer writes it, which isn't the only way to spell it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.intp]


def token_sequences(
    words: Iterable[str | Sequence[int]], encode: Callable[[str], list[int]], *, adds_space: bool
) -> list[tuple[int, ...]]:
    """The sequences of `SamplingParams.bad_words`, each once; a text with a space before it and without.

    encode: a text's tokens, nothing added. adds_space: whether it puts a space before every text by itself, as
    SentencePiece does.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            sequences.append(tuple(word))
        elif adds_space:
            sequences += [tuple(encode(word)), _inside(word, encode)]
        else:
            sequences += [tuple(encode(word)), tuple(encode(f" {word}"))]
    return [sequence for sequence in dict.fromkeys(sequences) if sequence]


def _inside(word: str, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
    """Tokens of a text that follows a line feed, which takes the added space."""
    before = encode("\n")
    ids = encode(f"\n{word}")
    return tuple(ids[len(before) :]) if ids[: len(before)] == before else ()


class BadWords:
    """The sequences by what comes before their last token, and the tokens so far of one text.

    sequences: not empty, ids below the width of the logits.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], prompt_ids: Iterable[int]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        for sequence in sequences:
            *before, last = sequence
            self._last.setdefault(tuple(before), []).append(last)
        self._lengths = sorted({len(before) for before in self._last})
        self._reach = max(self._lengths, default=0)
        self._tokens = list(prompt_ids)[-self._reach :] if self._reach else []
        self._n_prompt = len(self._tokens)

    def __bool__(self) -> bool:
        return bool(self._last)

    def append(self, tokens: Sequence[int]) -> None:
        """Output goes on with `tokens`."""
        if self._reach:
            self._tokens += tokens

    def truncate(self, n_output: int) -> None:
        """Output ends after its first `n_output` tokens."""
        del self._tokens[self._n_prompt + n_output :]

    def fork(self) -> Self:
        """An independent copy with the same history."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._tokens = self._tokens.copy()
        return twin

    def banned(self, path: Sequence[int]) -> Ids:
        """intp[n], distinct: the tokens that would complete a sequence after the output and `path`."""
        recent = [*self._tokens[-self._reach :], *path]
        found: list[int] = []
        for length in self._lengths:
            if length <= len(recent):
                found += self._last.get(tuple(recent[len(recent) - length :]), ())
        return np.array(list(dict.fromkeys(found)), dtype=np.intp)
