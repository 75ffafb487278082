"""The reference forward pass is itself right: against published scores, and in its parts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.models.catalog import Catalog
from forerun.models.config import LinearScaling, RopeConfig
from forerun.models.source import open_model
from reference.forward import (
    dequantised,
    forward,
    log_softmax,
    rotate,
    softmax,
    tree_after,
)
from reference.tiny import ARCHITECTURES, TinySpec, tiny_config, tiny_weights

SMALL = {"hidden": 32, "ffn": 48, "head_dim": 16, "layers": 3, "window": 4}


def small(architecture: Any, **changes: Any) -> TinySpec:
    return TinySpec(architecture, **(SMALL | changes))


def run(spec: TinySpec, tokens: Any, **options: Any) -> Any:
    return forward(tiny_config(spec), tiny_weights(spec), tokens, **options).logits


def parents(max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(-1, 10**6), max_size=max_size).map(
        lambda raw: [min(p, n - 1) if p < n else p % (n + 1) - 1 for n, p in enumerate(raw)]
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_token_does_not_see_what_follows(architecture: Any) -> None:
    tokens = np.random.default_rng(2).integers(0, 290, 14)
    whole = run(small(architecture), tokens)
    for length in (1, 5, 13):
        np.testing.assert_allclose(run(small(architecture), tokens[:length]), whole[:length])


@settings(max_examples=30, deadline=None)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    prefix=st.integers(1, 6),
    parents=parents(8),
    seed=st.integers(0, 99),
)
def test_every_branch_of_a_tree_is_the_plain_sequence(
    architecture: Any, prefix: int, parents: list[int], seed: int
) -> None:
    spec = small(architecture)
    tokens = np.random.default_rng(seed).integers(0, 290, prefix + len(parents))
    visible, positions = tree_after(prefix, parents)
    logits = run(spec, tokens, visible=visible, positions=positions)
    np.testing.assert_allclose(logits[:prefix], run(spec, tokens[:prefix]), atol=1e-9)
    for node in range(len(parents)):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        branch = np.concatenate([tokens[:prefix], tokens[prefix:][path]])
        np.testing.assert_allclose(logits[prefix + node], run(spec, branch)[-1], atol=1e-9)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_query_heads_share_keys_in_consecutive_groups(architecture: Any) -> None:
    grouped = small(architecture)
    config, weights = tiny_config(grouped), tiny_weights(grouped)
    alone = dict(weights)
    for name, values in weights.items():
        if ".attn_k." in name or ".attn_v." in name:
            heads = values.reshape(grouped.kv_heads, grouped.head_dim, -1)
            repeated = heads.repeat(grouped.heads // grouped.kv_heads, axis=0)
            alone[name] = repeated.reshape(-1, *values.shape[1:])
    tokens = np.random.default_rng(6).integers(0, 290, 9)
    ungrouped = replace(config, n_kv_heads=config.n_heads)
    np.testing.assert_allclose(forward(config, weights, tokens).logits, forward(ungrouped, alone, tokens).logits)


def test_a_chain_is_the_default() -> None:
    visible, positions = tree_after(3, [-1, 0, 1])
    np.testing.assert_array_equal(visible, np.tril(np.ones((6, 6), dtype=bool)))
    assert positions == [0, 1, 2, 3, 4, 5]


def test_a_window_of_one_layer_ends_where_it_says() -> None:
    spec = small("gemma3", layers=1, window=4)
    tokens = np.random.default_rng(3).integers(0, 290, 12)
    changed = tokens.copy()
    changed[5] += 1
    differs = np.abs(run(spec, tokens) - run(spec, changed)).max(axis=1) > 1e-9
    np.testing.assert_array_equal(np.flatnonzero(differs), [5, 6, 7, 8])
    unlimited = small("llama", layers=1)
    differs = np.abs(run(unlimited, tokens) - run(unlimited, changed)).max(axis=1) > 1e-9
    np.testing.assert_array_equal(np.flatnonzero(differs), range(5, 12))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_only_distance_between_positions_matters(architecture: Any) -> None:
    tokens = np.random.default_rng(4).integers(0, 290, 10)
    shifted = run(small(architecture), tokens, positions=range(100, 110))
    np.testing.assert_allclose(shifted, run(small(architecture), tokens), atol=1e-7)


@given(st.integers(0, 1000), st.sampled_from(["half", "interleaved"]), st.floats(0.5, 8))
def test_rotation_is_multiplication_of_complex_numbers(p: int, style: Any, factor: float) -> None:
    rope = RopeConfig(1e4, style, 8, LinearScaling(factor))
    x = np.random.default_rng(p).normal(size=(1, 2, 12))
    y = rotate(rope, x, np.array([p]))
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    if style == "half":
        pairs = [(0, 4), (1, 5), (2, 6), (3, 7)]
    for n, (a, b) in enumerate(pairs):
        turn = np.exp(1j * p * 1e4 ** (-n / 4) / factor)
        z = (x[..., a] + 1j * x[..., b]) * turn
        np.testing.assert_allclose(y[..., a] + 1j * y[..., b], z, atol=1e-9)


def test_softmax_of_huge_scores() -> None:
    x = np.array([[1e4, 1e4 - math.log(3), -np.inf]])
    np.testing.assert_allclose(softmax(x), [[0.75, 0.25, 0.0]])
    np.testing.assert_allclose(np.exp(log_softmax(x[:, :2])), [[0.75, 0.25]])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_single_precision_agrees_with_double(architecture: Any) -> None:
    tokens = np.random.default_rng(5).integers(0, 290, 16)
    single = run(small(architecture), tokens, dtype=np.float32)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, run(small(architecture), tokens), atol=2e-3)


def test_hook_sees_every_site_once_and_hidden_states_every_layer() -> None:
    spec = small("qwen2", layers=2)
    config = tiny_config(spec)
    sites: list[str] = []

    def note(site: str, x: Any) -> Any:
        sites.append(site)
        return x * 0 if site == "blk.1.ffn_down.weight" else x

    result = forward(config, tiny_weights(spec), [1, 2, 3], hook=note)
    linear = [n for n in tiny_weights(spec) if n.endswith("weight") and "norm" not in n]
    linear.remove("token_embd.weight")
    caches = [f"blk.{n}.{part}" for n in range(2) for part in ("key", "value")]
    assert sorted(sites) == sorted(linear + caches)
    assert [h.shape for h in result.hidden] == [(3, 32)] * 3
    plain = forward(config, tiny_weights(spec), [1, 2, 3])
    np.testing.assert_array_equal(plain.hidden[1], result.hidden[1])
    assert not np.allclose(plain.hidden[2], result.hidden[2])


def _to_bfloat16(x: Any) -> Any:
    bits = x.view(np.uint32)
    return (((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) << 16).view(np.float32)


@pytest.mark.model
def test_published_scores_of_a_real_model() -> None:
    """Conventions proved (rotation, norms, grouped heads, tied head) by an independent program."""
    golden = Path(__file__).parents[3] / "shared" / "golden" / "smollm2-135m.npz"
    if not golden.is_file():
        pytest.skip("../shared/golden/smollm2-135m.npz is absent")
    entry = Catalog.load().get("smollm2-135m-instruct")
    if not entry.path.is_file():
        pytest.skip("smollm2-135m-instruct is not in the cache: run `forerun models pull`")
    with open_model(entry.path) as source, np.load(golden) as arrays:
        # The scores come from weights that were rounded to bfloat16 on the way.
        weights = {name: _to_bfloat16(w) for name, w in dequantised(source).items()}
        for text in ("code", "prose", "json"):
            tokens = arrays[f"{text}_tokens"][:40]
            top = arrays[f"{text}_top_ids"][:40]
            expected = arrays[f"{text}_top_logprobs"][:40]
            logits = forward(source.config, weights, tokens, dtype=np.float32).logits
            scores = np.take_along_axis(log_softmax(logits.astype(np.float64)), top, axis=1)
            np.testing.assert_allclose(scores, expected, atol=1e-3)
            kl = (np.exp(expected) * (expected - scores)).sum(axis=1).mean()
            assert abs(kl) < 1e-5
