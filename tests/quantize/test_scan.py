"""The scan of a quantized file: made to fail by files that load and run all the same."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu2edge.errors import QuantizationError
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.quantize.apply import Applied, Quantizer, quantize_file
from tpu2edge.quantize.recipes import recipe, recipe_from_rules
from tpu2edge.quantize.rules import weight_only
from tpu2edge.quantize.scan import MOST_FLOAT, scan, verified


def rewritten(source: Path, target: Path, change: Callable[[Any], None]) -> Path:
    """``source`` with a change to its schema objects."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(source.read_bytes(), 0)
    data = source.read_bytes()
    for buffer in model.buffers:
        if buffer.offset > 1:  # the values lie behind the flatbuffer
            buffer.data = np.frombuffer(data, np.uint8, buffer.size, buffer.offset)
            buffer.offset = buffer.size = 0
    change(model)
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    target.write_bytes(bytes(builder.Output()))
    return target


def tensor_called(model: Any, name: str) -> Any:
    (tensor,) = [t for t in model.subgraphs[0].tensors if t.name.decode() == name]
    return tensor


def set_value(name: str, value: float) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        buffer = model.buffers[tensor_called(model, name).buffer]
        values = np.frombuffer(bytes(buffer.data), "<f4").copy()
        values[5] = value
        buffer.data = np.frombuffer(values.tobytes(), np.uint8)

    return change


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, quantizer: Quantizer) -> Path:
    target = tmp_path_factory.mktemp("scan") / "int8.tflite"
    quantizer.quantize(target, recipe("int8"))
    return target


def test_a_right_file_has_no_problem_and_every_byte_is_accounted_for(mixed, int8):
    found = scan(mixed, int8)
    assert found.problems == ()
    assert found.size_bytes == int8.stat().st_size
    assert found.expected_bytes == pytest.approx(found.size_bytes, rel=0.02)
    assert found.size_ratio == int8.stat().st_size / mixed.stat().st_size
    by_name = {w.tensor: w for w in found.weights}
    odd = by_name["odd/mm_5;"]
    assert (odd.op, odd.bytes_before) == ("FULLY_CONNECTED", 64 * 37 * 4)
    assert odd.bytes_after == 64 * 37 + 12 * 37
    assert odd.kind == "int8 per-channel axis 0"
    assert by_name["odd/add_12;"].why_float == "a bias, which is float where the activations are"
    assert found.float_bytes + found.quantized_bytes == sum(found.bytes_by_kind.values())
    assert 0.01 < found.float_share < 0.03
    assert [w.bytes_before for w in found.weights] == sorted(
        (w.bytes_before for w in found.weights), reverse=True
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("int8", np.nan), ("int8", -np.inf), ("float16", np.nan), ("int4-block32", np.nan)],
)
def test_a_weight_that_is_no_number_is_refused(tmp_path, mixed, name, value):
    source = rewritten(mixed, tmp_path / "bad.tflite", set_value("odd/mm_5;", value))
    applied = quantize_file(source, tmp_path / "q.tflite", name)
    with pytest.raises(QuantizationError, match="gave a broken file: .*odd/mm_5;"):
        verified(source, tmp_path / "q.tflite", applied)


def test_a_bias_that_is_no_number_is_refused_too(tmp_path, mixed):
    source = rewritten(mixed, tmp_path / "bad.tflite", set_value("odd/add_12;", np.nan))
    applied = quantize_file(source, tmp_path / "q.tflite", "int8")
    with pytest.raises(QuantizationError, match="odd/add_12;' of FULLY_CONNECTED holds NaN"):
        verified(source, tmp_path / "q.tflite", applied)


def test_a_weight_too_large_for_float16_is_found(tmp_path, mixed):
    source = rewritten(mixed, tmp_path / "large.tflite", set_value("odd/mm_5;", 7e4))
    quantize_file(source, tmp_path / "q.tflite", "float16")
    (problem,) = scan(source, tmp_path / "q.tflite").problems
    assert "odd/mm_5;" in problem


