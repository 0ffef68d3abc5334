"""Putting a function in plain torch in the place of a call, with constants that it computes.

The decompositions of the second kind cannot bring new constants into a program, and come too late
for operators that litert-torch marks as composites. A spliced function can and does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["Const", "add_constant", "apply_table", "arguments", "is_dynamic", "splice", "trace_in"]

#: Given to a spliced function: takes what computes a real tensor (outside of the trace), gives what
#: stands for that tensor in the program.
Const = Callable[[Callable[[], torch.Tensor]], torch.Tensor]

_META = ("nn_module_stack", "stack_trace", "from_node", "source_fn_stack")
_PREFIX = "rewritten"


def apply_table(
    program: ExportedProgram, table: Mapping[Any, Callable[..., Any]], *, dynamic: bool = False
) -> int:
    """Replace calls by ``table[op](const, *args, **kwargs)``; gives the number of those replaced.

    A function that gives NotImplemented leaves its call. Without ``dynamic``, so does a call with
    sizes that are known only when the model runs.
    """
    count = 0
    for node in list(program.graph.nodes):
        function = table.get(node.target) if node.op == "call_function" else None
        if function is not None and (dynamic or not is_dynamic(node)):
            count += splice(program, node, function)
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def splice(program: ExportedProgram, node: fx.Node, function: Callable[..., Any]) -> bool:
    """Replace one call by ``function(const, *args, **kwargs)``, unless that gives NotImplemented.

    The function must give as many tensors, of the same sizes and types, as the call.
    """
    result = trace_in(program, node, function)
    if result is NotImplemented:
        return False
    if isinstance(result, (list, tuple)):
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]])  # type: ignore[index]
            program.graph.erase_node(user)
    else:
        node.replace_all_uses_with(result)
    program.graph.erase_node(node)
    return True


def trace_in(
    program: ExportedProgram,
    node: fx.Node,
    function: Callable[..., Any],
    stand_in: Callable[[fx.Node, Callable[[fx.Node], Any]], Any] | None = None,
) -> Any:
    """The nodes of ``function(const, *args, **kwargs)``, traced in before ``node``.

    ``stand_in(argument, value_of)`` gives what the function gets for a node among the arguments,
    from the values of other nodes.
    """
    sources: list[fx.Node] = []

    def source(item: fx.Node) -> Any:
        if item not in sources:
            sources.append(item)
        return item.meta["val"]

    def called(const: Const, value: Callable[[fx.Node], Any]) -> Any:
        def given(item: fx.Node) -> Any:
            return value(item) if stand_in is None else stand_in(item, value)

        args, kwargs = map_arg((node.args, node.kwargs), given)
        return function(const, *args, **kwargs)

    mode = _mode(program)
    constants: list[torch.Tensor] = []

    def collect(make: Callable[[], torch.Tensor]) -> torch.Tensor:
        with _disable_current_modes():
            tensor = make().detach().contiguous()
        constants.append(tensor)
        return mode.from_tensor(tensor, static_shapes=True)

    with mode, torch.no_grad():
        result = called(collect, source)
    if result is NotImplemented:
        return NotImplemented
    inputs = [*sources, *(add_constant(program, tensor) for tensor in constants)]

    def traced(*given: Any) -> Any:
        known = dict(zip(sources, given, strict=False))
        rest = iter(given[len(sources) :])
        return called(lambda _: next(rest), known.__getitem__)

    with mode, torch.no_grad():
        part = make_fx(traced, pre_dispatch=True)(*[n.meta["val"] for n in inputs]).graph
    return _inline(program.graph, node, part, inputs)


def _inline(graph: fx.Graph, node: fx.Node, part: fx.Graph, inputs: Sequence[fx.Node]) -> Any:
    new: dict[fx.Node, Any] = {}
    rest = iter(inputs)
    result: Any = None
    with graph.inserting_before(node):
        for item in part.nodes:
            if item.op == "placeholder":
                new[item] = next(rest)
            elif item.op == "output":
                result = map_arg(item.args[0], new.__getitem__)
            else:
                new[item] = graph.node_copy(item, new.__getitem__)
                for key in _META:
                    new[item].meta.pop(key, None)
                    if key in node.meta:
                        new[item].meta[key] = node.meta[key]
    return result


def add_constant(program: ExportedProgram, tensor: torch.Tensor) -> fx.Node:
    """A new constant of the program; an equal one from an earlier rewrite is used again."""
    specs = program.graph_signature.input_specs
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    for spec, placeholder in zip(specs, placeholders, strict=True):
        if spec.target is not None and spec.target.startswith(_PREFIX):
            known = program.constants[spec.target]
            assert isinstance(known, torch.Tensor)
            if known.dtype == tensor.dtype and torch.equal(known, tensor):
                return placeholder
    # Constants stand before the inputs of the user.
    index = next(
        (i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs)
    )
    name = f"{_PREFIX}_{sum(str(s.target).startswith(_PREFIX) for s in specs)}"
    before = (
        placeholders[index]
        if index < len(placeholders)
        else next(n for n in program.graph.nodes if n.op != "placeholder")
    )
    with program.graph.inserting_before(before):
        node = program.graph.placeholder(name)
    value = tensor.detach().contiguous().clone()
    node.meta["val"] = _mode(program).from_tensor(value, static_shapes=True)
    program.constants[name] = value
    specs.insert(
        index,
        InputSpec(kind=InputKind.CONSTANT_TENSOR, arg=TensorArgument(name=node.name), target=name),
    )
    return node


def arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call of ``op`` by name, with the schema's defaults."""
    given = dict(kwargs)
    for index, spec in enumerate(op._schema.arguments):
        if index < len(args):
            given[spec.name] = args[index]
        elif spec.name not in given:
            given[spec.name] = spec.default_value
    return given


def _mode(program: ExportedProgram) -> FakeTensorMode:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor) and hasattr(item, "fake_mode"):
                mode: FakeTensorMode = item.fake_mode
                return mode
    return FakeTensorMode()


def is_dynamic(node: fx.Node) -> bool:
    """Whether a size of the result or of an argument is known only when the model runs."""
    for item in (node, *node.all_input_nodes):
        value = item.meta.get("val")
        for one in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(one, torch.SymInt):
                return True
            if isinstance(one, torch.Tensor) and any(
                isinstance(size, torch.SymInt) for size in one.shape
            ):
                return True
    return False
