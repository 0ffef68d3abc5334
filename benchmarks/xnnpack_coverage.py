"""Which operators LiteRT's XNNPACK delegate takes: measured, one operator at a time.

    python benchmarks/xnnpack_coverage.py FILE_OR_FOLDER... > coverage.jsonl

Each kind of operator in the .tflite files (its name, and of each operand the type, the rank, whether it
is constant, and whether its size is known) is cut out into a file of its own and loaded with the default
delegate: a DELEGATE among its operators tells that it was taken. Prints one JSON line a kind, with what
the tables in ``src/tpu2edge/delegates.py``, which are made of this, say of it.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from tpu2edge.delegates import why_left
from tpu2edge.flatbuffer import read_tflite

_TYPES = {code: name.lower() for name, code in vars(schema.TensorType).items() if name.isupper()}
_NAMES = {code: name for name, code in vars(schema.BuiltinOperator).items() if name.isupper()}


def operand(model: Any, graph: Any, index: int) -> str:
    """ "float32[4]", "const int8[2]q" (quantized) or "float32[?]" of a size that is not known."""
    if index < 0:
        return "none"
    tensor = graph.tensors[index]
    constant = model.buffers[tensor.buffer].data is not None
    unknown = tensor.shapeSignature is not None and min(tensor.shapeSignature, default=0) < 0
    rank = "?" if unknown else str(0 if tensor.shape is None else len(tensor.shape))
    quantization = tensor.quantization
    quantized = quantization is not None and quantization.scale is not None
    kind = "q" if quantized else ""
    return f"{'const ' if constant else ''}{_TYPES[tensor.type]}[{rank}]{kind}"


def name_of(model: Any, operator: Any) -> str:
    code = model.operatorCodes[operator.opcodeIndex]
    return _NAMES[max(code.builtinCode, code.deprecatedBuiltinCode)]


def cut_out(model: Any, graph: Any, operator: Any) -> bytes:
    """A file of this operator alone; what is not constant becomes an input."""
    import flatbuffers

    alone = schema.ModelT()
    alone.version, alone.description = 3, b"one operator"
    alone.operatorCodes = [model.operatorCodes[operator.opcodeIndex]]
    alone.buffers = [schema.BufferT()]
    made = schema.SubGraphT()
    made.tensors, made.inputs, made.name = [], [], b"main"
    places: dict[int, int] = {-1: -1}
    for index in dict.fromkeys([*operator.inputs, *operator.outputs]):
        if index < 0:
            continue
        old = graph.tensors[index]
        tensor = schema.TensorT()
        tensor.__dict__.update(old.__dict__)
        data = model.buffers[old.buffer].data
        tensor.buffer = 0
        if data is not None:
            buffer = schema.BufferT()
            buffer.data = data
            alone.buffers.append(buffer)
            tensor.buffer = len(alone.buffers) - 1
        places[index] = len(made.tensors)
        made.tensors.append(tensor)
        if data is None and index in list(operator.inputs):
            made.inputs.append(places[index])
    made.outputs = [places[index] for index in operator.outputs]
    copy = schema.OperatorT()
    copy.__dict__.update(operator.__dict__)
    copy.opcodeIndex = 0
    copy.inputs = [places[index] for index in operator.inputs]
    copy.outputs = [places[index] for index in operator.outputs]
    made.operators = [copy]
    alone.subgraphs = [made]
    builder = flatbuffers.Builder(1024)
    builder.Finish(alone.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def is_taken(data: bytes) -> bool | None:
    """Whether the delegate takes the file's one operator; None where the file does not load."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        answer = b"?"
        try:
            from ai_edge_litert.interpreter import Interpreter

            interpreter = Interpreter(model_content=data)
            interpreter.allocate_tensors()
            names = [one["op_name"] for one in interpreter._get_ops_details()]
            answer = b"1" if "DELEGATE" in names else b"0"
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        answer = stream.read()
    os.waitpid(child, 0)
    return {b"1": True, b"0": False}.get(answer)


