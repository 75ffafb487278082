"""What a request may ask of sampling, checked once when it is created."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from forerun.constrain.spec import Constraint
from forerun.errors import InvalidRequestError

MAX_STOP_STRINGS: Final = 64
MAX_STOP_TOKEN_IDS: Final = 1024
MAX_STOP_LENGTH: Final = 1024
MAX_LOGPROBS: Final = 1024
MAX_LOGIT_BIAS: Final = 65536
"""The most entries of `logit_bias`."""

MAX_N: Final = 256
MAX_BAD_WORDS: Final = 1024
MAX_BAD_WORD_TOKENS: Final = 64
"""The most tokens of one of the `bad_words`, where it is given or tokenized."""

_INT32_MAX: Final = 2**31 - 1
_UINT64_MAX: Final = 2**64 - 1

Stage = Literal["penalties", "temperature", "top_k", "top_p", "min_p", "typical_p"]
"""A transform of the logits; "penalties" stands for logit_bias and the three penalties."""
STAGES: Final[tuple[Stage, ...]] = get_args(Stage)
"""The default order, Hugging Face's."""

Verify = Literal["coupled", "rejection"]
"""How drafts of a sampled request are verified (forerun.verify)."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends.

    Values are normalised on creation (NumPy scalars to Python's, sequences to tuples without
    duplicates, `logit_bias` to pairs in order of token id).

    max_tokens: the most tokens to generate; None goes on to the end of the model's context.
    n: how many texts to generate for the prompt. The first is that of n=1 with this seed; the others have seeds made
        of it. At temperature 0 all are equal.
    constraint: what the whole text must be: `JsonSchema`, `Json`, `Regex`, `Lark`, `Choice` or `ToolCalls` (see
        forerun.constrain). A text that ends by itself obeys it; it can't be combined with `ignore_eos`, `stop`, or
        stop tokens that aren't the model's end tokens.
    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k, top_p, min_p, typical_p: which tokens stay, in this order, after temperature
        (forerun.sample.transforms says exactly how); 0, 1.0, 0.0 and 1.0 switch them off.
    repetition_penalty: makes the tokens of prompt and output less likely (above 1) or more (below
        1), however often they occurred; 1.0 switches it off.
    presence_penalty, frequency_penalty: are subtracted from the logits of the output's tokens,
        once, and once per occurrence; the prompt doesn't count. 0.0 switches them off.
    logit_bias: token id -> what is added to its logit. The penalties and the bias change logits
        before temperature, at temperature 0 too (forerun.sample.edits says exactly how).
    order: names of `STAGES` in the order in which they run; a stage that is switched on has to be among them. At
        temperature 0 it makes no difference.
    bad_words: texts or sequences of token ids that are never completed: their last token is banned where the ones
        before it were just written, in the prompt included. A text is banned as its tokens are, with a space before it
        and without.
    allowed_token_ids: the only tokens that may be chosen; None: all. End tokens only if they are among them.
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
    n: int = 1
    constraint: Constraint | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    order: Sequence[Stage] = STAGES
    bad_words: str | Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
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
        store("n", _integer("n", self.n, 1, MAX_N))
        if self.constraint is not None:
            self._check_constraint(self.constraint)
        store("temperature", _temperature(self.temperature))
        store("top_k", _integer("top_k", self.top_k, 0, _INT32_MAX, "where 0 switches it off"))
        store("top_p", _number("top_p", self.top_p, 0, 1, 1))
        store("min_p", _number("min_p", self.min_p, 0, 1, 0))
        store("typical_p", _number("typical_p", self.typical_p, 0, 1, 1))
        store("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.01, 100, 1))
        for penalty in ("presence_penalty", "frequency_penalty"):
            store(penalty, _number(penalty, getattr(self, penalty), -2, 2, 0))
        store("logit_bias", _logit_bias(self.logit_bias))
        store("order", self._checked_order())
        store("bad_words", _bad_words(self.bad_words))
        if self.allowed_token_ids is not None:
            store("allowed_token_ids", _allowed_token_ids(self.allowed_token_ids))
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

    def _checked_order(self) -> tuple[Stage, ...]:
        expected = f"a sequence of distinct names among {', '.join(STAGES)}"
        if isinstance(self.order, str | bytes) or not isinstance(self.order, Sequence):
            raise _refuse("order", self.order, expected)
        for stage in self.order:
            if stage not in STAGES:
                raise _refuse("order", stage, expected)
        if len(set(self.order)) < len(self.order):
            raise _refuse("order", self.order, expected)
        for stage, knobs in self._switched_on().items():
            if stage not in self.order:
                raise InvalidRequestError(
                    f"order leaves out {stage!r}, which {knobs} switches on; add it to order, or switch it off"
                )
        return tuple(self.order)

    def _switched_on(self) -> dict[Stage, str]:
        """The stages that do something, each with the knob that says so."""
        on: dict[Stage, str] = {}
        if any(np.float32(bias) != 0 for _, bias in self.biases):
            on["penalties"] = "logit_bias"
        for field, off in (("repetition_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0)):
            if np.float32(getattr(self, field)) != off:
                on["penalties"] = f"{field}={getattr(self, field)}"
        no_effect: dict[Stage, set[float]] = {
            "temperature": {0, 1}, "top_k": {0}, "top_p": {1}, "min_p": {0}, "typical_p": {1},
        }  # fmt: skip
        for stage, values in no_effect.items():
            if float(np.float32(getattr(self, stage))) not in values:
                on[stage] = f"{stage}={getattr(self, stage)}"
        return on

    def _check_constraint(self, constraint: object) -> None:
        if not isinstance(constraint, Constraint):
            raise _refuse(
                "constraint", constraint, "JsonSchema, Json, Regex, Lark, Choice or ToolCalls of forerun.constrain"
            )
        if self.ignore_eos:
            raise InvalidRequestError("ignore_eos=True can't be combined with a constraint, whose text has an end")
        if self.stop:
            raise InvalidRequestError(
                "stop can't be combined with a constraint: it could cut the text short of what the constraint demands; "
                "write the end into the constraint"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0.0

    @property
    def late_order(self) -> tuple[Stage, ...]:
        """The stages that are switched on, without penalties that come first; empty if they run in the default order.

        Empty at temperature 0, too, where the largest logit that the penalties leave is taken in any order.
        """
        if self.greedy or self.order == STAGES:
            return ()
        on = self._switched_on()
        stages = tuple(stage for stage in self.order if stage in on)
        if stages == tuple(stage for stage in STAGES if stage in on):
            return ()
        return stages[1:] if stages[0] == "penalties" else stages

    @property
    def late_penalties(self) -> bool:
        """Whether bias and penalties come after another stage."""
        return "penalties" in self.late_order

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
            ("bad_words", [token_id for word in self.bad_words if not isinstance(word, str) for token_id in word]),
            ("allowed_token_ids", self.allowed_token_ids or ()),
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


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    expected = "a string, or a sequence of strings and sequences of token ids"
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, tuple | list):
        raise _refuse("bad_words", value, expected)
    if len(value) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words has {len(value)} entries; expected at most {MAX_BAD_WORDS}")
    words: list[str | tuple[int, ...]] = []
    for word in value:
        if isinstance(word, str):
            words.append(_text("bad_words", word))
        elif isinstance(word, tuple | list | np.ndarray) and 1 <= len(word) <= MAX_BAD_WORD_TOKENS:
            words.append(tuple(_integer("bad_words", token_id, 0, _INT32_MAX, "as token id") for token_id in word))
        else:
            raise _refuse("bad_words", word, f"strings, or sequences of 1 to {MAX_BAD_WORD_TOKENS} token ids")
    return tuple(dict.fromkeys(words))


def _allowed_token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise _refuse("allowed_token_ids", value, "a sequence of token ids, or None for all")
    ids = {_integer("allowed_token_ids", entry, 0, _INT32_MAX) for entry in value}
    if not ids:
        raise _refuse("allowed_token_ids", value, "at least one token id, or None for all")
    return tuple(sorted(ids))


def _text(field: str, string: str) -> str:
    if not 1 <= len(string) <= MAX_STOP_LENGTH:
        raise _refuse(field, string, f"strings of 1 to {MAX_STOP_LENGTH} characters")
    if any("\ud800" <= character <= "\udfff" for character in string):
        raise _refuse(field, string, "valid Unicode text without surrogates")
    return str(string)


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
    return tuple(dict.fromkeys(_text("stop", string) for string in strings))


def _stop_token_ids(value: object) -> tuple[int, ...]:
    expected = "a sequence of token ids"
    if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
        raise _refuse("stop_token_ids", value, expected)
    entries = tuple(value)
    if len(entries) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(f"stop_token_ids has {len(entries)} ids; expected at most {MAX_STOP_TOKEN_IDS}")
    ids = (_integer("stop_token_ids", entry, 0, _INT32_MAX) for entry in entries)
    return tuple(dict.fromkeys(ids))
