"""What ai-edge-quantizer's rules are matched against: each op of a file, by its name and scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tpu2edge.flatbuffer import Subgraph, TfliteFile, read_tflite

__all__ = ["MAX_SCOPE", "UPSTREAM_NAMES", "WEIGHT_INPUT", "OpScope", "op_scopes", "scope_of"]

#: A scope is cut here (ai_edge_quantizer.utils.tfl_flatbuffer_utils.get_op_scope).
MAX_SCOPE = 10_000

#: The quantizer's name of an op, where it is not LiteRT's own.
UPSTREAM_NAMES: Mapping[str, str] = {"TRANSPOSE_CONV": "CONV_2D_TRANSPOSE"}

#: Which input of an op is its weight; BATCH_MATMUL's may be either.
WEIGHT_INPUT: Mapping[str, tuple[int, ...]] = {
    "FULLY_CONNECTED": (1,),
    "CONV_2D": (1,),
    "DEPTHWISE_CONV_2D": (1,),
    "CONV_2D_TRANSPOSE": (1,),
    "EMBEDDING_LOOKUP": (1,),
    "BATCH_MATMUL": (1, 0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class OpScope:
    """One op: ``op`` is its name in a rule's ``operation``, ``scope`` what ``regex`` searches.

    ``weight`` is the index of the constant tensor that the quantizer takes for its weight, with
    the bytes that it takes up; None and 0 for an op that has none. ``tensors`` are the names of its
    outputs and of the constants that it alone reads: what it may be known by.
    """

    subgraph: int
    index: int
    op: str
    scope: str
    tensors: tuple[str, ...] = ()
    outputs: int = 0  # how many of ``tensors`` are outputs, which come first
    weight: int | None = None
    weight_bytes: int = 0


def op_scopes(source: Path | TfliteFile) -> list[OpScope]:
    """Every op of the file, in its order."""
    file = read_tflite(source) if isinstance(source, Path) else source
    result: list[OpScope] = []
    for graph in file.subgraphs:
        readers = Counter(i for op in graph.operators for i in set(op.inputs))
        for op in graph.operators:
            name = UPSTREAM_NAMES.get(op.name, op.name)
            weight = next(
                (
                    op.inputs[at]
                    for at in WEIGHT_INPUT.get(name, ())
                    if at < len(op.inputs)
                    and op.inputs[at] >= 0
                    and graph.tensors[op.inputs[at]].is_constant
                ),
                None,
            )
            result.append(
                OpScope(
                    subgraph=graph.index,
                    index=op.index,
                    op=name,
                    scope=scope_of(graph, op.inputs, op.outputs),
                    tensors=tuple(
                        graph.tensors[i].name
                        for i in (*op.outputs, *op.inputs)
                        if i >= 0
                        and (i in op.outputs or (graph.tensors[i].is_constant and readers[i] == 1))
                    ),
                    outputs=sum(i >= 0 for i in op.outputs),
                    weight=weight,
                    weight_bytes=0 if weight is None else graph.tensors[weight].size_bytes,
                )
            )
    return result


def scope_of(graph: Subgraph, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> str:
    """The names of an op's outputs (of its inputs where they have none), each with a semicolon."""
    for tensors in (outputs, inputs):
        names = [graph.tensors[i].name for i in tensors if i != -1 and graph.tensors[i].name]
        if names:
            return "".join(f"{name};" for name in names)[:MAX_SCOPE]
    return ""
