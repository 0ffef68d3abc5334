"""Below which value an activation cannot be told from minus infinity by what follows.

Attention masks are numbers like -1e9 that are added before a softmax. Taken as part of an
activation's range they leave all real values in one step of the quantized scale. But a softmax
gives a value ``t`` below its row's largest the share exp(-t): far enough below, one value is as
good as another. From each softmax back through the operators that only move, choose or add values,
this gives every tensor on the way its *floor*, the value below which clipping changes nothing:

    softmax(x)              floor(x) = least over rows of max(row's least, row's largest - t)
    y = reshape(x), …       floor(x) = floor(y)
    y = a + b               floor(a) = floor(y) - max(b): then a + b <= floor(y) where a is clipped
    y = a - b               floor(a) = floor(y) + min(b)
    y = a * b, b 0 or 1     floor(a) = floor(y)

Where a tensor goes several ways, the lowest floor counts, and there is none if one of the ways ends
elsewhere (an output of the graph, or any other operator). Constants have floors too: a mask of
-3.4e38 that is stored in the file is clipped as it is quantized.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tpu2edge.flatbuffer import Subgraph

__all__ = ["SAME_ELEMENTS", "Known", "floors_of"]

#: The output holds the elements of the first input and no others: the same range.
SAME_ELEMENTS = frozenset(
    {
        "RESHAPE",
        "TRANSPOSE",
        "SQUEEZE",
        "EXPAND_DIMS",
        "BROADCAST_TO",
        "SPACE_TO_DEPTH",
        "DEPTH_TO_SPACE",
        "REVERSE_V2",
    }
)

# Every element of the output is an element of an input, or the smaller or larger of two.
_CHOOSING = SAME_ELEMENTS | {
    "SLICE",
    "STRIDED_SLICE",
    "SPLIT",
    "UNPACK",
    "PACK",
    "CONCATENATION",
    "GATHER",
    "GATHER_ND",
    "SELECT",
    "SELECT_V2",
    "PAD",
    "PADV2",
    "TILE",
    "MAXIMUM",
    "MINIMUM",
    "DYNAMIC_UPDATE_SLICE",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """What was measured (or is stored) of one tensor."""

    low: float
    high: float
    zero_or_one: bool = False


def floors_of(
    graph: Subgraph,
    softmax_floors: Mapping[int, float],
    known: Callable[[int], Known | None],
) -> dict[int, float]:
    """Tensor index -> its floor, for the tensors of one subgraph that have one.

    ``softmax_floors`` are those of the softmaxes' own inputs. ``known`` tells a tensor's range.
    """
    demands: dict[int, list[float]] = {index: [-math.inf] for index in graph.outputs}
    for op in reversed(graph.operators):
        wanted = [min(demands.get(index, [math.inf])) for index in op.outputs]
        floor = min(wanted, default=-math.inf)
        for position, index in enumerate(op.inputs):
            if index < 0 or graph.tensors[index].dtype != "float32":
                continue
            own = -math.inf
            if op.name == "SOFTMAX":
                own = softmax_floors.get(index, -math.inf)
            elif math.isfinite(floor) and op.activation is None:
                own = _through(op.name, position, op.inputs, floor, known)
            demands.setdefault(index, []).append(own)
    floors = {index: min(values) for index, values in demands.items()}
    return {index: floor for index, floor in floors.items() if math.isfinite(floor)}


def _through(
    name: str,
    position: int,
    inputs: tuple[int, ...],
    floor: float,
    known: Callable[[int], Known | None],
) -> float:
    if name in _CHOOSING:
        return floor
    if name not in ("ADD", "SUB", "MUL") or len(inputs) != 2:
        return -math.inf
    other = known(inputs[1 - position])
    if other is None:
        return -math.inf
    if name == "ADD":
        return floor - other.high
    if name == "SUB":
        return floor + other.low if position == 0 else -math.inf
    return floor if other.zero_or_one and floor < 0 else -math.inf
