"""Models that were quantized in PyTorch: their integers and scales in one form that lowering keeps.

Quantizers write the same thing in many ways: integers or float weights followed by a quantization
(PT2E, folded or not), tensors that hold integers inside (torchao's ``quantize_``), fake quantization
(QAT), quantized tensor types (reference modules of torch.ao). In the traced program they all become

- ``quantize_per_tensor`` and ``dequantize_per_tensor`` with numbers, for activations,
- ``dequantize_per_channel`` or ``_per_tensor`` of an int8 constant, for weights,
- :data:`DYNAMIC`, for activations that are quantized when the model runs,

with the scales and zero points that were there. uint8 becomes int8 by a shift of 128, which changes
no value. What LiteRT has no form of is refused.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.ao.quantization.fx._decomposed  # what PT2E's operators are registered by
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase, ObserverBase
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx.passes.shape_prop import _extract_tensor_metadata
from torch.overrides import TorchFunctionMode

from tpu2edge.errors import ExportError, Place
from tpu2edge.export import blame
from tpu2edge.export.rewrites.graph import call
from tpu2edge.types import AS_QUANTIZED, Note

__all__ = [
    "DYNAMIC",
    "EXACT",
    "TAKEN_APART",
    "fixed_fake_quants",
    "is_quantized",
    "normalize",
    "quantization_of",
    "tracing",
]

aten = torch.ops.aten
decomposed = torch.ops.quantized_decomposed

_STATIC, _RUNTIME, _WEIGHTS = AS_QUANTIZED

# ------------------------------------------------------------------- quantized when the model runs


def _fake_at_runtime(
    x: torch.Tensor, quant_min: int, quant_max: int, symmetric: bool, by_row: bool, eps: float
) -> torch.Tensor:
    """``x`` as it is after a quantization whose scale is found from ``x``, by row or as a whole."""
    axes = (-1,) if by_row and x.dim() else tuple(range(x.dim()))
    low = x.amin(axes, keepdim=True).clamp(max=0)
    high = x.amax(axes, keepdim=True).clamp(min=0)
    if symmetric:
        scale = (torch.maximum(-low, high) * 2 / (quant_max - quant_min)).clamp(min=eps)
        zero = torch.zeros_like(scale)
    else:
        scale = ((high - low) / (quant_max - quant_min)).clamp(min=eps)
        zero = (quant_min - torch.round(low / scale)).clamp(quant_min, quant_max)
    levels = (torch.round(x / scale) + zero).clamp(quant_min, quant_max)
    return (levels - zero) * scale


@torch.library.custom_op("tpu2edge::quantize_at_runtime", mutates_args=())
def _at_runtime(
    x: torch.Tensor, quant_min: int, quant_max: int, symmetric: bool, by_row: bool, eps: float
) -> torch.Tensor:
    return _fake_at_runtime(x, quant_min, quant_max, symmetric, by_row, eps)


@_at_runtime.register_fake
def _at_runtime_shape(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


#: What goes in is quantized by a scale found from it, and dequantized at once.
DYNAMIC = torch.ops.tpu2edge.quantize_at_runtime.default

QUANTIZE = decomposed.quantize_per_tensor.default
DEQUANTIZE = decomposed.dequantize_per_tensor.default
DEQUANTIZE_CHANNELS = decomposed.dequantize_per_channel.default


def _quantize(
    x: torch.Tensor, scale: float, zero: int, low: int, high: int, dtype: torch.dtype
) -> torch.Tensor:
    return (torch.round(x / scale) + zero).clamp(low, high).to(dtype)


def _dequantize(
    x: torch.Tensor, scale: float, zero: int, *_: Any, wide: torch.dtype, **__: Any
) -> torch.Tensor:
    return (x.to(wide) - zero) * scale


def _dequantize_channels(
    x: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    axis: int,
    *_: Any,
    wide: torch.dtype,
    **__: Any,
) -> torch.Tensor:
    shape = [1] * x.dim()
    shape[axis] = -1
    values = x.to(wide)
    if zeros is not None:
        values = values - zeros.to(wide).reshape(shape)
    return values * scales.to(wide).reshape(shape)


def _computed_in(wide: torch.dtype) -> Mapping[Any, Callable[..., torch.Tensor]]:
    return {
        QUANTIZE: _quantize,
        DEQUANTIZE: partial(_dequantize, wide=wide),
        DEQUANTIZE_CHANNELS: partial(_dequantize_channels, wide=wide),
        DYNAMIC: _fake_at_runtime,
    }


#: The same in float64, for the oracle: torch's own compute in float32.
EXACT = _computed_in(torch.float64)
#: The same in core operators, for who has no quantized ones.
TAKEN_APART = _computed_in(torch.float32)


# ------------------------------------------------------------------------------------ the program


def is_quantized(program: ExportedProgram) -> bool:
    """Whether a program that :func:`normalize` saw holds anything quantized."""
    return any(node.target in EXACT for node in program.graph.nodes)


def quantization_of(program: ExportedProgram) -> str | None:
    """How a normalized program is quantized: the name its file gets in place of float32's."""
    found = {node.target for node in program.graph.nodes}
    if QUANTIZE in found:
        return _STATIC
    if DYNAMIC in found:
        return _RUNTIME
    return _WEIGHTS if found & EXACT.keys() else None


