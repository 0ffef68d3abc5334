"""Integer arithmetic in operators that LiteRT has for integers, and powers by integer tensors.

litert-torch computes integer powers and truncated division in float32, which is wrong above 2**24,
and has no lowering for shifts. LiteRT's own DIV, FLOOR_DIV and FLOOR_MOD are exact on int32; its POW
knows float32 only.
"""

from __future__ import annotations

from typing import Any

import torch

from tpu2edge.export.rewrites import native

__all__ = ["DECOMPOSITIONS"]

aten = torch.ops.aten
Number = int | float | bool


def _is_int(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int)


def _repeated(base: torch.Tensor, exponent: int) -> torch.Tensor:
    """``base ** exponent`` by squaring, for 1 <= exponent."""
    result: torch.Tensor | None = None
    while True:
        if exponent & 1:
            result = base if result is None else result * base
        exponent >>= 1
        if not exponent:
            assert result is not None
            return result
        base = base * base


def _pow_scalar_exponent(base: torch.Tensor, exponent: Number) -> Any:
    if not _is_int(base):
        if isinstance(exponent, (int, float)) and exponent in (2, 3, 4):
            return _repeated(base, int(exponent))
        return NotImplemented
    if not isinstance(exponent, int):
        return aten.pow.Tensor_Scalar(base.to(torch.float32), exponent)
    if exponent < 0:
        return NotImplemented  # PyTorch refuses it
    dtype = torch.int64 if base.dtype is torch.bool else base.dtype
    if exponent == 0:
        return torch.ones_like(base, dtype=dtype)
    if exponent >= 32:  # beyond int32 but for 0, 1 and -1, of which only the parity matters
        exponent = 30 + exponent % 2
    return _repeated(base.to(torch.int32), exponent).to(dtype)


