"""The catalog holds what is published, and says where a file of the user's is wrong."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun import ops
from forerun.errors import PlanError
from forerun.models.catalog import Catalog, cache_dir
from forerun.models.download import resolve
from forerun.models.gguf import GGUFFile
from forerun.plan.catalog import PlanCatalog, hardware_of, local_path, shape_of
from forerun.plan.explain_catalog import explain_active, explain_kv, explain_parameters, explain_ridge
from forerun.plan.hardware import Efficiency
from forerun.plan.shapes import ModelShape


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, but for tests that look at real models."""
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def catalog() -> PlanCatalog:
    return PlanCatalog.load()


# Parameters as Hugging Face counts them in the published weights (the tied matrix once; DeepSeek-V3 without its
# multi-token-prediction module and the routers' correction biases); of the GGUF files: elements in the tensor table.
PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "smollm2-135m-instruct": 134_515_008,
    "qwen2.5-coder-0.5b-instruct": 630_167_424,
    "qwen2.5-coder-1.5b-instruct": 1_777_088_000,
    "gemma-3-270m": 268_098_176,
}

# Active parameters as the makers state them, in billions.
ACTIVE = {
    "gpt-oss-20b": 3.61,  # gpt-oss model card (arXiv 2508.10925), table 1
    "gpt-oss-120b": 5.13,
    "mixtral-8x7b": 12.9,  # arXiv 2401.04088: 13B, with the embedding's 0.13
    "qwen3-235b-a22b": 22,
    "qwen3-30b-a3b": 3.3,
}

# Bytes a token keeps in 16 bits: table 1 of the DeepSeek-V3 hardware paper (arXiv 2505.09343), and for Llama
# 2 x layers x key-value heads x 128 x 2 bytes.
KV_BYTES = {"deepseek-v3": 70_272, "qwen2.5-72b": 327_680, "llama-3.3-70b": 320 * 1024, "llama-3.1-8b": 128 * 1024}

# What `forerun bench step --json` calls setup.weight_bytes: packed weights that every forward reads.
PACKED = {
    "smollm2-135m-instruct": 96_436_224,
    "qwen2.5-coder-0.5b-instruct": 392_799_232,
    "qwen2.5-coder-1.5b-instruct": 1_000_264_704,
    "gemma-3-270m": 246_824_960,
}


def test_every_model_has_its_published_number_of_parameters(catalog: PlanCatalog) -> None:
    assert {name: shape.network.n_parameters for name, shape in catalog.models.items()} == PARAMETERS


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_of_the_makers(name: str, catalog: PlanCatalog) -> None:
    shape = catalog.model(name)
    active = shape.network.n_active + (shape.network.embedding if name.startswith(("mixtral", "qwen3")) else 0)
    assert active / 1e9 == pytest.approx(ACTIVE[name], rel=0.03)


def test_deepseek_v3_counted_with_embedding_and_head(catalog: PlanCatalog) -> None:
    network = catalog.model("deepseek-v3").network
    assert (network.n_active + network.embedding) / 1e9 == pytest.approx(37.6, rel=0.005)


@pytest.mark.parametrize("name", KV_BYTES)
def test_kv_of_a_token(name: str, catalog: PlanCatalog) -> None:
    assert 2 * catalog.model(name).network.kv_width == KV_BYTES[name]


def test_gpt_oss_weighs_what_its_checkpoint_does(catalog: PlanCatalog) -> None:
    """12.8 and 60.8 GiB: gpt-oss model card (arXiv 2508.10925), table 1."""
    for name, gib in (("gpt-oss-20b", 12.8), ("gpt-oss-120b", 60.8)):
        assert catalog.model(name).network.weight_bytes / 2**30 == pytest.approx(gib, rel=0.005)


def read_by_a_forward(shape: ModelShape) -> float:
    network = shape.network
    assert network.head is not None
    return network.dense.bytes + network.head.size * network.formats.bytes_of("head")


@pytest.mark.parametrize("name", PACKED)
def test_a_local_model_reads_the_bytes_that_the_engine_packs(name: str, catalog: PlanCatalog) -> None:
    assert read_by_a_forward(catalog.model(name)) == pytest.approx(PACKED[name], rel=1e-4)


def test_the_documentation_has_these_bytes(catalog: PlanCatalog) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan-catalog.md").read_text()
    for name, packed in PACKED.items():
        assert f"| {name} | {read_by_a_forward(catalog.model(name)):,.0f} | {packed:,} |" in page


