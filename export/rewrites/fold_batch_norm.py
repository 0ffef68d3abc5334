"""Folds a batch normalisation in evaluation mode into the convolution before it.

y = (conv(x, w) + b - mean) * g / sqrt(var + eps) + beta
  = conv(x, w * s) + (b - mean) * s + beta        with s = g / sqrt(var + eps), per output channel

The new weights are computed in float64 and rounded once. No placeholder is added: the folded weight
takes the place of the convolution's, the folded bias that of the normalisation's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.export import ExportedProgram

__all__ = ["apply"]

aten = torch.ops.aten

_CONV = (
    aten.conv1d.default,
    aten.conv1d.padding,
    aten.conv2d.default,
    aten.conv2d.padding,
    aten.conv3d.default,
    aten.conv3d.padding,
)
_CONV_TRANSPOSE = (
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
_GROUPS = 6  # the position of `groups` in all of them


def apply(program: ExportedProgram) -> int:
    """Folds in place; gives the number of normalisations folded."""
    targets = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.target is not None and hasattr(spec.arg, "name")
    }
    count = 0
    for node in list(program.graph.nodes):
        if node.target is aten.batch_norm.default:
            count += _fold(program, node, targets)
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return count


def _fold(program: ExportedProgram, norm: torch.fx.Node, targets: dict[str, str]) -> int:
    conv, gamma, beta, mean, var, training, _, eps = norm.args[:8]
    if training or not isinstance(conv, torch.fx.Node) or len(conv.users) != 1:
        return 0
    if conv.target not in _CONV and conv.target not in _CONV_TRANSPOSE:
        return 0
    args = list(conv.args) + [None] * (3 - len(conv.args))
    weight_node, bias_node = args[1], args[2]
    weight = _constant(program, weight_node, targets)
    shift = _constant(program, beta, targets)
    values = [_constant(program, item, targets) for item in (mean, var)]
    scale = torch.ones(()) if gamma is None else _constant(program, gamma, targets)
    bias = torch.zeros(()) if bias_node is None else _constant(program, bias_node, targets)
    if weight is None or shift is None or scale is None or bias is None:
        return 0
    if any(value is None for value in values):
        return 0
    # Both are replaced in their store, so nothing else may read them (tied weights).
    if not _only_here(program, weight_node, targets) or not _only_here(program, beta, targets):
        return 0
    m, v = (value.double() for value in values)  # type: ignore[union-attr]
    factor = scale.double() / torch.sqrt(v + float(eps))  # type: ignore[operator,arg-type]
    wide = weight.double()
    if conv.target in _CONV_TRANSPOSE:  # (in, out / groups, …): channels are split over the groups
        groups = int(args[_GROUPS]) if len(args) > _GROUPS else 1  # type: ignore[arg-type]
        rows, columns = wide.shape[:2]
        split = wide.reshape(groups, rows // groups, columns, -1)
        wide = (split * factor.reshape(groups, 1, columns, 1)).reshape(wide.shape)
    else:
        wide = wide * factor.reshape(-1, *([1] * (wide.dim() - 1)))
    _replace(program, weight_node, targets, wide.to(weight.dtype))
    folded = ((bias.double() - m) * factor + shift.double()).to(weight.dtype)
    _replace(program, beta, targets, folded)
    args[2] = beta
    conv.args = tuple(args)
    # The placeholder of beta stands before every call, so the new use is in order.
    norm.replace_all_uses_with(conv)
    program.graph.erase_node(norm)
    return 1


def _only_here(program: ExportedProgram, node: Any, targets: dict[str, str]) -> bool:
    """Whether this is the only use of the tensor, under any of its names."""
    value = _constant(program, node, targets)
    assert value is not None
    uses = 0
    for placeholder in program.graph.nodes:
        if placeholder.op != "placeholder":
            break
        other = _constant(program, placeholder, targets)
        if other is not None and other.data_ptr() == value.data_ptr():
            uses += len(placeholder.users)
    return uses == 1


def _constant(program: ExportedProgram, node: Any, targets: dict[str, str]) -> torch.Tensor | None:
    if not isinstance(node, torch.fx.Node) or node.op != "placeholder" or node.name not in targets:
        return None
    target = targets[node.name]
    value = program.state_dict.get(target)
    if value is None:
        value = program.constants.get(target)
    return value.detach() if isinstance(value, torch.Tensor) else None


def _replace(
    program: ExportedProgram, node: Any, targets: dict[str, str], value: torch.Tensor
) -> None:
    target = targets[node.name]
    store = program.state_dict if target in program.state_dict else program.constants
    old = store[target]
    store[target] = (
        torch.nn.Parameter(value, requires_grad=False)
        if isinstance(old, torch.nn.Parameter)
        else value
    )
