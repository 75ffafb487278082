"""Tiny random models of every architecture, as GGUF files and Hugging Face folders.

Both forms of one `TinySpec` hold the same function: same weights, each in its format's convention.
They carry a real byte-level BPE tokenizer of 300 entries and a ChatML template, so text works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.models.config import Architecture, ModelConfig, RopeConfig, expected_tensors
from forerun.ops.types import GGMLType, TensorData
from reference.gguf_writer import write_gguf
from reference.quant import make_tensor, quantize

Floats = npt.NDArray[np.float32]

ARCHITECTURES: tuple[Architecture, ...] = ("llama", "qwen2", "qwen3", "gemma3")

_MERGES = (
    ("Ġ", "t"), ("h", "e"), ("i", "n"), ("Ġ", "a"), ("r", "e"), ("o", "n"), ("Ġt", "he"),
    ("e", "r"), ("Ġ", "s"), ("a", "t"), ("n", "d"), ("e", "n"), ("o", "r"), ("Ġ", "w"),
    ("in", "g"), ("i", "s"), ("i", "t"), ("e", "s"), ("o", "u"), ("Ġ", "o"), ("l", "l"),
    ("Ġ", "c"), ("e", "d"), ("Ġa", "nd"), ("Ġ", "f"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ċ", "ĠĠĠĠ"),
    ("Ġ", "="), ("(", ")"), ("Ã", "©"), ("ð", "Ł"), ("d", "e"), ("de", "f"), ("a", "n"),
    ("re", "t"),
)  # fmt: skip
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 300
BOS_ID, EOS_ID = VOCAB_SIZE - 8, VOCAB_SIZE - 6

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class TinySpec:
    """What to build; sizes fit every tensor type (256-wide blocks)."""

    architecture: Architecture
    seed: int = 0
    hidden: int = 256
    ffn: int = 512
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    context: int = 512
    window: int = 8
    tied: bool | None = None
    """None: as usual for the architecture, tied for qwen3 and gemma3."""
    types: Mapping[str, GGMLType] = field(default_factory=dict)
    """Type by role ("token_embd", "output", "attn_q", "ffn_down", "norm", ...); "" for the rest
    of the matrices, F32 where nothing is said."""
    rope_factors: Sequence[float] | None = None
    """Values of rope_freqs.weight (head_dim / 2 of them), GGUF only."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Extra or replacing GGUF metadata; None removes a key."""

    @property
    def window_layers(self) -> tuple[bool, ...]:
        """Gemma 3 only: sliding, full, sliding, ..."""
        return tuple(layer % 2 == 0 for layer in range(self.layers))


def tiny_config(spec: TinySpec) -> ModelConfig:
    """The configuration that readers must find in `write_tiny_gguf(spec)`, without extras."""
    gemma3 = spec.architecture == "gemma3"
    tied = spec.architecture in ("qwen3", "gemma3") if spec.tied is None else spec.tied
    rope = RopeConfig(
        theta=1e6 if gemma3 else 1e4,
        style="interleaved" if spec.architecture == "llama" else "half",
        dims=spec.head_dim,
    )
    return ModelConfig(
        architecture=spec.architecture,
        vocab_size=VOCAB_SIZE,
        hidden_size=spec.hidden,
        n_layers=spec.layers,
        n_heads=spec.heads,
        n_kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn_size=spec.ffn,
        context_length=spec.context,
        rms_eps=float(np.float32(1e-6)),
        rope=rope,
        rope_local=RopeConfig(1e4, "half", spec.head_dim) if gemma3 else None,
        sliding_window=spec.window if gemma3 else None,
        window_layers=spec.window_layers if gemma3 else (False,) * spec.layers,
        attention_scale=1 / math.sqrt(spec.head_dim),
        embedding_scale=math.sqrt(spec.hidden) if gemma3 else 1.0,
        activation="gelu_tanh" if gemma3 else "silu",
        tied_embeddings=tied,
        attention_bias=spec.architecture == "qwen2",
        qk_norm=spec.architecture in ("qwen3", "gemma3"),
        post_norms=gemma3,
    )


