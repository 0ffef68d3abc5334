"""Lowerings of core operators for tensors whose sizes are known only when the model runs.

litert-torch lowers most operators through JAX, which takes fixed sizes; given an unknown one it
fails, or folds a wrong number into the graph (a mean over such an axis). Here each operator becomes
operators of LiteRT's own dialect directly, and a size is a scalar int32 tensor that is computed by
SHAPE when the model runs. Every operator that meets an unknown size has to be in the table
below, or be known to take it by its usual lowering; any other is refused, never tried.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx.node import map_aggregate

__all__ = ["KEPT_WHOLE", "LOWERED", "TAKEN_APART", "Lowerings", "fold_constants", "lowering_of"]

aten = torch.ops.aten

#: Operators that have a lowering of their own here, so they are not taken apart before.
KEPT_WHOLE = (
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.gelu.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest2d.default,
    aten.var.correction,
    aten.var_mean.correction,
    aten.linalg_vector_norm.default,
    aten.repeat.default,
    aten.roll.default,
    aten.silu.default,
    aten.relu.default,
    aten.cumsum.default,
)

#: Operators that litert-torch keeps whole for a lowering through JAX, and torch can take apart.
TAKEN_APART = (aten.einsum.default,)

Value = Any  # litert_converter.mlir.ir.Value
Size = Any  # int, or a scalar int32 Value; what is computed of sizes can be a float, or a scalar float32
_Function = Callable[..., Any]
_TABLE: dict[Any, _Function] = {}


def _lower(*ops: Any) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        for op in ops:
            _TABLE[op] = function
        return function

    return register


#: Operators whose registered lowerings take unknown sizes, too: our own (rewrites/native.py), and the
#: barrier that rewrites/matmul.py puts around products.
_USUAL = (
    *(
        f"tpu2edge.{name}.default"
        for name in ("transpose", "gather", "top_k", "div", "floor_div", "floor_mod")
    ),
    "litert_torch.optimization_barrier.default",
)


def lowering_of(target: Any) -> _Function | None:
    """The function ``(lowerings, node, *args, **kwargs)`` for an operator; None: the usual one.

    Raises:
        NotImplementedError: no lowering of it is known to be right.
    """
    if str(target) in _USUAL:
        return None
    if target in _TABLE:
        return _TABLE[target]
    raise NotImplementedError("it has no form in LiteRT for sizes that change")


def fold_constants(program: ExportedProgram, constant: Any) -> None:
    """Compute what depends on weights alone and does not grow; ``constant`` lowers a tensor.

    LiteRT's convolutions take their filters as constants, and the converter folds only what comes
    from operators of its own. The graph cannot be run by torch afterwards.
    """
    known: dict[Any, torch.Tensor] = {}
    for spec, node in zip(program.graph_signature.input_specs, program.graph.nodes, strict=False):
        if spec.kind is InputKind.USER_INPUT or spec.target is None:
            continue
        stored = program.state_dict.get(spec.target, program.constants.get(spec.target))
        if isinstance(stored, torch.Tensor):
            known[node] = stored
    folded: list[Any] = []
    for node in program.graph.nodes:
        sources = node.all_input_nodes
        if node.op != "call_function" or not sources or any(n not in known for n in sources):
            continue
        with torch.no_grad():
            value = node.target(*map_aggregate(node.args, _known_or(known)), **node.kwargs)
        limit = sum(known[n].numel() for n in sources)
        if isinstance(value, torch.Tensor) and value.numel() <= limit:
            known[node] = value.detach().contiguous()
            folded.append(node)
    for node in folded:
        if any(user not in known for user in node.users):
            node.target, node.args, node.kwargs = constant, (known[node],), {}
    for node in reversed(folded):
        if not node.users:
            program.graph.erase_node(node)


def _known_or(known: dict[Any, torch.Tensor]) -> Callable[[Any], Any]:
    """Puts the tensors of known nodes in their places."""
    return lambda item: known.get(item, item) if isinstance(item, fx.Node) else item


class Lowerings:
    """Writes LiteRT operators at the current insertion point; the table's functions use it."""

    def __init__(self) -> None:
        from litert_converter.mlir import ir
        from litert_torch.backend import export_utils
        from litert_torch.backend.experimental.torch_tfl import _lowerings as tfl
        from litert_torch.backend.lowerings import utils

        self.ir = ir
        self.unknown = export_utils.IR_DYNAMIC
        self._carry = tfl._ir_operation
        self._utils = utils

    # -- values and types

    def element(self, dtype: torch.dtype) -> Any:
        """The MLIR element type of a torch type."""
        return self._utils.torch_dtype_to_ir_element_type(dtype)

    def type(self, sizes: Sequence[Any], dtype: Any) -> Any:
        """A tensor type; sizes that are no int are unknown."""
        plain = [size if type(size) is int else self.unknown for size in sizes]
        kind = self.element(dtype) if isinstance(dtype, torch.dtype) else dtype
        return self.ir.RankedTensorType.get(plain, kind)

    def type_of(self, fake: torch.Tensor) -> Any:
        """The type of a node's result."""
        return self.type(list(fake.shape), fake.dtype)

    def sizes(self, value: Value) -> list[int | None]:
        """The sizes of a value, None where unknown."""
        return [None if size == self.unknown else int(size) for size in value.type.shape]

    def constant(self, value: Any, dtype: Any = np.int32) -> Value:
        """A constant; a number becomes a scalar."""
        return self._utils.numpy_array_constant(np.array(value, dtype=dtype))

    def number(self, value: Any, element: Any) -> Value:
        """A scalar constant of an MLIR element type."""
        return self._utils.splat(value, element)

    # -- operators

    def op(self, name: str, operands: Sequence[Value], result: Any, **attributes: Any) -> Value:
        """``tfl.<name>`` with one result of the given type."""
        ir = self.ir
        made: dict[str, Any] = {}
        for key, value in attributes.items():
            if isinstance(value, bool):
                made[key] = ir.BoolAttr.get(value)
            elif isinstance(value, int):
                made[key] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), value)
            elif isinstance(value, float):
                made[key] = ir.FloatAttr.get(ir.F32Type.get(), value)
            elif isinstance(value, str):
                made[key] = ir.StringAttr.get(value)
            else:
                made[key] = value
        results = result if isinstance(result, list) else [result]
        return self._carry(f"tfl.{name}", results, list(operands), made)

    def binary(self, name: str, x: Value, y: Value, result: Any) -> Value:
        """``tfl.<name>`` of two operands of one element type."""
        fused = {"fused_activation_function": "NONE"}
        plain = name not in ("add", "sub", "mul", "div")
        return self.op(name, [x, y], result, **({} if plain else fused))

    def cast(self, value: Value, element: Any) -> Value:
        """The value in another element type; itself if it has it."""
        if isinstance(element, torch.dtype):
            element = self.element(element)
        if value.type.element_type == element:
            return value
        return self.op("cast", [value], self.type(self.sizes(value), element))

    def size(self, value: Value, axis: int) -> Size:
        """One size of a value: an int where it is known, else a scalar."""
        known = self.sizes(value)[axis]
        if known is not None:
            return known
        int32 = torch.int32
        shape = self.op("shape", [value], self.type([len(value.type.shape)], int32))
        axis %= len(value.type.shape)
        begin, end, step = (self.constant([place]) for place in (axis, axis + 1, 1))
        return self.strided_slice(shape, begin, end, step, self.type([], int32), shrink=1)

    def strided_slice(
        self,
        value: Value,
        begin: Value,
        end: Value,
        step: Value,
        result: Any,
        *,
        begin_mask: int = 0,
        end_mask: int = 0,
        shrink: int = 0,
    ) -> Value:
        """The elements from ``begin`` to ``end``; a mask has the bits of axes where these do not count."""
        return self.op(
            "strided_slice",
            [value, begin, end, step],
            result,
            begin_mask=begin_mask,
            end_mask=end_mask,
            ellipsis_mask=0,
            new_axis_mask=0,
            shrink_axis_mask=shrink,
            offset=False,
        )

    def vector(self, sizes: Sequence[Size]) -> Value:
        """Sizes as an int32 vector."""
        if all(isinstance(size, int) for size in sizes):
            return self.constant(list(sizes))
        scalars = [self.scalar(size) for size in sizes]
        kind = self.type([len(sizes)], torch.int32)
        return self.op("pack", scalars, kind, values_count=len(sizes), axis=0)

    def scalar(self, size: Size) -> Value:
        """A size as a scalar int32."""
        if isinstance(size, int):
            return self.constant(size)
        return self.cast(size, torch.int32)

    def reshape(self, value: Value, sizes: Sequence[Size], fake_sizes: Sequence[Any]) -> Value:
        """``value`` in the given sizes; ``fake_sizes`` tell which of them are known."""
        target = [
            int(fake) if type(fake) is int else size
            for size, fake in zip(sizes, fake_sizes, strict=True)
        ]
        unknown = [i for i, size in enumerate(target) if not isinstance(size, int) or size < 0]
        if len(unknown) == 1:
            target[unknown[0]] = -1  # a constant shape, which delegates take
        result = self.type(list(fake_sizes), value.type.element_type)
        return self.op("reshape", [value, self.vector(target)], result)

    def transpose(self, value: Value, order: Sequence[int]) -> Value:
        """``value`` with its axes in another order."""
        known = self.sizes(value)
        result = self.type([known[axis] for axis in order], value.type.element_type)
        return self.op("transpose", [value, self.constant(list(order))], result)

    def reduce(
        self, name: str, value: Value, axes: Sequence[int], result: Any, keep: bool
    ) -> Value:
        """``tfl.<name>`` over axes."""
        return self.op(name, [value, self.constant(list(axes))], result, keep_dims=keep)

    def kept(self, value: Value, axes: Sequence[int]) -> Any:
        """The type of ``value`` reduced over ``axes``, which stay with size 1."""
        sizes = [1 if i in axes else size for i, size in enumerate(self.sizes(value))]
        return self.type(sizes, value.type.element_type)

    def count(self, value: Value, axes: Sequence[int]) -> Size:
        """How many elements lie along ``axes``."""
        total: Size = 1
        for axis in axes:
            total = self.times(total, self.size(value, axis))
        return total

    def times(self, x: Size, y: Size) -> Size:
        """The product of two sizes."""
        if isinstance(x, int) and isinstance(y, int):
            return x * y
        if 1 in (x, y) and (isinstance(x, int) or isinstance(y, int)):
            return y if isinstance(x, int) and x == 1 else x
        return self.binary("mul", self.scalar(x), self.scalar(y), self.type([], torch.int32))

    def plus(self, x: Size, y: Size) -> Size:
        """The sum of two sizes."""
        if isinstance(x, int) and isinstance(y, int):
            return x + y
        return self.binary("add", self.scalar(x), self.scalar(y), self.type([], torch.int32))


