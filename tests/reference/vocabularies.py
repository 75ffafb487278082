"""Small tokenizers of both families: byte-level BPE and SentencePiece BPE with byte fallback."""

from __future__ import annotations

from typing import Any

import numpy as np

from forerun.models.tokenizer import Tokenizer
from reference.tiny import TinySpec, tiny_metadata


def byte_level(pre: str = "gpt-2", **changes: Any) -> Tokenizer:
    """The tiny models' byte-level tokenizer; keyword None removes a key."""
    extra = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    spec = TinySpec("llama", metadata={"tokenizer.ggml.pre": pre, **extra})
    return Tokenizer.from_gguf(tiny_metadata(spec))


PIECES = ["▁", "a", "b", "c", "▁a", "ab", "abc", "bc", "▁ab", "c▁", "é", "▁▁a"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """<unk> 0, <s> 1, </s> 2, <turn> 3, 256 bytes, "\\n\\n" and two spaces, then `PIECES`."""
    tokens = ["<unk>", "<s>", "</s>", "<turn>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [2, 3, 3, 3] + [6] * 256
    tokens += ["\n\n", "  ", *PIECES]
    kinds += [4, 4] + [1] * len(PIECES)
    scores = [-1000.0] * 262 + [-float(n) for n in range(len(PIECES))]
    metadata: dict[str, Any] = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": np.array(kinds, np.int32),
        "scores": np.array(scores, np.float32),
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_space_prefix": False,
        **changes,
    }
    return {f"tokenizer.ggml.{k}": v for k, v in metadata.items() if v is not None}


def sentencepiece(**changes: Any) -> Tokenizer:
    return Tokenizer.from_gguf(sentencepiece_metadata(**changes))