@pytest.mark.model
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("smollm2") else pytest.mark.slow) for name in PACKED]
)
def test_a_local_model_is_its_file(name: str, catalog: PlanCatalog) -> None:
    shape = catalog.model(name)
    with GGUFFile.open(resolve(name)) as file:
        matrices = [t for key, t in file.tensors.items() if len(t.shape) == 2 and key != "token_embd.weight"]
        embedding = file.tensors["token_embd.weight"]
        n_elements = sum(t.shape[0] * (t.shape[1] if len(t.shape) == 2 else 1) for t in file.tensors.values())
        heads = [v for k, v in file.metadata.items() if k.endswith("attention.head_count")]
    tied = "output.weight" not in {t.name for t in matrices}
    matrices += [embedding] if tied else []
    packed = sum(ops.packed_bytes(t.type, *t.shape) for t in matrices)
    assert packed == PACKED[name]
    assert (shape.tied, [shape.heads]) == (tied, heads)
    assert shape.network.n_parameters == n_elements
    assert shape.network.embedding * shape.formats.bytes_of("embedding") == embedding.nbytes


def test_the_engines_own_models_are_all_there(catalog: PlanCatalog) -> None:
    assert Catalog.load().entries.keys() <= catalog.models.keys()


def test_everything_says_where_it_is_from(catalog: PlanCatalog) -> None:
    assert all(shape.source for shape in catalog.models.values())
    for hardware in catalog.hardware.values():
        for field in ("flops", "bandwidth", "memory", "link", "link_us", "host"):
            assert hardware.sources.get(field), (hardware.name, field)
        assert hardware.sources["link_us"].startswith("assumed")


# With 2:4 sparsity, as data sheets print it in the first place (TFLOP/s); dense is half of it.
SPARSE_RATES: dict[str, dict[str, float]] = {
    "h100": {"bf16": 1979, "fp8": 3958, "int8": 3958},
    "h100-pcie": {"bf16": 1513, "fp8": 3026, "int8": 3026},
    "h200": {"bf16": 1979, "fp8": 3958, "int8": 3958},
    "b200": {"bf16": 36_000 / 8, "fp8": 72_000 / 8, "int8": 72_000 / 8, "fp4": 144_000 / 8},
    "a100": {"bf16": 624, "int8": 1248},
    "a100-40gb": {"bf16": 624, "int8": 1248},
    "l40s": {"bf16": 733, "fp8": 1466, "int8": 1466},
    "rtx4090": {"bf16": 330.4, "fp8": 660.6, "int8": 1321.2},
    "mi300x": {"bf16": 2614.9, "fp8": 5229.8, "int8": 5229.8},
}


def test_rates_are_dense(catalog: PlanCatalog) -> None:
    assert catalog.hardware.keys() == SPARSE_RATES.keys()
    for name, rates in SPARSE_RATES.items():
        flops = catalog.gpu(name).flops
        assert flops.keys() - rates.keys() == {"f32"}
        for dtype, rate in rates.items():
            assert flops[dtype] == pytest.approx(rate / 2 * 1e12, rel=0.015), (name, dtype)


def test_the_ridge_of_an_h100(catalog: PlanCatalog) -> None:
    assert catalog.gpu("h100").ridge() == pytest.approx(989.4e12 / 3.35e12)
    assert round(catalog.gpu("h100").ridge()) == 295


def test_links_are_counted_in_one_direction(catalog: PlanCatalog) -> None:
    both = {"h100": 900, "h200": 900, "b200": 1800, "a100": 600, "mi300x": 7 * 128, "l40s": 64, "rtx4090": 64}
    for name, gb in both.items():
        assert catalog.gpu(name).link == gb / 2 * 1e9


def test_derivations_give_the_numbers_again(catalog: PlanCatalog) -> None:
    for shape in catalog.models.values():
        assert explain_parameters(shape).value == shape.network.n_parameters
        assert explain_active(shape).value == shape.network.n_active
        assert explain_kv(shape).value == 2 * shape.network.kv_width / 1024
    for hardware in catalog.hardware.values():
        assert explain_ridge(hardware).value == hardware.ridge()