def test_infinity_outside_of_weights_is_left_alone_if_it_was_there(tmp_path, mixed, int8):
    def add_mask(model: Any) -> None:
        from ai_edge_litert import schema_py_generated as schema

        mask, buffer = schema.TensorT(), schema.BufferT()
        mask.name, mask.shape, mask.type = b"mask", [1, 10], schema.TensorType.FLOAT32
        mask.buffer = len(model.buffers)
        buffer.data = np.frombuffer(np.full(10, -np.inf, "<f4").tobytes(), np.uint8)
        model.buffers.append(buffer)
        model.subgraphs[0].tensors.append(mask)

    before = rewritten(mixed, tmp_path / "a.tflite", add_mask)
    after = rewritten(int8, tmp_path / "b.tflite", add_mask)
    assert scan(before, after).problems == ()
    assert scan(mixed, after).problems == ("'mask' holds NaN or infinity",)


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf])
def test_a_scale_that_is_no_positive_number_is_a_problem(tmp_path, mixed, int8, scale):
    def change(model: Any) -> None:
        quantization = tensor_called(model, "odd/mm_5;").quantization
        quantization.scale = [*quantization.scale[:3], scale, *quantization.scale[4:]]

    (problem,) = scan(mixed, rewritten(int8, tmp_path / "bad.tflite", change)).problems
    assert problem.startswith("'odd/mm_5;' has 1 scales of 37 that are no positive number")


def test_an_integer_op_that_reads_floats_is_a_problem(tmp_path, mixed, mixed_ranges, quantizer):
    static = tmp_path / "static.tflite"
    quantizer.quantize(static, recipe("int8-static"), mixed_ranges)

    def change(model: Any) -> None:
        graph = model.subgraphs[0]
        names = [t.name.decode() for t in graph.tensors]
        softmax = next(
            op for op in graph.operators if names[op.outputs[0]] == "serving_default_p_output"
        )
        softmax.inputs = [names.index("serving_default_logits_output_dequant")]

    (problem,) = scan(mixed, rewritten(static, tmp_path / "bad.tflite", change)).problems
    assert problem == (
        "SOFTMAX 'serving_default_p_output' reads floats and writes quantized integers"
    )


WAYS = {
    "int8": "as integers, with activations that are quantized while it runs",
    "int8-weight-only": "dequantized",
    "int8-static": "as integers, with integer activations",
}


@pytest.mark.parametrize("made", WAYS)
@pytest.mark.parametrize("wanted", WAYS)
def test_ops_that_compute_otherwise_than_the_recipe_says_are_a_problem(
    tmp_path, mixed, mixed_ranges, quantizer, made, wanted
):
    """All files store the same weights, and all run."""
    quantizer.quantize(tmp_path / "q", recipe(made), mixed_ranges)
    problems = scan(mixed, tmp_path / "q", recipe=recipe(wanted)).problems
    if made == wanted:
        assert problems == ()
        return
    told = f"int8 weights {WAYS[made]}, where the recipe says {WAYS[wanted]}"
    # For embeddings static recipes have the dynamic rule.
    same = {made, wanted} == {"int8", "int8-static"}
    assert len(problems) == 10 - same
    assert sum(problem.endswith(told) for problem in problems) >= 9
    assert any(problem.startswith("FULLY_CONNECTED") for problem in problems)
    assert any(problem.startswith("CONV_2D_TRANSPOSE") for problem in problems)


