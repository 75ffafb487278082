"""Which draft tokens stay: pure functions over NumPy, torch and other arrays, usable without the engine.

    trees = Trees.of([DraftTree.chain([5, 7]), DraftTree([3, 4], [-1, -1])])
    greedy(trees, best)                                     # the target's most probable tokens
    coupled(trees, logits, seeds, positions)                # the target's samples, fixed by the seed
    rejection(trees, p, q, accept=draws.accept, final=draws.final)

Each returns `Verdicts`. `forerun.verify.trees` says how ragged rows are laid out.
"""

from forerun.verify.draws import Draws, seeded_draws, token_noise
from forerun.verify.rejection import rejection
from forerun.verify.trees import DrawnFrom, Trees, Verdict, Verdicts
from forerun.verify.walk import coupled, greedy, own_tokens

__all__ = [
    "DrawnFrom",
    "Draws",
    "Trees",
    "Verdict",
    "Verdicts",
    "coupled",
    "greedy",
    "own_tokens",
    "rejection",
    "seeded_draws",
    "token_noise",
]
