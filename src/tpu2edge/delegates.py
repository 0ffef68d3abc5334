"""Which operators of a file LiteRT's XNNPACK delegate leaves to LiteRT's own, slower kernels.

Each of them also cuts the graph in two, and the tensors between are laid out anew. The tables are
measured: benchmarks/xnnpack_coverage.py loads one operator at a time (ai-edge-litert 2.3.0, x86-64,
2026-12-01), and a test holds them to what the runtime does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu2edge.flatbuffer import Operator, Subgraph, TfliteFile, read_tflite
from tpu2edge.places import place_in_graph
from tpu2edge.types import Note

__all__ = ["Left", "left_by_xnnpack", "note_of_xnnpack", "why_left"]

# Taken when they give float32.
_FLOAT = frozenset(
    [
        "ABS",
        "ADD",
        "AVERAGE_POOL_2D",
        "BATCH_MATMUL",
        "CEIL",
        "CONCATENATION",
        "CONV_2D",
        "COS",
        "DEPTH_TO_SPACE",
        "DEPTHWISE_CONV_2D",
        "DEQUANTIZE",
        "DIV",
        "ELU",
        "EXP",
        "FLOOR",
        "FULLY_CONNECTED",
        "GELU",
        "HARD_SWISH",
        "LEAKY_RELU",
        "LOG",
        "LOGISTIC",
        "MAXIMUM",
        "MAX_POOL_2D",
        "MEAN",
        "MINIMUM",
        "MUL",
        "NEG",
        "PAD",
        "PRELU",
        "REDUCE_MAX",
        "REDUCE_MIN",
        "RELU",
        "RELU6",
        "RELU_N1_TO_1",
        "RESHAPE",
        "RESIZE_BILINEAR",
        "ROUND",
        "RSQRT",
        "SIN",
        "SLICE",
        "SOFTMAX",
        "SPACE_TO_DEPTH",
        "SPLIT",
        "SQRT",
        "SQUARE",
        "SQUARED_DIFFERENCE",
        "STRIDED_SLICE",
        "SUB",
        "SUM",
        "TANH",
        "TRANSPOSE",
        "TRANSPOSE_CONV",
    ]
)
# Taken when they give int8 that stands for real numbers.
_INT8 = frozenset(
    [
        "ADD",
        "CONCATENATION",
        "CONV_2D",
        "DEPTHWISE_CONV_2D",
        "FULLY_CONNECTED",
        "LOGISTIC",
        "MEAN",
        "MUL",
        "QUANTIZE",
        "RESHAPE",
        "SLICE",
        "TANH",
        "TRANSPOSE",
        "TRANSPOSE_CONV",
    ]
)
# The operand that has to be a constant, as weights and axes are.
_CONSTANT = {
    "CONV_2D": (1,),
    "DEPTHWISE_CONV_2D": (1,),
    "FULLY_CONNECTED": (1,),
    "MEAN": (1,),
    "PAD": (1,),
    "REDUCE_MAX": (1,),
    "REDUCE_MIN": (1,),
    "RESHAPE": (1,),
    "RESIZE_BILINEAR": (1,),
    "SLICE": (1, 2),
    "SPLIT": (0,),
    "STRIDED_SLICE": (1, 2, 3),
    "SUM": (1,),
    "TRANSPOSE": (1,),
    "TRANSPOSE_CONV": (0, 1),
}
_MOST_RANK = 6
_PARTS = range(2, 6)  # of a CONCATENATION
_MOST_PIECES = 4  # of a SPLIT


@dataclass(frozen=True, kw_only=True, slots=True)
class Left:
    """An operator that stays outside of the delegate, and why in a word or two."""

    subgraph: int
    operator: Operator
    why: str

    @property
    def kind(self) -> str:
        """ "GATHER", or with the reason where the operator alone does not tell, "ADD int32"."""
        name = self.operator.name
        return name if self.why == "operator" else f"{name} {self.why}"


def left_by_xnnpack(file: TfliteFile) -> tuple[Left, ...]:
    """The operators of all graphs that XNNPACK does not take, in the file's order."""
    return tuple(
        Left(subgraph=graph.index, operator=operator, why=why)
        for graph in file.subgraphs
        for operator in graph.operators
        if (why := why_left(file, graph, operator)) is not None
    )


def why_left(file: TfliteFile, graph: Subgraph, operator: Operator) -> str | None:
    """Why XNNPACK does not take the operator; None if it does."""
    name = operator.name
    if name not in _FLOAT | _INT8 or not operator.outputs:
        return "operator"
    given = [graph.tensors[index] for index in operator.inputs if index >= 0]
    result = graph.tensors[operator.outputs[0]]
    if result.dtype == "int8" and result.quantization is not None:
        if name not in _INT8:
            return "int8"
    elif result.dtype != "float32" or name not in _FLOAT:
        return result.dtype
    if max(len(tensor.shape) for tensor in (*given, result)) > _MOST_RANK:
        return "rank"
    if name == "CONCATENATION" and len(given) not in _PARTS:
        return f"{len(given)} parts"
    if name == "SPLIT" and len(operator.outputs) > _MOST_PIECES:
        return f"{len(operator.outputs)} pieces"
    for place in _CONSTANT.get(name, ()):
        if place < len(given) and not (given[place].is_constant or 0 in given[place].shape):
            return "computed weights" if result.dtype == "float32" else "computed operand"
    if name == "SLICE" and -1 in (*given[0].shape_signature, *result.shape_signature):
        return "dynamic"
    if name == "STRIDED_SLICE" and (file.constant(given[3].index, graph.index) != 1).any():
        return "with steps"
    if name in ("CONV_2D", "DEPTHWISE_CONV_2D") and result.dtype == "float32":
        weights = given[1].dtype
        if weights == "int4" or (weights == "int8" and name == "DEPTHWISE_CONV_2D"):
            return f"{weights} weights"
    return None


def note_of_xnnpack(path: Path, nodes: Mapping[str, Any]) -> list[Note]:
    """A note that counts the operators outside of XNNPACK and names their modules; none if all are in."""
    file = read_tflite(path)
    left = left_by_xnnpack(file)
    if not left:
        return []
    kinds: dict[str, list[str]] = {}
    for one in left:
        place = place_in_graph(file.subgraphs[one.subgraph], one.operator, nodes)
        kinds.setdefault(one.kind, []).append((place.module or "") if place is not None else "")
    total = sum(file.op_histogram.values())
    text = f"xnnpack: {len(left)} of {total} operators run in LiteRT's own kernels: "
    return [Note(code="xnnpack", text=text + "; ".join(_listed(kinds)))]


def _listed(kinds: Mapping[str, Sequence[str]]) -> Iterator[str]:
    for kind, places in sorted(kinds.items(), key=lambda item: (-len(item[1]), item[0])):
        named = [place for place in dict.fromkeys(places) if place]
        more = f" and {len(named) - 2} more" if len(named) > 2 else ""
        yield f"{len(places)} {kind}" + (f" ({', '.join(named[:2])}{more})" if named else "")
