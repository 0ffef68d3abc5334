"""The tables of what XNNPACK takes, held to what the runtime does with one operator at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tpu2edge.delegates import left_by_xnnpack, note_of_xnnpack
from tpu2edge.export.lower import Lowered, Loweree, lower_programs
from tpu2edge.export.program import trace_module
from tpu2edge.flatbuffer import read_tflite

ROOT = Path(__file__).parents[2]


class Mixed(nn.Module):
    """Operators that XNNPACK takes, and operators and operands that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.linear = nn.Linear(6, 6)
        self.conv = nn.Conv2d(3, 4, 3)
        self.up = nn.ConvTranspose2d(4, 3, 2, stride=2)
        self.prelu = nn.PReLU(4)

    def forward(self, ids: torch.Tensor, image: torch.Tensor) -> tuple[torch.Tensor, ...]:
        words = self.linear(self.embed(ids))
        maps = self.prelu(self.conv(image))
        small = F.avg_pool2d(F.elu(maps), 2) + F.leaky_relu(F.max_pool2d(maps, 2))
        large = F.interpolate(self.up(small), scale_factor=2.0, mode="bilinear")
        scores = torch.softmax(words @ words.transpose(1, 2), -1)
        seven = image.reshape(1, 3, 2, 4, 2, 2, 2).permute(6, 0, 1, 2, 5, 4, 3)
        steps = words[:, ::2].cumsum(1).clamp(0, 1) ** 2.5
        pieces = torch.cat([words, words * 2, words * 3, words - 1, words + 4, words / 3], -1)
        two = torch.cat([words.exp(), words.abs().sqrt().log()], -1)
        chosen = torch.where(words > 0, words, words.amax(-1, keepdim=True))
        rest = F.gelu(words) + torch.tanh(words) * torch.sin(words).round() + F.hardswish(words)
        summed = rest.mean(1) + rest.sum(1) - F.pad(rest, (1, 1))[:, 0, 1:7].sigmoid()
        weighted = F.linear(words, scores[0].repeat(2, 2))
        counts = ids * 2 + (words > 0).int().sum(2)
        whole = scores, large, seven, steps, pieces, two, chosen, summed, weighted, counts
        return tuple(value + 0 for value in whole)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Lowered:
    torch.manual_seed(0)
    traced = trace_module(
        Mixed().eval(), (torch.tensor([[1, 2, 6], [0, 3, 4]]), torch.randn(1, 3, 8, 8))
    )
    path = tmp_path_factory.mktemp("mixed") / "m.tflite"
    return lower_programs([Loweree(traced.program, traced.signature)], path)


def test_the_tables_say_what_the_delegate_does(mixed: Lowered) -> None:
    files = [mixed.path, *sorted((ROOT / "tests" / "data").glob("*.tflite"))]
    script = ROOT / "benchmarks" / "xnnpack_coverage.py"
    done = subprocess.run(
        [sys.executable, str(script), "--made-up", *map(str, files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row for row in rows if row["taken"] != row["table"]] == []
    taken = {row["op"] for row in rows if row["taken"]}
    assert {"CONV_2D", "LEAKY_RELU", "TRANSPOSE_CONV", "RESIZE_BILINEAR"} <= taken
    assert {"ELU", "PRELU", "SQUARE", "DEPTH_TO_SPACE", "SPACE_TO_DEPTH", "SPLIT"} <= taken
    assert {"GELU", "FULLY_CONNECTED", "CONCATENATION", "BATCH_MATMUL", "REDUCE_MAX"} <= taken
    left = {row["op"] for row in rows if not row["taken"]}
    assert {"CONCATENATION", "RESHAPE", "CUMSUM", "POW", "STRIDED_SLICE", "SPLIT"} <= left


def test_the_note_counts_what_is_left_and_names_the_modules(mixed: Lowered) -> None:
    file = read_tflite(mixed.path)
    left = left_by_xnnpack(file)
    (note,) = note_of_xnnpack(mixed.path, mixed.nodes)
    total = sum(len(graph.operators) for graph in file.subgraphs)
    assert note.code == "xnnpack"
    assert note.text.startswith(f"xnnpack: {len(left)} of {total} operators run in LiteRT's own")
    assert "(embed)" in note.text
    assert "1 CONCATENATION 6 parts" in note.text
    assert "1 RESHAPE rank" in note.text


def test_there_is_no_note_when_xnnpack_takes_all(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)).eval()
    traced = trace_module(net, (torch.randn(1, 3, 8, 8),))
    lowered = lower_programs([Loweree(traced.program, traced.signature)], tmp_path / "m.tflite")
    assert note_of_xnnpack(lowered.path, lowered.nodes) == []
