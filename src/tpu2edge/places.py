"""What a converted file's operators and tensors are in the model, and words about them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge.errors import LoweringError, Place
from tpu2edge.flatbuffer import (
    Operator,
    Subgraph,
    before_squashing,
    read_tflite,
)
from tpu2edge.types import Note

if TYPE_CHECKING:
    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.devices.client import Tap
    from tpu2edge.runtime_check.parity import ParityReport

__all__ = ["place_in_graph", "refuse_unrunnable", "taps_in", "transposes_left"]

_NO_KERNEL = re.compile(r"[Dd]idn't find op for builtin opcode '(?P<op>\w+)'")
_NODE_FAILED = re.compile(r"Node number (?P<node>\d+) \((?P<op>\w+)\) failed to (?P<what>\w+)")
_CUSTOM = re.compile(r"Encountered unresolved custom op: (?P<op>[\w.]+)")


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


def refuse_unrunnable(report: ParityReport, file: Path, nodes: Mapping[str, Any]) -> None:
    """Turn LiteRT's refusal of a file that was just converted into words about the model.

    Raises:
        LoweringError: an operator of the float file has no kernel, or its kernel refuses it.
    """
    reason = next(
        (r for case in report.cases for r in case.reasons if r.code.startswith("device-")), None
    )
    if reason is None:
        return
    missing = _NO_KERNEL.search(reason.text) or _CUSTOM.search(reason.text)
    failed = _NODE_FAILED.search(reason.text)
    if missing:
        raise LoweringError(
            f"LiteRT has no kernel for {missing['op']}, which the model was converted to",
            do="replace this part of the model by operators that LiteRT has, or leave it out",
            place=_place_of_operator(file, nodes, missing["op"], None),
            step="check",
        )
    if failed:
        raise LoweringError(
            f"LiteRT cannot {failed['what']} the operator {failed['op']} of the converted file: "
            f"{reason.text.splitlines()[0]}",
            do="replace this part of the model by an equal form, or leave it out",
            place=_place_of_operator(file, nodes, failed["op"], int(failed["node"])),
            step="check",
        )


def _place_of_operator(
    file: Path, nodes: Mapping[str, Any], op: str, index: int | None
) -> Place | None:
    """Where the first ``op`` (number ``index`` of its graph, unless None) with a place is from."""
    for graph in read_tflite(file).subgraphs:
        for operator in graph.operators:
            if operator.name == op and index in (None, operator.index):
                place = place_in_graph(graph, operator, nodes)
                if place is not None:
                    return place
    return None


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