def _val(node: Any) -> Any:
    return node.meta["val"]


def _result(b: Lowerings, node: Any) -> Any:
    return b.type_of(_val(node))


def _fakes(node: Any) -> list[Any]:
    def fake(item: Any) -> Any:
        return item.meta["val"] if isinstance(item, fx.Node) else item

    made: Any = map_aggregate(node.args, fake)
    return list(made)


def _dtype_of(items: Sequence[Any]) -> torch.dtype:
    """The type that torch computes a binary operator of these in."""
    plain = [
        1 if isinstance(i, torch.SymInt) else 1.0 if isinstance(i, torch.SymFloat) else i
        for i in items
    ]
    if any(isinstance(i, torch.Tensor) for i in plain):
        return torch.result_type(*plain)
    return torch.float32 if any(isinstance(i, float) for i in plain) else torch.int64


def _operand(b: Lowerings, value: Any, dtype: torch.dtype) -> Value:
    element = b.element(dtype)
    if isinstance(value, (bool, int, float)):
        return b.number(value, element)
    return b.cast(value, element)


def _axes(value: Value, dims: Any) -> list[int]:
    rank = len(value.type.shape)
    if dims is None or dims == []:
        return list(range(rank))
    given = [dims] if isinstance(dims, int) else list(dims)
    return sorted({axis % rank if rank else 0 for axis in given})


# ------------------------------------------------------------------------------------- sizes


@_lower(aten.sym_size.int)
def _sym_size(b: Lowerings, node: Any, x: Value, axis: int) -> Size:
    return b.size(x, axis)


@_lower(aten.sym_numel.default)
def _sym_numel(b: Lowerings, node: Any, x: Value) -> Size:
    return b.count(x, range(len(x.type.shape)))


def _on_sizes(name: str, plain: Callable[[Any, Any], Any]) -> _Function:
    def lower(b: Lowerings, node: Any, x: Size, y: Size) -> Size:
        if all(isinstance(item, (int, float)) for item in (x, y)):
            return plain(x, y)
        fraction = isinstance(_val(node), (float, torch.SymFloat))
        dtype = torch.float32 if fraction else torch.int32
        x, y = _operand(b, x, dtype), _operand(b, y, dtype)
        return b.binary(name, x, y, b.type([], dtype))

    return lower


for _op, _name in (
    (operator.add, "add"),
    (operator.sub, "sub"),
    (operator.mul, "mul"),
    (operator.floordiv, "floor_div"),
    (operator.truediv, "div"),
    (operator.mod, "floor_mod"),
):
    _TABLE[_op] = _on_sizes(_name, _op)
_TABLE[torch.sym_max] = _on_sizes("maximum", max)
_TABLE[torch.sym_min] = _on_sizes("minimum", min)


@_lower(torch.sym_float)
def _sym_float(b: Lowerings, node: Any, x: Size) -> Size:
    return float(x) if isinstance(x, int) else b.cast(x, torch.float32)


@_lower(math.trunc, torch.sym_int)
def _sym_int(b: Lowerings, node: Any, x: Size) -> Size:
    return int(x) if isinstance(x, (int, float)) else b.cast(x, torch.int32)


