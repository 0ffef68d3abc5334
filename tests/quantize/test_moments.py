"""What GPTQ and OSCAR need of the samples: right values, and what they make of them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu2edge.errors import OptionError
from tpu2edge.files import sha256_of
from tpu2edge.flatbuffer import TfliteFile, read_tflite
from tpu2edge.quantize import child as quantizing
from tpu2edge.quantize import moments as module
from tpu2edge.quantize.apply import Quantizer, quantize_file
from tpu2edge.quantize.calibrate import Calibration, calibrate
from tpu2edge.quantize.calibrate_child import BLOCK
from tpu2edge.quantize.calibrate_child import Moments as Counted
from tpu2edge.quantize.moments import Moments, moments_wanted
from tpu2edge.quantize.recipes import Recipe, keep_float, recipe, recipe_from_rules
from tpu2edge.quantize.rules import ALGORITHMS, dynamic, keep, weight_only
from tpu2edge.quantize.scan import scan, verified
from tpu2edge.quantize.scopes import op_scopes
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.metrics import sqnr_db

KEY = "serving_default"
DENSE = Path(__file__).parents[1] / "data" / "dense.float32.tflite"  # five linear layers, 32 wide
BOTH = (recipe("int4-gptq"), recipe("int4-oscar"))


def inputs(count: int, seed: int = 0, rows: int = 64) -> list[dict[str, np.ndarray]]:
    """Samples whose columns go together, as those of real layers do."""
    rng = np.random.default_rng(seed)
    mix = np.random.default_rng(99).standard_normal((32, 32)) * np.geomspace(3, 0.03, 32)
    return [{"x": (rng.standard_normal((rows, 32)) @ mix).astype("f4")} for _ in range(count)]


def linear_rules(algorithm: str, bits: int = 4, **more: Any) -> Recipe:
    rule = dynamic(bits, operation="FULLY_CONNECTED", algorithm=algorithm, **more)
    return recipe_from_rules("mine", [rule])


def weights_of(path: Path) -> list[np.ndarray]:
    """What the linear layers' weights are stored as, in their order."""
    file = read_tflite(path)
    ops = file.subgraphs[0].operators
    widened = {op.outputs[0]: op.inputs[0] for op in ops if op.name == "DEQUANTIZE"}
    return [file.constant(widened.get(at, at), 0) for at in weights_read(file)]


def reads_integers(path: Path) -> list[bool]:
    """Whether each linear layer reads its weights as they are stored, as integers."""
    file = read_tflite(path)
    return [file.tensor(at, 0).dtype != "float32" for at in weights_read(file)]


def weights_read(file: TfliteFile) -> list[int]:
    """Not those of a Hadamard rotation, which is a linear layer too."""
    return [
        op.inputs[1]
        for op in file.subgraphs[0].operators
        if op.name == "FULLY_CONNECTED" and "rotated" not in file.tensor(op.outputs[0], 0).name
    ]


# ---- what is counted ----------------------------------------------------------------------------


def test_hessians_and_squares_are_the_moments_of_what_a_layer_reads():
    samples = inputs(5)
    found = calibrate(DENSE, {KEY: samples}, recipes=BOTH).moments
    x = np.concatenate([s["x"] for s in samples]).astype("f8")
    assert set(found.hessians) == set(found.squares) == {"x", "r0", "r1", "r2", "r3"}
    assert found.hessians["x"] == pytest.approx(2 * x.T @ x / len(x), rel=1e-4, abs=1e-5)
    assert found.squares["x"] == pytest.approx((x**2).mean(0), rel=1e-6)
    assert (found.hessians["r3"] == found.hessians["r3"].T).all()
    assert np.diag(found.hessians["r3"]) / 2 == pytest.approx(found.squares["r3"], rel=1e-5)


@pytest.mark.parametrize(("algorithm", "key"), [("GPTQ", "hessian"), ("OSCAR", "mu2")])
def test_they_are_those_of_ai_edge_quantizer(algorithm, key):
    samples = inputs(5)
    rules = linear_rules(algorithm)
    found = calibrate(DENSE, {KEY: samples}, recipes=[rules]).moments
    wanted = upstream_statistics(samples, rules)
    ours = {"hessian": found.hessians, "mu2": found.squares}[key]
    assert len(ours) == 5
    for name, values in ours.items():
        assert values == pytest.approx(wanted[name][key], rel=1e-4, abs=1e-5), name
    assert not {"hessian": found.squares, "mu2": found.hessians}[key]


