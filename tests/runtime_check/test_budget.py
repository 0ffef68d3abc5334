"""Budgets as text: what is read, what is refused, and what the defaults hold a recipe to."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu2edge.errors import OptionError
from tpu2edge.quantize.recipes import PLAIN_NAMES, RECIPES
from tpu2edge.runtime_check.budget import DEFAULT_SOURCES, Bound, Budget, default_budget
from tpu2edge.runtime_check.metrics import OutputMeter, OutputMetrics


def metrics_of(reference: object, candidate: object) -> OutputMetrics:
    meter = OutputMeter()
    meter.add("s", np.asarray(reference), np.asarray(candidate))
    return meter.metrics()


def refusal(*texts: str) -> str:
    with pytest.raises(OptionError) as caught:
        Budget.parse(*texts)
    return str(caught.value)


def test_bounds_for_all_outputs_and_for_one_are_read():
    budget = Budget.parse("sqnr>=30dB, cosine>=0.999", "logits:top1>=99%")
    assert budget.bounds("features", is_float=True) == (
        Bound(metric="sqnr", value=30.0),
        Bound(metric="cosine", value=0.999),
    )
    assert budget.bounds("logits", is_float=True) == (Bound(metric="top1", value=0.99),)
    assert budget.source == "given"


def test_several_texts_for_one_output_add_up():
    budget = Budget.parse("a:sqnr>=30", "a:max_abs<=0.5")
    assert budget.describe("a", is_float=True) == "sqnr>=30dB,max_abs<=0.5"


def test_a_name_may_hold_colons_and_dots():
    budget = Budget.parse("opts.a:b:sqnr>=3e1dB")
    assert budget.outputs == {"opts.a:b": (Bound(metric="sqnr", value=30.0),)}


def test_what_a_text_leaves_open_stays_as_the_default():
    base = default_budget("float32")
    budget = Budget.parse("logits:sqnr>=25dB", base=base)
    assert budget.bounds("other", is_float=True) == base.floats
    assert budget.bounds("ids", is_float=False) == base.integers
    assert Budget.parse("ids:allow_constant", base=base).source == base.source


def test_bounds_that_mean_something_for_integers_hold_for_integers_too():
    budget = Budget.parse("sqnr>=30dB,mismatch<=1%")
    assert budget.bounds("ids", is_float=False) == (Bound(metric="mismatch", value=0.01),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("snr>=30", "closest is 'sqnr'"),
        ("psnr>=30", "unknown metric 'psnr'"),
        ("sqnr<=30", r"write sqnr>=NUMBER"),
        ("max_abs>=1", "write max_abs<=NUMBER"),
        ("sqnr>=high", "is no bound"),
        ("sqnr>=1e", "is no number"),
        ("sqnr>=1e999", "is no number"),
        ("sqnr>30", "is no bound"),
        ("cosine>=40dB", "has no dB"),
        ("sqnr>=40%", "is no share"),
        ("", "holds no bound"),
        ("logits:", "holds no bound"),
        ("allow_constant", "needs the output"),
    ],
)
def test_a_text_that_makes_no_sense_is_refused_with_what_would(text, words):
    assert words in refusal(text)


def test_a_bound_that_holds_says_nothing_and_one_that_does_not_says_wanted_and_got():
    ref = np.array([3.0, 4.0], np.float32)
    metrics = metrics_of(ref, ref + np.array([0, 0.5], np.float32))
    (bound,) = Budget.parse("sqnr>=19dB").floats
    assert bound.check(metrics) is None
    (bound,) = Budget.parse("sqnr>=25dB").floats
    assert bound.check(metrics) == "sqnr 20 dB, wanted at least 25 dB"
    (bound,) = Budget.parse("max_abs<=0.1").floats
    assert bound.check(metrics) == "max_abs 0.5, wanted at most 0.1"


@pytest.mark.parametrize("text", ["sqnr>=-1000", "max_abs<=1e30", "cosine>=-1", "range_error<=9"])
def test_nan_passes_no_bound(text):
    metrics = OutputMetrics(
        samples=1,
        sqnr_db_worst=math.nan,
        sqnr_db_median=math.nan,
        max_abs=math.nan,
        range_error=math.nan,
        cosine_worst=math.nan,
        top1=math.nan,
        mismatch=math.nan,
        worst_sample="s",
        reference_min=0.0,
        reference_max=1.0,
    )
    (bound,) = Budget.parse(text).floats
    assert "nan" in (bound.check(metrics) or "")


def test_a_bound_tells_whether_it_applies():
    integers = metrics_of([1, 2], [1, 2])
    single = metrics_of(np.ones((3, 1), np.float32), np.ones((3, 1), np.float32))
    assert not Bound(metric="sqnr", value=1.0).applies(integers)
    assert Bound(metric="mismatch", value=0.0).applies(integers)
    assert not Bound(metric="top1", value=1.0).applies(single)
    assert Bound(metric="sqnr", value=1.0).applies(single)


def test_outputs_that_the_model_does_not_have_are_listed():
    budget = Budget.parse("a:sqnr>=1", "b:allow_constant", "c:sqnr>=1")
    assert budget.unknown_outputs(["c"]) == ["a", "b"]


def test_every_recipe_has_a_default_with_its_source():
    for recipe in (*RECIPES, "static_wi8_ai8", "static_wi8_ai16"):
        budget = default_budget(recipe)
        assert budget.floats
        assert budget.integers
        assert any(source in budget.source for source in DEFAULT_SOURCES.values())


@pytest.mark.parametrize(
    ("recipe", "sqnr"),
    [
        ("float32", 80),
        ("float16", 45),
        ("weight_only_wi8_afp32", 18),
        ("dynamic_wi8_afp32", 10),
        ("dynamic_legacy_wi8_afp32", 10),
        ("dynamic_wi4b32_afp32", 0),
        ("weight_only_wi4_afp32", 0),
        ("static_wi8_ai8", 5),
        ("int8-static", 5),
        ("int16-static-io", 10),
        ("int4-block32", 0),
        ("dynamic_wi2c_hr_afp32", 0),
        ("int8-weight-only", 18),
        ("weight_only_wi8_afp32-octav", 18),
        ("dynamic_wi8_afp32-oscar", 10),
        ("weight_only_wi8_afp32-gptq", 18),
        ("mine.json", 10),
        ("int4.json", 10),
    ],
)
def test_the_default_of_each_family_is_its_own(recipe, sqnr):
    assert Bound(metric="sqnr", value=float(sqnr)) in default_budget(recipe).floats


def test_the_float_default_passes_right_conversions_and_fails_a_dropped_transpose():
    bound = next(b for b in default_budget("float32").floats if b.metric == "range_error")
    assert 2e-5 < bound.value < 1.6e-3  # measured: right ones at most, wrong ones at least


def test_only_unknown_recipes_have_the_default_of_a_custom_one():
    for recipe in (*RECIPES, *PLAIN_NAMES, "int8-static-octav"):
        assert not default_budget(recipe).source.startswith("default for custom")
    assert "not one of the known" in default_budget("mine.json").source


def test_no_default_rests_on_cosine():
    for recipe in (*RECIPES, "static_wi8_ai8"):
        assert all(bound.metric != "cosine" for bound in default_budget(recipe).floats)


bounds = st.builds(
    Bound,
    metric=st.sampled_from(
        ["sqnr", "sqnr_median", "range_error", "max_abs", "cosine", "top1", "mismatch"]
    ),
    value=st.floats(-1e6, 1e6, allow_nan=False),
)


@given(bounds)
@settings(max_examples=100, deadline=None)
def test_a_bound_reads_back_as_the_same_bound(bound):
    assert Budget.parse(str(bound)).floats == (bound,)


@given(
    st.lists(bounds, max_size=3),
    st.dictionaries(st.text("abc.:_", min_size=1), st.lists(bounds, min_size=1, max_size=2)),
    st.frozensets(st.sampled_from(["x", "y"])),
)
@settings(max_examples=50, deadline=None)
def test_a_budget_survives_json(floats, outputs, constant):
    budget = Budget(
        floats=tuple(floats),
        integers=(Bound(metric="mismatch", value=1 / 3),),
        outputs={name: tuple(found) for name, found in outputs.items()},
        may_be_constant=constant,
        source="made up",
    )
    assert Budget.from_json(json.loads(json.dumps(budget.to_json()))) == budget


@pytest.mark.parametrize(
    ("text", "noise", "margin"),
    [
        ("sqnr>=20dB", 0.1, 0.0),
        ("sqnr>=26dB", 0.1, -6.0),
        ("range_error<=0.2", 0.1, 6.02),
        ("max_abs<=0.05", 0.1, -6.02),
    ],
)
def test_the_margin_of_a_bound_is_told_in_decibels(text, noise, margin):
    reference = np.array([1.0, 0.0, 0.0, 0.0])
    (bound,) = Budget.parse(text).floats
    metrics = metrics_of(reference, reference + np.array([noise, 0, 0, 0]))
    assert bound.margin_db(metrics) == pytest.approx(margin, abs=0.01)
    assert (bound.margin_db(metrics) >= 0) == (bound.check(metrics) is None)


def test_a_nan_has_no_margin():
    (bound,) = Budget.parse("sqnr>=20dB").floats
    metrics = replace(metrics_of(np.ones(2), np.ones(2)), sqnr_db_worst=math.nan)
    assert bound.margin_db(metrics) == -math.inf


def test_a_relaxed_budget_adds_to_the_noise_and_not_to_what_is_needed() -> None:
    budget = Budget.parse(
        "sqnr>=40dB,range_error<=0.01,max_abs<=1,mismatch<=0.1,top1>=0.99", "z:sqnr>=20dB"
    )
    assert budget.relaxed(0.0, "nothing") == budget
    relaxed = budget.relaxed(0.02, "phone", {"x": 0.01, "y": 0.0, "z": 0.1})
    # 20 log10(1 / 0.02) = 33.979, told as 33.97: never more than the noise allows.
    rest = "range_error<=0.03,max_abs<=1,mismatch<=0.12,top1>=0.99"
    assert relaxed.describe("x", is_float=True) == f"sqnr>=33.97dB,{rest}"
    assert relaxed.describe("y", is_float=True) == f"sqnr>=40dB,{rest}"
    assert relaxed.describe("z", is_float=True) == "sqnr>=13.97dB"
    # Not measured: the share of the range stands in. 20 log10(1 / 0.03) = 30.458.
    assert relaxed.describe("other", is_float=True) == f"sqnr>=30.45dB,{rest}"
    assert relaxed.describe("other", is_float=False) == "max_abs<=1,mismatch<=0.12,top1>=0.99"
    assert relaxed.source == "given; phone"
