"""Transposed, grouped and unevenly padded convolutions, in one to three dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

T1, T2, T3 = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


def test_transposed_convolutions_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    line, plane, room = torch.randn(1, 4, 7), torch.randn(2, 4, 5, 7), torch.randn(1, 4, 3, 4, 5)
    check(
        {
            "padding": (T2(4, 6, 3, 2, 1), plane),
            "output_padding": (T2(4, 6, 3, 2, 1, 1), plane),
            "uneven": (T2(4, 6, (3, 5), (1, 2), (0, 2)), plane),
            "stride_above_kernel": (T2(4, 6, 3, 4, 1, 3), plane),
            "groups": (T2(4, 6, 3, 2, 1, groups=2), plane),
            "depthwise": (T2(8, 8, 3, 2, 1, groups=8), torch.randn(1, 8, 5, 6)),
            "dilation": (T2(4, 6, 3, 2, 1, dilation=2), plane),
            "all": (T2(4, 6, 3, 2, 1, 1, dilation=(2, 3), groups=2, bias=False), plane),
            "unbatched": (T2(4, 6, 3, 2, 1), plane[0]),
            "line": (T1(4, 6, 3, 2, 1, 1, groups=2, dilation=2), line),
            "room": (T3(4, 6, 3, 2, 1, 1), room),
            "room_groups": (T3(4, 6, 3, (1, 2, 2), 1, (0, 1, 0), groups=2), room),
        }
    )


def test_grouped_and_evenly_sized_convolutions_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    line, room = torch.randn(2, 6, 17), torch.randn(2, 6, 7, 8, 9)
    check(
        {
            "grouped": (nn.Conv3d(6, 9, 3, 2, 1, 1, 3), room),
            "depthwise": (nn.Conv3d(6, 12, 3, 1, 1, groups=6), room),
            "grouped_dilated": (nn.Conv3d(6, 4, (2, 3, 3), 1, (1, 2, 2), 2, 2, bias=False), room),
            "same_even": (nn.Conv1d(6, 8, 4, padding="same"), line),
            "same_dilated": (nn.Conv1d(6, 8, 4, padding="same", dilation=3), line),
            "same_unbatched": (nn.Conv1d(6, 8, 2, padding="same"), line[0]),
        }
    )
