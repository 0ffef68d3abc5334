"""What many tests share: tiny LiteRT files made by hand, references, and sessions' commands."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Graph:
    """One signature of a hand-made file; ops take and give tensors by name."""

    signature: str
    tensors: Mapping[str, tuple[str, Sequence[int]]]  # name -> NumPy dtype, shape (-1: dynamic)
    constants: Mapping[str, Any]
    ops: Sequence[tuple[str, Sequence[str], Sequence[str]]]
    inputs: Mapping[str, str]  # name in the signature -> tensor
    outputs: Mapping[str, str]


def write_tflite(path: Path, *graphs: Graph) -> Path:
    """Write a file that LiteRT loads; element-wise operators only."""
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT()
    model.version, model.description = 3, "made by hand"
    model.buffers, model.operatorCodes = [schema.BufferT()], []
    model.subgraphs, model.signatureDefs = [], []
    codes: dict[str, int] = {}
    for position, graph in enumerate(graphs):
        sub = schema.SubGraphT()
        sub.name, sub.tensors, sub.operators = graph.signature, [], []
        index: dict[str, int] = {}

        def add(
            name: str,
            dtype: str,
            shape: Sequence[int],
            buffer: int,
            sub: Any = sub,
            index: dict[str, int] = index,
        ) -> None:
            tensor = schema.TensorT()
            tensor.name, tensor.buffer = name, buffer
            tensor.shape = [1 if size < 0 else size for size in shape]
            if any(size < 0 for size in shape):
                tensor.shapeSignature = list(shape)
            tensor.type = getattr(schema.TensorType, dtype.upper())
            index[name] = len(sub.tensors)
            sub.tensors.append(tensor)

        for name, (dtype, shape) in graph.tensors.items():
            add(name, dtype, shape, 0)
        for name, value in graph.constants.items():
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
            model.buffers.append(buffer)
            add(name, value.dtype.name, value.shape, len(model.buffers) - 1)
        for kind, sources, targets in graph.ops:
            if kind not in codes:
                code = schema.OperatorCodeT()
                code.builtinCode = code.deprecatedBuiltinCode = getattr(
                    schema.BuiltinOperator, kind
                )
                code.version = 1
                codes[kind] = len(model.operatorCodes)
                model.operatorCodes.append(code)
            op = schema.OperatorT()
            op.opcodeIndex = codes[kind]
            op.inputs = [index[name] for name in sources]
            op.outputs = [index[name] for name in targets]
            options = "".join(part.capitalize() for part in kind.split("_")) + "Options"
            if hasattr(schema, options + "T"):
                op.builtinOptions = getattr(schema, options + "T")()
                op.builtinOptionsType = getattr(schema.BuiltinOptions, options)
            if kind == "SOFTMAX":
                op.builtinOptions.beta = 1.0
            sub.operators.append(op)
        sub.inputs = [index[name] for name in graph.inputs.values()]
        sub.outputs = [index[name] for name in dict.fromkeys(graph.outputs.values())]
        model.subgraphs.append(sub)
        entry = schema.SignatureDefT()
        entry.signatureKey, entry.subgraphIndex = graph.signature, position
        entry.inputs, entry.outputs = [], []
        for target, names in ((entry.inputs, graph.inputs), (entry.outputs, graph.outputs)):
            for name, tensor in names.items():
                mapped = schema.TensorMapT()
                mapped.name, mapped.tensorIndex = name, index[tensor]
                target.append(mapped)
        model.signatureDefs.append(entry)
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))
    return path


def affine_graph(
    weight: Any,
    shift: Any,
    *,
    outputs: Mapping[str, str] | None = None,
    signature: str = "serving_default",
    shape: Sequence[int] | None = None,
) -> Graph:
    """x -> scaled = x * weight and shifted = x + shift, both of the shape of x."""
    weight, shift = np.asarray(weight, np.float32), np.asarray(shift, np.float32)
    shape = list(weight.shape) if shape is None else list(shape)
    named = {"scaled": "scaled", "shifted": "shifted"} if outputs is None else dict(outputs)
    return Graph(
        signature=signature,
        tensors=dict.fromkeys(("x", "scaled", "shifted"), ("float32", shape)),
        constants={"weight": weight, "shift": shift},
        ops=[("MUL", ("x", "weight"), ("scaled",)), ("ADD", ("x", "shift"), ("shifted",))],
        inputs={"x": "x"},
        outputs=named,
    )


@pytest.fixture(scope="session")
def small_tflite() -> Path:
    """The file of make_tflite.py: image float32[1,2,6,6] -> logits [1,3] and features [1,16]."""
    return DATA / "small.float32.tflite"


@pytest.fixture(scope="session")
def write_graphs() -> Callable[..., Path]:
    """:func:`write_tflite` with each graph's fields as a dict."""

    def write(path: Path, *graphs: Mapping[str, Any]) -> Path:
        return write_tflite(path, *(Graph(**graph) for graph in graphs))

    return write