@_lower(operator.neg)
def _sym_neg(b: Lowerings, node: Any, x: Size) -> Size:
    return -x if isinstance(x, (int, float)) else b.op("neg", [x], x.type)


# ---------------------------------------------------------------------------- element by element


def _unary(name: str) -> _Function:
    def lower(b: Lowerings, node: Any, x: Value, **_: Any) -> Value:
        result = _result(b, node)
        return b.op(name, [b.cast(x, result.element_type)], result)

    return lower


for _op, _name in (
    (aten.relu.default, "relu"),
    (aten.exp.default, "exp"),
    (aten.log.default, "log"),
    (aten.sqrt.default, "sqrt"),
    (aten.rsqrt.default, "rsqrt"),
    (aten.abs.default, "abs"),
    (aten.neg.default, "neg"),
    (aten.sigmoid.default, "logistic"),
    (aten.tanh.default, "tanh"),
    (aten.sin.default, "sin"),
    (aten.cos.default, "cos"),
    (aten.floor.default, "floor"),
    (aten.ceil.default, "ceil"),
    (aten.round.default, "round"),
    (aten.sign.default, "sign"),
    (aten.logical_not.default, "logical_not"),
    (aten.bitwise_not.default, "logical_not"),
):
    _TABLE[_op] = _unary(_name)


@_lower(aten.silu.default)
def _silu(b: Lowerings, node: Any, x: Value) -> Value:
    return b.binary("mul", x, b.op("logistic", [x], x.type), x.type)


@_lower(aten.gelu.default)
def _gelu(b: Lowerings, node: Any, x: Value, *, approximate: str = "none") -> Value:
    return b.op("gelu", [x], x.type, approximate=approximate != "none")


@_lower(aten.reciprocal.default)
def _reciprocal(b: Lowerings, node: Any, x: Value) -> Value:
    return b.binary("div", _operand(b, 1.0, _val(node).dtype), x, _result(b, node))


@_lower(aten.isnan.default)
def _isnan(b: Lowerings, node: Any, x: Value) -> Value:
    return b.op("not_equal", [x, x], _result(b, node))


@_lower(aten.isinf.default)
def _isinf(b: Lowerings, node: Any, x: Value) -> Value:
    infinity = _operand(b, math.inf, _fakes(node)[0].dtype)
    return b.op("equal", [b.op("abs", [x], x.type), infinity], _result(b, node))


@_lower(aten.leaky_relu.default)
def _leaky_relu(b: Lowerings, node: Any, x: Value, slope: float = 0.01) -> Value:
    return b.op("leaky_relu", [x], x.type, alpha=float(slope))


