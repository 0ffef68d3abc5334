"""Recipes applied to real files, in a process that stays."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tpu2edge.errors import BundleError, DeviceError, OptionError, QuantizationError
from tpu2edge.files import sha256_of
from tpu2edge.flatbuffer import read_tflite, signatures_of
from tpu2edge.quantize import apply
from tpu2edge.quantize.apply import Quantizer, quantize_file
from tpu2edge.quantize.calibrate import calibrate
from tpu2edge.quantize.recipes import (
    RECIPES,
    Recipe,
    keep_float,
    recipe,
    recipe_from_file,
    recipe_from_rules,
    with_float_io,
)
from tpu2edge.quantize.scan import verified
from tpu2edge.quantize.scopes import op_scopes
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.metrics import sqnr_db

from .conftest import loop_tflite, run_mixed

INT8, INT4, INT2 = "int8 per-channel axis 0", "int4 per-channel axis 0", "int2 per-channel axis 0"
DEPTHWISE = "int8 per-channel axis 3"
FLOAT_EMBEDDING = {"float32", INT8, DEPTHWISE}

# What the weights (not the biases) are stored as, the file's size to the float one's (two digits),
# and the least SQNR of both outputs in dB: 5 dB and more below what was measured.
KINDS: dict[str, tuple[set[str], float, float]] = {
    "float16": ({"float16"}, 0.56, 70),
    "dynamic_wi8_afp32": ({INT8, DEPTHWISE}, 0.40, 40),
    "dynamic_wi4_afp32": ({INT4, "float32"}, 0.31, 20),
    "dynamic_wi2c_afp32": ({INT2, "float32"}, 0.26, 2),
    "dynamic_legacy_wi8_afp32": ({INT8, "float32"}, 0.44, 40),
    "dynamic_wi4b32_afp32": ({"int4 blocks of 32", "float32"}, 0.77, 25),
    "dynamic_wi4b64_afp32": ({"int4 blocks of 64", "float32"}, 0.91, 25),
    "dynamic_wi8c_hr_afp32": ({INT8, "float32"}, 0.70, 40),
    "dynamic_wi4c_hr_afp32": ({INT4, "float32"}, 0.60, 20),
    "dynamic_wi2c_hr_afp32": ({INT2, "float32"}, 0.54, 5),
    "weight_only_wi8_afp32": ({INT8, DEPTHWISE}, 0.41, 40),
    "weight_only_wi4_afp32": ({INT4, "float32"}, 0.32, 20),
    "default_af32w8float": ({INT8, DEPTHWISE}, 0.41, 40),
    "default_af32w4float": ({INT4, "float32"}, 0.32, 15),
    "static_wi8_ai8": (FLOAT_EMBEDDING, 0.62, 15),
    "static_wi8_ai16": (FLOAT_EMBEDDING, 0.64, 20),
    "int8-static": ({INT8, DEPTHWISE}, 0.49, 15),
    "int8-static-io": ({INT8, DEPTHWISE}, 0.48, 15),
    "int16-static": ({INT8, DEPTHWISE}, 0.51, 20),
    "int16-static-io": ({INT8, DEPTHWISE}, 0.51, 20),
    "int4": ({INT4, INT8, DEPTHWISE}, 0.29, 20),
    "int4-block32": ({"int4 blocks of 32", INT4, INT8, DEPTHWISE}, 0.28, 20),
    "int4-weight-only": ({INT4, INT8, DEPTHWISE}, 0.30, 20),
    "int2": ({INT2, INT8, DEPTHWISE}, 0.24, 2),
    "dynamic_wi8_afp32-octav": ({INT8, DEPTHWISE}, 0.40, 40),
    "dynamic_wi4_afp32-mse": ({INT4, "float32"}, 0.31, 20),
    "int4-weight-only-mse": ({INT4, INT8, DEPTHWISE}, 0.30, 20),
    "int8-gptq": ({INT8, DEPTHWISE}, 0.40, 40),
    "int8-oscar": ({INT8, DEPTHWISE}, 0.43, 40),
    "int8-weight-only-gptq": ({INT8, DEPTHWISE}, 0.41, 40),
    "int8-static-gptq": ({INT8, DEPTHWISE}, 0.49, 15),
    "int16-static-gptq": ({INT8, DEPTHWISE}, 0.51, 20),
    "int4-gptq": ({INT4, INT8, DEPTHWISE}, 0.29, 20),
    "int4-oscar": ({INT4, INT8, DEPTHWISE}, 0.32, 20),
    "int4-block32-gptq": ({"int4 blocks of 32", INT4, INT8, DEPTHWISE}, 0.28, 20),
    "int4-block32-oscar": ({"int4 blocks of 32", INT4, INT8, DEPTHWISE}, 0.31, 20),
    "int4-weight-only-gptq": ({INT4, INT8, DEPTHWISE}, 0.30, 20),
    "int4-weight-only-oscar": ({INT4, INT8, DEPTHWISE}, 0.33, 20),
    "int8-weight-only-oscar": ({INT8, DEPTHWISE}, 0.44, 45),
    "default_af32w8float-gptq": ({INT8, DEPTHWISE}, 0.41, 45),
    "default_af32w4float-gptq": ({INT4, "float32"}, 0.32, 15),
}
keep_rule = {"operation": "*", "algorithm_key": "no_quantize"}
NOTHING = {"dynamic_wi8b32_afp32", "dynamic_wi8b64_afp32"}
# LiteRT 2.3 on a CPU has no kernel for int2 in blocks: the files are right but cannot be run there.
NOT_RUN = {"dynamic_wi2b32_afp32", "dynamic_wi2b64_afp32"}


def test_the_table_of_kinds_has_every_recipe():
    assert {*KINDS} - {n for n in KINDS if n.endswith(("-octav", "-mse", "-gptq", "-oscar"))} == (
        {*RECIPES} - NOTHING - NOT_RUN - {"float32"}
    )


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_stored_as_the_recipe_says_and_the_file_runs(
    tmp_path, mixed, mixed_ranges, mixed_moments, quantizer, truth, name
):
    kinds, ratio, least_db = KINDS[name]
    target = tmp_path / "q.tflite"
    applied = quantizer.quantize(target, recipe(name), mixed_ranges, moments=mixed_moments)
    found, _ = verified(mixed, target, applied)
    weights = [w for w in found.weights if w.why_float is None or "a bias" not in w.why_float]
    assert {w.kind for w in weights if not w.kind.startswith(("int32", "int64"))} == kinds
    assert found.size_ratio == pytest.approx(ratio, abs=0.012)
    got = run_mixed(target)
    assert set(got) == {"logits", "p"}
    for output, value in truth.items():
        assert sqnr_db(value, got[output]) > least_db, output


def test_no_recipe_is_ruined_by_an_ending(
    tmp_path, mixed, mixed_ranges, mixed_moments, quantizer, truth
):
    """-mse costs more on 8 bits, and int2 is beyond help: docs/quantization.md."""

    def least_db(name: str) -> float:
        one = recipe(name)
        applied = quantizer.quantize(tmp_path / "q", one, mixed_ranges, moments=mixed_moments)
        verified(mixed, tmp_path / "q", applied)
        got = run_mixed(tmp_path / "q")
        return min(sqnr_db(value, got[output]) for output, value in truth.items())

    told = {"octav": 0, "gptq": 0, "oscar": 0}
    again = {name for name in RECIPES if name.startswith("static_") or name.endswith("-io")}
    for base in sorted({*RECIPES} - again - NOTHING - NOT_RUN - {"int2", "dynamic_wi2c_afp32"}):
        plain = None
        for ending in told:
            with contextlib.suppress(OptionError):
                name = recipe(f"{base}-{ending}").name
                plain = least_db(base) if plain is None else plain
                assert least_db(name) > plain - 6, name
                told[ending] += 1
    assert told == {"octav": 12, "gptq": 14, "oscar": 10}


@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_int2_in_blocks_is_written_where_the_width_allows(
    tmp_path, mixed, mixed_ranges, quantizer, name
):
    applied = quantizer.quantize(tmp_path / "q.tflite", recipe(name), mixed_ranges)
    found, _ = verified(mixed, tmp_path / "q.tflite", applied)
    assert f"int2 blocks of {name[12:14]}" in found.bytes_by_kind


@pytest.mark.parametrize("name", sorted(NOTHING))
def test_a_recipe_that_changes_nothing_is_an_error_that_says_why(
    tmp_path, mixed, mixed_ranges, quantizer, name
):
    applied = quantizer.quantize(tmp_path / "q.tflite", recipe(name), mixed_ranges)
    with pytest.raises(QuantizationError, match="changed nothing") as error:
        verified(mixed, tmp_path / "q.tflite", applied)
    assert "ai-edge-quantizer has no int8 in blocks of" in str(error.value)


# -------------------------------------------------------------------------------- inputs, outputs


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("int8-static", ["float32", "int32", "float32", "float32"]),
        ("int8-static-io", ["int8", "int32", "int8", "int8"]),
        ("int16-static-io", ["int16", "int32", "int16", "int16"]),
        ("static_wi8_ai8", ["int8", "int32", "int8", "int8"]),
    ],
)
def test_static_recipes_keep_the_users_dtypes_unless_named_otherwise(
    tmp_path, mixed_ranges, quantizer, name, dtypes
):
    target = tmp_path / "q.tflite"
    for wanted in (recipe(name), with_float_io(recipe(name))):
        quantizer.quantize(target, wanted, mixed_ranges)
        (signature,) = signatures_of(read_tflite(target))
        assert [s.name for s in signature.inputs] == ["image", "ids"]
        got = [s.dtype for s in (*signature.inputs, *signature.outputs)]
        expected = dtypes if wanted == recipe(name) else ["float32", "int32"] + ["float32"] * 2
        assert got == expected


def test_an_output_that_the_last_op_reads_stays_right_whatever_is_float(
    tmp_path, mixed, mixed_layers, mixed_ranges, quantizer, truth
):
    # ai-edge-quantizer alone connects the float logits to the int8 softmax here: -13.5 dB.
    target = tmp_path / "q.tflite"
    softmax = {"regex": "p_output", "operation": "SOFTMAX", "algorithm_key": "no_quantize"}
    for rules in (
        recipe("int8-static").rules,
        (*recipe("int8-static").rules, softmax),
        (*recipe("int8-static-io").rules, softmax),
        keep_float(recipe("int8-static-io"), ["out"], mixed_layers, quantizer.scopes()).rules,
    ):
        wanted = Recipe(name="mine", rules=tuple(rules))
        verified(mixed, target, quantizer.quantize(target, wanted, mixed_ranges))
        got = run_mixed(target)
        for name, value in truth.items():
            assert sqnr_db(value, got[name]) > 15, (name, rules)


# ----------------------------------------------------------------------------------- 16 bits


def test_16_bit_activations_have_room_beyond_the_range_and_8_bit_ones_have_not(
    tmp_path, mixed_ranges, quantizer, truth
):
    target = tmp_path / "q.tflite"
    narrow = {name: (low * 0.7, high * 0.7) for name, (low, high) in mixed_ranges.items()}
    worst = {}
    for name in ("int16-static", "int8-static"):
        for ranges in (mixed_ranges, narrow):
            quantizer.quantize(target, recipe(name), ranges)
            got = run_mixed(target)
            found = min(sqnr_db(value, got[output]) for output, value in truth.items())
            worst.setdefault(name, []).append(found)
    full, half = worst["int16-static"]
    assert half > full - 1.0
    full, half = worst["int8-static"]
    assert half < full - 5.0


def test_the_scale_of_16_bit_activations_is_twice_the_largest_over_32767(
    tmp_path, mixed_ranges, quantizer
):
    target = tmp_path / "q.tflite"
    quantizer.quantize(target, recipe("int16-static-io"), mixed_ranges)
    (signature,) = signatures_of(read_tflite(target))
    low, high = (float(bound.item()) for bound in mixed_ranges["serving_default_image"])
    assert signature.inputs[0].scale == pytest.approx(2 * max(-low, high) / 32767, rel=1e-6)


# ------------------------------------------------------------------------- what cannot be applied


def test_odd_widths_in_blocks_stay_float_and_are_named(tmp_path, mixed, quantizer):
    target = tmp_path / "q.tflite"
    applied = quantizer.quantize(target, recipe("dynamic_wi4b32_afp32"))
    assert [(d.op, d.instead) for d in applied.deviations] == [
        ("EMBEDDING_LOOKUP", "float32"),
        *[("FULLY_CONNECTED", "float32")] * 4,
    ]
    assert "Quantized dimension 37" in str(applied.deviations[-1])
    found, notes = verified(mixed, target, applied)
    by_name = {w.tensor: w for w in found.weights}
    assert by_name["odd/mm_5;"].kind == "int4 blocks of 32"  # 64 wide
    assert by_name["out/mm_6;"].kind == "float32"
    assert "37" in (by_name["out/mm_6;"].why_float or "")
    assert [note.code for note in notes] == ["quantize-deviations", "float-weights"]
    assert "68% of the weights' bytes float" in notes[1].text


def test_a_plain_recipe_does_the_next_best_for_odd_widths(tmp_path, mixed, quantizer):
    applied = quantizer.quantize(tmp_path / "q.tflite", recipe("int4-block32"))
    assert {d.instead for d in applied.deviations} == {"int4 per channel"}
    found, _ = verified(mixed, tmp_path / "q.tflite", applied)
    assert found.float_share < 0.03  # biases


def test_strict_refuses_what_cannot_be_applied_and_writes_nothing(tmp_path, quantizer):
    with pytest.raises(QuantizationError, match="cannot be applied to 5 ops: EMBEDDING_LOOKUP"):
        quantizer.quantize(tmp_path / "q.tflite", recipe("dynamic_wi4b32_afp32"), strict=True)
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_in_the_answer_gives_the_same_file_again(tmp_path, quantizer):
    first = quantizer.quantize(tmp_path / "a", recipe("int4-block32"))
    assert len(first.recipe.rules) > len(recipe("int4-block32").rules)
    second = quantizer.quantize(tmp_path / "b", first.recipe, strict=True)
    assert second.deviations == ()
    assert sha256_of(tmp_path / "a") == sha256_of(tmp_path / "b")


def test_weights_that_are_not_fake_quantized_cannot_be_recovered(tmp_path, mixed, quantizer):
    applied = quantizer.quantize(tmp_path / "q.tflite", recipe("int8-recover"))
    with pytest.raises(QuantizationError, match="changed nothing.*Failed to recover"):
        verified(mixed, tmp_path / "q.tflite", applied)


def test_scales_of_fake_quantized_weights_are_recovered(tmp_path, mixed, quantizer):
    # Twice: dequantized int8 weights, as a QAT checkpoint has them, come back as they were.
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    first = tmp_path / "first.tflite"
    quantizer.quantize(first, recipe("int8"))
    file, base = read_tflite(first), read_tflite(mixed)
    model = schema.ModelT.InitFromPackedBuf(mixed.read_bytes(), 0)
    names = ("odd/mm_5;", "lin/mm_4;", "conv/convolution;")
    stored = {}
    for name in names:
        (index,) = [t.index for t in file.subgraphs[0].tensors if t.name == name]
        (source,) = [t for t in base.subgraphs[0].tensors if t.name == name]
        quantization = file.tensor(index).quantization
        assert quantization is not None
        stored[name] = file.constant(index)
        scales = np.array(quantization.scales, "float32")
        scales = scales.reshape(-1, *[1] * (stored[name].ndim - 1))
        values = stored[name].astype("float32") * scales
        model.buffers[source.buffer].data = np.frombuffer(values.tobytes(), np.uint8)
        model.buffers[source.buffer].offset = model.buffers[source.buffer].size = 0
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    fake = tmp_path / "fake.tflite"
    fake.write_bytes(bytes(builder.Output()))
    quantize_file(fake, tmp_path / "q.tflite", "int8-recover")
    again = read_tflite(tmp_path / "q.tflite")
    for name in names:
        (index,) = [t.index for t in again.subgraphs[0].tensors if t.name == name]
        np.testing.assert_array_equal(again.constant(index), stored[name])


def test_a_large_constant_of_three_dimensions_is_quantized_as_a_small_one(tmp_path):
    # 36 MiB: ai-edge-quantizer alone stops here at "operands could not be broadcast".
    weights = np.random.default_rng(0).standard_normal((1024, 3, 3, 1024)).astype("float32")
    source = tmp_path / "conv.tflite"
    source.write_bytes(one_convolution(weights))
    applied = quantize_file(source, tmp_path / "q.tflite", "int8")
    assert applied.deviations == ()
    file = read_tflite(tmp_path / "q.tflite")
    quantization = file.tensor(1).quantization
    assert quantization is not None
    scales = np.abs(weights).max((1, 2, 3)) / 127
    np.testing.assert_allclose(quantization.scales, scales, rtol=1e-6)
    expected = np.round(weights / scales[:, None, None, None])
    assert np.abs(file.constant(1) - expected).max() <= 1


def one_convolution(weights: np.ndarray) -> bytes:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT()
    model.version, model.buffers = 3, [schema.BufferT(), schema.BufferT()]
    model.buffers[1].data = np.frombuffer(weights.tobytes(), np.uint8)
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CONV_2D
    model.operatorCodes = [code]
    graph = schema.SubGraphT()
    graph.tensors = []
    shapes = {"x": [1, 4, 4, weights.shape[3]], "w": weights.shape, "y": [1, 2, 2, len(weights)]}
    for name, shape in shapes.items():
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type = name, list(shape), schema.TensorType.FLOAT32
        tensor.buffer = int(name == "w")
        graph.tensors.append(tensor)
    op = schema.OperatorT()
    op.opcodeIndex, op.inputs, op.outputs = 0, [0, 1], [2]
    op.builtinOptionsType = schema.BuiltinOptions.Conv2DOptions
    op.builtinOptions = schema.Conv2DOptionsT()
    op.builtinOptions.padding, op.builtinOptions.strideH, op.builtinOptions.strideW = 1, 1, 1
    graph.operators, graph.inputs, graph.outputs = [op], [0], [2]
    model.subgraphs = [graph]
    builder = flatbuffers.Builder(1 << 16)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


# ------------------------------------------------------------------------------ as upstream has it


def test_custom_recipes_give_upstreams_file_byte_for_byte(tmp_path, mixed, mixed_ranges, quantizer):
    mine = tmp_path / "mine.json"
    rules = [
        *recipe("weight_only_wi8_afp32").rules,
        {
            "regex": "lin/",
            "operation": "FULLY_CONNECTED",
            "algorithm_key": "OCTAV",
            "op_config": {
                "weight_tensor_config": {"num_bits": 4, "granularity": "CHANNELWISE"},
                "compute_precision": "INTEGER",
            },
        },
        {"regex": "emb/", "operation": "*", "algorithm_key": "no_quantize"},
    ]
    mine.write_text(json.dumps(rules))
    static = tmp_path / "static.json"
    static.write_text(recipe("static_wi8_ai8").to_text())
    ranges = {name: [low.tolist(), high.tolist()] for name, (low, high) in mixed_ranges.items()}
    script = """if True:
        import json, sys
        import numpy as np
        from ai_edge_quantizer import quantizer
        ranges = {
            name: {"min": np.array(low, "float32"), "max": np.array(high, "float32")}
            for name, (low, high) in json.load(sys.stdin).items()
        }
        for recipe in sys.argv[2:]:
            q = quantizer.Quantizer(sys.argv[1], recipe)
            result = q.quantize(ranges if q.need_calibration else None)
            open(recipe + ".tflite", "wb").write(result.quantized_model)
    """
    files = [mine, static]
    subprocess.run(
        [sys.executable, "-c", script, str(mixed), *map(str, files)],
        input=json.dumps(ranges).encode(),
        check=True,
        capture_output=True,
    )
    for file in files:
        quantizer.quantize(tmp_path / "q.tflite", recipe_from_file(file), mixed_ranges)
        theirs = Path(f"{file}.tflite").read_bytes()
        assert (tmp_path / "q.tflite").read_bytes() == theirs, file.name


def test_scopes_are_what_rules_are_matched_against(tmp_path, mixed, quantizer):
    scopes = quantizer.scopes()
    assert scopes == op_scopes(mixed)
    by_op = {s.op: s for s in scopes}
    assert by_op["CONV_2D_TRANSPOSE"].weight_bytes == 8 * 2 * 2 * 16 * 4
    assert by_op["EMBEDDING_LOOKUP"].scope == "emb/mark_tensor_2;;"
    assert by_op["SOFTMAX"].weight is None
    file = read_tflite(mixed)
    for op in scopes:
        if op.weight is None:
            continue
        rule = {**recipe("int8").rules[0], "regex": f"^{re.escape(op.scope)}$"}
        applied = quantizer.quantize(tmp_path / "q", recipe_from_rules("one", [rule]))
        found, _ = verified(mixed, tmp_path / "q", applied)
        assert [w.tensor for w in found.weights if w.changed] == [file.tensor(op.weight).name]


def test_a_weight_that_one_of_two_readers_keeps_float_is_told_to_be_stored_twice(
    tmp_path, mixed, quantizer
):
    rules = [*recipe("int8").rules, {**keep_rule, "regex": "lstm/mm_3"}]
    applied = quantizer.quantize(tmp_path / "q", recipe_from_rules("mine", rules))
    found, _ = verified(mixed, tmp_path / "q", applied)
    (shared,) = [w for w in found.weights if " and " in w.kind]
    assert shared.tensor == "arith.constant"
    assert set(shared.kind.split(" and ")) == {"float32", INT8}
    assert shared.bytes_after == 128 * 48 * (4 + 1) + 128 * 12
    assert "stored twice" in (shared.why_float or "")


# ------------------------------------------------------------------------------------ the process


def test_the_same_recipe_gives_the_same_bytes_in_a_used_and_in_a_fresh_process(
    tmp_path, mixed, mixed_ranges, quantizer
):
    before = sha256_of(mixed)
    for name in ("int8", "int8-static", "int4-weight-only"):
        quantizer.quantize(tmp_path / "a", recipe(name), mixed_ranges)
        quantize_file(mixed, tmp_path / "b", name, mixed_ranges)
        assert sha256_of(tmp_path / "a") == sha256_of(tmp_path / "b")
    assert sha256_of(mixed) == before


def test_two_quantizers_of_one_file_work_at_once(tmp_path, mixed, quantizer):
    from concurrent.futures import ThreadPoolExecutor

    with Quantizer(mixed) as other, ThreadPoolExecutor(2) as pool:
        jobs = [
            pool.submit(q.quantize, tmp_path / f"{i}", recipe(name))
            for i, (q, name) in enumerate([(quantizer, "int8"), (other, "int4")])
        ]
        sizes = [job.result().size_bytes for job in jobs]
    assert sizes[0] > sizes[1] > 0


@pytest.mark.parametrize("name", ["dynamic_wi8", "static_wi8_ai8", "float32"])
def test_a_recipe_that_does_not_quantize_writes_nothing(tmp_path, small_tflite, name):
    target = tmp_path / "q.tflite"
    with pytest.raises(OptionError):
        quantize_file(small_tflite, target, name)
    assert not target.exists()


def test_a_static_recipe_without_ranges_says_that_it_needs_calibration(tmp_path, small_tflite):
    with pytest.raises(OptionError, match="needs calibration"):
        quantize_file(small_tflite, tmp_path / "q", "int8-static")


@pytest.mark.parametrize("name", ["static_wi8_ai8", "int8-static-io", "int16-static-io"])
def test_a_loop_hands_floats_to_its_body_where_inputs_are_integers(tmp_path, write_graphs, name):
    """ai-edge-quantizer makes the body's integers, and the file does not load."""
    source = loop_tflite(write_graphs, tmp_path / "loop.tflite")
    start = np.int32(0).reshape(())
    sample = {"i": start, "x": np.float32([1, -1])}
    ranges = calibrate(source, {"serving_default": [sample]}).ranges()
    applied = quantize_file(source, tmp_path / "q.tflite", name, ranges)
    assert [(one.op, one.scope, one.instead) for one in applied.deviations] == [
        ("INPUT", "ci;cx;", "float32"),
        ("INPUT", "bi;bx;", "float32"),
        ("OUTPUT", "bn;by;", "float32"),
    ]
    assert "WHILE hands floats to the graph inside it" in str(applied.deviations[0])
    with Session(tmp_path / "q.tflite") as session:
        (signature,) = session.signatures
        (x,) = (spec for spec in signature.inputs if spec.name == "x")
        (y,) = signature.outputs
        assert x.scale is not None
        assert y.scale is not None
        sample["x"] = np.rint(sample["x"] / x.scale + (x.zero_point or 0)).astype(x.dtype)
        (got,) = session.run(signature.name, [sample])
    values = (got["y"].astype("f4") - (y.zero_point or 0)) * y.scale
    assert values == pytest.approx([8, -8], abs=0.2)
    again = quantize_file(source, tmp_path / "r.tflite", applied.recipe, ranges)
    assert not again.deviations
    assert sha256_of(tmp_path / "r.tflite") == sha256_of(tmp_path / "q.tflite")
    with pytest.raises(QuantizationError, match="cannot be applied to 3 ops"):
        quantize_file(source, tmp_path / "s.tflite", name, ranges, strict=True)