def made_up() -> Iterator[bytes]:
    """Files of operators that litert-torch does not write, but others do."""
    shape = (1, 4, 4, 8)
    yield one_operator("ELU", [shape], [shape])
    yield one_operator("SQUARE", [shape], [shape], schema.SquareOptionsT())
    yield one_operator("PRELU", [shape, np.ones((1, 1, 8), np.float32)], [shape])
    blocks = schema.DepthToSpaceOptionsT()
    blocks.blockSize = 2
    yield one_operator("DEPTH_TO_SPACE", [shape], [(1, 8, 8, 2)], blocks)
    blocks = schema.SpaceToDepthOptionsT()
    blocks.blockSize = 2
    yield one_operator("SPACE_TO_DEPTH", [shape], [(1, 2, 2, 32)], blocks)
    squeeze = schema.SqueezeOptionsT()
    squeeze.squeezeDims = [0]
    yield one_operator("SQUEEZE", [shape], [shape[1:]], squeeze)
    axis = np.array(0, np.int32)
    yield one_operator("EXPAND_DIMS", [shape, axis], [(1, *shape)], schema.ExpandDimsOptionsT())
    for pieces in (2, 4, 8):
        split = schema.SplitOptionsT()
        split.numSplits = pieces
        piece = (1, 4, 4, 8 // pieces)
        yield one_operator("SPLIT", [np.array(3, np.int32), shape], [piece] * pieces, split)


def one_operator(
    name: str, inputs: Sequence[Any], outputs: Sequence[tuple[int, ...]], options: Any = None
) -> bytes:
    """A file of one operator; an input is a shape of float32, or a constant."""
    import flatbuffers

    model, graph, operator = schema.ModelT(), schema.SubGraphT(), schema.OperatorT()
    model.version, model.buffers = 3, [schema.BufferT()]
    code = schema.OperatorCodeT()
    code.builtinCode = getattr(schema.BuiltinOperator, name)
    code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
    model.operatorCodes = [code]
    graph.name, graph.tensors, graph.inputs = b"main", [], []
    for place, given in enumerate([*inputs, *outputs]):
        tensor = schema.TensorT()
        tensor.name, tensor.type, tensor.buffer = f"t{place}".encode(), schema.TensorType.FLOAT32, 0
        tensor.shape = list(np.shape(given) if isinstance(given, np.ndarray) else given)
        if isinstance(given, np.ndarray):
            if given.dtype == np.int32:
                tensor.type = schema.TensorType.INT32
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(given.tobytes(), np.uint8)
            model.buffers.append(buffer)
            tensor.buffer = len(model.buffers) - 1
        elif place < len(inputs):
            graph.inputs.append(place)
        graph.tensors.append(tensor)
    operator.opcodeIndex = 0
    operator.inputs = list(range(len(inputs)))
    operator.outputs = list(range(len(inputs), len(inputs) + len(outputs)))
    if options is not None:
        operator.builtinOptions = options
        kind = type(options).__name__.removesuffix("T")
        operator.builtinOptionsType = getattr(schema.BuiltinOptions, kind)
    graph.outputs, graph.operators = operator.outputs, [operator]
    model.subgraphs = [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def files(paths: list[Path]) -> Iterator[Path]:
    known: set[str] = set()
    for path in paths:
        for file in sorted(path.rglob("*.tflite")) if path.is_dir() else [path]:
            digest = hashlib.sha256(file.read_bytes()).hexdigest()
            if digest not in known:
                known.add(digest)
                yield file


def data_of(paths: list[Path], largest: int, with_made_up: bool) -> Iterator[bytes]:
    yield from made_up() if with_made_up else ()
    for path in files(paths):
        if path.stat().st_size <= largest:
            yield path.read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--made-up", action="store_true", help="operators of other converters, too")
    parser.add_argument("--largest", type=int, default=3 << 20, help="bytes of a file looked at")
    options = parser.parse_args()
    importlib.import_module("ai_edge_litert.interpreter")  # once, not in each fork

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    found: set[tuple[str, str]] = set()
    for data in data_of(options.paths, options.largest, options.made_up):
        try:
            model = schema.ModelT.InitFromPackedBuf(data, 0)
            file = read_tflite(data)
        except Exception:  # noqa: BLE001 - files that tests have damaged
            continue
        for graph, read in zip(model.subgraphs, file.subgraphs, strict=True):
            for operator, same in zip(graph.operators or (), read.operators, strict=True):
                name = name_of(model, operator)
                if name in ("CUSTOM", "WHILE", "IF", "STABLEHLO_COMPOSITE"):
                    continue
                given = [operand(model, graph, index) for index in operator.inputs]
                results = [operand(model, graph, index) for index in operator.outputs]
                key = ", ".join(given) + " -> " + ", ".join(results)
                if (name, key) in found:
                    continue
                found.add((name, key))
                taken = is_taken(cut_out(model, graph, operator))
                table = why_left(file, read, same) is None
                print(json.dumps({"op": name, "kind": key, "taken": taken, "table": table}))


if __name__ == "__main__":
    main()