def upstream_statistics(samples: Any, rules: Recipe) -> dict[str, Any]:
    """By its Calibrator: its Quantizer would not calibrate for OSCAR at all."""
    from ai_edge_quantizer import calibrator, recipe_manager

    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(rules.to_json())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = calibrator.Calibrator(DENSE.read_bytes(), num_threads=1)
        theirs.calibrate({KEY: samples}, manager)
    return theirs.get_model_qsvs()


def test_wide_layers_are_summed_block_by_block():
    width = 2 * BLOCK + 7
    rows = np.random.default_rng(0).standard_normal((3, 4, width)).astype("f4")
    counted = Counted([width], [width])
    for part in rows:
        counted.add(part, width, 0, 0)
    assert counted.hessian_counts.tolist() == counted.square_counts.tolist() == [12]
    flat = rows.reshape(-1, width).astype("f8")
    assert np.tril(counted.hessians[0]) == pytest.approx(np.tril(flat.T @ flat), abs=1e-4)


def test_rows_that_hold_no_numbers_are_left_out():
    counted = Counted([2], [2])
    counted.add(np.float32([[1, 2], [np.nan, 1], [np.inf, 0], [3, 4]]), 2, 0, 0)
    assert np.tril(counted.hessians[0]).tolist() == [[10, 0], [14, 20]]
    assert (counted.squares[0] / 4).tolist() == [5, 10]


