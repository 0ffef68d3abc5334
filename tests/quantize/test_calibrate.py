"""Ranges of activations: right values, whatever the order, masks and all."""

from __future__ import annotations

import io
import math
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import BundleError, DataError, DeviceError, OptionError
from tpu2edge.files import sha256_of
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.quantize import calibrate as module
from tpu2edge.quantize.apply import quantize_file
from tpu2edge.quantize.calibrate import Calibration, calibrate, check_samples
from tpu2edge.quantize.calibrate_child import _differs
from tpu2edge.quantize.estimators import ESTIMATORS
from tpu2edge.quantize.recipes import recipe
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.metrics import sqnr_db

from .conftest import loop_tflite

KEY = "serving_default"


def of(calibration: Calibration, tensor: str, estimator: str = "minmax", bits: int = 8):
    low, high = calibration.ranges(estimator, bits=bits)[tensor]
    return low.item(), high.item()


def vectors(*rows) -> list[dict[str, np.ndarray]]:
    return [{"x": np.float32(row)} for row in rows]


# ---- what is counted ----------------------------------------------------------------------------


def test_least_and_largest_of_every_activation(make_affine):
    path = make_affine([2, -3], [10, 10])  # scaled = (2 a, -3 b), shifted = (a + 10, b + 10)
    found = calibrate(path, {KEY: vectors([1, 2], [-4, 0.5])})
    assert of(found, "x") == (-4, 2)
    assert of(found, "scaled") == (-8, 2)
    assert of(found, "shifted") == (6, 12)
    assert found.samples == 2
    assert found.source_sha256 == sha256_of(path)
    assert {low.shape for low, _ in found.ranges().values()} == {(1,)}


def test_the_moving_average_is_the_mean_over_samples(make_affine):
    path = make_affine([1, 1], [0, 0])
    found = calibrate(path, {KEY: vectors([0, 1], [-3, 3], [0, 5])})
    assert of(found, "x", "moving-average") == (-1, 3)


def test_a_large_sample_at_the_end_is_not_clipped(make_affine):
    generator = np.random.default_rng(0)
    samples = vectors(*generator.uniform(-1, 1, (40, 2)), [6, -6])
    found = calibrate(make_affine([1, 1], [0, 0]), {KEY: samples})
    assert of(found, "x") == (-6, 6)


def test_no_estimator_depends_on_the_order_of_the_samples(make_affine):
    generator = np.random.default_rng(1)
    scale = 10.0 ** generator.uniform(-3, 3, (60, 1))
    samples = vectors(*(scale * generator.standard_normal((60, 50))))
    path = make_affine(generator.standard_normal(50), np.zeros(50))
    one, other = (
        calibrate(path, {KEY: order}, estimators=list(ESTIMATORS))
        for order in (samples, [samples[i] for i in generator.permutation(60)])
    )
    for estimator in ESTIMATORS:
        for name, (low, high) in one.ranges(estimator).items():
            assert (low, high) == other.ranges(estimator)[name], (estimator, name)


def test_histograms_hold_what_one_pass_over_all_values_counts(make_affine):
    generator = np.random.default_rng(2)
    rows = np.float32([g * generator.standard_normal(64) for g in (0.01, 1, 30, 0.5)])
    rows[1, :7] = 0
    found = calibrate(
        make_affine(np.ones(64), np.zeros(64)), {KEY: vectors(*rows)}, estimators=["mse"]
    )
    histogram = found.histograms["x"]
    counted, _ = np.histogram(rows.astype(float), histogram.edges)
    assert (counted == histogram.counts).all()
    assert histogram.zeros == 7
    assert histogram.counts.sum() == rows.size
    # A bin is at least 4 times as fine as a step of int8.
    assert math.ldexp(1.0, histogram.exponent) <= (rows.max() - rows.min()) / 1024


