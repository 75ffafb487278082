"""What a request's history does to its logits: bias, penalties, end tokens that come too early, and bad words.

For a position with prompt P and output O before it (O includes the drafts on the way to a node of a
draft tree), the logit x of each token becomes, in float32 and in this order:

1. **logit_bias**: x + bias, for tokens that have one.
2. **repetition_penalty** r (Keskar et al. 2019, "CTRL"): x * r if x < 0, else x / r, once for each
   token that occurs in P or O.
3. **frequency_penalty** f: x - f * n for each token that occurs n > 0 times in O; f * n is rounded
   to float32 first.
4. **presence_penalty** p: x - p for each token that occurs in O.
5. **min_tokens**: -inf for the tokens that end the text, while O has fewer than min_tokens tokens.
6. **bad_words**: -inf for the last token of a sequence whose other tokens end P and O
   (forerun.sample.bad_words).

Then follow temperature and what forerun.sample.transforms describes. This is the order of Hugging
Face's processors (sequence bias, repetition penalty, bad words, minimum length, then the warpers); it
has no presence and frequency penalties, which are OpenAI's formula. A knob that is off is no operation.
The values are used in float32; a bias or penalty that float32 rounds to "off" is off.

1 to 4 are the stage "penalties" of `SamplingParams.order`. Where it doesn't come first, the sampler
applies them at their place (`LogitEdits.late`); 5 and 6 come before everything in any order.

Only the tokens named above are touched, so a row costs by its history and not by its vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from forerun.sample.arrays import LateEdits
from forerun.sample.bad_words import BadWords
from forerun.sample.noise import Float32s
from forerun.sample.params import SamplingParams

Ids = npt.NDArray[np.intp]

_MINUS_INFINITY: Final = np.float32(-np.inf)
_NO_IDS: Final[Ids] = np.empty(0, dtype=np.intp)
_NO_VALUES: Final[Float32s] = np.empty(0, dtype=np.float32)
_NO_IDS.setflags(write=False)
_NO_VALUES.setflags(write=False)


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """The raw logits that an `apply` overwrote; valid whatever happens to the edits afterwards.

    Attributes:
        ids: intp[n], token ids; one that is there twice has its value twice.
        values: float32[n], their logits before.
    """

    ids: Ids
    values: Float32s

    def restore(self, logits: Float32s) -> None:
        """Puts the values back into the row float32[V] that they came from, bit for bit."""
        logits[self.ids] = self.values


class LogitEdits:
    """The changes that one request makes to its logits, kept up to date with its output.

    Tokens that may change have a slot each, in this order: those with a bias, those of the prompt,
    those of the output in order of first appearance. Arrays over the slots hold what each operation
    needs, so that a row is one gather, a few vector operations and one scatter. Draft tokens are
    counted like output and counted back when another path is asked for; paths that share their
    beginning share that work.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Iterable[int],
        banned: Iterable[int],
        bad_words: Iterable[Sequence[int]] = (),
    ) -> None:
        prompt_ids = list(prompt_ids)
        self._late = params.late_penalties
        self._bad_words = BadWords(bad_words, prompt_ids)
        self._repetition = float(np.float32(params.repetition_penalty))
        self._frequency = float(np.float32(params.frequency_penalty))
        self._presence = float(np.float32(params.presence_penalty))
        self._banned: Ids = np.array(sorted(set(banned)), dtype=np.intp)
        self._min_tokens = params.min_tokens if len(self._banned) else 0
        self._counts_output = self._repetition != 1 or self._frequency != 0 or self._presence != 0
        biases = [(token, bias) for token, bias in params.biases if np.float32(bias) != 0]
        self._bias: Float32s = np.array([bias for _, bias in biases], dtype=np.float32)

        prompt = set(prompt_ids) if self._repetition != 1 else set()
        fixed = [token for token, _ in biases]
        fixed += sorted(prompt.difference(fixed))
        self._n_fixed = len(fixed)
        self._n_slots = len(fixed)
        self._slots = {token: slot for slot, token in enumerate(fixed)}
        self._counts = [0] * len(fixed)
        self._in_prompt = [token in prompt for token in fixed]
        room = len(fixed) + 64
        self._ids: Ids = np.zeros(room, dtype=np.intp)
        self._ids[: len(fixed)] = fixed
        # What the operations use of each slot; 1 and +0.0 leave every float as it is, -0.0 included.
        self._factor: Float32s = np.ones(room, dtype=np.float32)
        self._factor[: len(fixed)][self._in_prompt] = self._repetition
        self._by_count: Float32s = np.zeros(room, dtype=np.float32)
        self._by_presence: Float32s = np.zeros(room, dtype=np.float32)

        self._n_output = 0
        self._counted: list[int] = []  # committed output, then the path applied last

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt_ids: Iterable[int],
        banned: Iterable[int],
        bad_words: Iterable[Sequence[int]] = (),
    ) -> Self | None:
        """The edits of a request without output yet, or None if it changes no logits, ever.

        banned: the tokens that end the text; they can't be chosen before `params.min_tokens`.
        bad_words: sequences that can't be completed (`forerun.sample.bad_words.token_sequences`).
        Ids are below the width of the logits.
        """
        edits = cls(params, prompt_ids, banned, bad_words)
        changes = edits._counts_output or len(edits._bias) or edits._min_tokens or edits._bad_words
        return edits if changes else None

    @property
    def n_output(self) -> int:
        """Committed output tokens."""
        return self._n_output

    def applies(self, n_path: int = 0) -> bool:
        """Whether `apply` may change logits on a path of at most `n_path` tokens, its beginnings included.

        False: the raw logits hold at every node of a draft tree of this depth, and at its root.
        """
        counts = self._counts_output and self._n_output + n_path > 0
        return counts or self._n_fixed > 0 or self._n_output < self._min_tokens or bool(self._bad_words)

    def append(self, tokens: Sequence[int]) -> None:
        """Counts committed output tokens (Python ints); one call a token or a step is the same."""
        if self._counts_output:
            self._count(tokens)
        self._n_output += len(tokens)
        self._bad_words.append(tokens)

    def truncate(self, n_output: int) -> None:
        """Forgets all but the first `n_output` committed tokens. Raises ValueError if there are fewer."""
        if not 0 <= n_output <= self._n_output:
            raise ValueError(f"cannot truncate {self._n_output} output tokens to {n_output}; expected fewer or as many")
        self._n_output = n_output
        self._bad_words.truncate(n_output)
        self._count(())

    def fork(self) -> Self:
        """An independent copy with the same history."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        for name in ("_slots", "_counts", "_in_prompt", "_ids", "_factor", "_by_count", "_by_presence", "_counted"):
            setattr(twin, name, getattr(self, name).copy())
        twin._bad_words = self._bad_words.fork()
        return twin

    def late(self, path: Sequence[int] = ()) -> LateEdits | None:
        """What the sampler does at the place of "penalties" after the output and `path`; None: `apply` did it all."""
        if not self._late:
            return None
        if self._counts_output:
            self._count(path)
        n = self._n_slots
        bias = np.zeros(n, dtype=np.float32)
        bias[: len(self._bias)] = self._bias
        return LateEdits(
            self._ids[:n].astype(np.int32),
            bias,
            self._factor[:n].copy(),
            self._by_count[:n].copy(),
            self._by_presence[:n].copy(),
        )

    def apply(self, logits: Float32s, path: Sequence[int] = ()) -> Saved:
        """Changes the raw logits float32[V] of the position after the output and `path`, in place.

        path: draft tokens of this step (Python ints) from the root's child to the node whose logits
        these are; the root's own logits have the empty path. Returns the raw values. Rows of
        several paths may be changed before any is restored.

        A finite logit can become infinite only beyond 1e36; then the sampler reports NOT_FINITE or
        doesn't choose it.
        """
        if self._counts_output:
            self._count(path)
        n = 0 if self._late else self._n_slots
        banned = self._banned_after(path)
        ids, raw = _NO_IDS, _NO_VALUES
        if n:
            ids = self._ids[:n].copy()
            raw = logits[ids]
        saved = Saved(ids, raw)
        if len(banned):
            saved = Saved(np.concatenate((ids, banned)), np.concatenate((raw, logits[banned])))
        if n:
            logits[ids] = self._edited(raw)
        logits[banned] = _MINUS_INFINITY
        return saved

    def _banned_after(self, path: Sequence[int]) -> Ids:
        banned = self._banned if self._n_output + len(path) < self._min_tokens else _NO_IDS
        return np.concatenate((banned, self._bad_words.banned(path))) if self._bad_words else banned

    def _edited(self, raw: Float32s) -> Float32s:
        n = len(raw)
        x = raw.copy()
        with np.errstate(over="ignore"):
            if len(self._bias):
                x[: len(self._bias)] += self._bias
            if self._repetition != 1:
                factor = self._factor[:n]
                x = np.where(x < 0, x * factor, x / factor)
            if self._frequency != 0:
                x -= self._by_count[:n]
            if self._presence != 0:
                x -= self._by_presence[:n]
        return x

    def _count(self, tokens: Sequence[int]) -> None:
        """Makes `tokens` what is counted after the committed output."""
        counted = self._counted
        kept = self._n_output
        for token in tokens:
            if kept == len(counted) or counted[kept] != token:
                break
            kept += 1
        while len(counted) > kept:
            self._discount_last()
        for token in tokens[kept - self._n_output :]:
            self._count_one(token)

    def _count_one(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._n_slots
            if slot == len(self._ids):
                self._grow()
            self._n_slots = slot + 1
            self._slots[token] = slot
            self._ids[slot] = token
            self._counts.append(0)
            self._in_prompt.append(False)
        self._counted.append(token)
        self._set_count(slot, self._counts[slot] + 1)

    def _discount_last(self) -> None:
        token = self._counted.pop()
        slot = self._slots[token]
        self._set_count(slot, self._counts[slot] - 1)
        if slot >= self._n_fixed and self._counts[slot] == 0:
            # Slots appear with their first token and tokens leave last first: this is the last slot.
            self._n_slots = slot
            del self._slots[token], self._counts[slot], self._in_prompt[slot]

    def _set_count(self, slot: int, count: int) -> None:
        self._counts[slot] = count
        self._factor[slot] = self._repetition if count or self._in_prompt[slot] else 1.0
        # A double holds the product of two float32 values exactly, so storing it rounds once.
        self._by_count[slot] = self._frequency * count if count else 0.0
        self._by_presence[slot] = self._presence if count else 0.0

    def _grow(self) -> None:
        room = 2 * len(self._ids)
        for name in ("_ids", "_factor", "_by_count", "_by_presence"):
            old = getattr(self, name)
            new = np.zeros(room, dtype=old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)
