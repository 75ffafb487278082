"""The tokenizer against slow references, known ids, and the golden texts of the real models."""

from __future__ import annotations

import json
import time
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.errors import InvalidRequestError
from forerun.models.catalog import Catalog
from forerun.models.chat import ChatTemplate
from forerun.models.gguf import GGUFFile
from forerun.models.tokenizer import StreamDecoder, Tokenizer
from forerun.models.tokenizer_gguf import TokenKind, merges_from_scores, vocabulary_from_gguf
from reference.tiny import TinySpec, byte_alphabet, tiny_metadata
from reference.vocabularies import PIECES, byte_level, sentencepiece, sentencepiece_metadata

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"
CATALOG_NAMES = {
    "smollm2-135m": "smollm2-135m-instruct",
    "coder-0.5b": "qwen2.5-coder-0.5b-instruct",
    "coder-1.5b": "qwen2.5-coder-1.5b-instruct",
}
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
NFC_TEXT = TEXT.map(lambda text: unicodedata.normalize("NFC", text))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {
        "gpt-2": byte_level(),
        "qwen2": byte_level("qwen2"),
        "gemma": sentencepiece(),
        "llama-2": sentencepiece(add_space_prefix=True),
    }


def real(name: str) -> Iterator[GGUFFile]:
    entry = Catalog.load().get(name)
    if not entry.path.is_file():
        pytest.skip(f"{name} is not in the cache: run `forerun models pull {name}`")
    with GGUFFile.open(entry.path) as file:
        yield file


@pytest.fixture(scope="module", params=sorted(CATALOG_NAMES))
def golden(request: pytest.FixtureRequest) -> Iterator[tuple[Tokenizer, GGUFFile, str]]:
    if not (GOLDEN / f"{request.param}.json").is_file():
        pytest.skip(f"../shared/golden/{request.param}.json is absent")
    for file in real(CATALOG_NAMES[request.param]):
        yield Tokenizer.from_gguf(file.metadata), file, request.param


@pytest.fixture(scope="module")
def gemma() -> Iterator[Tokenizer]:
    for file in real("gemma-3-270m"):
        yield Tokenizer.from_gguf(file.metadata)


@pytest.mark.model
def test_golden_texts_prompts_and_answers(golden: tuple[Tokenizer, GGUFFile, str]) -> None:
    tokenizer, file, name = golden
    facts = json.loads((GOLDEN / f"{name}.json").read_text("utf-8"))
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        for key, entry in facts["texts"].items():
            expected = arrays[f"{key}_tokens"].tolist()
            assert tokenizer.encode(entry["text"]) == expected
            assert tokenizer.encode_plain(entry["text"]) == expected
            assert tokenizer.decode(expected) == entry["text"]
    template = ChatTemplate(str(file.metadata["tokenizer.chat_template"]), "", "")
    for chat in facts["chat"]:
        prompt = template.render([{"role": "user", "content": chat["user"]}])
        assert prompt == chat["prompt"]
        assert tokenizer.encode(prompt, add_special=False) == chat["prompt_ids"]
        assert tokenizer.decode(chat["greedy_ids"], skip_special=False) == chat["greedy_text"]


