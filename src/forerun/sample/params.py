"""What a request may ask of sampling, checked once when it is created."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from forerun.errors import InvalidRequestError

MAX_STOP_STRINGS: Final = 64
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_STOP_LENGTH: Final = 1024
MAX_LOGPROBS: Final = 1024
MAX_LOGIT_BIAS: Final = 65536
"""The most entries of `logit_bias`."""

_INT32_MAX: Final = 2**31 - 1
_UINT64_MAX: Final = 2**64 - 1

Verify = Literal["coupled", "rejection"]
"""How drafts of a sampled request are verified (forerun.verify)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    Values are normalised on creation (NumPy scalars to Python's, sequences to tuples without
    duplicates, `logit_bias` to pairs in order of token id).

    max_tokens: the most tokens to generate; None goes on to the end of the model's context.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k, top_p, min_p: which tokens stay, in this order, after temperature
        (forerun.sample.transforms says exactly how); 0, 1.0 and 0.0 switch them off.
    repetition_penalty: makes the tokens of prompt and output less likely (above 1) or more (below
        1), however often they occurred; 1.0 switches it off.
    presence_penalty, frequency_penalty: are subtracted from the logits of the output's tokens,
        once, and once per occurrence; the prompt doesn't count. 0.0 switches them off.
    logit_bias: token id -> what is added to its logit. The penalties and the bias change logits
        before temperature, at temperature 0 too (forerun.sample.edits says exactly how).
    verify: how drafts are verified when the temperature is above 0. "coupled": the text is the one
        that the seed gives without speculation. "rejection": the text has the same distribution,
        but isn't that text.
    seed: with the prompt and these parameters it determines the text. None: the engine draws one
        for each request.
    min_tokens: no end token and no stop takes effect before this many tokens.
    stop: a string or several; generation ends where one appears in the text.
    stop_token_ids: generation ends after one of these tokens, as after the model's end tokens.
    ignore_eos: the model's end tokens don't end the text.
    logprobs: None for none, 0 for the chosen token's, n for the n most probable ones beside it;
        they are log-probabilities of the model's raw distribution, before bias, penalties,
        temperature and the rest.
    include_stop_str_in_output: whether the text keeps the stop string that ended it.
    skip_special_tokens: whether special tokens are left out of the text.

    Raises `InvalidRequestError`, which names the field, the value and the allowed range.
    """

    max_tokens: int | None = 16
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    verify: Verify = "coupled"
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
        store("top_p", _number("top_p", self.top_p, 0, 1, 1))
        store("min_p", _number("min_p", self.min_p, 0, 1, 0))
        store("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.01, 100, 1))
        for penalty in ("presence_penalty", "frequency_penalty"):
            store(penalty, _number(penalty, getattr(self, penalty), -2, 2, 0))
        store("logit_bias", _logit_bias(self.logit_bias))
        store("verify", _choice("verify", self.verify, "coupled", "rejection"))
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

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` as pairs (token id, bias) by ascending id, whichever way it was given."""
        pairs = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias
        return tuple(pairs)

    def validate_against(self, vocab_size: int) -> None:
        """Raise `InvalidRequestError` if a token id or `logprobs` doesn't fit the vocabulary."""
        for field, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in self.biases]),
        ):
            largest = max(ids, default=0)
            if largest >= vocab_size:
                raise InvalidRequestError(
                    f"{field} contains {largest}; expected ids from 0 to {vocab_size - 1}, the model's vocabulary"
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


def _number(field: str, value: object, low: float, high: float, off: float) -> float:
    expected = f"a number from {low} to {high}, where {off} switches it off"
    number = _real(field, value, expected)
    if not low <= number <= high:
        raise _refuse(field, value, expected)
    return number + 0.0  # -0.0 becomes 0.0


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


def _choice(field: str, value: object, *allowed: str) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise _refuse(field, value, " or ".join(repr(name) for name in allowed))
    return str(value)


def _logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    expected = "a mapping from token ids to numbers from -100 to 100"
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, tuple | list):
        raise _refuse("logit_bias", value, expected)
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequestError(f"logit_bias has {len(value)} entries; expected at most {MAX_LOGIT_BIAS}")
    biases: dict[int, float] = {}
    for pair in value:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise _refuse("logit_bias", value, expected)
        token_id = _integer("logit_bias", pair[0], 0, _INT32_MAX, "as token id")
        if token_id in biases:
            raise _refuse("logit_bias", value, f"each token id once, but {token_id} is there twice")
        biases[token_id] = _number(f"logit_bias[{token_id}]", pair[1], -100, 100, 0)
    return tuple(sorted(biases.items()))


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
