"""Which draft models are refused, and that the others never propose what the target doesn't have."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import SamplingParams
from forerun.draft.compat import check_compatible
from forerun.draft.model import ModelDrafter
from forerun.errors import ConfigurationError
from forerun.models.download import resolve
from forerun.models.source import open_model
from forerun.models.tokenizer import Tokenizer
from reference.gguf_writer import write_gguf
from reference.plain_model import PlainModel, draft_context, draft_row
from reference.quant import make_tensor
from reference.tiny import (
    EOS_ID,
    VOCAB_SIZE,
    TinySpec,
    tiny_metadata,
    tiny_tokens,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)

SPEC = TinySpec("llama", layers=1)
NORMAL, CONTROL, UNUSED = 1, 3, 5
Change = Callable[[list[str], list[int]], Mapping[str, Any] | None]


def metadata(change: Change | None = None, size: int = VOCAB_SIZE) -> dict[str, Any]:
    """The tiny tokenizer, with unused tokens added or removed at its end, changed in place by `change`."""
    document = tiny_metadata(SPEC)
    tokens = (tiny_tokens() + [f"[PAD{n}]" for n in range(VOCAB_SIZE, size)])[:size]
    kinds = (document["tokenizer.ggml.token_type"].tolist() + [UNUSED] * size)[:size]
    more = change(tokens, kinds) if change else None
    return document | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "llama.vocab_size": size,
        **(more or {}),
    }


def tokenizer(change: Change | None = None, size: int = VOCAB_SIZE) -> Tokenizer:
    return Tokenizer.from_gguf(metadata(change, size))


def write_model(path: Path, size: int, change: Change | None = None) -> Path:
    """A tiny model whose embeddings are padded or cut to `size` rows; added rows score high."""
    weights = dict(tiny_weights(SPEC))
    for name in ("token_embd.weight", "output.weight"):
        rows = weights[name]
        more = np.random.default_rng(1).normal(0, 1, (max(0, size - VOCAB_SIZE), rows.shape[1])).astype(np.float32)
        weights[name] = np.concatenate([rows, more])[:size]
    return write_gguf(path, metadata(change, size), [make_tensor(name, values) for name, values in weights.items()])


def _rename(index: int, text: str, kind: int | None = None) -> Change:
    def change(tokens: list[str], kinds: list[int]) -> None:
        tokens[index] = text
        kinds[index] = kinds[index] if kind is None else kind

    return change


def _settings(**values: Any) -> Change:
    return lambda _tokens, _kinds: {f"tokenizer.ggml.{key}": value for key, value in values.items()}


@pytest.mark.parametrize("size", [VOCAB_SIZE - 4, VOCAB_SIZE, VOCAB_SIZE + 16])
def test_padded_sizes_may_differ(size: int) -> None:
    """Case 42, first part."""
    assert check_compatible(tokenizer(), tokenizer(size=size), "draft") == min(size, VOCAB_SIZE)
    assert check_compatible(tokenizer(size=size), tokenizer(), "draft") == min(size, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_rename(139, "zzz"), ["token 139 ", repr(tiny_tokens()[139]), "'zzz'"]),
        (_rename(0, "zzz"), ["token 0 ", "'zzz'"]),
        (_rename(EOS_ID, "<|stop|>"), [f"token {EOS_ID} ", "'<|im_end|>'", "'<|stop|>'"]),
        (_rename(EOS_ID, "[PADX]", UNUSED), [f"token {EOS_ID}", "ends a text", "the draft model doesn't have it"]),
        (_settings(eos_token_id=EOS_ID - 2, bos_token_id=EOS_ID), ["begins with token", str(EOS_ID)]),
        (_settings(eos_token_id=VOCAB_SIZE - 1), [f"token {VOCAB_SIZE - 1}", "ends a text"]),
    ],
)  # fmt: skip
def test_different_tokens_are_refused_by_name(change: Change, words: list[str]) -> None:
    """Case 42, second part: of the same size, but another token. Both ways round."""
    with pytest.raises(ConfigurationError) as caught:
        check_compatible(tokenizer(), tokenizer(change), "the-draft")
    for word in ["the-draft", "same tokenizer", *words]:
        assert word in str(caught.value)
    with pytest.raises(ConfigurationError):
        check_compatible(tokenizer(change), tokenizer(), "the-draft")


def test_the_first_of_several_differences_is_named() -> None:
    def change(tokens: list[str], _kinds: list[int]) -> None:
        tokens[220], tokens[200], tokens[139] = "x220", "x200", "x139"

    with pytest.raises(ConfigurationError, match="token 139 is"):
        check_compatible(tokenizer(), tokenizer(change), "draft")


def test_a_draft_token_past_the_targets_vocabulary_is_refused() -> None:
    """Case 42, last part."""
    change = _rename(VOCAB_SIZE + 3, "<|tool|>", CONTROL)
    bigger = tokenizer(change, VOCAB_SIZE + 16)
    with pytest.raises(ConfigurationError, match=rf"token {VOCAB_SIZE + 3}, '<\|tool\|>'.*end at {VOCAB_SIZE - 1}"):
        check_compatible(tokenizer(), bigger, "draft")
    # The target may have more than the draft model.
    assert check_compatible(bigger, tokenizer(), "draft") == VOCAB_SIZE


def test_another_kind_of_tokenizer_is_refused() -> None:
    other = Tokenizer(dataclasses.replace(tokenizer().vocabulary, byte_level=False))
    for pair in ((tokenizer(), other), (other, tokenizer())):
        with pytest.raises(ConfigurationError, match=r"byte-level BPE.*SentencePiece"):
            check_compatible(*pair, "draft")


def test_padding_has_no_meaning() -> None:
    """A token that is padding in one of the two may be anything in the other."""
    changed = tokenizer(_rename(VOCAB_SIZE - 1, "<think>", NORMAL))
    assert check_compatible(tokenizer(), changed, "draft") == VOCAB_SIZE
    assert check_compatible(changed, tokenizer(), "draft") == VOCAB_SIZE


def test_file_formats_do_not_matter(tmp_path: Path) -> None:
    folder = Tokenizer.from_folder(write_tiny_folder(tmp_path / "folder", SPEC))
    assert check_compatible(tokenizer(), folder, "draft") == VOCAB_SIZE
    assert check_compatible(folder, tokenizer(), "draft") == VOCAB_SIZE


@pytest.mark.parametrize("size", [VOCAB_SIZE - 4, VOCAB_SIZE + 16])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("verify", ["coupled", "rejection"])
def test_padding_is_never_proposed(tmp_path: Path, size: int, width: int, verify: Any) -> None:
    target = PlainModel(write_model(tmp_path / "target.gguf", VOCAB_SIZE))
    draft = write_model(tmp_path / "draft.gguf", size)
    drafter = ModelDrafter(draft_context(target, draft), width=width, min_confidence=0.0)
    if size > VOCAB_SIZE:
        # The padding's rows are the largest scores, so that it would be proposed.
        assert PlainModel(draft).following([1, 2, 3], 1)[0] >= VOCAB_SIZE
    params = [SamplingParams(), SamplingParams(temperature=2.0, verify=verify)]
    rows = [draft_row(key, [1, 2, 3 + key], 12, params[key % 2], seed=key) for key in range(8)]
    for tree in drafter.propose(rows):
        assert len(tree) == 12
        assert max(tree.tokens) < min(size, VOCAB_SIZE)
        if tree.q is not None:
            assert tree.q.shape == (12, VOCAB_SIZE)
            np.testing.assert_allclose(tree.q.sum(axis=1), 1, rtol=1e-5)
    drafter.check_integrity()


def test_a_drafter_is_refused_before_its_weights_are_loaded(tmp_path: Path) -> None:
    target = PlainModel(write_model(tmp_path / "target.gguf", VOCAB_SIZE))
    draft = write_model(tmp_path / "draft.gguf", VOCAB_SIZE, _rename(139, "zzz"))
    with pytest.raises(ConfigurationError, match="token 139 is"):
        ModelDrafter(draft_context(target, draft))


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_another_architecture_may_draft(tmp_path: Path, architecture: Any) -> None:
    target = PlainModel(write_model(tmp_path / "target.gguf", VOCAB_SIZE))
    draft = write_tiny_gguf(tmp_path / "draft.gguf", TinySpec(architecture, layers=1))
    tree = ModelDrafter(draft_context(target, draft), min_confidence=0.0).propose([draft_row(1, [1, 2, 3], 4)])[0]
    assert tree.tokens == PlainModel(draft).following([1, 2, 3], 4)


@pytest.mark.model
def test_the_coder_models_fit_together() -> None:
    found = []
    for name in ("qwen2.5-coder-1.5b-instruct", "qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"):
        with open_model(resolve(name)) as source:
            found.append(source.tokenizer())
    target, draft, other = found
    assert check_compatible(target, draft, "draft") == 151_936
    with pytest.raises(ConfigurationError, match="smollm2 can't draft for this model: token "):
        check_compatible(target, other, "smollm2")
