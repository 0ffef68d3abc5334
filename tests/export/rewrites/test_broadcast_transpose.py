"""Transposes after broadcasts: the order of the numbers, not only the shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Check = Callable[[Any], list[str]]


def _repeat_kv(k: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = k.shape
    return k[:, :, None].expand(b, h, n, s, d).reshape(b, h * n, s, d)


def test_every_way_from_a_broadcast_to_a_transpose(converted: Check) -> None:
    torch.manual_seed(0)
    r = torch.randn
    converted(
        {
            "kv": (lambda k: _repeat_kv(k, 3).transpose(-1, -2), (r(2, 1, 4, 3),)),
            "kv2": (lambda k: _repeat_kv(k, 2).transpose(-1, -2), (r(1, 2, 4, 3),)),
            "expand": (lambda k: k.expand(1, 2, 3, 2).mT, (r(1, 1, 3, 2),)),
            "permute": (lambda k: k.expand(4, 3, 2).permute(2, 1, 0), (r(1, 3, 2),)),
            "repeat": (lambda k: k.repeat(1, 2, 1, 1).mT, (r(1, 1, 3, 2),)),
            "interleave": (lambda k: k.repeat_interleave(3, 1).mT, (r(1, 1, 3, 2),)),
            "ones": (lambda k: (k * torch.ones(1, 2, 1, 1)).mT, (r(1, 1, 3, 2),)),
            "sums": (lambda a, b: (a + b).permute(2, 0, 1), (r(3, 1, 4), r(1, 5, 1))),
            "new": (lambda k: k.expand(3, 4, 5).transpose(0, 2), (r(4, 5),)),
            "chain": (
                lambda k: torch.relu(k.expand(2, 3, 4, 5)).reshape(2, 12, 5).mT,
                (r(2, 3, 1, 5),),
            ),
            "joined": (
                lambda k: torch.cat([k.expand(2, 3, 4), k.expand(2, 3, 4) * 2], 1).permute(2, 0, 1),
                (r(2, 1, 4),),
            ),
            "many": (
                lambda k: k.expand(2, 3, 2, 3, 2, 2).permute(0, 2, 1, 3, 5, 4),
                (r(2, 1, 2, 3, 1, 2),),
            ),
            "whole": (
                lambda k: k.expand(2, 3, 4).permute(2, 0, 1),
                (torch.arange(8, dtype=torch.int32).reshape(2, 1, 4),),
            ),
        }
    )


def test_attention_with_fewer_key_heads(converted: Check) -> None:
    torch.manual_seed(0)
    r, attend = torch.randn, F.scaled_dot_product_attention
    q, k, v = r(2, 4, 5, 8), r(2, 1, 5, 8), r(2, 1, 5, 8)
    converted(
        {
            "repeated": (
                lambda q, k, v: attend(q, _repeat_kv(k, 4), _repeat_kv(v, 4), is_causal=True),
                (q, k, v),
            ),
            "one": (lambda q, k, v: attend(q, k, v, enable_gqa=True), (q, k, v)),
            "two": (
                lambda q, k, v: attend(q, k, v, enable_gqa=True),
                (q, r(2, 2, 5, 8), r(2, 2, 5, 8)),
            ),
            "einsum": (
                lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k.expand(2, 4, 5, 8)),
                (q, k),
            ),
            "plain": (lambda q, k: q @ k.expand(2, 4, 5, 8).mT, (q, k)),
        }
    )