def test_a_derivation_of_every_part_that_a_shape_can_have() -> None:
    table = {
        "hidden": 64, "layers": 6, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 1000, "intermediate": 160,
        "qkv_bias": True, "out_bias": True, "mlp_bias": True, "qk_norm": True, "sandwich_norms": True, "sinks": True,
        "window": 5, "window_layers": 5,
        "experts": {"n": 8, "active": 2, "intermediate": 32, "shared": 48, "shared_gate": True, "dense_layers": 2},
    }  # fmt: skip
    for change in ({}, {"tied": True}, {"gated": False}, {"latent": LATENT}, {"latent": LATENT | {"q_rank": 0}}):
        shape = shape_of("m", table | change)
        assert explain_parameters(shape).value == shape.network.n_parameters
        assert explain_active(shape).value == shape.network.n_active


LATENT = {"q_rank": 32, "kv_rank": 20, "nope": 16, "rope": 8, "value": 16}
MODEL = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 1000, "intermediate": 160}
MACHINE = {"tflops": {"bf16": 100.0}, "bandwidth_gb_s": 1000, "memory_gb": 16}
MEASURED = {
    "model": "m", "batch": [1, 1], "queries": [1, 16], "context": [64, 64.5], "points": 9, "error_max": 0.03,
}  # fmt: skip


def toml(tables: dict[str, Any]) -> str:
    """Tables of tables as TOML: JSON's numbers and texts are TOML's, too."""
    lines = []
    for path, table in tables.items():
        lines.append(f"[{path}]")
        lines += [f"{key} = {_inline(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_inline(item)}" for key, item in value.items()) + " }"
    return repr(value) if isinstance(value, float) else json.dumps(value)


