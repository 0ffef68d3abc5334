"""Sliding windows and their inverse, mirrored and repeated axes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional


def test_windows_are_right(check: Callable[..., None]) -> None:
    torch.manual_seed(0)
    plane, room = torch.randn(2, 3, 6, 7), torch.randn(2, 3, 4, 5, 6)
    six = torch.randn(2, 3, 2, 4, 3, 2)
    fold = functional.fold
    check(
        {
            "last": (lambda x: x.unfold(-1, 3, 2), plane),
            "twice": (lambda x: x.unfold(2, 3, 2).unfold(3, 2, 2), plane),
            "thrice": (lambda x: x.unfold(2, 2, 1).unfold(3, 2, 2).unfold(4, 3, 3), room),
            "frames": (lambda x: x.unfold(1, 12, 5), torch.randn(2, 64)),
            "overlapping_frames": (lambda x: x.unfold(1, 16, 4), torch.randn(2, 64)),
            "integers": (lambda x: x.unfold(0, 3, 2), torch.arange(9)),
            "im2col": (lambda x: functional.unfold(x, (2, 3), (1, 2), (0, 1), (2, 1)), plane),
            "fold": (lambda x: fold(x, (6, 8), 3, padding=1, stride=2), torch.randn(2, 18, 12)),
            "fold_dilated": (
                lambda x: fold(x, (7, 8), (2, 3), (2, 1), (0, 1), (1, 2)),
                torch.randn(2, 18, 20),
            ),
            "fold_unbatched": (lambda x: fold(x, (6, 8), 2, stride=2), torch.randn(12, 12)),
            "flip": (lambda x: x.flip(1, 3, 5), six),
            "repeat": (lambda x: x.repeat(1, 2, 1, 1, 2, 1), six),
        }
    )
