"""The model's own tokenizer: text to ids, ids to text, and a decoder for streams.

Built on Hugging Face's `tokenizers` for encoding. Decoding is done here, by one rule: a token
stands for bytes, a text is the bytes of its tokens joined, and bytes that aren't UTF-8 become
U+FFFD just as `bytes.decode("utf-8", errors="replace")` makes them.

What an encoding may change, as the models' own tokenizers do: Qwen texts are normalised to NFC;
SentencePiece models can't tell U+2581 from a space; a byte-level vocabulary that lacks some of the
256 bytes (SmolLM2: a few control characters and all of planes 4 to 11) drops those. Everything else
survives a round trip.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import tokenizers
from tokenizers import models

from forerun.errors import (
    CacheError,
    InvalidRequestError,
    ModelFormatError,
    UnsupportedModelError,
)
from forerun.models.safetensors import read_json_object
from forerun.models.tokenizer_gguf import (
    END_TOKENS,
    SPACE,
    SPECIAL_KINDS,
    TokenKind,
    Vocabulary,
    byte_value,
    vocabulary_from_gguf,
)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable Latin-1 as it is, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + n): byte for n, byte in enumerate(others)}


class Tokenizer:
    """Encodes and decodes as the model was trained; immutable and safe to share among threads.

    A token id is valid from 0 to `vocab_size` - 1; methods that take ids raise InvalidRequestError
    for others.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary: Final = vocabulary
        self._alphabet: Final = _byte_alphabet()
        self._plain: Final = literal_backend(vocabulary.backend)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Self:
        """The tokenizer that a GGUF file's metadata describe.

        Raises UnsupportedModelError for a kind or pre-tokenizer that Forerun doesn't have,
        ModelFormatError for metadata that are incomplete or contradict themselves.
        """
        return cls(vocabulary_from_gguf(metadata))

    @classmethod
    def from_folder(cls, path: Path) -> Self:
        """The tokenizer of a Hugging Face folder, from its tokenizer.json.

        tokenizer_config.json, generation_config.json and config.json, where present, say which
        tokens begin and end a text and how many ids the model has. Raises UnsupportedModelError
        for other tokenizers than byte-level and SentencePiece BPE, and for folders that have their
        tokenizer in an older form only; ModelFormatError for damaged files.
        """
        return cls(_vocabulary_from_folder(path))

    @property
    def vocabulary(self) -> Vocabulary:
        """What it was made of, read only: the token of every id as the file writes it, and its kind."""
        return self._vocabulary

    @property
    def vocab_size(self) -> int:
        """Number of token ids, unused ones included."""
        return len(self._vocabulary.texts)

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        return self._vocabulary.bos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation: end of text, of turn, of message."""
        return self._vocabulary.eos_ids

    @property
    def add_bos(self) -> bool:
        """Whether `encode` begins with `bos_id`."""
        return self._vocabulary.add_bos

    @property
    def strip_space(self) -> bool:
        """Whether one leading space of a decoded text is the tokenizer's and is dropped."""
        return self._vocabulary.strip_space

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text in which special tokens may be written out ("<|im_start|>user").

        With `add_special` the begin-of-text token comes first where the model wants one; a rendered
        chat template brings its own, so encode that without. Takes time in proportion to the
        text. Raises InvalidRequestError for what isn't a text or has lone surrogates.
        """
        ids = _encode(self._vocabulary.backend, text)
        if add_special and self.add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text taken literally: none of them is a control token, nothing is added.

        Tokens that the model's makers declared as ordinary vocabulary though they look like markup
        (Qwen's "<tool_call>", Gemma's "<table>") are still found whole.
        """
        return _encode(self._plain, text)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of these ids, without or with the special tokens among them."""
        joined = b"".join(self.token_bytes(index) for index in ids if not (skip_special and self.is_special(index)))
        if self.strip_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, index: int) -> bytes:
        """The bytes that a token adds to a text; a special token's are its literal name in UTF-8.

        They may begin or end inside a UTF-8 character.
        """
        text = self._vocabulary.texts[self._check(index)]
        kind = self._vocabulary.kinds[index]
        if kind == TokenKind.BYTE:
            return bytes([byte_value(text, index)])
        if kind in SPECIAL_KINDS:
            return text.encode()
        if not self._vocabulary.byte_level:
            return text.replace(SPACE, " ").encode()
        if kind == TokenKind.USER_DEFINED:
            return text.encode()
        try:
            return bytes(map(self._alphabet.__getitem__, text))
        except KeyError:
            return text.encode()

    def is_special(self, index: int) -> bool:
        """Whether a token is a control, unknown or unused one, which has no text of its own."""
        return self._vocabulary.kinds[self._check(index)] in SPECIAL_KINDS

    def _check(self, index: int) -> int:
        if not 0 <= index < self.vocab_size:
            raise InvalidRequestError(
                f"token id {index} is outside the vocabulary: expected 0 to {self.vocab_size - 1}."
            )
        return index


class StreamDecoder:
    """Decodes ids as they come. Pieces never end inside a UTF-8 character.

    All that `push` returned since the start or the last `flush`, and then `flush`, joined, are
    exactly `tokenizer.decode` of all the ids pushed (`keep_space`: with the leading space that it
    may drop).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, keep_space: bool = False) -> None:
        self._tokenizer = tokenizer
        self._strip_space = tokenizer.strip_space and not keep_space
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = True

    def push(self, ids: Iterable[int]) -> str:
        """The text that these ids complete; "" while a character is unfinished.

        Raises InvalidRequestError for an id outside the vocabulary and takes none of `ids` then.
        """
        tokenizer = self._tokenizer
        added = b"".join(
            tokenizer.token_bytes(index) for index in ids if not (self._skip_special and tokenizer.is_special(index))
        )
        if self._at_start and added:
            self._at_start = False
            if self._strip_space:
                added = added.removeprefix(b" ")
        return self._decoder.decode(added)

    def flush(self) -> str:
        """Ends the text: U+FFFD for an unfinished character, else "". A new text may follow."""
        rest = self._decoder.decode(b"", final=True)
        self._at_start = True
        return rest


