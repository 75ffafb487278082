"""`forerun plan export`."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from forerun.cli import dispatch
from forerun.cli.plan_export import HELP
from forerun.plan.export import ENGINES
from reference.derivations import evaluated
from reference.tiny import TinySpec, write_tiny_gguf

EAGLE = ["--for", "vllm", "-m", "llama-3.3-70b", "-g", "h100", "-t", "8", "-d", "eagle3:0.8,0.7", "--most", "128"]


def run(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = dispatch(["plan", "export", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def found(*words: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code, out, _ = run(*words, "--json", capsys=capsys)
    assert code == 0
    read: dict[str, Any] = json.loads(out)
    return read


def test_the_text_is_a_script_of_comments_and_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*EAGLE, capsys=capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    comments = [line for line in lines if line.startswith("# ")]
    words = shlex.split("".join(line.removesuffix("\\") for line in lines[len(comments) :]))
    assert words[:2] == ["vllm", "serve"]
    assert words == found(*EAGLE, capsys=capsys)["argv"]
    assert "# acceptance by depth 0.8,0.7: given" in comments
    assert any("planned for 8 x h100" in line for line in comments)


def test_the_keys_of_the_json_are_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    body = found(*EAGLE, "--explain", capsys=capsys)
    text = " ".join(HELP.split("--json prints ")[1].split())
    listed = re.sub(r"\([^)]*\)", "", text.replace("and with --explain ", "").rstrip("."))
    assert [key.strip() for key in listed.split(",")] == list(body)
    for key in ("schedule", "notes", "derivation"):
        inner = re.search(rf"{key} \(([^)]*)\)", text)
        assert inner is not None
        assert inner[1].split(", ") == list(body[key][0])
    assert body["drafter"] == {
        "drafter": "eagle3", "kind": "eagle3", "acceptance": [0.8, 0.7], "assumed": False,
        "weight_bytes": body["drafter"]["weight_bytes"],
    }  # fmt: skip
    assert found("--for", "tensorrt-llm", *EAGLE[2:], capsys=capsys)["argv"] is None


@pytest.mark.parametrize("batch", ["1", "16", "128"])
def test_the_derivation_gives_the_speedup_line_by_line(batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    body = found(*EAGLE, "--batch", batch, "--explain", capsys=capsys)
    evaluated(body["derivation"])
    assert body["derivation"][-1]["symbol"] == "speedup"
    assert body["derivation"][-1]["value"] == pytest.approx(body["speedup"], rel=1e-12)
    bucket = next(b for b in body["schedule"] if b["lo"] <= int(batch) <= b["hi"])
    assert body["length"] == bucket["length"]
    if int(batch) == bucket["lo"]:
        assert body["speedup"] == bucket["speedup_lo"]
    _, out, _ = run(*EAGLE, "--batch", batch, "--explain", capsys=capsys)
    equation = "speedup = tokens_per_step / (draft_length * draft_cost + verify_ratio)"
    assert f"\n{equation} = {body['speedup']:.5g} x\n" in out
    assert re.findall(r"^speedup +([\d.]+) x ", out, re.MULTILINE) == [f"{body['speedup']:.5g}"]


def test_a_file_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    words = ["--for", "tensorrt-llm", *EAGLE[2:], "--out", str(path)]
    code, out, err = run(*words, capsys=capsys)
    assert (code, out) == (0, f"TensorRT-LLM: {path} written\n")
    assert "still to be filled in: speculative_config.speculative_model, model" in err
    assert "warning: " in err
    first = path.read_text()
    assert first == found("--for", "tensorrt-llm", *EAGLE[2:], capsys=capsys)["text"]
    code, _, err = run(*words, "--draft-model", "org/draft", capsys=capsys)
    assert code == 1
    assert "out: " in err
    assert path.read_text() == first
    assert run(*words, "--draft-model", "org/draft", "--force", capsys=capsys)[0] == 0
    assert "org/draft" in path.read_text()


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"--for": "vLLM"}, "for: 'vLLM' is not allowed; expected one of vllm, sglang"),
        ({"-d": "eagle4"}, "drafter: 'eagle4' is not allowed"),
        ({"-d": "eagle3:2"}, "acceptance: [2.0] is not allowed"),
        ({"-d": "mtp"}, "drafter: llama-3.3-70b comes without"),
        ({"-d": ""}, "drafter: '' is not allowed"),
        ({"--most": "0"}, "most: 0 is not allowed; expected 1 to 1024"),
        ({"--most": "100000"}, "most: 100000 is not allowed"),
        ({"--batch": "0"}, "batch: 0 is not allowed; expected 1 to 128"),
        ({"--batch": "129"}, "batch: 129 is not allowed"),
        ({"--longest": "0"}, "longest: 0 is not allowed"),
        ({"--context": "-5"}, "context: -5 is not allowed"),
        ({"--context": "200000"}, "context: 200000 tokens are more than the 131072 of llama-3.3-70b"),
        ({"--context": "100000"}, "memory: "),
        ({"--for": "trtllm", "--context": "100000"}, "for: 'trtllm' is not allowed; expected one of vllm, sglang"),
        ({"-t": "1"}, "memory: the weights of llama-3.3-70b"),
        ({"-m": "no-such-model"}, "model: 'no-such-model' is not in the catalog"),
        ({"-g": "no-such-gpu"}, "gpu: 'no-such-gpu' is not in the catalog"),
        ({"--draft-model": ""}, "draft_model: '' is not a path"),
        ({"--for": "forerun"}, "drafter: Forerun doesn't run eagle3"),
    ],
)
def test_bad_input_is_one_line_that_names_the_field(
    changes: dict[str, str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = dict(zip(EAGLE[::2], EAGLE[1::2], strict=True)) | changes
    code, out, err = run(*(word for pair in options.items() for word in pair), capsys=capsys)
    assert (code, out) == (1, "")
    assert len(err.splitlines()) == 1
    assert fault in err


@pytest.mark.parametrize("engine", ENGINES)
def test_the_help_names_every_engine(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help", capsys=capsys)[0] == 0
    code, _, err = run("--for", "none", *EAGLE[2:], capsys=capsys)
    assert code == 1
    assert engine in err


def test_forerun_does_what_was_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text as Python, and the command that it names."""
    monkeypatch.setenv("FORERUN_CACHE", str(tmp_path))
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf", TinySpec("llama", layers=1)))
    code, out, _ = run(
        "--for", "forerun", "-m", "llama-3.1-8b", "-g", "h100", "-d", "ngram:0.6", "--most", "2", "--longest", "4",
        "--target-model", model, capsys=capsys,
    )  # fmt: skip
    assert code == 0
    assert "draft_len=4" in out
    namespace: dict[str, Any] = {}
    exec(out, namespace)
    engine = namespace["engine"]
    assert engine.scheduler.max_rows == 2
    [output] = engine.generate(["ab ab ab"])
    assert output.token_ids
    [command] = [line.partition("as a command: ")[2] for line in out.splitlines() if "as a command" in line]
    words = shlex.split(command)
    assert words[:4] == ["forerun", "run", "--model", model]
    assert dispatch([*words[1:], "ab ab", "--max-tokens", "4", "--raw"]) == 0
