"""The random numbers of verification, as pure functions of a request's seed and a token's position.

Every kind of number has its own stream (`forerun.sample.noise.Stream`), so that what a drafter drew, whether it is
accepted, and what is taken instead are independent of one another. A position is decided once, so no number is used
twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forerun.errors import VerificationError
from forerun.sample.noise import NoiseKey, Stream, gumbel_from_bits, noise_bits, noise_key, stream_seed
from forerun.verify.trees import Trees, checked, numpy_of

Doubles = npt.NDArray[np.float64]


class Draws(NamedTuple):
    """Uniform numbers in [0, 1) that `rejection` takes.

    accept: float64[R, N], whether a node is accepted. final: float64[R, N + 1], which token is taken where the walk
    ends at this column.
    """

    accept: Doubles
    final: Doubles


def acceptance_uniforms(key: NoiseKey, tokens: npt.ArrayLike) -> Doubles:
    """float64[n] in (0, 1): decides whether draft tokens (integers [n]) are accepted; key: of `Stream.ACCEPT`.

    It depends on the token, as all noise does: a token that comes twice among siblings is never decided twice, because
    the second time nothing of it is left.
    """
    return (noise_bits(key, tokens).astype(np.float64) + 0.5) * 2.0**-31


def residual_uniforms(key: NoiseKey) -> Doubles:
    """In [0, 1), of 53 bits: decides which token replaces the rejected ones; key: of `Stream.RESIDUAL`."""
    high, low = noise_bits(key, [0]), noise_bits(key, [1])
    return high * 2.0**-31 + (low >> np.int32(9)) * 2.0**-53


def column_positions(trees: Trees, positions: Sequence[int]) -> list[list[int]]:
    """For each row and column, the index in the sequence of the token that the target decides there; R lists of N + 1.

    positions: of each row, that of the token after the root. A node's own token stands where its parent's column says.
    """
    n_rows, n = trees.tokens.shape
    if len(positions) != n_rows:
        raise VerificationError(f"there are {len(positions)} positions for {n_rows} rows; expected one for each")
    there = numpy_of(checked(trees))
    parents = np.where(there, numpy_of(trees.parents), -1).tolist()
    columns = []
    for row, position in enumerate(positions):
        at = [int(position)]
        for node in range(n):
            at.append(at[parents[row][node] + 1] + 1)
        columns.append(at)
    return columns


def seeded_draws(trees: Trees, seeds: Sequence[int], positions: Sequence[int]) -> Draws:
    """The numbers that the engine uses for these rows. `seeds` and `positions` are those of `coupled`."""
    there = numpy_of(checked(trees))
    columns = np.where(there, numpy_of(trees.parents), -1).astype(np.int64) + 1
    keys = _column_keys(trees, seeds, positions, Stream.ACCEPT)
    at = NoiseKey(*(np.take_along_axis(np.asarray(half), columns, axis=1) for half in keys))
    accept = acceptance_uniforms(at, np.where(there, numpy_of(trees.tokens), 0))
    return Draws(accept, residual_uniforms(_column_keys(trees, seeds, positions, Stream.RESIDUAL)))


def token_noise(
    trees: Trees, seeds: Sequence[int], positions: Sequence[int], vocab_size: int
) -> npt.NDArray[np.float32]:
    """Gumbel noise float32[R, N + 1, V] of the target's own tokens. `seeds` and `positions` are those of `coupled`."""
    keys = _column_keys(trees, seeds, positions, Stream.TOKEN)
    each_token = NoiseKey(*(np.asarray(half)[:, :, None] for half in keys))
    return gumbel_from_bits(noise_bits(each_token, np.arange(vocab_size)))


def _column_keys(trees: Trees, seeds: Sequence[int], positions: Sequence[int], stream: Stream) -> NoiseKey:
    """The keys of each row and column: uint32[R, N + 1]."""
    n_rows, n = trees.tokens.shape
    if len(seeds) != n_rows:
        raise VerificationError(f"there are {len(seeds)} seeds for {n_rows} rows; expected one for each")
    keys = [
        noise_key(stream_seed(seed, stream), position)
        for seed, at in zip(seeds, column_positions(trees, positions), strict=True)
        for position in at
    ]
    halves = np.array(keys, dtype=np.uint32).reshape(n_rows, n + 1, 2)
    return NoiseKey(halves[:, :, 0], halves[:, :, 1])