def test_ranges_are_those_of_ai_edge_quantizer(small_tflite):
    images = np.random.default_rng(3).standard_normal((12, 1, 2, 6, 6)).astype("float32")
    samples = [{"image": image} for image in images]
    found = calibrate(small_tflite, {KEY: samples}).ranges()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ai_edge_quantizer import calibrator, quantizer
        from ai_edge_quantizer import recipe as recipes
        from ai_edge_quantizer.utils import qsv_utils

        worker = quantizer.Quantizer(str(small_tflite), recipes.static_wi8_ai8())
        theirs = calibrator.Calibrator(
            small_tflite.read_bytes(), num_threads=1, qsv_update_func=qsv_utils.min_max_update
        )
        theirs.calibrate({KEY: samples}, worker._recipe_manager)
    wanted = theirs.get_model_qsvs()
    assert set(found) == set(wanted)
    for name, (low, high) in found.items():
        assert low.shape == wanted[name]["min"].shape
        # Zero is in every range, so nothing is read below it where an activation cuts there.
        assert np.minimum(low, 0) == pytest.approx(np.minimum(wanted[name]["min"], 0), rel=1e-6)
        assert high == pytest.approx(wanted[name]["max"], rel=1e-6)


def logits_of(path: Path, samples) -> np.ndarray:
    with Session(path) as session:
        recorded = [out["logits"] for out in session.run(KEY, samples)]
    return np.stack(recorded)


def test_a_static_file_is_as_close_to_the_float_file_as_upstream_s_calibration_makes_it(
    tmp_path, small_tflite
):
    images = np.random.default_rng(4).standard_normal((40, 1, 2, 6, 6)).astype("float32")
    samples = [{"image": image} for image in images]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from ai_edge_quantizer import quantizer
        from ai_edge_quantizer import recipe as recipes

        worker = quantizer.Quantizer(str(small_tflite), recipes.static_wi8_ai8())
        theirs = worker.calibrate({KEY: samples[:32]}, num_threads=1)
    found = calibrate(small_tflite, {KEY: samples[:32]}, estimators=list(ESTIMATORS))
    ranges = {estimator: found.ranges(estimator) for estimator in ESTIMATORS}
    ranges["upstream"] = {name: (q["min"], q["max"]) for name, q in theirs.items() if q}
    wanted, reached = logits_of(small_tflite, samples[32:]), {}
    for name, used in ranges.items():
        target = tmp_path / f"{name}.tflite"
        quantize_file(small_tflite, target, recipe("int8-static"), used)
        reached[name] = sqnr_db(wanted, logits_of(target, samples[32:]))
    assert reached["minmax"] > reached["upstream"] + 3
    assert min(reached["percentile"], reached["mse"]) > 15
    assert reached["moving-average"] > 10


# ---- kinds of models ----------------------------------------------------------------------------


def test_each_signature_has_its_own_samples(two_signatures_tflite):
    found = calibrate(
        two_signatures_tflite, {"encode": vectors([1, 3]), "decode": vectors([-1, 0], [0, 2])}
    )
    by_range = sorted(zip(found.low.tolist(), found.high.tolist(), strict=True))
    # encode: x, 2 x, x + 1; decode: x, 10 x, x + 5
    assert by_range == sorted([(1, 3), (2, 6), (2, 4), (-1, 2), (-10, 20), (4, 7)])


def test_a_signature_without_samples_is_refused(two_signatures_tflite):
    with pytest.raises(DataError, match="'decode' has no calibration samples"):
        calibrate(two_signatures_tflite, {"encode": vectors([1, 3])})
    with pytest.raises(DataError, match="'decode' has no calibration samples"):
        calibrate(two_signatures_tflite, {"encode": vectors([1, 3]), "decode": []})
    with pytest.raises(DataError, match="no signature 'other'"):
        calibrate(two_signatures_tflite, {"other": vectors([1, 3])})