def test_one_op_that_computes_otherwise_is_found_and_named(tmp_path, mixed, quantizer):
    odd = weight_only(8, regex="odd", operation="FULLY_CONNECTED")
    mix = recipe_from_rules("mix", [*recipe("int8").rules, odd])
    quantizer.quantize(tmp_path / "q", mix)
    assert scan(mixed, tmp_path / "q", recipe=mix).problems == ()
    (problem,) = scan(mixed, tmp_path / "q", recipe=recipe("int8")).problems
    assert re.fullmatch(
        "FULLY_CONNECTED '[^']*odd[^']*' reads its int8 weights dequantized, .*", problem
    )
    applied = Applied(recipe=recipe("int8"), deviations=(), size_bytes=1)
    with pytest.raises(QuantizationError, match="gave a broken file: FULLY_CONNECTED"):
        verified(mixed, tmp_path / "q", applied)


def test_a_signature_that_points_beside_the_graphs_outputs_is_a_problem(tmp_path, mixed, int8):
    def change(model: Any) -> None:
        model.signatureDefs[0].outputs[0].tensorIndex = model.subgraphs[0].operators[3].outputs[0]
        model.signatureDefs[0].inputs[0].name = b"picture"

    problems = scan(mixed, rewritten(int8, tmp_path / "bad.tflite", change)).problems
    assert len(problems) == 2
    assert "is gone" in problems[0]
    assert "is none of its graph" in problems[1]


def test_embeddings_that_stay_float_are_told_loudly(tmp_path, mixed, mixed_ranges, quantizer):
    applied = quantizer.quantize(tmp_path / "q", recipe("static_wi8_ai8"), mixed_ranges)
    found, (note,) = verified(mixed, tmp_path / "q", applied)
    assert found.float_share == pytest.approx(100 * 48 * 4 / 87844, abs=0.001)
    assert found.float_share > MOST_FLOAT
    assert note.code == "float-weights"
    assert "of EMBEDDING_LOOKUP (19,200 bytes): ai-edge-quantizer has no int8" in note.text
    assert verified(mixed, tmp_path / "q", applied, most_float=0.5)[1] == ()


@pytest.mark.parametrize(
    ("name", "op", "why"),
    [
        ("dynamic_wi4_afp32", "DEPTHWISE_CONV_2D", "ai-edge-quantizer has no int4 per channel for"),
        ("dynamic_legacy_wi8_afp32", "CONV_2D", "weights of at least 1024 elements, it has 432"),
        ("dynamic_wi8c_hr_afp32", "CONV_2D", "by DECOMPOSED_HADAMARD_ROTATION for CONV_2D"),
    ],
)
def test_why_a_weight_stayed_float_is_told(tmp_path, mixed, quantizer, name, op, why):
    applied = quantizer.quantize(tmp_path / "q", recipe(name))
    found, _ = verified(mixed, tmp_path / "q", applied)
    (weight,) = [w for w in found.weights if w.op == op and "a bias" not in (w.why_float or "")]
    assert why in (weight.why_float or "")


def test_biases_that_are_float_as_they_should_be_are_no_news(tmp_path, mixed, quantizer):
    applied = quantizer.quantize(tmp_path / "q", recipe("int8"))
    found, notes = verified(mixed, tmp_path / "q", applied, most_float=0)
    kept = [w for w in found.weights if w.why_float is not None]
    assert {w.why_float for w in kept} == {"a bias, which is float where the activations are"}
    assert notes == ()


def test_a_file_that_keeps_more_than_its_weights_tell_gets_a_note(tmp_path, mixed, int8):
    def change(model: Any) -> None:
        from ai_edge_litert import schema_py_generated as schema

        left_over = schema.BufferT()
        left_over.data = np.zeros(200_000, np.uint8)
        model.buffers.append(left_over)

    from tpu2edge.quantize.apply import Applied

    fat = rewritten(int8, tmp_path / "fat.tflite", change)
    assert len(read_tflite(fat).buffers) > len(read_tflite(int8).buffers)
    applied = Applied(recipe=recipe("int8"), deviations=(), size_bytes=fat.stat().st_size)
    _, (note,) = verified(mixed, fat, applied)
    assert note.code == "quantized-size"