def _integer_pow(base: torch.Tensor, exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By squaring, over the five bits of the exponent; not for negative ones."""
    base, rest = base.to(torch.int32), exponent.to(torch.int32)
    # Beyond 31, only 0, 1 and -1 stay within int32, and only the parity matters.
    rest = torch.where(rest > 31, native.int32("floor_mod", rest, _number(2)) + 30, rest)
    result: torch.Tensor | None = None
    for place in range(5):
        odd = native.int32("floor_mod", rest, _number(2)) == 1
        factor = torch.where(odd, base, torch.ones_like(base))
        result = factor if result is None else result * factor
        if place < 4:
            base = base * base
            rest = native.int32("floor_div", rest, _number(2))
    assert result is not None
    return result.to(dtype)


def _number(value: int) -> torch.Tensor:
    return torch.full((), value, dtype=torch.int32)


def _pow_tensors(base: torch.Tensor, exponent: torch.Tensor) -> Any:
    if _is_int(base) and _is_int(exponent):
        dtype = torch.result_type(base, exponent)
        if dtype is torch.bool:
            return base | ~exponent
        result = _integer_pow(base, exponent, dtype)
        if exponent.dtype in (torch.bool, torch.uint8):
            return result
        # As PyTorch: 1 / base, rounded towards zero.
        even = native.int32("floor_mod", exponent, _number(2)) == 0
        unit = torch.where(even, 1, base.to(torch.int32))
        small = (base == 1) | (base == -1)
        negative = torch.where(small, unit, 0).to(dtype)
        return torch.where(exponent < 0, negative, result)
    if _is_int(exponent):
        return aten.pow.Tensor_Tensor(base, exponent.to(base.dtype))
    if _is_int(base):
        return aten.pow.Tensor_Tensor(base.to(exponent.dtype), exponent)
    return NotImplemented


def _pow_scalar_base(base: Number, exponent: torch.Tensor) -> Any:
    if not _is_int(exponent):
        return NotImplemented
    if not isinstance(base, int):
        return aten.pow.Scalar(base, exponent.to(torch.float32))
    dtype = torch.int64 if exponent.dtype is torch.bool else exponent.dtype
    return _pow_tensors(torch.full_like(exponent, base, dtype=dtype), exponent.to(dtype))


# ------------------------------------------------------------------------------ division, remainder


def _pair(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    dtype = torch.result_type(x, y)
    if not isinstance(x, torch.Tensor):
        x = torch.full((), x, dtype=torch.int32)
    if not isinstance(y, torch.Tensor):
        y = torch.full((), y, dtype=torch.int32)
    return x.to(torch.int32), y.to(torch.int32), dtype


def _floor_divide(x: Any, y: Any) -> Any:
    found = _native("floor_div", x, y)
    if found is NotImplemented:
        x, y = _floats(x, y)
        return NotImplemented if x is None else native.divide("floor_div", x, y)
    return found


def _floats(x: Any, y: Any) -> tuple[Any, Any]:
    """Both as float32 tensors, None where the result is of another type."""
    if torch.result_type(x, y) is not torch.float32:
        return None, None
    if not isinstance(x, torch.Tensor):
        x = torch.full((), x, dtype=torch.float32)
    if not isinstance(y, torch.Tensor):
        y = torch.full((), y, dtype=torch.float32)
    return x.to(torch.float32), y.to(torch.float32)


def _remainder(x: Any, y: Any) -> Any:
    return _native("floor_mod", x, y)


def _fmod(x: Any, y: Any) -> Any:
    quotient = _native("div", x, y)
    if quotient is NotImplemented:
        return NotImplemented
    return (x - quotient * y).to(quotient.dtype)


def _native(name: str, x: Any, y: Any) -> Any:
    if not (_is_int(x) and _is_int(y)):
        return NotImplemented
    x, y, dtype = _pair(x, y)
    return native.int32(name, x, y).to(dtype)


def _div_mode(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return NotImplemented
    return _floor_divide(x, y) if rounding_mode == "floor" else _native("div", x, y)


# ----------------------------------------------------------------------------------------- products


def _matmul(x: torch.Tensor, y: torch.Tensor) -> Any:
    if not _is_int(x) or x.dim() < 2 or y.dim() < 2:
        return NotImplemented
    products = x.to(torch.int32).unsqueeze(-1) * y.to(torch.int32).unsqueeze(-3)
    return products.sum(-2, dtype=torch.int32).to(x.dtype)


def _exp2(x: torch.Tensor) -> torch.Tensor:
    return aten.pow.Scalar(2.0, x if x.is_floating_point() else x.to(torch.float32))


# --------------------------------------------------------------------------------------------- bits


def _operands(x: Any, y: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(x, torch.Tensor):
        x = torch.full((), x, dtype=torch.bool if isinstance(x, bool) else torch.int32)
    if not isinstance(y, torch.Tensor):
        y = torch.full((), y, dtype=torch.bool if isinstance(y, bool) else torch.int32)
    return x, y


def _and(x: Any, y: Any) -> Any:
    dtype = torch.result_type(x, y)
    if dtype is torch.bool:
        return torch.logical_and(*_operands(x, y))
    for value, other in ((x, y), (y, x)):
        if isinstance(value, int) and value >= 0 and (value + 1) & value == 0:
            return _native("floor_mod", other, value + 1).to(dtype) if value < 2**30 else other
    x, y = (value.to(torch.int32) for value in _operands(x, y))
    # LiteRT has XOR alone: a + b = (a ^ b) + 2 (a & b), on halves so that nothing overflows.
    two = _number(2)
    high_x, high_y = native.int32("floor_div", x, two), native.int32("floor_div", y, two)
    low = native.int32("floor_mod", x, two) * native.int32("floor_mod", y, two)
    return (high_x + high_y - aten.bitwise_xor.Tensor(high_x, high_y) + low).to(dtype)


def _or(x: Any, y: Any) -> Any:
    dtype = torch.result_type(x, y)
    if dtype is torch.bool:
        return torch.logical_or(*_operands(x, y))
    x, y = (value.to(torch.int32) for value in _operands(x, y))
    return (aten.bitwise_xor.Tensor(x, y) + _and(x, y)).to(dtype)


def _xor(x: Any, y: Any) -> Any:
    dtype = torch.result_type(x, y)
    if dtype is torch.bool:
        return torch.ne(*_operands(x, y))
    given = _operands(x, y)
    if all(value.dtype is torch.int32 for value in (x, y) if isinstance(value, torch.Tensor)) and (
        isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    ):
        return NotImplemented
    x, y = torch.broadcast_tensors(*(value.to(torch.int32) for value in given))
    return aten.bitwise_xor.Tensor(x, y).to(dtype)


def _not(x: torch.Tensor) -> Any:
    if x.dtype is torch.bool:
        return torch.logical_not(x)
    return 255 - x if x.dtype is torch.uint8 else -1 - x


# ------------------------------------------------------------------------------------------- shifts


def _power_of_two(places: torch.Tensor) -> torch.Tensor:
    """2 ** places for 0 <= places <= 30."""
    return _integer_pow(torch.full_like(places, 2, dtype=torch.int32), places, torch.int32)


def _left(x: Any, places: Any) -> Any:
    dtype = torch.result_type(x, places)
    if isinstance(places, int):
        if not 0 <= places < 32:
            return torch.zeros_like(x)
        factor = 1 << places
        factor = factor - (1 << 32) if factor >= 1 << 31 else factor
        return (x.to(torch.int32) * factor).to(dtype)
    if not isinstance(x, torch.Tensor):
        x = torch.full_like(places, x)
    small = (places >= 0) & (places < 32)
    kept = torch.where(small, places, 0).to(torch.int32)
    top = (kept == 31).to(torch.int32)  # 2 ** 31 itself is no int32
    shifted = x.to(torch.int32) * _power_of_two(kept - top) * (top + 1)
    return torch.where(small, shifted, 0).to(dtype)


def _right(x: Any, places: Any) -> Any:
    dtype = torch.result_type(x, places)
    if not isinstance(x, torch.Tensor):
        x = torch.full_like(places, x)
    if isinstance(places, int):
        if 0 <= places < 31:
            return _native("floor_div", x, 1 << places).to(dtype)
        return torch.where(x < 0, -1, 0).to(dtype)
    small = (places >= 0) & (places < 31)
    kept = torch.where(small, places, 0).to(torch.int32)
    divided = _native("floor_div", x.to(torch.int32), _power_of_two(kept))
    return torch.where(small, divided, torch.where(x < 0, -1, 0)).to(dtype)


DECOMPOSITIONS: dict[Any, Any] = {
    aten.pow.Tensor_Scalar: _pow_scalar_exponent,
    aten.pow.Tensor_Tensor: _pow_tensors,
    aten.pow.Scalar: _pow_scalar_base,
    aten.floor_divide.default: _floor_divide,
    aten.floor_divide.Scalar: _floor_divide,
    aten.div.Tensor_mode: _div_mode,
    aten.div.Scalar_mode: _div_mode,
    aten.remainder.Tensor: _remainder,
    aten.remainder.Scalar: _remainder,
    aten.remainder.Scalar_Tensor: _remainder,
    aten.exp2.default: _exp2,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.fmod.Tensor: _fmod,
    aten.fmod.Scalar: _fmod,
    **{
        getattr(packet, overload): function
        for packet, function in (
            (aten.bitwise_and, _and),
            (aten.bitwise_or, _or),
            (aten.bitwise_xor, _xor),
        )
        for overload in ("Tensor", "Scalar", "Scalar_Tensor")
    },
    aten.bitwise_not.default: _not,
    aten.bitwise_left_shift.Tensor: _left,
    aten.bitwise_left_shift.Tensor_Scalar: _left,
    aten.bitwise_left_shift.Scalar_Tensor: _left,
    aten.__lshift__.Tensor: _left,
    aten.__lshift__.Scalar: _left,
    aten.bitwise_right_shift.Tensor: _right,
    aten.bitwise_right_shift.Tensor_Scalar: _right,
    aten.bitwise_right_shift.Scalar_Tensor: _right,
    aten.__rshift__.Tensor: _right,
    aten.__rshift__.Scalar: _right,
}
