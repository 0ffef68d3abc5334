"""Results whose size hangs on the values: fixed where it can be, else refused in words.

Three of them have a form of fixed size: an index by a mask that is a constant; the values under a
mask that only go through elementwise operators, into a write under the same mask or into one sum or
mean; and a count of small numbers (bincount with minlength).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram

from tpu2edge.errors import LoweringError
from tpu2edge.export import blame
from tpu2edge.export.rewrites.indexing import static

__all__ = ["DECOMPOSITIONS", "apply", "bincounts"]

aten = torch.ops.aten

_STATIC = "the sizes of a LiteRT graph are fixed"
_REFUSED = {
    aten.nonzero.default: "torch.where with two values, or a mask in place of positions",
    aten.nonzero_numpy.default: "torch.where with two values, or a mask in place of positions",
    aten.where.default: "torch.where with two values, or a mask in place of positions",
    aten.argwhere.default: "torch.where with two values, or a mask in place of positions",
    aten.masked_select.default: "torch.where(mask, x, 0), which keeps the size",
    aten._unique2.default: "a count of every possible value, or take it out of the exported module",
    aten._unique.default: "a count of every possible value, or take it out of the exported module",
    aten.unique_dim.default: "a count of every possible value, or take it out of the module",
    aten.unique_consecutive.default: "x[1:] != x[:-1] as a mask, or take it out of the module",
    aten.unique_dim_consecutive.default: "x[1:] != x[:-1] as a mask",
    aten.repeat_interleave.Tensor: "the same number of repeats for all",
    aten.repeat_interleave.self_Tensor: "the same number of repeats for all",
    aten.bincount.default: "bincount with minlength, above every number that is counted",
}
_COPIES = (
    aten.lift_fresh_copy.default,
    aten.lift_fresh.default,
    aten.detach_.default,
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
)


def apply(program: ExportedProgram) -> int:
    """Fixes sizes in place; gives the number of places.

    Raises:
        LoweringError: a size cannot be fixed.
    """
    count = 0
    for node in list(program.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten.index.Tensor and _masks(node):
            count += _constant_mask(program, node) or _under_mask(node)
    if count:
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    for node in program.graph.nodes:
        _refuse(node)
    return count


def _refuse(node: fx.Node) -> None:
    instead = _REFUSED.get(node.target)
    if node.target is aten.bincount.default and _minlength(node):
        return
    if node.target in (aten.repeat_interleave.Tensor, aten.repeat_interleave.self_Tensor) and (
        node.kwargs.get("output_size") is not None
    ):
        instead = None
    if node.target is aten.index.Tensor and _masks(node):
        instead = "torch.where(mask, x, 0), which keeps the size"
    if instead is not None:
        raise LoweringError(
            f"the size of the result of {node.target} hangs on the values, and {_STATIC}",
            do=f"use {instead}",
            place=blame.place_of_node(node),
        )


def _masks(node: fx.Node) -> list[tuple[int, fx.Node]]:
    indices: Any = node.args[1]
    return [
        (place, index)
        for place, index in enumerate(indices)
        if isinstance(index, fx.Node) and index.meta["val"].dtype in (torch.bool, torch.uint8)
    ]


def _forget_checks(node: fx.Node) -> None:
    """Drop the assertions on a size that is known now."""
    for size in [user for user in node.users if user.target is aten.sym_size.int]:
        for check in [u for u in size.users if u.target in (operator.ge, operator.le)]:
            for assertion in list(check.users):
                if assertion.target is aten._assert_scalar.default:
                    node.graph.erase_node(assertion)


# ---------------------------------------------------------------------------------- constant masks


def _constant_mask(program: ExportedProgram, node: fx.Node) -> int:
    values = []
    for _, mask in _masks(node):
        value = _constant(program, mask)
        if value is None:
            return 0
        values.append(value.to(torch.bool))
    indices: list[Any] = []
    given: Any = node.args[1]
    known = iter(values)
    with node.graph.inserting_before(node):
        for index in given:
            if not isinstance(index, fx.Node) or index.meta["val"].dtype not in (
                torch.bool,
                torch.uint8,
            ):
                indices.append(index)
                continue
            for places in next(known).nonzero(as_tuple=True):
                new = node.graph.call_function(
                    torch.ops.tpu2edge.constant.default, (index, places.tolist())
                )
                new.meta = dict(index.meta)
                new.meta["val"] = index.meta["val"].new_empty(places.shape, dtype=torch.int32)
                new.meta.pop("tensor_meta", None)
                indices.append(new)
    node.args = (node.args[0], indices)
    _forget_checks(node)
    return 1


def _constant(program: ExportedProgram, node: fx.Node) -> torch.Tensor | None:
    while node.target in _COPIES:
        first = node.args[0]
        assert isinstance(first, fx.Node)
        node = first
    if node.op != "placeholder":
        return None
    for spec in program.graph_signature.input_specs:
        if getattr(spec.arg, "name", None) == node.name and spec.target is not None:
            value = program.constants.get(spec.target)
            if value is None:
                value = program.state_dict.get(spec.target)
            return value if isinstance(value, torch.Tensor) else None
    return None


# ------------------------------------------------------------------------------ values under a mask


def _under_mask(node: fx.Node) -> int:
    """x[mask] that is used by elementwise operators only, on to writes, sums or means."""
    indices: Any = node.args[1]
    x = node.args[0]
    mask = indices[0]
    if len(indices) != 1 or not isinstance(x, fx.Node) or not isinstance(mask, fx.Node):
        return 0
    whole = x.meta["val"].shape
    if not static(*whole) or mask.meta["val"].shape != whole:
        return 0
    region, ends = {node}, list[fx.Node]()
    for user in node.graph.nodes:
        if region.isdisjoint(user.all_input_nodes) or user.target is aten.sym_size.int:
            continue
        if _is_end(user, mask, region, whole):
            ends.append(user)
        elif _is_inner(user, region, mask, x):
            region.add(user)
        else:
            return 0
    _forget_checks(node)
    graph = node.graph
    node.replace_all_uses_with(x)
    for end in ends:
        with graph.inserting_before(end):
            _finish(graph, end, mask)
    graph.erase_node(node)
    return 1


def _is_inner(user: fx.Node, region: set[fx.Node], mask: fx.Node, x: fx.Node) -> bool:
    if user.target is aten.index.Tensor:
        return False
    tags = getattr(user.target, "tags", ())
    if torch.Tag.pointwise not in tags and user.target not in _COPIES:
        return False
    if str(user.target).split(".")[1].endswith("_"):
        return False  # in place: x itself would change
    return all(n in region or n.meta["val"].dim() == 0 for n in user.all_input_nodes)


def _is_end(user: fx.Node, mask: fx.Node, region: set[fx.Node], whole: Any) -> bool:
    if user.target in (aten.sum.default, aten.mean.default):
        return True
    if user.target not in (aten.index_put.default, aten.index_put_.default):
        return False
    target, indices, value = user.args[:3]
    accumulate = len(user.args) > 3 and bool(user.args[3])
    return (
        isinstance(target, fx.Node)
        and list(indices) == [mask]  # type: ignore[arg-type]
        and value in region
        and target not in region
        and not accumulate
        and target.meta["val"].shape == whole
    )


def _finish(graph: fx.Graph, end: fx.Node, mask: fx.Node) -> None:
    if end.target in (aten.index_put.default, aten.index_put_.default):
        target, _, value = end.args[:3]
        if end.target is aten.index_put_.default:
            chosen = graph.call_function(aten.where.self, (mask, value, target))
            new = graph.call_function(aten.copy_.default, (target, chosen))
            chosen.meta = dict(end.meta)
        else:
            new = graph.call_function(aten.where.self, (mask, value, target))
    else:
        kept = graph.call_function(aten.where.ScalarOther, (mask, end.args[0], 0))
        kept.meta = dict(end.meta)
        new = graph.call_function(aten.sum.default, (kept,), dict(end.kwargs))
        if end.target is aten.mean.default:
            new.meta = dict(end.meta)
            count = graph.call_function(aten.sum.default, (mask,))
            count.meta = dict(end.meta)
            new = graph.call_function(aten.div.Tensor, (new, count))
    new.meta = dict(end.meta)
    end.replace_all_uses_with(new)
    graph.erase_node(end)


# ------------------------------------------------------------------------------------------ bincount


def _minlength(node: fx.Node) -> int:
    value = node.args[2] if len(node.args) > 2 else node.kwargs.get("minlength", 0)
    return value if isinstance(value, int) else 0


def bincounts(program: ExportedProgram) -> int:
    """Drop the checks on the length of a bincount, which is taken to be its minlength."""
    count = 0
    for node in list(program.graph.nodes):
        if node.target is aten.bincount.default and _minlength(node):
            _forget_checks(node)
            count += 1
    return count


def _bincount(x: torch.Tensor, weights: torch.Tensor | None = None, minlength: int = 0) -> Any:
    if not static(*x.shape) or not minlength:
        return NotImplemented
    bins = torch.arange(minlength, dtype=torch.int32).unsqueeze(1)
    hits = x.to(torch.int32).unsqueeze(0) == bins
    if weights is None:
        return hits.to(torch.int32).sum(1, dtype=torch.int32).to(torch.int64)
    return torch.where(hits, weights, torch.zeros_like(weights)).sum(1)


DECOMPOSITIONS: dict[Any, Any] = {aten.bincount.default: _bincount}
