"""The values before a final softmax, log-softmax or sigmoid, as further outputs of a program.

Squashing operators hide faults: where a softmax is saturated, logits that are wrong by a factor give
the same probabilities. So what goes into them is compared as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

__all__ = ["tap_name", "tap_nodes", "with_taps"]

aten = torch.ops.aten

_SQUASHING = (
    aten.softmax.int,
    aten._softmax.default,
    aten.log_softmax.int,
    aten._log_softmax.default,
    aten.sigmoid.default,
)
# Operators that leave the values as they are, between the squashing and the output.
_SAME_VALUES = (
    aten.view.default,
    aten.reshape.default,
    aten.clone.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
    aten.flatten.using_ints,
    aten.alias.default,
    aten.detach.default,
)


def tap_name(output: str) -> str:
    """The name that the values before ``output``'s last operator are reported under."""
    return f"{output} (before its activation)"


def with_taps(
    program: ExportedProgram, outputs: Sequence[str]
) -> tuple[ExportedProgram, tuple[str, ...]]:
    """``program`` with those values as outputs behind its own, and which outputs have them.

    The program itself is left as it is, and is what comes back when there are none.
    """
    flat = list(_output(program.graph).args[0])  # type: ignore[arg-type]
    own = flat[len(flat) - len(outputs) :]
    inputs = [_before(node) for node in own]
    tapped = [name for name, node in zip(outputs, inputs, strict=True) if node is not None]
    if not tapped:
        return program, ()
    graph = copy.deepcopy(program.graph)
    by_name = {node.name: node for node in graph.nodes}
    more = [by_name[node.name] for node in inputs if node is not None]
    last = _output(graph)
    last.args = ((*last.args[0], *more),)  # type: ignore[misc]
    last.meta["val"] = tuple(node.meta.get("val") for node in last.args[0])  # type: ignore[union-attr]
    signature = copy.deepcopy(program.graph_signature)
    signature.output_specs.extend(
        OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(node.name), None) for node in more
    )
    calls = copy.copy(program.module_call_graph)
    calls[0] = copy.deepcopy(calls[0])
    assert calls[0].signature is not None
    total = len(own) + len(more)
    calls[0].signature.out_spec = pytree.tree_structure(tuple(range(total)))
    calls[0].signature.outputs = [
        *calls[0].signature.outputs,
        *(TensorArgument(node.name) for node in more),
    ]
    return (
        ExportedProgram(
            root=program.graph_module,
            graph=graph,
            graph_signature=signature,
            state_dict=program.state_dict,
            range_constraints=program.range_constraints,
            module_call_graph=calls,
            example_inputs=program.example_inputs,
            constants=program.constants,
            verifiers=program.verifiers,
        ),
        tuple(tapped),
    )


def tap_nodes(program: ExportedProgram, tapped: ExportedProgram) -> tuple[str, ...]:
    """The names of the nodes that ``tapped`` has as outputs behind those of ``program``."""
    before = len(_output(program.graph).args[0])  # type: ignore[arg-type]
    after = list(_output(tapped.graph).args[0])  # type: ignore[arg-type]
    return tuple(node.name for node in after[before:])


def _output(graph: torch.fx.Graph) -> torch.fx.Node:
    found: torch.fx.Node = next(node for node in reversed(graph.nodes) if node.op == "output")
    return found


def _before(node: torch.fx.Node) -> torch.fx.Node | None:
    while isinstance(node, torch.fx.Node) and node.target in _SAME_VALUES:
        node = node.args[0]  # type: ignore[assignment]
    if isinstance(node, torch.fx.Node) and node.target in _SQUASHING:
        source = node.args[0]
        return source if isinstance(source, torch.fx.Node) else None
    return None
