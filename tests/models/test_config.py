"""Configurations from GGUF metadata and config.json, and the rotary tables that follow."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import ForerunError, ModelFormatError, UnsupportedModelError
from forerun.models.config import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeConfig,
    YarnScaling,
    expected_tensors,
    rope_table,
)
from forerun.models.gguf_config import config_from_gguf
from forerun.models.hf_config import config_from_hf
from reference.forward import frequency
from reference.tiny import ARCHITECTURES, TinySpec, tiny_config, tiny_hf_config, tiny_metadata


def read_gguf(spec: TinySpec, **changes: Any) -> ModelConfig:
    """The configuration of a tiny model's metadata; `changes` use __ for dots, None removes."""
    metadata = tiny_metadata(spec)
    for key, value in changes.items():
        name = f"{spec.architecture}.{key.replace('__', '.')}"
        metadata.pop(name, None)
        if value is not None:
            metadata[name] = value
    return config_from_gguf(metadata, expected_tensors(tiny_config(spec)))


def read_hf(spec: TinySpec, **changes: Any) -> ModelConfig:
    return config_from_hf(tiny_hf_config(spec) | changes)


def as_hf(config: ModelConfig) -> ModelConfig:
    """A folder's weights aren't permuted, whatever the architecture."""
    return replace(config, rope=replace(config.rope, style="half"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_both_formats_give_the_configuration_that_was_written(architecture: Any) -> None:
    spec = TinySpec(architecture)
    expected = tiny_config(spec)
    metadata = tiny_metadata(spec)
    metadata[f"{architecture}.attention.layer_norm_rms_epsilon"] = expected.rms_eps
    assert config_from_gguf(metadata, expected_tensors(expected)) == expected
    assert read_hf(spec) == as_hf(expected)


scalings = st.one_of(
    st.none(),
    st.builds(LinearScaling, st.floats(0.5, 64)),
    st.builds(
        Llama3Scaling,
        st.floats(1, 64),
        st.floats(0.5, 2),
        st.floats(2.5, 8),
        st.integers(64, 1 << 17),
    ),
    st.builds(
        YarnScaling,
        st.floats(1, 64),
        st.integers(64, 1 << 17),
        st.floats(0.5, 2),
        st.floats(16, 64),
        st.floats(0.5, 4),
        st.booleans(),
    ),
)


@given(
    theta=st.floats(100, 1e7),
    half=st.integers(1, 64),
    scaling=scalings,
    positions=st.integers(0, 300),
)
def test_rope_table_is_the_formula_of_each_pair(theta: float, half: int, scaling: Any, positions: int) -> None:
    rope = RopeConfig(theta, "half", 2 * half, scaling)
    table = rope_table(rope, positions)
    assert table.cos.shape == table.sin.shape == (positions, half)
    assert table.cos.dtype == table.sin.dtype == np.float32
    factor = scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0
    for pair in range(half):
        angles = np.arange(positions) * frequency(rope, pair)
        np.testing.assert_allclose(table.cos[:, pair], factor * np.cos(angles), atol=3e-7)
        np.testing.assert_allclose(table.sin[:, pair], factor * np.sin(angles), atol=3e-7)


@given(st.lists(st.floats(0.5, 64), min_size=1, max_size=32))
def test_rope_factors_divide_their_own_frequency(factors: list[float]) -> None:
    rope = RopeConfig(1e4, "interleaved", 2 * len(factors), FrequencyFactors(tuple(factors)))
    table = rope_table(rope, 50)
    for pair, factor in enumerate(factors):
        angle = 49 * 1e4 ** (-pair / len(factors)) / factor
        assert table.cos[49, pair] == pytest.approx(math.cos(angle), abs=3e-7)


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_position_does_not_depend_on_the_table_it_is_in(short: int, more: int) -> None:
    rope = RopeConfig(1e6, "half", 64, YarnScaling(4.0, 128, 1.1))
    long_table, short_table = rope_table(rope, short + more), rope_table(rope, short)
    np.testing.assert_array_equal(long_table.cos[:short], short_table.cos)
    np.testing.assert_array_equal(long_table.sin[:short], short_table.sin)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    scaling = YarnScaling(4.0, 32768, YarnScaling.default_attention_factor(4.0))
    rope, plain = RopeConfig(1e6, "half", 128, scaling), RopeConfig(1e6, "half", 128)
    assert frequency(rope, 0) == frequency(plain, 0)
    assert frequency(rope, 63) == pytest.approx(frequency(plain, 63) / 4)
    assert rope_table(rope, 1).cos[0, 0] == pytest.approx(0.1 * math.log(4) + 1)


def test_gguf_rope_scaling() -> None:
    qwen = TinySpec("qwen2")
    linear = read_gguf(qwen, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.rope.scaling == LinearScaling(4.0)
    assert read_gguf(qwen, rope__scaling__factor=4.0).rope.scaling == LinearScaling(4.0)
    assert read_gguf(qwen, rope__scale_linear=2.0).rope.scaling == LinearScaling(2.0)
    off = read_gguf(qwen, rope__scaling__type="none", rope__scaling__factor=4.0)
    assert off.rope.scaling is None
    yarn = read_gguf(
        qwen,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=256,
    )
    assert yarn.rope.scaling == YarnScaling(4.0, 256, 0.1 * math.log(4) + 1)
    assert yarn.context_length == 1024
    with pytest.raises(UnsupportedModelError, match="longrope"):
        read_gguf(qwen, rope__scaling__type="longrope", rope__scaling__factor=4.0)
    with pytest.raises(ModelFormatError, match=r"qwen2\.rope\.scaling\.factor"):
        read_gguf(qwen, rope__scaling__type="yarn")


def test_gguf_rope_factors() -> None:
    spec = TinySpec("llama")
    metadata, shapes = tiny_metadata(spec), expected_tensors(tiny_config(spec))
    config = config_from_gguf(metadata, shapes, [1.5] * 32)
    assert config.rope.scaling == FrequencyFactors((1.5,) * 32)
    with pytest.raises(ModelFormatError, match=r"rope_freqs\.weight has 31 values"):
        config_from_gguf(metadata, shapes, [1.5] * 31)
    with pytest.raises(ModelFormatError, match=r"rope_freqs\.weight"):
        config_from_gguf(metadata, shapes, [0.0] * 32)
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight together"):
        config_from_gguf(metadata | {"llama.rope.scaling.factor": 2.0}, shapes, [1.5] * 32)


def test_gguf_gemma3_windows_and_local_rope() -> None:
    spec = TinySpec("gemma3", layers=7)
    default = read_gguf(spec, attention__sliding_window_pattern=None)
    assert default.window_layers == (True,) * 5 + (False, True)
    assert default.rope_local is not None
    assert default.rope_of(0).theta == 1e4
    assert default.rope_of(5).theta == 1e6
    assert (default.window_of(0), default.window_of(5)) == (8, None)
    every_third = read_gguf(spec, attention__sliding_window_pattern=3)
    assert every_third.window_layers == (True, True, False, True, True, False, True)
    assert read_gguf(spec, rope__freq_base=None).rope.theta == 1e6
    local = read_gguf(spec, rope__freq_base_swa=500.0)
    assert local.rope_local == RopeConfig(500.0, "half", 64)
    linear = read_gguf(spec, rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert linear.rope.scaling == LinearScaling(8.0)
    assert linear.rope_local == RopeConfig(1e4, "half", 64)
    unlimited = read_gguf(spec, attention__sliding_window=None, attention__sliding_window_pattern=None)
    assert unlimited.sliding_window is None
    assert unlimited.window_layers == (False,) * 7
    assert unlimited.rope_local is None
    with pytest.raises(ModelFormatError, match="sliding-window pattern names 2 layers"):
        read_gguf(spec, attention__sliding_window_pattern=np.array([True, False]))


def test_gguf_gemma3_27b_scales_queries_by_its_hidden_size() -> None:
    spec = TinySpec("gemma3", layers=62, hidden=512)
    config = read_gguf(spec, attention__sliding_window_pattern=None)
    assert config.attention_scale == 1 / math.sqrt(512 / 4)
    assert read_gguf(TinySpec("gemma3")).attention_scale == 1 / 8


def test_gguf_llama_biases_follow_the_tensors() -> None:
    spec = TinySpec("llama")
    shapes = expected_tensors(tiny_config(spec)) | {"blk.0.attn_k.bias": (128,)}
    assert config_from_gguf(tiny_metadata(spec), shapes).attention_bias


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "context_length",
        "embedding_length",
        "feed_forward_length",
        "attention.head_count",
    ],
)
@pytest.mark.parametrize("value", [None, "four", True, [1, 2], -1, 0, 2**40, math.nan])
def test_gguf_required_keys(key: str, value: Any) -> None:
    with pytest.raises(ModelFormatError) as caught:
        read_gguf(TinySpec("qwen3"), **{key.replace(".", "__"): value})
    if value is None or isinstance(value, str | bool | list):
        assert f"qwen3.{key}" in str(caught.value)


@pytest.mark.parametrize("value", [None, "small", True, -1.0, 0.0, math.nan, math.inf])
def test_gguf_epsilon(value: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"(?i)rms.*epsilon"):
        read_gguf(TinySpec("qwen3"), attention__layer_norm_rms_epsilon=value)


def test_gguf_per_layer_sizes() -> None:
    spec = TinySpec("llama")
    same = read_gguf(spec, feed_forward_length=np.array([512] * 3))
    assert same.ffn_size == 512
    with pytest.raises(UnsupportedModelError, match=r"llama\.feed_forward_length.*between layers"):
        read_gguf(spec, feed_forward_length=np.array([512, 512, 256]))
    with pytest.raises(ModelFormatError, match=r"llama\.feed_forward_length"):
        read_gguf(spec, feed_forward_length=np.array([512, 512]))


def test_gguf_contradictions() -> None:
    spec = TinySpec("llama")
    with pytest.raises(ModelFormatError, match=r"llama\.vocab_size.*301.*300 rows"):
        read_gguf(spec, vocab_size=301)
    with pytest.raises(ModelFormatError, match="multiple of the key/value head count"):
        read_gguf(spec, attention__head_count_kv=3)
    with pytest.raises(ModelFormatError, match="rope dimension count 66 is larger"):
        read_gguf(spec, rope__dimension_count=66)
    with pytest.raises(ModelFormatError, match=r"embedding_length.*not a multiple"):
        read_gguf(spec, attention__key_length=None, attention__head_count=3)
    metadata = tiny_metadata(spec) | {"tokenizer.ggml.tokens": ["a"]}
    with pytest.raises(ModelFormatError, match=r"tokenizer\.ggml\.tokens.*1 tokens.*300 rows"):
        config_from_gguf(metadata, expected_tensors(tiny_config(spec)))
    with pytest.raises(ModelFormatError, match=r"token_embd\.weight"):
        config_from_gguf(tiny_metadata(spec), {})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("logit_scale", 0.5),
        ("residual_scale", 0.22),
        ("embedding_scale", 12.0),
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("attention.sliding_window", 64),
        ("attention.value_length", 32),
        ("attention.scale", 0.5),
    ],
)
def test_gguf_unsupported_features_are_named(key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"llama\.{key}"):
        read_gguf(TinySpec("llama"), **{key.replace(".", "__"): value})