@pytest.mark.model
def test_real_byte_level_round_trip(golden: tuple[Tokenizer, GGUFFile, str]) -> None:
    tokenizer, file, _ = golden
    tokens = set(file.metadata["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    lacking = {byte for byte, letter in enumerate(byte_alphabet()) if letter not in tokens}

    @settings(max_examples=300, deadline=None)
    @given(NFC_TEXT)
    def check(text: str) -> None:
        ids = tokenizer.encode_plain(text)
        assert not any(map(tokenizer.is_special, ids))
        if lacking.isdisjoint(text.encode()):
            assert tokenizer.decode(ids) == text

    check()


# Ids that llama.cpp's own tokenizer gives for the same file.
GEMMA_FACTS = {
    "Hello, world!": [9259, 236764, 1902, 236888],
    "  a   b\n\n\nc\t\td": [138, 236746, 139, 236763, 109, 236755, 255969, 236753],
    "<b>hi</b> é日本語🦊\0": [200, 2202, 209, 1559, 94951, 249086, 238],
    " " * 70 + "x": [167, 167, 144, 236781],
}


@pytest.mark.model
def test_gemma_facts(gemma: Tokenizer) -> None:
    for text, ids in GEMMA_FACTS.items():
        assert gemma.encode_plain(text) == ids
        assert gemma.encode(text) == [2, *ids]
        assert gemma.decode(ids) == text
    turn = "<start_of_turn>user\nhi<end_of_turn>\n"
    assert gemma.encode(turn) == [2, 105, 2364, 107, 2202, 106, 107]
    assert not {105, 106} & set(gemma.encode_plain(turn))
    assert gemma.eos_ids == {1, 106}

    @settings(max_examples=300, deadline=None)
    @given(TEXT)
    def round_trip(text: str) -> None:
        assert gemma.decode(gemma.encode_plain(text)) == text.replace("▁", " ")

    round_trip()


PRES = ("gpt-2", "smollm", "qwen2", "llama-bpe", "tekken", "default")
WORDS = {
    # text: its words, one column for each of PRES
    "I'LL don't": (
        "I|'|LL| don|'t",
        "I|'|LL| don|'t",
        "I|'LL| don|'t",
        "I|'LL| don|'t",
        "I|'LL| don|'t",
        "I|'|LL| don|'|t",
    ),
    "x 12345": (
        "x| 12345",
        "x| |1|2|3|4|5",
        "x| |1|2|3|4|5",
        "x| |123|45",
        "x| |1|2|3|4|5",
        "x| |123|45",
    ),
    "a,b  c": ("a|,|b| | c",) * 2 + ("a|,b| | c",) * 3 + ("a|,|b| | c",),
    "f() \n\n g": ("f|()| \n\n| g",) * 6,
    "p\t\tq": ("p|\t|\t|q",) * 2 + ("p|\t|\tq",) * 3 + ("p|\t|\t|q",),
    "aB.\ncD/\n": (
        "aB|.|\n|cD|/|\n",
        "aB|.|\n|cD|/|\n",
        "aB|.\n|cD|/\n",
        "aB|.\n|cD|/\n",
        "a|B|.\n|c|D|/\n",
        "aB|.|\n|cD|/|\n",
    ),
}


@pytest.mark.parametrize("pre", PRES)
def test_each_pre_tokenizer_cuts_words_as_its_models_do(pre: str) -> None:
    spec = TinySpec("llama", metadata={"tokenizer.ggml.pre": pre})
    splitter = vocabulary_from_gguf(tiny_metadata(spec)).backend.pre_tokenizer
    for text, expected in WORDS.items():
        alphabet = {letter: byte for byte, letter in enumerate(byte_alphabet())}
        found = [bytes(alphabet[letter] for letter in word).decode() for word, _ in splitter.pre_tokenize_str(text)]
        assert "|".join(found) == expected[PRES.index(pre)]


def test_only_qwen_normalises() -> None:
    text = "e\u0301"
    assert byte_level("qwen2").decode(byte_level("qwen2").encode(text)) == "\u00e9"
    for pre in PRES:
        if pre != "qwen2":
            assert byte_level(pre).decode(byte_level(pre).encode(text)) == text


def test_llama3_takes_a_whole_word_before_any_merge() -> None:
    # Without merges only `ignore_merges` finds a word of two letters.
    for pre, count in (("llama-bpe", 1), ("tekken", 1), ("qwen2", 2), ("gpt-2", 2)):
        tokenizer = byte_level(pre, merges=[])
        ids = tokenizer.encode_plain("in")
        assert tokenizer.decode(ids) == "in"
        assert len(ids) == count


def slow_bpe(symbols: list[str], merges: Sequence[tuple[str, str]]) -> list[str]:
    """BPE by its definition: always the first rule that applies, always its leftmost place."""
    while True:
        for left, right in merges:
            places = [n for n in range(len(symbols) - 1) if symbols[n] == left and symbols[n + 1] == right]
            if places:
                at = places[0]
                symbols = [*symbols[:at], left + right, *symbols[at + 2 :]]
                break
        else:
            return symbols


def slow_merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """The converter's rule, word for word."""
    found = []
    for whole, score in scores.items():
        for cut in range(1, len(whole)):
            left, right = whole[:cut], whole[cut:]
            if left in scores and right in scores:
                found.append((left, right, score))
    found.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.text("a▁", min_size=2, max_size=5), unique=True, max_size=12),
    st.data(),
)
def test_scores_give_the_converters_merges_and_bpe_by_its_definition(longer: list[str], data: st.DataObject) -> None:
    pieces = ["a", "b", "▁", *longer]
    scores = data.draw(st.lists(st.integers(-9, 0).map(float), min_size=len(pieces), max_size=len(pieces)))
    kinds = bytes([TokenKind.NORMAL]) * len(pieces)
    merges = slow_merges(dict(zip(pieces, scores, strict=True)))
    assert merges_from_scores(pieces, kinds, scores) == merges

    base = sentencepiece_metadata()
    first = 262
    metadata = base | {
        "tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"][:260], "\n\n", "<x>", *pieces],
        "tokenizer.ggml.token_type": [2, 3, 3, 3, *[6] * 256, 4, 4, *kinds],
        "tokenizer.ggml.scores": [-1000.0] * first + scores,
    }
    tokenizer = Tokenizer.from_gguf(metadata)
    text = data.draw(st.text("ab ", max_size=12))
    # A user-defined piece counts as score 0, but none can be spelt with these letters.
    symbols = slow_bpe(list(text.replace(" ", "▁")), merges)
    assert tokenizer.encode_plain(text) == [first + pieces.index(symbol) for symbol in symbols]


