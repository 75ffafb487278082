"""vLLM's own code on what is exported for it: its command line, its configuration and its schedule. Needs `vllm` (the
wheel for CPUs is enough); without it, tests/plan/test_export.py checks the same against the documented schema."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from forerun.errors import PlanError
from forerun.plan.catalog import PlanCatalog
from forerun.plan.deployment import Deployment
from forerun.plan.export import ENGINES, export
from forerun.plan.export_plan import DraftPlan, Export, plan_draft
from forerun.plan.export_text import arguments
from forerun.plan.spec import proposal_of
from forerun.plan.speculate import best

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vllm = pytest.importorskip("vllm", reason="vLLM is not installed", exc_type=ImportError)
    from vllm.config import ParallelConfig, SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.spec_decode.dynamic.utils import (
        build_dynamic_sd_schedule_lookup,
        validate_and_normalize_dynamic_sd_schedule,
    )

pytestmark = pytest.mark.filterwarnings("ignore")

CATALOG = PlanCatalog.load()
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = LLAMA | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "hidden_act": "silu",
}  # fmt: skip
DRAFTS: dict[str, dict[str, Any]] = {
    "model": LLAMA | {"num_hidden_layers": 1},
    "eagle": LLAMA | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1},
    "eagle3": LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 128},
    "medusa": {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": 64, "vocab_size": 256,
               "num_heads": 4, "num_hidden_layers": 1},
}  # fmt: skip
SPECS = {"model": ("qwen2.5-7b", "model=qwen2.5-0.5b"), "mtp": ("deepseek-v3", "mtp")}


def plan_for(kind: str) -> DraftPlan:
    name, spec = SPECS.get(kind, ("llama-3.1-8b", kind))
    target = CATALOG.shape(name)
    where = Deployment(hardware=CATALOG.gpu("h200"), tensor=16 if kind == "mtp" else 1)
    return plan_draft(target, where, proposal_of(spec, target, CATALOG.shape), context=1000, most=96)


def checkpoint(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def exported(kind: str, folder: Path) -> Export:
    target = checkpoint(folder / "t", DEEPSEEK if kind == "mtp" else LLAMA)
    draft = checkpoint(folder / "d", DRAFTS[kind]) if kind in DRAFTS else None
    made = export("vllm", plan_for(kind), target_model=target, draft_model=draft)
    if kind == "model":  # The stand-ins have one vocabulary, the planned models have not.
        assert made.config["--speculative-config"].pop("use_heterogeneous_vocab")
    return made


def read_by_vllm(made: Export) -> EngineArgs:
    _, command, *words = arguments(made)
    assert command == "serve"
    read = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    read.model = read.model_tag
    return EngineArgs.from_cli_args(read)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose path names no method: vLLM guesses from it."""
    return tmp_path_factory.mktemp("c")


@pytest.mark.parametrize("kind", ["ngram", "medusa", "model", "eagle", "eagle3", "mtp"])
def test_the_command_line_and_the_configuration_are_read_as_they_are_meant(kind: str, folder: Path) -> None:
    made = exported(kind, folder)
    wanted = made.config["--speculative-config"]
    read = read_by_vllm(made)
    assert read.model == made.config["model"]
    assert read.max_num_seqs == 96
    assert read.tensor_parallel_size == made.plan.deployment.tensor
    assert read.speculative_config == wanted
    read.tensor_parallel_size = 1
    read.skip_tokenizer_init = True
    target = read.create_model_config()
    config = read.create_speculative_config(target, ParallelConfig())
    assert isinstance(config, SpeculativeConfig)
    assert config.method == wanted["method"]
    assert config.num_speculative_tokens == wanted["num_speculative_tokens"]
    lengths = config.num_speculative_tokens_per_batch_size
    assert lengths == [tuple(entry) for entry in wanted.get("num_speculative_tokens_per_batch_size", [])] or None
    if lengths is None:
        return
    lookup = build_dynamic_sd_schedule_lookup([list(entry) for entry in lengths], 96, config.num_speculative_tokens)
    plan = made.plan
    for batch in range(1, 97):
        point = best(plan.target.network, plan.deployment, plan.proposal, batch=batch, context=1000)
        assert lookup[batch] == point.length, batch


@pytest.mark.parametrize(
    "entries", [[[2, 8, 3]], [[1, 8, 3], [8, 9, 1]], [[1, 0, 1]], [[1, 8, -1]], [[1, 8]], [], [[0, 8, 1]]]
)
def test_schedules_that_vllm_refuses_are_refused_before(entries: list[list[int]], folder: Path) -> None:
    with pytest.raises(ValueError, match=r"."):
        validate_and_normalize_dynamic_sd_schedule(entries)
    made = exported("eagle3", folder)
    spec = {**made.config["--speculative-config"], "num_speculative_tokens_per_batch_size": entries}
    with pytest.raises(PlanError):
        ENGINES["vllm"][1].check({**made.config, "--speculative-config": spec})


def test_every_key_of_the_schema_is_one_of_vllm() -> None:
    table = ENGINES["vllm"][1].keys["--speculative-config"]
    assert table.keys is not None
    assert set(table.keys) <= set(SpeculativeConfig.__dataclass_fields__)
    flags = {flag for action in make_arg_parser(FlexibleArgumentParser())._actions for flag in action.option_strings}
    assert {key for key in ENGINES["vllm"][1].keys if key.startswith("--")} <= flags
    with pytest.raises(Exception, match="num_speculative_token"):
        SpeculativeConfig(method="ngram", num_speculative_token=3)