def test_gguf_neutral_values_are_accepted() -> None:
    config = read_gguf(
        TinySpec("llama"),
        expert_count=0,
        logit_scale=1.0,
        attention__scale=0.125,
        attention__sliding_window=512,
    )
    assert config.sliding_window is None


def test_unknown_architectures() -> None:
    with pytest.raises(UnsupportedModelError, match=r"'mamba'.*gemma3, llama, qwen2, qwen3"):
        config_from_gguf({"general.architecture": "mamba"}, {})
    with pytest.raises(ModelFormatError, match=r"general\.architecture"):
        config_from_gguf({}, {})
    with pytest.raises(UnsupportedModelError, match="'mixtral'"):
        config_from_hf({"model_type": "mixtral"})
    with pytest.raises(UnsupportedModelError, match="'gemma3 with text model gemma4_text'"):
        config_from_hf({"model_type": "gemma3", "text_config": {"model_type": "gemma4_text"}})
    with pytest.raises(ModelFormatError, match="model_type"):
        config_from_hf({})


def test_hf_llama3_scaling_in_every_spelling() -> None:
    numbers = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    spec = TinySpec("llama")
    expected = RopeConfig(5e5, "half", 64, Llama3Scaling(32.0, 1.0, 4.0, 8192))
    for spelling in ("rope_type", "type"):
        table = numbers | {spelling: "llama3"}
        assert read_hf(spec, rope_theta=5e5, rope_scaling=table).rope == expected
    new = numbers | {"rope_type": "llama3", "rope_theta": 5e5}
    document = tiny_hf_config(spec)
    del document["rope_theta"], document["rope_scaling"]
    assert config_from_hf(document | {"rope_parameters": new}).rope == expected
    with pytest.raises(ModelFormatError, match="'rope_parameters' and 'rope_scaling' differ"):
        read_hf(spec, rope_parameters=new, rope_scaling=numbers)
    with pytest.raises(ModelFormatError, match="low_freq_factor"):
        read_hf(spec, rope_scaling=numbers | {"type": "llama3", "low_freq_factor": None})
    with pytest.raises(UnsupportedModelError, match="'dynamic'"):
        read_hf(spec, rope_scaling={"type": "dynamic", "factor": 2.0})