def test_user_defined_pieces_win_over_scores_and_special_ones_never_merge() -> None:
    tokenizer = sentencepiece()
    ids = tokenizer.encode_plain("   a\n\n\n")
    texts = [tokenizer.token_bytes(index) for index in ids]
    assert texts == [b"  ", b" a", b"\n\n", b"\n"]
    kinds = bytes([1, 1, 3, 6, 5, 2])
    assert merges_from_scores(["<", "s>", "<s>", "<s><", "s><", "s>s>"], kinds, [0.0] * 6) == []


def test_the_longer_left_part_of_a_piece_comes_first() -> None:
    merges = merges_from_scores(["a", "aa", "aaa"], bytes([1] * 3), [-2.0, -1.0, 0.0])
    assert merges == [("aa", "a"), ("a", "aa"), ("a", "a")]


def test_a_literal_u2581_is_a_space_to_sentencepiece() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.encode_plain("▁▁") == tokenizer.encode_plain("  ") == [261]
    assert tokenizer.encode_plain("▁ab") == tokenizer.encode_plain(" ab")


def test_without_byte_tokens_what_is_unknown_becomes_one_unknown_token() -> None:
    few = {"tokens": ["<unk>", "a", "▁"], "token_type": [2, 1, 1], "scores": [0.0] * 3}
    tokenizer = sentencepiece(**few, bos_token_id=None, eos_token_id=None)
    assert tokenizer.encode_plain("xyz a") == [0, 2, 1]


def test_characters_outside_the_vocabulary_become_bytes() -> None:
    tokenizer = sentencepiece()
    fox = tokenizer.encode_plain("🦊")
    assert [tokenizer.token_bytes(index) for index in fox] == [b"\xf0", b"\x9f", b"\xa6", b"\x8a"]
    assert tokenizer.decode(fox) == "🦊"
    assert tokenizer.token_bytes(tokenizer.encode_plain("é")[0]) == "é".encode()


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_round_trip(tokenizers: dict[str, Tokenizer], text: str) -> None:
    def again(name: str) -> str:
        return tokenizers[name].decode(tokenizers[name].encode_plain(text))

    assert again("gpt-2") == text
    assert again("qwen2") == unicodedata.normalize("NFC", text)
    assert again("gemma") == text.replace("▁", " ")
    if "\n\n" not in text:
        assert again("llama-2") == text.replace("▁", " ")


def test_llama2_space_prefix() -> None:
    tokenizer = sentencepiece(add_space_prefix=True)
    assert tokenizer.encode_plain("ab") == [262 + PIECES.index("▁ab")]
    assert tokenizer.decode(tokenizer.encode_plain("ab")) == "ab"
    assert tokenizer.decode(tokenizer.encode_plain(" ab")) == " ab"
    assert tokenizer.decode([1, 262 + PIECES.index("▁ab")]) == "ab"
    assert tokenizer.decode([1, 262 + PIECES.index("▁ab")], skip_special=False) == "<s> ab"
    assert sentencepiece(add_space_prefix=None).encode_plain("ab") == [262 + PIECES.index("▁ab")]
    assert sentencepiece().encode_plain("ab") == [262 + PIECES.index("ab")]


