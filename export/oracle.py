"""The float64 oracle: the traced program, node by node, in double precision on the CPU.

Running the graph (and not ``module.double()``) keeps what the author fixed in code: a ``.float()``
or ``dtype=torch.float32`` in forward would otherwise pull part of the computation back to single
precision, or fail. Weights are widened for the node that needs them and dropped after it, so the
oracle never holds a second copy of the model. Several samples go through the graph in step, node by
node, because widening the weights costs more than computing with them (MiniLM: 84 of 103 ms).
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tpu2edge.export import quantized

__all__ = ["Oracle"]

_NARROW = (torch.float32, torch.float16, torch.bfloat16)

# Operators whose meaning is bound to the width of the type: computed as the program has them.
_WIDTH_BOUND = ("aten.view.dtype", "aten.view_dtype", "quantized_decomposed", "torchao", "frexp")

# The largest value in the graph, for all samples that go in step, takes no more than this.
_STEP_BYTES = 32 << 20


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
        return self._run_in_step([tensors])[0]

    def run_many(self, samples: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
        """The same for each sample, in order; as many at once as memory and the graph allow."""
        ahead = iter(samples)
        while group := list(islice(ahead, self._step)):
            yield from self._run_in_step(group)

    def _run_in_step(self, samples: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
        if self._module is None:
            self._module = _widened(self._program.graph_module)
        shared: dict[int, torch.Tensor] = {}
        interpreters = [_Double(self._module, self._exceptions, shared) for _ in samples]
        default = torch.get_default_dtype()
        # Integers divided, averaged or scaled by a number become floats of the default type.
        torch.set_default_dtype(torch.float64)
        try:
            with torch.no_grad():
                for interpreter, tensors in zip(interpreters, samples, strict=True):
                    interpreter.begin(self._values(tensors))
                found = _in_step(self._module, interpreters, shared)
        finally:
            torch.set_default_dtype(default)
        count = len(self._program.graph_signature.user_outputs)
        flat = [list(r) if isinstance(r, (tuple, list)) else [r] for r in found]
        return [values[len(values) - count :] for values in flat]

    def _values(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        given = iter(tensors)
        values: list[Any] = []
        for spec in self._program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                values.append(_own(next(given)))
            elif spec.kind is InputKind.PARAMETER or self._step > 1:
                values.append(self._state(spec.target))
            else:  # the graph may write to it and read it again: widened once, and its own copy
                values.append(_own(self._state(spec.target)))
        return values

    @functools.cached_property
    def _step(self) -> int:
        """How many samples go in step: one where a sample may leave a trace that others see."""
        largest = 1
        for node in self._program.graph.nodes:
            if node.op == "call_function" and not _is_pure(node):
                return 1
            value = node.meta.get("val")
            if node.op == "call_function" and isinstance(value, torch.Tensor):
                if not all(isinstance(size, int) for size in value.shape):
                    return 1
                largest = max(largest, value.numel() * 8)
        return max(1, _STEP_BYTES // largest)

    def _state(self, target: str | None) -> Any:
        assert target is not None
        if target in self._program.state_dict:
            return self._program.state_dict[target]
        return self._program.constants[target]


class _Double(fx.Interpreter):
    """Computes each node on widened floats and frees each value after its last use."""

    def __init__(
        self, module: fx.GraphModule, exceptions: set[str], shared: dict[int, torch.Tensor]
    ) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._exceptions = exceptions
        self._shared = shared  # widened tensors by id(), for as long as one node is computed

    def begin(self, values: Sequence[Any]) -> None:
        """Set the placeholders' values for a run that goes node by node from outside."""
        self.env = {}
        self.args_iter = iter(values)

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        args, kwargs = fx.node.map_aggregate((args, kwargs), self._wide_once)
        exact = quantized.EXACT.get(n.target)
        if exact is not None:
            return exact(*args, **kwargs)
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

    def _wide_once(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dtype not in _NARROW:
            return value
        if id(value) not in self._shared:
            self._shared[id(value)] = value.to(torch.float64)
        return self._shared[id(value)]

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


def _in_step(
    module: fx.GraphModule, interpreters: Sequence[_Double], shared: dict[int, torch.Tensor]
) -> list[Any]:
    """What the output node gives in each interpreter, each node run in all before the next."""
    for node in module.graph.nodes:
        for interpreter in interpreters:
            interpreter.env[node] = interpreter.run_node(node)
        shared.clear()
        if node.op == "output":
            return [interpreter.env[node] for interpreter in interpreters]
        for gone in interpreters[0].user_to_last_uses.get(node, []):
            for interpreter in interpreters:
                del interpreter.env[gone]
    raise AssertionError("a graph without output")


def _is_pure(node: fx.Node) -> bool:
    """Whether a call neither writes to its inputs, nor draws random numbers, nor holds a graph."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__module__", "") == operator.getitem.__module__  # getitem, add, …
    if target is torch.ops.aten.dropout.default and node.args[2] is False:
        return True
    if target is torch.ops.aten.scaled_dot_product_attention.default:
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return isinstance(dropout, float) and dropout == 0.0
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


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
