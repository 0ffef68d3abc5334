"""Complex numbers as pairs of real tensors, and Fourier transforms as products with real matrices.

Every complex tensor of the graph becomes its real and its imaginary part. A discrete Fourier
transform along an axis is a product with the matrices of cosines and sines (computed in float64),
which is what LiteRT's delegates are fast at; cropping and zero padding to ``n`` only choose rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.nn import functional

from tpu2edge.errors import LoweringError
from tpu2edge.export import blame
from tpu2edge.export.rewrites.pooling import along
from tpu2edge.export.rewrites.splice import Const, add_constant, trace_in

__all__ = ["apply"]

aten = torch.ops.aten
Tensor = torch.Tensor


@dataclass(frozen=True)
class Pair:
    """A complex tensor: its real and its imaginary part."""

    re: Tensor
    im: Tensor


def apply(program: ExportedProgram) -> int:
    """Replace all complex tensors and Fourier transforms; gives the number of operators.

    Raises:
        LoweringError: an operator on complex tensors that is not known here.
    """
    pairs: dict[Node, Any] = {}
    done: list[Node] = []
    for node in list(program.graph.nodes):
        if node.op == "placeholder" and _is_complex(node):
            pairs[node] = _constant(program, node)
        if node.op != "call_function":
            continue
        name = _name(node)
        touched = _is_complex(node) or any(n in pairs or _is_complex(n) for n in _inputs(node))
        if not touched and name not in _ALWAYS:
            continue
        if "getitem" in name:
            pairs[node] = pairs[node.args[0]][node.args[1]]
        else:
            pairs[node] = _replaced(program, node, name, pairs)
        if not isinstance(pairs[node], (_Nodes, list)):
            node.replace_all_uses_with(pairs.pop(node))
        done.append(node)
    for node in reversed(done):
        if not node.users:
            program.graph.erase_node(node)
    if done:
        program.graph.eliminate_dead_code()
        for node in pairs:
            if node.op == "placeholder" and not node.users:
                _remove(program, node)
        program.graph_module.recompile()
    return len(done)


def _remove(program: ExportedProgram, node: Node) -> None:
    specs = program.graph_signature.input_specs
    specs[:] = [spec for spec in specs if getattr(spec.arg, "name", None) != node.name]
    program.graph.erase_node(node)


@dataclass(frozen=True)
class _Nodes:
    re: Node
    im: Node


def _inputs(node: Node) -> Sequence[Node]:
    return node.all_input_nodes


def _is_complex(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return any(isinstance(one, Tensor) and one.is_complex() for one in values)


def _name(node: Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema else str(getattr(node.target, "__name__", ""))


def _constant(program: ExportedProgram, node: Node) -> _Nodes:
    for spec in program.graph_signature.input_specs:
        if getattr(spec.arg, "name", None) == node.name and spec.target is not None:
            value = program.state_dict.get(spec.target)
            if value is None:
                value = program.constants[spec.target]
            assert isinstance(value, Tensor)
            value = value.detach().resolve_conj()
            kind = torch.float32
            return _Nodes(
                add_constant(program, value.real.to(kind).contiguous()),
                add_constant(program, value.imag.to(kind).contiguous()),
            )
    raise LoweringError(
        f"the input '{node.name}' is complex, which LiteRT does not have",
        do="take real and imaginary parts as the last axis of a real input (view_as_complex)",
        place=blame.place_of_node(node),
    )


def _replaced(program: ExportedProgram, node: Node, name: str, pairs: dict[Node, Any]) -> Any:
    handler = _HANDLERS.get(name)
    if handler is None and name in _PARTWISE:
        handler = partial(_partwise, node.target)
    if handler is None:
        raise LoweringError(
            f"the operator {node.target} on complex numbers has no form in LiteRT",
            do="write this part with real numbers (real and imaginary parts)",
            place=blame.place_of_node(node),
        )

    def stand_in(item: Node, value: Callable[[Node], Any]) -> Any:
        found = pairs.get(item)
        if isinstance(found, _Nodes):
            return Pair(value(found.re), value(found.im))
        return value(item)

    shape: list[Any] = []

    def flat(const: Const, *args: Any, **kwargs: Any) -> Any:
        result = handler(const, *args, **kwargs)
        shape[:] = [result]
        return _flatten(result)

    nodes = list(trace_in(program, node, flat, stand_in))
    return _rebuild(shape[0], nodes)


def _flatten(result: Any) -> list[Tensor]:
    if isinstance(result, Pair):
        return [result.re, result.im]
    if isinstance(result, (list, tuple)):
        return [one for item in result for one in _flatten(item)]
    return [result]


def _rebuild(result: Any, nodes: list[Any]) -> Any:
    if isinstance(result, Pair):
        return _Nodes(nodes.pop(0), nodes.pop(0))
    if isinstance(result, (list, tuple)):
        return [_rebuild(item, nodes) for item in result]
    return nodes.pop(0)


# -------------------------------------------------------------------------------------- arithmetic


def _pair(value: Any, like: Tensor | None = None) -> Any:
    """A Pair of any operand: a real tensor and a number have an imaginary part of zero."""
    if isinstance(value, Pair):
        return value
    if isinstance(value, complex):
        return Pair(value.real, value.imag)  # type: ignore[arg-type]
    return Pair(value, 0.0)  # type: ignore[arg-type]


def _times(a: Any, b: Any, product: Callable[[Any, Any], Any] = lambda a, b: a * b) -> Any:
    """A product that is linear in both operands, of which one may be real."""
    if not isinstance(a, (Pair, complex)):
        b = _pair(b)
        return Pair(product(a, b.re), product(a, b.im))
    if not isinstance(b, (Pair, complex)):
        a = _pair(a)
        return Pair(product(a.re, b), product(a.im, b))
    a, b = _pair(a), _pair(b)
    return Pair(
        product(a.re, b.re) - product(a.im, b.im), product(a.re, b.im) + product(a.im, b.re)
    )


def _mul(_: Const, a: Any, b: Any) -> Any:
    return _times(a, b)


def _div(_: Const, a: Any, b: Any) -> Any:
    if not isinstance(b, (Pair, complex)):
        return Pair(a.re / b, a.im / b)
    b = _pair(b)
    size = b.re * b.re + b.im * b.im
    top = _times(a, Pair(b.re, -b.im))
    return Pair(top.re / size, top.im / size)


def _add(_: Const, a: Any, b: Any, *, alpha: Any = 1, sign: int = 1) -> Any:
    a, b = _pair(a), _pair(_times(b, sign * alpha) if sign * alpha != 1 else b)
    re, im = a.re + b.re, a.im + b.im
    if not isinstance(im, Tensor):
        return Pair(re, torch.full_like(re, im))
    return Pair(re.expand(im.shape) if re.shape != im.shape else re, im.expand(re.shape))


def _sub(const: Const, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return _add(const, a, b, alpha=alpha, sign=-1)


def _rsub(const: Const, a: Any, b: Any, *, alpha: Any = 1) -> Any:
    return _add(const, b, a, alpha=alpha, sign=-1)


def _abs(_: Const, z: Any) -> Any:
    return torch.sqrt(z.re * z.re + z.im * z.im)


def _angle(_: Const, z: Any) -> Any:
    if not isinstance(z, Pair):
        return torch.where(z < 0, math.pi, 0.0)
    return torch.atan2(z.im, z.re)


def _conj(_: Const, z: Any) -> Any:
    return Pair(z.re, -z.im) if isinstance(z, Pair) else z


def _same(_: Const, z: Any, **__: Any) -> Any:
    return z


def _real(_: Const, z: Any) -> Any:
    return z.re if isinstance(z, Pair) else z


def _imag(_: Const, z: Any) -> Any:
    return z.im


def _exp(_: Const, z: Any) -> Any:
    size = torch.exp(z.re)
    return Pair(size * torch.cos(z.im), size * torch.sin(z.im))


def _log(const: Const, z: Any) -> Any:
    return Pair(torch.log(_abs(const, z)), _angle(const, z))


def _sqrt(const: Const, z: Any) -> Any:
    size = torch.sqrt(_abs(const, z))
    half = _angle(const, z) / 2
    return Pair(size * torch.cos(half), size * torch.sin(half))


def _pow(const: Const, z: Any, power: Any) -> Any:
    if isinstance(power, int) and 1 <= power <= 8:
        total = z
        for _ in range(power - 1):
            total = _times(total, z)
        return total
    if isinstance(z, Pair) and isinstance(power, (int, float)):
        size = _abs(const, z) ** power
        turn = _angle(const, z) * power
        return Pair(size * torch.cos(turn), size * torch.sin(turn))
    raise NotImplementedError("a complex power of a complex number")


def _sgn(const: Const, z: Any) -> Any:
    size = _abs(const, z)
    safe = torch.where(size == 0, 1.0, size)
    return Pair(z.re / safe, z.im / safe)


def _reciprocal(const: Const, z: Any) -> Any:
    size = z.re * z.re + z.im * z.im
    return Pair(z.re / size, -z.im / size)


def _neg(_: Const, z: Any) -> Any:
    return Pair(-z.re, -z.im)


def _view_as_complex(_: Const, x: Tensor) -> Any:
    return Pair(x.select(-1, 0), x.select(-1, 1))


def _view_as_real(_: Const, z: Any) -> Any:
    return torch.stack([z.re, z.im], -1)


def _complex(_: Const, re: Tensor, im: Tensor) -> Any:
    re, im = torch.broadcast_tensors(re, im)
    return Pair(re, im)


def _polar(_: Const, size: Tensor, angle: Tensor) -> Any:
    return Pair(size * torch.cos(angle), size * torch.sin(angle))


def _matmul(_: Const, a: Any, b: Any) -> Any:
    return _times(a, b, torch.matmul)


def _einsum(_: Const, equation: str, operands: Sequence[Any], **__: Any) -> Any:
    if len(operands) == 1:
        one = operands[0]
        return Pair(torch.einsum(equation, one.re), torch.einsum(equation, one.im))
    if len(operands) != 2:
        raise NotImplementedError("einsum of more than two complex operands")
    a, b = operands
    return _times(a, b, lambda a, b: torch.einsum(equation, a, b))


def _to(_: Const, z: Any, *args: Any, **kwargs: Any) -> Any:
    """A change of type: from real to complex, back, or between precisions."""
    kinds = [v for v in (*args, *kwargs.values()) if isinstance(v, torch.dtype)]
    wanted = kinds[0] if kinds else torch.complex64
    if wanted.is_complex:
        if isinstance(z, Pair):
            return Pair(z.re * 1, z.im * 1) if kwargs.get("copy") else z
        re = z.to(torch.float32)
        return Pair(re, torch.zeros_like(re))
    return z.re.to(wanted) if isinstance(z, Pair) else z.to(wanted)


def _filled(op: Any, const: Const, *args: Any, **kwargs: Any) -> Any:
    kwargs = {k: v for k, v in kwargs.items() if k not in ("dtype", "layout", "pin_memory")}
    args = tuple(a.re if isinstance(a, Pair) else a for a in args)
    one = op(*args, dtype=torch.float32, **kwargs)
    if "zeros" in str(op):
        return Pair(one, torch.zeros_like(one))
    if "ones" in str(op):
        return Pair(one, torch.zeros_like(one))
    raise NotImplementedError(str(op))


def _copy_(_: Const, target: Any, source: Any, non_blocking: bool = False) -> Any:
    source = _pair(source)
    target.re.copy_(source.re)
    if isinstance(source.im, Tensor):
        target.im.copy_(source.im)
    else:
        target.im.zero_()
    return target


def _partwise(op: Any, _: Const, *args: Any, **kwargs: Any) -> Any:
    """An operator that does the same to both parts (it moves, chooses or adds up values)."""

    def part(item: Any, name: str) -> Any:
        if isinstance(item, Pair):
            return getattr(item, name)
        if isinstance(item, (list, tuple)):
            return type(item)(part(one, name) for one in item)
        return item

    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    re = op(*part(args, "re"), **kwargs)
    im = op(*part(args, "im"), **kwargs)
    if isinstance(re, (list, tuple)):
        return [Pair(a, b) for a, b in zip(re, im, strict=True)]
    return Pair(re, im)


def _joined(op: Any, const: Const, items: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    full = [z if isinstance(z, Pair) else Pair(z, torch.zeros_like(z)) for z in items]
    return Pair(
        op([z.re for z in full], *args, **kwargs), op([z.im for z in full], *args, **kwargs)
    )


def _where(_: Const, mask: Tensor, a: Any, b: Any) -> Any:
    a, b = _pair(a), _pair(b)
    return Pair(torch.where(mask, a.re, b.re), torch.where(mask, a.im, b.im))


# -------------------------------------------------------------------------------------- transforms


def _scale(n: int, norm: str | None, forward: bool) -> float:
    if norm == "ortho":
        return 1 / math.sqrt(n)
    unscaled = "backward" if forward else "forward"
    return 1.0 if (norm or "backward") == unscaled else 1 / n


def _waves(rows: int, columns: int, n: int, scale: float, sine: bool) -> Tensor:
    """cos or sin of 2 pi j k / n; j k is reduced first, so the angle is exact to float64."""
    turns = torch.outer(torch.arange(rows), torch.arange(columns)) % n
    angle = turns.double() * (2 * math.pi / n)
    return ((angle.sin() if sine else angle.cos()) * scale).to(torch.float32)


def _transform(
    const: Const, z: Any, n: int | None, axis: int, norm: str | None, forward: bool, half: bool
) -> Any:
    """The transform along one axis; with ``half`` the first n // 2 + 1 values of it."""
    size = (z.re if isinstance(z, Pair) else z).shape[axis]
    length = int(size if n is None or n < 0 else n)
    used = min(size, length)
    rows = length // 2 + 1 if half else length
    scale = _scale(length, norm, forward)
    cos = const(partial(_waves, rows, used, length, scale, False))
    sin = const(partial(_waves, rows, used, length, scale if forward else -scale, True))

    def cut(x: Tensor) -> Tensor:
        return x.narrow(axis, 0, used) if used < size else x

    if not isinstance(z, Pair):
        x = cut(z if z.is_floating_point() else z.to(torch.float32))
        return Pair(along(x, axis, cos), -along(x, axis, sin))
    re, im = cut(z.re), cut(z.im)
    return Pair(
        along(re, axis, cos) + along(im, axis, sin), along(im, axis, cos) - along(re, axis, sin)
    )


