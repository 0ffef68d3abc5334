"""Reads by index: plain GATHER, negative and repeated indices, several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Check = Callable[[Any], list[str]]


_PLAIN = {"GATHER", "RESHAPE", "SLICE", "STRIDED_SLICE", "TRANSPOSE"}


def test_constant_indices_are_plain_gathers(converted: Check) -> None:
    x = torch.randn(2, 4, 5)
    perm = torch.tensor([3, 1, 0, 2])
    i = torch.randint(0, 4, (2, 3, 5))
    names = converted(
        {
            "perm": (lambda x: x[:, perm], (x,)),
            "list": (lambda x: (x[:, [0]], x[[-1]], x[..., [-1, 0]]), (x,)),
            "select": (lambda x: x.index_select(2, torch.tensor([1, 2])), (x,)),
            "gather": (lambda x, i: torch.gather(x, 1, i), (x, i)),
            "mask": (lambda x: x[:, torch.tensor([True, False, True, True])], (x,)),
            "mask2": (lambda x: x[0][torch.eye(4, 5) > 0], (x,)),
        }
    )
    assert set(names) <= _PLAIN


def test_reads_at_tensors_of_indices(converted: Check) -> None:
    torch.manual_seed(0)
    r, t = torch.randn, torch.tensor
    i, j = t([0, 2, -1]), t([3, 1, 0])
    converted(
        {
            "negative": (lambda x, i: (x[i], x[:, i]), (r(3, 3, 5), t([-1, 0, -3, 2]))),
            "shaped": (lambda x, i: (x[i], x[:, i]), (r(3, 3, 5), torch.randint(0, 3, (2, 3)))),
            "two": (lambda x, i, j: (x[i, j], x[:, i, j]), (r(3, 4, 5), i, t([2, -3, 0]))),
            "apart": (lambda x, i, j: x[i, :, j], (r(3, 4, 5), i, j)),
            "wide": (lambda x, i, j: x[i[:, None], j], (r(3, 4, 5), t([0, 2]), j)),
            "number": (lambda x, i: (x[i], x[:, i]), (r(3, 4, 5), t(-2))),
            "gather": (
                lambda x, i: (torch.gather(x, 1, i), torch.gather(x, -2, i)),
                (r(4, 5, 6), torch.randint(0, 5, (2, 3, 4))),
            ),
            "first": (lambda x, i: torch.gather(x, 0, i), (r(4, 3), torch.randint(0, 4, (2, 3)))),
            "tokens": (
                lambda x, i: torch.gather(x, 1, i[:, :, None].expand(-1, -1, 5)),
                (r(2, 7, 5), torch.randint(0, 7, (2, 3))),
            ),
            "whole": (lambda x, i: x.gather(1, i), (t([[1, 2], [3, 4]]), t([[1, 0], [1, 1]]))),
            "bool": (lambda x, i: x.gather(0, i), (r(5) > 0, t([4, 0, 2]))),
            "take": (lambda x, i: torch.take(x, i), (r(4, 6), t([0, 23, -1]))),
            "along": (lambda x, i: torch.take_along_dim(x, i, 1), (r(4, 6), i.expand(4, 3) % 6)),
            "triangle": (lambda x: x[tuple(torch.tril_indices(4, 4, -1))], (r(4, 4),)),
        }
    )


def test_the_identity_matrix_is_a_constant(converted: Check) -> None:
    x = torch.randn(6, 4, 4)
    names = converted(
        {
            "eye": (lambda x: x * torch.eye(4), (x,)),
            "integers": (lambda x: x * torch.eye(4, 4, dtype=torch.int32), (x,)),
            "booleans": (lambda x: torch.where(torch.eye(4, dtype=torch.bool), x, 0.0), (x,)),
            "wide": (lambda x: x[:, :3] @ torch.eye(3, 4).T, (x,)),
            "large": (lambda x: x.reshape(1, 96) @ torch.eye(96, 300), (x,)),
            "alone": (lambda x: (x, torch.eye(3)), (x,)),
        }
    )
    assert "STABLEHLO_IOTA" not in names
    assert "EQUAL" not in names