_LONG: Final = 2048
"""Characters beyond which a text is encoded as a batch, which lets other threads run meanwhile."""


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    if not isinstance(text, str):
        raise InvalidRequestError(f"expected a text to encode, got {type(text).__name__}.")
    try:
        if len(text) > _LONG:
            return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return list(backend.encode(text, add_special_tokens=False).ids)
    except TypeError as error:
        raise InvalidRequestError(
            "the text has a lone surrogate (U+D800 to U+DFFF), which no encoding of Unicode can "
            "carry: replace or remove it."
        ) from error


def literal_backend(backend: tokenizers.Tokenizer, *, normalizes: bool = True) -> tokenizers.Tokenizer:
    """A second face of the same model to which special tokens are ordinary text.

    Without `normalizes` a text's characters stay as they are. Raises ModelFormatError for added
    tokens whose ids don't follow from their order.
    """
    plain = tokenizers.Tokenizer(backend.model)
    if normalizes and backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    plain.add_tokens([added[index] for index in sorted(added)])
    plain.encode_special_tokens = True
    if plain.get_added_tokens_decoder().keys() != added.keys():
        raise ModelFormatError(
            "tokenizer.json gives its added tokens ids that don't follow from their order: save "
            "the tokenizer again with a current version of Transformers."
        )
    return plain


