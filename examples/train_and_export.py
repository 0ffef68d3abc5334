"""Exports and checks a model in the middle of its training, and shows how parity moves.

``tpu2edge.export_model`` works on a copy: the module stays in training mode on its device, the
random generators are where they were, and training goes on as if nothing had happened.
``--prove`` trains a second time without exports and compares every loss.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import tpu2edge

sys.path.insert(0, str(Path(__file__).parent / "digits"))
from model import DigitsNet
from train import data

EPOCHS = 6
CHECKPOINTS = (2, 4)  # epochs after which the model is exported

AtCheckpoint = Callable[[nn.Module, int], None]


def train(at_checkpoint: AtCheckpoint | None = None, seed: int = 0) -> list[float]:
    """The loss of every step; ``at_checkpoint`` is called with the module and the epoch."""
    images, _, labels, _ = data()
    torch.manual_seed(seed)
    model = DigitsNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    x, y = torch.from_numpy(images), torch.from_numpy(labels)
    losses: list[float] = []
    for epoch in range(1, EPOCHS + 1):
        order = torch.randperm(len(x))
        for begin in range(0, len(x), 64):
            batch = order[begin : begin + 64]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch])["logits"], y[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
        if at_checkpoint is not None and epoch in CHECKPOINTS:
            at_checkpoint(model, epoch)
    return losses


def export(folder: Path) -> AtCheckpoint:
    """A function that exports the module at an epoch into ``folder`` and prints the parity."""
    _, held_out, _, _ = data()
    samples = [{"image": image[None]} for image in held_out[:64]]
    example = torch.from_numpy(held_out[:1])

    def at_checkpoint(model: nn.Module, epoch: int) -> None:
        bundle = tpu2edge.export_model(
            model,
            example,
            output=folder / f"epoch-{epoch}",
            recipes=("float32", "dynamic_wi8_afp32"),
            samples=samples,
        )
        for case in bundle.report.cases:
            metrics = case.metrics
            assert metrics is not None, case.reasons
            assert metrics.range_error is not None
            print(
                f"  epoch {epoch} {case.recipe:18} {case.output}: worst SQNR "
                f"{metrics.sqnr_db_worst:.1f} dB, error/range {metrics.range_error:.1e}, "
                f"top-1 {metrics.top1:.1%}, {case.verdict}",
                flush=True,
            )
        assert model.training, "export_model leaves the module in training mode"

    return at_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, metavar="DIR", help="keep the bundles here")
    parser.add_argument(
        "--prove", action="store_true", help="train again without exports and compare the losses"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        losses = train(export(args.output or Path(temporary)))
    if args.prove:
        undisturbed = train()
        assert losses == undisturbed, "the exports changed the training"
        print(f"all {len(losses)} losses are equal with and without exports")


if __name__ == "__main__":
    main()