def test_samples_may_have_different_sizes_where_the_model_does(dynamic_tflite):
    samples = [{"x": np.full((n, 2), v, np.float32)} for n, v in ((1, 1), (5, -2), (3, 4), (5, 0))]
    found = calibrate(dynamic_tflite, {KEY: samples}, estimators=["percentile"])
    assert of(found, "scaled") == (-4, 8)
    assert of(found, "shifted") == (-1, 5)
    assert found.histograms["x"].counts.sum() == 2 * (1 + 5 + 3 + 5)


def test_integers_flags_scalars_and_empty_tensors_are_no_activations(typed_tflite):
    sample = {
        "scalar": np.float32(3).reshape(()),
        "flag": np.array([True, False, True]),
        "count": np.int32([[1, 2], [3, 4]]),
        "pixel": np.uint8([0, 1, 254, 255]),
        "empty": np.zeros((0, 3), np.float32),
    }
    found = calibrate(typed_tflite, {KEY: [sample]})
    assert set(found.tensors) == {"scalar", "scalar_out"}
    assert found.ranges()["scalar_out"][0].shape == ()
    assert of(found, "scalar_out") == (1.5, 1.5)
    assert set(found.unmeasured) == {"empty", "empty_out"}
    assert [note.code for note in found.notes] == ["calibration-unmeasured"]


def test_all_rounds_of_a_loop_are_counted(tmp_path, write_graphs):
    path = loop_tflite(write_graphs, tmp_path / "loop.tflite")
    (loop,) = read_tflite(path).subgraphs[0].operators
    assert (loop.name, loop.subgraphs) == ("WHILE", (1, 2))
    start = np.int32(0).reshape(())
    samples = [{"i": start, "x": np.float32(x)} for x in ([1, -1], [0.5, 3])]
    found = calibrate(path, {KEY: samples}, estimators=["mse"])
    assert of(found, "y") == (-8, 24)
    assert of(found, "bx") == (-4, 12)
    assert of(found, "by") == (-8, 24)
    assert of(found, "cx") == (-8, 24)
    assert found.histograms["by"].counts.sum() == 2 * 2 * 3


# ---- masks --------------------------------------------------------------------------------------


def attention(write_graphs, path: Path, mask: float) -> Path:
    """probabilities = softmax(scores * 2 + (1 - keep) * mask), values = probabilities @ …"""
    return write_graphs(
        path,
        {
            "signature": KEY,
            "tensors": {
                "scores": ("float32", [4, 8]),
                "keep": ("float32", [1, 8]),
                "scaled": ("float32", [4, 8]),
                "dropped": ("float32", [1, 8]),
                "bias": ("float32", [1, 8]),
                "logits": ("float32", [4, 8]),
                "probabilities": ("float32", [4, 8]),
            },
            "constants": {
                "two": np.float32([[2]]),
                "one": np.float32([[1]]),
                "mask": np.float32([[mask]]),
            },
            "ops": [
                ("MUL", ("scores", "two"), ("scaled",)),
                ("SUB", ("one", "keep"), ("dropped",)),
                ("MUL", ("dropped", "mask"), ("bias",)),
                ("ADD", ("scaled", "bias"), ("logits",)),
                ("SOFTMAX", ("logits",), ("probabilities",)),
            ],
            "inputs": {"scores": "scores", "keep": "keep"},
            "outputs": {"probabilities": "probabilities"},
        },
    )


def attended(count: int, seed: int) -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(seed)
    return [
        {
            "scores": generator.normal(size=(4, 8)).astype(np.float32),
            "keep": (np.arange(8) < generator.integers(3, 9))[None].astype(np.float32),
        }
        for _ in range(count)
    ]


