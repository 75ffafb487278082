"""Opening models: one face for GGUF files and folders, everything checked at the door."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.errors import ModelFormatError, ModelNotFoundError, UnsupportedModelError
from forerun.models.config import expected_tensors
from forerun.models.source import open_model
from forerun.ops.types import GGMLType, TensorData
from reference.forward import dequantised, forward
from reference.gguf_writer import write_gguf
from reference.quant import make_tensor
from reference.tiny import (
    ARCHITECTURES,
    BOS_ID,
    EOS_ID,
    TinySpec,
    safetensors_bytes,
    tiny_config,
    tiny_hf_config,
    tiny_hf_tensors,
    tiny_metadata,
    tiny_tensors,
    tiny_weights,
    write_tiny_folder,
    write_tiny_gguf,
)

SMALL = {"hidden": 64, "ffn": 96, "head_dim": 32, "layers": 2}


def small(architecture: Any, **changes: Any) -> TinySpec:
    return TinySpec(architecture, **(SMALL | changes))


def edited_gguf(path: Path, spec: TinySpec, change: Any) -> Path:
    """A tiny file whose tensors, by name, went through `change`."""
    tensors = {tensor.name: tensor for tensor in tiny_tensors(spec)}
    change(tensors)
    return write_gguf(path, tiny_metadata(spec), tensors.values())


def edited_folder(folder: Path, spec: TinySpec, change: Any) -> Path:
    write_tiny_folder(folder, spec)
    tensors = tiny_hf_tensors(spec)
    change(tensors)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shards", [1, 3])
def test_file_and_folder_are_the_same_model(tmp_path: Path, architecture: Any, shards: int) -> None:
    spec = small(architecture)
    tokens = np.random.default_rng(1).integers(0, 290, 20)
    with (
        open_model(write_tiny_gguf(tmp_path / "tiny.gguf", spec)) as file,
        open_model(write_tiny_folder(tmp_path / "tiny", spec, shards=shards)) as folder,
    ):
        assert file.names() == folder.names() == tuple(expected_tensors(tiny_config(spec)))
        style = file.config.rope.style
        assert replace(folder.config, rope=replace(folder.config.rope, style=style)) == file.config
        first = forward(file.config, dequantised(file), tokens)
        second = forward(folder.config, dequantised(folder), tokens)
        np.testing.assert_allclose(first.logits, second.logits, atol=1e-9)
        assert first.logits.std() > 0.5


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gguf_tensors_are_those_written(tmp_path: Path, architecture: Any) -> None:
    spec = small(architecture)
    with open_model(write_tiny_gguf(tmp_path / "tiny.gguf", spec)) as source:
        weights = dequantised(source)
        for name, expected in tiny_weights(spec).items():
            assert source.has(name)
            np.testing.assert_array_equal(weights[name], expected)
        assert not source.has("output.bias")
        with pytest.raises(ModelFormatError, match=r"output\.bias"):
            source.tensor("output.bias")


@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
def test_folder_norms_of_gemma_count_from_one(tmp_path: Path, kind: GGMLType) -> None:
    spec = small("gemma3", types={"": kind, "norm": kind})
    with open_model(write_tiny_folder(tmp_path / "tiny", spec)) as source:
        exact = tiny_weights(spec)
        for name in source.names():
            tensor = source.tensor(name)
            is_norm = name.endswith("norm.weight")
            assert tensor.name == name
            assert tensor.type is (GGMLType.F32 if is_norm else kind)
            if is_norm:
                np.testing.assert_allclose(dequantised(source)[name], exact[name], rtol=1e-2)
                assert dequantised(source)[name].mean() > 0.8


@pytest.mark.parametrize(
    "prefix",
    [
        {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."},
        {"model.": "model.language_model."},
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_multimodal_gemma_folder(tmp_path: Path, prefix: dict[str, str], tied: bool) -> None:
    spec = small("gemma3", tied=tied)
    plain = open_model(write_tiny_folder(tmp_path / "plain", spec))
    text = tiny_hf_config(spec)
    nested = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    write_tiny_folder(tmp_path / "nested", spec, config=nested, prefix=prefix, shards=2)
    index = json.loads((tmp_path / "nested/model.safetensors.index.json").read_text())
    vision = "vision_tower.encoder.weight"
    extra = safetensors_bytes({vision: make_tensor(vision, np.zeros((2, 2)))})
    (tmp_path / "nested/vision.safetensors").write_bytes(extra)
    index["weight_map"][vision] = "vision.safetensors"
    (tmp_path / "nested/model.safetensors.index.json").write_text(json.dumps(index))
    with plain, open_model(tmp_path / "nested") as source:
        assert source.config == plain.config
        for name, values in dequantised(plain).items():
            np.testing.assert_array_equal(dequantised(source)[name], values)


def test_tied_head_and_old_buffers_are_left_unread(tmp_path: Path) -> None:
    def change(tensors: dict[str, TensorData]) -> None:
        for name in ("lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"):
            tensors[name] = make_tensor(name, np.zeros((3, 3)))

    with open_model(edited_folder(tmp_path / "m", small("qwen3", tied=True), change)) as source:
        assert source.config.tied_embeddings
        assert not source.has("output.weight")


def test_rope_factors_reach_the_configuration(tmp_path: Path) -> None:
    factors = [1.0 + n / 8 for n in range(16)]
    spec = small("llama", rope_factors=factors)
    with open_model(write_tiny_gguf(tmp_path / "tiny.gguf", spec)) as source:
        scaling: Any = source.config.rope.scaling
        assert list(scaling.factors) == factors
        assert "rope_freqs.weight" not in source.names()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_missing_tensor_is_named(tmp_path: Path, architecture: Any) -> None:
    spec = small(architecture, layers=1)
    for name in expected_tensors(tiny_config(spec)):
        if name == "output.weight":
            continue
        path = edited_gguf(tmp_path / "tiny.gguf", spec, lambda tensors, n=name: tensors.pop(n))
        with pytest.raises(ModelFormatError, match=name.replace(".", r"\.")):
            open_model(path)


def test_missing_folder_tensor_is_named(tmp_path: Path) -> None:
    for name in tiny_hf_tensors(small("qwen2", layers=1)):
        folder = edited_folder(tmp_path / "m", small("qwen2", layers=1), lambda tensors, n=name: tensors.pop(n))
        with pytest.raises(ModelFormatError, match=r"lack"):
            open_model(folder)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_wrong_shape_is_named(tmp_path: Path, architecture: Any) -> None:
    spec = small(architecture, layers=1)
    for name, shape in expected_tensors(tiny_config(spec)).items():

        def change(tensors: dict[str, TensorData], name: str = name, shape: tuple[int, ...] = shape) -> None:
            wrong = (*shape[:-1], shape[-1] + 1)
            tensors[name] = make_tensor(name, np.zeros(wrong, dtype=np.float32))

        path = edited_gguf(tmp_path / "tiny.gguf", spec, change)
        with pytest.raises(ModelFormatError, match=name.replace(".", r"\.") + ".*shape"):
            open_model(path)


@pytest.mark.parametrize("name", ["blk.0.attn_output.bias", "blk.0.ffn_gate_inp.weight", "blk.9.attn_q.weight", "a.b"])
def test_a_tensor_that_nothing_reads_is_refused(tmp_path: Path, name: str) -> None:
    def change(tensors: dict[str, TensorData]) -> None:
        tensors[name] = make_tensor(name, np.zeros(64))

    with pytest.raises(UnsupportedModelError, match=f"{name}"):
        open_model(edited_gguf(tmp_path / "tiny.gguf", small("llama"), change))
    with pytest.raises(UnsupportedModelError, match=f"{name}"):
        open_model(edited_folder(tmp_path / "tiny", small("llama"), change))


def test_quantised_norms_are_refused(tmp_path: Path) -> None:
    spec = small("llama", types={"norm": GGMLType.Q8_0})
    with pytest.raises(UnsupportedModelError, match=r"attn_norm\.weight|output_norm\.weight"):
        open_model(write_tiny_gguf(tmp_path / "tiny.gguf", spec))


def test_folder_weights_of_another_type_are_refused(tmp_path: Path) -> None:
    spec = small("qwen3", layers=1)
    folder = write_tiny_folder(tmp_path / "tiny", spec)
    content = (folder / "model.safetensors").read_bytes()
    first = content.index(b'"F32"')
    (folder / "model.safetensors").write_bytes(content[:first] + b'"I32"' + content[first + len(b'"I32"') :])
    with pytest.raises(UnsupportedModelError, match=r"model\.embed_tokens\.weight"):
        open_model(folder)


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no file or folder"):
        open_model(tmp_path / "absent.gguf")
    with pytest.raises(ModelFormatError, match=r"no config\.json"):
        open_model(tmp_path)
    weights = write_tiny_folder(tmp_path / "tiny", small("llama")) / "model.safetensors"
    with pytest.raises(ModelFormatError, match="give the folder"):
        open_model(weights)
    (tmp_path / "tiny" / "config.json").write_text("[]")
    with pytest.raises(ModelFormatError, match=r"config\.json.*not a JSON object"):
        open_model(tmp_path / "tiny")


def test_fingerprint_names_the_weights_and_not_the_place(tmp_path: Path) -> None:
    def fingerprint(path: Path) -> str:
        with open_model(path) as source:
            return source.fingerprint()

    spec = small("llama")
    path = write_tiny_gguf(tmp_path / "one.gguf", spec)
    first = fingerprint(path)
    assert len(first) == 32
    assert int(first, 16) >= 0
    moved = tmp_path / "elsewhere.gguf"
    shutil.copy(path, moved)
    assert fingerprint(moved) == first
    others = [
        replace(spec, seed=1),
        replace(spec, types={"ffn_up": GGMLType.Q8_0}),
        replace(spec, context=256),
        replace(spec, metadata={"llama.rope.freq_base": 5e5}),
    ]
    marks = {fingerprint(write_tiny_gguf(tmp_path / "other.gguf", other)) for other in others}
    assert len(marks | {first}) == 5

    def last_byte(tensors: dict[str, TensorData]) -> None:
        data = tensors["blk.1.ffn_up.weight"].data.copy()
        data[-1] ^= 1
        tensors["blk.1.ffn_up.weight"] = replace(tensors["blk.1.ffn_up.weight"], data=data)

    assert fingerprint(edited_gguf(tmp_path / "other.gguf", spec, last_byte)) != first


def test_data_outlives_the_source(tmp_path: Path) -> None:
    for path in (
        write_tiny_gguf(tmp_path / "tiny.gguf", small("llama")),
        write_tiny_folder(tmp_path / "tiny", small("llama")),
    ):
        source = open_model(path)
        kept = source.tensor("output_norm.weight")
        before = kept.data.tobytes()
        source.close()
        source.close()
        assert kept.data.tobytes() == before
        with pytest.raises(ValueError, match="closed"):
            source.tensor("output_norm.weight")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_tokenizer_and_chat_template(tmp_path: Path, kind: str) -> None:
    spec = small("qwen3")
    path = (
        write_tiny_gguf(tmp_path / "tiny.gguf", spec) if kind == "file" else write_tiny_folder(tmp_path / "tiny", spec)
    )
    with open_model(path) as source:
        tokenizer = source.tokenizer()
        text = "in the end, café and the\n    répondent 日本 🎈"
        ids = tokenizer.encode_plain(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) < len(text.encode())
        assert tokenizer.bos_id == BOS_ID
        assert EOS_ID in tokenizer.eos_ids
        template = source.chat_template()
        assert template is not None
        prompt = template.render([{"role": "user", "content": "hi"}])
        assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_without_chat_template(tmp_path: Path) -> None:
    spec = small("qwen3", metadata={"tokenizer.chat_template": None})
    with open_model(write_tiny_gguf(tmp_path / "tiny.gguf", spec)) as source:
        assert source.chat_template() is None


def test_folder_chat_templates(tmp_path: Path) -> None:
    folder = write_tiny_folder(tmp_path / "tiny", small("qwen3"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}|{{ eos_token }}"},
    ]
    settings |= {"chat_template": named, "bos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    messages = [{"role": "user", "content": "hi"}]
    with open_model(folder) as source:
        template = source.chat_template()
        assert template is not None
        assert template.render(messages) == "<|endoftext|>|<|im_end|>"
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    with open_model(folder) as source:
        template = source.chat_template()
        assert template is not None
        assert template.render(messages) == "hi!"