def test_a_tensor_is_folded_as_the_layer_that_reads_it_folds_it(write_graph):
    """A linear layer takes 2 x 2 x 3 for one row of 12 where its weights are 12 wide."""
    rng = np.random.default_rng(0)
    path = write_graph(
        tensors={"x": ("float32", (2, 2, 3)), "y": ("float32", (1, 5))},
        constants={"w": rng.standard_normal((5, 12)).astype("f4")},
        ops=[("FULLY_CONNECTED", ("x", "w"), ("y",))],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    x = rng.standard_normal((2, 2, 3)).astype("f4")
    found = calibrate(path, {KEY: [{"x": x}]}, recipes=BOTH).moments
    assert found.hessians["x"] == pytest.approx(np.outer(x, x), rel=1e-5)  # 2 / n, and n is 2
    assert found.squares["x"] == pytest.approx(x.ravel() ** 2, rel=1e-5)


def test_only_layers_that_the_rules_name_are_measured(mixed, mixed_layers):
    file = read_tflite(mixed)
    assert not moments_wanted(file, [recipe("int4"), recipe("int8-static")]).hessians
    whole = moments_wanted(file, BOTH)
    assert whole.hessians == whole.squares
    # Twice an LSTM cell's two layers, one of which is a constant's; and three more.
    assert sorted(whole.hessians.values()) == [32, 37, 40, 48, 48, 64]
    assert whole.size_bytes == 4 * sum(w * w for w in whole.hessians.values())
    kept = keep_float(recipe("int4-gptq"), ["lstm", "odd"], mixed_layers, op_scopes(mixed))
    assert sorted(moments_wanted(file, [kept]).hessians.values()) == [37, 40]
    first = {**linear_rules("GPTQ").rules[0], "regex": "h0"}
    again = [first, keep(regex="h0", operation="FULLY_CONNECTED")]  # takes the place of the first
    assert len(moments_wanted(read_tflite(DENSE), [recipe_from_rules("a", [first])]).hessians) == 1
    assert not moments_wanted(read_tflite(DENSE), [recipe_from_rules("b", again)]).hessians


def test_hessians_that_do_not_fit_into_memory_are_refused_with_what_they_take(monkeypatch):
    monkeypatch.setattr(module, "_free_bytes", lambda: 80_000)
    with pytest.raises(
        OptionError, match=r"GPTQ needs .* of 5 inputs of layers, up to 32 wide"
    ) as e:
        calibrate(DENSE, {KEY: inputs(1)}, recipes=BOTH)
    assert "-oscar" in e.value.do
    calibrate(DENSE, {KEY: inputs(1)}, recipes=[recipe("int4-oscar")])
    monkeypatch.setattr(module, "_free_bytes", lambda: 82_000)
    calibrate(DENSE, {KEY: inputs(1)}, recipes=BOTH)


def test_saved_moments_come_back_and_lack_nothing(tmp_path):
    measured = calibrate(DENSE, {KEY: inputs(3)}, recipes=BOTH)
    measured.save(tmp_path / "c.npz")
    again = Calibration.load(tmp_path / "c.npz", source=DENSE)
    for one, other in (
        (measured.moments.hessians, again.moments.hessians),
        (measured.moments.squares, again.moments.squares),
    ):
        assert list(one) == list(other)
        assert all((one[name] == other[name]).all() for name in one)
    assert not again.lacks(DENSE, BOTH)
    plain = calibrate(DENSE, {KEY: inputs(3)}, recipes=BOTH[1:])
    assert plain.lacks(DENSE, BOTH)
    assert not plain.lacks(DENSE, [recipe("int8-static"), BOTH[1]])


# ---- what becomes of the weights ----------------------------------------------------------------


def test_gptq_s_factor_is_that_of_the_inverse_hessian():
    x = np.random.default_rng(0).standard_normal((9, 20)) * np.geomspace(1, 100, 20)
    x[:, 4] = 0  # never used, and fewer rows than columns
    hessian = (x.T @ x).astype("f4")
    upper = quantizing._upper_factor(hessian).astype("f8")
    assert (np.tril(upper, -1) == 0).all()
    diagonal = np.diag(hessian).astype("f8")
    diagonal[4] = 1
    damped = hessian.astype("f8")
    np.fill_diagonal(damped, diagonal + 0.01 * diagonal.mean())
    assert upper.T @ upper @ damped == pytest.approx(np.eye(20), abs=1e-3)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_rounds_each_column_as_the_paper_does(tmp_path, bits, symmetric):
    """Against the plain form: the inverse Hessian is updated after each column (OBQ, in order)."""
    samples = inputs(8)
    found = calibrate(DENSE, {KEY: samples}, recipes=BOTH)
    rule = weight_only(bits, operation="FULLY_CONNECTED", symmetric=symmetric, algorithm="GPTQ")
    rules = recipe_from_rules("mine", [rule])
    assert not quantize_file(DENSE, tmp_path / "q", rules, moments=found.moments).deviations
    file = read_tflite(DENSE)
    ops = [op for op in file.subgraphs[0].operators if op.name == "FULLY_CONNECTED"]
    for op, integers in zip(ops, weights_of(tmp_path / "q"), strict=True):
        weight = file.constant(op.inputs[1], 0).astype("f8")
        hessian = found.moments.hessians[file.tensor(op.inputs[0], 0).name].astype("f8")
        scale, zero, low, high = steps(weight, bits, symmetric)
        same = integers == one_by_one(weight, hessian, scale, zero, low, high)
        assert same.mean() > 0.995  # a value half-way between two steps may go either way
        plain = np.clip(np.round(weight / scale[:, None]) + zero[:, None], low, high)
        assert (integers != plain).mean() > 0.05


def steps(weight: np.ndarray, bits: int, symmetric: bool) -> tuple[Any, Any, int, int]:
    """Scales, zero points and limits as ai-edge-quantizer has them for min/max."""
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    if symmetric:
        scale = np.abs(weight).max(1) / high
        return scale, np.zeros(len(scale)), low + (bits == 8), high
    least, most = np.minimum(weight.min(1), 0), np.maximum(weight.max(1), 0)
    scale = (most - least) / (high - low)
    return scale, np.round(low - least / scale), low, high


def one_by_one(
    weight: np.ndarray, hessian: np.ndarray, scale: Any, zero: Any, low: int, high: int
) -> np.ndarray:
    hessian = hessian + 0.01 * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse, rest, integers = np.linalg.inv(hessian), weight.copy(), np.zeros(weight.shape, int)
    for q in range(weight.shape[1]):
        integers[:, q] = np.clip(np.round(rest[:, q] / scale) + zero, low, high)
        error = (rest[:, q] - (integers[:, q] - zero) * scale) / inverse[q, q]
        rest -= np.outer(error, inverse[q])
        inverse -= np.outer(inverse[:, q], inverse[q]) / inverse[q, q]
    return integers


@pytest.mark.parametrize("granularity", [0, 32])
@pytest.mark.parametrize("algorithm", ["GPTQ", "OSCAR"])
def test_a_file_is_what_ai_edge_quantizer_makes_of_its_own_statistics(
    tmp_path, monkeypatch, algorithm, granularity
):
    from ai_edge_quantizer import quantizer
    from ai_edge_quantizer.algorithms.uniform_quantize import gptq

    samples, rules = inputs(6), linear_rules(algorithm, block=granularity)
    found = calibrate(DENSE, {KEY: samples}, recipes=[rules])
    applied = quantize_file(DENSE, tmp_path / "ours", rules, moments=found.moments)
    assert not applied.deviations
    monkeypatch.setattr(gptq, "_prepare_hessian_inverse", quantizing._upper_factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = quantizer.Quantizer(str(DENSE), rules.to_json())
        result = theirs.quantize(upstream_statistics(samples, rules))
    (tmp_path / "theirs").write_bytes(bytes(result.quantized_model))
    pairs = list(zip(weights_of(tmp_path / "ours"), weights_of(tmp_path / "theirs"), strict=True))
    assert len(pairs) == 5
    for ours, other in pairs:
        assert (ours == other).mean() > 0.995
        assert np.abs(ours.astype(int) - other).max() <= 1
    if algorithm == "OSCAR":
        assert sum(op.name == "MUL" for op in read_tflite(tmp_path / "ours").subgraphs[0].operators)


def outputs_of(path: Path, samples: Any) -> np.ndarray:
    with Session(path) as session:
        return np.stack([out["y"] for out in session.run(KEY, samples)])


GAINS = {"int4": 1.5, "int4-block32": 1.5, "int4-weight-only": 1.5, "int2": 1.5}
GAINS |= {"int8-weight-only": 1.5, "default_af32w8float": 1.5, "default_af32w4float": 1.5}


@pytest.mark.parametrize("base", GAINS)
def test_gptq_comes_nearer_to_the_float_file_than_plain_rounding(tmp_path, base):
    plain, gptq = reached(tmp_path, DENSE, inputs(16), inputs(4, seed=1), (base, f"{base}-gptq"))
    assert gptq > plain + GAINS[base]


# All but those that store floats or refuse what was not quantized before.
ROUNDING = sorted({*ALGORITHMS} - {"no_quantize", "float_casting", "dequantized_weight_recovery"})


@pytest.mark.parametrize("algorithm", ROUNDING)
def test_layers_compute_as_the_rule_says_by_every_algorithm(tmp_path, algorithm):
    found = calibrate(DENSE, {KEY: inputs(4)}, recipes=BOTH).moments
    wanted = {}
    for name, make in (("dynamic", dynamic), ("weight-only", weight_only)):
        rule = make(8, operation="FULLY_CONNECTED", algorithm=algorithm)
        wanted[name] = recipe_from_rules(name, [rule])
        applied = quantize_file(DENSE, tmp_path / name, wanted[name], moments=found)
        assert not applied.deviations
        verified(DENSE, tmp_path / name, applied)
    assert reads_integers(tmp_path / "dynamic") == [True] * 5
    assert reads_integers(tmp_path / "weight-only") == [False] * 5
    pairs = zip(weights_of(tmp_path / "dynamic"), weights_of(tmp_path / "weight-only"), strict=True)
    assert all((one == other).all() for one, other in pairs)
    for file, other in (("dynamic", "weight-only"), ("weight-only", "dynamic")):
        problems = scan(DENSE, tmp_path / file, recipe=wanted[other]).problems
        assert len([p for p in problems if p.startswith("FULLY_CONNECTED")]) == 5


@pytest.mark.parametrize("algorithm", ROUNDING)
def test_layers_below_a_rule_s_least_size_stay_float_by_every_algorithm(tmp_path, algorithm):
    found = calibrate(DENSE, {KEY: inputs(4)}, recipes=BOTH).moments
    for least, quantized in ((1024, True), (1025, False)):
        rules = linear_rules(algorithm, bits=8, min_weight_elements=least)
        assert not quantize_file(DENSE, tmp_path / "q", rules, moments=found).deviations
        kept = [w.dtype == np.float32 for w in weights_of(tmp_path / "q")]
        assert kept == [not quantized] * 5


def test_oscar_comes_nearer_where_channels_are_of_different_sizes(tmp_path, make_linear):
    rng = np.random.default_rng(0)
    path = make_linear(rng.standard_normal((48, 64)).astype("f4"))
    sizes = np.geomspace(100, 0.01, 64)
    samples = [{"x": (rng.standard_normal((1, 64)) * sizes).astype("f4")} for _ in range(48)]
    # Rounded while it runs, the activations would drown what the weights gain.
    names = ("int4-weight-only", "int4-weight-only-oscar")
    plain, oscar = reached(tmp_path, path, samples[:32], samples[32:], names)
    assert oscar > plain + 3


def reached(
    folder: Path, path: Path, samples: Any, held_out: Any, names: tuple[str, ...]
) -> list[float]:
    """SQNR of what the recipes make of a file, each scanned and as it was asked for."""
    recipes = [recipe(name) for name in names]
    found = calibrate(path, {KEY: samples}, recipes=recipes)
    wanted, result = outputs_of(path, held_out), []
    with Quantizer(path, remember=True) as quantizer:
        for number, one in enumerate(recipes):
            target = folder / f"{number}.tflite"
            applied = quantizer.quantize(target, one, moments=found.moments)
            assert not applied.deviations
            verified(path, target, applied)
            result.append(sqnr_db(wanted, outputs_of(target, held_out)))
    return result


def test_the_same_moments_and_the_applied_recipe_give_the_same_file(tmp_path):
    found = calibrate(DENSE, {KEY: inputs(4)}, recipes=BOTH)
    other = calibrate(DENSE, {KEY: inputs(4, seed=5)}, recipes=BOTH)
    with Quantizer(DENSE, remember=True) as quantizer:
        for wanted in BOTH:
            applied = quantizer.quantize(tmp_path / "a", wanted, moments=found.moments)
            quantizer.quantize(tmp_path / "b", wanted, moments=other.moments)
            again = quantizer.quantize(tmp_path / "c", applied.recipe, moments=found.moments)
            assert again.recipe == applied.recipe
            alone = quantize_file(DENSE, tmp_path / "d", wanted, moments=found.moments)
            assert alone.recipe == applied.recipe
            shas = [sha256_of(tmp_path / name) for name in "abcd"]
            assert shas[0] == shas[2] == shas[3] != shas[1]


def test_a_layer_that_no_sample_computed_gets_the_rule_before_and_is_named(tmp_path):
    found = calibrate(DENSE, {KEY: inputs(2)}, recipes=BOTH).moments
    for wanted, algorithm in zip(BOTH, ("GPTQ", "OSCAR"), strict=True):
        part = Moments(
            hessians={name: found.hessians[name] for name in ("x", "r0", "r2", "r3")},
            squares={name: found.squares[name] for name in ("x", "r0", "r2", "r3")},
        )
        (one,) = quantize_file(DENSE, tmp_path / "q", wanted, moments=part).deviations
        assert one.scope == "h2;"
        assert one.instead == "int4 per channel"
        assert one.why == f"ValueError: no sample computed 'r1', which {algorithm} weighs errors by"


def test_a_layer_behind_a_reshape_keeps_its_hessian_where_activations_are_static(
    tmp_path, write_graph
):
    """ai-edge-quantizer puts what it knows of a reshape's input in the place of the output's."""
    rng = np.random.default_rng(0)
    path = write_graph(
        tensors={"x": ("float32", (2, 32)), "r": ("float32", (4, 16)), "y": ("float32", (4, 5))},
        constants={"w": rng.standard_normal((5, 16)).astype("f4"), "shape": np.int32([4, 16])},
        ops=[("RESHAPE", ("x", "shape"), ("r",)), ("FULLY_CONNECTED", ("r", "w"), ("y",))],
        inputs={"x": "x"},
        outputs={"y": "y"},
    )
    samples = [{"x": rng.standard_normal((2, 32)).astype("f4")} for _ in range(40)]
    static = recipe("int8-static-gptq")
    found = calibrate(path, {KEY: samples}, recipes=[static])
    applied = quantize_file(path, tmp_path / "a", static, found.ranges(), moments=found.moments)
    assert not applied.deviations
    quantize_file(path, tmp_path / "b", recipe("int8-gptq"), moments=found.moments)
    (one,), (other,) = weights_of(tmp_path / "a"), weights_of(tmp_path / "b")
    assert (one == other).all()


@pytest.mark.parametrize("name", ["int4-gptq", "int8-oscar", "int8-static-gptq"])
def test_without_moments_the_algorithms_ask_for_calibration(tmp_path, mixed_ranges, name):
    words = f"'{re.escape(recipe(name).name)}' needs calibration: .* weighs errors"
    with pytest.raises(OptionError, match=words):
        quantize_file(DENSE, tmp_path / "q", name, mixed_ranges)
    assert not (tmp_path / "q").exists()
