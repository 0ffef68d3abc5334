from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from tpu2edge.errors import BundleError
from tpu2edge.flatbuffer import UNBOUNDED, read_tflite, signatures_of, summarize
from tpu2edge.types import Dim

DATA = Path(__file__).parents[1] / "data"


def packed(model: Any) -> bytes:
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def tensor(name: str, shape: list[int], kind: int, buffer: int, **more: Any) -> Any:
    made = schema.TensorT()
    made.name, made.shape, made.type, made.buffer = name, shape, kind, buffer
    for key, value in more.items():
        setattr(made, key, value)
    return made


def stored(values: np.ndarray[Any, Any]) -> Any:
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(values.tobytes(), np.uint8)
    return buffer


def per_channel(scales: list[float], axis: int) -> Any:
    made = schema.QuantizationParametersT()
    made.scale, made.zeroPoint = scales, [0] * len(scales)
    made.quantizedDimension = axis
    return made


def model_of(tensors: list[Any], buffers: list[Any], inputs: list[int], outputs: list[int]) -> Any:
    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD
    custom = schema.OperatorCodeT()
    custom.builtinCode = custom.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    custom.customCode = "MyOp"
    op = schema.OperatorT()
    op.opcodeIndex, op.inputs, op.outputs = 0, [*inputs, -1], outputs
    other = schema.OperatorT()
    other.opcodeIndex, other.inputs, other.outputs = 1, inputs, outputs
    graph = schema.SubGraphT()
    graph.name, graph.tensors, graph.operators = "main", tensors, [op, op, other]
    graph.inputs, graph.outputs = inputs, outputs
    model = schema.ModelT()
    model.version, model.description = 3, "made by hand"
    model.operatorCodes, model.subgraphs = [code, custom], [graph]
    model.buffers = [schema.BufferT(), *buffers]
    return model


def named(pairs: list[tuple[str, int]]) -> list[Any]:
    maps = []
    for name, index in pairs:
        entry = schema.TensorMapT()
        entry.name, entry.tensorIndex = name, index
        maps.append(entry)
    return maps


def test_a_converted_model_is_read_as_litert_itself_reads_it() -> None:
    path = DATA / "small.float32.tflite"
    file = read_tflite(path)
    (signature,) = signatures_of(file)
    assert signature.name == "serving_default"
    assert [str(spec) for spec in signature.inputs] == ["image: float32[1x2x6x6]"]
    assert [str(spec) for spec in signature.outputs] == [
        "logits: float32[1x3]",
        "features: float32[1x16]",
    ]
    assert file.op_histogram["FULLY_CONNECTED"] == 2
    assert file.size_bytes == path.stat().st_size
    assert "min_runtime_version" in file.metadata

    interpreter = Interpreter(str(path))
    interpreter.allocate_tensors()
    details = {d["index"]: d for d in interpreter.get_tensor_details()}
    for t in file.subgraphs[0].tensors:
        assert details[t.index]["name"] == t.name
        assert tuple(details[t.index]["shape"]) == t.shape
        if t.is_constant:
            np.testing.assert_array_equal(file.constant(t.index), interpreter.get_tensor(t.index))


def test_an_activation_that_is_part_of_an_operator_is_told() -> None:
    (graph,) = read_tflite(DATA / "small.float32.tflite").subgraphs
    fused = [(op.name, op.activation) for op in graph.operators if op.activation]
    assert fused == [("CONV_2D", "RELU"), ("FULLY_CONNECTED", "RELU")]


def test_a_static_int8_model_has_its_scales_at_the_boundary_and_no_float_left() -> None:
    path = DATA / "small.static_wi8_ai8.tflite"
    file = read_tflite(path)
    (signature,) = signatures_of(file)
    interpreter = Interpreter(str(path))
    runner = interpreter.get_signature_runner("serving_default")
    for spec, details in [
        (signature.input("image"), runner.get_input_details()["image"]),
        (signature.output("logits"), runner.get_output_details()["logits"]),
    ]:
        assert spec.dtype == "int8"
        assert (spec.scale, spec.zero_point) == pytest.approx(details["quantization"])
    summary = summarize(file)
    assert summary.float_bytes == 0
    assert summary.float_share == 0.0


