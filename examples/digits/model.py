"""A small CNN for scikit-learn's handwritten digits (8x8 grey images, 10 classes)."""

from __future__ import annotations

import torch
from torch import nn


class DigitsNet(nn.Module):
    """Three convolutions and two linear layers, 42 k weights."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.ReLU(),
        )
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, image: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(self.features(image))}


def get_model() -> nn.Module:
    return DigitsNet()


def get_args() -> tuple[torch.Tensor, ...]:
    return (torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)
