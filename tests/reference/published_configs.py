"""The config.json files of published models, by the catalog's name of each, and of some that it doesn't have."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def llama(hidden: int, layers: int, heads: int, intermediate: int, **more: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": hidden,
        "initializer_range": 0.02, "intermediate_size": intermediate, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "torch_dtype": "bfloat16", "vocab_size": 128256, **more,
    }  # fmt: skip


def qwen2(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool) -> Config:
    return {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": intermediate, "max_position_embeddings": 32768, "max_window_layers": layers,
        "model_type": "qwen2", "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "rope_theta": 1000000.0, "sliding_window": 131072,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": vocab,
    }  # fmt: skip


def qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool, **more: Any) -> Config:
    return {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": hidden, "intermediate_size": intermediate, "max_position_embeddings": 40960,
        "max_window_layers": layers, "model_type": "qwen3", "num_attention_heads": heads, "num_hidden_layers": layers,
        "num_key_value_heads": 8, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "use_sliding_window": False, "vocab_size": 151936,
        **more,
    }  # fmt: skip


def qwen3_moe(hidden: int, layers: int, heads: int, intermediate: int, width: int) -> Config:
    return qwen3(
        hidden, layers, heads, intermediate, tied=False, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe",
        num_key_value_heads=4, decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=width, num_experts=128,
        num_experts_per_tok=8, norm_topk_prob=True, output_router_logits=False,
    )  # fmt: skip


def gpt_oss(layers: int, experts: int) -> Config:
    return {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2), "max_position_embeddings": 131072,
        "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": layers,
        "num_key_value_heads": 8, "num_local_experts": experts, "sliding_window": 128, "swiglu_limit": 7.0,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "tie_word_embeddings": False, "vocab_size": 201088,
    }  # fmt: skip


MIXTRAL: Config = {
    "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "sliding_window": None,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip

DEEPSEEK_V3: Config = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1,
    "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
    },
    "tie_word_embeddings": False, "topk_group": 4, "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip

GEMMA_3_270M: Config = {
    "architectures": ["Gemma3ForCausalLM"], "_sliding_window_pattern": 6, "attention_bias": False, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 640, "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3, "max_position_embeddings": 32768,
    "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 18, "num_key_value_heads": 1,
    "sliding_window": 512, "torch_dtype": "bfloat16", "vocab_size": 262144,
}  # fmt: skip

QWEN_MOE: Config = {
    "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
    "vocab_size": 151936,
}  # fmt: skip

PUBLISHED: dict[str, Config] = {
    "llama-3.1-8b": llama(4096, 32, 32, 14336),
    "llama-3.3-70b": llama(8192, 80, 64, 28672, head_dim=128),
    "llama-3.2-1b": llama(2048, 16, 32, 8192, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": llama(3072, 28, 24, 8192, head_dim=128, tie_word_embeddings=True),
    "qwen2.5-0.5b": qwen2(896, 24, 14, 2, 4864, 151936, tied=True),
    "qwen2.5-1.5b": qwen2(1536, 28, 12, 2, 8960, 151936, tied=True),
    "qwen2.5-3b": qwen2(2048, 36, 16, 2, 11008, 151936, tied=True),
    "qwen2.5-7b": qwen2(3584, 28, 28, 4, 18944, 152064, tied=False),
    "qwen2.5-14b": qwen2(5120, 48, 40, 8, 13824, 152064, tied=False),
    "qwen2.5-32b": qwen2(5120, 64, 40, 8, 27648, 152064, tied=False),
    "qwen2.5-72b": qwen2(8192, 80, 64, 8, 29568, 152064, tied=False),
    "qwen3-0.6b": qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": qwen3(5120, 64, 64, 25600, tied=False),
    "qwen3-30b-a3b": qwen3_moe(2048, 48, 32, 6144, 768),
    "qwen3-235b-a22b": qwen3_moe(4096, 94, 64, 12288, 1536),
    "mixtral-8x7b": MIXTRAL,
    "gpt-oss-20b": gpt_oss(24, 32),
    "gpt-oss-120b": gpt_oss(36, 128),
    "deepseek-v3": DEEPSEEK_V3,
}
