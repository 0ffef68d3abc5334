"""Trains DigitsNet for a few seconds on the CPU; the same seed gives the same weights."""

from __future__ import annotations

import numpy as np
import torch
from model import DigitsNet
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training images, held-out images (N, 1, 8, 8 in 0..1, float32), and their labels."""
    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    first, held_out, labels, held_out_labels = train_test_split(
        images, digits.target, test_size=0.4, random_state=0, stratify=digits.target
    )
    return first, held_out, labels, held_out_labels


def train(epochs: int = 15, seed: int = 0) -> DigitsNet:
    images, _, labels, _ = data()
    torch.manual_seed(seed)
    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    for _ in range(epochs):
        order = torch.randperm(len(x))
        for begin in range(0, len(x), 64):
            batch = order[begin : begin + 64]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch])["logits"], y[batch]).backward()
            optimizer.step()
    return model


def accuracy(model: nn.Module) -> float:
    _, images, _, labels = data()
    model.eval()
    with torch.no_grad():
        found = model(torch.from_numpy(images))["logits"].argmax(1).numpy()
    return float((found == labels).mean())
