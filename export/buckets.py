"""The way out of a dynamic size that does not convert: several fixed shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["shapes_instead"]


def shapes_instead(inputs: Iterable[tuple[str, Sequence[Any]]]) -> str:
    """What to type instead of --dynamic, from the smallest and largest sizes of inputs by name.

    A size is a number, or a dynamic one with ``min`` and ``max``; "" if all are numbers.

    >>> from tpu2edge.types import Dim
    >>> shapes_instead([("x", (Dim(name="n", min=1, max=8), 4))])
    '--shapes x=1x4,8x4'
    """
    texts: list[str] = []
    for name, shape in inputs:
        if all(isinstance(size, int) for size in shape):
            continue
        ends = ("x".join(str(getattr(size, end, size)) for size in shape) for end in ("min", "max"))
        texts.append(f"--shapes {name}={','.join(ends)}")
    return " ".join(texts)
