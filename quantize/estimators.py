"""From what was counted of an activation to the range it is quantized with.

All of them are functions of counts that do not depend on the order of the samples. Quantized ranges
hold zero by specification, so each estimator looks at the range widened to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["ESTIMATORS", "Histogram", "mse_range", "percentile_range"]

#: Name of each estimator, and what it does.
ESTIMATORS = {
    "minmax": "the smallest and the largest value of all samples",
    "moving-average": "the mean over samples of each sample's smallest and largest value",
    "percentile": "leaves out one value in 10,000 at each end; at 16 bits none",
    "mse": "the range with the least mean squared error of rounding and clipping",
}

#: The quantile at each end: Wu et al., 2020, "Integer quantization for deep learning inference",
#: section 3.3, calls 99.99 % and 99.999 % the best of percentiles.
PERCENTILE = 0.9999

# Places at each end that the search for the least error tries.
_CANDIDATES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """How often values fell into bins of one width; ``zeros`` were exactly zero, and are included.

    Bin ``i`` is [(base + i) width, (base + i + 1) width), width = 2^exponent.
    """

    exponent: int
    base: int
    zeros: int
    counts: np.ndarray[tuple[int], np.dtype[np.int64]]

    @property
    def edges(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """One edge more than there are bins."""
        places = np.arange(self.base, self.base + len(self.counts) + 1, dtype=np.float64)
        return places * math.ldexp(1.0, self.exponent)


def percentile_range(
    histogram: Histogram, low: float, high: float, bits: int = 8, share: float = PERCENTILE
) -> tuple[float, float]:
    """The quantiles 1 - share and share of the counted values, within [low, high].

    Inside of a bin, values count as evenly spread. At more than 8 bits it is [low, high] itself: what
    clipping costs is the same there, but the steps it makes finer are 256 times as fine already.
    """
    total = int(histogram.counts.sum())
    if total == 0 or bits > 8:
        return low, high
    cumulative = np.concatenate([[0], np.cumsum(histogram.counts)]) / total
    ends = np.interp([1 - share, share], cumulative, histogram.edges)
    return max(low, float(ends[0])), min(high, float(ends[1]))


def mse_range(histogram: Histogram, low: float, high: float, bits: int = 8) -> tuple[float, float]:
    """The range [a, b] within [low, high] whose quantization has the least squared error.

    E(a, b) = sum over x < a of (x - a)^2 + sum over x > b of (x - b)^2 + n step^2 / 12,
    step = (b - a) / (2^bits - 1), n the values that are inside and not exactly zero (zero has no
    rounding error). This is the clipping and rounding error of Sakr et al., 2022, "Optimal clipping
    and magnitude-aware differentiation" (OCTAV), eq. 4, for two ends.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    if low == high:
        return low, high
    edges = histogram.edges
    x = (edges[:-1] + edges[1:]) / 2
    n = histogram.counts.astype(np.float64)
    zero_bin = int(np.clip(-histogram.base, 0, len(n) - 1))
    if histogram.zeros and -histogram.base == zero_bin:
        n[zero_bin] -= histogram.zeros
    lows = np.linspace(low, 0.0, _CANDIDATES) if low < 0 else np.zeros(1)
    highs = np.linspace(0.0, high, _CANDIDATES) if high > 0 else np.zeros(1)
    below, above = _clipped(x, n, lows), _clipped(-x[::-1], n[::-1], -highs[::-1])[::-1]
    # Values that are clipped are counted as rounded too: at good ranges they are few.
    step = (highs[None, :] - lows[:, None]) / (2**bits - 1)
    error = below[:, None] + above[None, :] + n.sum() * step**2 / 12
    error[step <= 0] = np.inf
    a, b = np.unravel_index(int(np.argmin(error)), error.shape)
    return float(lows[a]), float(highs[b])


def _clipped(
    x: np.ndarray[tuple[int], np.dtype[np.float64]],
    n: np.ndarray[tuple[int], np.dtype[np.float64]],
    bounds: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """For each bound: the sum over x < bound of n (x - bound)^2; x ascending."""
    sums = [np.concatenate([[0.0], np.cumsum(n * x**power)]) for power in range(3)]
    upto = np.searchsorted(x, bounds)
    s0, s1, s2 = (total[upto] for total in sums)
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = s2 - 2 * bounds * s1 + bounds**2 * s0
    return found.clip(min=0.0)
