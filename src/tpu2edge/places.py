"""What a converted file's operators and tensors are in the model, and words about them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge.errors import Place
from tpu2edge.flatbuffer import Operator, Subgraph, before_squashing, read_tflite
from tpu2edge.types import Note

if TYPE_CHECKING:
    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.devices.client import Tap

__all__ = ["place_in_graph", "taps_in", "transposes_left"]


def taps_in(file: Path, program: TracedProgram, origins: Mapping[str, str]) -> list[Tap]:
    """The file's tensors that hold the values before final activations.

    A tensor is called after the nodes that it was fused from; the last name of the last node that
    an exported one was decomposed to holds its result.
    """
    from tpu2edge.runtime_check.devices.client import Tap

    read = read_tflite(file)
    entry = next((e for e in read.signatures if e.name == program.signature.name), None)
    if entry is None:
        return []
    graph = read.subgraphs[entry.subgraph]
    made = {index for operator in graph.operators for index in operator.outputs}
    squashed = before_squashing(read)
    found: list[Tap] = []
    for output, name, node in zip(
        program.tapped_outputs, program.taps, program.tap_nodes, strict=True
    ):
        endings = [f"/{label};" for label, origin in origins.items() if origin == node]
        index = next(
            (
                tensor.index
                for ending in reversed(endings)
                for tensor in graph.tensors
                if tensor.index in made and tensor.name.endswith(ending)
            ),
            squashed.get((entry.name, output)),
        )
        if index is not None:
            found.append(Tap(name, index, entry.name))
    return found


def place_in_graph(graph: Subgraph, operator: Operator, nodes: Mapping[str, Any]) -> Place | None:
    """Where an operator of the file is from in the model, by the names of its tensors."""
    # An output of the signature has no layer's name of its own: then the inputs tell.
    tensors = [graph.tensors[i].name for i in (*operator.outputs, *operator.inputs) if i >= 0]
    for sources in bundles.layers_of_tensors(tensors, nodes).values():
        source = sources[0]
        return Place(
            module=source["module"],
            op=source["op"],
            file=source.get("file"),
            line=source.get("line"),
        )
    return None


def transposes_left(file: Path, nodes: Mapping[str, Any]) -> Note:
    """How many TRANSPOSE operators a file has, and which modules and lines they come from."""
    places: list[str] = []
    for graph in read_tflite(file).subgraphs:
        for operator in graph.operators:
            if operator.name == "TRANSPOSE":
                place = place_in_graph(graph, operator, nodes)
                where = "where it comes from is not known"
                if place is not None:
                    where = f"module '{place.module}'" if place.module else "the top module"
                    where += f" ({place.file}:{place.line})" if place.file else ""
                places.append(where)
    if not places:
        return Note(code="transposes", text="channels last: no TRANSPOSE is left in the file")
    listed = "; ".join(dict.fromkeys(places))
    text = f"channels last: {len(places)} TRANSPOSE left in the file, from {listed}"
    return Note(code="transposes", text=text)
