"""What a quantization_config says of the bits of a weight."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan.config_json import shape_from_config
from forerun.plan.formats import WEIGHT_BITS, WeightFormats, weight_bits
from forerun.plan.quantization import METHODS, formats_of

Config = dict[str, Any]


def formats(config: Config | None, dtype: object = None, *, mixture: bool = False) -> WeightFormats:
    return formats_of(config, dtype, where="", mixture=mixture).formats


def compressed(weights: Config, inputs: Config | None = None) -> Config:
    group = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


def test_what_is_not_quantized_has_the_models_data_type() -> None:
    assert formats(None) == WeightFormats()
    assert formats(None, "float16") == WeightFormats(linear="f16", experts="f16", head="f16", embedding="f16")
    found = formats({"quant_method": "fp8"}, "float32")
    assert (found.linear, found.head, found.embedding) == ("fp8", "f32", "f32")


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, 3 + 19 / 128),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 8 + 24 / 32),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 4.5),
        # QLoRA (arXiv 2305.14314), section 3: double quantization saves .373 of .5 bits.
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}, 4.127),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        (compressed({"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}), 4 + 16 / 128),
        (compressed({"num_bits": 4, "type": "int", "group_size": 128, "symmetric": False}), 4 + 20 / 128),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}, {"num_bits": 4}), 4.5),
        (compressed({"num_bits": 4, "type": "float", "group_size": 32}), 4.25),
        (compressed({"num_bits": 8, "type": "float", "strategy": "channel"}, {"num_bits": 8}), 8),
    ],
)
def test_bits_of_a_weight(config: Config, bits: float) -> None:
    found = formats(config)
    assert 8 * found.bytes_of("linear") == 8 * found.bytes_of("experts") == pytest.approx(bits, abs=5e-4)
    assert found.head == found.embedding == "bf16"


def test_eight_bits_are_operands_only_where_activations_have_them_too() -> None:
    """A format's name decides what is multiplied: int8 and fp8 in 8 bits, all others unpacked to 16."""
    inputs = {"num_bits": 8}
    assert formats(compressed({"num_bits": 8, "type": "int"}, inputs)).linear == "int8"
    assert formats(compressed({"num_bits": 8, "type": "float"}, inputs)).linear == "fp8"
    assert formats(compressed({"num_bits": 8, "type": "int"})).linear == "8bits"
    assert formats({"quant_method": "gptq", "bits": 8, "group_size": -1}).linear == "8bits"


def test_what_a_quantization_leaves_out() -> None:
    mxfp4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    assert formats(mxfp4, mixture=True) == WeightFormats(experts="mxfp4")
    experts_only = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"]}
    assert formats(experts_only, mixture=True) == WeightFormats(experts="fp8")
    assert formats({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}).head == "int4"
    small = formats_of(
        {"quant_method": "fp8", "ignored_layers": ["lm_head", "model.layers.3.mlp.gate"]}, None, where="", mixture=True
    )
    assert small == (WeightFormats(linear="fp8", experts="fp8"), "")
    shape = shape_from_config(
        {
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 128, "vocab_size": 100,
            "quantization_config": {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["model.layers.0.mlp"]},
        },
        name="m",
    )  # fmt: skip
    assert "1 modules that its quantization leaves out, model.layers.0.mlp first" in shape.source


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({}, "quant_method"),
        ({"quant_method": "magic"}, "quant_method"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ({"quant_method": "mxfp4"}, "quant_method"),
        ({"quant_method": "awq", "group_size": 128}, "w_bit"),
        ({"quant_method": "awq", "bits": 4}, "q_group_size"),
        ({"quant_method": "gptq", "bits": 0, "group_size": 128}, "bits"),
        ({"quant_method": "gptq", "bits": "4", "group_size": 128}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": True}, "group_size"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit"),
        ({"quant_method": "modelopt"}, "quant_algo"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "quant_algo"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "config_groups.a.weights"),
        (compressed({"num_bits": 99}), "config_groups.group_0.weights.num_bits"),
        (compressed({"num_bits": 4, "type": "ternary"}), "config_groups.group_0.weights.type"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "fp8", "ignore": [3]}, "ignore"),
    ],
)
def test_a_planted_fault_is_named_by_its_key(config: Config, key: str) -> None:
    with pytest.raises(PlanError) as caught:
        formats_of(config, None, where="config.json: ", mixture=False)
    assert caught.value.field == f"config.json: quantization_config.{key}"


def test_unknown_methods_are_told_the_known_ones() -> None:
    with pytest.raises(PlanError, match=", ".join(METHODS)):
        formats({"quant_method": "magic"})
    with pytest.raises(PlanError, match="bfloat16"):
        formats(None, 16)


def test_bits_by_number() -> None:
    assert weight_bits("x", "4.93bits") == 4.93
    assert weight_bits("x", "8bits") == 8
    assert WeightFormats(linear="4.93bits").bytes_of("linear") == 4.93 / 8
    for name in ("0bits", "65bits", "-4bits", "bits", "4 bits", "4.5", "1e3bits", "nanbits", "4.12345678bits", ""):
        with pytest.raises(PlanError, match=r"4\.93bits") as caught:
            weight_bits("--weights", name)
        assert caught.value.field == "--weights"
    assert all(weight_bits("x", name) == bits for name, bits in WEIGHT_BITS.items())
