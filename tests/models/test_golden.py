"""Real models against float32 runs of their dequantised weights (../shared/golden, README there).

Bounds are those of the engine's issue: 1.1 times llama.cpp's divergence on the same files, and greedy answers that
follow the float32 run for at least as long as llama.cpp's do (llama-cpp-python 0.3.36, two threads, prompt in one
batch: the lengths below).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun import Engine, SamplingParams

GOLDEN = Path(__file__).parents[3] / "shared" / "golden"

KL_BOUNDS = {
    "smollm2-135m": {"code": 0.0027, "prose": 0.0028, "json": 0.0025},
    "coder-0.5b": {"code": 0.00035, "prose": 0.0010, "json": 0.00085},
    "coder-1.5b": {"code": 0.0052, "prose": 0.0143, "json": 0.0072},
}
LLAMA_CPP_AGREES = {"smollm2-135m": (45, 20, 8), "coder-0.5b": (96, 30, 8), "coder-1.5b": (68, 49, 8)}
CATALOG = {
    "smollm2-135m": "smollm2-135m-instruct",
    "coder-0.5b": "qwen2.5-coder-0.5b-instruct",
    "coder-1.5b": "qwen2.5-coder-1.5b-instruct",
}

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(not GOLDEN.is_dir(), reason="golden log-probabilities (../shared/golden) are not here"),
]


@pytest.fixture(
    scope="module",
    params=[
        "smollm2-135m",
        pytest.param("coder-0.5b", marks=pytest.mark.slow),
        pytest.param("coder-1.5b", marks=pytest.mark.slow),
    ],
)
def golden(request: pytest.FixtureRequest) -> tuple[str, Engine, dict[str, Any]]:
    name: str = request.param
    return name, Engine(CATALOG[name], kv_tokens=2048), json.loads((GOLDEN / f"{name}.json").read_text())


def divergence(top_ids: Any, top_logprobs: Any, ids: Any, logprobs: Any) -> float:
    """Mean KL over positions: the 64 golden tokens one by one, everything else as one more outcome."""
    p_log = top_logprobs.astype(np.float64)
    q_log = np.empty_like(p_log)
    for row, wanted in enumerate(top_ids):
        found = dict(zip(ids[row].tolist(), logprobs[row].tolist(), strict=True))
        q_log[row] = [found[token] for token in wanted.tolist()]
    p, q = np.exp(p_log), np.exp(q_log)
    p_rest, q_rest = (np.maximum(1 - x.sum(axis=1), 1e-12) for x in (p, q))
    kl = (p * (p_log - q_log)).sum(axis=1) + p_rest * np.log(p_rest / q_rest)
    return float(kl.mean())


@pytest.mark.parametrize("text", ["code", "prose", "json"])
def test_divergence_from_float32(golden: tuple[str, Engine, dict[str, Any]], text: str) -> None:
    name, engine, _ = golden
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        tokens, ids, logprobs = (arrays[f"{text}_{part}"] for part in ("tokens", "top_ids", "top_logprobs"))
    scores = engine.score(tokens.tolist(), top=engine.config.vocab_size)
    kl = divergence(ids, logprobs, scores.ids, scores.logprobs)
    print(f"{name} {text}: KL {kl:.6f}, bound {KL_BOUNDS[name][text]}")
    assert 0 <= kl <= KL_BOUNDS[name][text]


def test_greedy_answers_follow_float32_as_long_as_llama_cpp(golden: tuple[str, Engine, dict[str, Any]]) -> None:
    name, engine, spec = golden
    chats = spec["chat"]
    params = [SamplingParams(max_tokens=len(c["greedy_ids"]), ignore_eos=True) for c in chats]
    outputs = engine.generate([c["prompt_ids"] for c in chats], params)
    for chat, output, least in zip(chats, outputs, LLAMA_CPP_AGREES[name], strict=True):
        pairs = zip(output.token_ids, chat["greedy_ids"], strict=True)
        agree = next((i for i, (a, b) in enumerate(pairs) if a != b), len(output.token_ids))
        print(f"{name}: agrees for {agree} of {len(output.token_ids)} tokens, llama.cpp for {least}")
        assert agree >= least


def test_chat_prompt_is_the_models_own(golden: tuple[str, Engine, dict[str, Any]]) -> None:
    _, engine, spec = golden
    for chat in spec["chat"]:
        assert engine.chat_ids([{"role": "user", "content": chat["user"]}]) == chat["prompt_ids"]
