"""Editing a graph of core operators: new calls that carry the value that lowering looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

__all__ = ["call", "value_of"]


def value_of(node: fx.Node) -> torch.Tensor:
    """The fake tensor that stands for the node's result (shape, dtype, strides)."""
    value = node.meta["val"]
    assert isinstance(value, torch.Tensor)
    return value


def call(
    before: fx.Node, op: Any, *args: Any, like: fx.Node | None = None, **kwargs: Any
) -> fx.Node:
    """A new node ``op(*args)`` before ``before``, with the meta of ``like`` (``before`` if None).

    Its value is computed on the fake tensors of its arguments.
    """
    graph = before.graph
    source = like or before
    with graph.inserting_before(before):
        node = graph.call_function(op, tuple(args), kwargs)
    given = map_aggregate((args, kwargs), _fake)
    modes = [v.fake_mode for v in _tensors(given) if hasattr(v, "fake_mode")]
    mode = modes[0] if modes else source.meta["val"].fake_mode
    with mode:
        value = op(*given[0], **given[1])
    for key in ("nn_module_stack", "stack_trace", "from_node", "source_fn_stack"):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    node.meta["val"] = value
    if isinstance(value, torch.Tensor):
        node.meta["tensor_meta"] = fx.passes.shape_prop._extract_tensor_metadata(value)
    return node


def _fake(item: Any) -> Any:
    return item.meta["val"] if isinstance(item, fx.Node) else item


def _tensors(item: Any) -> Sequence[Any]:
    found: list[Any] = []
    map_aggregate(item, lambda v: found.append(v) if isinstance(v, torch.Tensor) else None)
    return found
