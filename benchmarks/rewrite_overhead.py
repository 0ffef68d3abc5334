"""What the rewrites cost models that need none: the time to lower and convert, with them and without.

    python benchmarks/rewrite_overhead.py [--rounds N]

Both in one process, in turns, by CPU time; the ratio of the least of each, which other work on the
machine disturbs less than a median. The time is that of ``lower_programs`` alone (decompose, lower,
convert, write): tracing, references and the check come on top in a whole export, alike on both sides.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from tpu2edge.export import rewrites
from tpu2edge.export.lower import Loweree, lower_programs
from tpu2edge.export.program import trace_module


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, c = x.shape
        parts = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, c))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


def _convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for width, out in ((3, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 64)):
        layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def models() -> dict[str, tuple[nn.Module, torch.Tensor]]:
    """Nets whose operators all convert by themselves."""
    torch.manual_seed(0)
    dense = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return {
        "12 dense layers": (nn.Sequential(*dense), torch.randn(2, 64)),
        "6 convolutions": (_convolutions(), torch.randn(1, 3, 32, 32)),
        "6 transformer blocks": (
            nn.Sequential(*(_Block(64, 4) for _ in range(6))),
            torch.randn(1, 16, 64),
        ),
    }


def lower(loweree: Loweree, *, with_rewrites: bool) -> float:
    """CPU seconds of one conversion."""
    with tempfile.TemporaryDirectory() as folder:
        table = rewrites.REWRITES if with_rewrites else ()
        with mock.patch.object(rewrites, "REWRITES", table):
            begun = time.process_time()
            lower_programs([loweree], Path(folder) / "m.tflite")
            return time.process_time() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print("| model | without rewrites, CPU s | with, CPU s | ratio |\n|---|---|---|---|")
    for name, (module, example) in models().items():
        traced = trace_module(module.eval(), (example,))
        loweree = Loweree(traced.program, traced.signature)
        lower(loweree, with_rewrites=True)  # imports and caches
        times: dict[bool, list[float]] = {True: [], False: []}
        for index in range(2 * options.rounds):
            with_rewrites = (index + index // 2) % 2 == 0  # a b b a a b b a
            times[with_rewrites].append(lower(loweree, with_rewrites=with_rewrites))
        without, with_them = (min(times[one]) for one in (False, True))
        print(
            f"| {name} | {without:.3f} | {with_them:.3f} | {with_them / without:.3f} |", flush=True
        )


if __name__ == "__main__":
    main()