def normalize(program: ExportedProgram, notes: list[Note]) -> None:
    """Bring what is quantized in ``program`` into the one form, in place.

    Raises:
        ExportError: a kind of quantization that LiteRT has no form of; the module is named.
    """
    graph = _Graph(program)
    for node in list(program.graph.nodes):
        if node.op == "call_function":
            graph.visit(node)
    if graph.changed:
        graph.clean()
    _refuse_what_is_left(program)
    name = quantization_of(program)
    if name is None:
        return
    counts = ", ".join(f"{count} {what}" for what, count in _counts(program).items() if count)
    text = f"the model is quantized already ({counts}): the file keeps its integers and scales"
    notes.append(Note(code="as-quantized", text=text))
    if graph.narrow:
        text = (
            f"{graph.narrow} activations are limited to part of the 8-bit range in the module; the "
            "file uses all of it, so values outside of the calibrated range differ"
        )
        notes.append(Note(code="wider-range", text=text))


def _counts(program: ExportedProgram) -> dict[str, int]:
    """How many tensors are quantized in which way."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    return {
        "weights": sum(
            node.target in (DEQUANTIZE, DEQUANTIZE_CHANNELS)
            and getattr(node.args[0], "op", "") == "placeholder"
            for node in calls
        ),
        "activations": sum(node.target is QUANTIZE for node in calls),
        "activations at run time": sum(node.target is DYNAMIC for node in calls),
    }


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How integers become numbers; ``axis`` is None for one scale, ``group`` for whole channels."""

    scale: Any
    zero: Any
    low: int
    high: int
    dtype: torch.dtype
    axis: int | None = None
    group: int | None = None