@pytest.fixture(scope="session")
def make_affine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a file with ``scaled = x * weight`` and ``shifted = x + shift``."""
    folder = tmp_path_factory.mktemp("affine")
    made = iter(range(10_000))

    def make(weight: Any, shift: Any, **more: Any) -> Path:
        return write_tflite(folder / f"{next(made)}.tflite", affine_graph(weight, shift, **more))

    return make


@pytest.fixture(scope="session")
def write_graph(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a file of one graph; takes the fields of :class:`Graph`."""
    folder = tmp_path_factory.mktemp("graphs")
    made = iter(range(10_000))

    def write(**fields: Any) -> Path:
        whole = {"signature": "serving_default", "constants": {}, **fields}
        return write_tflite(folder / f"{next(made)}.tflite", Graph(**whole))

    return write


@pytest.fixture(scope="session")
def make_linear(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a file of linear layers one after the other; the same weights twice are stored once."""
    folder = tmp_path_factory.mktemp("linear")

    def make(*weights: Any) -> Path:
        names = {id(weight): f"w{index}" for index, weight in reversed(list(enumerate(weights)))}
        rows = [weights[0].shape[1], *(weight.shape[0] for weight in weights)]
        tensors = {f"h{index}": ("float32", (1, width)) for index, width in enumerate(rows)}
        graph = Graph(
            signature="serving_default",
            tensors=tensors,
            constants={names[id(weight)]: weight for weight in weights},
            ops=[
                ("FULLY_CONNECTED", (f"h{index}", names[id(weight)]), (f"h{index + 1}",))
                for index, weight in enumerate(weights)
            ],
            inputs={"x": "h0"},
            outputs={"y": f"h{len(weights)}"},
        )
        return write_tflite(folder / f"{len(list(folder.iterdir()))}.tflite", graph)

    return make


@pytest.fixture(scope="session")
def typed_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One tensor of each kind in and out, a scalar and an empty one among them."""
    kinds: dict[str, tuple[str, Sequence[int]]] = {
        "scalar": ("float32", []),
        "flag": ("bool", [3]),
        "count": ("int32", [2, 2]),
        "pixel": ("uint8", [4]),
        "empty": ("float32", [0, 3]),
    }
    tensors = dict(kinds)
    for name, (dtype, shape) in kinds.items():
        tensors[f"{name}_out"] = (dtype, shape)
    return write_tflite(
        tmp_path_factory.mktemp("typed") / "typed.tflite",
        Graph(
            signature="serving_default",
            tensors=tensors,
            constants={"half": np.float32(0.5).reshape(()), "three": np.int32([[3]])},
            ops=[
                ("MUL", ("scalar", "half"), ("scalar_out",)),
                ("LOGICAL_NOT", ("flag",), ("flag_out",)),
                ("MUL", ("count", "three"), ("count_out",)),
                ("MAXIMUM", ("pixel", "pixel"), ("pixel_out",)),
                ("ABS", ("empty",), ("empty_out",)),
            ],
            inputs={name: name for name in kinds},
            outputs={name: f"{name}_out" for name in kinds},
        ),
    )


@pytest.fixture(scope="session")
def two_signatures_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``encode`` multiplies by 2 and adds 1; ``decode`` multiplies by 10 and adds 5."""
    ones = np.ones((2,), np.float32)
    return write_tflite(
        tmp_path_factory.mktemp("two") / "two.tflite",
        affine_graph(2 * ones, ones, signature="encode"),
        affine_graph(10 * ones, 5 * ones, signature="decode"),
    )


@pytest.fixture(scope="session")
def dynamic_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first axis is any size: scaled = 2 x, shifted = x + 1."""
    return write_tflite(
        tmp_path_factory.mktemp("dynamic") / "dynamic.tflite",
        affine_graph(np.float32([[2, 2]]), np.float32([[1, 1]]), shape=[-1, 2]),
    )


@pytest.fixture(scope="session")
def fallback_tflite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """w = 2 max(x + 1, x + 1): LiteRT's GPU accelerator has no MAXIMUM of one tensor."""
    graph = Graph(
        signature="serving_default",
        tensors=dict.fromkeys(("x", "y", "z", "w"), ("float32", [1, 4])),
        constants={"one": np.ones((1, 4), np.float32), "two": np.full((1, 4), 2, np.float32)},
        ops=[
            ("ADD", ("x", "one"), ("y",)),
            ("MAXIMUM", ("y", "y"), ("z",)),
            ("MUL", ("z", "two"), ("w",)),
        ],
        inputs={"x": "x"},
        outputs={"w": "w"},
    )
    return write_tflite(tmp_path_factory.mktemp("fallback") / "fallback.tflite", graph)


@pytest.fixture
def gloo() -> Any:
    """A process group of one rank, in this process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist
    dist.destroy_process_group()
