"""Native kernels of Forerun.

The rooms that sampling, verification and suffix matching belong to call their functions here. Everything else goes
through forerun.ops, which checks shapes, dtypes and settings.
"""

import builtins
from collections.abc import Sequence

import numpy
from numpy.typing import NDArray

def sample(
    logits: NDArray[numpy.float32],
    rows: NDArray[numpy.int32],
    temperature: NDArray[numpy.float32],
    top_k: NDArray[numpy.int32],
    top_p: NDArray[numpy.float32],
    min_p: NDArray[numpy.float32],
    typical_p: NDArray[numpy.float32],
    order: NDArray[numpy.uint32],
    seed: NDArray[numpy.uint64],
    position: NDArray[numpy.int64],
    edit_start: NDArray[numpy.int32],
    edit_ids: NDArray[numpy.int32],
    edit_bias: NDArray[numpy.float32],
    edit_factor: NDArray[numpy.float32],
    edit_count: NDArray[numpy.float32],
    edit_presence: NDArray[numpy.float32],
    masks: NDArray[numpy.uint32],
    mask_rows: NDArray[numpy.int32],
    isa: str = "auto",
) -> NDArray[numpy.int32]:
    """
    Tokens int32[R] drawn from rows int32[R] of logits float32[N, V], of those tokens that row mask_rows int32[R] of
    masks uint32[M, W] allows (-1: of all); -1: a logit is NaN or +inf, -2: nothing is allowed. The arguments between
    are forerun.sample.arrays.SpecArrays; the definition is forerun.sample.transforms.
    """

def gumbel(seed: int, position: int, ids: NDArray[numpy.int32], isa: str = "auto") -> NDArray[numpy.float32]:
    """Gumbel noise float32[n] of token ids int32[n] at one position."""

def top_logprobs(
    logits: NDArray[numpy.float32],
    rows: NDArray[numpy.int32],
    top: int,
    chosen: NDArray[numpy.int32],
    isa: str = "auto",
) -> tuple[NDArray[numpy.int32], NDArray[numpy.float32], NDArray[numpy.float32]]:
    """
    (ids int32[R, top], logprobs float32[R, top], chosen_logprob float32[R]) of rows int32[R] of logits float32[N, V].
    """

def reject(
    logits: NDArray[numpy.float32],
    rows: NDArray[numpy.int32],
    temperature: NDArray[numpy.float32],
    top_k: NDArray[numpy.int32],
    top_p: NDArray[numpy.float32],
    min_p: NDArray[numpy.float32],
    typical_p: NDArray[numpy.float32],
    order: NDArray[numpy.uint32],
    seed: NDArray[numpy.uint64],
    position: NDArray[numpy.int64],
    edit_start: NDArray[numpy.int32],
    edit_ids: NDArray[numpy.int32],
    edit_bias: NDArray[numpy.float32],
    edit_factor: NDArray[numpy.float32],
    edit_count: NDArray[numpy.float32],
    edit_presence: NDArray[numpy.float32],
    child_start: NDArray[numpy.int32],
    child_tokens: NDArray[numpy.int32],
    q: NDArray[numpy.float32],
    child_q: NDArray[numpy.int32],
    masks: NDArray[numpy.uint32],
    mask_rows: NDArray[numpy.int32],
    isa: str = "auto",
) -> tuple[NDArray[numpy.int32], NDArray[numpy.int32]]:
    """
    (choice int32[R], token int32[R]): rejection sampling of the children of one node a row, at rows int32[R] of logits
    float32[N, V]; the definition is forerun.verify.node. Row r's children are child_tokens[child_start[r]:child_start[r
    + 1]], each drawn from row child_q of q float32[Q, V], or chosen (-1). choice: the accepted one's index among them,
    or -1; token: its token or the target's own, as in sample.
    """

def sample_isas() -> list[str]:
    """Names of the instruction sets that this processor can sample with."""

