"""From counts to ranges, on counts whose best range is known."""

from __future__ import annotations

import numpy as np
import pytest

from tpu2edge.quantize.estimators import Histogram, mse_range, percentile_range


def histogram_of(values, *, exponent: int = -8) -> Histogram:
    places = np.floor(np.ldexp(values, -exponent)).astype(int)
    base = int(places.min())
    return Histogram(
        exponent=exponent,
        base=base,
        zeros=int((values == 0).sum()),
        counts=np.bincount(places - base),
    )


def error_of(values, low: float, high: float, bits: int = 8) -> float:
    """The squared error of really quantizing, zero held exactly."""
    step = (high - low) / (2**bits - 1)
    zero = np.rint(-low / step)
    stored = np.clip(np.rint(values / step) + zero, 0, 2**bits - 1)
    return float((((stored - zero) * step - values) ** 2).sum())


def test_percentiles_leave_one_in_ten_thousand_out_at_each_end():
    values = np.arange(100_000) / 1000.0  # 0 .. 99.999
    low, high = percentile_range(histogram_of(values), 0.0, 99.999)
    assert low == pytest.approx(0.01, abs=0.005)
    assert high == pytest.approx(99.99, abs=0.005)


def test_percentiles_do_not_clip_at_16_bits_where_it_costs_more_than_it_gains():
    values = np.random.default_rng(5).laplace(size=100_000)
    values[:5] = [-30, -25, 40, 50, 60]  # rare, and what the network may live on
    ends = float(values.min()), float(values.max())
    assert percentile_range(histogram_of(values), *ends, bits=16) == ends
    clipped = percentile_range(histogram_of(values), *ends)
    assert clipped[1] < 12
    assert error_of(values, *ends, bits=16) * 1000 < error_of(values, *clipped, bits=16)


def test_percentiles_stay_inside_what_was_seen():
    assert percentile_range(histogram_of(np.full(10, 0.3)), 0.3, 0.3) == (0.3, 0.3)


def test_one_outlier_is_clipped_for_least_squared_error_where_it_costs_less_than_steps():
    values = np.random.default_rng(0).normal(size=200_000)
    values[0] = 12.0  # outside of what 200,000 normal values reach, near enough to be cheap
    low, high = mse_range(histogram_of(values), values.min(), 12.0)
    # 200,000 steps^2 / 12 against (12 - b)^2 has its least near b = 8.7.
    assert high == pytest.approx(8.7, abs=0.3)
    assert error_of(values, low, high) < 0.85 * error_of(values, values.min(), 12.0)


def test_the_least_squared_error_is_within_two_percent_of_a_search_by_quantizing():
    values = np.random.default_rng(1).laplace(size=50_000)
    least, largest = values.min(), values.max()
    low, high = mse_range(histogram_of(values), least, largest)
    tried = [
        error_of(values, least * a, largest * b)
        for a in np.linspace(0.2, 1, 33)
        for b in np.linspace(0.2, 1, 33)
    ]
    assert error_of(values, low, high) <= 1.02 * min(tried)


def test_uniform_values_are_not_clipped():
    values = np.random.default_rng(2).uniform(-1, 3, 100_000)
    low, high = mse_range(histogram_of(values), values.min(), values.max())
    assert low == pytest.approx(-1, abs=0.03)
    assert high == pytest.approx(3, abs=0.03)


def test_zeros_have_no_rounding_error_so_they_do_not_pull_the_range_in():
    spread = np.random.default_rng(3).uniform(0, 1, 1000)
    mostly_zero = np.concatenate([spread, np.zeros(1_000_000)])
    assert mse_range(histogram_of(mostly_zero), 0.0, 1.0) == mse_range(
        histogram_of(spread), 0.0, 1.0
    )


def test_more_bits_clip_less():
    values = np.random.default_rng(4).laplace(size=50_000)
    ends = values.min(), values.max()
    at_8, at_16 = (mse_range(histogram_of(values), *ends, bits=bits) for bits in (8, 16))
    assert at_16[1] - at_16[0] > at_8[1] - at_8[0]


def test_nothing_but_zeros_gives_an_empty_range():
    assert mse_range(histogram_of(np.zeros(5)), 0.0, 0.0) == (0.0, 0.0)
