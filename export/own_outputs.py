"""Gives every output of a converted function a tensor of its own.

LiteRT's Interpreter reads an output that is also an input, or that appears twice, as it should;
CompiledModel (2.3) reads memory that was never written. The copy is a CONCATENATION of one tensor,
put in after the converter's passes, which would take it out again; a RESHAPE to the same shape is
removed even when the file is written.
"""

from __future__ import annotations

from typing import Any

__all__ = ["own_outputs"]


def own_outputs(ir: Any, module: Any) -> int:
    """Change the operation ``module`` (TFL dialect) in place; gives the number of copies put in."""
    count = 0
    for function in module.regions[0].blocks[0].operations:
        if function.operation.name != "func.func":
            continue
        attributes = function.operation.attributes
        if (
            "tf.entry_function" not in attributes
            and "tf_saved_model.exported_names" not in attributes
        ):
            continue
        block = function.operation.regions[0].blocks[0]
        terminator = block.operations[len(block.operations) - 1].operation
        seen: list[Any] = list(block.arguments)
        for position, value in enumerate(list(terminator.operands)):
            if not any(value == other for other in seen):
                seen.append(value)
                continue
            terminator.operands[position] = _copy(ir, value, terminator)
            count += 1
    return count


def _copy(ir: Any, value: Any, before: Any) -> Any:
    kind = ir.RankedTensorType(value.type)
    with ir.InsertionPoint(before), ir.Location.unknown():
        if kind.rank == 0:  # a scalar cannot be concatenated: through shape [1] and back
            vector = ir.RankedTensorType.get([1], kind.element_type)
            return _reshape(ir, _concatenation(ir, _reshape(ir, value, [1], vector)), [], kind)
        return _concatenation(ir, value)


def _concatenation(ir: Any, value: Any) -> Any:
    attributes = {
        "axis": ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 0),
        "fused_activation_function": ir.StringAttr.get("NONE"),
    }
    return ir.Operation.create(
        "tfl.concatenation", results=[value.type], operands=[value], attributes=attributes
    ).results[0]


def _reshape(ir: Any, value: Any, shape: list[int], result: Any) -> Any:
    import numpy as np

    shape_type = ir.RankedTensorType.get([len(shape)], ir.IntegerType.get_signless(32))
    elements = ir.DenseElementsAttr.get(np.asarray(shape, np.int32), type=shape_type)
    constant = ir.Operation.create(
        "arith.constant", results=[shape_type], attributes={"value": elements}
    ).results[0]
    return ir.Operation.create("tfl.reshape", results=[result], operands=[value, constant]).results[
        0
    ]
