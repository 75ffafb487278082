"""Least squares within bounds, and what the points of a fit can tell apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

STEPS = 100
TELLS = 0.02
"""Root mean square by which times must change, in logarithms, when a parameter changes by 1 and the others do what they
can to undo it: less than that is below what step times are known to."""
NOISE = 1e-3
"""Nobody knows a step time better than that, as a share; a smaller residual proves nothing."""


class Solution(NamedTuple):
    """x: the parameters. residuals: at x. jacobian: of the residuals there, a column for each parameter."""

    x: Vector
    residuals: Vector
    jacobian: Vector

    @property
    def squares(self) -> float:
        """Sum of the squared residuals."""
        return float(self.residuals @ self.residuals)


def least_squares(residuals: Callable[[Vector], Vector], start: Vector, lower: Vector, upper: Vector) -> Solution:
    """The x between `lower` and `upper` near `start` with the least sum of squared residuals.

    Levenberg (1944) and Marquardt (1963): Gauss-Newton steps, damped until they help. A parameter that sits at a bound
    and would leave it takes no part in a step.
    """
    x = np.clip(start, lower, upper)
    r = residuals(x)
    damping = 1e-3
    for _ in range(STEPS):
        jacobian = _jacobian(residuals, x, lower, upper)
        gradient = jacobian.T @ r
        free = ~(((x <= lower) & (gradient > 0)) | ((x >= upper) & (gradient < 0)))
        if not free.any():
            break
        curvature = jacobian[:, free].T @ jacobian[:, free]
        scale = np.maximum(np.diag(curvature), 1e-9)
        before = float(r @ r)
        while damping < 1e12:
            trial = x.copy()
            trial[free] -= np.linalg.solve(curvature + np.diag(damping * scale), gradient[free])
            trial = np.clip(trial, lower, upper)
            r_trial = residuals(trial)
            if float(r_trial @ r_trial) < before:
                break
            damping *= 4
        else:
            break
        x, r, damping = trial, r_trial, max(damping / 10, 1e-12)
        if before - float(r @ r) < 1e-14 * before:
            break
    return Solution(x, r, _jacobian(residuals, x, lower, upper))


def told_apart(jacobian: Vector) -> list[int]:
    """Which parameters the points can tell apart, the plainest first.

    The parameter that moves the times most, then the one that moves them most in a way that the first can't, and so on
    (a QR decomposition with column pivoting), until what is left moves them by less than `TELLS`.
    """
    rest = jacobian.copy()
    found: list[int] = []
    for _ in range(rest.shape[1]):
        sizes = np.linalg.norm(rest, axis=0) / math.sqrt(len(rest))
        best = int(sizes.argmax())
        if sizes[best] < TELLS:
            break
        found.append(best)
        direction = rest[:, best] / np.linalg.norm(rest[:, best])
        rest = rest - np.outer(direction, direction @ rest)
    return found


def criterion(squares: float, n_points: int, n_parameters: int) -> float:
    """Akaike's information criterion, corrected for few points (Hurvich and Tsai 1989): of two fits the one with the
    smaller value is likely to predict better. Infinite where there are too few points to say."""
    spare = n_points - n_parameters - 1
    if spare <= 0:
        return math.inf
    mean = max(squares / n_points, NOISE**2)
    return n_points * math.log(mean) + 2 * n_parameters + 2 * n_parameters * (n_parameters + 1) / spare


def _jacobian(residuals: Callable[[Vector], Vector], x: Vector, lower: Vector, upper: Vector) -> Vector:
    columns = []
    for i in range(len(x)):
        low, high = x.copy(), x.copy()
        low[i], high[i] = max(x[i] - 1e-6, lower[i]), min(x[i] + 1e-6, upper[i])
        columns.append((residuals(high) - residuals(low)) / (high[i] - low[i]))
    return np.column_stack(columns)