def test_a_rule_that_the_quantizer_does_not_take_is_refused_with_its_words(tmp_path, quantizer):
    rule = {**recipe("dynamic_wi4b32_afp32").rules[0], "operation": "CONV_2D"}
    with pytest.raises(QuantizationError, match="cannot be applied: ValueError: ") as error:
        quantizer.quantize(tmp_path / "q", recipe_from_rules("mine", [rule]))
    assert error.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_no_tflite_is_named_for_what_it_is(tmp_path):
    source = tmp_path / "text.tflite"
    source.write_text("this is no flatbuffer")
    with pytest.raises(BundleError, match="is no .tflite file"):
        quantize_file(source, tmp_path / "q.tflite", "int8")
    assert not (tmp_path / "q.tflite").exists()


@pytest.mark.parametrize(
    ("act", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "died by signal SIGSEGV at recipe 'float16'"),
        ("sys.exit('no memory left')", "died by exit status 1 at recipe 'float16': no memory left"),
        ("sys.exit(0)", "gave no answer"),
        ("time.sleep(60)", "took more than 1 s at recipe 'float16'"),
    ],
)
def test_a_quantizer_that_dies_or_hangs_is_a_device_error_and_the_next_recipe_works(
    tmp_path, small_tflite, monkeypatch, act, words
):
    child = tmp_path / "child.py"
    child.write_text(f"import os, signal, sys, time\nsys.stdin.readline()\n{act}\n")
    with Quantizer(small_tflite, timeout_s=1) as quantizer:
        with monkeypatch.context() as patch:
            patch.setattr(apply, "_CHILD", child)
            with pytest.raises(DeviceError, match=words) as error:
                quantizer.quantize(tmp_path / "q.tflite", recipe("float16"))
            assert error.value.exit_code == 4
        assert not (tmp_path / "q.tflite").exists()
        quantizer.timeout_s = 60
        assert quantizer.quantize(tmp_path / "q.tflite", recipe("float16")).size_bytes > 0


def test_a_child_that_is_killed_between_recipes_is_replaced(tmp_path, small_tflite):
    with Quantizer(small_tflite) as quantizer:
        quantizer.quantize(tmp_path / "a", recipe("float16"))
        child = quantizer._child
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        with pytest.raises(DeviceError, match="died by signal SIGKILL"):
            quantizer.quantize(tmp_path / "b", recipe("float16"))
        quantizer.quantize(tmp_path / "b", recipe("float16"))
        assert sha256_of(tmp_path / "a") == sha256_of(tmp_path / "b")


def test_what_the_quantizer_prints_goes_to_the_log_and_not_to_the_terminal(
    tmp_path, small_tflite, monkeypatch, capfd
):
    child = tmp_path / "child.py"
    child.write_text(
        "import sys\nsys.stdin.readline()\nprint('chatter', file=sys.stderr)\n"
        'print(\'{"ok": true, "rules": [], "deviations": []}\')\n'
    )
    monkeypatch.setattr(apply, "_CHILD", child)
    log = io.BytesIO()
    quantize_file(small_tflite, tmp_path / "q.tflite", "float16", log=log)
    assert log.getvalue() == b"chatter\n"
    assert capfd.readouterr() == ("", "")