@pytest.mark.parametrize("mask", [-1e9, -3.4028235e38, -1e4])
def test_a_mask_does_not_set_the_scale_of_what_is_masked(tmp_path, write_graphs, mask):
    path = attention(write_graphs, tmp_path / "a.tflite", mask)
    samples = attended(40, 0)
    found = calibrate(path, {KEY: samples}, estimators=list(ESTIMATORS))
    rows = np.concatenate([2 * s["scores"] for s in samples])
    kept = np.concatenate([np.repeat(s["keep"], 4, 0) for s in samples]) == 1
    largest = np.where(kept, rows, -np.inf).max(-1)
    reach = math.log(8 * 2**9)  # 8 masked positions give half a step of an int8 softmax
    floor = (largest - reach)[~kept.all(-1)].min()
    for estimator in ESTIMATORS:
        low, high = of(found, "logits", estimator)
        assert low == pytest.approx(floor, abs=1e-4)
        assert 0 < high <= rows[kept].max()
        low_16, _ = of(found, "logits", estimator, bits=16)
        assert low_16 == pytest.approx(floor - 8 * math.log(2), abs=1e-4)
    assert of(found, "logits")[1] == rows[kept].max()
    # The bias must push the largest value of what it is added to down to that floor.
    assert of(found, "bias") == pytest.approx((floor - rows.max(), 0), abs=1e-4)
    assert of(found, "mask")[0] == of(found, "bias")[0]


@pytest.mark.parametrize(
    ("name", "bits", "at_least_db"), [("int8-static", 8, 20), ("int16-static", 16, 50)]
)
def test_masked_attention_survives_static_quantization(
    tmp_path, write_graphs, name, bits, at_least_db
):
    path, target = attention(write_graphs, tmp_path / "a.tflite", -1e9), tmp_path / "q.tflite"
    found = calibrate(path, {KEY: attended(40, 1)})
    quantize_file(path, target, recipe(name), found.ranges(bits=bits))
    held_out = attended(10, 2)
    values = []
    for file in (path, target):
        with Session(file) as session:
            values.append(np.stack([out["probabilities"] for out in session.run(KEY, held_out)]))
    masked = np.stack([np.repeat(s["keep"], 4, 0) for s in held_out]) == 0
    assert values[1][masked].max() <= 1 / 256
    assert sqnr_db(*values) > at_least_db


def test_a_large_negative_value_that_no_softmax_hides_keeps_its_range(make_affine):
    found = calibrate(make_affine([1, 1], [0, 0]), {KEY: vectors([-1e9, 1])})
    assert of(found, "scaled") == (-1e9, 1)


def test_minus_infinity_is_taken_in_masks_only(tmp_path, write_graphs):
    path = write_graphs(
        tmp_path / "m.tflite",
        {
            "signature": KEY,
            "tensors": {
                name: ("float32", [2, 4]) for name in ("x", "mask", "logits", "y", "unmasked")
            },
            "constants": {"one": np.float32([[1]])},
            "ops": [
                ("ADD", ("x", "mask"), ("logits",)),
                ("SOFTMAX", ("logits",), ("y",)),
                ("ADD", ("x", "one"), ("unmasked",)),
            ],
            "inputs": {"x": "x", "mask": "mask"},
            "outputs": {"y": "y", "unmasked": "unmasked"},
        },
    )
    x = np.float32([[1, 2, 3, 4], [0, 0, 0, 0]])
    mask = np.float32([[0, 0, -np.inf, -np.inf], [0, 0, 0, -np.inf]])
    found = calibrate(path, {KEY: [{"x": x, "mask": mask}]}, estimators=["mse"])
    reach = math.log(4 * 2**9)
    assert of(found, "logits") == pytest.approx((0 - reach, 2), abs=1e-5)
    assert of(found, "mask") == pytest.approx((0 - reach - 4, 0), abs=1e-5)
    assert np.isfinite([of(found, n, e) for n in found.tensors for e in found.estimators]).all()
    with pytest.raises(DataError, match="infinity in input 'x'"):
        calibrate(path, {KEY: [{"x": mask, "mask": x}]})


