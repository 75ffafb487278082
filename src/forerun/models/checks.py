"""What is refused before a model runs: settings, and models that the kernels or this machine can't take."""

from __future__ import annotations

import os

import numpy as np

from forerun.errors import ConfigurationError, ModelFormatError, UnsupportedModelError
from forerun.models.config import ModelConfig
from forerun.models.tokenizer import Tokenizer

WIDTH = 16
"""What every width that the kernels work on is a multiple of."""


def setting(name: str, value: object, low: int, high: int, error: type[Exception] = ConfigurationError) -> int:
    """An integer from `low` to `high`; raises `error` for anything else."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or not low <= value <= high:
        raise error(f"{name}={value!r} is not allowed; expected an integer from {low} to {high}")
    return int(value)


def check_model(config: ModelConfig) -> None:
    """Raises `UnsupportedModelError` for sizes that the kernels don't have."""
    widths = {
        "head dimension": config.head_dim,
        "hidden size": config.hidden_size,
        "feed-forward size": config.ffn_size,
    }
    for name, width in widths.items():
        if width % WIDTH:
            raise UnsupportedModelError(
                f"{name} {width} is not supported: expected a multiple of {WIDTH}; choose another model"
            )


def check_tokenizer(tokenizer: Tokenizer, config: ModelConfig) -> None:
    """Raises `ModelFormatError` unless every id of the tokenizer has an embedding, and the other way round."""
    vocabulary = config.vocab_size
    special = max((*tokenizer.eos_ids, -1 if tokenizer.bos_id is None else tokenizer.bos_id), default=-1)
    if tokenizer.vocab_size != vocabulary or special >= vocabulary:
        raise ModelFormatError(
            f"the tokenizer has {max(tokenizer.vocab_size, special + 1)} tokens, but the model has embeddings for "
            f"{vocabulary}: tokenizer and weights are not of one model, or a file is incomplete; download it again"
        )


def check_kv_memory(config: ModelConfig, kv_blocks: int, block: int) -> None:
    """Raises `ConfigurationError` for a KV pool that this machine's memory can't hold."""
    per_block = 4 * config.n_layers * config.kv_size * block  # keys and values, 16 bits each
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if per_block * kv_blocks > memory:
        raise ConfigurationError(
            f"kv_tokens={kv_blocks * block} needs {per_block * kv_blocks / 1e9:.1f} GB of keys and values, but this "
            f"machine has {memory / 1e9:.1f} GB of memory; expected at most {memory // per_block * block}"
        )