SPECIAL_TEXT = {"gpt-2": "<|im_end|>", "qwen2": "<|im_start|>", "gemma": "<turn>", "llama-2": "<s>"}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SPECIAL_TEXT)), st.lists(st.text("<>|im_endstarurn ", max_size=6)))
def test_special_tokens_are_parsed_by_encode_and_never_by_encode_plain(
    tokenizers: dict[str, Tokenizer], name: str, parts: list[str]
) -> None:
    tokenizer, special = tokenizers[name], SPECIAL_TEXT[name]
    text = special.join(parts)
    plain = tokenizer.encode_plain(text)
    assert not any(map(tokenizer.is_special, plain))
    assert tokenizer.decode(plain) == text
    parsed = tokenizer.encode(text, add_special=False)
    names = [tokenizer.token_bytes(index).decode() for index in parsed if tokenizer.is_special(index)]
    assert names.count(special) >= len(parts) - 1
    assert tokenizer.decode(parsed, skip_special=False).replace(" ", "") == text.replace(" ", "")


def test_begin_and_end_tokens() -> None:
    tiny = byte_level(add_bos_token=True)
    assert (tiny.bos_id, tiny.add_bos) == (292, True)
    assert tiny.encode("") == [292]
    assert tiny.encode("", add_special=False) == tiny.encode_plain("") == []
    assert tiny.encode("<|endoftext|>", add_special=False) == [292]
    # <|im_end|> is the file's end token, <|endoftext|> ends every model that has it.
    assert tiny.eos_ids == {292, 294}
    assert byte_level().encode("") == []
    # What holds where the file doesn't say.
    assert byte_level(add_bos_token=None).add_bos is False
    assert byte_level("llama-bpe", add_bos_token=None).add_bos is True
    assert sentencepiece(add_bos_token=None).encode("a")[0] == 1
    assert sentencepiece(add_bos_token=False).encode("a")[0] != 1
    assert byte_level("llama-bpe", add_bos_token=None, bos_token_id=None).add_bos is False
    assert sentencepiece(eot_token_id=3, eom_token_id=1).eos_ids == {1, 2, 3}
    assert sentencepiece(eos_token_id=None).eos_ids == frozenset()