def test_a_dynamic_int8_model_says_how_each_weight_is_quantized_and_what_stayed_float() -> None:
    summary = summarize(read_tflite(DATA / "small.dynamic_wi8_afp32.tflite"))
    by_shape = {w.shape: w for w in summary.weights}
    assert by_shape[(16, 64)].stored_as == "int8 per-channel axis 0"
    assert by_shape[(16, 64)].used_by == ("FULLY_CONNECTED",)
    assert by_shape[(16, 64)].size_bytes == 16 * 64
    assert by_shape[(16,)].stored_as == "float32"
    assert summary.float_bytes == 4 * (4 + 16 + 3)  # the three biases
    assert summary.weight_bytes == sum(w.size_bytes for w in summary.weights)
    assert summary.float_share == pytest.approx(summary.float_bytes / summary.weight_bytes)


def test_bytes_and_path_give_the_same_reading() -> None:
    path = DATA / "small.float32.tflite"
    from_path, from_bytes = read_tflite(path), read_tflite(path.read_bytes())
    assert from_path.subgraphs == from_bytes.subgraphs
    assert from_path.signatures == from_bytes.signatures


def test_signature_names_come_in_the_order_of_the_graph_and_dynamic_sizes_as_dims() -> None:
    model = model_of(
        [
            tensor("a", [1, 4], schema.TensorType.FLOAT32, 0, shapeSignature=[-1, 4]),
            tensor("b", [1, 4], schema.TensorType.FLOAT32, 0, shapeSignature=[-1, 4]),
            tensor("c", [1, 4], schema.TensorType.FLOAT32, 0, shapeSignature=[-1, 4]),
        ],
        [],
        [1, 0],
        [2],
    )
    entry = schema.SignatureDefT()
    entry.signatureKey, entry.subgraphIndex = "decode", 0
    entry.inputs = named([("alpha", 0), ("zulu", 1)])
    entry.outputs = named([("twice", 2), ("again", 2)])
    model.signatureDefs = [entry]
    file = read_tflite(packed(model))
    (signature,) = signatures_of(file)
    assert [spec.name for spec in signature.inputs] == ["zulu", "alpha"]
    assert [spec.name for spec in signature.outputs] == ["twice", "again"]
    assert signature.input("zulu").shape == (Dim(name="zulu_0", min=1, max=UNBOUNDED), 4)
    assert file.op_histogram == {"ADD": 2, "MyOp": 1}
    assert file.subgraphs[0].operators[0].inputs == (1, 0, -1)


def test_packed_and_short_types_are_widened_exactly() -> None:
    values = [-8, 7, 0, -1, 3]
    nibbles = np.array([0x78, 0xF0, 0x03], np.uint8)  # lowest element in the lowest bits
    bfloat = np.array([1.5, -2.0], np.float32).view(np.uint32) >> 16
    twos = np.array([0b11_01_10_00], np.uint8)
    file = read_tflite(
        packed(
            model_of(
                [
                    tensor("x", [1], schema.TensorType.FLOAT32, 0),
                    tensor(
                        "w4", [5], schema.TensorType.INT4, 1, quantization=per_channel([0.5], 0)
                    ),
                    tensor("bf", [2], schema.TensorType.BFLOAT16, 2),
                    tensor("w2", [2, 2], schema.TensorType.INT2, 3),
                ],
                [stored(nibbles), stored(bfloat.astype(np.uint16)), stored(twos)],
                [0],
                [0],
            )
        )
    )
    assert file.constant(1).tolist() == values
    assert file.constant(2).tolist() == [1.5, -2.0]
    assert file.constant(3).tolist() == [[0, -2], [1, -1]]
    assert file.tensor(1).stored_as == "int4 per-tensor"
    with pytest.raises(BundleError, match="'x' is computed, not stored"):
        file.constant(0)


def test_blocks_are_reported_with_their_size_and_their_scales_are_no_weights() -> None:
    details = schema.BlockwiseQuantizationT()
    details.scales, details.zeroPoints, details.blockSize = 2, 0, 32
    blocks = schema.QuantizationParametersT()
    blocks.detailsType = schema.QuantizationDetails.BlockwiseQuantization
    blocks.details = details
    file = read_tflite(
        packed(
            model_of(
                [
                    tensor("x", [1], schema.TensorType.FLOAT32, 0),
                    tensor("w", [2, 64], schema.TensorType.INT4, 1, quantization=blocks),
                    tensor("s", [2, 2], schema.TensorType.FLOAT16, 2),
                ],
                [stored(np.zeros(64, np.uint8)), stored(np.ones(4, np.float16))],
                [0],
                [0],
            )
        )
    )
    summary = summarize(file)
    assert [w.stored_as for w in summary.weights] == ["int4 blocks of 32"]
    assert summary.float_bytes == 0
    assert summary.constant_bytes_by_dtype == {"int4": 64, "float16": 8}