def file_with(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


def test_a_file_of_the_users(tmp_path: Path) -> None:
    machine = MACHINE | {
        "link_gb_s": 50, "link_us": 3, "host_gb_s": 25.5, "efficiency": {"bandwidth": 0.9, "order": float("inf")},
        "sources": {"bandwidth": "my own measurement"},
    }  # fmt: skip
    model = MODEL | {"experts": {"n": 8, "active": 2, "intermediate": 32}, "formats": {"linear": "5.5bits"}}
    known = PlanCatalog.load(file_with(tmp_path, toml({"models.mine": model, 'hardware."my gpu"': machine})))
    shape, hardware = known.shape("mine"), known.gpu("my gpu")
    assert shape == shape_of("mine", model)
    assert shape.experts is not None
    assert shape.experts.n == 8
    assert (hardware.flops["bf16"], hardware.bandwidth, hardware.memory) == (1e14, 1e12, 1.6e10)
    assert (hardware.link, hardware.link_us, hardware.host) == (5e10, 3, 2.55e10)
    assert hardware.efficiency == Efficiency(bandwidth=0.9)
    assert hardware.sources == {"bandwidth": "my own measurement"}
    assert known.models.keys() - PlanCatalog.load().models.keys() == {"mine"}


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"model.mine": MODEL}, "model"),
    ({"models": {"mine": 3}}, "mine"),
    ({"models.mine": {}}, "mine: hidden"),
    ({"models.mine": MODEL | {"hiden": 64}}, "mine: hiden"),
    ({"models.mine": MODEL | {"name": "other"}}, "mine: name"),
    ({"models.mine": {k: v for k, v in MODEL.items() if k != "vocab"}}, "mine: vocab"),
    ({"models.mine": MODEL | {"hidden": "64"}}, "mine: hidden"),
    ({"models.mine": MODEL | {"hidden": 64.0}}, "mine: hidden"),
    ({"models.mine": MODEL | {"hidden": True}}, "mine: hidden"),
    ({"models.mine": MODEL | {"hidden": 0}}, "mine: hidden"),
    ({"models.mine": MODEL | {"layers": -2}}, "mine: layers"),
    ({"models.mine": MODEL | {"tied": 1}}, "mine: tied"),
    ({"models.mine": MODEL | {"window": "8"}}, "mine: window"),
    ({"models.mine": MODEL | {"window_layers": 1}}, "mine: window"),
    ({"models.mine": MODEL | {"source": 3}}, "mine: source"),
    ({"models.mine": MODEL | {"experts": 8}}, "mine.experts"),
    ({"models.mine": MODEL | {"experts": {"n": 8, "active": 2}}}, "mine.experts: intermediate"),
    ({"models.mine": MODEL | {"experts": {"n": 8, "active": 9, "intermediate": 1}}}, "mine: experts"),
    ({"models.mine": MODEL | {"latent": LATENT | {"rank": 3}}}, "mine.latent: rank"),
    ({"models.mine": MODEL | {"formats": {"linear": "q9"}}}, "mine.formats: weights (linear)"),
    ({"models.mine": MODEL | {"formats": {"linear": 4}}}, "mine.formats: linear"),
    ({"hardware.x": {}}, "x: tflops"),
    ({"hardware.x": MACHINE | {"bandwidth": 3}}, "x: bandwidth"),
    ({"hardware.x": MACHINE | {"bandwidth_gb_s": "fast"}}, "x: bandwidth_gb_s"),
    ({"hardware.x": MACHINE | {"bandwidth_gb_s": float("nan")}}, "x: bandwidth_gb_s"),
    ({"hardware.x": MACHINE | {"bandwidth_gb_s": float("inf")}}, "x: bandwidth_gb_s"),
    ({"hardware.x": MACHINE | {"bandwidth_gb_s": 10**400}}, "x: bandwidth_gb_s"),
    ({"hardware.x": MACHINE | {"bandwidth_gb_s": 0}}, "x: bandwidth"),
    ({"hardware.x": MACHINE | {"memory_gb": -16}}, "x: memory"),
    ({"hardware.x": MACHINE | {"memory_gb": True}}, "x: memory_gb"),
    ({"hardware.x": MACHINE | {"link_us": -1}}, "x: link_us"),
    ({"hardware.x": MACHINE | {"tflops": 100}}, "x: tflops"),
    ({"hardware.x": MACHINE | {"tflops": {}}}, "x: flops"),
    ({"hardware.x": MACHINE | {"tflops": {"bf16": "x"}}}, "x: tflops.bf16"),
    ({"hardware.x": MACHINE | {"tflops": {"bf16": -1}}}, "x: flops"),
    ({"hardware.x": MACHINE | {"efficiency": {"bandwidth": 1.5}}}, "x.efficiency: bandwidth"),
    ({"hardware.x": MACHINE | {"efficiency": {"bandwidth": "all"}}}, "x.efficiency: bandwidth"),
    ({"hardware.x": MACHINE | {"efficiency": {"speed": 1}}}, "x.efficiency: speed"),
    ({"hardware.x": MACHINE | {"measured": {"model": "m"}}}, "x.measured: batch"),
    ({"hardware.x": MACHINE | {"sources": "a sheet"}}, "x.sources"),
    ({"hardware.x": MACHINE | {"sources": {"speed": "a sheet"}}}, "x.sources: speed"),
    ({"hardware.x": MACHINE | {"sources": {"flops": 3}}}, "x.sources: flops"),
    ({"hardware.h100": MACHINE}, "h100"),
    ({'models."llama-3.1-8b"': MODEL}, "llama-3.1-8b"),
]


@pytest.mark.parametrize(("tables", "key"), FAULTS, ids=[fault[1] for fault in FAULTS])
def test_a_wrong_key_is_named_with_its_file(tables: dict[str, Any], key: str, tmp_path: Path) -> None:
    path = file_with(tmp_path, toml(tables))
    with pytest.raises(PlanError) as caught:
        PlanCatalog.load(path)
    assert caught.value.field == f"{path}: {key}"
    assert "\n" not in str(caught.value)


