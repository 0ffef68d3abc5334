"""The policy for bfloat16 and float16 inside a program: computed in float32.

LiteRT's CPU kernels compute in float32; half-precision weights are a matter of the recipe. The
module's own tensors are widened before tracing (prepare.py); this is for the types that forward
names itself, ``x.to(torch.bfloat16)`` or ``torch.zeros(n, dtype=torch.float16)``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

__all__ = ["compute_in_float32"]

_HALF = (torch.float16, torch.bfloat16)


def compute_in_float32(program: ExportedProgram) -> int:
    """Change ``program`` in place; gives the number of operators that computed in half precision."""
    count = _graph(program.graph_module)
    for store in (program.state_dict, program.constants):
        for name, value in list(store.items()):
            if isinstance(value, torch.Tensor) and value.dtype in _HALF:
                wide = value.detach().to(torch.float32)
                is_parameter = isinstance(value, torch.nn.Parameter)
                store[name] = (
                    torch.nn.Parameter(wide, requires_grad=False) if is_parameter else wide
                )
    return count


def _graph(module: torch.fx.GraphModule) -> int:
    count = 0
    for child in module.children():
        if isinstance(child, torch.fx.GraphModule):  # the branches of cond, the body of a loop
            count += _graph(child)
    for node in module.graph.nodes:
        values = node.meta.get("val")
        if _holds_half(values):
            count += node.op == "call_function"
            node.meta["val"] = torch.fx.node.map_aggregate(values, _wide)
            node.meta.pop("tensor_meta", None)
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, _wide_dtype)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, _wide_dtype)
    if count:
        module.recompile()
    return count


def _holds_half(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_half(item) for item in value)
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _wide(value: Any) -> Any:
    return value.to(torch.float32) if _holds_half(value) else value


def _wide_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALF else value