class _Graph:
    """One pass over a program's graph."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.graph = program.graph
        self.targets = {
            spec.arg.name: spec.target
            for spec in program.graph_signature.input_specs
            if spec.target is not None and hasattr(spec.arg, "name")
        }
        self.changed = False
        self.narrow = 0
        self._known: dict[fx.Node, Any] = {}
        self._made: dict[int, tuple[fx.Node, torch.Tensor]] = {}  # by id(), and what has that id

    # ---- what a node is

    def visit(self, node: fx.Node) -> None:
        name = _op_name(node)
        if name.startswith("fake_quantize_per_"):
            self._fake_quantize(node)
        elif name in _DEQUANTIZERS:
            self._dequantizer(node, _DEQUANTIZERS[name](self, node))
        elif name in _QUANTIZERS and not self._is_constant(node):
            scheme = _QUANTIZERS[name](self, node)
            if self._known_scheme(scheme):
                self._static_quantizer(node, scheme)

    def _fake_quantize(self, node: fx.Node) -> None:
        scheme = _fake_scheme(self, node)
        # The cachemask operators give (value, mask).
        users = list(node.users) if "cachemask" in str(node.target) else [node]
        for user in users:
            if self._is_constant(node.args[0]):
                values = self.value(node.args[0])
                self._weight(user, _quantized(values, scheme), scheme)
            else:
                self._refuse_unknown(scheme, node)
                data = self._quantize_before(user, node.args[0], scheme)
                self._static_dequantizer(user, data, scheme)

    def _dequantizer(self, node: fx.Node, scheme: _Scheme) -> None:
        source = node.args[0]
        if self._is_constant(source):
            values = self.value(source)
            if values.is_quantized:
                values = values.int_repr()
            self._refuse_unknown(scheme, node)
            self._weight(node, values, scheme)
        elif self._known_scheme(scheme):
            self._static_dequantizer(node, source, scheme)
        else:
            self._dynamic(node, scheme)

    # ---- the forms

    def _weight(self, node: fx.Node, values: torch.Tensor, scheme: _Scheme) -> None:
        if scheme.dtype in (torch.int32, torch.int16):  # a bias: LiteRT derives its scale itself
            wide = _dequantized(values, scheme)
            self._replace(node, self._constant(node, wide.to(torch.float32)))
            return
        values, scheme = _signed(values, scheme)
        if values.dtype is not torch.int8:
            _refuse(node, f"weights of the type {_name(values.dtype)}")
        scales, zeros = _flat(scheme)
        shape = tuple(values.shape)
        axis = scheme.axis
        if scheme.group is not None:
            values, axis = values.reshape(-1, scheme.group), 0
        data = self._constant(node, values.contiguous())
        limits = (scheme.low, scheme.high, torch.int8)
        if axis is None:
            result = call(node, DEQUANTIZE, data, float(scales[0]), int(zeros[0]), *limits)
        else:
            held = (self._constant(node, scales), self._constant(node, zeros))
            result = call(node, DEQUANTIZE_CHANNELS, data, *held, axis, *limits)
        if scheme.group is not None:
            result = call(node, aten.reshape.default, result, list(shape), like=node)
        self._replace(node, result)

    def _static_quantizer(self, node: fx.Node, scheme: _Scheme) -> None:
        self._replace(node, self._quantize_before(node, node.args[0], scheme))

    def _quantize_before(self, node: fx.Node, source: Any, scheme: _Scheme) -> fx.Node:
        full = self._activation(node, scheme)
        self.narrow += full.high - full.low > scheme.high - scheme.low
        return call(node, QUANTIZE, source, *_numbers(full))

    def _static_dequantizer(self, node: fx.Node, source: Any, scheme: _Scheme) -> None:
        full = self._activation(node, scheme)
        self._replace(node, call(node, DEQUANTIZE, source, *_numbers(full)))

    def _activation(self, node: fx.Node, scheme: _Scheme) -> _Scheme:
        """The scheme as LiteRT has it for activations: signed, with the type's whole range."""
        if scheme.axis is not None or scheme.group is not None or _size(scheme.scale) != 1:
            _refuse(node, "activations with a scale for each channel")
        scale, zero = float(_first(scheme.scale)), int(_first(scheme.zero))
        low, high, dtype = scheme.low, scheme.high, scheme.dtype
        if dtype in (torch.uint8, torch.quint8):
            low, high, zero, dtype = low - 128, high - 128, zero - 128, torch.int8
        if dtype in (torch.int8, torch.qint8):
            return _Scheme(scale, zero, -128, 127, torch.int8)
        if dtype is torch.int16 and zero == 0:
            return _Scheme(scale, 0, -32768, 32767, torch.int16)
        _refuse(node, f"activations of the type {_name(dtype)} with the zero point {zero}")
        raise AssertionError

    def _dynamic(self, node: fx.Node, scheme: _Scheme) -> None:
        quantizer = node.args[0]
        if not isinstance(quantizer, fx.Node) or _op_name(quantizer) not in _QUANTIZERS:
            _refuse(node, "activations quantized at run time that are not dequantized at once")
        assert isinstance(quantizer, fx.Node)
        how = _choice(scheme.scale)
        if how is None:
            _refuse(node, "activations with a scale that the model computes in a way of its own")
            raise AssertionError
        by_row, symmetric, eps = how
        source = quantizer.args[0]
        result = call(node, DYNAMIC, source, scheme.low, scheme.high, symmetric, by_row, eps)
        self._replace(node, result)

    # ---- constants

    def _is_constant(self, value: Any) -> bool:
        """Whether a node depends on constants of the program only."""
        if not isinstance(value, fx.Node):
            return True
        stack, seen = [value], set[fx.Node]()
        while stack:
            node = stack.pop()
            if node in seen or node in self._known:
                continue
            seen.add(node)
            if node.op == "placeholder":
                if not isinstance(self._stored(node), torch.Tensor):
                    return False
            elif node.op != "call_function" or "mutable" in str(getattr(node.target, "tags", "")):
                return False
            stack.extend(node.all_input_nodes)
        return True

    def value(self, node: Any) -> Any:
        """What a node that depends on constants only gives."""
        if not isinstance(node, fx.Node):
            return node
        if node not in self._known:
            if node.op == "placeholder":
                stored = self._stored(node)
                self._known[node] = stored.detach() if _is_plain(stored) else stored
            elif node.target is torch.ops.export.access_subclass_inner_tensor.default:
                self._known[node] = getattr(self.value(node.args[0]), str(node.args[1]))
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
                with torch.no_grad():
                    self._known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self._known[node]

    def _stored(self, node: fx.Node) -> Any:
        target = self.targets.get(node.name)
        if target is None:
            return None
        found = self.program.state_dict.get(target)
        return self.program.constants.get(target) if found is None else found

    def scalar(self, value: Any) -> Any:
        """A number, a constant tensor, or the node that computes it when the model runs."""
        return self.value(value) if self._is_constant(value) else value

    def _known_scheme(self, scheme: _Scheme) -> bool:
        return not isinstance(scheme.scale, fx.Node) and not isinstance(scheme.zero, fx.Node)

    def _refuse_unknown(self, scheme: _Scheme, node: fx.Node) -> None:
        if not self._known_scheme(scheme):
            _refuse(node, "weights with a scale that the model computes when it runs")

    def _constant(self, node: fx.Node, value: torch.Tensor) -> fx.Node:
        """A new placeholder that holds ``value``; a copy that is no part of the user's tensors."""
        if id(value) in self._made:
            return self._made[id(value)][0]
        program = self.program
        number = len(self._made)
        name = f"quantized_constant_{number}"
        while name in program.state_dict:
            number += 1
            name = f"quantized_constant_{number}"
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        specs = program.graph_signature.input_specs
        place = next(
            (i for i, spec in enumerate(specs) if spec.kind is InputKind.USER_INPUT), len(specs)
        )
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        before = inputs[place] if place < len(inputs) else first
        with self.graph.inserting_before(before):
            made: fx.Node = self.graph.placeholder(name)
        given, value = value, value.detach().clone()
        made.meta["val"] = _fake_mode(self.graph).from_tensor(value, static_shapes=True)
        made.meta["tensor_meta"] = _extract_tensor_metadata(value)
        spec = InputSpec(InputKind.BUFFER, TensorArgument(made.name), name, persistent=True)
        specs.insert(place, spec)
        program.state_dict[name] = value
        self._made[id(given)] = (made, given)
        self.targets[made.name] = name
        return made

    def _replace(self, node: fx.Node, new: fx.Node) -> None:
        node.replace_all_uses_with(new)
        for spec in self.program.graph_signature.output_specs:
            if getattr(spec.arg, "name", None) == node.name:
                spec.arg = TensorArgument(new.name)
        self.changed = True

    def clean(self) -> None:
        """Take out what nothing uses any longer: calls, and constants that were quantized."""
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and (not node.users or _is_check(node)):
                self.graph.erase_node(node)
        program = self.program
        specs = program.graph_signature.input_specs
        for node in [n for n in self.graph.nodes if n.op == "placeholder" and not n.users]:
            target = self.targets.get(node.name)
            if target is None:
                continue
            specs[:] = [s for s in specs if getattr(s.arg, "name", None) != node.name]
            self.graph.erase_node(node)
            if all(spec.target != target for spec in specs):
                program.state_dict.pop(target, None)
                program.constants.pop(target, None)
        program.graph_module.recompile()


