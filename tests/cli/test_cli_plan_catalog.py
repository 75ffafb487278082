"""`forerun plan models` and `forerun plan hardware`: tables, JSON, derivations, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from forerun.cli.plan_catalog import HARDWARE_HELP, MODELS_HELP
from forerun.plan.catalog import PlanCatalog
from reference.derivations import evaluated
from reference.planning import PlanCommand

CONFIG = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path / "cache"))


call = PlanCommand().call


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, output, errors = call(capsys, *arguments, "--json")
    assert (code, errors) == (0, "")
    found: dict[str, Any] = json.loads(output)
    return found


def check_derivation(lines: list[dict[str, Any]]) -> float:
    """The value of the last line, when all have been evaluated."""
    return list(evaluated(lines).values())[-1]


def row_of(output: str, name: str) -> list[str]:
    return next(re.split(r"\s{2,}", line.strip()) for line in output.splitlines() if line.startswith(f"{name}  "))


def test_the_table_of_models(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = call(capsys, "models")
    assert (code, errors) == (0, "")
    for name in PlanCatalog.load().models:
        assert row_of(output, name)
    llama = row_of(output, "llama-3.3-70b")
    assert llama == ["llama-3.3-70b", "70.55 G", "69.5 G", "141.1 GB", "320", "80", "-"]
    assert row_of(output, "gpt-oss-20b")[4:] == ["48", "24", "12 x 128"]


def test_the_table_of_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = call(capsys, "hardware")
    assert (code, errors) == (0, "")
    assert row_of(output, "h100") == [
        "h100", "989.4", "1978.9", "1978.9", "-", "3.35", "80", "450", "64", "295.3",
    ]  # fmt: skip
    assert row_of(output, "l40s")[-4:] == ["48", "32", "32", "419"]
    assert "local: this machine was not measured yet; run `forerun bench step --json > step.json`" in output


def test_no_digit_is_left_out_where_the_terminal_is_narrow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "50")):
        monkeypatch.setenv(name, value)
    _, output, _ = call(capsys, "hardware")
    assert "\x1b[" in output
    plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
    assert row_of(plain, "h100")[1:4] == ["989.4", "1978.9", "1978.9"]
    assert row_of(plain, "h100")[-1] == "295.3"


def test_one_model_and_where_it_is_from(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    _, named, _ = call(capsys, "models", "llama-3.1-8b")
    assert "8,030,261,248 parameters, 7,504,658,432 of them multiplied" in named
    assert "formats: layers bf16, head bf16, embedding bf16" in named
    assert "context: at most 131072 tokens" in named
    assert "source: config.json of meta-llama/Llama-3.1-8B" in named
    for path in (tmp_path, tmp_path / "config.json"):
        code, read, _ = call(capsys, "models", str(path))
        assert code == 0
        assert "8,030,261,248 parameters, 7,504,658,432 of them multiplied" in read
    assert "qwen" not in named


@pytest.mark.parametrize("name", ["llama-3.3-70b", "deepseek-v3", "gpt-oss-120b", "gemma-3-270m", "qwen3-30b-a3b"])
def test_the_derivations_of_a_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "models", name, "--explain")
    (model,), derivations = found["models"], found["derivations"]
    assert check_derivation(derivations["parameters"]) == model["parameters"]
    assert check_derivation(derivations["active_parameters"]) == model["active_parameters"]
    assert check_derivation(derivations["kv_kib_per_token"]) == model["kv_bytes_per_token"] / 1024
    _, output, _ = call(capsys, "models", name, "--explain")
    row = row_of(output, name)
    assert row_of(output, "parameters")[1].removesuffix(" parameters") == row[1]
    assert row_of(output, "active_parameters")[1].removesuffix(" parameters") == row[2]
    assert row_of(output, "kv_kib_per_token")[1].removesuffix(" KiB") == row[4]


@pytest.mark.parametrize("name", ["h100", "mi300x", "rtx4090"])
def test_the_derivation_of_hardware(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "hardware", name, "--explain")
    (hardware,) = found["hardware"]
    assert check_derivation(found["derivation"]) == hardware["ridge_flops_per_byte"]
    assert hardware["ridge_flops_per_byte"] == hardware["flops_per_s"]["bf16"] / hardware["bandwidth_bytes_per_s"]
    given = {line["symbol"]: line["source"] for line in found["derivation"] if line["formula"] is None}
    assert hardware["memory_bytes"] == PlanCatalog.load().gpu(name).memory
    for field in ("bandwidth", "memory", "link", "link_us", "host"):
        assert given[field] == hardware["sources"][field]
    _, output, _ = call(capsys, "hardware", name, "--explain")
    assert float(row_of(output, "ridge")[1].split()[0]) == pytest.approx(float(row_of(output, name)[-1]), abs=0.05)


def listed(text: str) -> list[str]:
    """Words of the help's JSON paragraph that are in brackets after "models" or "hardware"."""
    inside = re.search(r"(?:models|hardware) \((name, [^)]*?)[;)]", " ".join(text.split()))
    assert inside is not None
    return inside[1].split(", ")


