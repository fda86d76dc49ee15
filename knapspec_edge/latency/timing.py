"""Repeated measurements of one thing, summarised so that a noisy machine does less harm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]  # seconds, as time.perf_counter

# The outlier rule: of five or more samples, those further above the median than this many scaled
# median absolute deviations are not counted. Other load only ever adds time.
OUTLIER_DEVIATIONS = 5.0
_OUTLIER_MIN_SAMPLES = 5
_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_IQR_TO_SIGMA = 0.7413
_MEDIAN_EFFICIENCY = 1.2533  # standard error of a median against that of a mean


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of repeated measurements, in milliseconds."""

    median_ms: float
    low_ms: float
    high_ms: float
    samples: int
    dropped: int = 0  # outliers that are not counted in the other figures

    @classmethod
    def of(cls, samples_ms: Sequence[float]) -> Timing:
        """Raises statistics.StatisticsError without any sample."""
        kept = without_outliers(samples_ms)
        median = statistics.median(kept)
        low, high = kept[0], kept[-1]
        if len(kept) >= 4:
            low, _, high = statistics.quantiles(kept, n=4, method="inclusive")
        dropped = len(samples_ms) - len(kept)
        return cls(median, low, high, len(kept), dropped)

    @property
    def relative_spread(self) -> float:
        """Quartile distance over the median."""
        return (self.high_ms - self.low_ms) / self.median_ms if self.median_ms > 0.0 else 0.0

    def relative_error(self, prior: float) -> float:
        """Standard error of the median over the median.

        `prior` is the relative standard deviation of a single sample to assume where there are too
        few to tell; it counts as three samples.
        """
        if self.median_ms <= 0.0:
            return prior
        sigma = _IQR_TO_SIGMA * self.relative_spread
        seen = max(0, self.samples - 1)
        pooled = math.sqrt((3.0 * prior**2 + seen * sigma**2) / (3.0 + seen))
        return _MEDIAN_EFFICIENCY * pooled / math.sqrt(self.samples)


def without_outliers(samples_ms: Sequence[float]) -> list[float]:
    """The samples that the outlier rule keeps, in ascending order."""
    ordered = sorted(samples_ms)
    if len(ordered) < _OUTLIER_MIN_SAMPLES:
        return ordered
    middle = statistics.median(ordered)
    spread = _MAD_TO_SIGMA * statistics.median(abs(s - middle) for s in ordered)
    # at least a percent, so that samples that hardly differ are not told apart
    limit = middle + OUTLIER_DEVIATIONS * max(spread, 0.01 * middle)
    return [s for s in ordered if s <= limit]
