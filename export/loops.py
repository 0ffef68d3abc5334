"""Gives the two regions of every loop of a converted module functions of their own.

The flatbuffer writer takes a ``tfl.while`` only when its condition and its body are one call each;
the converter (0.5) leaves them in line, and lets them read values from outside. Constants from
outside are copied into the function, so that an operator of the body sees its weights as constants;
any other value is carried through the loop unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["outline_loops"]

_CONSTANTS = ("arith.constant", "tfl.pseudo_const", "tfl.no_value")


def outline_loops(ir: Any, module: Any) -> int:
    """Change the operation ``module`` (TFL dialect) in place; gives the number of loops."""
    body = module.regions[0].blocks[0]
    count = 0
    pending = [function.operation for function in body.operations]
    while pending:
        function = pending.pop()
        if function.name != "func.func" or not len(function.regions[0].blocks):
            continue
        for op in list(function.regions[0].blocks[0].operations):
            if op.operation.name == "tfl.while":
                pending.extend(_outline(ir, op.operation, body, f"loop{count}"))
                count += 1
    return count


def _outline(ir: Any, loop: Any, module_body: Any, name: str) -> list[Any]:
    blocks = [region.blocks[0] for region in loop.regions]
    extra: list[Any] = []
    for block in blocks:
        inside = _values(block)
        for value in _captured(block, inside):
            if _is_constant(value):
                _replace_inside(block, value, _copied(ir, value, block))
            elif value not in extra:
                extra.append(value)
    carried = [*loop.operands, *extra]
    kinds = [value.type for value in carried]
    with ir.InsertionPoint(loop), loop.location:
        new = ir.Operation.create(
            "tfl.while",
            results=kinds,
            operands=carried,
            attributes={item.name: item.attr for item in _named(loop.attributes)},
            regions=2,
        )
    functions = []
    for index, (block, label) in enumerate(zip(blocks, ("cond", "body"), strict=True)):
        yielded = extra if label == "body" else []
        function = _function(ir, block, module_body, f"{name}_{label}", kinds, extra, yielded)
        _call(ir, new.regions[index], function, kinds, loop.location)
        functions.append(function)
    for old, fresh in zip(loop.results, new.results, strict=False):
        old.replace_all_uses_with(fresh)
    loop.erase()
    return functions


def _function(
    ir: Any,
    block: Any,
    module_body: Any,
    name: str,
    kinds: list[Any],
    extra: list[Any],
    yielded: list[Any],
) -> Any:
    """A private function with the block's operations; ``extra`` are its last arguments."""
    terminator = block.operations[len(block.operations) - 1].operation
    results = [value.type for value in (*terminator.operands, *yielded)]
    with ir.InsertionPoint(module_body), terminator.location:
        function = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get(name),
                "sym_visibility": ir.StringAttr.get("private"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(kinds, results)),
            },
            regions=1,
        )
    entry = function.regions[0].blocks.append(*kinds, arg_locs=[terminator.location] * len(kinds))
    arguments = list(entry.arguments)
    own = len(block.arguments)
    for old, fresh in zip(block.arguments, arguments, strict=False):
        old.replace_all_uses_with(fresh)
    for value, fresh in zip(extra, arguments[own:], strict=True):
        _replace_inside(block, value, fresh)
    for op in list(block.operations):
        if op.operation != terminator:
            entry.append(op.operation)
    operands = [*terminator.operands, *(arguments[own + extra.index(v)] for v in yielded)]
    with ir.InsertionPoint(entry), terminator.location:
        ir.Operation.create("func.return", operands=operands)
    terminator.erase()
    return function


def _call(ir: Any, region: Any, function: Any, kinds: list[Any], location: Any) -> None:
    block = region.blocks.append(*kinds, arg_locs=[location] * len(kinds))
    name = ir.StringAttr(function.attributes["sym_name"]).value
    kind = ir.FunctionType(ir.TypeAttr(function.attributes["function_type"]).value)
    with ir.InsertionPoint(block), location:
        call = ir.Operation.create(
            "func.call",
            results=kind.results,
            operands=list(block.arguments),
            attributes={"callee": ir.FlatSymbolRefAttr.get(name)},
        )
        ir.Operation.create("tfl.yield", operands=list(call.results))


def _named(attributes: Any) -> list[Any]:
    return [attributes[index] for index in range(len(attributes))]


def _operations(block: Any) -> Iterator[Any]:
    for op in block.operations:
        yield op.operation
        for region in op.operation.regions:
            for inner in region.blocks:
                yield from _operations(inner)


def _values(block: Any) -> list[Any]:
    found = list(block.arguments)
    for op in _operations(block):
        found.extend(op.results)
        for region in op.regions:
            for inner in region.blocks:
                found.extend(inner.arguments)
    return found


def _captured(block: Any, inside: list[Any]) -> list[Any]:
    known, found = set(inside), list[Any]()
    for op in _operations(block):
        for value in op.operands:
            if value not in known:
                known.add(value)
                found.append(value)
    return found


def _is_constant(value: Any) -> bool:
    owner = value.owner
    return hasattr(owner, "name") and owner.name in _CONSTANTS


def _copied(ir: Any, value: Any, block: Any) -> Any:
    return value.owner.clone(ip=ir.InsertionPoint.at_block_begin(block)).results[0]


def _replace_inside(block: Any, value: Any, fresh: Any) -> None:
    for op in _operations(block):
        for position, operand in enumerate(op.operands):
            if operand == value:
                op.operands[position] = fresh