def test_json_has_the_keys_that_the_help_lists(capsys: pytest.CaptureFixture[str]) -> None:
    models = as_json(capsys, "models")
    assert list(models) == ["command", "models"]
    assert models["command"] == "plan models"
    assert len(models["models"]) == len(PlanCatalog.load().models)
    for model in models["models"]:
        assert list(model) == listed(MODELS_HELP)
    hardware = as_json(capsys, "hardware")
    assert list(hardware) == ["command", "hardware", "local_error"]
    assert "plan calibrate" in hardware["local_error"]
    for found in hardware["hardware"]:
        assert list(found) == listed(HARDWARE_HELP)
    assert list(as_json(capsys, "models", "qwen3-8b", "--explain")) == ["command", "models", "derivations"]
    assert list(as_json(capsys, "hardware", "h200", "--explain")) == [*hardware, "derivation"]


def test_a_file_of_the_users(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("""
[models.tiny]
hidden = 64
layers = 2
heads = 4
kv_heads = 2
head_dim = 16
vocab = 1000
intermediate = 160
[hardware.slow]
tflops = { f32 = 1.0 }
bandwidth_gb_s = 50
memory_gb = 16
[hardware.local]
tflops = { int8 = 2.0 }
bandwidth_gb_s = 50
memory_gb = 16
efficiency = { bandwidth = 0.7, order = inf }
measured = { model = "tiny", batch = [1, 1], queries = [1, 16], context = [64, 64], points = 9, error_max = 0.03 }
""")
    _, output, _ = call(capsys, "models", "tiny", "--catalog", str(path))
    assert row_of(output, "tiny")[1:3] == ["214.3 k", "150 k"]
    assert "source: not stated" in output
    found = as_json(capsys, "hardware", "local", "--catalog", str(path), "--explain")
    (hardware,) = found["hardware"]
    assert (hardware["ridge_flops_per_byte"], hardware["ridge_type"], found["local_error"]) == (40, "int8", None)
    assert hardware["efficiency"]["order"] is None
    assert hardware["measured"]["queries"] == [1, 16]
    assert check_derivation([line for line in found["derivation"] if line["value"] is not None]) == 40
    code, output, errors = call(capsys, "hardware", "--catalog", str(path))
    assert code == 0
    assert not errors
    assert row_of(output, "local")[-5:] == ["0.05", "16", "-", "-", "40"]
    assert "not measured" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["models", "lama-3.1-8b"], "model: 'lama-3.1-8b' is not in the catalog; did you mean llama-3.1-8b?"),
        (["models", "Lama-3.1-8B"], "model: 'Lama-3.1-8B' is not in the catalog; did you mean llama-3.1-8b?"),
        (["models", "Qwen/Qwen3-32B"], "model: there is no file 'Qwen/Qwen3-32B'; did you mean qwen3-32b, of the cat"),
        (["models", "meta-llama/Llama-3.3-70B-Instruct"], "did you mean llama-3.3-70b, of the catalog?"),
        (["models", "no/such/folder"], "model: there is no file 'no/such/folder'"),
        (["models", "x" * 5000 + ".json"], "model: there is no file 'xxx"),
        (["models", "a\0b"], "model: 'a\\x00b' is not in the catalog"),
        (["models", ""], "model: '' is not in the catalog"),
        (["models", "--explain"], "--explain: of which one?"),
        (["hardware", "--explain"], "--explain: of which one?"),
        (["hardware", "h1000"], "gpu: 'h1000' is not in the catalog; did you mean h100?"),
        (["hardware", "local"], "gpu: this machine was not measured yet; run `forerun bench step --json"),
        (["models", "--catalog", "none.toml"], "catalog: none.toml can't be read"),
        (["step", "-m", "llama-3.1-8b", "-g", "local"], "gpu: this machine was not measured yet"),
        (["step", "-m", "llama-3.1-8b", "--weights", "q9"], "is no known format"),
    ],
)
def test_errors_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, output, errors = call(capsys, *arguments)
    assert (code, output) == (1, "")
    assert said in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_config_without_a_needed_field(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({name: value for name, value in CONFIG.items() if name != key}))
        for command in (["models", str(path)], ["step", "-m", str(tmp_path)]):
            code, output, errors = call(capsys, *command)
            assert (code, output) == (1, "")
            assert f"config.json: {key}: missing; expected a whole number" in errors


def test_the_documentation_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan-catalog.md").read_text()
    shown = re.findall(r"^```console\n\$ forerun plan (.*)\n((?:.*\n)*?)```$", page, flags=re.MULTILINE)
    assert len(shown) == 2
    for command, text in shown:
        _, output, _ = call(capsys, *command.split())
        assert [line.rstrip() for line in output.splitlines()] == text.splitlines()