def test_hf_yarn() -> None:
    table = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = read_hf(TinySpec("qwen2"), rope_scaling=table)
    assert config.rope.scaling == YarnScaling(4.0, 512, 0.1 * math.log(4) + 1)
    assert config.context_length == 2048
    chosen = read_hf(TinySpec("qwen2"), rope_scaling=table | {"attention_factor": 1.5})
    assert isinstance(chosen.rope.scaling, YarnScaling)
    assert chosen.rope.scaling.attention_factor == 1.5
    with pytest.raises(UnsupportedModelError, match="mscale"):
        read_hf(TinySpec("qwen2"), rope_scaling=table | {"mscale": 0.7})


def test_hf_gemma3_in_every_spelling() -> None:
    # The shape of google/gemma-3-4b-it: what equals the default is left out.
    text: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    nested = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    config = config_from_hf(nested)
    assert (config.vocab_size, config.n_heads, config.n_kv_heads) == (262208, 8, 4)
    assert (config.head_dim, config.attention_scale) == (256, 1 / 16)
    assert config.window_layers == tuple((n + 1) % 6 != 0 for n in range(34))
    assert config.sliding_window == 1024
    assert config.rope == RopeConfig(1e6, "half", 256, LinearScaling(8.0))
    assert config.rope_local == RopeConfig(1e4, "half", 256)
    assert config.embedding_scale == math.sqrt(2560)
    assert config.tied_embeddings
    assert config_from_hf(nested | {"tie_word_embeddings": False}).tied_embeddings is False

    by_type = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    plain = {key: value for key, value in text.items() if key != "rope_scaling"}
    assert config_from_hf(nested | {"text_config": plain | {"rope_parameters": by_type}}) == config
    patterned = config_from_hf(nested | {"text_config": plain | {"sliding_window_pattern": 2}})
    assert patterned.window_layers == (True, False) * 17


