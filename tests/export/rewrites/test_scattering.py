"""Writes by index and by mask: overwriting, adding, reducing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Check = Callable[[Any], list[str]]


def _written(function: Callable[..., None]) -> Callable[..., torch.Tensor]:
    """``function`` assigns into its first argument."""

    def run(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        function(y, *rest)
        return y

    return run


def _places(*shape: int, count: int, dim: int) -> torch.Tensor:
    return torch.rand(*shape).argsort(dim).narrow(dim, 0, count)


def test_scatters(converted: Check) -> None:
    torch.manual_seed(0)
    r, cases = torch.randn, {}
    for name, shape, dim in (("a", (2, 4, 5), 1), ("b", (4, 5), 0), ("c", (2, 4, 5), -1)):
        index = _places(*shape, count=3, dim=dim)
        source = r(index.shape)
        cases[f"set_{name}"] = (
            lambda x, i, s, d=dim: (x.scatter(d, i, s), x.scatter(d, i, 2.5)),
            (r(shape), index, source),
        )
        again = torch.randint(0, 4, (2, *index.shape[1:]))
        cases[f"add_{name}"] = (
            lambda x, i, s, d=dim: (x.scatter_add(d, i, s), x.scatter(d, i, 1.5, reduce="add")),
            (r(shape), again, r(again.shape)),
        )
    part = _places(2, 5, count=3, dim=1)
    cases["part"] = (lambda x, i, s: x.scatter(1, i, s), (r(4, 5), part, r(3, 4)))
    cases["int"] = (
        lambda x, i, s: (x.scatter(0, i, s), x.scatter_add(0, i * 0, s)),
        (torch.arange(6), torch.tensor([4, 1]), torch.tensor([7, -8])),
    )
    cases["bool"] = (lambda x, i: x.scatter(0, i, True), (r(6) > 9, torch.tensor([4, 1])))
    names = converted(cases)
    assert not any(name.startswith("STABLEHLO") for name in names)


@pytest.mark.parametrize("include_self", [True, False])
def test_scatter_reduce(include_self: bool, converted: Check) -> None:
    torch.manual_seed(0)
    index = torch.randint(0, 4, (2, 3, 5))
    converted(
        {
            how: (
                lambda x, i, s, how=how: x.scatter_reduce(1, i, s, how, include_self=include_self),
                (torch.randn(2, 4, 5), index, torch.randn(2, 3, 5)),
            )
            for how in ("sum", "prod", "mean", "amax", "amin")
        }
    )


def test_writes_of_slices(converted: Check) -> None:
    torch.manual_seed(0)
    r, t = torch.randn, torch.tensor
    converted(
        {
            "add": (
                lambda x, i, s: x.index_add(0, i, s),
                (r(4, 5), t([0, 2, 2, 1, 3, 0]), r(6, 5)),
            ),
            "alpha": (
                lambda x, i, s: x.index_add(-1, i, s, alpha=-2),
                (r(2, 4, 5), t([0, 2, 2]), r(2, 4, 3)),
            ),
            "whole": (
                lambda x, i, s: x.index_add(0, i, s),
                (torch.arange(20).reshape(4, 5), t([0, 2, 2]), torch.arange(15).reshape(3, 5)),
            ),
            "copy": (lambda x, i, s: x.index_copy(1, i, s), (r(2, 4, 5), t([3, 0]), r(2, 2, 5))),
            "cache": (
                lambda x, i, s: x.index_copy(2, i, s),
                (r(1, 2, 9, 4), t([5]), r(1, 2, 1, 4)),
            ),
            "fill": (lambda x, i: x.index_fill(1, i, 7.0), (r(2, 4, 5), t([3, 0]))),
            "max": (
                lambda x, i, s: x.index_reduce(0, i, s, "amax"),
                (r(4, 5), t([0, 2, 2]), r(3, 5)),
            ),
            "slice": (
                lambda x, s: (x.slice_scatter(s, 1, 1, 7, 2), x.slice_scatter(s, -1, -3)),
                (r(3, 8), r(3, 3)),
            ),
            "select": (
                lambda x, s: (x.select_scatter(s, 1, 2), x.select_scatter(s, -2, -1)),
                (r(3, 4, 5), r(3, 5)),
            ),
            "diagonals": (
                lambda x: (x.diagonal(), x.diagonal(1), x.diagonal(-2), torch.diag_embed(x, 1)),
                (r(4, 6),),
            ),
            "diagonal": (
                lambda x, s: x.diagonal_scatter(s, 1, 2, 0),
                (r(4, 3, 6), r(3, 3)),
            ),
            "fill_diagonal": (lambda x: x.clone().fill_diagonal_(3.0), (r(4, 6),)),
        }
    )


def test_index_put(converted: Check) -> None:
    torch.manual_seed(0)
    r, t, put = torch.randn, torch.tensor, torch.ops.aten.index_put
    i, j = t([0, -1, 1]), t([2, 0, 2])
    converted(
        {
            "rows": (_written(lambda y, i, v: y.__setitem__(i, v)), (r(4, 5), i, r(3, 5))),
            "one": (_written(lambda y, i, v: y.__setitem__(i, v)), (r(4, 5), i, r(5))),
            "columns": (
                _written(lambda y, i, v: y.__setitem__((slice(None), i), v)),
                (r(4, 5, 3), i, r(4, 3, 3)),
            ),
            "pairs": (_written(lambda y, i, j, v: y.__setitem__((i, j), v)), (r(4, 5), i, j, r(3))),
            "wide": (
                _written(lambda y, i, j, v: y.__setitem__((i[:, None], j[:2]), v)),
                (r(4, 5), i, j, r(3, 2)),
            ),
            "apart": (
                _written(lambda y, i, j, v: y.__setitem__((i, slice(None), j), v)),
                (r(4, 5, 3), i, j, r(3, 5)),
            ),
            "add": (lambda x, i, v: put(x, [i], v, True), (r(4, 5), t([0, 3, 0]), r(3, 5))),
            "add_none": (lambda x, i, v: put(x, [None, i], v, True), (r(4, 5), i, r(4, 3))),
            "twice": (lambda x, i, v: put(x, [i], v), (r(9, 2), t([1, 4, 1]), r(3, 2))),
            "whole": (
                _written(lambda y, i, v: y.__setitem__(i, v)),
                (torch.arange(8), t([1, 7]), t([-3, 9])),
            ),
        }
    )


def test_masks(converted: Check) -> None:
    torch.manual_seed(0)
    r = torch.randn
    mask = torch.rand(3, 5) > 0.5
    set_ = _written(lambda y, m, v=0.0: y.__setitem__(m, v))
    columns = _written(lambda y, m: y.__setitem__((slice(None), m), -1.0))
    names = converted(
        {
            "scalar": (set_, (r(3, 5), mask)),
            "own": (_written(lambda y: y.__setitem__(y < -0.1, -1.0)), (r(3, 5),)),
            "tensor": (_written(lambda y, m: y.__setitem__(m, y.mean())), (r(3, 5), mask)),
            "rows": (set_, (r(3, 5), mask[:, 0])),
            "row": (set_, (r(3, 5), mask[:, 0], r(5))),
            "columns": (columns, (r(3, 5, 2), mask[0])),
            "last": (columns, (r(2, 3, 5), mask)),
            "beside": (_written(lambda y, m: y.__setitem__((m, 0), -1.0)), (r(3, 5), mask[:, 0])),
            "each": (set_, (r(3, 2), torch.tensor([True, False, True]), r(2, 2))),
            "doubled": (_written(lambda y, m: y.__setitem__(m, y[m] * 2 + 1)), (r(3, 5), mask)),
            "source": (
                lambda x, m, s: x.masked_scatter(m[..., None], s),
                (r(1, 6, 4), (torch.arange(6) % 2 == 0)[None], r(3, 4)),
            ),
        }
    )
    assert "SCATTER_ND" not in names
