"""``embedding_bag`` of a two-dimensional input: a lookup and a sum, mean or maximum over each bag."""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from tpu2edge.export.rewrites.splice import Const, is_dynamic, splice

__all__ = ["apply"]

aten = torch.ops.aten
Tensor = torch.Tensor

_TARGETS = (aten.embedding_bag.default, aten.embedding_bag.padding_idx)


def apply(program: ExportedProgram) -> int:
    """Replace the bags that are known to be of equal length; gives their number."""
    count = 0
    for node in list(program.graph.nodes):
        if node.target in _TARGETS and not is_dynamic(node) and _equal(node.args[2]):
            count += splice(program, node, _embedding_bag)
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _equal(offsets: Any) -> bool:
    """Whether the offsets are the range that torch makes of a two-dimensional input."""
    return isinstance(offsets, Node) and offsets.target is aten.arange.start_step


def _embedding_bag(
    const: Const,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Bags of equal length, as a two-dimensional input gives them."""
    bags = offsets.shape[0] - int(include_last_offset)
    if padding_idx not in (None, -1) or indices.shape[0] % max(bags, 1):
        return NotImplemented
    rows = aten.embedding.default(weight, indices.reshape(bags, indices.shape[0] // bags))
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(bags, -1, 1)
    total = rows.sum(1) if mode == 0 else rows.mean(1) if mode == 1 else rows.amax(1)
    unused = torch.zeros(bags, dtype=torch.int64)
    return total, unused, unused, unused
