"""Where tokenizers come from: GGUF metadata right and wrong, and Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Backend

from forerun.errors import ModelFormatError, UnsupportedModelError
from forerun.models.tokenizer import Tokenizer
from forerun.models.tokenizer_gguf import vocabulary_from_gguf
from reference.tiny import TinySpec, tiny_metadata, write_tiny_folder
from reference.vocabularies import byte_level, sentencepiece, sentencepiece_metadata


def test_arrays_may_be_lists_or_numpy() -> None:
    metadata = sentencepiece_metadata()
    as_lists = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metadata.items()}
    text = "  abc\n\n🦊"
    assert Tokenizer.from_gguf(as_lists).encode(text) == Tokenizer.from_gguf(metadata).encode(text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "model' is missing"),
        ({"model": 3}, "model' is wrong"),
        ({"pre": None}, "pre' is missing"),
        ({"tokens": None}, "tokens' is missing"),
        ({"tokens": []}, "tokens' is empty"),
        ({"tokens": [1, 2]}, "tokens' is wrong, expected an array of texts"),
        ({"tokens": ["a"] * 300}, "has 'a' twice, as ids 0 and 1"),
        ({"token_type": [1] * 299}, r"expected 300 entries, one a token \(it has 299\)"),
        ({"token_type": [9] * 300}, "kinds from 1 to 6"),
        ({"token_type": "x"}, "array of numbers"),
        ({"merges": None}, "merges' is missing"),
        ({"merges": ["ab"]}, "entry 'ab', expected two pieces"),
        ({"merges": ["日 本"]}, "doesn't fit"),
        ({"merges": ["a z"]}, "doesn't fit"),
        ({"bos_token_id": 300}, r"an id below 300 \(it is 300\)"),
        ({"eos_token_id": -1}, "an id below 300"),
        ({"eos_token_id": True}, "an id below 300"),
        ({"add_bos_token": 1}, "true or false"),
        ({"add_bos_token": True, "bos_token_id": None}, "there is no 'tokenizer.ggml.bos_token_id"),
    ],
)
def test_broken_byte_level_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        byte_level(**{"pre": "gpt-2", **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": None}, "scores' is missing"),
        ({"scores": [0.0] * 3}, "expected 274 entries"),
        ({"scores": [float("nan")] * 274}, "a finite number"),
        ({"token_type": [6] * 274}, "stands for a byte but is written '<unk>'"),
        (
            {"token_type": [1] * 274, "unknown_token_id": None},
            "neither a token for each of the 256",
        ),
    ],
)
def test_broken_sentencepiece_metadata(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        sentencepiece(**changes)


def test_what_forerun_does_not_have_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match="'deepseek-llm'; Forerun has default, gpt-2"):
        byte_level("deepseek-llm")
    with pytest.raises(UnsupportedModelError, match="'bert'"):
        byte_level(model="bert")
    with pytest.raises(UnsupportedModelError, match="removes extra spaces"):
        sentencepiece(remove_extra_whitespaces=True)


def test_unused_tokens_may_repeat() -> None:
    tokens = [*tiny_metadata(TinySpec("llama"))["tokenizer.ggml.tokens"][:295], *["[PAD]"] * 5]
    assert byte_level(tokens=tokens).encode_plain("[PAD]")[0] < 256


def test_folder_equals_gguf(tmp_path: Path) -> None:
    spec = TinySpec("qwen2")
    folder = Tokenizer.from_folder(write_tiny_folder(tmp_path, spec))
    gguf = Tokenizer.from_gguf(tiny_metadata(spec))
    assert (folder.vocab_size, folder.bos_id, folder.add_bos) == (300, gguf.bos_id, False)
    assert folder.eos_ids == gguf.eos_ids
    text = "The <|im_start|>user and\n\n  the def 日本 it's"
    assert folder.encode(text) == gguf.encode(text)
    assert folder.encode_plain(text) == gguf.encode_plain(text)
    for index in range(295):
        assert folder.token_bytes(index) == gguf.token_bytes(index)
        assert folder.is_special(index) == gguf.is_special(index)


def change_json(file: Path, **changes: Any) -> None:
    document = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(document | changes))


def test_folder_settings(tmp_path: Path) -> None:
    write_tiny_folder(tmp_path, TinySpec("qwen2"))
    change_json(tmp_path / "config.json", vocab_size=310)
    change_json(tmp_path / "generation_config.json", eos_token_id=[293, 7, 999])
    change_json(tmp_path / "tokenizer_config.json", bos_token={"content": "<|im_start|>"},
                add_bos_token=True)  # fmt: skip
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    change_json(tmp_path / "tokenizer.json", truncation=cut)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 310
    assert tokenizer.is_special(309)
    assert tokenizer.token_bytes(309) == b"[PAD309]"
    assert tokenizer.eos_ids == {292, 293, 294, 7}
    assert tokenizer.encode("") == [293]
    assert len(tokenizer.encode("zzzzzz")) == 7
    assert len(tokenizer.encode_plain("zzzzzz")) == 6


@pytest.mark.parametrize("prefix", [False, True])
def test_sentencepiece_folder_equals_gguf(tmp_path: Path, prefix: bool) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=prefix)
    backend = Backend.from_str(vocabulary_from_gguf(metadata).backend.to_str())
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, *[decoders.Strip(" ", 1, 0)] * prefix])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(tmp_path / "tokenizer.json"))
    folder, gguf = Tokenizer.from_folder(tmp_path), Tokenizer.from_gguf(metadata)
    assert (folder.bos_id, folder.add_bos, folder.strip_space) == (1, True, prefix)
    for text in ("", "abc  <turn> a\n\n🦊", " ab", "▁▁"):
        assert folder.encode(text) == gguf.encode(text)
        assert folder.encode_plain(text) == gguf.encode_plain(text)
        ids = gguf.encode(text)
        assert folder.decode(ids) == gguf.decode(ids) == backend.decode(ids)


def test_added_tokens_outside_the_models_own_vocabulary(tmp_path: Path) -> None:
    backend = vocabulary_from_gguf(tiny_metadata(TinySpec("llama"))).backend
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<new>", special=True), AddedToken("<call>", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.vocab_size == 302
    assert tokenizer.encode("<new><call>") == [300, 301]
    assert tokenizer.encode_plain("<new><call>")[-1] == 301
    assert tokenizer.decode(tokenizer.encode_plain("<new><call>")) == "<new><call>"


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ModelFormatError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"as tokenizer\.model only.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    file = tmp_path / "tokenizer.json"
    for content in (b"{", b"\xff", b'{"model": {"type": "Strange"}}'):
        file.write_bytes(content)
        with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)
    Backend(models.Unigram([("a", 0.0)], 0)).save(str(file))
    with pytest.raises(UnsupportedModelError, match="Unigram"):
        Tokenizer.from_folder(tmp_path)
    Backend(models.BPE({"a": 0}, [])).save(str(file))
    with pytest.raises(UnsupportedModelError, match="decodes with nothing"):
        Tokenizer.from_folder(tmp_path)
