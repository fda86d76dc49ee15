"""Small least-squares problems: with non-negative unknowns, and straight lines with confidence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1..30; 1.96 beyond.
_T95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13,
    2.12, 2.11, 2.10, 2.09, 2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04,
)  # fmt: skip


def t95(degrees_of_freedom: int) -> float:
    """Half width of a 95 % interval in standard errors; infinite without a degree of freedom."""
    if degrees_of_freedom < 1:
        return math.inf
    return _T95[degrees_of_freedom - 1] if degrees_of_freedom <= len(_T95) else 1.96


def non_negative_least_squares(
    rows: NDArray[np.float64], values: NDArray[np.float64], sigmas: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The x >= 0 that minimises sum(((rows @ x - values) / sigmas)^2), and its standard errors.

    rows f64 [n, k], values f64 [n], sigmas f64 [n] > 0 -> (x f64 [k], errors f64 [k]). Active-set
    method of Lawson and Hanson (Solving Least Squares Problems, 1974, chapter 23). The errors are
    those of the unknowns that are not at their bound, scaled up where the residuals are larger than
    the sigmas say; an unknown at its bound has the error it would have if it were free.
    """
    a = rows / sigmas[:, None]
    b = values / sigmas
    n, k = a.shape
    # columns of similar length, so that one tolerance serves all
    scale = np.linalg.norm(a, axis=0)
    scale[scale == 0.0] = 1.0
    a = a / scale
    free = np.zeros(k, dtype=bool)
    x = np.zeros(k)
    tolerance = 1e-10 * max(1.0, float(np.linalg.norm(b)))
    for _ in range(10 * k + 10):
        gradient = a.T @ (b - a @ x)
        candidates = np.where(~free & (gradient > tolerance))[0]
        if candidates.size == 0:
            break
        free[candidates[np.argmax(gradient[candidates])]] = True
        while True:
            trial = np.zeros(k)
            trial[free] = np.linalg.lstsq(a[:, free], b, rcond=None)[0]
            if not np.any(free & (trial <= 0.0)):
                x = trial
                break
            # go towards the trial until the first unknown reaches its bound
            falling = free & (trial <= 0.0)
            steps = x[falling] / np.maximum(x[falling] - trial[falling], 1e-300)
            x = x + float(steps.min()) * (trial - x)
            free &= x > 1e-12
            x[~free] = 0.0
            if not free.any():
                break
    residual = a @ x - b
    dof = max(1, n - int(free.sum()))
    inflation = max(1.0, float(residual @ residual) / dof)
    errors = np.empty(k)
    for i in range(k):
        columns = free.copy()
        columns[i] = True
        covariance = np.linalg.pinv(a[:, columns].T @ a[:, columns])
        place = int(np.count_nonzero(columns[:i]))
        errors[i] = math.sqrt(max(0.0, inflation * covariance[place, place]))
    return x / scale, errors / scale


def levels_without_drift(
    seconds: NDArray[np.float64], groups: NDArray[np.intp], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """The level of each group, f64 [groups], of measurements that share a slow drift.

    seconds f64 [n] ascending, groups i64 [n] in 0..k-1 each of which occurs, values f64 [n].
    Generalised least squares: what neighbours in time have in common is drift (correlated over an
    eighth of the time), what they do not is noise. How much of either there is, is read off the
    residuals of the group means; with one measurement per group those are the levels.
    """
    n, k = len(values), int(groups.max()) + 1
    rows = np.zeros((n, k))
    rows[np.arange(n), groups] = 1.0
    means: NDArray[np.float64] = rows.T @ values / rows.sum(axis=0)
    residuals = values - means[groups]
    total = float(residuals @ residuals) / max(1, n - k)
    if n <= k or total == 0.0:
        return means
    white = min(total, float(np.mean(np.diff(residuals) ** 2)) / 2.0)
    reach = max(1e-9, float(seconds[-1] - seconds[0]) / 8.0)
    apart = np.abs(seconds[:, None] - seconds[None, :])
    covariance = (total - white) * np.exp(-apart / reach) + max(white, 1e-3 * total) * np.eye(n)
    weighted = np.linalg.solve(covariance, rows)
    levels: NDArray[np.float64] = np.linalg.solve(rows.T @ weighted, weighted.T @ values)
    return levels


@dataclass(frozen=True)
class Line:
    """value = intercept + slope * x, with 95 % half widths."""

    intercept: float
    slope: float
    intercept_half_width: float  # infinite with fewer than three points
    slope_half_width: float
    points: int
    largest_residual: float  # |measured - line|

    @property
    def rises(self) -> bool:
        """Whether the slope is larger than zero beyond its confidence interval."""
        return self.slope - self.slope_half_width > 0.0


def fit_line(
    x: NDArray[np.float64], values: NDArray[np.float64], sigmas: NDArray[np.float64]
) -> Line:
    """Weighted least squares. x, values, sigmas: f64 [n], n >= 1; one x gives a flat line."""
    n = len(x)
    weights = 1.0 / np.maximum(sigmas, 1e-12) ** 2
    if n < 2 or float(np.ptp(x)) == 0.0:
        mean = float(np.average(values, weights=weights))
        worst = float(np.abs(values - mean).max())
        return Line(mean, 0.0, math.inf, math.inf, n, worst)
    middle = float(np.average(x, weights=weights))
    mean = float(np.average(values, weights=weights))
    spread = float(np.sum(weights * (x - middle) ** 2))
    slope = float(np.sum(weights * (x - middle) * (values - mean)) / spread)
    intercept = mean - slope * middle
    residuals = values - intercept - slope * x
    dof = n - 2
    inflation = max(1.0, float(np.sum(weights * residuals**2)) / dof) if dof > 0 else 1.0
    slope_error = math.sqrt(inflation / spread)
    intercept_error = math.sqrt(inflation * (1.0 / float(weights.sum()) + middle**2 / spread))
    t = t95(dof)
    return Line(
        intercept, slope, t * intercept_error, t * slope_error, n, float(np.abs(residuals).max())
    )
