"""The float64 oracle: the traced program, node by node, in double precision on the CPU.

Running the graph (and not ``module.double()``) keeps what the author fixed in code: a ``.float()``
or ``dtype=torch.float32`` in forward would otherwise pull part of the computation back to single
precision, or fail. Weights are widened when a node first needs them and dropped after its last use,
so the oracle never holds a second copy of the model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

__all__ = ["Oracle"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)

# Operators whose meaning is bound to the width of the type: computed as the program has them.
_WIDTH_BOUND = ("aten.view.dtype", "aten.view_dtype", "quantized_decomposed", "torchao", "frexp")


class Oracle:
    """Runs one ExportedProgram in float64; made once, run for many samples."""

    def __init__(self, program: ExportedProgram) -> None:
        self._program = program
        self._module: fx.GraphModule | None = None
        self._exceptions: set[str] = set()

    @property
    def exceptions(self) -> tuple[str, ...]:
        """Operators that had to be computed in the program's own precision."""
        return tuple(sorted(self._exceptions))

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The user outputs for these user inputs, floats in float64."""
        if self._module is None:
            self._module = _widened(self._program.graph_module)
        signature = self._program.graph_signature
        given = iter(tensors)
        values: list[Any] = []
        for spec in signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                values.append(_own(next(given)))
            elif spec.kind is InputKind.PARAMETER:
                values.append(self._state(spec.target))
            else:  # the graph may write to it and read it again: widened once, and its own copy
                values.append(_own(self._state(spec.target)))
        interpreter = _Double(self._module, self._exceptions)
        default = torch.get_default_dtype()
        # Integers divided, averaged or scaled by a number become floats of the default type.
        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad():
                flat = interpreter.run(*values, enable_io_processing=False)
        finally:
            torch.set_default_dtype(default)
        flat = list(flat) if isinstance(flat, (tuple, list)) else [flat]
        return flat[len(flat) - len(signature.user_outputs) :]

    def _state(self, target: str | None) -> Any:
        assert target is not None
        if target in self._program.state_dict:
            return self._program.state_dict[target]
        return self._program.constants[target]


class _Double(fx.Interpreter):
    """Computes each node on widened floats and frees each value after its last use."""

    def __init__(self, module: fx.GraphModule, exceptions: set[str]) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._exceptions = exceptions

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = fx.node.map_aggregate((args, kwargs), _wide)
        if any(part in str(n.target) for part in _WIDTH_BOUND):
            self._exceptions.add(str(n.target))
            return self._as_traced(n, args, kwargs)
        try:
            return fx.node.map_aggregate(n.target(*args, **kwargs), _wide)  # type: ignore[operator]
        except (RuntimeError, NotImplementedError, TypeError):
            # No double kernel (or mixed types the graph fixed by hand): this node as traced.
            result = self._as_traced(n, args, kwargs)
            self._exceptions.add(str(n.target))
            return result

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        return fx.node.map_aggregate(super().output(target, args, kwargs), _wide)

    def _as_traced(self, n: fx.Node, args: Any, kwargs: Any) -> Any:
        sources = [node.meta.get("val") for node in n.all_input_nodes]
        narrow = next(
            (v.dtype for v in sources if isinstance(v, torch.Tensor) and v.is_floating_point()),
            torch.float32,
        )

        def back(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype is torch.float64:
                return value.to(narrow)
            return value

        args, kwargs = fx.node.map_aggregate((args, kwargs), back)
        return fx.node.map_aggregate(n.target(*args, **kwargs), _wide)  # type: ignore[operator]


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _NARROW:
        return value.to(torch.float64)
    return value


def _own(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    wide = _wide(value)
    return wide.clone() if wide is value else wide


def _widened(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the graph in which every float type that is named is float64."""
    wide = fx.GraphModule(module, copy.deepcopy(module.graph))
    for name, child in list(wide.named_children()):
        if isinstance(child, fx.GraphModule):  # branches of cond, bodies of while_loop, map, scan
            setattr(wide, name, _widened(child))
    for node in wide.graph.nodes:
        if node.op != "call_function" or any(p in str(node.target) for p in _WIDTH_BOUND):
            continue
        node.args = fx.node.map_aggregate(node.args, _wide_dtype)
        node.kwargs = fx.node.map_aggregate(node.kwargs, _wide_dtype)
        if _makes_float32(node):
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
    wide.recompile()
    return wide


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value


def _makes_float32(node: fx.Node) -> bool:
    """A factory (arange, full, linspace …) that takes its float type from the default dtype."""
    schema = getattr(node.target, "_schema", None)
    value = node.meta.get("val")
    if schema is None or not isinstance(value, torch.Tensor) or value.dtype not in _NARROW:
        return False
    takes_tensor = any("Tensor" in str(argument.type) for argument in schema.arguments)
    takes_dtype = any(argument.name == "dtype" for argument in schema.arguments)
    return takes_dtype and not takes_tensor and node.kwargs.get("dtype") is None