@_lower(aten.elu.default)
def _elu(
    b: Lowerings, node: Any, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Value:
    if (alpha, scale, input_scale) != (1, 1, 1):
        raise NotImplementedError("it has no form in LiteRT but for alpha = 1")
    return b.op("elu", [x], x.type)


@_lower(aten.clamp.default, aten.hardtanh.default, aten.clamp.Tensor)
def _clamp(b: Lowerings, node: Any, x: Value, low: Any = None, high: Any = None) -> Value:
    if node.target is aten.hardtanh.default:
        low, high = -1.0 if low is None else low, 1.0 if high is None else high
    result, dtype = _result(b, node), _val(node).dtype
    x = b.cast(x, dtype)
    if low is not None:
        x = b.op("maximum", [x, _operand(b, low, dtype)], result)
    if high is not None:
        x = b.op("minimum", [x, _operand(b, high, dtype)], result)
    return x


_OVERLOADS = ("Tensor", "Scalar", "default")


def _register_all(packet: Any, lower: _Function, overloads: Sequence[str] = _OVERLOADS) -> None:
    """Register for what an operator of two operands can be called as."""
    for overload in overloads:
        if hasattr(packet, overload):
            _TABLE[getattr(packet, overload)] = lower


def _binary(name: str, *, compares: bool = False) -> _Function:
    def lower(b: Lowerings, node: Any, x: Any, y: Any, *, alpha: Any = 1) -> Value:
        dtype = _dtype_of(_fakes(node)[:2]) if compares else _val(node).dtype
        x, y = _operand(b, x, dtype), _operand(b, y, dtype)
        if alpha != 1:
            y = b.binary("mul", y, _operand(b, alpha, dtype), y.type)
        return b.binary(name, x, y, _result(b, node))

    return lower


for _base, _name in (
    (aten.add, "add"),
    (aten.sub, "sub"),
    (aten.mul, "mul"),
    (aten.maximum, "maximum"),
    (aten.minimum, "minimum"),
    (aten.atan2, "atan2"),
    (aten.remainder, "floor_mod"),
):
    _register_all(_base, _binary(_name))
for _base, _name in (
    (aten.eq, "equal"),
    (aten.ne, "not_equal"),
    (aten.lt, "less"),
    (aten.le, "less_equal"),
    (aten.gt, "greater"),
    (aten.ge, "greater_equal"),
):
    _register_all(_base, _binary(_name, compares=True), ("Tensor", "Scalar"))


def _logical(name: str) -> _Function:
    def lower(b: Lowerings, node: Any, x: Any, y: Any) -> Value:
        if any(isinstance(i, torch.Tensor) and i.dtype is not torch.bool for i in _fakes(node)):
            raise NotImplementedError("it has a form in LiteRT for booleans only")
        x, y = _operand(b, x, torch.bool), _operand(b, y, torch.bool)
        return b.op(name, [x, y], _result(b, node))

    return lower


for _base, _name in (
    (aten.logical_and, "logical_and"),
    (aten.logical_or, "logical_or"),
    (aten.logical_xor, "not_equal"),
    (aten.bitwise_and, "logical_and"),
    (aten.bitwise_or, "logical_or"),
    (aten.bitwise_xor, "not_equal"),
):
    _register_all(_base, _logical(_name))


@_lower(aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
def _div(b: Lowerings, node: Any, x: Any, y: Any, *, rounding_mode: str | None = None) -> Value:
    dtype, result = _val(node).dtype, _result(b, node)
    x, y = _operand(b, x, dtype), _operand(b, y, dtype)
    if rounding_mode is None or (rounding_mode == "trunc" and not dtype.is_floating_point):
        return b.binary("div", x, y, result)
    if rounding_mode == "floor":
        return b.op("floor_div", [x, y], result)
    quotient = b.binary("div", x, y, result)
    size = b.op("floor", [b.op("abs", [quotient], result)], result)
    return b.binary("mul", size, b.op("sign", [quotient], result), result)


@_lower(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def _pow(b: Lowerings, node: Any, x: Any, y: Any) -> Value:
    dtype, result = _val(node).dtype, _result(b, node)
    x = _operand(b, x, dtype)
    if isinstance(y, (int, float)) and y in (1, 2, 3):
        power = x
        for _ in range(int(y) - 1):
            power = b.binary("mul", power, x, result)
        return power
    if isinstance(y, (int, float)) and y == 0.5:
        return b.op("sqrt", [x], result)
    return b.op("pow", [x, _operand(b, y, dtype)], result)


@_lower(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)
def _where(b: Lowerings, node: Any, condition: Value, x: Any, y: Any) -> Value:
    dtype = _val(node).dtype
    return b.op(
        "select_v2", [condition, _operand(b, x, dtype), _operand(b, y, dtype)], _result(b, node)
    )


@_lower(aten._to_copy.default)
def _to_copy(b: Lowerings, node: Any, x: Value, **_: Any) -> Value:
    wanted = _val(node).dtype
    if wanted is torch.bool and _fakes(node)[0].dtype is not torch.bool:
        zero = _operand(b, 0, _fakes(node)[0].dtype)
        return b.op("not_equal", [x, zero], _result(b, node))
    return b.cast(x, wanted)


@_lower(aten.clone.default, aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default)
def _same(b: Lowerings, node: Any, x: Value, **_: Any) -> Value:
    return x


# ---------------------------------------------------------------------------------- reductions


def _reduction(name: str) -> _Function:
    def lower(
        b: Lowerings, node: Any, x: Value, dims: Any = None, keep: bool = False, **_: Any
    ) -> Value:
        result = _result(b, node)
        return b.reduce(name, b.cast(x, result.element_type), _axes(x, dims), result, keep)

    return lower


for _op, _name in (
    (aten.sum.dim_IntList, "sum"),
    (aten.sum.default, "sum"),
    (aten.mean.dim, "mean"),
    (aten.mean.default, "mean"),
    (aten.amax.default, "reduce_max"),
    (aten.amin.default, "reduce_min"),
    (aten.max.default, "reduce_max"),
    (aten.min.default, "reduce_min"),
    (aten.prod.dim_int, "reduce_prod"),
    (aten.any.dim, "reduce_any"),
    (aten.any.default, "reduce_any"),
    (aten.any.dims, "reduce_any"),
):
    _TABLE[_op] = _reduction(_name)


@_lower(aten.argmax.default, aten.argmin.default)
def _argmax(b: Lowerings, node: Any, x: Value, dim: int | None = None, keep: bool = False) -> Value:
    if dim is None:
        x = b.op("reshape", [x, b.constant([-1])], b.type([None], x.type.element_type))
        dim = 0
    (axis,) = _axes(x, dim)
    name = "arg_max" if node.target is aten.argmax.default else "arg_min"
    return _index_along(b, name, x, axis, _val(node))


def _index_along(b: Lowerings, name: str, x: Value, axis: int, fake: torch.Tensor) -> Value:
    sizes = [size for i, size in enumerate(b.sizes(x)) if i != axis]
    found = b.op(
        name,
        [x, b.constant(axis)],
        b.type(sizes, torch.int32),
        output_type=b.ir.TypeAttr.get(b.element(torch.int32)),
    )
    if len(fake.shape) != len(sizes):
        found = b.op(
            "expand_dims", [found, b.constant(axis)], b.type(list(fake.shape), torch.int32)
        )
    return b.cast(found, fake.dtype)


@_lower(aten.max.dim, aten.min.dim)
def _max_dim(b: Lowerings, node: Any, x: Value, dim: int, keep: bool = False) -> Any:
    (axis,) = _axes(x, dim)
    largest = node.target is aten.max.dim
    values, indices = _val(node)
    name = "reduce_max" if largest else "reduce_min"
    return (
        b.reduce(name, x, [axis], b.type_of(values), keep),
        _index_along(b, "arg_max" if largest else "arg_min", x, axis, indices),
    )


def _moments(b: Lowerings, x: Value, axes: Sequence[int], correction: Any) -> tuple[Value, Value]:
    """Mean and variance over axes, which stay with size 1."""
    small = b.kept(x, axes)
    mean = b.reduce("mean", x, axes, small, True)
    far = b.op("squared_difference", [x, mean], x.type)
    if not correction:
        return mean, b.reduce("mean", far, axes, small, True)
    total = b.reduce("sum", far, axes, small, True)
    count = b.count(x, axes)
    element = x.type.element_type
    if isinstance(count, int):
        left = b.number(float(max(count - correction, 0)), element)
    else:
        one = b.number(float(correction), element)
        scalar = b.type([], element)
        left = b.binary("sub", b.cast(count, element), one, scalar)
        left = b.op("maximum", [left, b.number(0.0, element)], scalar)
    return mean, b.binary("div", total, left, small)


@_lower(aten.var.correction, aten.var_mean.correction)
def _var(
    b: Lowerings,
    node: Any,
    x: Value,
    dim: Any = None,
    *,
    correction: Any = None,
    keepdim: bool = False,
) -> Any:
    axes = _axes(x, dim)
    mean, variance = _moments(b, x, axes, 1 if correction is None else correction)
    fakes = _val(node)
    if node.target is aten.var.correction:
        return _dropped(b, variance, axes, fakes)
    return _dropped(b, variance, axes, fakes[0]), _dropped(b, mean, axes, fakes[1])


def _dropped(b: Lowerings, value: Value, axes: Sequence[int], fake: torch.Tensor) -> Value:
    """``value`` without axes of size 1, unless the result has them."""
    if len(fake.shape) == len(value.type.shape):
        return value
    return _squeezed(b, value, axes, fake.shape)


def _squeezed(b: Lowerings, value: Value, axes: Sequence[int], fake_sizes: Sequence[Any]) -> Value:
    """``value`` without axes, whose size is 1.

    The converter (litert-converter 0.5) refuses a SQUEEZE on the way here, and dies of a RESHAPE
    to several sizes that are taken from the reshaped tensor itself.
    """
    rank = len(value.type.shape)
    if sum(type(size) is not int for size in fake_sizes) <= 1:
        left = [-1 if type(size) is not int else int(size) for size in fake_sizes]
        return b.reshape(value, left, list(fake_sizes))
    return b.strided_slice(
        value,
        b.constant([0] * rank),
        b.constant([1] * rank),
        b.constant([1] * rank),
        b.type(list(fake_sizes), value.type.element_type),
        begin_mask=sum(1 << axis for axis in range(rank) if axis not in axes),
        end_mask=sum(1 << axis for axis in range(rank) if axis not in axes),
        shrink=sum(1 << axis for axis in axes),
    )


@_lower(aten.native_layer_norm.default)
def _layer_norm(
    b: Lowerings, node: Any, x: Value, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Any:
    rank = len(x.type.shape)
    axes = list(range(rank - len(shape), rank))
    mean, variance = _moments(b, x, axes, 0)
    small = mean.type
    element = x.type.element_type
    scale = b.op("rsqrt", [b.binary("add", variance, b.number(float(eps), element), small)], small)
    value = b.binary("mul", b.binary("sub", x, mean, x.type), scale, x.type)
    if weight is not None:
        value = b.binary("mul", value, weight, x.type)
    if bias is not None:
        value = b.binary("add", value, bias, x.type)
    return value, mean, scale


@_lower(aten.native_group_norm.default)
def _group_norm(
    b: Lowerings,
    node: Any,
    x: Value,
    weight: Any,
    bias: Any,
    _batch: Size,
    channels: int,
    _area: Size,
    groups: int,
    eps: float,
) -> Any:
    rank = len(x.type.shape)
    sizes = [b.size(x, axis) for axis in range(rank)]
    element = x.type.element_type
    # -1 for the batch or for the rest, whichever is not known; the other one is an int or a size.
    rest: Size = channels // groups
    for size in sizes[2:]:
        rest = b.times(rest, size)
    known = rest if isinstance(rest, int) else None
    split = b.reshape(x, [sizes[0], groups, rest], [b.sizes(x)[0], groups, known])
    mean, variance = _moments(b, split, [2], 0)
    small = mean.type
    scale = b.op("rsqrt", [b.binary("add", variance, b.number(float(eps), element), small)], small)
    value = b.binary("sub", split, mean, split.type)
    value = b.binary("mul", value, scale, split.type)
    value = b.reshape(value, sizes, b.sizes(x))
    wide = [channels, *[1] * (rank - 2)]
    if weight is not None:
        value = b.binary("mul", value, b.reshape(weight, wide, wide), x.type)
    if bias is not None:
        value = b.binary("add", value, b.reshape(bias, wide, wide), x.type)
    return value, None, None


@_lower(aten._native_batch_norm_legit_no_training.default)
def _batch_norm(
    b: Lowerings,
    node: Any,
    x: Value,
    weight: Any,
    bias: Any,
    mean: Value,
    variance: Value,
    _momentum: float,
    eps: float,
) -> Any:
    rank = len(x.type.shape)
    element = x.type.element_type
    line = b.type(b.sizes(mean), element)
    scale = b.op("rsqrt", [b.binary("add", variance, b.number(float(eps), element), line)], line)
    if weight is not None:
        scale = b.binary("mul", scale, weight, line)
    shift = b.op("neg", [b.binary("mul", mean, scale, line)], line)
    if bias is not None:
        shift = b.binary("add", shift, bias, line)
    (channels,) = b.sizes(mean)
    wide = [channels, *[1] * (rank - 2)]
    scale, shift = (b.reshape(v, wide, wide) for v in (scale, shift))
    value = b.binary("add", b.binary("mul", x, scale, x.type), shift, x.type)
    return value, None, None


@_lower(aten.linalg_vector_norm.default)
def _vector_norm(
    b: Lowerings,
    node: Any,
    x: Value,
    order: float = 2,
    dim: Any = None,
    keep: bool = False,
    **_: Any,
) -> Value:
    result, axes = _result(b, node), _axes(x, dim)
    if order == 2:
        total = b.reduce("sum", b.binary("mul", x, x, x.type), axes, result, keep)
        return b.op("sqrt", [total], result)
    if order in (1, math.inf):
        name = "sum" if order == 1 else "reduce_max"
        return b.reduce(name, b.op("abs", [x], x.type), axes, result, keep)
    raise NotImplementedError(f"it has a form for the orders 1, 2 and inf, not {order}")


def _last(b: Lowerings, x: Value, dim: int, do: Callable[[Value], Value]) -> Value:
    """``do`` along an axis, which is the last one while it is done."""
    rank = len(x.type.shape)
    axis = dim % rank
    if axis == rank - 1:
        return do(x)
    order = list(range(rank))
    order[axis], order[-1] = order[-1], order[axis]
    return b.transpose(do(b.transpose(x, order)), order)


@_lower(aten._softmax.default)
def _softmax(b: Lowerings, node: Any, x: Value, dim: int, _half: bool) -> Value:
    return _last(b, x, dim, lambda v: b.op("softmax", [v], v.type, beta=1.0))


@_lower(aten._log_softmax.default)
def _log_softmax(b: Lowerings, node: Any, x: Value, dim: int, _half: bool) -> Value:
    return _last(b, x, dim, lambda v: b.op("log_softmax", [v], v.type))


@_lower(aten.cumsum.default)
def _cumsum(b: Lowerings, node: Any, x: Value, dim: int, **_: Any) -> Value:
    result = _result(b, node)
    (axis,) = _axes(x, dim)
    x = b.cast(x, result.element_type)
    return b.op("cumsum", [x, b.constant(axis)], result, exclusive=False, reverse=False)


@_lower(aten.topk.default)
def _topk(
    b: Lowerings,
    node: Any,
    x: Value,
    k: int,
    dim: int = -1,
    largest: bool = True,
    _sorted: bool = True,
) -> Any:
    rank = len(x.type.shape)
    if not largest or dim % rank != rank - 1:
        raise NotImplementedError("it has a form for the largest along the last axis")
    values, indices = _val(node)
    made = b.op(
        "topk_v2",
        [x, b.scalar(k)],
        [b.type_of(values), b.type(list(indices.shape), torch.int32)],
    )
    return made[0], b.cast(made[1], indices.dtype)


# --------------------------------------------------------------------------------- matrices


@_lower(aten.mm.default, aten.bmm.default)
def _matmul(b: Lowerings, node: Any, x: Value, y: Value) -> Value:
    return b.op(
        "batch_matmul",
        [x, y],
        _result(b, node),
        adj_x=False,
        adj_y=False,
        asymmetric_quantize_inputs=False,
    )


@_lower(aten.addmm.default)
def _addmm(
    b: Lowerings, node: Any, bias: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    if (beta, alpha) != (1, 1):
        raise NotImplementedError("it has a form for beta = alpha = 1")
    return b.binary("add", _matmul(b, node, x, y), bias, _result(b, node))


# ------------------------------------------------------------------------------------- shapes


@_lower(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(b: Lowerings, node: Any, x: Value, sizes: Sequence[Size]) -> Value:
    # litert-converter 0.5 drops a transpose before a RESHAPE that changes nothing, or dies of it.
    if [str(size) for size in _fakes(node)[0].shape] == [str(size) for size in _val(node).shape]:
        return x
    return b.reshape(x, sizes, list(_val(node).shape))


@_lower(aten.permute.default)
def _permute(b: Lowerings, node: Any, x: Value, dims: Sequence[int]) -> Value:
    return b.transpose(x, [dim % len(dims) for dim in dims])


@_lower(aten.transpose.int)
def _transpose(b: Lowerings, node: Any, x: Value, first: int, second: int) -> Value:
    order = list(range(len(x.type.shape)))
    order[first], order[second] = order[second], order[first]
    return b.transpose(x, order)


@_lower(aten.t.default)
def _t(b: Lowerings, node: Any, x: Value) -> Value:
    return b.transpose(x, list(range(len(x.type.shape)))[::-1])


@_lower(aten.unsqueeze.default)
def _unsqueeze(b: Lowerings, node: Any, x: Value, dim: int) -> Value:
    axis = dim % (len(x.type.shape) + 1)
    return b.op("expand_dims", [x, b.constant(axis)], _result(b, node))


@_lower(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(b: Lowerings, node: Any, x: Value, dims: Any = None) -> Value:
    # Only sizes that are known to be 1: torch keeps one that merely may be.
    axes = [axis for axis in _axes(x, dims) if b.sizes(x)[axis] == 1]
    return _squeezed(b, x, axes, _val(node).shape) if axes else x


@_lower(aten.expand.default)
def _expand(b: Lowerings, node: Any, x: Value, sizes: Sequence[Size], **_: Any) -> Value:
    result = _result(b, node)
    before = len(sizes) - len(x.type.shape)
    given = b.sizes(x)
    target: list[Size] = []
    for axis, (size, fake) in enumerate(zip(sizes, _val(node).shape, strict=True)):
        own = given[axis - before] if axis >= before else 1
        if type(fake) is int:
            target.append(int(fake))
        elif isinstance(size, int) or own is None:  # -1, or a size that stays
            target.append(b.size(x, axis - before))
        else:
            target.append(size)
    if list(result.shape) == list(x.type.shape) and before == 0:
        return x
    return b.op("broadcast_to", [x, b.vector(target)], result)


@_lower(aten.repeat.default)
def _repeat(b: Lowerings, node: Any, x: Value, times: Sequence[Size]) -> Value:
    before = len(times) - len(x.type.shape)
    if before:
        sizes = [*[1] * before, *(b.size(x, axis) for axis in range(len(x.type.shape)))]
        fakes = [*[1] * before, *b.sizes(x)]
        x = b.reshape(x, sizes, fakes)
    return b.op("tile", [x, b.vector(times)], _result(b, node))


@_lower(aten.cat.default)
def _cat(b: Lowerings, node: Any, tensors: Sequence[Value], dim: int = 0) -> Value:
    result = _result(b, node)
    rank = len(result.shape)
    # torch lets an empty vector stand for nothing.
    parts = [b.cast(t, result.element_type) for t in tensors if len(t.type.shape) == rank]
    return b.op("concatenation", parts, result, axis=dim % rank, fused_activation_function="NONE")


@_lower(aten.split_with_sizes.default)
def _split_with_sizes(
    b: Lowerings, node: Any, x: Value, sizes: Sequence[Size], dim: int = 0
) -> Any:
    (axis,) = _axes(x, dim)
    parts: list[Value] = []
    offset: Size = 0
    for size, fake in zip(sizes, _val(node), strict=True):
        parts.append(_window(b, x, axis, offset, size, b.type_of(fake)))
        offset = b.plus(offset, size)
    return tuple(parts)


def _window(b: Lowerings, x: Value, axis: int, start: Size, size: Size, result: Any) -> Value:
    """``size`` elements from ``start`` on along one axis; -1 stands for all that follow."""
    rank = len(x.type.shape)
    begin: list[Size] = [0] * rank
    sizes: list[Size] = [-1] * rank
    begin[axis], sizes[axis] = start, size
    return b.op("slice", [x, b.vector(begin), b.vector(sizes)], result)


@_lower(aten.slice.Tensor)
def _slice(
    b: Lowerings,
    node: Any,
    x: Value,
    dim: int = 0,
    start: Size = None,
    end: Size = None,
    step: int = 1,
) -> Value:
    rank = len(x.type.shape)
    (axis,) = _axes(x, dim)
    result = _result(b, node)
    begins: list[Size] = [0] * rank
    ends: list[Size] = [0] * rank
    steps = [1] * rank
    steps[axis] = step
    # The kernel counts negative ends from the back and cuts those beyond, as torch does.
    others = sum(1 << i for i in range(rank) if i != axis)
    open_start = start is None or (isinstance(start, int) and start == 0)
    open_end = end is None or (isinstance(end, int) and end >= 2**31 - 1)
    begins[axis] = 0 if open_start else start
    ends[axis] = 0 if open_end else end
    if open_start and open_end and step == 1:
        return x
    return b.strided_slice(
        x,
        b.vector(begins),
        b.vector(ends),
        b.constant(steps),
        result,
        begin_mask=others | (1 << axis if open_start else 0),
        end_mask=others | (1 << axis if open_end else 0),
    )


@_lower(aten.select.int)
def _select(b: Lowerings, node: Any, x: Value, dim: int, index: Size) -> Value:
    (axis,) = _axes(x, dim)
    rank = len(x.type.shape)
    begins: list[Size] = [0] * rank
    ends: list[Size] = [0] * rank
    begins[axis] = index
    ends[axis] = b.plus(index, 1)
    others = sum(1 << i for i in range(rank) if i != axis)
    return b.strided_slice(
        x,
        b.vector(begins),
        b.vector(ends),
        b.constant([1] * rank),
        _result(b, node),
        begin_mask=others,
        # The end behind the last one is 0, which would be before the first.
        end_mask=others | (1 << axis if isinstance(index, int) and index == -1 else 0),
        shrink=1 << axis,
    )


@_lower(aten.unbind.int)
def _unbind(b: Lowerings, node: Any, x: Value, dim: int = 0) -> Any:
    (axis,) = _axes(x, dim)
    made = []
    for index, fake in enumerate(_val(node)):
        sizes = [1 if i == axis else size for i, size in enumerate(b.sizes(x))]
        row = _window(b, x, axis, index, 1, b.type(sizes, x.type.element_type))
        made.append(_squeezed(b, row, [axis], fake.shape))
    return tuple(made)


@_lower(aten.flip.default)
def _flip(b: Lowerings, node: Any, x: Value, dims: Sequence[int]) -> Value:
    return b.op("reverse_v2", [x, b.constant(_axes(x, dims))], x.type)


@_lower(aten.roll.default)
def _roll(b: Lowerings, node: Any, x: Value, shifts: Any, dims: Any = ()) -> Value:
    if not dims:
        raise NotImplementedError("it has a form with axes only")
    for shift, dim in zip(shifts, dims, strict=True):
        (axis,) = _axes(x, dim)
        size = b.size(x, axis)
        sizes = [None if i == axis else s for i, s in enumerate(b.sizes(x))]
        part = b.type(sizes, x.type.element_type)
        # Cut at -shift modulo the size: the rest, then the beginning.
        if isinstance(size, int) and isinstance(shift, int):
            cut: Size = -shift % size
        else:
            scalar = b.type([], torch.int32)
            negative = b.scalar(-shift) if isinstance(shift, int) else b.op("neg", [shift], scalar)
            cut = b.op("floor_mod", [negative, b.scalar(size)], scalar)
        parts = [_window(b, x, axis, cut, -1, part), _window(b, x, axis, 0, cut, part)]
        x = b.op("concatenation", parts, x.type, axis=axis, fused_activation_function="NONE")
    return x


@_lower(aten.constant_pad_nd.default)
def _pad(b: Lowerings, node: Any, x: Value, pads: Sequence[Size], value: Any = 0) -> Value:
    if any(isinstance(pad, int) and pad < 0 for pad in pads):
        raise NotImplementedError("it has a form for widths from 0 on")
    rank = len(x.type.shape)
    rows: list[list[Size]] = [[0, 0] for _ in range(rank)]
    for index in range(len(pads) // 2):
        rows[rank - 1 - index] = [pads[2 * index], pads[2 * index + 1]]
    if all(isinstance(pad, int) for row in rows for pad in row):
        table = b.constant(rows)
    else:
        flat = b.vector([pad for row in rows for pad in row])
        table = b.reshape(flat, [rank, 2], [rank, 2])
    fill = _operand(b, value, _val(node).dtype)
    return b.op("padv2", [x, table, fill], _result(b, node))


# ---------------------------------------------------------------------------------- made anew


@_lower(aten.full.default)
def _full(b: Lowerings, node: Any, sizes: Sequence[Size], value: Any, **_: Any) -> Value:
    return b.op("fill", [b.vector(sizes), _operand(b, value, _val(node).dtype)], _result(b, node))


@_lower(aten.full_like.default)
def _full_like(b: Lowerings, node: Any, x: Value, value: Any, **_: Any) -> Value:
    shape = b.op("shape", [x], b.type([len(x.type.shape)], torch.int32))
    return b.op("fill", [shape, _operand(b, value, _val(node).dtype)], _result(b, node))


@_lower(aten.scalar_tensor.default)
def _scalar_tensor(b: Lowerings, node: Any, value: Any, **_: Any) -> Value:
    return _operand(b, value, _val(node).dtype)


@_lower(aten.arange.start_step)
def _arange(b: Lowerings, node: Any, start: Size, end: Size, step: Any = 1, **_: Any) -> Value:
    dtype = _val(node).dtype
    whole = torch.int32 if dtype is torch.int64 else dtype
    ends = [_operand(b, item, whole) for item in (start, end, step)]
    made = b.op("range", ends, b.type(list(_val(node).shape), whole))
    return b.cast(made, dtype)


# ----------------------------------------------------------------------------------- look-ups


def _int32(b: Lowerings, value: Value) -> Value:
    return b.cast(value, torch.int32)


@_lower(aten.embedding.default)
def _embedding(b: Lowerings, node: Any, weight: Value, indices: Value, *_: Any) -> Value:
    return b.op("gather", [weight, _int32(b, indices)], _result(b, node), axis=0, batch_dims=0)


@_lower(aten.index_select.default)
def _index_select(b: Lowerings, node: Any, x: Value, dim: int, indices: Value) -> Value:
    (axis,) = _axes(x, dim)
    return b.op("gather", [x, _int32(b, indices)], _result(b, node), axis=axis, batch_dims=0)


def _from_the_end(b: Lowerings, index: Value, size: Size) -> Value:
    """An index as int32, negative places counted from the back: the kernels read other memory there."""
    places = _int32(b, index)
    negative = b.op("less", [places, b.constant(0)], b.type(b.sizes(places), torch.bool))
    shifted = b.binary("add", places, b.scalar(size), places.type)
    return b.op("select_v2", [negative, shifted, places], places.type)


@_lower(aten.index.Tensor)
def _index(b: Lowerings, node: Any, x: Value, indices: Sequence[Any]) -> Value:
    used = [axis for axis, index in enumerate(indices) if index is not None]
    fakes = [_fakes(node)[1][axis] for axis in used]
    if not used or any(fake.dtype in (torch.bool, torch.uint8) for fake in fakes):
        raise NotImplementedError("it has a form for indices of whole numbers, not for masks")
    places = [_from_the_end(b, indices[axis], b.size(x, axis)) for axis in used]
    result = _result(b, node)
    if len(used) == 1:
        return b.op("gather", [x, places[0]], result, axis=used[0], batch_dims=0)

    rest = [axis for axis in range(len(x.type.shape)) if axis not in used]
    if used != list(range(len(used))):
        x = b.transpose(x, [*used, *rest])
    places = _alike(b, places, fakes)
    shape, rank = b.sizes(places[0]), len(places[0].type.shape)
    kind = b.type([*shape, len(used)], torch.int32)
    pairs = b.op("pack", places, kind, values_count=len(used), axis=rank)
    others = b.sizes(x)[len(used) :]
    found = b.op("gather_nd", [x, pairs], b.type([*shape, *others], x.type.element_type))
    # torch puts the new axes where the indexed ones were if those lie side by side, else first.
    first = used[0] if used[-1] - used[0] + 1 == len(used) else 0
    if not first or not rank:
        return found
    order = [*range(rank, rank + first), *range(rank), *range(rank + first, rank + len(rest))]
    return b.transpose(found, order)


def _alike(b: Lowerings, values: Sequence[Value], fakes: Sequence[torch.Tensor]) -> list[Value]:
    """``values`` broadcast to their common shape."""
    rank = max(len(fake.shape) for fake in fakes)
    sizes: list[Size] = [1] * rank
    for back in range(1, rank + 1):
        wide = [
            (str(fake.shape[-back]), value)
            for fake, value in zip(fakes, values, strict=True)
            if len(fake.shape) >= back and str(fake.shape[-back]) != "1"
        ]
        if len({size for size, _ in wide}) > 1:
            raise NotImplementedError("it has a form for indices whose sizes are equal or 1")
        if wide:
            sizes[-back] = b.size(wide[0][1], -back)
    known = [size if isinstance(size, int) else None for size in sizes]
    return [
        value
        if b.sizes(value) == known
        else b.op("broadcast_to", [value, b.vector(sizes)], b.type(known, torch.int32))
        for value in values
    ]


@_lower(aten.gather.default)
def _gather(b: Lowerings, node: Any, x: Value, dim: int, index: Value, **_: Any) -> Value:
    rank = len(x.type.shape)
    (axis,) = _axes(x, dim)
    same = [i for i in range(rank) if i != axis]
    fake_x, fake_index = _fakes(node)[0], _fakes(node)[2]
    if any(str(fake_x.shape[i]) != str(fake_index.shape[i]) for i in same):
        raise NotImplementedError("it has a form where the other sizes are equal")

    order = [*same, axis]
    moved = b.transpose(x, order) if order != list(range(rank)) else x
    places = _int32(b, index)
    places = b.transpose(places, order) if order != list(range(rank)) else places
    kind = b.type(b.sizes(places), x.type.element_type)
    found = b.op("gather", [moved, places], kind, axis=rank - 1, batch_dims=rank - 1)
    back = [order.index(i) for i in range(rank)]
    return b.transpose(found, back) if order != list(range(rank)) else found


# ------------------------------------------------------------------------------------- images


_LAST, _FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def _padded(b: Lowerings, x: Value, pads: Sequence[int], value: float) -> Value:
    """An NHWC image with rows and columns of a value around it."""
    if not any(pads):
        return x
    sizes: list[Any] = [
        None if size is None else size + 2 * pad
        for size, pad in zip(b.sizes(x), (0, *pads, 0), strict=True)
    ]
    table = b.constant([[0, 0], [pads[0]] * 2, [pads[1]] * 2, [0, 0]])
    fill = b.number(value, x.type.element_type)
    return b.op("padv2", [x, table, fill], b.type(sizes, x.type.element_type))


def _pair(value: Any) -> tuple[int, int]:
    items = [value] if isinstance(value, int) else list(value)
    return (items[0], items[-1])


@_lower(aten.convolution.default)
def _convolution(
    b: Lowerings,
    node: Any,
    x: Value,
    weight: Value,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    if len(x.type.shape) != 4:
        raise NotImplementedError("it has a form for images (two axes) and lines only")
    fake = _val(node)
    last = b.transpose(x, _LAST)
    if transposed:
        if groups != 1 or _pair(dilation) != (1, 1):
            raise NotImplementedError("a transposed one has a form without groups and dilation")
        made = _transposed_convolution(
            b, last, weight, _pair(stride), _pair(padding), _pair(output_padding), fake
        )
        if bias is not None:
            made = b.binary("add", made, bias, made.type)
        return b.transpose(made, _FIRST)
    channels = b.sizes(x)[1]
    outputs = int(fake.shape[1])
    result = b.type([fake.shape[i] for i in _LAST], x.type.element_type)
    if bias is None:
        bias = b.constant([0.0] * outputs, np.float32)
    options: dict[str, Any] = {
        "padding": "VALID",
        "stride_h": _pair(stride)[0],
        "stride_w": _pair(stride)[1],
        "dilation_h_factor": _pair(dilation)[0],
        "dilation_w_factor": _pair(dilation)[1],
        "fused_activation_function": "NONE",
    }
    last = _padded(b, last, _pair(padding), 0.0)
    if groups > 1 and groups == channels:
        options["depth_multiplier"] = outputs // groups
        filters = b.transpose(weight, (1, 2, 3, 0))
        made = b.op("depthwise_conv_2d", [last, filters, bias], result, **options)
    else:
        made = b.op("conv_2d", [last, b.transpose(weight, _LAST), bias], result, **options)
    return b.transpose(made, _FIRST)


def _transposed_convolution(
    b: Lowerings,
    last: Value,
    weight: Value,
    stride: tuple[int, int],
    padding: tuple[int, int],
    output_padding: tuple[int, int],
    fake: torch.Tensor,
) -> Value:
    """All that the kernel makes, cut by the padding."""
    if any(more > less for more, less in zip(output_padding, padding, strict=True)):
        raise NotImplementedError("a transposed one has a form with output_padding <= padding")
    outputs = int(fake.shape[1])
    kernel = b.sizes(weight)[2:]
    full: list[Size] = [b.size(last, 0)]
    for axis in (0, 1):
        grown = b.times(b.size(last, axis + 1), stride[axis])
        full.append(b.plus(grown, (kernel[axis] or 1) - stride[axis]))
    full.append(outputs)
    known = [size if isinstance(size, int) else None for size in full]
    element = last.type.element_type
    bias = b.constant([0.0] * outputs, np.float32)
    made = b.op(
        "transpose_conv",
        [b.vector(full), b.transpose(weight, (1, 2, 3, 0)), last, bias],
        b.type(known, element),
        padding="VALID",
        stride_h=stride[0],
        stride_w=stride[1],
        fused_activation_function="NONE",
    )
    for axis in (1, 2):
        less, more = padding[axis - 1], output_padding[axis - 1]
        if not less and not more:
            continue
        size = b.plus(full[axis], more - 2 * less)
        known[axis] = size if isinstance(size, int) else None
        made = _window(b, made, axis, less, size, b.type(known, element))
    return made


def _pool(
    b: Lowerings, name: str, x: Value, kernel: Any, stride: Any, padding: Any, fake: torch.Tensor
) -> Value:
    (height, width), (down, right) = _pair(kernel), _pair(stride or kernel)
    lowest = -math.inf if name == "max_pool_2d" else 0.0
    last = _padded(b, b.transpose(x, _LAST), _pair(padding), lowest)
    sizes = [fake.shape[i] for i in _LAST]
    pooled = b.op(
        name,
        [last],
        b.type(sizes, x.type.element_type),
        padding="VALID",
        stride_h=down,
        stride_w=right,
        filter_height=height,
        filter_width=width,
        fused_activation_function="NONE",
    )
    return b.transpose(pooled, _FIRST)


@_lower(aten.max_pool2d_with_indices.default)
def _max_pool(
    b: Lowerings,
    node: Any,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
) -> Any:
    if _pair(dilation) != (1, 1) or ceil_mode or any(_index_users(node)):
        raise NotImplementedError("it has a form without dilation, ceil_mode and indices")
    return _pool(b, "max_pool_2d", x, kernel, stride, padding, _val(node)[0]), None


def _index_users(node: Any) -> list[Any]:
    return [user for user in node.users if user.args[1:] == (1,) and user.users]


@_lower(aten.avg_pool2d.default)
def _avg_pool(
    b: Lowerings,
    node: Any,
    x: Value,
    kernel: Any,
    stride: Any = (),
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: Any = None,
) -> Value:
    if ceil_mode or divisor or (any(_pair(padding)) and not count_include_pad):
        raise NotImplementedError("it has a form that counts the padding, without ceil_mode")
    return _pool(b, "average_pool_2d", x, kernel, stride, padding, _val(node))


def _resize(b: Lowerings, name: str, x: Value, fake: torch.Tensor, **options: bool) -> Value:
    height, width = (fake.shape[2], fake.shape[3])
    if not (type(height) is int and type(width) is int):
        raise NotImplementedError("it has a form where the sizes of the image are fixed")
    last = b.transpose(x, _LAST)
    kind = b.type([fake.shape[i] for i in _LAST], x.type.element_type)
    made = b.op(name, [last, b.constant([height, width])], kind, **options)
    return b.transpose(made, _FIRST)


@_lower(aten.upsample_bilinear2d.vec, aten.upsample_bilinear2d.default)
def _bilinear(b: Lowerings, node: Any, x: Value, size: Any, corners: bool, *_: Any) -> Value:
    fake, given = _val(node), _fakes(node)[0]
    _refuse_uneven(node, given, fake)
    return _resize(
        b, "resize_bilinear", x, fake, align_corners=corners, half_pixel_centers=not corners
    )


@_lower(aten.upsample_nearest2d.vec, aten.upsample_nearest2d.default)
def _nearest(b: Lowerings, node: Any, x: Value, *_: Any) -> Value:
    fake, given = _val(node), _fakes(node)[0]
    for axis in (2, 3):
        if not all(type(t.shape[axis]) is int for t in (fake, given)):
            raise NotImplementedError("it has a form where the sizes of the image are fixed")
        if fake.shape[axis] % given.shape[axis]:
            raise NotImplementedError("it has a form where sizes grow by whole factors")
    _refuse_uneven(node, given, fake)
    return _resize(
        b, "resize_nearest_neighbor", x, fake, align_corners=False, half_pixel_centers=False
    )


def _refuse_uneven(node: Any, given: torch.Tensor, fake: torch.Tensor) -> None:
    """Scales that are given and not the ratio of the sizes move the pixels that are read."""
    scales = [s for a in node.args[2:] for s in (a if isinstance(a, (list, tuple)) else [a])]
    scales = [s for s in scales if isinstance(s, float)]
    for axis, scale in zip((2, 3), scales, strict=False):
        if type(given.shape[axis]) is int and given.shape[axis] * scale != fake.shape[axis]:
            raise NotImplementedError("it has a form where the scale is the ratio of the sizes")


#: All operators that have a lowering here.
LOWERED = frozenset(op for op in _TABLE if isinstance(op, torch._ops.OpOverload))
