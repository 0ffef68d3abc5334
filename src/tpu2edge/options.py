"""Options as the user writes them, checked and parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import OptionError
from tpu2edge.types import Dim

if TYPE_CHECKING:
    from tpu2edge.runtime_check.budget import Budget

__all__ = [
    "DEVICES",
    "budget_texts",
    "known_devices",
    "known_recipes",
    "parse_budget",
    "parse_dynamic",
    "parse_shapes",
    "thread_count",
]

DEVICES = ("host",)


def known_recipes(names: Sequence[str]) -> tuple[str, ...]:
    """The names of recipes, each once.

    Raises:
        OptionError: an unknown name, or none.
    """
    from tpu2edge.quantize.recipes import known_recipe

    if isinstance(names, str):
        names = (names,)
    if not names:
        raise OptionError("no recipe was given", do="give at least one, e.g. float32")
    return tuple(dict.fromkeys(known_recipe(name).name for name in names))


def known_devices(names: Sequence[str]) -> tuple[str, ...]:
    """The names of devices, each once; "host" if there is none.

    Raises:
        OptionError: an unknown name.
    """
    for name in names:
        if name not in DEVICES:
            raise OptionError(f"unknown device '{name}'", do=f"known: {', '.join(DEVICES)}")
    return tuple(dict.fromkeys(names)) or ("host",)


def thread_count(count: int | None) -> int | None:
    """``count``; None is LiteRT's own choice.

    Raises:
        OptionError: it is not from 1 to 1024.
    """
    if count is not None and not 1 <= count <= 1024:
        raise OptionError(f"--threads {count} makes no sense", do="give 1 to 1024")
    return count


def budget_texts(budget: Any) -> tuple[str, ...]:
    """The texts of a budget that was given as text; none for a Budget or None."""
    if budget is None or not isinstance(budget, (str, Sequence)):
        return ()
    return (budget,) if isinstance(budget, str) else tuple(budget)


def parse_budget(texts: Sequence[str], base: Budget) -> Budget:
    """The bounds in ``texts`` over those of ``base``."""
    from tpu2edge.runtime_check.budget import Budget

    return Budget.parse(*texts, base=base) if texts else base


_DYNAMIC = re.compile(r"^(?P<name>.+)\.(?P<axis>\d+)=(?P<min>\d+):(?P<max>\d+)$")


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, Dim]]:
    """``x.0=1:8`` as ``{"x": {0: Dim(1, 8)}}``.

    Raises:
        OptionError: a text of another form, or an empty range.
    """
    result: dict[str, dict[int, Dim]] = {}
    for text in texts:
        match = _DYNAMIC.match(text.strip())
        if match is None:
            raise OptionError(
                f"--dynamic '{text}' has another form", do="write NAME.AXIS=MIN:MAX, e.g. x.0=1:8"
            )
        low, high = int(match["min"]), int(match["max"])
        if not 1 <= low <= high:
            raise OptionError(f"--dynamic '{text}': no size is in {low}:{high}", do="give MIN:MAX")
        name, axis = match["name"], int(match["axis"])
        result.setdefault(name, {})[axis] = Dim(name=f"{name}_{axis}", min=low, max=high)
    return result


_SHAPES = re.compile(r"^(?P<name>[^=]+)=(?P<shapes>(\d+(x\d+)*)(,\d+(x\d+)*)*)$")


def parse_shapes(texts: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """``x=1x3x8x8,4x3x8x8`` as ``{"x": [(1, 3, 8, 8), (4, 3, 8, 8)]}``.

    Raises:
        OptionError: a text of another form, a size of 0, or an input given twice.
    """
    result: dict[str, list[tuple[int, ...]]] = {}
    for text in texts:
        match = _SHAPES.match(text.strip())
        if match is None:
            raise OptionError(
                f"--shapes '{text}' has another form",
                do="write NAME=SHAPE,SHAPE…, e.g. x=1x3x224x224,8x3x224x224",
            )
        if match["name"] in result:
            raise OptionError(
                f"--shapes gives input '{match['name']}' twice",
                do="list all its shapes in one --shapes, with commas",
            )
        shapes = [tuple(map(int, shape.split("x"))) for shape in match["shapes"].split(",")]
        if any(0 in shape for shape in shapes):
            raise OptionError(f"--shapes '{text}' has a size of 0", do="give sizes from 1 on")
        result[match["name"]] = shapes
    return result