def test_hf_partial_rotary() -> None:
    config = read_hf(TinySpec("llama"), partial_rotary_factor=0.5)
    assert config.rope.dims == 32
    with pytest.raises(ModelFormatError, match="partial_rotary_factor"):
        read_hf(TinySpec("llama"), partial_rotary_factor=0)


@pytest.mark.parametrize(
    ("architecture", "key", "value", "named"),
    [
        ("llama", "attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        ("gemma3", "final_logit_softcapping", 30.0, "final_logit_softcapping"),
        ("qwen3", "num_experts", 128, "num_experts"),
        ("qwen2", "use_sliding_window", True, "use_sliding_window"),
        ("qwen3", "layer_types", ["sliding_attention"] * 3, "layer_types"),
        ("qwen3", "layer_types", ["linear_attention"] * 3, "linear_attention"),
        ("gemma3", "use_bidirectional_attention", True, "use_bidirectional_attention"),
        ("llama", "hidden_act", "relu2", "relu2"),
        ("llama", "mlp_bias", True, "mlp_bias"),
        ("llama", "attention_bias", True, "attention_bias"),
        ("llama", "quantization_config", {"quant_method": "gptq"}, "quantization_config"),
    ],
)
def test_hf_unsupported_features_are_named(architecture: Any, key: str, value: Any, named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read_hf(TinySpec(architecture), **{key: value})


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", ["four", True, [1], 1.5, -1, 0, 10**400])
@pytest.mark.parametrize("architecture", ["qwen2", "gemma3"])
def test_hf_sizes(architecture: Any, key: str, value: Any) -> None:
    with pytest.raises(ModelFormatError) as caught:
        read_hf(TinySpec(architecture), **{key: value})
    if not isinstance(value, int) or isinstance(value, bool):
        assert key in str(caught.value)


def test_hf_missing_keys_are_named_unless_the_family_has_a_default() -> None:
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"):
        with pytest.raises(ModelFormatError, match=f"lacks '{key}'"):
            read_hf(TinySpec("qwen2"), **{key: None})
    assert read_hf(TinySpec("gemma3"), vocab_size=None).vocab_size == 262208


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["linear", "yarn", "llama3", "default", "none"]),
    st.lists(st.integers(-1, 5), max_size=4),
    st.dictionaries(st.sampled_from(["type", "factor", "rope_theta"]), st.floats(), max_size=3),
)


@given(st.data())
def test_no_metadata_crashes_the_reader(data: st.DataObject) -> None:
    architecture = data.draw(st.sampled_from(ARCHITECTURES))
    spec = TinySpec(architecture)
    metadata = tiny_metadata(spec)
    extra = [
        "rope.scaling.type",
        "rope.scaling.factor",
        "rope.scaling.original_context_length",
        "attention.sliding_window_pattern",
        "rope.dimension_count",
        "expert_count",
    ]
    keys = sorted({*metadata, *(f"{architecture}.{key}" for key in extra)})
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        metadata[key] = data.draw(junk)
    try:
        config = config_from_gguf(metadata, expected_tensors(tiny_config(spec)))
    except ForerunError:
        return
    assert rope_table(config.rope, 4).cos.shape == (4, config.rope.dims // 2)


@given(st.data())
def test_no_config_json_crashes_the_reader(data: st.DataObject) -> None:
    document = tiny_hf_config(TinySpec(data.draw(st.sampled_from(ARCHITECTURES))))
    keys = sorted({*document, "rope_parameters", "layer_types", "text_config", "rope_scaling"})
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        document[key] = data.draw(junk)
    try:
        config = config_from_hf(document)
    except ForerunError:
        return
    assert rope_table(config.rope, 4).cos.shape == (4, config.rope.dims // 2)
