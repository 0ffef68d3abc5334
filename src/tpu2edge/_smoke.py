"""Runs a model of one addition on LiteRT; for :mod:`tpu2edge.doctor`, in a child process."""

from __future__ import annotations

from typing import Any


def _model_bytes() -> bytes:
    """A .tflite file that doubles a float32[2]."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    def tensor(name: str) -> Any:
        made = schema.TensorT()
        made.name, made.shape, made.type = name, [2], schema.TensorType.FLOAT32
        return made

    code = schema.OperatorCodeT()
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD
    code.version = 1
    add = schema.OperatorT()
    add.inputs, add.outputs = [0, 0], [1]
    add.builtinOptionsType = schema.BuiltinOptions.AddOptions
    add.builtinOptions = schema.AddOptionsT()
    graph = schema.SubGraphT()
    graph.tensors, graph.operators = [tensor("x"), tensor("y")], [add]
    graph.inputs, graph.outputs = [0], [1]
    model = schema.ModelT()
    model.version, model.operatorCodes = 3, [code]
    model.subgraphs, model.buffers = [graph], [schema.BufferT()]
    builder = flatbuffers.Builder(256)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def main() -> None:
    """Prints one line when the numbers are right, raises or crashes when not."""
    import ai_edge_litert
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=_model_bytes())
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, np.array([1.5, -2.0], np.float32))
    interpreter.invoke()
    got = interpreter.get_tensor(1).tolist()
    if got != [3.0, -4.0]:
        raise SystemExit(f"LiteRT computed {got} for [1.5, -2.0] + [1.5, -2.0]")
    print(f"LiteRT {ai_edge_litert.__version__} ran a model of one addition, right")


if __name__ == "__main__":
    main()