# ---- samples ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"x": np.float32([1, np.nan])}, "NaN in input 'x'"),
        ({"x": np.float32([1, np.inf])}, "infinity in input 'x'"),
        ({"x": np.float32([1, -np.inf])}, "infinity in input 'x'"),
        ({"x": np.float64([1, 2])}, "float64[2], the model takes x: float32[2]"),
        ({"x": np.float32([1, 2, 3])}, "float32[3], the model takes x: float32[2]"),
        ({"y": np.float32([1, 2])}, "has the inputs ['y'], the signature takes ['x']"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_by_its_number(make_affine, sample, told):
    with pytest.raises(DataError) as caught:
        calibrate(make_affine([1, 1], [0, 0]), {KEY: [*vectors([1, 2]), sample]})
    assert "calibration sample 1 of signature 'serving_default'" in caught.value.what
    assert told in caught.value.what


def test_progress_is_told_with_every_sample(make_affine):
    told = []
    samples = vectors([1, 2], [3, 4], [5, 6])
    path = make_affine([1, 1], [0, 0])
    calibrate(path, {KEY: samples}, progress=lambda *where: told.append(where))
    assert told == [("calibrate", n, 3) for n in (1, 2, 3)]
    calibrate(path, {KEY: iter(samples)}, progress=lambda *where: told.append(where))
    assert told[3:] == [("calibrate", n, None) for n in (1, 2, 3)]


def test_samples_are_read_one_at_a_time(make_affine):
    path, alive = make_affine(np.ones(4), np.zeros(4)), 0

    def samples():
        nonlocal alive
        for value in range(200):
            alive = value
            yield {"x": np.full(4, value, np.float32)}

    def check(_, done, total):
        assert total is None
        assert alive == done - 1

    found = calibrate(path, {KEY: samples()}, progress=check)
    assert of(found, "x") == (0, 199)


def test_samples_that_look_like_the_parity_samples_are_passed_without_a_word():
    generator = np.random.default_rng(0)
    ours, theirs = (
        [{"x": generator.uniform(-1, 1, 50).astype("f4"), "ids": generator.integers(0, 99, 50)}]
        * count
        for count in (3, 2)
    )
    assert check_samples(ours, theirs) == ()


@pytest.mark.parametrize(
    ("ours", "code", "told"),
    [
        ([0.1, 0.2], "calibration-range", "beyond the calibration samples' 0.1..0.2"),
        ([0.0, 255.0], "calibration-range", "coarser"),
        ([0.0, 0.0], "calibration-constant", "is 0 in all calibration samples"),
        ([0.0, 1.0], "calibration-overlap", "1 of 1 parity samples"),
    ],
)
def test_samples_unlike_the_parity_samples_are_told(ours, code, told):
    (note,) = check_samples([{"x": np.float32(ours)}], [{"x": np.float32([0, 1])}])
    assert note.code == code
    assert told in note.text


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        ([{"x": np.float64([0, 1])}], "float64 in the calibration samples and float32"),
        ([{"y": np.float32([0, 1])}], "inputs"),
        ([{"x": np.float32([0, np.nan])}], "NaN in input 'x'"),
        ([], "no calibration samples"),
    ],
)
def test_samples_that_cannot_be_those_of_the_model_are_refused(ours, told):
    with pytest.raises(DataError, match=told):
        check_samples(ours, [{"x": np.float32([0, 1])}])


# ---- statistics that are kept -------------------------------------------------------------------


def test_saved_statistics_give_the_same_ranges(tmp_path, make_affine):
    path = make_affine([1, 2, 3], [0, 0, -1])
    made = calibrate(path, {KEY: vectors([1, 2, 3], [4, -9, 0])}, estimators=["percentile", "mse"])
    made.save(tmp_path / "c.npz")
    again = Calibration.load(tmp_path / "c.npz", source=path)
    assert again.samples == 2
    assert again.estimators == tuple(ESTIMATORS)
    for estimator in ESTIMATORS:
        for bits in (8, 16):
            assert again.ranges(estimator, bits=bits) == made.ranges(estimator, bits=bits)
    made.save(tmp_path / "d.npz")
    assert sha256_of(tmp_path / "c.npz") == sha256_of(tmp_path / "d.npz")