def _back(const: Const, z: Any, n: int | None, axis: int, norm: str | None, forward: bool) -> Any:
    """The real signal of ``n`` values whose transform's first half is ``z``."""
    z = z if isinstance(z, Pair) else Pair(z, torch.zeros_like(z))
    size = z.re.shape[axis]
    length = int(2 * (size - 1) if n is None or n < 0 else n)
    used = min(size, length // 2 + 1)
    scale = _scale(length, norm, forward)

    def matrix(sine: bool) -> Tensor:
        weight = torch.full((used,), 2.0)
        weight[0] = 1
        if length % 2 == 0 and used == length // 2 + 1:
            weight[-1] = 1
        return _waves(length, used, length, scale, sine) * weight

    re, im = (x.narrow(axis, 0, used) if used < size else x for x in (z.re, z.im))
    cos, sin = const(partial(matrix, False)), const(partial(matrix, True))
    return along(re, axis, cos) - along(im, axis, sin)


def _value(z: Any) -> Tensor:
    return z.re if isinstance(z, Pair) else z


def _axes(z: Any, s: Any, dim: Any) -> tuple[list[int], list[int | None]]:
    rank = _value(z).dim()
    if dim is None:
        dim = range(rank - len(s), rank) if s is not None else range(rank)
    axes = [d % rank for d in (dim if not isinstance(dim, int) else [dim])]
    return axes, list(s) if s is not None else [None] * len(axes)


def _one(forward: bool) -> Callable[..., Any]:
    def fft(const: Const, z: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
        return _transform(const, z, n, dim, norm, forward, False)

    return fft


def _many(forward: bool, default: Any = None) -> Callable[..., Any]:
    def fftn(const: Const, z: Any, s: Any = None, dim: Any = default, norm: Any = None) -> Any:
        for axis, n in zip(*_axes(z, s, dim), strict=True):
            z = _transform(const, z, n, axis, norm, forward, False)
        return z

    return fftn


def _rfft(const: Const, z: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
    return _transform(const, z, n, dim, norm, True, True)


def _irfft(const: Const, z: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
    return _back(const, z, n, dim, norm, False)


def _hfft(const: Const, z: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
    return _back(const, _conj(const, z), n, dim, norm, True)


def _ihfft(const: Const, z: Any, n: Any = None, dim: int = -1, norm: Any = None) -> Any:
    # An inverse transform by its scale, a forward one by its sign, conjugated.
    size = _value(z).shape[dim] if n is None else n
    half = _transform(const, z, n, dim, "backward", True, True)
    scale = _scale(size, norm, False)
    return Pair(half.re * scale, half.im * -scale)


def _rfftn(default: Any = None) -> Callable[..., Any]:
    def rfftn(const: Const, z: Any, s: Any = None, dim: Any = default, norm: Any = None) -> Any:
        axes, sizes = _axes(z, s, dim)
        z = _transform(const, z, sizes[-1], axes[-1], norm, True, True)
        for axis, n in zip(axes[:-1], sizes[:-1], strict=True):
            z = _transform(const, z, n, axis, norm, True, False)
        return z

    return rfftn


def _irfftn(default: Any = None) -> Callable[..., Any]:
    def irfftn(const: Const, z: Any, s: Any = None, dim: Any = default, norm: Any = None) -> Any:
        axes, sizes = _axes(z, s, dim)
        for axis, n in zip(axes[:-1], sizes[:-1], strict=True):
            z = _transform(const, z, n, axis, norm, False, False)
        return _back(const, z, sizes[-1], axes[-1], norm, False)

    return irfftn


def _window(window: Tensor | None, n_fft: int, length: int) -> Tensor | None:
    if window is None:
        if length == n_fft:
            return None
        window = torch.ones(length)
    left = (n_fft - length) // 2
    if length < n_fft:
        window = functional.pad(window, (left, n_fft - length - left))
    return window


def _stft(
    const: Const,
    x: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    *rest: Any,
    **kwargs: Any,
) -> Any:
    # stft.center has (center, pad_mode) before the rest of the arguments.
    names: tuple[str, ...] = ("normalized", "onesided", "return_complex", "align_to_window")
    if rest and (isinstance(rest[1], str) if len(rest) > 1 else False):
        names = ("center", "pad_mode", *names)
    given = {**dict(zip(names, rest, strict=False)), **kwargs}
    hop = hop_length or n_fft // 4
    batched = _value(x).dim() == 2
    if isinstance(x, Pair):
        raise NotImplementedError("stft of a complex signal")
    x = x if batched else x.unsqueeze(0)
    if given.get("center", False):
        pad = n_fft // 2
        x = functional.pad(x.unsqueeze(1), (pad, pad), given.get("pad_mode") or "constant")[:, 0]
    frames = x.unfold(-1, n_fft, hop)
    full = _window(window, n_fft, win_length or n_fft)
    if full is not None:
        frames = frames * full
    norm = "ortho" if given.get("normalized") else None
    half = given.get("onesided") is not False
    z = _transform(const, frames, n_fft, -1, norm, True, half)
    z = Pair(z.re.transpose(1, 2), z.im.transpose(1, 2))
    if not batched:
        z = Pair(z.re.squeeze(0), z.im.squeeze(0))
    return z if given.get("return_complex") else _view_as_real(const, z)


def _istft(
    const: Const,
    z: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    if return_complex:
        raise NotImplementedError("istft with a complex result")
    hop = hop_length or n_fft // 4
    batched = z.re.dim() == 3
    re, im = (x if batched else x.unsqueeze(0) for x in (z.re, z.im))
    z = Pair(re.transpose(1, 2), im.transpose(1, 2))
    if onesided is False:
        frames = _transform(const, z, n_fft, -1, "ortho" if normalized else None, False, False).re
    else:
        frames = _back(const, z, n_fft, -1, "ortho" if normalized else None, False)
    full = _window(window, n_fft, win_length or n_fft)
    if full is None:
        full = torch.ones(n_fft)
    count = frames.shape[1]
    weight = (full * full).reshape(1, 1, n_fft).expand(1, count, n_fft)
    total = _overlapped(const, frames * full, hop)
    envelope = _overlapped(const, weight, hop)
    start = n_fft // 2 if center else 0
    stop = total.shape[1]
    if length is not None:
        stop = start + length
    elif center:
        stop -= n_fft // 2
    kept = min(stop, total.shape[1])
    y = total[:, start:kept] / envelope[:, start:kept]
    if kept < stop:
        y = functional.pad(y, (0, stop - kept))
    return y if batched else y.squeeze(0)


def _overlapped(const: Const, frames: Tensor, hop: int) -> Tensor:
    """(batch, frames, n) added up at distances of ``hop``."""
    n = frames.shape[2]
    if n % hop:
        kernel = const(lambda: torch.eye(n).reshape(n, 1, n))
        return functional.conv_transpose1d(frames.transpose(1, 2), kernel, stride=hop)[:, 0]
    parts = n // hop
    total: Any = None
    for i in range(parts):
        part = frames[:, :, i * hop : (i + 1) * hop]
        part = functional.pad(part, (0, 0, i, parts - 1 - i))
        total = part if total is None else total + part
    result: Tensor = total.reshape(frames.shape[0], -1)
    return result


def _frequencies(half: bool) -> Callable[..., Any]:
    def frequencies(const: Const, n: int, d: float = 1.0, **_: Any) -> Any:
        make = torch.fft.rfftfreq if half else torch.fft.fftfreq
        return const(lambda: make(n, d))

    return frequencies


_HANDLERS: dict[str, Callable[..., Any]] = {
    "mul": _mul,
    "div": _div,
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "abs": _abs,
    "angle": _angle,
    "conj": _conj,
    "_conj": _conj,
    "_conj_physical": _conj,
    "conj_physical": _conj,
    "resolve_conj": _same,
    "resolve_neg": _same,
    "real": _real,
    "imag": _imag,
    "exp": _exp,
    "log": _log,
    "sqrt": _sqrt,
    "pow": _pow,
    "sgn": _sgn,
    "neg": _neg,
    "reciprocal": _reciprocal,
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
    "complex": _complex,
    "polar": _polar,
    "matmul": _matmul,
    "mm": _matmul,
    "bmm": _matmul,
    "mv": _matmul,
    "einsum": _einsum,
    "to": _to,
    "_to_copy": _to,
    "type_as": lambda _, a, b: _to(_, a, torch.complex64 if isinstance(b, Pair) else b.dtype),
    "copy_": _copy_,
    "zeros": partial(_filled, aten.zeros.default),
    "ones": partial(_filled, aten.ones.default),
    "zeros_like": partial(_filled, aten.zeros_like.default),
    "ones_like": partial(_filled, aten.ones_like.default),
    "new_zeros": partial(_filled, aten.new_zeros.default),
    "cat": partial(_joined, torch.cat),
    "stack": partial(_joined, torch.stack),
    "where": _where,
    "fft_fft": _one(True),
    "fft_ifft": _one(False),
    "fft_fft2": _many(True, (-2, -1)),
    "fft_ifft2": _many(False, (-2, -1)),
    "fft_fftn": _many(True),
    "fft_ifftn": _many(False),
    "fft_rfft": _rfft,
    "fft_irfft": _irfft,
    "fft_rfft2": _rfftn((-2, -1)),
    "fft_irfft2": _irfftn((-2, -1)),
    "fft_rfftn": _rfftn(),
    "fft_irfftn": _irfftn(),
    "fft_hfft": _hfft,
    "fft_ihfft": _ihfft,
    "stft": _stft,
    "istft": _istft,
    "fft_fftfreq": _frequencies(False),
    "fft_rfftfreq": _frequencies(True),
}
_ALWAYS = frozenset(name for name in _HANDLERS if name.startswith("fft_") or name == "stft")

_PARTWISE = frozenset(
    [
        "view",
        "reshape",
        "permute",
        "transpose",
        "t",
        "slice",
        "select",
        "narrow",
        "unsqueeze",
        "squeeze",
        "expand",
        "expand_as",
        "roll",
        "flip",
        "pad",
        "constant_pad_nd",
        "clone",
        "contiguous",
        "index_select",
        "index",
        "gather",
        "unflatten",
        "flatten",
        "repeat",
        "movedim",
        "alias",
        "detach",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "sum",
        "mean",
        "fft_fftshift",
        "fft_ifftshift",
        "tile",
        "repeat_interleave",
        "tril",
        "triu",
        "numpy_T",
        "swapaxes",
        "cumsum",
        "_unsafe_view",
        "lift_fresh_copy",
        "lift_fresh",
        "detach_",
        "moveaxis",
        "diagonal",
        "unfold",
    ]
)
