"""Builds a tokenizer from GGUF metadata: keys `tokenizer.ggml.*` into a `tokenizers.Tokenizer`.

Two families exist among the supported models. `gpt2` is byte-level BPE: the file brings merges, and
`tokenizer.ggml.pre` names the regular expression that cuts text into words. `llama` is
SentencePiece BPE: the file brings scores, from which merges are derived as Hugging Face's
convert_slow_tokenizer.py does, so that both give the same ids.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Expressions: the models' own
tokenizer.json files, and for "default" llama.cpp's llama-vocab.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from forerun.errors import ModelFormatError, UnsupportedModelError

SPACE: Final = "▁"
"""U+2581, how SentencePiece writes a space."""

END_TOKENS: Final = frozenset(
    {
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<end_of_turn>",
        "<eos>",
    }
)
"""Special tokens that end a generation in every model that has them, whatever its eos id is."""


class TokenKind(IntEnum):
    """What a token is; the values are those of `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SPECIAL_KINDS: Final = frozenset({TokenKind.UNKNOWN, TokenKind.CONTROL, TokenKind.UNUSED})
"""Kinds that carry no text of their own."""


@dataclass(frozen=True)
class Vocabulary:
    """All that a `Tokenizer` is made of, whichever file it came from."""

    backend: tokenizers.Tokenizer
    """Text to ids, without anything added before or after."""
    texts: Sequence[str]
    """How each id is written in the file; position is id."""
    kinds: bytes
    """A `TokenKind` for each id."""
    byte_level: bool
    """True: normal tokens are written in GPT-2's byte alphabet. False: SentencePiece's spaces."""
    bos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool
    strip_space: bool
    """One leading space of a decoded text belongs to the tokenizer, not to the text."""


class _Pre(NamedTuple):
    """A pre-tokenizer: expressions applied one after the other, each to what the last left."""

    expressions: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _known_pres() -> dict[str, _Pre]:
    digits = _Pre((r"\p{N}", _GPT2))
    llama3 = _Pre((_CL100K % "{1,3}",), ignore_merges=True, add_bos=True)
    return {
        "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
        "gpt-2": _Pre((_GPT2,)),
        "smollm": digits,
        "starcoder": digits,
        "refact": digits,
        "qwen2": _Pre((_CL100K % "",), nfc=True),
        "llama-bpe": llama3,
        "llama3": llama3,
        "llama-v3": llama3,
        "tekken": _Pre((_TEKKEN,), ignore_merges=True, add_bos=True),
    }


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary that a GGUF file's metadata describes.

    Arrays may be lists or NumPy arrays. Raises UnsupportedModelError for a tokenizer model or a
    pre-tokenizer that Forerun doesn't have, ModelFormatError for metadata that are incomplete or
    contradict themselves.
    """
    keys = _Keys(metadata)
    family = keys.text("model")
    if family not in ("gpt2", "llama"):
        raise UnsupportedModelError(
            f"the model's tokenizer is of the kind {family!r}; Forerun has 'gpt2' (byte-level BPE) "
            "and 'llama' (SentencePiece BPE). Choose another model."
        )
    texts = keys.texts("tokens")
    if not texts:
        raise ModelFormatError("GGUF metadata 'tokenizer.ggml.tokens' is empty.")
    kinds = keys.kinds(len(texts))
    build = _byte_level if family == "gpt2" else _sentencepiece
    return build(keys, texts, kinds)


def _byte_level(keys: _Keys, texts: list[str], kinds: bytes) -> Vocabulary:
    name = keys.text("pre")
    known = _known_pres()
    if name not in known:
        raise UnsupportedModelError(
            f"the model's pre-tokenizer is {name!r}; Forerun has {', '.join(sorted(known))}. "
            "Text would be cut into the wrong tokens, so this model can't be used."
        )
    pre = known[name]
    ids = _ids_by_text(texts, kinds)
    pairs = []
    for line in keys.texts("merges"):
        left, gap, right = line.partition(" ")
        if not gap or not left or not right:
            raise ModelFormatError(
                f"GGUF metadata 'tokenizer.ggml.merges' has the entry {line!r}, expected two "
                "pieces with a space between them."
            )
        pairs.append((left, right))
    backend = _bpe(vocab=ids, merges=pairs, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in pre.expressions]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    _add_tokens(backend, texts, kinds)
    return _finish(keys, backend, texts, kinds, add_bos=pre.add_bos, byte_level=True)


def _sentencepiece(keys: _Keys, texts: list[str], kinds: bytes) -> Vocabulary:
    if keys.flag("remove_extra_whitespaces"):
        raise UnsupportedModelError(
            "the model's tokenizer removes extra spaces from its input, which Forerun doesn't "
            "implement. Choose another model."
        )
    scores = keys.scores(len(texts))
    written = set(texts)
    pieces = list(texts)
    for index in _where(kinds, TokenKind.USER_DEFINED):
        # The file writes such a token's spaces plainly, the algorithm sees SentencePiece's.
        if " " in texts[index]:
            spaced = texts[index].replace(" ", SPACE)
            pieces[index] = texts[index] if spaced in written else spaced
    ids = _ids_by_text(pieces, kinds)
    unknown = keys.token_id("unknown", len(texts))
    has_bytes = _check_bytes(texts, kinds)
    if not has_bytes and unknown is None:
        raise ModelFormatError(
            "the tokenizer has neither a token for each of the 256 bytes nor an unknown token: "
            "text outside its vocabulary can't be written."
        )
    backend = _bpe(
        vocab=ids,
        merges=merges_from_scores(pieces, kinds, scores),
        unk_token=None if unknown is None else pieces[unknown],
        fuse_unk=True,
        byte_fallback=has_bytes,
    )
    space_prefix = keys.flag("add_space_prefix") is not False
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    if space_prefix:
        steps.insert(0, normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    _add_tokens(backend, pieces, kinds)
    return _finish(keys, backend, texts, kinds, add_bos=True, byte_level=False, strip_space=space_prefix)


def merges_from_scores(pieces: Sequence[str], kinds: bytes, scores: Sequence[float]) -> list[tuple[str, str]]:
    """BPE merges, first to apply first, that do what SentencePiece does with these scores.

    As in Hugging Face's converter, every cut of a piece into two pieces is a merge; a piece with
    a higher score comes first, then the longer left part. User-defined pieces count as score 0,
    which SentencePiece gives them and GGUF files don't keep. Control, unknown, unused and byte
    tokens never take part: text that spells one must not become one.
    """
    usable = _where(kinds, TokenKind.NORMAL, TokenKind.USER_DEFINED)
    by_score = dict(enumerate(scores))
    by_score |= dict.fromkeys(_where(kinds, TokenKind.USER_DEFINED), 0.0)
    usable.sort(key=by_score.__getitem__, reverse=True)
    parts = {pieces[index] for index in usable}
    merges: list[tuple[str, str]] = []
    for _, same in groupby(usable, key=by_score.__getitem__):
        group = [pieces[index] for index in same]
        found = [
            (left, right)
            for piece in group
            for cut in range(len(piece) - 1, 0, -1)
            if (right := piece[cut:]) in parts and (left := piece[:cut]) in parts
        ]
        if len(group) > 1:
            # Equal scores: lengths decide across pieces, and then the id of the whole, as found.
            found.sort(key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
        merges += found
    return merges


def _finish(
    keys: _Keys,
    backend: tokenizers.Tokenizer,
    texts: list[str],
    kinds: bytes,
    *,
    add_bos: bool,
    byte_level: bool,
    strip_space: bool = False,
) -> Vocabulary:
    """Adds what both families have: the ids with a role."""
    bos = keys.token_id("bos", len(texts))
    declared = keys.flag("add_bos_token")
    if declared and bos is None:
        raise ModelFormatError(
            "GGUF metadata 'tokenizer.ggml.add_bos_token' is true, but there is no 'tokenizer.ggml.bos_token_id'."
        )
    ends = {keys.token_id(role, len(texts)) for role in ("eos", "eot", "eom")} - {None}
    named = {index for index in _where(kinds, TokenKind.CONTROL, TokenKind.USER_DEFINED) if texts[index] in END_TOKENS}
    return Vocabulary(
        backend=backend,
        texts=texts,
        kinds=kinds,
        byte_level=byte_level,
        bos_id=bos,
        eos_ids=frozenset(end for end in ends | named if end is not None),
        add_bos=(add_bos if declared is None else declared) and bos is not None,
        strip_space=strip_space,
    )


def _bpe(**settings: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(**settings))
    except Exception as error:  # the library raises plain Exception for inconsistent merges
        raise ModelFormatError(
            "GGUF metadata 'tokenizer.ggml.merges' doesn't fit 'tokenizer.ggml.tokens': "
            f"{error}. Convert or download the model again."
        ) from error


def _ids_by_text(texts: Sequence[str], kinds: bytes) -> dict[str, int]:
    ids = {text: index for index, text in enumerate(texts)}
    if len(ids) == len(texts):
        return ids
    first: dict[str, int] = {}
    for index, text in enumerate(texts):
        if first.setdefault(text, index) != index and kinds[index] != TokenKind.UNUSED:
            raise ModelFormatError(
                f"GGUF metadata 'tokenizer.ggml.tokens' has {text!r} twice, as ids {first[text]} and {index}."
            )
    return first


def _add_tokens(backend: tokenizers.Tokenizer, texts: Sequence[str], kinds: bytes) -> None:
    """Registers the tokens that are found in text before anything else is done to it."""
    backend.add_tokens(
        [
            AddedToken(texts[index], normalized=False, special=kinds[index] == TokenKind.CONTROL)
            for index in _where(kinds, TokenKind.CONTROL, TokenKind.USER_DEFINED)
            if texts[index]
        ]
    )


def _check_bytes(texts: Sequence[str], kinds: bytes) -> bool:
    """Whether all 256 bytes have a token; refuses byte tokens that are not written as such."""
    found = {byte_value(texts[index], index) for index in _where(kinds, TokenKind.BYTE)}
    return len(found) == 256


def _where(kinds: bytes, *wanted: TokenKind) -> list[int]:
    """Ids of these kinds, ascending."""
    matches = np.isin(np.frombuffer(kinds, np.uint8), wanted)
    return [int(index) for index in np.flatnonzero(matches)]


def byte_value(text: str, index: int) -> int:
    """The byte of a token written "<0x0A>"; raises ModelFormatError for any other text."""
    match = re.fullmatch(r"<0x([0-9A-F]{2})>", text)
    if match is None:
        raise ModelFormatError(
            f"token {index} stands for a byte but is written {text!r}, expected '<0x00>' to '<0xFF>'."
        )
    return int(match[1], 16)


class _Keys:
    """Typed access to `tokenizer.ggml.*`."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._metadata = metadata

    def _get(self, key: str) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}")

    def _wrong(self, key: str, expected: str) -> ModelFormatError:
        state = "missing" if self._get(key) is None else "wrong"
        return ModelFormatError(
            f"GGUF metadata 'tokenizer.ggml.{key}' is {state}, expected {expected}: convert or "
            "download the model again."
        )

    def text(self, key: str) -> str:
        value = self._get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, "an array of texts")
        return value

    def flag(self, key: str) -> bool | None:
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(key, "true or false")
        return value

    def token_id(self, role: str, count: int) -> int | None:
        key = f"{role}_token_id"
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self._wrong(key, f"an id below {count} (it is {value!r})")
        return value

    def kinds(self, count: int) -> bytes:
        values = self._numbers("token_type", count)
        if values is None:
            return bytes([TokenKind.NORMAL]) * count
        allowed = frozenset(TokenKind)
        if not allowed.issuperset(values):
            raise self._wrong("token_type", "kinds from 1 to 6")
        return bytes(int(value) for value in values)

    def scores(self, count: int) -> list[float]:
        values = self._numbers("scores", count)
        if values is None or not all(map(math.isfinite, values)):
            raise self._wrong("scores", "a finite number for each token")
        return values

    def _numbers(self, key: str, count: int) -> list[Any] | None:
        value = self._get(key)
        if value is None:
            return None
        values = value.tolist() if hasattr(value, "tolist") else value
        if not isinstance(values, list) or not _all_numbers(values):
            raise self._wrong(key, "an array of numbers")
        if len(values) != count:
            raise self._wrong(key, f"{count} entries, one a token (it has {len(values)})")
        return values


def _all_numbers(values: Iterable[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)