def tiny_weights(spec: TinySpec) -> dict[str, Floats]:
    """Random float32 weights by GGUF name, before quantisation; sized so that text varies."""
    rng = np.random.default_rng(spec.seed)
    weights: dict[str, Floats] = {}
    # Scaled and tied, a large embedding would make every token predict itself.
    small_embedding = spec.architecture == "gemma3"
    for name, shape in expected_tensors(tiny_config(spec)).items():
        if name.endswith("norm.weight"):
            # One plus a float32, so that the folder's w and the file's 1 + w are the same weights.
            shift = rng.normal(0, 0.2, shape).astype(np.float32)
            if small_embedding and name == "output_norm.weight":
                shift += np.float32(7)
            weights[name] = np.float32(1) + shift
            continue
        scale = 0.2 if name.endswith(".bias") else 1 / math.sqrt(shape[-1])
        if name in ("token_embd.weight", "output.weight"):
            scale = (3 / 8 if small_embedding else 3) / math.sqrt(spec.hidden)
        elif "attn_q" in name or "attn_k" in name:
            # Peaked attention: a wrong key, position or mask must show in the logits.
            scale *= 2
        weights[name] = rng.normal(0, scale, shape).astype(np.float32)
    return weights


def role_of(name: str) -> str:
    """ "blk.0.attn_q.weight" is "attn_q"; every norm is "norm", every bias "bias"."""
    stem, kind = name.split(".")[-2:]
    if kind == "bias":
        return "bias"
    return "norm" if stem.endswith("norm") else stem


def _type_of(spec: TinySpec, name: str) -> GGMLType:
    role = role_of(name)
    if role in ("norm", "bias"):
        return spec.types.get(role, GGMLType.F32)
    return spec.types.get(role, spec.types.get("", GGMLType.F32))


def tiny_tensors(spec: TinySpec) -> list[TensorData]:
    """The tensors of the GGUF file, quantised as asked."""
    tensors = [make_tensor(name, values, _type_of(spec, name)) for name, values in tiny_weights(spec).items()]
    if spec.rope_factors is not None:
        tensors.append(make_tensor("rope_freqs.weight", np.array(spec.rope_factors)))
    return tensors


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for every byte, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def tiny_tokens() -> list[str]:
    """Bytes, merged pieces, three special tokens, unused fillers: 300 in all."""
    tokens = byte_alphabet() + [a + b for a, b in _MERGES] + list(_SPECIAL)
    return tokens + [f"[PAD{n}]" for n in range(VOCAB_SIZE - len(tokens))]


def tiny_metadata(spec: TinySpec) -> dict[str, Any]:
    """The GGUF metadata of a tiny model, tokenizer included."""
    arch, config = spec.architecture, tiny_config(spec)
    fillers = VOCAB_SIZE - 256 - len(_MERGES) - len(_SPECIAL)
    metadata: dict[str, Any] = {
        "general.architecture": arch,
        "general.name": f"tiny {arch}",
        f"{arch}.block_count": spec.layers,
        f"{arch}.context_length": spec.context,
        f"{arch}.embedding_length": spec.hidden,
        f"{arch}.feed_forward_length": spec.ffn,
        f"{arch}.attention.head_count": spec.heads,
        f"{arch}.attention.head_count_kv": spec.kv_heads,
        f"{arch}.attention.key_length": spec.head_dim,
        f"{arch}.attention.value_length": spec.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": config.rope.theta,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tiny_tokens(),
        "tokenizer.ggml.token_type": np.array(
            [1] * (256 + len(_MERGES)) + [3] * len(_SPECIAL) + [5] * fillers, dtype=np.int32
        ),
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in _MERGES],
        "tokenizer.ggml.bos_token_id": BOS_ID,
        "tokenizer.ggml.eos_token_id": EOS_ID,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    if arch == "llama":
        metadata["llama.vocab_size"] = VOCAB_SIZE
        metadata["llama.rope.dimension_count"] = spec.head_dim
    if arch == "gemma3":
        metadata["gemma3.attention.sliding_window"] = spec.window
        metadata["gemma3.attention.sliding_window_pattern"] = np.array(spec.window_layers)
    metadata |= spec.metadata
    return {key: value for key, value in metadata.items() if value is not None}


