"""Pools with ragged ends, other divisors, uneven sizes, dilation and indices."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tpu2edge.errors import LoweringError


def test_averages_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    line, plane, room = torch.randn(2, 6, 17), torch.randn(2, 6, 11, 13), torch.randn(1, 6, 7, 8, 9)
    check(
        {
            "line": (nn.AvgPool1d(3, 2, 1, True, False), line),
            "line_excluded": (nn.AvgPool1d(3, 2, 1, count_include_pad=False), line),
            "ceil": (nn.AvgPool2d(3, 2, 1, True), plane),
            "ceil_without_effect": (nn.AvgPool2d(2, 3, 1, True), plane),
            "excluded": (nn.AvgPool2d(3, 2, 1, False, False), plane),
            "divisor": (nn.AvgPool2d((2, 3), 2, (1, 0), True, False, 7), plane),
            "unbatched": (nn.AvgPool2d(2), plane[0]),
            "room": (nn.AvgPool3d(3, 2, 1, True, False), room),
            "room_divisor": (nn.AvgPool3d(3, 2, 1, divisor_override=4), room),
            "adaptive1": (nn.AdaptiveAvgPool1d(5), line),
            "adaptive2": (nn.AdaptiveAvgPool2d((15, 4)), plane),
            "adaptive3": (nn.AdaptiveAvgPool3d((3, 5, 2)), room),
            "adaptive3_even": (nn.AdaptiveAvgPool3d((7, 4, 3)), room),
            "lp": (nn.LPPool2d(3, (2, 3), 2, True), plane.abs()),
        }
    )


def test_maxima_and_their_indices_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    line, plane, room = torch.randn(2, 6, 17), torch.randn(2, 6, 11, 13), torch.randn(1, 6, 7, 8, 9)
    check(
        {
            "dilated": (nn.MaxPool2d((2, 3), (3, 2), (0, 1), (2, 1), ceil_mode=True), plane),
            "line_dilated": (nn.MaxPool1d(3, 2, 1, 2), line),
            "room": (nn.MaxPool3d(3, 2, 1, ceil_mode=True), room),
            "indices": (nn.MaxPool2d(3, 2, 1, return_indices=True), plane),
            "indices_below_zero": (nn.MaxPool2d(3, 2, 1, return_indices=True), -plane.abs()),
            "line_indices": (nn.MaxPool1d(3, 2, 1, return_indices=True), line),
            "room_indices": (nn.MaxPool3d(2, return_indices=True), room),
            "adaptive1": (nn.AdaptiveMaxPool1d(5), line),
            "adaptive2": (nn.AdaptiveMaxPool2d((15, 4)), plane),
            "adaptive3": (nn.AdaptiveMaxPool3d((3, 5, 2)), room),
            "adaptive_indices": (nn.AdaptiveMaxPool2d((3, 5), return_indices=True), plane),
        }
    )


def test_random_windows_are_refused(convert_one: Callable[..., None]) -> None:
    with pytest.raises(LoweringError, match="at random") as caught:
        convert_one(nn.FractionalMaxPool2d(3, output_size=(5, 6)), torch.randn(1, 2, 11, 13))
    assert caught.value.place is not None
