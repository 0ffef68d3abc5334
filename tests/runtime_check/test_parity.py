"""The checker is tested by making it fail: every kind of wrong file, on real LiteRT."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu2edge.errors import BundleError, DataError, OptionError
from tpu2edge.files import sha256_of
from tpu2edge.runtime_check.budget import Budget, default_budget
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.parity import (
    REPORT_FORMAT_VERSION,
    CaseReport,
    ErrorSplit,
    ParityReport,
    check_model,
)
from tpu2edge.runtime_check.reference import Reference, ReferenceWriter
from tpu2edge.runtime_check.task_metric import load_task_metric
from tpu2edge.types import EdgeModel, Sample, Signature, TensorSpec, Verdict

F = np.float32
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((3, 3)).astype("float32")
SHIFT = RNG.standard_normal((3, 3)).astype("float32")
SAMPLES = RNG.standard_normal((4, 3, 3)).astype("float32")


def spec(name: str, shape: tuple[int, ...] = (3, 3), dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype)


def signature_of(outputs: Mapping[str, Any]) -> Signature:
    return Signature(
        name="serving_default",
        inputs=(spec("x"),),
        outputs=tuple(
            spec(name, np.shape(value), np.asarray(value).dtype.name)
            for name, value in outputs.items()
        ),
    )


Compute = Callable[[np.ndarray], dict[str, np.ndarray]]


def affine(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"scaled": x * WEIGHT, "shifted": x + SHIFT}


def write_reference(
    path: Path, compute: Compute = affine, samples: Any = SAMPLES, **more: Any
) -> Reference:
    head = {"provider": "eager", "precision": "f32", "data": {"kind": "given"}, **more}
    with ReferenceWriter(path, signature_of(compute(samples[0])), **head) as writer:
        for index, x in enumerate(samples):
            writer.add(Sample(id=f"s{index}", inputs={"x": x}), compute(x))
    return Reference.load(path)


def edge_model(path: Path, recipe: str = "float32") -> EdgeModel:
    return EdgeModel(
        path=path,
        signatures=(),
        recipe=recipe,
        sha256=sha256_of(path),
        size_bytes=path.stat().st_size,
    )


FLOAT = default_budget("float32")


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    return write_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def right(make_affine) -> EdgeModel:
    return edge_model(make_affine(WEIGHT, SHIFT))


def codes(case: CaseReport) -> list[str]:
    return [reason.code for reason in case.reasons]


def test_a_right_file_passes_with_the_samples_and_the_bounds_in_the_report(right, reference):
    report = check_model(right, reference, FLOAT)
    assert report.verdict is Verdict.PASS
    assert report.exit_code == 0
    assert report.samples == 4
    for name in ("scaled", "shifted"):
        case = report.case(name)
        assert case.verdict is Verdict.PASS
        assert case.reasons == ()
        assert case.metrics.samples == 4
        assert case.metrics.range_error < 1e-7
        assert case.budget == "range_error<=0.0001,sqnr>=80dB"
    times = report.times[f"{right.path.name}@host"]
    assert times["samples"] == 4
    assert times["peak_rss_kb"] > 10_000


def test_a_scale_off_by_one_percent_fails_that_output_only(make_affine, reference):
    report = check_model(edge_model(make_affine(WEIGHT * F(1.01), SHIFT)), reference, FLOAT)
    assert report.verdict is Verdict.FAIL
    assert report.exit_code == 1
    case = report.case("scaled")
    assert case.metrics.cosine_worst > 0.9999  # which is why cosine is not asked
    assert case.metrics.sqnr_db_worst == pytest.approx(40, abs=0.01)
    assert codes(case) == ["budget", "budget"]
    assert "sqnr 40 dB, wanted at least 80 dB (worst sample 's" in case.reasons[1].text
    assert report.case("shifted").verdict is Verdict.PASS


def test_one_wrong_sample_is_enough_and_is_named(right, tmp_path):
    def compute(x):
        out = affine(x)
        if np.array_equal(x, SAMPLES[2]):
            out["scaled"] = out["scaled"] + F(0.01)
        return out

    case = check_model(right, write_reference(tmp_path, compute), FLOAT).case("scaled")
    assert case.verdict is Verdict.FAIL
    assert case.metrics.worst_sample == "s2"
    assert all("'s2'" in reason.text for reason in case.reasons)


def test_two_outputs_exchanged_fail_both(make_affine, reference):
    swapped = make_affine(WEIGHT, SHIFT, outputs={"scaled": "shifted", "shifted": "scaled"})
    report = check_model(edge_model(swapped), reference, FLOAT)
    assert [case.verdict for case in report.cases] == [Verdict.FAIL, Verdict.FAIL]


def test_outputs_are_matched_by_name_not_by_position(make_affine, reference):
    reordered = make_affine(WEIGHT, SHIFT, outputs={"shifted": "shifted", "scaled": "scaled"})
    assert check_model(edge_model(reordered), reference, FLOAT).verdict is Verdict.PASS


def test_a_transpose_that_cosine_does_not_see_fails(make_affine, tmp_path):
    weight = F(100) + WEIGHT * F(0.05)
    samples = np.abs(SAMPLES) + 1

    def compute(x):
        return {"scaled": x * weight, "shifted": x + SHIFT}

    reference = write_reference(tmp_path, compute, samples)
    case = check_model(edge_model(make_affine(weight.T, SHIFT)), reference, FLOAT).case("scaled")
    assert case.metrics.cosine_worst > 0.9999
    assert case.verdict is Verdict.FAIL
    assert any("range_error" in reason.text for reason in case.reasons)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (np.nan, "0 NaN in the reference, 1 here"),
        (np.inf, r"\+inf|-inf"),
    ],
)
def test_a_nan_or_infinity_that_the_reference_lacks_fails(make_affine, reference, bad, words):
    shift = SHIFT.copy()
    shift[1, 2] = bad
    case = check_model(edge_model(make_affine(WEIGHT, shift)), reference, FLOAT).case("shifted")
    assert case.verdict is Verdict.FAIL
    assert codes(case)[0] == "nan-pattern"
    assert "sample 's0'" in case.reasons[0].text
    assert re.search(words, case.reasons[0].text)


def test_an_infinity_of_the_other_sign_fails_and_of_the_same_sign_passes(make_affine, tmp_path):
    shift = SHIFT.copy()
    shift[0, 0] = np.inf

    def compute(x):
        return {"scaled": x * WEIGHT, "shifted": x + shift}

    reference = write_reference(tmp_path, compute)
    same = check_model(edge_model(make_affine(WEIGHT, shift)), reference, FLOAT)
    assert same.verdict is Verdict.PASS
    other = shift.copy()
    other[0, 0] = -np.inf
    case = check_model(edge_model(make_affine(WEIGHT, other)), reference, FLOAT).case("shifted")
    assert codes(case) == ["nan-pattern"]
    # A finite number in place of the infinity (a clamp) is a fault, too.
    other[0, 0] = np.finfo(F).max
    case = check_model(edge_model(make_affine(WEIGHT, other)), reference, FLOAT).case("shifted")
    assert codes(case) == ["nan-pattern"]


def test_a_nan_in_the_reference_that_the_file_swallows_fails(right, tmp_path):
    def compute(x):
        out = affine(x)
        out["scaled"][0, 0] = np.nan
        return out

    case = check_model(right, write_reference(tmp_path, compute), FLOAT).case("scaled")
    assert case.verdict is Verdict.FAIL
    assert case.reasons[0].text == "sample 's0': 1 NaN in the reference, 0 here"


def test_a_dropped_output_fails_all_with_the_name_of_what_lacks(make_affine, reference):
    path = make_affine(WEIGHT, SHIFT, outputs={"scaled": "scaled"})
    report = check_model(edge_model(path), reference, FLOAT)
    assert report.verdict is Verdict.FAIL
    for case in report.cases:
        assert codes(case) == ["outputs"]
        assert "has 1 outputs, the reference 2: it lacks ['shifted']" in case.reasons[0].text


def test_an_output_too_many_or_renamed_fails(make_affine, reference):
    path = make_affine(
        WEIGHT, SHIFT, outputs={"scaled": "scaled", "shifted": "shifted", "more": "scaled"}
    )
    report = check_model(edge_model(path), reference, FLOAT)
    assert "it has besides ['more']" in report.cases[0].reasons[0].text
    path = make_affine(WEIGHT, SHIFT, outputs={"scaled": "scaled", "output_1": "shifted"})
    report = check_model(edge_model(path), reference, FLOAT)
    (text,) = {case.reasons[0].text for case in report.cases}
    assert "lacks ['shifted'] and has besides ['output_1']" in text


def test_a_wrong_shape_fails_with_both_shapes(right, tmp_path):
    def compute(x):
        return {"scaled": (x * WEIGHT).reshape(9), "shifted": x + SHIFT}

    report = check_model(right, write_reference(tmp_path, compute), FLOAT)
    case = report.case("scaled")
    assert codes(case) == ["shape"]
    assert case.reasons[0].text == "sample 's0': shape [3, 3], expected [9]"
    assert case.metrics is None
    assert report.case("shifted").verdict is Verdict.PASS


def test_a_shape_that_would_broadcast_fails_all_the_same(make_affine, tmp_path):
    def compute(x):
        return {"scaled": (x * WEIGHT)[None], "shifted": x + SHIFT}

    report = check_model(
        edge_model(make_affine(WEIGHT, SHIFT)), write_reference(tmp_path, compute), FLOAT
    )
    assert codes(report.case("scaled")) == ["shape"]


def test_a_wrong_type_fails_with_both_types(right, tmp_path):
    def compute(x):
        return {"scaled": np.round(x * WEIGHT).astype(np.int32), "shifted": x + SHIFT}

    case = check_model(right, write_reference(tmp_path, compute), FLOAT).case("scaled")
    assert codes(case) == ["dtype"]
    assert "type float32, expected int32" in case.reasons[0].text


def test_a_constant_output_fails_although_its_budget_holds(make_affine, reference):
    path = edge_model(make_affine(np.zeros((3, 3)), SHIFT))
    case = check_model(path, reference, Budget.parse("sqnr>=-1000dB")).case("scaled")
    assert codes(case) == ["constant-output"]
    assert case.verdict is Verdict.FAIL


def test_a_constant_reference_proves_nothing_unless_it_is_said_to_be_so(make_affine, tmp_path):
    zero = np.zeros((3, 3), F)

    def compute(x):
        return {"scaled": x * zero + 0, "shifted": x + SHIFT}

    reference = write_reference(tmp_path, compute)
    model = edge_model(make_affine(zero, SHIFT))
    case = check_model(model, reference, FLOAT).case("scaled")
    assert case.verdict is Verdict.FAIL
    assert codes(case) == ["constant-reference"]
    assert "scaled:allow_constant" in case.reasons[0].text
    for allowed in (
        check_model(model, reference, Budget.parse("scaled:allow_constant", base=FLOAT)),
        check_model(model, reference, FLOAT, constant_outputs=frozenset({"scaled"})),
    ):
        assert allowed.verdict is Verdict.PASS
        assert codes(allowed.case("scaled")) == ["flag-constant"]


def test_a_missing_sample_is_told(right, tmp_path):
    write_reference(tmp_path)
    file = tmp_path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["samples"].append("s4")
    file.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="sample 4 is in none"):
        check_model(right, Reference.load(tmp_path), FLOAT)


def test_a_session_that_gives_fewer_samples_than_asked_is_not_believed(
    right, reference, monkeypatch
):
    real = Session.run

    def fewer(self, signature, samples):
        outputs = list(real(self, signature, samples))
        return iter(outputs[:-1])

    monkeypatch.setattr(Session, "run", fewer)
    with pytest.raises(ValueError, match="shorter"):
        check_model(right, reference, FLOAT)


def test_a_reference_without_samples_is_refused(right, tmp_path):
    writer = ReferenceWriter(
        tmp_path, signature_of(affine(SAMPLES[0])), provider="eager", precision="f32", data={}
    )
    with pytest.raises(DataError, match="no sample"):
        check_model(right, writer.close(), FLOAT)


def test_a_worker_killed_between_samples_is_an_error_not_a_fail(right, reference, monkeypatch):
    real = Session.run

    def killed(self, signature, samples):
        for index, out in enumerate(real(self, signature, samples)):
            yield out
            if index == 0:
                os.kill(self._process.pid, signal.SIGKILL)

    monkeypatch.setattr(Session, "run", killed)
    report = check_model(right, reference, FLOAT)
    assert report.verdict is Verdict.ERROR
    assert "SIGKILL" in report.cases[0].reasons[0].text


def test_a_damaged_file_is_an_error(tmp_path, right, reference):
    path = tmp_path / "cut.tflite"
    path.write_bytes(right.path.read_bytes()[:200])
    report = check_model(edge_model(path), reference, FLOAT)
    assert report.verdict is Verdict.ERROR


# ------------------------------------------------------------------------------ inputs and names


def test_a_budget_for_an_output_that_is_not_there_lists_those_that_are(right, reference):
    with pytest.raises(OptionError, match="no output") as error:
        check_model(right, reference, Budget.parse("logits:sqnr>=1"))
    assert "['scaled', 'shifted']" in error.value.do


def test_a_sample_with_other_names_is_refused_with_those_of_the_file(right, tmp_path):
    signature = Signature(
        name="serving_default", inputs=(spec("y"),), outputs=(spec("scaled"), spec("shifted"))
    )
    with ReferenceWriter(tmp_path, signature, provider="eager", precision="f32", data={}) as writer:
        writer.add(Sample(id="s0", inputs={"y": SAMPLES[0]}), affine(SAMPLES[0]))
    with pytest.raises(DataError, match=r"'s0' has the inputs \['y'\], the file takes \['x'\]"):
        check_model(right, Reference.load(tmp_path), FLOAT)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (np.zeros((3, 2), F), r"shape \[3, 2\], expected \[3, 3\]"),
        (np.zeros((3,), F), r"shape \[3\], expected \[3, 3\]"),
        (np.zeros((3, 3), np.int32), "is int32, expected float32"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(right, tmp_path, x, words):
    signature = signature_of(affine(SAMPLES[0]))
    with ReferenceWriter(tmp_path, signature, provider="eager", precision="f32", data={}) as writer:
        writer.add(Sample(id="s0", inputs={"x": x}), affine(SAMPLES[0]))
    with pytest.raises(DataError, match=words):
        check_model(right, Reference.load(tmp_path), FLOAT)


def typed_reference(path: Path, count: Any, out: Any) -> Reference:
    inputs = {
        "scalar": np.array(3.0, F),
        "flag": np.array([True, False, True]),
        "count": count,
        "pixel": np.array([0, 255, 7, 1], np.uint8),
        "empty": np.zeros((0, 3), F),
    }
    outputs = {
        "scalar": np.array(1.5, F),
        "flag": ~inputs["flag"],
        "count": out,
        "pixel": inputs["pixel"],
        "empty": inputs["empty"],
    }
    signature = Signature(
        name="serving_default",
        inputs=tuple(spec(n, a.shape, a.dtype.name) for n, a in inputs.items()),
        outputs=tuple(
            spec(n, a.shape, "int32" if n == "count" else a.dtype.name) for n, a in outputs.items()
        ),
    )
    with ReferenceWriter(path, signature, provider="eager", precision="f32", data={}) as writer:
        writer.add(Sample(id="s0", inputs=inputs), outputs)
    return Reference.load(path)


ALLOW = [f"{name}:allow_constant" for name in ("scalar", "empty")]


def test_scalars_booleans_integers_and_empty_outputs_are_compared(typed_tflite, tmp_path):
    count = np.array([[1, 2], [3, 4]])  # int64, as torch has it
    budget = Budget.parse(*ALLOW, base=FLOAT)
    reference = typed_reference(tmp_path / "right", count, 3 * count)
    report = check_model(edge_model(typed_tflite), reference, budget)
    assert report.verdict is Verdict.PASS, report.cases
    wrong = 3 * count
    wrong[1, 1] += 1
    reference = typed_reference(tmp_path / "wrong", count, wrong)
    report = check_model(edge_model(typed_tflite), reference, budget)
    assert [case.output for case in report.cases if case.verdict is Verdict.FAIL] == ["count"]
    assert "mismatch 0.25, wanted at most 0" in report.case("count").reasons[0].text


def test_an_int64_sample_that_does_not_fit_into_int32_is_refused_not_wrapped(
    typed_tflite, tmp_path
):
    count = np.array([[1, 2], [3, 2**31]])
    reference = typed_reference(tmp_path, count, count)
    with pytest.raises(DataError, match="'count' is int64, expected int32"):
        check_model(edge_model(typed_tflite), reference, Budget.parse(*ALLOW, base=FLOAT))


def test_a_bound_that_cannot_apply_to_an_output_proves_nothing(typed_tflite, tmp_path):
    count = np.array([[1, 2], [3, 4]])
    reference = typed_reference(tmp_path, count, 3 * count)
    budget = Budget.parse("count:sqnr>=30dB", *ALLOW, base=FLOAT)
    case = check_model(edge_model(typed_tflite), reference, budget).case("count")
    assert case.verdict is Verdict.FAIL
    assert codes(case) == ["no-bound"]


def test_the_signature_that_is_asked_for_is_checked(two_signatures_tflite, tmp_path):
    def compute(x):
        return {"scaled": 10 * x, "shifted": x + 5}

    samples = np.arange(6, dtype=F).reshape(3, 2)
    reference = write_reference(tmp_path, compute, samples)
    model = edge_model(two_signatures_tflite)
    assert check_model(model, reference, FLOAT, signature="decode").verdict is Verdict.PASS
    assert check_model(model, reference, FLOAT, signature="encode").verdict is Verdict.FAIL
    with pytest.raises(OptionError, match="no signature 'serving_default'"):
        check_model(model, reference, FLOAT)


def test_a_signature_that_the_file_lacks_is_refused_even_if_it_has_only_one(right, reference):
    with pytest.raises(OptionError, match="no signature 'prefill'") as error:
        check_model(right, reference, FLOAT, signature="prefill")
    assert "serving_default" in error.value.do


def test_a_dynamic_file_is_checked_at_each_size(dynamic_tflite, tmp_path):
    def compute(x):
        return {"scaled": 2 * x, "shifted": x + 1}

    samples = [RNG.standard_normal((n, 2)).astype(F) for n in (1, 4, 2)]
    reference = write_reference(tmp_path, compute, samples)
    report = check_model(edge_model(dynamic_tflite), reference, FLOAT)
    assert report.verdict is Verdict.PASS
    assert report.samples == 3


# ------------------------------------------------------------------------------------- quantized


@pytest.fixture(scope="module")
def image_reference(tmp_path_factory, small_tflite) -> Reference:
    images = np.random.default_rng(0).standard_normal((8, 1, 2, 6, 6)).astype(F)
    with Session(small_tflite) as session:
        outputs = list(session.run("serving_default", [{"image": image} for image in images]))
        signature = session.signatures[0]
    with ReferenceWriter(
        tmp_path_factory.mktemp("images"), signature, provider="external", precision="f32", data={}
    ) as writer:
        for index, (image, out) in enumerate(zip(images, outputs, strict=True)):
            writer.add(Sample(id=f"i{index}", inputs={"image": image}), out)
    return Reference.load(writer.path)


def test_a_static_int8_file_is_fed_in_its_own_scale_and_compared_in_real_numbers(
    small_tflite, image_reference
):
    path = small_tflite.with_name("small.static_wi8_ai8.tflite")
    report = check_model(
        edge_model(path, "static_wi8_ai8"), image_reference, default_budget("static_wi8_ai8")
    )
    assert report.verdict is Verdict.PASS, report.cases
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner("serving_default")
    scale, zero = runner.get_input_details()["image"]["quantization"]
    out_scale, out_zero = runner.get_output_details()["logits"]["quantization"]
    largest = 0.0
    for index in range(len(image_reference)):
        stored = np.round(image_reference.inputs(index)["image"] / scale) + zero
        out = runner(image=np.clip(stored, -128, 127).astype(np.int8))["logits"]
        real = (out.astype(F) - out_zero) * out_scale
        difference = np.abs(real - image_reference.outputs(index)["logits"])
        largest = max(largest, float(difference.max()))
    metrics = report.case("logits", recipe="static_wi8_ai8").metrics
    assert metrics.max_abs == pytest.approx(largest, rel=1e-4)
    assert metrics.top1 == 1.0


def test_a_nan_for_an_int8_input_is_refused(small_tflite, tmp_path, image_reference):
    path = small_tflite.with_name("small.static_wi8_ai8.tflite")
    image = image_reference.inputs(0)["image"]
    image[0, 0, 0, 0] = np.nan
    with ReferenceWriter(
        tmp_path, image_reference.signature, provider="external", precision="f32", data={}
    ) as writer:
        writer.add(Sample(id="bad", inputs={"image": image}), image_reference.outputs(0))
    with pytest.raises(DataError, match="'bad': input 'image' holds NaN"):
        check_model(
            edge_model(path, "static_wi8_ai8"), Reference.load(tmp_path), default_budget("static")
        )


def test_the_split_says_which_step_spends_the_error(make_affine, tmp_path):
    def shifted_by(factor: float) -> Compute:
        def compute(x):
            wide = x.astype(np.float64)
            return {"scaled": wide * WEIGHT * (1 + factor), "shifted": wide + SHIFT}

        return compute

    signature = signature_of(affine(SAMPLES[0]))

    def kept(name: str, factor: float, **more: Any) -> Reference:
        with ReferenceWriter(
            tmp_path / name, signature, provider="eager", precision="f32", data={}, **more
        ) as writer:
            for index, x in enumerate(SAMPLES):
                writer.add(Sample(id=f"s{index}", inputs={"x": x}), shifted_by(factor)(x))
        return Reference.load(tmp_path / name)

    oracle = kept("oracle", 0)
    eager = kept("eager", 1e-5)  # 100 dB
    floating = kept("float", 1e-5 + 1e-4)  # 80 dB further
    model = edge_model(make_affine(WEIGHT * F(1 + 1e-5 + 1e-4 + 1e-2), SHIFT), "dynamic_wi8_afp32")
    budget = default_budget("dynamic_wi8_afp32")
    report = check_model(model, eager, budget, oracle=oracle, float_outputs=floating)
    split = report.case("scaled", recipe="dynamic_wi8_afp32").split
    assert split.float32_db == pytest.approx(100, abs=0.1)
    assert split.conversion_db == pytest.approx(80, abs=0.1)
    assert split.quantization_db == pytest.approx(40, abs=0.1)
    assert split.largest == "quantization"


def test_without_an_oracle_there_is_no_split(right, reference):
    assert check_model(right, reference, FLOAT).case("scaled").split is None


def test_the_files_own_outputs_can_be_kept_as_a_reference(right, reference, tmp_path):
    folder = reference.path / "kept"
    check_model(right, reference, FLOAT, keep=folder)
    kept = Reference.load(folder)
    assert kept.provider == "litert"
    assert kept.sample_ids == reference.sample_ids
    np.testing.assert_allclose(kept.outputs(3)["scaled"], SAMPLES[3] * WEIGHT, rtol=1e-6)
    np.testing.assert_array_equal(kept.inputs(3)["x"], SAMPLES[3])


# ---------------------------------------------------------------------------------------- report


def test_a_report_survives_json(right, make_affine, reference, tmp_path):
    shift = SHIFT.copy()
    shift[0, 0] = np.nan
    report = check_model(edge_model(make_affine(WEIGHT, shift)), reference, FLOAT, oracle=reference)
    report = report.merged(check_model(right, reference, FLOAT))
    text = json.dumps(report.to_json(), allow_nan=False)
    assert ParityReport.from_json(json.loads(text)) == report
    assert json.loads(text)["format_version"] == REPORT_FORMAT_VERSION


def test_the_same_check_gives_the_same_report_but_for_the_times(right, reference):
    first, second = (
        json.dumps(check_model(right, reference, FLOAT).to_json(times=False)) for _ in range(2)
    )
    assert first == second


def case(verdict: Verdict, **more: Any) -> CaseReport:
    return CaseReport(
        model="m",
        recipe="float32",
        device="host",
        signature="s",
        output="o",
        verdict=verdict,
        budget="",
        **more,
    )


@pytest.mark.parametrize(
    ("verdicts", "whole", "status"),
    [
        (["PASS", "PASS"], "PASS", 0),
        (["PASS", "FAIL"], "FAIL", 1),
        (["FAIL", "ERROR", "PASS"], "ERROR", 4),
        ([], "ERROR", 4),
    ],
)
def test_the_worst_case_decides_and_no_case_is_an_error(verdicts, whole, status):
    report = ParityReport(
        cases=tuple(case(Verdict(v)) for v in verdicts), reference="", data_kind="", samples=0
    )
    assert report.verdict == whole
    assert report.exit_code == status


def test_a_case_that_is_not_there_is_a_key_error(right, reference):
    with pytest.raises(KeyError, match="logits"):
        check_model(right, reference, FLOAT).case("logits")


def test_the_largest_step_is_the_one_with_fewest_decibels():
    assert ErrorSplit(float32_db=120.0).largest == "float32"
    split = ErrorSplit(float32_db=120.0, conversion_db=float("inf"), quantization_db=30.0)
    assert split.largest == "quantization"


def test_the_users_own_metric_is_a_case_of_its_own(tmp_path, right):
    (tmp_path / "metrics.py").write_text(
        "def energy(outputs, inputs, ids, reference):\n"
        "    assert len(outputs) == len(inputs) == len(ids) == len(reference)\n"
        "    return float(sum((o['scaled'] ** 2).sum() for o in outputs))\n"
    )
    reference = write_reference(tmp_path / "reference")
    wanted = sum(float((affine(x)["scaled"] ** 2).sum()) for x in SAMPLES)
    for text, verdict in (
        ("metric_drop<=1%", Verdict.PASS),
        (f"metric>={2 * wanted}", Verdict.FAIL),
    ):
        report = check_model(
            right,
            reference,
            Budget.parse(text, base=FLOAT),
            metric=load_task_metric(f"{tmp_path / 'metrics.py'}:energy"),
        )
        case = report.case("metric energy")
        assert case.verdict == report.verdict == verdict
        assert case.task is not None
        assert case.task.value == pytest.approx(wanted, rel=1e-5)
        assert ParityReport.from_json(report.to_json()).case("metric energy") == case
