"""Random texts of a grammar, straight from llguidance's masks, and what a validator says about them."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import extend, validator_for
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

MASKBENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "maskbench.jsonl"

MERGES = [
    *(f"\\u{code:04x}" for code in (0x61, 0x62, 0x0A, 0xD83D, 0xDE00)),
    *(b"\\u000A".decode(), "\\n", "true", "null", "12", "1e", "😀", '":', '","', "aa", "ab", '"a"', '"b"', "{}", "[]"),
]
"""Tokens of several characters: what random bytes would hardly find."""

_CLASSES = [b'"', b"}]", b",", b":", b"\\", b"0123456789", b"-+.eE", b"{[", b" \t\r\n", b"ab"]


class _Bytes:
    """A tokenizer of single bytes and a few merges."""

    def __init__(self) -> None:
        self.tokens = [bytes([byte]) for byte in range(256)] + [merge.encode() for merge in MERGES] + [b"<end>"]
        self.eos_token_id = len(self.tokens) - 1
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


BYTES = _Bytes()
TOKENIZER = LLTokenizer(TokenizerWrapper(BYTES), n_vocab=len(BYTES.tokens), eos_token=BYTES.eos_token_id, slices=[])


class DeadEndError(Exception):
    """Nothing may follow a text that isn't complete. (llguidance's mask then holds the end token alone.)"""


def matcher_of(grammar: str) -> LLMatcher:
    """The start of a grammar; fails where it can't be compiled."""
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error().splitlines()[0]
    return matcher


def allowed(matcher: LLMatcher) -> np.ndarray:
    """The ids of the tokens that may come next."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[: len(BYTES.tokens)])


def accepts(matcher: LLMatcher, text: str) -> bool:
    """Whether a whole text is accepted, byte by byte through the masks, and complete at its end."""
    state = matcher.deep_copy()
    for byte in text.encode():
        if byte not in allowed(state):
            return False
        assert state.consume_token(byte)
    return bool(state.is_accepting()) and BYTES.eos_token_id in allowed(state)


def draw(matcher: LLMatcher, rng: random.Random, limit: int = 150) -> str | None:
    """One random text, or None if it didn't end within twice `limit` tokens.

    Classes of tokens are drawn before tokens, so that escapes, numbers and ends all come often; from `limit` on, what
    ends something comes first. Raises DeadEndError.
    """
    state = matcher.deep_copy()
    out = b""
    for step in range(2 * limit):
        ids = allowed(state).tolist()
        late = step > limit
        if state.is_accepting() and (late or len(ids) == 1 or rng.random() < 0.3):
            return out.decode()
        ids = [token for token in ids if token != BYTES.eos_token_id]
        if not ids:
            raise DeadEndError(out)
        token = _pick(ids, rng, late)
        out += BYTES.tokens[token]
        assert state.consume_token(token), state.get_error()
    return None


def _pick(ids: list[int], rng: random.Random, late: bool) -> int:
    present = set(ids)
    if late:
        for byte in b'"}]':
            if byte in present:
                return byte
    groups = [[byte for byte in group if byte in present] for group in _CLASSES]
    listed = {byte for group in groups for byte in group}
    groups.append([token for token in ids if token >= 256])
    groups.append([token for token in ids if 32 < token < 127 and token not in listed])
    groups.append([token for token in ids if 127 <= token < 256])
    return rng.choice(rng.choice([group for group in groups if group]))


class Written(float):
    """A fraction that remembers its digits."""

    digits: str

    def __new__(cls, digits: str) -> Written:
        number = super().__new__(cls, digits)
        number.digits = digits
        return number


def value_of(text: str) -> Any:
    """The value of a JSON text, with fractions as they are written."""
    return json.loads(text, parse_float=Written)


def _multiple_of(_: Any, divisor: float, instance: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """`multipleOf` on decimals as written: the package divides floats, by which 0.3 is no multiple of 0.1."""
    if not isinstance(instance, (int, float)) or isinstance(instance, bool) or abs(instance) == float("inf"):
        return
    digits = getattr(instance, "digits", str(instance))
    exponent = int([*re.split("[eE]", digits), "0"][1][:9])
    if abs(exponent) > 400 or Fraction(digits) % Fraction(str(divisor)):
        yield jsonschema.ValidationError(f"{instance} is no multiple of {divisor}")


def validator(schema: Mapping[str, Any] | bool) -> Any:
    """The `jsonschema` package's validator of a schema, in the draft that it names or is written in, with formats."""
    default = jsonschema.Draft202012Validator
    text = json.dumps(schema)
    if '"items": [' in text or '"additionalItems"' in text or '"exclusiveMinimum": true' in text:
        default = jsonschema.Draft7Validator
    if '"exclusiveMinimum": true' in text or '"exclusiveMaximum": true' in text:
        default = jsonschema.Draft4Validator
    schema = _by_ecma(schema)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = validator_for(schema, default=default)
        exact = extend(base, {"multipleOf": _multiple_of})
        return exact(schema, format_checker=base.FORMAT_CHECKER)


def _by_ecma(node: Any) -> Any:
    """The schema with its patterns read as ECMA-262 does: $ is the very end, and classes are ASCII's."""
    if isinstance(node, list):
        return [_by_ecma(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: _by_ecma(value) for key, value in node.items()}
    if isinstance(node.get("pattern"), str):
        out["pattern"] = _ecma(node["pattern"])
    if isinstance(node.get("patternProperties"), dict):
        out["patternProperties"] = {_ecma(key): value for key, value in out["patternProperties"].items()}
    return out


def _ecma(pattern: str) -> str:
    try:
        return "(?a:" + re.sub(r"(?<!\\)\$(?=$|[|)])", r"\\Z", pattern) + ")"
    except re.error:
        return pattern