def test_token_bytes_and_kinds() -> None:
    tiny = byte_level()
    letters = byte_alphabet()
    assert all(tiny.token_bytes(byte) == bytes([byte]) for byte in range(len(letters)))
    assert tiny.token_bytes(292) == b"<|endoftext|>"
    assert tiny.token_bytes(299) == b"[PAD4]"
    assert [tiny.is_special(index) for index in (0, 291, 292, 294, 299)] == [0, 0, 1, 1, 1]
    assert tiny.decode([292, 72, 299]) == "H"
    llama = sentencepiece()
    assert llama.token_bytes(4 + 0x0A) == b"\n"
    assert llama.token_bytes(261) == b"  "
    assert llama.token_bytes(262) == b" "
    assert llama.is_special(0)
    assert not llama.is_special(4)
    assert not llama.is_special(260)
    # A token outside the byte alphabet is taken as it is written.
    odd = byte_level(tokens=[*tiny_metadata(TinySpec("llama"))["tokenizer.ggml.tokens"][:291],
                             "日 本", *["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                             *[f"[PAD{n}]" for n in range(5)]], merges=[])  # fmt: skip
    assert odd.token_bytes(291) == "日 本".encode()


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["gpt-2", "gemma", "llama-2"]),
    st.lists(st.lists(st.integers(0, 299), max_size=6), max_size=6),
    st.booleans(),
)
def test_stream_equals_decode_for_any_ids_and_chunks(
    tokenizers: dict[str, Tokenizer], name: str, chunks: list[list[int]], skip: bool
) -> None:
    tokenizer = tokenizers[name]
    chunks = [[index % tokenizer.vocab_size for index in chunk] for chunk in chunks]
    ids = [index for chunk in chunks for index in chunk]
    shown = [index for index in ids if not (skip and tokenizer.is_special(index))]
    expected = b"".join(map(tokenizer.token_bytes, shown))
    if name == "llama-2" and expected[:1] == b" ":
        expected = expected[1:]
    text = expected.decode("utf-8", errors="replace")
    assert tokenizer.decode(ids, skip_special=skip) == text
    decoder = StreamDecoder(tokenizer, skip_special=skip)
    for _ in range(2):
        pieces = [decoder.push(chunk) for chunk in chunks]
        assert text.startswith("".join(pieces))
        assert "".join(pieces) + decoder.flush() == text


def test_stream_drops_the_tokenizers_space_once_text_begins(
    tokenizers: dict[str, Tokenizer],
) -> None:
    decoder = StreamDecoder(tokenizers["llama-2"])
    word = 262 + PIECES.index("▁ab")
    for _ in range(2):
        assert [decoder.push(ids) for ids in ([], [1], [word], [word])] == ["", "", "ab", " ab"]
        assert decoder.flush() == ""


@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_stream_never_splits_a_character(tokenizers: dict[str, Tokenizer], text: str) -> None:
    tokenizer = tokenizers["gpt-2"]
    ids = tokenizer.encode_plain(text)
    decoder = StreamDecoder(tokenizer)
    for count, index in enumerate(ids, start=1):
        piece = decoder.push([index])
        assert "\ufffd" not in piece or "\ufffd" in text
        done = b"".join(map(tokenizer.token_bytes, ids[:count]))
        if len(done.decode("utf-8", errors="ignore").encode()) == len(done):
            # Nothing is held back that could be shown.
            assert piece or not tokenizer.token_bytes(index)
    assert decoder.flush() == ""


def test_emoji_over_two_steps_and_truncation_inside_a_character() -> None:
    tokenizer = sentencepiece()
    fox = tokenizer.encode_plain("🦊")
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(fox[:2]), decoder.push(fox[2:]), decoder.flush()] == ["", "🦊", ""]
    assert [decoder.push(fox[:3]), decoder.flush()] == ["", "\ufffd"]
    assert tokenizer.decode(fox[:3]) == "\ufffd"
    # A special token between the bytes isn't part of the text.
    assert decoder.push([fox[0], 1, *fox[1:]]) == "🦊"


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = byte_level()
    for index in (-1, 300):
        for use in (
            tokenizer.token_bytes,
            tokenizer.is_special,
            lambda n: tokenizer.decode([n]),
            lambda n: StreamDecoder(tokenizer).push([72, n]),
        ):
            with pytest.raises(InvalidRequestError, match=f"{index} is outside.*0 to 299"):
                use(index)
    decoder = StreamDecoder(tokenizer)
    with pytest.raises(InvalidRequestError):
        decoder.push([72, 300])
    assert decoder.push([73]) == "I"


@pytest.mark.parametrize("text", ["a\ud800", b"a", 5, None])
def test_what_is_not_text_is_refused(text: Any) -> None:
    for use in (byte_level().encode, byte_level().encode_plain):
        with pytest.raises(InvalidRequestError, match=r"surrogate|expected a text"):
            use(text)


@pytest.mark.parametrize("unit", ["a", " ", "\n", " \n", "🦊", "hello ", "<|im_end|>", "1", "'", "x  ", "e\u0301"])
def test_long_inputs_take_linear_time(tokenizers: dict[str, Tokenizer], unit: str) -> None:
    # Quadratic behaviour would need minutes.
    text = unit * (100_000 // len(unit))
    started = time.process_time()
    for tokenizer in tokenizers.values():
        tokenizer.encode_plain(text)
        tokenizer.encode(text)
    assert time.process_time() - started < 10


def test_threads_share_a_tokenizer(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["qwen2"]
    text = "the <|im_end|> and in " * 50
    expected = (tokenizer.encode(text), tokenizer.encode_plain(text))
    with ThreadPoolExecutor(4) as pool:
        both = pool.map(lambda _: (tokenizer.encode(text), tokenizer.encode_plain(text)), range(40))
        assert all(pair == expected for pair in both)
