"""What a request may ask of sampling, checked once when it is created."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from forerun.errors import InvalidRequestError

MAX_STOP_STRINGS: Final = 64
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_STOP_LENGTH: Final = 1024
MAX_LOGPROBS: Final = 1024

_INT32_MAX: Final = 2**31 - 1
_UINT64_MAX: Final = 2**64 - 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    Values are normalised on creation (NumPy scalars to Python's, sequences to tuples without
    duplicates).

    max_tokens: the most tokens to generate; None goes on to the end of the model's context.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k, top_p, min_p: which tokens stay, in this order, after temperature
        (forerun.sample.transforms says exactly how); 0, 1.0 and 0.0 switch them off.
    seed: with the prompt and these parameters it determines the text. None: the engine draws one
        for each request.
    min_tokens: no end token and no stop takes effect before this many tokens.
    stop: a string or several; generation ends where one appears in the text.
    stop_token_ids: generation ends after one of these tokens, as after the model's end tokens.
    ignore_eos: the model's end tokens don't end the text.
    logprobs: None for none, 0 for the chosen token's, n for the n most probable ones beside it;
        they are log-probabilities of the model's raw distribution, before temperature and the
        rest.
    include_stop_str_in_output: whether the text keeps the stop string that ended it.
    skip_special_tokens: whether special tokens are left out of the text.

    Raises `InvalidRequestError`, which names the field, the value and the allowed range.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        def store(field: str, value: object) -> None:
            object.__setattr__(self, field, value)

        if self.max_tokens is not None:
            store("max_tokens", _integer("max_tokens", self.max_tokens, 1, _INT32_MAX, "or None"))
        store("temperature", _temperature(self.temperature))
        store("top_k", _integer("top_k", self.top_k, 0, _INT32_MAX, "where 0 switches it off"))
        store("top_p", _fraction("top_p", self.top_p, "where 1 switches it off"))
        store("min_p", _fraction("min_p", self.min_p, "where 0 switches it off"))
        if self.seed is not None:
            store("seed", _integer("seed", self.seed, 0, _UINT64_MAX, "or None"))
        store("min_tokens", _integer("min_tokens", self.min_tokens, 0, _INT32_MAX))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}; expected min_tokens <= max_tokens"
            )
        store("stop", _stop_strings(self.stop))
        store("stop_token_ids", _stop_token_ids(self.stop_token_ids))
        if self.logprobs is not None:
            store("logprobs", _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, "or None"))
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            store(field, _boolean(field, getattr(self, field)))

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def validate_against(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` if a token id or `logprobs` doesn't fit the vocabulary."""
        for token_id in self.stop_token_ids:
            if token_id >= vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids contains {token_id}; expected ids from 0 to {vocab_size - 1}, "
                    "the model's vocabulary"
                )
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise InvalidRequestError(
                f"logprobs={self.logprobs} is above the model's vocabulary of {vocab_size} tokens"
            )


def _refuse(field: str, value: object, expected: str) -> InvalidRequestError:
    shown = repr(value)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return InvalidRequestError(f"{field}={shown} is not allowed; expected {expected}")


def _integer(field: str, value: object, low: int, high: int, note: str = "") -> int:
    expected = f"an integer from {low} to {high} {note}".rstrip()
    if isinstance(value, bool | np.bool_):
        raise _refuse(field, value, expected)
    if not isinstance(value, int | np.integer):
        raise _refuse(field, value, expected)
    number = operator.index(value)
    if not low <= number <= high:
        raise _refuse(field, value, expected)
    return number


def _real(field: str, value: object, expected: str) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.integer | np.floating):
        raise _refuse(field, value, expected)
    try:
        return float(value)
    except OverflowError:
        raise _refuse(field, value, expected) from None


def _fraction(field: str, value: object, note: str) -> float:
    expected = f"a number from 0 to 1, {note}"
    number = _real(field, value, expected)
    if not 0.0 <= number <= 1.0:
        raise _refuse(field, value, expected)
    return number


def _temperature(value: object) -> float:
    limits = np.finfo(np.float32)
    expected = f"0 (greedy) or a number from {limits.tiny:.3g} to {limits.max:.3g}"
    number = _real("temperature", value, expected)
    if number != 0.0 and not float(limits.tiny) <= number <= float(limits.max):
        raise _refuse("temperature", value, expected)
    return abs(number)


def _boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _refuse(field, value, "True or False")
    return bool(value)


def _stop_strings(value: object) -> tuple[str, ...]:
    expected = "a string or a sequence of strings"
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, bytes | dict) or not isinstance(value, Iterable):
        raise _refuse("stop", value, expected)
    strings = tuple(value)
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(strings)} strings; expected at most {MAX_STOP_STRINGS}")
    for string in strings:
        if not isinstance(string, str):
            raise _refuse("stop", string, expected)
        if not 1 <= len(string) <= MAX_STOP_LENGTH:
            raise _refuse("stop", string, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise _refuse("stop", string, "valid Unicode text without surrogates")
    return tuple(dict.fromkeys(str(string) for string in strings))


def _stop_token_ids(value: object) -> tuple[int, ...]:
    expected = "a sequence of token ids"
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise _refuse("stop_token_ids", value, expected)
    entries = tuple(value)
    if len(entries) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids has {len(entries)} ids; expected at most {MAX_STOP_TOKEN_IDS}")
    ids = (_integer("stop_token_ids", entry, 0, _INT32_MAX) for entry in entries)
    return tuple(dict.fromkeys(ids))