def _vocabulary_from_folder(path: Path) -> Vocabulary:
    backend = _backend_from_folder(path)
    byte_level, strip_space = _read_decoder(backend)
    settings = _optional_json(path / "tokenizer_config.json")
    generation = _optional_json(path / "generation_config.json")
    config = _optional_json(path / "config.json")

    added = backend.get_added_tokens_decoder()
    ids = backend.get_vocab(with_added_tokens=True)
    declared = config.get("vocab_size", _section(config, "text_config").get("vocab_size"))
    count = max(ids.values(), default=-1) + 1
    if isinstance(declared, int) and declared > count:
        count = declared
    texts = [f"[PAD{index}]" for index in range(count)]
    kinds = bytearray([TokenKind.UNUSED]) * count
    for text, index in ids.items():
        texts[index] = text
        kinds[index] = TokenKind.NORMAL
        if backend.model.byte_fallback and len(text) == 6 and text.startswith("<0x"):
            byte_value(text, index)
            kinds[index] = TokenKind.BYTE
    for index, token in added.items():
        kinds[index] = TokenKind.CONTROL if token.special else TokenKind.USER_DEFINED

    bos = _token_id(backend, settings.get("bos_token"), generation, config, "bos_token_id")
    prefix = _prefix(backend)
    wants_bos = settings.get("add_bos_token")
    ends = {index for index, token in added.items() if token.content in END_TOKENS}
    for document in (generation, config, _section(config, "text_config")):
        ends |= _id_set(document.get("eos_token_id"), count)
    eos = _token_text(settings.get("eos_token"))
    if eos in ids:
        ends.add(ids[eos])
    return Vocabulary(
        backend=backend,
        texts=texts,
        kinds=bytes(kinds),
        byte_level=byte_level,
        bos_id=prefix if bos is None else bos,
        eos_ids=frozenset(ends),
        add_bos=wants_bos if isinstance(wants_bos, bool) else prefix is not None,
        strip_space=strip_space,
    )


def _backend_from_folder(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        older = [name for name in ("tokenizer.model", "vocab.json") if (path / name).is_file()]
        if older:
            raise UnsupportedModelError(
                f"the folder {path} has its tokenizer as {older[0]} only: make a tokenizer.json "
                "with Transformers, AutoTokenizer.from_pretrained(folder).save_pretrained(folder)."
            )
        raise ModelFormatError(f"the folder {path} has no tokenizer.json: it isn't a complete model folder.")
    try:
        content = file.read_text("utf-8")
    except OSError as error:
        raise CacheError(f"can't read {file}: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise ModelFormatError(f"{file} is not UTF-8: download it again.") from error
    try:
        backend = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises plain Exception for whatever it can't read
        raise ModelFormatError(
            f"{file} can't be read: {error}. Download it again, or update the tokenizers package."
        ) from error
    if not isinstance(backend.model, models.BPE):
        raise UnsupportedModelError(
            f"{file} holds a {type(backend.model).__name__} tokenizer; Forerun has byte-level and "
            "SentencePiece BPE. Choose another model."
        )
    # A file may carry the settings of its training run, which would cut or fill prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_decoder(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """Whether tokens are byte-level, and whether decoding drops a leading space."""
    decoder = backend.decoder
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    steps = {step["type"]: step for step in state.get("decoders", [state]) if "type" in step}
    if "ByteLevel" in steps:
        return True, False
    strip = steps.get("Strip", {}).get("start", 0) > 0
    if "Metaspace" in steps:
        return False, strip or steps["Metaspace"].get("prepend_scheme", "always") != "never"
    if "ByteFallback" in steps or "Replace" in steps:
        return False, strip
    raise UnsupportedModelError(
        f"tokenizer.json decodes with {', '.join(steps) or 'nothing'}; Forerun has byte-level and "
        "SentencePiece BPE. Choose another model."
    )


def _prefix(backend: tokenizers.Tokenizer) -> int | None:
    """The token that the file's post-processor puts before a text, if it does."""
    bare = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    if whole[:1] == bare[:1]:
        return None
    return int(whole[0])


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = document.get(key)
    return section if isinstance(section, dict) else {}


def _token_text(entry: Any) -> str:
    """A token written plainly or as an object with its content; "" where there is none."""
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else ""


def _id_set(value: Any, count: int) -> set[int]:
    """The valid ids of a field that holds one id or several."""
    values: Sequence[Any] = value if isinstance(value, list) else [value]
    return {index for index in values if type(index) is int and 0 <= index < count}


def _token_id(
    backend: tokenizers.Tokenizer,
    entry: Any,
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
    key: str,
) -> int | None:
    index = backend.token_to_id(_token_text(entry))
    if index is not None:
        return int(index)
    for document in (generation, config):
        value = document.get(key)
        if type(value) is int and value >= 0:
            return value
    return None
