"""Where the keys and values of tokens lie: block pool, block tables, prefix cache (no tensors)."""

from forerun.kv.pool import BlockPool, KVIntegrityError, PoolExhausted
from forerun.kv.prefix import PrefixCache, PrefixMatch, PrefixStats
from forerun.kv.table import BlockCopy, BlockTable

__all__ = [
    "BlockCopy",
    "BlockPool",
    "BlockTable",
    "KVIntegrityError",
    "PoolExhausted",
    "PrefixCache",
    "PrefixMatch",
    "PrefixStats",
]
