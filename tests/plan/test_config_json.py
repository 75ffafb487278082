"""A config.json and the catalog's entry of a model are one shape; what is wrong with a file is named by its key."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.errors import PlanError
from forerun.plan.catalog import PlanCatalog
from forerun.plan.config_json import FAMILIES, MAX_BYTES, read_config, shape_from_config
from forerun.plan.quantization import METHODS
from forerun.plan.shapes import ModelShape
from reference.published_configs import DEEPSEEK_V3, GEMMA_3_270M, MIXTRAL, PUBLISHED, QWEN_MOE, Config, llama

LOCAL = {"smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct", "gemma-3-270m"}


@pytest.fixture(scope="module")
def catalog() -> PlanCatalog:
    return PlanCatalog.load()


def shape_of(config: Config) -> ModelShape:
    return shape_from_config(config, name="m")


def changed(config: Config, **changes: Any) -> Config:
    """A copy with other values; None takes a key away."""
    kept = copy.deepcopy(config) | changes
    return {key: value for key, value in kept.items() if value is not None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_json_is_the_shape_of_the_catalogs_entry(name: str, catalog: PlanCatalog) -> None:
    entry = catalog.model(name)
    assert replace(shape_of(PUBLISHED[name]), name=name, source=entry.source) == entry


def test_every_entry_that_is_no_gguf_file_is_compared(catalog: PlanCatalog) -> None:
    assert catalog.models.keys() == PUBLISHED.keys() | LOCAL


def test_gemma_leaves_out_what_equals_its_defaults(catalog: PlanCatalog) -> None:
    entry = catalog.model("gemma-3-270m")
    found = shape_of(GEMMA_3_270M)
    assert replace(found, name=entry.name, source=entry.source, formats=entry.formats) == entry
    by_pattern = changed(GEMMA_3_270M, layer_types=None, head_dim=None)
    assert replace(shape_of(by_pattern), source=found.source) == found
    assert "head_dim 256" in shape_of(by_pattern).source
    # Gemma 3 4B's text part as it was published, and 1B: 26 layers of which every sixth sees everything.
    four = shape_of({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024, "vocab_size": 262208,
        },
        "vision_config": {"hidden_size": 1152},
    })  # fmt: skip
    assert (four.heads, four.kv_heads, four.head_dim, four.tied, four.window_layers) == (8, 4, 256, True, 29)
    assert four.network.n_parameters == 3_880_263_168  # gemma-3-4b-pt without its vision tower and projector
    assert "only the text model" in four.source


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN_MOE, 14_315_784_192),
        (llama(4096, 32, 32, 11008, num_key_value_heads=None, vocab_size=32000), 6_738_415_616),  # Llama 2 7B
        (
            changed(MIXTRAL, model_type="mistral", num_local_experts=None, num_experts_per_tok=None),
            7_241_732_096,  # Mistral 7B
        ),
        (
            {
                "model_type": "deepseek_v2", "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 2048,
                "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
                "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_routed_experts": 64, "n_shared_experts": 2,
                "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
                "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                "v_head_dim": 128, "vocab_size": 102400,
            },
            15_706_484_224,  # DeepSeek-V2-Lite
        ),
        (
            {
                "model_type": "gemma2", "head_dim": 256, "hidden_size": 2304, "intermediate_size": 9216,
                "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "sliding_window": 4096,
                "vocab_size": 256000,
            },
            2_614_341_888,  # Gemma 2 2B
        ),
    ],
)  # fmt: skip
def test_other_families_have_the_published_number_of_parameters(config: Config, parameters: int) -> None:
    given = {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}
    assert shape_of(given).network.n_parameters == parameters


@pytest.mark.parametrize(
    ("config", "changes", "layers", "window"),
    [
        (MIXTRAL, {"sliding_window": 4096}, 32, 4096),
        (PUBLISHED["qwen2.5-7b"], {"use_sliding_window": True, "max_window_layers": 20}, 8, 131072),
        (PUBLISHED["qwen2.5-7b"], {"use_sliding_window": True, "max_window_layers": 28}, 0, None),
        (PUBLISHED["gpt-oss-20b"], {"layer_types": None}, 12, 128),
        (PUBLISHED["gpt-oss-20b"], {"layer_types": None, "num_hidden_layers": 25}, 13, 128),
        (PUBLISHED["gpt-oss-20b"], {"layer_types": ["full_attention"] * 24}, 0, None),
        (GEMMA_3_270M, {"layer_types": None, "sliding_window_pattern": 4}, 14, 512),
        (llama(64, 2, 2, 128, num_key_value_heads=2), {"sliding_window": 4096}, 0, None),
    ],
)
def test_windows(config: Config, changes: Config, layers: int, window: int | None) -> None:
    found = shape_of(changed(config, **changes))
    assert (found.window_layers, found.window) == (layers, window)


def test_tied_matrices_are_those_of_the_model_type_unless_the_file_says_so() -> None:
    tied = {kind for kind, family in FAMILIES.items() if family.tied}
    assert tied == {"gemma", "gemma2", "gemma3_text"}
    assert not shape_of(changed(PUBLISHED["qwen3-4b"], tie_word_embeddings=None)).tied
    assert shape_of(changed(PUBLISHED["qwen3-8b"], tie_word_embeddings=True)).tied
    assert not shape_of(changed(GEMMA_3_270M, tie_word_embeddings=False)).tied


# What configuration_<type>.py of Transformers 5.19 has where a file says nothing; None: as many as attention heads.
KV_HEADS = {
    "llama": None, "mistral": 8, "mixtral": 8, "phi3": None, "qwen2": 32, "qwen2_moe": 16, "qwen3": 32, "qwen3_moe": 4,
    "gemma": 16, "gemma2": 4, "gemma3_text": 4, "gpt_oss": 8,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize("kind", KV_HEADS)
def test_key_value_heads_that_are_not_stated_are_those_of_transformers(kind: str) -> None:
    config = llama(4096, 4, 64, 128, model_type=kind, num_key_value_heads=None, **EXPERTS)
    missing, null = shape_of(changed(config)), shape_of(config)
    assert missing.kv_heads == (KV_HEADS[kind] or 64)
    assert null.kv_heads == 64
    for shape in (missing, null):
        assert f"as in Transformers: num_key_value_heads {shape.kv_heads}" in shape.source.replace("head_dim 256, ", "")
    stated = shape_of(config | {"num_key_value_heads": 16})
    assert stated.kv_heads == 16
    assert "num_key_value_heads" not in stated.source
    if KV_HEADS[kind]:
        with pytest.raises(PlanError, match="missing, and 3 attention heads") as caught:
            shape_of(changed(config, num_attention_heads=3, head_dim=64))
        assert caught.value.field == "config.json: num_key_value_heads"


def test_every_family_is_in_the_table_or_has_a_latent() -> None:
    assert KV_HEADS.keys() == {kind for kind, family in FAMILIES.items() if not family.latent}


@pytest.mark.parametrize(
    ("kind", "changes", "windows"),
    [
        ("mistral", {}, (4, 4096)),
        ("mistral", {"sliding_window": None}, (0, None)),
        ("mixtral", {}, (0, None)),
        ("phi3", {}, (0, None)),
        ("qwen2", {}, (0, None)),
        ("qwen2", {"use_sliding_window": True}, (0, None)),  # from layer 28 on
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1}, (3, 4096)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None}, (0, None)),
        ("qwen2", {"use_sliding_window": True, "num_hidden_layers": 30}, (2, 4096)),
        ("gemma2", {}, (2, 4096)),
        ("gemma3_text", {"num_hidden_layers": 12}, (10, 4096)),
        ("gpt_oss", {}, (2, 128)),
    ],
)
def test_windows_that_are_not_stated(kind: str, changes: Config, windows: tuple[int, int | None]) -> None:
    shape = shape_of(llama(4096, 4, 64, 128, model_type=kind, **EXPERTS) | changes)
    assert (shape.window_layers, shape.window) == windows


def test_other_keys_that_are_not_stated() -> None:
    shape = shape_of(changed(QWEN_MOE, shared_expert_intermediate_size=None))
    assert shape.experts is not None
    assert shape.experts.shared == 5632
    assert shape.qkv_bias
    assert not shape_of(QWEN_MOE | {"qkv_bias": False}).qkv_bias
    assert shape_of(changed(PUBLISHED["gpt-oss-20b"], attention_bias=None)).qkv_bias
    assert shape_of(llama(3072, 2, 16, 128, model_type="gemma", max_position_embeddings=None)).max_context == 8192
    assert shape_of(changed(PUBLISHED["llama-3.1-8b"], max_position_embeddings=None)).max_context == 0
    without = DEEPSEEK_V3 | {"q_lora_rank": None, "n_shared_experts": None}
    assert shape_of(without).latent == replace(shape_of(DEEPSEEK_V3).latent, q_rank=0)  # type: ignore[type-var]
    assert shape_of(without).experts == replace(shape_of(DEEPSEEK_V3).experts, shared=0)  # type: ignore[type-var]


def test_layers_without_experts_among_those_with_them() -> None:
    config = changed(PUBLISHED["qwen3-30b-a3b"], mlp_only_layers=[0, 1, 2])
    experts = shape_of(config).experts
    assert experts is not None
    assert experts.dense_layers == 3
    experts = shape_of(changed(config, decoder_sparse_step=2)).experts  # layers 1, 3, 5, ... but for 1
    assert experts is not None
    assert experts.dense_layers == 48 - 23
    dense = shape_of(DEEPSEEK_V3 | {"n_routed_experts": None})
    assert dense.experts is None
    assert dense.intermediate == 18432


def test_an_unknown_type_is_a_plain_decoder_only_if_nothing_speaks_against_it() -> None:
    plain = llama(4096, 32, 32, 14336, tie_word_embeddings=False, model_type="novel", is_encoder_decoder=False)
    found = shape_of(plain)
    assert found.network.n_parameters == 8_030_261_248
    assert "unknown model type 'novel'" in found.source
    for change in (
        {"num_experts": 8}, {"kv_lora_rank": 512}, {"mamba_d_state": 16}, {"conv_L_cache": 3}, {"hidden_act": "gelu"},
        {"hidden_act": None},
    ):  # fmt: skip
        with pytest.raises(PlanError, match="expected one of llama, mistral") as caught:
            shape_of(changed(plain, **change))
        assert caught.value.field == "config.json: model_type"
    for key in ("tie_word_embeddings", "num_key_value_heads", "intermediate_size", "hidden_size"):
        with pytest.raises(PlanError, match="missing") as caught:
            shape_of(changed(plain, **{key: None}))
        assert caught.value.field == f"config.json: {key}"


FAULTS: list[tuple[str, Config, Config, str]] = [
    ("no type", PUBLISHED["llama-3.1-8b"], {"model_type": None}, "model_type"),
    ("a number for a type", PUBLISHED["llama-3.1-8b"], {"model_type": 3}, "model_type"),
    ("text", PUBLISHED["llama-3.1-8b"], {"hidden_size": "4096"}, "hidden_size"),
    ("a fraction", PUBLISHED["llama-3.1-8b"], {"hidden_size": 4096.5}, "hidden_size"),
    ("true", PUBLISHED["llama-3.1-8b"], {"num_hidden_layers": True}, "num_hidden_layers"),
    ("zero", PUBLISHED["llama-3.1-8b"], {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("negative", PUBLISHED["llama-3.1-8b"], {"vocab_size": -1}, "vocab_size"),
    ("nan", PUBLISHED["llama-3.1-8b"], {"vocab_size": float("nan")}, "vocab_size"),
    ("huge", PUBLISHED["llama-3.1-8b"], {"intermediate_size": 10**30}, "intermediate_size"),
    ("a list", PUBLISHED["llama-3.1-8b"], {"num_key_value_heads": [8]}, "num_key_value_heads"),
    ("heads that don't divide", PUBLISHED["llama-3.1-8b"], {"num_key_value_heads": 7}, "num_key_value_heads"),
    ("more of them than heads", PUBLISHED["llama-3.1-8b"], {"num_key_value_heads": 64}, "num_key_value_heads"),
    ("no width of a head", PUBLISHED["llama-3.1-8b"], {"hidden_size": 4097}, "head_dim"),
    ("a text for a flag", PUBLISHED["llama-3.1-8b"], {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
    ("an unknown data type", PUBLISHED["llama-3.1-8b"], {"torch_dtype": "float8"}, "dtype"),
    ("negative context", PUBLISHED["llama-3.1-8b"], {"max_position_embeddings": -5}, "max_position_embeddings"),
    ("text as part", PUBLISHED["llama-3.1-8b"], {"text_config": "llama"}, "text_config"),
    ("no experts", MIXTRAL, {"num_local_experts": None}, "num_local_experts"),
    ("no experts used", MIXTRAL, {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ("more used than there are", MIXTRAL, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("too few layer types", PUBLISHED["gpt-oss-20b"], {"num_hidden_layers": 26}, "layer_types"),
    ("unknown layer type", PUBLISHED["gpt-oss-20b"], {"layer_types": ["linear_attention"] * 24}, "layer_types"),
    ("layer types in a text", PUBLISHED["gpt-oss-20b"], {"layer_types": "full"}, "layer_types"),
    ("a window of no size", PUBLISHED["gpt-oss-20b"], {"sliding_window": 0}, "sliding_window"),
    ("windows, but where", QWEN_MOE, {"use_sliding_window": True}, "use_sliding_window"),
    ("no latent", DEEPSEEK_V3, {"kv_lora_rank": None}, "kv_lora_rank"),
    ("more dense layers than layers", DEEPSEEK_V3, {"first_k_dense_replace": 62}, "first_k_dense_replace"),
    ("no dense layers stated", DEEPSEEK_V3, {"first_k_dense_replace": None}, "first_k_dense_replace"),
    ("no shared experts stated", DEEPSEEK_V3, {"n_shared_experts": None}, "n_shared_experts"),
    ("no routed experts stated", DEEPSEEK_V3, {"n_routed_experts": None}, "n_routed_experts"),
    ("no bottleneck stated", DEEPSEEK_V3, {"q_lora_rank": None}, "q_lora_rank"),
    ("every other layer", DEEPSEEK_V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("biases of a latent", DEEPSEEK_V3, {"attention_bias": True}, "attention_bias"),
    ("a negative number of modules", DEEPSEEK_V3, {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ("layers that aren't numbers", QWEN_MOE, {"mlp_only_layers": ["0"]}, "mlp_only_layers"),
]


@pytest.mark.parametrize(("config", "changes", "key"), [fault[1:] for fault in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_planted_fault_is_named_by_its_key(config: Config, changes: Config, key: str) -> None:
    shape_of(config)
    with pytest.raises(PlanError) as caught:
        shape_of(changed(config, **changes))
    assert caught.value.field == f"config.json: {key}"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_a_missing_key_is_named_within_a_nested_part_too(key: str) -> None:
    config = changed(PUBLISHED["llama-3.1-8b"], **{key: None})
    with pytest.raises(PlanError, match="missing") as caught:
        shape_of(config)
    assert caught.value.field == f"config.json: {key}"
    with pytest.raises(PlanError, match="missing") as caught:
        shape_of({"model_type": "llava", "text_config": config})
    assert caught.value.field == f"config.json: text_config.{key}"


def test_a_nested_part_has_from_the_whole_what_it_does_not_say_itself() -> None:
    inner = changed(PUBLISHED["llama-3.1-8b"], torch_dtype=None)
    whole = {
        "model_type": "llava", "text_config": inner, "torch_dtype": "float16", "tie_word_embeddings": True,
        "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    found = shape_of(whole)
    assert (found.tied, found.formats.linear, found.formats.head) == (True, "fp8", "f16")
    inner |= {"tie_word_embeddings": False, "dtype": "float32"}
    found = shape_of(whole)
    assert (found.tied, found.formats.linear, found.formats.head) == (False, "fp8", "f32")


def test_the_file_or_its_folder(tmp_path: Path, catalog: PlanCatalog) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(PUBLISHED["llama-3.1-8b"]))
    found = read_config(folder)
    assert found == read_config(file) == catalog.shape(str(folder)) == catalog.shape(str(file))
    assert found.name == "My-Model"
    other = folder / "other.json"
    other.write_text(json.dumps(PUBLISHED["qwen3-8b"] | {"vocab_size": 0}))
    with pytest.raises(PlanError) as caught:
        read_config(other)
    assert caught.value.field == "other.json: vocab_size"


def _bytes(text: bytes) -> Callable[[Path], None]:
    return lambda path: (path.write_bytes(text), None)[1]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda _path: None, "there is no file"),
        (lambda path: path.mkdir(), "has no config.json"),
        (_bytes(b"{"), "can't be read as JSON"),
        (_bytes(b"\xff\xfe{}"), "can't be read as JSON"),
        (_bytes(b"[" * 200_000), "can't be read as JSON"),
        (_bytes(b" " * (MAX_BYTES + 1)), "16 MiB"),
    ],
)
def test_a_path_that_is_no_config(tmp_path: Path, make: Callable[[Path], None], said: str) -> None:
    path = tmp_path / "x.json"
    make(path)
    with pytest.raises(PlanError, match=said) as caught:
        read_config(path)
    assert caught.value.field == "model"


@pytest.mark.parametrize("contents", ["[]", "null", "3", '"llama"'])
def test_json_that_is_no_object(tmp_path: Path, contents: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(contents)
    with pytest.raises(PlanError, match="expected an object"):
        read_config(path)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(name=st.sampled_from(sorted(PUBLISHED)), value=ANY_JSON, data=st.data())
def test_whatever_stands_in_a_key_is_read_or_refused(name: str, value: Any, data: st.DataObject) -> None:
    config = PUBLISHED[name]
    keys = [*sorted(config), "quantization_config", "layer_types", "sliding_window", "text_config", "dtype"]
    key = data.draw(st.sampled_from(keys))
    nested = config.get(key)
    if isinstance(nested, dict) and data.draw(st.booleans()):
        value = nested | {data.draw(st.sampled_from(sorted(nested))): value}
    refused: PlanError | None = None
    try:
        shape = shape_of(config | {key: value})
    except PlanError as error:
        refused = error
    if refused is None:
        assert shape.network.n_parameters > 0
        assert shape.network.weight_bytes > 0
    else:
        assert refused.field.startswith("config.json: ")
        assert len(str(refused)) < 500


def test_the_documentation_lists_what_is_known() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "plan-catalog.md").read_text().split())
    assert f"types that are known: {', '.join(FAMILIES)}." in page
    listed = f"{', '.join(METHODS[:-1])} and {METHODS[-1]}"
    assert f"the format of the layers: {listed}." in page
