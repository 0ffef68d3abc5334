"""Lowers the operators of quantized.py, and puts the dynamic ones into the converted operators.

The converter (litert-converter 0.5) knows ``quant.quantize`` and ``quant.dequantize`` with scales as
attributes, and in its strict mode fuses them into integer operators where an operator's inputs and
output are quantized, and keeps DEQUANTIZE before the weights where only they are. For activations
that are quantized when the model runs, this converter has no form; LiteRT's kernels do it by
themselves if an operator has integer weights and a float input. So the lowering leaves a mark before
the operator, and :func:`use_dynamic_kernels` takes it out and hands the integers to the operator.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.passes.shape_prop import _extract_tensor_metadata

from tpu2edge.export import quantized
from tpu2edge.export.rewrites.graph import call, value_of

__all__ = ["add_lowerings", "arrange_weights", "in_layout_pass", "use_dynamic_kernels"]

aten = torch.ops.aten

_MARK = "tpu2edge.quantize_at_runtime"

#: Operators whose kernels quantize a float input by themselves, with the position of the weights.
_DYNAMIC_KERNELS = {"tfl.fully_connected": 1, "tfl.conv_2d": 1, "tfl.depthwise_conv_2d": 1}
#: Of those, the ones whose kernels do so with weights of 4 bits, too.
_FOUR_BITS = ("tfl.fully_connected",)
#: What may stand between the mark and the operator: the same values at other places.
_MOVES = ("tfl.transpose", "tfl.reshape", "tfl.pad", "tfl.squeeze", "tfl.expand_dims")


def add_lowerings(register: Callable[[Any], Callable[[Any], Any]]) -> None:
    """Give litert-torch's ``register`` the quantizing operators."""
    register(quantized.QUANTIZE)(_quantize)
    register(quantized.DEQUANTIZE)(_dequantize)
    register(quantized.DEQUANTIZE_CHANNELS)(_dequantize_channels)
    register(quantized.DYNAMIC)(_mark)


def _quantize(
    _lctx: Any, x: Any, scale: float, zero: int, low: int, high: int, dtype: torch.dtype
) -> Any:
    ir = _ir()
    width = 16 if dtype is torch.int16 else 8
    result = ir.RankedTensorType.get(
        ir.RankedTensorType(x.type).shape, ir.IntegerType.get_signless(width)
    )
    return _call("quant.quantize", x, result, _attributes([scale], [zero], low, high))


def _dequantize(
    _lctx: Any, x: Any, scale: float, zero: int, low: int, high: int, *_: Any, **__: Any
) -> Any:
    return _call("quant.dequantize", x, _float_like(x), _attributes([scale], [zero], low, high))


def _dequantize_channels(
    _lctx: Any,
    x: Any,
    scales: Sequence[float],
    zeros: Sequence[int],
    axis: int,
    low: int,
    high: int,
    *_: Any,
    **__: Any,
) -> Any:
    attributes = _attributes(scales, zeros, low, high, axis)
    return _call("quant.dequantize", x, _float_like(x), attributes)


def _mark(_lctx: Any, x: Any, *_: Any) -> Any:
    return _call(_MARK, x, x.type, {})


def _ir() -> Any:
    from litert_converter.mlir import ir

    return ir


def _float_like(x: Any) -> Any:
    ir = _ir()
    return ir.RankedTensorType.get(ir.RankedTensorType(x.type).shape, ir.F32Type.get())


def _attributes(
    scales: Sequence[float], zeros: Sequence[int], low: int, high: int, axis: int | None = None
) -> dict[str, Any]:
    import numpy as np

    ir = _ir()
    bits = "i16" if high > 127 else "i4" if low >= -8 and high <= 7 else "i8"
    narrow = low in (-127, -7)
    attributes = {
        "dtype": ir.StringAttr.get(bits),
        "narrow_range": ir.BoolAttr.get(narrow),
        "scale": ir.DenseElementsAttr.get(np.asarray(scales, np.float32), type=ir.F32Type.get()),
        "zero_point": ir.DenseElementsAttr.get(
            np.asarray(zeros, np.int64), type=ir.IntegerType.get_signless(64)
        ),
    }
    if axis is not None:
        attributes["quantization_dimension"] = ir.IntegerAttr.get(
            ir.IntegerType.get_signless(32), axis
        )
    return attributes


def _call(name: str, x: Any, result: Any, attributes: dict[str, Any]) -> Any:
    from litert_converter.mlir.dialects import stablehlo

    ir = _ir()
    made = stablehlo.CustomCallOp(
        result=[result], inputs=[x], call_target_name=ir.StringAttr.get(name)
    )
    for key, value in attributes.items():
        made.attributes[key] = value
    return made.results[0]