def test_weights_behind_the_flatbuffer_are_found_and_shared_ones_counted_once() -> None:
    weights = np.arange(6, dtype=np.float32)
    behind = schema.BufferT()
    behind.offset, behind.size = 2, weights.nbytes  # any offset: fields of 0 and 1 are not written
    model = model_of(
        [
            tensor("x", [1], schema.TensorType.FLOAT32, 0),
            tensor("w", [2, 3], schema.TensorType.FLOAT32, 1),
            tensor("w again", [6], schema.TensorType.FLOAT32, 1),
        ],
        [behind],
        [0],
        [0],
    )
    behind.offset = len(packed(model))
    data = packed(model) + weights.tobytes()
    file = read_tflite(data)
    assert file.constant(1).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert file.constant(2).tolist() == [0, 1, 2, 3, 4, 5]
    assert summarize(file).weight_bytes == weights.nbytes
    with pytest.raises(BundleError, match=r"buffer 1 is cut off"):
        read_tflite(data[:-1])


def test_weights_in_another_file_are_named_and_not_read() -> None:
    group = schema.ExternalBufferGroupT()
    group.name = "weights.bin"
    external = schema.ExternalBufferT()
    external.id, external.group, external.offset, external.length = 7, 0, 4096, 16
    model = model_of(
        [
            tensor("x", [1], schema.TensorType.FLOAT32, 0),
            tensor("w", [4], schema.TensorType.FLOAT32, 0, externalBuffer=7),
        ],
        [],
        [0],
        [0],
    )
    model.externalBufferGroups, model.externalBuffers = [group], [external]
    file = read_tflite(packed(model))
    assert summarize(file).weight_bytes == 16
    with pytest.raises(BundleError, match=r"lie in another file, 'weights.bin'"):
        file.constant(1)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no .tflite file but empty"),
        (b"PK\x03\x04" + bytes(40), "a zip archive"),
        (b"\x7fELF" + bytes(40), "7f 45 4c 46"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    ],
)
def test_a_foreign_file_is_named_for_what_it_is(data: bytes, said: str) -> None:
    with pytest.raises(BundleError, match=said):
        read_tflite(data)


def test_a_missing_file_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="cannot be read: No such file"):
        read_tflite(tmp_path / "none.tflite")


def test_a_weight_shorter_than_its_shape_is_damage() -> None:
    model = model_of(
        [
            tensor("x", [1], schema.TensorType.FLOAT32, 0),
            tensor("w", [4], schema.TensorType.FLOAT32, 1),
        ],
        [stored(np.zeros(3, np.float32))],
        [0],
        [0],
    )
    with pytest.raises(BundleError, match=r"'w' \(float32\[4\]\) needs 16 bytes, its buffer"):
        read_tflite(packed(model))


def test_an_operator_that_names_no_tensor_is_damage() -> None:
    model = model_of([tensor("x", [1], schema.TensorType.FLOAT32, 0)], [], [0], [5])
    with pytest.raises(BundleError, match=r"operator 0 \(ADD\) has the index 5, of 1"):
        read_tflite(packed(model))


def test_whatever_is_cut_or_flipped_is_read_or_refused_never_another_error() -> None:
    good = (DATA / "small.static_wi8_ai8.tflite").read_bytes()
    draw = random.Random(0)
    refused = 0
    for _ in range(400):
        data = bytearray(good)
        kind = draw.randrange(3)
        if kind == 0:
            data = data[: draw.randrange(8, len(data))]
        else:
            for _ in range(1 if kind == 1 else 40):
                data[draw.randrange(8, len(data))] = draw.randrange(256)
        try:
            file = read_tflite(bytes(data))
            summarize(file)
            signatures_of(file)
            for graph in file.subgraphs:
                for t in graph.tensors:
                    if t.is_constant:
                        file.constant(t.index, graph.index)
        except BundleError:
            refused += 1
    assert refused > 100  # cuts alone are a third