def write_tiny_gguf(path: Path, spec: TinySpec) -> Path:
    """Write the model as a GGUF file and return `path`."""
    return write_gguf(path, tiny_metadata(spec), tiny_tensors(spec))


def tiny_hf_config(spec: TinySpec) -> dict[str, Any]:
    """The config.json of a tiny model, in the keys that Transformers 4 writes."""
    arch, config = spec.architecture, tiny_config(spec)
    document: dict[str, Any] = {
        "architectures": [f"{arch.capitalize()}ForCausalLM"],
        "model_type": "gemma3_text" if arch == "gemma3" else arch,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tied_embeddings,
        "torch_dtype": "float32",
    }
    if arch == "gemma3":
        return document | {
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 1e4,
            "query_pre_attn_scalar": spec.head_dim,
            "sliding_window": spec.window,
            "layer_types": ["sliding_attention" if window else "full_attention" for window in spec.window_layers],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }
    return document | {"hidden_act": "silu"}


_HF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}


def _hf_name(arch: str, name: str) -> str:
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    stem, kind = name.split(".")[-2:]
    if stem in top:
        return f"{top[stem]}.{kind}"
    layer = name.split(".")[1]
    norms = {"ffn_norm": "post_attention_layernorm"}
    if arch == "gemma3":
        norms = {
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        }
    return f"model.layers.{layer}.{(_HF_NAMES | norms)[stem]}.{kind}"


def tiny_hf_tensors(spec: TinySpec) -> dict[str, TensorData]:
    """The folder's tensors by their Hugging Face names, in that format's conventions."""
    tensors = {}
    for name, stored in tiny_weights(spec).items():
        values = stored
        role = role_of(name)
        if spec.architecture == "gemma3" and role == "norm":
            values = values - np.float32(1)
        if spec.architecture == "llama" and role in ("attn_q", "attn_k"):
            # From pairs side by side back to halves.
            heads = values.reshape(-1, spec.head_dim // 2, 2, spec.hidden)
            values = heads.swapaxes(1, 2).reshape(values.shape)
        hf_name = _hf_name(spec.architecture, name)
        kind = _type_of(spec, name)
        shape = tuple(values.shape)
        tensors[hf_name] = TensorData(hf_name, kind, shape, quantize(values, kind))
    return tensors


def safetensors_bytes(tensors: Mapping[str, TensorData]) -> bytes:
    """A complete safetensors file; types are F32, F16 and BF16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        stop = at + tensor.data.size
        header[name] = {
            "dtype": tensor.type.name,
            "shape": list(tensor.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(tensor.data.tobytes() for tensor in tensors.values())
    return len(text).to_bytes(8, "little") + text + body


def write_tiny_folder(
    folder: Path,
    spec: TinySpec,
    *,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
    prefix: Mapping[str, str] | None = None,
) -> Path:
    """Write the model as a Hugging Face folder and return it.

    `config` replaces the whole config.json; `prefix` renames the beginnings of tensor names (as
    multimodal folders do).
    """
    folder.mkdir(parents=True, exist_ok=True)
    document = tiny_hf_config(spec) if config is None else dict(config)
    (folder / "config.json").write_text(json.dumps(document))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer_json()))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tensors = {}
    for name, tensor in tiny_hf_tensors(spec).items():
        for old, new in (prefix or {}).items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
                break
        tensors[name] = tensor
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return folder
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        (folder / file).write_bytes(safetensors_bytes(part))
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def _tokenizer_json() -> dict[str, Any]:
    special = [
        {
            "id": 256 + len(_MERGES) + n,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for n, token in enumerate(_SPECIAL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {**level, "use_regex": False}],
        },
        "post_processor": None,
        "decoder": {**level, "use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: n for n, token in enumerate(tiny_tokens())},
            "merges": [f"{a} {b}" for a, b in _MERGES],
        },
    }
