"""The numbers a verdict rests on, against figures worked out by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tpu2edge.runtime_check.metrics import OutputMeter, OutputMetrics, cosine, sqnr_db


def measured(*pairs: tuple[np.ndarray, np.ndarray]) -> OutputMetrics:
    meter = OutputMeter()
    for index, (reference, candidate) in enumerate(pairs):
        meter.add(f"s{index}", np.asarray(reference), np.asarray(candidate))
    return meter.metrics()


F = np.float32


def test_sqnr_is_ten_log_ten_of_a_ratio_of_powers():
    assert sqnr_db(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(20.0)
    assert sqnr_db(np.array([1.0]), np.array([1.01])) == pytest.approx(40.0)


def test_sqnr_of_equal_arrays_is_infinite_and_of_silence_against_noise_minus_infinite():
    assert sqnr_db(np.zeros(3), np.zeros(3)) == math.inf
    assert sqnr_db(np.zeros(3), np.ones(3)) == -math.inf


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, math.inf]),
    ],
)
def test_sqnr_with_a_nan_or_equal_infinities_is_nan_which_passes_no_bound(reference, candidate):
    value = sqnr_db(np.array(reference), np.array(candidate))
    assert math.isnan(value)
    assert not value >= -1000


def test_cosine_does_not_see_a_scale_which_is_why_no_default_rests_on_it():
    a = np.array([1.0, 2.0, -3.0])
    assert cosine(a, 3 * a) == pytest.approx(1.0)
    assert cosine(a, -a) == pytest.approx(-1.0)
    assert cosine(a, np.zeros(3)) == 0.0
    assert cosine(np.zeros(3), np.zeros(3)) == 1.0


def test_a_scale_off_by_one_percent_is_forty_decibels_and_one_percent_of_the_range():
    ref = np.array([0, 1, 2, 4], F)
    m = measured((ref, ref * F(1.01)))
    assert m.sqnr_db_worst == pytest.approx(40.0, abs=1e-3)
    assert m.max_abs == pytest.approx(0.04, rel=1e-5)
    assert m.range_error == pytest.approx(0.01, rel=1e-5)
    assert m.cosine_worst == pytest.approx(1.0)
    assert m.mismatch == 0.75  # 0 * 1.01 is still 0
    assert m.top1 == 1.0


def test_the_worst_sample_is_named_and_the_median_is_not_the_mean():
    ref = np.array([3, 4], F)
    noisy = [0.5, 0.005, 0.05]  # 20, 60, 40 dB
    m = measured(*((ref, ref + np.array([0, e], F)) for e in noisy))
    assert m.worst_sample == "s0"
    assert m.sqnr_db_worst == pytest.approx(20.0, abs=0.01)
    assert m.sqnr_db_median == pytest.approx(40.0, abs=0.01)
    assert m.samples == 3


def test_the_range_is_taken_over_all_samples():
    m = measured(
        (np.array([0.0, 1.0], F), np.array([0.0, 1.5], F)),
        (np.array([-4.0, 6.0], F), np.array([-4.0, 6.0], F)),
    )
    assert m.range_error == pytest.approx(0.05)
    assert (m.reference_min, m.reference_max) == (-4.0, 6.0)


def test_an_almost_silent_sample_does_not_decide_alone():
    loud, silent = np.array([1000.0, -1000.0], F), np.array([1e-6, -1e-6], F)
    m = measured((loud, loud), (silent, silent + F(1e-6)))
    assert m.sqnr_db_worst > 80  # on its own power it would be 0 dB
    assert m.worst_sample == "s1"


def test_top1_counts_rows_of_the_last_axis():
    ref = np.array([[1, 2, 3], [3, 2, 1]], F)
    m = measured((ref, np.array([[1, 2, 3], [1, 2, 3]], F)))
    assert m.top1 == 0.5
    assert measured((np.ones((4, 1), F), np.ones((4, 1), F))).top1 is None
    assert measured((np.array(1.0, F), np.array(1.0, F))).top1 is None


def test_integers_and_booleans_count_mismatches_and_have_no_decibels():
    m = measured((np.array([1, 2, 3, 4]), np.array([1, 2, 3, 9], np.int32)))
    assert m.mismatch == 0.25
    assert m.max_abs == 5
    assert m.sqnr_db_worst is m.sqnr_db_median is m.cosine_worst is m.range_error is None
    m = measured((np.array([True, False]), np.array([True, True])))
    assert m.mismatch == 0.5


def test_the_worst_sample_of_integers_is_the_one_with_most_mismatches():
    m = measured(
        (np.array([1, 2]), np.array([1, 2])),
        (np.array([1, 2]), np.array([0, 0])),
        (np.array([1, 2]), np.array([1, 0])),
    )
    assert m.worst_sample == "s1"


@pytest.mark.parametrize(
    ("reference", "candidate", "words"),
    [
        ([1.0, 2.0], [1.0, math.nan], "0 NaN in the reference, 1 here"),
        ([1.0, math.nan], [1.0, 2.0], "1 NaN in the reference, 0 here"),
        ([1.0, math.inf], [1.0, -math.inf], "1 +inf in the reference, 0 here"),
        ([1.0, 2.0], [1.0, -math.inf], "0 -inf in the reference, 1 here"),
        ([math.nan, 1.0], [1.0, math.nan], "1 NaN in the reference, 1 here"),
    ],
)
def test_a_nan_or_infinity_in_another_place_is_a_fault_that_no_average_hides(
    reference, candidate, words
):
    meter = OutputMeter()
    meter.add("fine", np.ones(2, F), np.ones(2, F))
    meter.add("bad", np.array(reference, F), np.array(candidate, F))
    meter.add("later", np.ones(2, F), np.array([1, math.nan], F))
    assert meter.pattern_fault == (words, "bad")


def test_the_same_nans_and_infinities_are_no_fault_and_the_rest_is_measured():
    ref = np.array([math.nan, math.inf, -math.inf, 3, 4], F)
    got = np.array([math.nan, math.inf, -math.inf, 3, 4.5], F)
    meter = OutputMeter()
    meter.add("s", ref, got)
    assert meter.pattern_fault is None
    assert meter.metrics().sqnr_db_worst == pytest.approx(20.0)
    assert meter.metrics().max_abs == 0.5


def test_constancy_is_seen_across_samples_not_within_one():
    meter = OutputMeter()
    meter.add("a", np.full(3, 2, F), np.full(3, 5, F))
    assert meter.reference_constant
    assert meter.candidate_constant
    meter.add("b", np.full(3, 4, F), np.full(3, 5, F))
    assert not meter.reference_constant
    assert meter.candidate_constant


def test_all_nan_is_constant_and_nan_beside_numbers_is_not():
    meter = OutputMeter()
    meter.add("a", np.full(3, math.nan, F), np.array([math.nan, 1, 2], F))
    assert meter.reference_constant
    assert not meter.candidate_constant


def test_an_empty_sample_before_a_full_one_proves_nothing_and_breaks_nothing():
    meter = OutputMeter()
    meter.add("empty", np.zeros((0, 3), F), np.zeros((0, 3), F))
    meter.add("full", np.eye(3, dtype=F), np.eye(3, dtype=F))
    assert not meter.reference_constant
    assert meter.metrics().sqnr_db_worst == math.inf
    assert meter.metrics().mismatch == 0.0


def test_no_sample_at_all_has_no_numbers():
    with pytest.raises(ValueError, match="no sample"):
        OutputMeter().metrics()


def test_a_constant_reference_that_is_missed_has_an_infinite_range_error():
    m = measured((np.full(3, 2, F), np.full(3, 2.5, F)))
    assert m.range_error == math.inf


def test_half_precision_is_measured_in_double():
    ref = np.array([60000.0, 60000.0], np.float16)  # their squares overflow float16
    assert measured((ref, ref)).sqnr_db_worst == math.inf
    assert measured((ref, ref * np.float16(0.5))).sqnr_db_worst == pytest.approx(6.02, abs=0.01)


def test_metrics_survive_json_with_infinities_and_nan():
    m = measured((np.zeros(2, F), np.zeros(2, F)))
    assert m.sqnr_db_worst == math.inf
    text = json.dumps(m.to_json(), allow_nan=False)
    assert OutputMetrics.from_json(json.loads(text)) == m


floats = hnp.arrays(
    F,
    hnp.array_shapes(max_dims=3, max_side=5),
    elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False),
)


@given(floats)
@settings(max_examples=50, deadline=None)
def test_any_array_equals_itself_and_its_numbers_survive_json(array):
    m = measured((array, array), (array, array))
    assert m.sqnr_db_worst == math.inf
    assert (m.max_abs, m.range_error, m.mismatch) == (0.0, 0.0, 0.0)
    assert m.top1 in (None, 1.0)
    assert OutputMetrics.from_json(json.loads(json.dumps(m.to_json()))) == m


@given(floats, st.floats(0.01, 100))
@settings(max_examples=50, deadline=None)
def test_sqnr_does_not_depend_on_the_unit(array, unit):
    wide = array.astype(np.float64)
    noise = np.linspace(-1, 1, wide.size).reshape(wide.shape) + 0.5
    plain = sqnr_db(wide, wide + noise)
    scaled = sqnr_db(wide * unit, (wide + noise) * unit)
    assert scaled == plain or scaled == pytest.approx(plain, abs=1e-3)