@contextlib.contextmanager
def in_layout_pass() -> Iterator[None]:
    """litert-torch's layout pass lets a quantization at run time be where the channels are last."""
    from litert_torch._convert.fx_passes.optimize_layout_transposes_pass import (
        layout_check,
        layout_rewrite,
    )

    def stays(_node: fx.Node) -> None:
        pass

    def first(node: fx.Node) -> list[Any]:
        return [node.args[0]]

    op = quantized.DYNAMIC
    with (
        mock.patch.dict(layout_rewrite.rewriters, {op: stays}),
        mock.patch.dict(layout_check.layout_sensitive_inputs_getters, {op: first}),
    ):
        yield


def arrange_weights(program: ExportedProgram) -> int:
    """Lay out quantized weights of convolutions as LiteRT has them, before lowering; how many.

    A permutation back follows the dequantization, and the converter takes both out. By itself it
    leaves a RESHAPE behind the DEQUANTIZE of a 1 x 1 convolution, which is then in floats.
    """
    targets = {
        spec.arg.name: spec.target
        for spec in program.graph_signature.input_specs
        if spec.target in program.state_dict and hasattr(spec.arg, "name")
    }
    count = 0
    for node in list(program.graph.nodes):
        if node.target is not aten.convolution.default or node.args[6] or node.args[8] != 1:
            continue
        dequantized = node.args[1]
        if not isinstance(dequantized, fx.Node) or len(dequantized.users) != 1:
            continue
        source = dequantized.args[0] if dequantized.target in _DEQUANTIZERS else None
        if not isinstance(source, fx.Node) or len(source.users) != 1:
            continue
        name = targets.get(source.name)
        if name is None or value_of(source).dim() != 4:
            continue
        program.state_dict[name] = program.state_dict[name].permute(_LAST).contiguous()
        _permute_meta(source, _LAST)
        _permute_meta(dequantized, _LAST)
        if dequantized.target is quantized.DEQUANTIZE_CHANNELS:
            args = list(dequantized.args)
            args[3] = _LAST.index(int(args[3]))  # type: ignore[arg-type]
            dequantized.args = tuple(args)
        node.replace_input_with(
            dequantized, call(node, aten.permute.default, dequantized, _BACK, like=node)
        )
        count += 1
    if count:
        program.graph_module.recompile()
    return count


_DEQUANTIZERS = (quantized.DEQUANTIZE, quantized.DEQUANTIZE_CHANNELS)
_LAST, _BACK = (0, 2, 3, 1), (0, 3, 1, 2)


def _permute_meta(node: fx.Node, order: tuple[int, ...]) -> None:
    value = value_of(node).permute(order).contiguous()
    node.meta["val"] = value
    node.meta["tensor_meta"] = _extract_tensor_metadata(value)


def use_dynamic_kernels(ir: Any, module: Any) -> tuple[int, int]:
    """Take the marks out of ``module`` (TFL dialect): how many were used, how many came to nothing.

    The operators behind a mark get their weights as integers. Where there is none with such a
    kernel, the activation stays a float.
    """
    used, idle = 0, 0
    for function in module.regions[0].blocks[0].operations:
        if function.operation.name != "func.func":
            continue
        for op in list(function.operation.regions[0].blocks[0].operations):
            operation = op.operation
            if not _is_mark(ir, operation):
                continue
            found = [target for target in _behind(operation) if _hand_over(ir, target)]
            used, idle = used + bool(found), idle + (not found)
            operation.results[0].replace_all_uses_with(operation.operands[0])
            operation.erase()
    return used, idle


def _is_mark(ir: Any, operation: Any) -> bool:
    if operation.name != "stablehlo.custom_call":
        return False
    return bool(ir.StringAttr(operation.attributes["call_target_name"]).value == _MARK)


def _behind(operation: Any) -> Iterator[Any]:
    for use in list(operation.results[0].uses):
        user = use.owner.operation
        if user.name in _MOVES:
            yield from _behind(user)
        elif user.name in _DYNAMIC_KERNELS and use.operand_number == 0:
            yield user


def _hand_over(ir: Any, operation: Any) -> bool:
    position = _DYNAMIC_KERNELS[operation.name]
    dequantize = operation.operands[position].owner
    if getattr(dequantize, "name", None) != "tfl.dequantize":
        return False
    constant = dequantize.operands[0]
    kind = str(constant.type)
    four_bits = "uniform<i4" in kind
    if not ("uniform<i8" in kind or (four_bits and operation.name in _FOUR_BITS)):
        return False
    if _has_zero_points(kind):
        return False
    operation.operands[position] = constant
    if operation.name == "tfl.fully_connected":
        operation.attributes["asymmetric_quantize_inputs"] = ir.BoolAttr.get(True)
    if not list(dequantize.results[0].uses):
        dequantize.operation.erase()
    return True


def _has_zero_points(kind: str) -> bool:
    """Whether a quantized type's text has a zero point: ``{0.5:3, …}`` or ``, 0.5:3>``."""
    scales = kind[kind.index(":f32") :]
    numbers = scales.replace("{", ",").replace("}", ",").replace(">", ",").split(",")[1:]
    return any(":" in number for number in numbers)
