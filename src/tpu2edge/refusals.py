"""LiteRT's refusal of a file that was just converted, in words about the model.

LiteRT names the operator by its number, but a delegate takes many operators at once and is one node
to it: "Node number 635 (TfLiteXNNPackDelegate) failed to prepare". LiteRT's own kernels mostly refuse
the same operator, and with a reason; where they take it, beginnings of the graph are run instead, and
the first that is refused ends with the operator.
"""

from __future__ import annotations

import bisect
import mmap
import re
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import DeviceError, LoweringError, Place
from tpu2edge.flatbuffer import Operator, Subgraph, TfliteFile, read_tflite
from tpu2edge.places import place_in_graph

if TYPE_CHECKING:
    from tpu2edge.runtime_check.parity import ParityReport
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["refuse_unrunnable", "write_beginning"]

_NO_KERNEL = re.compile(r"[Dd]idn't find op for builtin opcode '(?P<op>\w+)'")
_CUSTOM = re.compile(r"Encountered unresolved custom op: (?P<op>[\w.]+)")
_NODE_FAILED = re.compile(r"Node number (?P<node>\d+) \((?P<op>\w+)\) failed to (?P<what>\w+)")

# Offsets into vtables, by schema.fbs of LiteRT: SubGraph.outputs and .operators, SignatureDef.outputs.
_OUTPUTS, _OPERATORS, _NAMED_OUTPUTS = 8, 10, 6
_MOST_BYTES = 2**31 - 1  # of a flatbuffer: what is added at the end must be within reach


def refuse_unrunnable(
    report: ParityReport, file: Path, nodes: Mapping[str, Any], reference: Reference
) -> None:
    """Raise if LiteRT on this machine refuses the float file or what it was checked with.

    Raises:
        LoweringError: an operator of the file has no kernel, or its kernel or the delegate refuses
            it; the place is the module and the line that it is from.
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
    if not failed:
        return
    who, what, text = "LiteRT", failed["what"], reason.text
    op, index = failed["op"], int(failed["node"])
    place = _place_of_operator(file, nodes, op, index)
    if op.endswith("Delegate"):
        samples = _one_of_each_shape(reference) if reason.code == "device-run" else []
        by_kernels = _refusal(file, reference, samples, kernels="builtin")
        if own := _NODE_FAILED.search(by_kernels or ""):
            text, op, index = by_kernels or "", own["op"], int(own["node"])
            what = own["what"]
            place = _place_of_operator(file, nodes, op, index)
        elif found := _first_refused(file, reference, samples):
            who, op = "LiteRT's XNNPACK delegate", found[1].name
            place = place_in_graph(*found, nodes)
    raise LoweringError(
        f"{who} cannot {what} the operator {op} of the converted file: {text.splitlines()[0]}",
        do="replace this part of the model by an equal form, or leave it out",
        place=place,
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


def _one_of_each_shape(reference: Reference) -> list[int]:
    shapes: dict[Any, int] = {}
    for index in range(len(reference)):
        inputs = reference.inputs(index)
        shapes.setdefault(tuple(inputs[name].shape for name in sorted(inputs)), index)
    return list(shapes.values())


def _refusal(
    file: Path, reference: Reference, samples: Sequence[int], kernels: str | None = None
) -> str | None:
    """What LiteRT says when it refuses the file, or to run it on these samples; None if it does not."""
    from tpu2edge.runtime_check.devices.client import Session
    from tpu2edge.runtime_check.parity import fit_sample

    name = reference.signature.name
    try:
        with Session(file, kernels=kernels) as session:
            for signature in session.signatures:
                if signature.name == name:
                    ids = reference.sample_ids
                    feeds = (fit_sample(reference.inputs(i), signature, ids[i]) for i in samples)
                    for _ in session.run(name, feeds):
                        pass
    except DeviceError as error:
        return str(error)
    return None


def _first_refused(
    file: Path, reference: Reference, samples: Sequence[int]
) -> tuple[Subgraph, Operator] | None:
    """The operator that the first refused beginning of a graph ends with."""
    read = read_tflite(file)
    if read.size_bytes > _MOST_BYTES:
        return None
    with tempfile.TemporaryDirectory(prefix="tpu2edge-") as folder:
        target = Path(folder) / file.name
        for index in sorted({entry.subgraph for entry in read.signatures}):
            graph = read.subgraphs[index]

            def refuses(count: int, graph: Subgraph = graph) -> bool:
                write_beginning(read, graph, count, target)
                return _refusal(target, reference, samples) is not None

            if refuses(0):  # it is in another graph
                continue
            count = len(graph.operators)
            first = bisect.bisect_left(range(1, count + 1), True, key=refuses)
            if first < count:
                return graph, graph.operators[first]
    return None


def write_beginning(file: TfliteFile, graph: Subgraph, count: int, target: Path) -> None:
    """Write the file with the first ``count`` operators of ``graph`` alone.

    What these make and do not use is the graph's result; signatures of the graph name no outputs.
    """
    from ai_edge_litert import schema_py_generated as schema

    assert file.path is not None
    begun = graph.operators[:count]
    used = {index for operator in begun for index in operator.inputs}
    ends = [index for operator in begun for index in operator.outputs if index not in used]
    shutil.copyfile(file.path, target)
    with target.open("r+b") as stream:
        end = stream.seek(0, 2)
        start = end + -end % 4
        stream.write(b"\0" * (start - end) + struct.pack(f"<{1 + len(ends)}i", len(ends), *ends))
        stream.flush()
        with mmap.mmap(stream.fileno(), 0) as memory:
            model: Any = schema.Model.GetRootAs(memory, 0)
            table: Any = model.Subgraphs(graph.index)._tab
            struct.pack_into("<I", memory, table.Vector(table.Offset(_OPERATORS)) - 4, count)
            slot = table.Pos + table.Offset(_OUTPUTS)
            struct.pack_into("<I", memory, slot, start - slot)
            for index, entry in enumerate(file.signatures):
                table = model.SignatureDefs(index)._tab
                if entry.subgraph == graph.index:
                    outputs = table.Vector(table.Offset(_NAMED_OUTPUTS))
                    struct.pack_into("<I", memory, outputs - 4, 0)
            del model, table
