"""The physical key-value cache: 16-bit, paged, all layers."""

from __future__ import annotations

from forerun import _native

BLOCK = 16
"""Tokens of a block, the unit in which memory of the cache is given out. The kernels are built for it."""


class KvCache:
    """Keys and values of `blocks` blocks of `BLOCK` tokens for every layer.

    Which block belongs to whom is decided elsewhere (`forerun.kv`); this is only the memory. `head_dim` must be a
    multiple of 16. Memory is committed by the system when a block is first written.
    """

    def __init__(self, *, layers: int, blocks: int, n_kv_heads: int, head_dim: int) -> None:
        if min(layers, blocks, n_kv_heads) < 1 or head_dim < 16 or head_dim % 16:
            raise ValueError(f"KV cache of {layers} layers, {blocks} blocks, {n_kv_heads} heads x {head_dim}")
        self.native = _native.KvCache(layers, blocks, n_kv_heads, head_dim)
        self.blocks = blocks

    @property
    def bytes(self) -> int:
        """Address space of the cache in bytes; the resident part grows with use."""
        return self.native.bytes

    def copy_block(self, source: int, target: int) -> None:
        """Copies one block in every layer (copy-on-write)."""
        self.native.copy_block(source, target)

    def move_slot(self, source_block: int, source_slot: int, target_block: int, target_slot: int) -> None:
        """Copies one token's keys and values in every layer (an accepted tree path moving into place)."""
        self.native.move_slot(source_block, source_slot, target_block, target_slot)