def test_statistics_of_another_file_are_refused(tmp_path, make_affine):
    made = calibrate(make_affine([1, 2], [0, 0]), {KEY: vectors([1, 2])})
    made.save(tmp_path / "c.npz")
    with pytest.raises(DataError, match="of another file"):
        Calibration.load(tmp_path / "c.npz", source=make_affine([1, 2.5], [0, 0]))


@pytest.mark.parametrize("damage", ["cut", "other", "version", "missing"])
def test_a_damaged_file_of_statistics_is_refused(tmp_path, make_affine, monkeypatch, damage):
    path = tmp_path / "c.npz"
    made = calibrate(make_affine([1, 2], [0, 0]), {KEY: vectors([1, 2])})
    if damage == "version":
        monkeypatch.setattr(module, "FORMAT_VERSION", 99)
    made.save(path)
    monkeypatch.undo()
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "other":
        np.savez(path, low=np.zeros(3))
    elif damage == "missing":
        path.unlink()
    with pytest.raises(BundleError, match="format 99" if damage == "version" else "damaged"):
        Calibration.load(path)


def test_estimators_that_are_unknown_or_were_not_collected_are_refused(make_affine):
    path = make_affine([1, 1], [0, 0])
    with pytest.raises(OptionError, match="unknown range estimator 'entropy'"):
        calibrate(path, {KEY: vectors([1, 2])}, estimators=["entropy"])
    found = calibrate(path, {KEY: vectors([1, 2])})
    with pytest.raises(OptionError, match="unknown range estimator 'entropy'"):
        found.ranges("entropy")
    with pytest.raises(OptionError, match="nothing for the range estimator 'mse'"):
        found.ranges("mse")
    with pytest.raises(OptionError, match="4 bits"):
        found.ranges(bits=4)


# ---- the process --------------------------------------------------------------------------------


def test_a_process_that_dies_is_told_with_its_last_words(tmp_path, make_affine, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text(
        "import os, signal, sys\n"
        "sys.stdin.readline()\n"
        "print('the last words', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    monkeypatch.setattr(module, "_CHILD", child)
    log = io.BytesIO()
    with pytest.raises(DeviceError) as caught:
        calibrate(make_affine([1, 1], [0, 0]), {KEY: vectors([1, 2])}, log=log)
    assert signal.Signals.SIGSEGV.name in caught.value.what
    assert "the last words" in caught.value.what
    assert b"the last words" in log.getvalue()


def test_a_process_that_hangs_is_ended(tmp_path, make_affine, monkeypatch):
    child = tmp_path / "child.py"
    child.write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(module, "_CHILD", child)
    with pytest.raises(DeviceError, match="no answer in 0 s"):
        calibrate(make_affine([1, 1], [0, 0]), {KEY: vectors([1, 2])}, timeout_s=0.3)


def test_a_file_that_litert_refuses_is_told(make_affine, tmp_path):
    data = bytearray(make_affine([1, 1], [0, 0]).read_bytes())
    path = tmp_path / "unknown.tflite"
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(bytes(data), 0))
    for code in model.operatorCodes:
        code.version = 99
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    with pytest.raises(DeviceError, match="version '99'"):
        calibrate(path, {KEY: vectors([1, 2])})


@pytest.mark.parametrize(
    ("kept", "wrong"),
    [
        ([1.0, -2.0], ""),
        ([1.0, -2.0001], ""),
        ([1.0, -2.001], "y"),
        ([1.0, np.nan], "y"),
        ([1.0], "y"),
    ],
)
def test_the_run_with_all_tensors_kept_must_give_the_plain_run_s_outputs(kept, wrong):
    assert _differs({"y": np.float32([1, -2])}, {"y": np.float32(kept)}) == wrong