ANY_TOML = st.recursive(
    st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(value=ANY_TOML, data=st.data())
def test_whatever_stands_in_a_key_is_read_or_refused(value: Any, data: st.DataObject) -> None:
    machine = MACHINE | {"link_us": 1, "efficiency": {"order": 2}, "measured": MEASURED, "sources": {"flops": "x"}}
    experts = {"n": 8, "active": 2, "intermediate": 32}
    model = MODEL | {
        "tied": True, "window": 3, "window_layers": 1, "experts": experts, "latent": LATENT, "source": "",
        "formats": {"linear": "fp8"},
    }  # fmt: skip
    for read, table in ((hardware_of, machine), (shape_of, model)):
        read("x", table)
        key = data.draw(st.sampled_from(sorted(table)))
        inner = table[key]
        if isinstance(inner, dict) and data.draw(st.booleans()):
            changed = inner | {data.draw(st.sampled_from(sorted(inner))): value}
        else:
            changed = value
        with contextlib.suppress(PlanError):
            read("x", table | {key: changed})


@pytest.mark.parametrize("contents", [b"[models", b"\xff", b"x = 1", b"models = 3", b"models.x = 3\n[models]"])
def test_a_file_that_is_no_catalog_is_named(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(contents)
    with pytest.raises(PlanError, match=r"mine\.toml") as caught:
        PlanCatalog.load(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(PlanError, match="can't be read") as caught:
            PlanCatalog.load(path)
        assert caught.value.field == "catalog"


def test_names_that_are_not_there(catalog: PlanCatalog, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"did you mean llama-3.1-8b\?") as caught:
        catalog.shape("lama-3.1-8b")
    assert caught.value.field == "model"
    with pytest.raises(PlanError, match="it has h100, h100-pcie") as caught:
        catalog.gpu("abacus")
    assert caught.value.field == "gpu"
    with pytest.raises(PlanError, match="there is no file"):
        catalog.shape(str(tmp_path / "none"))


def test_this_machine_lies_where_the_engines_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for own, xdg in (("~/own", ""), ("", str(tmp_path / "xdg")), ("", "relative"), ("here", ""), ("", "")):
        monkeypatch.setenv("FORERUN_CACHE", own)
        monkeypatch.setenv("XDG_CACHE_HOME", xdg)
        assert local_path() == cache_dir() / "plan" / "local.toml"
    monkeypatch.setenv("FORERUN_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(PlanError, match="FORERUN_CACHE"):
        local_path()


def save(text: str) -> None:
    local_path().parent.mkdir(parents=True, exist_ok=True)
    local_path().write_text(text)


def test_this_machine_is_measured_or_says_how_to(tmp_path: Path) -> None:
    known = PlanCatalog.load()
    assert "local" not in known.hardware
    with pytest.raises(PlanError, match=r"bench step --json.*plan calibrate step\.json --save") as caught:
        known.gpu("local")
    assert caught.value.field == "gpu"
    measured = MACHINE | {"efficiency": {"bandwidth": 0.7}, "measured": MEASURED}
    save(toml({"hardware.local": measured}))
    found = PlanCatalog.load().gpu("local")
    assert found == hardware_of("local", measured)
    assert found.measured is not None
    assert found.measured.queries == (1, 16)
    # What the user gives stands before what was saved.
    mine = file_with(tmp_path, toml({"hardware.local": MACHINE | {"memory_gb": 7}}))
    assert PlanCatalog.load(mine).gpu("local").memory == 7e9


@pytest.mark.parametrize(
    "text",
    [
        "[hardware.local",
        "",
        toml({"hardware.other": MACHINE}),
        toml({"hardware.local": MACHINE, "hardware.other": MACHINE}),
        toml({"hardware.local": MACHINE, "models.mine": MODEL}),
        toml({"hardware.local": MACHINE | {"bandwidth_gb_s": -1}}),
        toml({"hardware.local": MACHINE | {"measured": {"model": "m", "batch": [1]}}}),
        "\0",
    ],
)
def test_a_damaged_measurement_is_told_when_it_is_asked_for(text: str) -> None:
    save(text)
    known = PlanCatalog.load()
    assert known.gpu("h100").name == "h100"
    with pytest.raises(PlanError, match=r"local\.toml.*plan calibrate step\.json --save") as caught:
        known.gpu("local")
    assert caught.value.field == "gpu"
    assert "\n" not in str(caught.value)


def test_capitals_make_no_difference_in_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("[hardware.Mine]\ntflops = { bf16 = 1 }\nbandwidth_gb_s = 1\nmemory_gb = 1\n")
    catalog = PlanCatalog.load(file)
    assert catalog.model("QWEN3-32B") is catalog.shape("Qwen3-32B") is catalog.model("qwen3-32b")
    assert catalog.gpu("H100") is catalog.gpu("h100")
    assert catalog.gpu("mine") is catalog.gpu("Mine")
    both = PlanCatalog(catalog.models, {"a": catalog.gpu("h100"), "A": catalog.gpu("h200")})
    assert (both.gpu("a").name, both.gpu("A").name) == ("h100", "h200")
    # A folder of that name, in the working directory, is what was meant.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen3-32B").mkdir()
    with pytest.raises(PlanError, match="has no config"):
        catalog.shape("Qwen3-32B")
    assert catalog.shape("qwen3-32b") is catalog.model("qwen3-32b")