def _is_check(node: fx.Node) -> bool:
    return not node.users and "_assert_tensor_metadata" in str(node.target)


def _is_plain(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter)


def _fake_mode(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        value = node.meta.get("val")
        if hasattr(value, "fake_mode"):
            mode: Any = value.fake_mode
            return mode
    raise AssertionError("a graph without tensors")


def _op_name(node: Any) -> str:
    """The operator's name without namespace and overload, for those that can be of interest."""
    target = getattr(node, "target", None)
    if not isinstance(target, torch._ops.OpOverload):
        return ""
    space, _, name = target._schema.name.partition("::")
    return name if space in ("quantized_decomposed", "torchao", "aten") else ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ---- reading the operators


def _bound(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name, with the schema's defaults."""
    given = dict(node.kwargs)
    target: Any = node.target
    for index, argument in enumerate(target._schema.arguments):
        if index < len(node.args):
            given[argument.name] = node.args[index]
        elif argument.name not in given and argument.has_default_value():
            given[argument.name] = argument.default_value
    return given


def _per_tensor(graph: _Graph, node: fx.Node) -> _Scheme:
    given = _bound(node)
    return _Scheme(
        graph.scalar(given["scale"]),
        graph.scalar(given["zero_point"]),
        int(_first(graph.scalar(given["quant_min"]))),
        int(_first(graph.scalar(given["quant_max"]))),
        given["dtype"],
    )


def _per_channel(graph: _Graph, node: fx.Node) -> _Scheme:
    given = _bound(node)
    zeros = given["zero_points"]
    return _Scheme(
        graph.scalar(given["scales"]),
        0 if zeros is None else graph.scalar(zeros),
        given["quant_min"],
        given["quant_max"],
        given["dtype"],
        axis=given["axis"] % _rank(node.args[0]),
    )


def _per_group(graph: _Graph, node: fx.Node) -> _Scheme:
    given = _bound(node)
    zeros = given["zero_points"]
    return _Scheme(
        graph.scalar(given["scales"]),
        0 if zeros is None else graph.scalar(zeros),
        given["quant_min"],
        given["quant_max"],
        given["dtype"],
        group=given["group_size"],
    )


def _per_token(graph: _Graph, node: fx.Node) -> _Scheme:
    given = _bound(node)
    return _Scheme(
        graph.scalar(given["scales"]),
        graph.scalar(given["zero_points"]),
        given["quant_min"],
        given["quant_max"],
        given["dtype"],
        axis=_rank(node.args[0]) - 1,
    )


def _affine(graph: _Graph, node: fx.Node) -> _Scheme:
    given = _bound(node)
    dtype = given.get("input_dtype", given.get("output_dtype"))
    assert isinstance(dtype, torch.dtype)
    limits = _limits(dtype)
    low = limits[0] if given["quant_min"] is None else given["quant_min"]
    high = limits[1] if given["quant_max"] is None else given["quant_max"]
    zero = given["zero_point"]
    scale = graph.scalar(given["scale"])
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    shape, blocks = tuple(value.shape), tuple(given["block_size"])
    axis, group = None, None
    if not isinstance(scale, fx.Node) and _size(scale) != 1:
        cut = [i for i, (size, block) in enumerate(zip(shape, blocks, strict=True)) if block < size]
        last = len(shape) - 1
        if len(cut) == 1 and blocks[cut[0]] == 1:
            axis = cut[0]
        elif all(block == 1 for block in blocks[:-1]) and shape[last] % blocks[last] == 0:
            group = blocks[last]
        else:
            _refuse(node, f"blocks of the shape {list(blocks)} in a tensor of {list(shape)}")
    return _Scheme(
        scale,
        0 if zero is None else graph.scalar(zero),
        low,
        high,
        torch.uint8 if low >= 0 and high > 127 else torch.int8 if limits[1] <= 255 else dtype,
        axis=axis,
        group=group,
    )


def _limits(dtype: torch.dtype) -> tuple[int, int]:
    if dtype.is_floating_point:
        return 0, 0
    with contextlib.suppress(TypeError):
        info = torch.iinfo(dtype)
        return info.min, info.max
    return -128, 127  # int1 … int7, held in int8


def _fake_scheme(graph: _Graph, node: fx.Node) -> _Scheme:
    given = _bound(node)
    low, high = given["quant_min"], given["quant_max"]
    return _Scheme(
        graph.scalar(given["scale"]),
        graph.scalar(given["zero_point"]),
        low,
        high,
        torch.uint8 if low >= 0 else torch.int8 if high <= 127 else torch.int16,
        axis=given.get("axis"),
    )


_STORED: Mapping[torch.dtype, torch.dtype] = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
}


def _native_quantizer(graph: _Graph, node: fx.Node) -> _Scheme:
    """aten.quantize_per_tensor and _per_channel: a tensor of a quantized type."""
    given = _bound(node)
    channels = "scales" in given
    low, high = (0, 255) if given["dtype"] is torch.quint8 else (-128, 127)  # qint32: not used
    return _Scheme(
        graph.scalar(given["scales" if channels else "scale"]),
        graph.scalar(given["zero_points" if channels else "zero_point"]),
        low,
        high,
        _STORED.get(given["dtype"], torch.int32),
        axis=given["axis"] if channels else None,
    )


def _native_dequantizer(graph: _Graph, node: fx.Node) -> _Scheme:
    source = node.args[0]
    while isinstance(source, fx.Node) and _op_name(source) not in _QUANTIZERS:
        if not source.all_input_nodes:
            _refuse(node, "a quantized tensor of torch.ao")
        source = source.all_input_nodes[0]
    assert isinstance(source, fx.Node)
    return _QUANTIZERS[_op_name(source)](graph, source)


_QUANTIZERS: Mapping[str, Callable[[_Graph, fx.Node], _Scheme]] = {
    "quantize_per_tensor": lambda graph, node: (
        _native_quantizer(graph, node) if _is_native(node) else _per_tensor(graph, node)
    ),
    "quantize_per_channel": lambda graph, node: (
        _native_quantizer(graph, node) if _is_native(node) else _per_channel(graph, node)
    ),
    "quantize_per_token": _per_token,
    "quantize_affine": _affine,
}
_DEQUANTIZERS: Mapping[str, Callable[[_Graph, fx.Node], _Scheme]] = {
    "dequantize_per_tensor": _per_tensor,
    "dequantize_per_channel": _per_channel,
    "dequantize_per_channel_group": _per_group,
    "dequantize_per_token": _per_token,
    "dequantize_affine": _affine,
    "dequantize": _native_dequantizer,
}


def _is_native(node: fx.Node) -> bool:
    return str(node.target).startswith("aten.")


def _rank(node: Any) -> int:
    return len(node.meta["val"].shape)


def _choice(scale: Any) -> tuple[bool, bool, float] | None:
    """By row?, symmetric?, eps of the operator that finds ``scale`` when the model runs."""
    node = scale
    while isinstance(node, fx.Node) and not _op_name(node).startswith("choose_qparams"):
        if node.target is not operator.getitem and len(node.all_input_nodes) != 1:
            return None
        node = node.all_input_nodes[0] if node.all_input_nodes else None
    if not isinstance(node, fx.Node):
        return None
    name, given = _op_name(node), _bound(node)
    eps = float(given.get("eps") or torch.finfo(torch.float32).eps)
    if name == "choose_qparams":
        return False, False, eps
    if name == "choose_qparams_symmetric":
        return False, True, eps
    if name == "choose_qparams_per_token":
        return True, True, eps
    if name == "choose_qparams_per_token_asymmetric":
        return True, False, eps
    if name != "choose_qparams_affine":
        return None
    shape = tuple(node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    blocks = tuple(given["block_size"])
    symmetric = str(given["mapping_type"]).startswith("SYMMETRIC")
    if blocks == shape and (len(shape) != 1 and any(size != 1 for size in shape[:-1])):
        return False, symmetric, eps
    if all(block == 1 for block in blocks[:-1]) and blocks[-1:] == shape[-1:]:
        return True, symmetric, eps
    return (False, symmetric, eps) if blocks == shape else None


# ---- integers


def _first(value: Any) -> Any:
    return value.reshape(-1)[0].item() if isinstance(value, torch.Tensor) else value


def _size(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _numbers(scheme: _Scheme) -> tuple[Any, ...]:
    return (scheme.scale, scheme.zero, scheme.low, scheme.high, scheme.dtype)


def _flat(scheme: _Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (float32) and zero points (int64), as many of one as of the other."""
    scales = torch.as_tensor(scheme.scale).detach().to(torch.float32).reshape(-1)
    zeros = torch.as_tensor(scheme.zero).detach().to(torch.int64).reshape(-1)
    return scales, zeros.expand(len(scales)).clone() if len(zeros) == 1 else zeros


def _signed(values: torch.Tensor, scheme: _Scheme) -> tuple[torch.Tensor, _Scheme]:
    if values.dtype is not torch.uint8:
        return values, scheme
    zero = torch.as_tensor(scheme.zero).to(torch.int64) - 128
    shifted = (values.to(torch.int16) - 128).to(torch.int8)
    low, high = scheme.low - 128, scheme.high - 128
    return shifted, _Scheme(
        scheme.scale, zero, low, high, torch.int8, axis=scheme.axis, group=scheme.group
    )


def _spread(value: torch.Tensor, like: torch.Tensor, axis: int | None) -> torch.Tensor:
    """One value for each channel, in a shape that goes with ``like``."""
    if value.numel() == 1 or axis is None:
        return value.reshape([1] * like.dim())
    shape = [1] * like.dim()
    shape[axis] = -1
    return value.reshape(shape)


def _dequantized(values: torch.Tensor, scheme: _Scheme) -> torch.Tensor:
    scales, zeros = _flat(scheme)
    axis = scheme.axis
    wide = values.to(torch.float64) - _spread(zeros, values, axis)
    return wide * _spread(scales.double(), values, axis)


def _quantized(values: torch.Tensor, scheme: _Scheme) -> torch.Tensor:
    """The integers that a fake quantization goes through."""
    scales, zeros = _flat(scheme)
    scaled = values * (1.0 / _spread(scales, values, scheme.axis))
    levels = torch.round(scaled) + _spread(zeros, values, scheme.axis)
    return levels.clamp(scheme.low, scheme.high).to(scheme.dtype)


def _refuse(node: fx.Node, what: str) -> None:
    raise ExportError(
        f"the model is quantized in a form that LiteRT does not have: {what}",
        do="quantize with int8 or int4 weights (one scale, one for each output channel, or one for "
        "each group of the last axis) and int8 activations with one scale, or export the float "
        "model with a --recipe",
        place=blame.place_of_node(node),
    )


def _refuse_what_is_left(program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        value = node.meta.get("val")
        space = str(node.target).partition(".")[0]
        left = space in ("quantized_decomposed", "torchao", "quantized", "_quantized")
        if node.op == "call_function" and left and node.target not in EXACT:
            _refuse(node, f"the operator {node.target}")
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if not isinstance(one, torch.Tensor):
                continue
            text = _name(one.dtype)
            if one.is_quantized or text.startswith("float8") or text.startswith("float4"):
                _refuse(node, f"values of the type {text}")
    for spec in program.graph_signature.input_specs:
        held = program.state_dict.get(spec.target or "")
        if held is not None and hasattr(held, "__tensor_flatten__"):
            what = f"weights in a {type(held).__name__} that torch does not take apart"
            node = next(n for n in program.graph.nodes if n.name == getattr(spec.arg, "name", ""))
            _refuse(node, what)


# ------------------------------------------------------------------------------------ the modules


class _FixedFakeQuant(nn.Module):
    """A fake quantization with the scale that it has learned, without its observer."""

    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, learned: Any) -> None:
        super().__init__()
        self.register_buffer("scale", learned.scale.detach().float().reshape(-1).clone())
        self.register_buffer("zero_point", learned.zero_point.detach().int().reshape(-1).clone())
        observer = learned.activation_post_process
        self.low = int(getattr(learned, "quant_min", observer.quant_min))
        self.high = int(getattr(learned, "quant_max", observer.quant_max))
        self.axis = int(getattr(learned, "ch_axis", -1)) if self.scale.numel() > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(
                x, self.scale[0], self.zero_point[0], self.low, self.high
            )
        return torch.fake_quantize_per_channel_affine(
            x, self.scale, self.zero_point, self.axis, self.low, self.high
        )


def fixed_fake_quants(module: nn.Module, notes: list[Note]) -> None:
    """Fix the scales of eager QAT's fake quantizations in ``module`` (our copy).

    Raises:
        ExportError: the module was prepared for quantization and not converted, or converted to
            torch.ao's packed modules, which have no graph.
    """
    learned: dict[str, nn.Module] = {}
    for path, child in module.named_modules():
        if any(path.startswith(f"{above}.") for above in learned):
            continue  # the observer of a fake quantization
        _refuse_unfit(module, path, child)
        if isinstance(child, FakeQuantizeBase):
            learned[path] = child
    for path, child in learned.items():
        parent, _, name = path.rpartition(".")
        owner = module.get_submodule(parent)
        enabled = bool(getattr(child, "fake_quant_enabled", torch.ones(1))[0])
        if enabled and not hasattr(child, "scale"):
            _refuse_module(path, "fake quantization without a scale", _CONVERT_QAT)
        observer = getattr(child, "activation_post_process", None)
        seen = getattr(observer, "min_val", None)
        if enabled and (seen is None or not seen.numel() or not bool(seen.isfinite().all())):
            _refuse_module(
                path,
                "a fake quantization that has not seen a value, so it has no scale",
                "train, or call the model once on real inputs with its observers enabled",
            )
        setattr(owner, name, _FixedFakeQuant(child) if enabled else nn.Identity())
    if learned:
        text = f"{len(learned)} fake quantizations (QAT): their scales are fixed as they are"
        notes.append(Note(code="fake-quantization", text=text))


_CONVERT_PT2E = (
    "call convert_pt2e(model) (torchao.quantization.pt2e.quantize_pt2e) after calibration or "
    "training, and export what it gives"
)
_CONVERT_QAT = "convert the model before it is exported"


def _refuse_unfit(module: nn.Module, path: str, child: nn.Module) -> None:
    kinds = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(child).__mro__]
    in_graph = isinstance(module.get_submodule(path.rpartition(".")[0]), fx.GraphModule)
    pt2e = any(kind.startswith("torchao.quantization.pt2e.") for kind in kinds)
    if pt2e or (in_graph and isinstance(child, (ObserverBase, FakeQuantizeBase))):
        _refuse_module(
            path,
            f"{type(child).__name__}, which a prepared model has: it was not converted",
            _CONVERT_PT2E,
        )
    if isinstance(child, ObserverBase):
        _refuse_module(
            path,
            f"the observer {type(child).__name__}: the model was prepared and not converted",
            "torch.ao's eager convert gives packed modules, which have no graph: quantize with "
            "torchao's PT2E (prepare_pt2e, convert_pt2e) instead",
        )
    if any(kind.startswith("torchao.quantization.qat.") for kind in kinds):
        _refuse_module(
            path,
            f"{type(child).__name__}, prepared for quantization-aware training and not converted",
            'call quantize_(model, QATConfig(base_config, step="convert")) after training',
        )
    packed = any(
        kind.startswith(("torch.ao.nn.quantized.", "torch.ao.nn.intrinsic.quantized."))
        and ".reference." not in kind
        for kind in kinds
    )
    if packed and not isinstance(child, nn.Identity) and _is_packed(child):
        _refuse_module(
            path,
            f"{type(child).__name__} of torch.ao, whose packed weights have no graph",
            "quantize with torchao's PT2E (prepare_pt2e, convert_pt2e), or export the float model "
            "with a --recipe",
        )


def _is_packed(child: nn.Module) -> bool:
    return type(child).__name__ not in ("FloatFunctional", "DeQuantize")


def _refuse_module(path: str, what: str, do: str) -> None:
    raise ExportError(
        f"the model holds {what}", do=do, place=Place(module=blame.strip_wrapper(path))
    )


# ------------------------------------------------------------------------------------- the tracing


class _Int8Linears(TorchFunctionMode):
    """Products with torchao's Int8Tensor as what they mean: a product with dequantized weights.

    Its own kernels multiply integers that are not in the graph as quantized any more.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.linear and len(args) > 1 and _is_int8(args[1]):
            x, weight, *rest = args
            return func(_activation_of(x, weight), weight.dequantize(), *rest, **kwargs)
        return func(*args, **kwargs)


def _is_int8(value: Any) -> bool:
    kinds = [cls.__name__ for cls in type(value).__mro__]
    return "Int8Tensor" in kinds and type(value).__module__.startswith("torchao.")


def _activation_of(x: torch.Tensor, weight: Any) -> torch.Tensor:
    if weight.act_pre_scale is not None:
        x = x * weight.act_pre_scale
    how = weight.act_quant_kwargs
    if how is None:
        return x
    from torchao.quantization.quant_primitives import (  # type: ignore[import-untyped]
        MappingType,
        dequantize_affine,
        quantize_affine,
    )

    half = 2 if how.reduce_range else 1
    low, high = -128 // half, 127 // half
    if weight.act_quant_scale is not None:
        scale, zero = weight.act_quant_scale, weight.act_quant_zero_point
        if zero is None:
            zero = torch.zeros_like(scale, dtype=torch.int32)
        rest = (torch.int8, low, high)
        blocks = tuple(x.shape)
        levels = quantize_affine(x, blocks, scale, zero, *rest)
        fixed: torch.Tensor = dequantize_affine(
            levels, blocks, scale, zero, *rest, output_dtype=x.dtype
        )
        return fixed
    by_row = type(how.granularity).__name__ in ("PerRow", "PerToken")
    symmetric = how.mapping_type is MappingType.SYMMETRIC
    eps = float(torch.finfo(torch.float32).eps)
    found: torch.Tensor = DYNAMIC(x, low, high, symmetric, by_row, eps)
    return found


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """While a module is traced; does nothing where torchao was never imported."""
    if "torchao" not in sys.modules:
        yield
        return
    with _Int8Linears():
        yield