class SuffixText:
    """A growing text, indexed by contexts of a few lengths."""

    def __init__(self, lengths: Sequence[int]) -> None: ...
    def __len__(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory of the text and its index."""

    def follow(self, tokens: Sequence[int]) -> None:
        """
        Become `tokens`: cut to their number if longer, append those that are missing. The beginning isn't compared.
        """

    def truncate(self, n_tokens: int) -> None:
        """Forget the tokens from `n_tokens` on, if there are any."""

    def copy(self) -> SuffixText:
        """The same text with an index of its own."""

    def latest(self, most: int) -> tuple[list[int], int]:
        """
        (continuation of the latest earlier occurrence of the longest indexed context, tokens that agree before it).
        """

class SuffixRule:
    """What a proposal is judged by."""

    def __init__(
        self,
        escape: Sequence[float],
        shared_weight: float,
        min_survival: float,
        max_depth: int,
        own_limit: int,
        shared_limit: int,
    ) -> None: ...

class SuffixStore:
    """Finished texts by scope, under a memory cap; the least recently used one leaves first."""

    def __init__(self, lengths: Sequence[int], max_bytes: int) -> None: ...
    def insert(self, scope: builtins.bytes, tokens: Sequence[int]) -> None: ...
    def clear(self) -> None:
        """Forget all texts and give the memory back."""

    def documents(self, scope: builtins.bytes) -> list[list[int]]:
        """The texts of a scope as they are kept, in the order in which they came."""

    def check_integrity(self) -> None:
        """Raises RuntimeError where the books disagree."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def bytes(self) -> int:
        """Memory reserved, 0 before the first text."""

    @property
    def used_bytes(self) -> int:
        """Memory of the pages that hold texts."""

    @property
    def n_tokens(self) -> int: ...
    @property
    def n_documents(self) -> int: ...
    @property
    def n_scopes(self) -> int: ...
    @property
    def evicted(self) -> int:
        """Texts that had to leave, in all."""

def propose_suffix(
    text: SuffixText, store: SuffixStore | None, scope: bytes, budget: int, rule: SuffixRule, doubt: float = 1.0
) -> tuple[list[int], list[int], list[float]]:
    """(tokens, parents, confidence) of the most probable continuations, best first."""

def physical_cores() -> int: ...
def instruction_set(name: str) -> str: ...
def read_bandwidth(data: NDArray[numpy.uint8], threads: int, repeats: int) -> float: ...
def packed_bytes(type: int, N: int, K: int) -> int: ...
def pack(type: int, src: NDArray[numpy.uint8], N: int, K: int, out: NDArray[numpy.uint8], threads: int) -> None: ...
def dequantize(type: int, src: NDArray[numpy.uint8], N: int, K: int) -> NDArray[numpy.float32]: ...

class KvCache:
    def __init__(self, layers: int, blocks: int, n_kv: int, head_dim: int) -> None: ...
    @property
    def bytes(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def move_slot(self, arg0: int, arg1: int, arg2: int, arg3: int, /) -> None: ...

class Tape:
    def __init__(self, max_tokens: int, max_outputs: int, threads: int, isa: str) -> None: ...
    @property
    def bytes(self) -> int: ...
    def buffer(self, width: int, outputs: bool = False) -> int: ...
    def weight(self, type: int, N: int, K: int, packed: NDArray[numpy.uint8]) -> int: ...
    def vector(self, values: NDArray[numpy.float32]) -> int: ...
    def embed(self, type: int, N: int, K: int, rows: NDArray[numpy.uint8], scale: float, out: int) -> None: ...
    def rms_norm(self, arg0: int, arg1: int, arg2: float, arg3: int, /) -> None: ...
    def linear(self, arg0: int, arg1: Sequence[tuple[int, int, int, bool]], /) -> None: ...
    def rope_store(
        self,
        arg0: int,
        arg1: int,
        arg2: int,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: bool,
        arg9: int,
        arg10: int,
        arg11: int,
        arg12: int,
        arg13: int,
        arg14: float,
        /,
    ) -> None: ...
    def attention(
        self, arg0: int, arg1: int, arg2: int, arg3: int, arg4: int, arg5: int, arg6: int, arg7: float, /
    ) -> None: ...
    def gated(self, arg0: int, arg1: int, arg2: int, arg3: bool, arg4: int, /) -> None: ...
    def add(self, arg0: int, arg1: int, /) -> None: ...
    def gather(self, arg0: int, arg1: int, /) -> None: ...
    def head(self, arg0: int, arg1: int, /) -> None: ...
    def run(
        self,
        kv: KvCache | None,
        tokens: NDArray[numpy.int32],
        positions: NDArray[numpy.int32],
        row_start: NDArray[numpy.int32],
        cached: NDArray[numpy.int32],
        is_tree: NDArray[numpy.uint8],
        ancestors: NDArray[numpy.uint64],
        tables: NDArray[numpy.int32],
        table_row: NDArray[numpy.int32],
        output: NDArray[numpy.int32],
        logits: NDArray[numpy.float32],
        argmax: NDArray[numpy.int32],
    ) -> float: ...
    def read(self, arg0: int, arg1: int, /) -> NDArray[numpy.float32]: ...
    def write(self, arg0: int, arg1: NDArray[numpy.float32], /) -> None: ...
    def profile(self) -> list[float]:
        """
        Seconds by kind of operation since the last call (empty the first time, which turns profiling on).
        """
