"""Channels last: the file's layout, its samples, no TRANSPOSE inside, and a report of those left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge.checking import check_target
from tpu2edge.errors import OptionError
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.pipeline import export_source
from tpu2edge.requests import CheckRequest, ExportRequest

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.deep = nn.Conv2d(8, 8, 3, 1, 1, groups=8)
        self.group = nn.GroupNorm(2, 8)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        y = F.silu(self.norm(self.stem(x)))
        y = torch.cat([y, self.group(self.deep(y))], 1)
        y = y * torch.sigmoid(y.mean((2, 3), keepdim=True))
        return {"map": F.interpolate(F.max_pool2d(self.out(y), 2), scale_factor=2, mode="bilinear")}

class Flat(Net):
    def forward(self, x):
        y = super().forward(x)["map"]
        return y, y.flatten(1)

def net():
    torch.manual_seed(0)
    return Net().eval(), (torch.randn(1, 3, 16, 12),)

def flat():
    torch.manual_seed(0)
    return Flat().eval(), (torch.randn(1, 3, 16, 12),)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("layout")
    (folder / "net.py").write_text(MODEL)
    return folder


def export(folder: Path, name: str, source: str, **options: Any) -> tpu2edge.Bundle:
    made = ExportRequest(source=str(folder / source), output=folder / name, **options)
    return export_source(made)


def transposes(bundle: tpu2edge.Bundle) -> int:
    return read_tflite(bundle.model().path).op_histogram.get("TRANSPOSE", 0)


def note(bundle: tpu2edge.Bundle) -> str:
    (text,) = [str(n) for n in bundle.notes if n.code == "transposes"]
    return text


def test_a_pure_conv_net_has_nhwc_inputs_and_outputs_and_no_transpose(folder: Path) -> None:
    bundle = export(
        folder, "pure", "net.py:net", channels_last=("x",), channels_last_output=("map",)
    )
    assert str(bundle.verdict) == "PASS"
    signature = bundle.model().signature()
    assert signature.input("x").shape == (1, 16, 12, 3)
    assert signature.output("map").shape == (1, 8, 6, 4)
    assert transposes(bundle) == 0
    assert "no TRANSPOSE is left" in note(bundle)
    # All references are in the file's layout: the module's own answer on the permuted sample.
    reference = bundle.reference("oracle")
    x = torch.from_numpy(reference.inputs(2)["x"]).permute(0, 3, 1, 2)
    module = _module(folder)
    with torch.no_grad():
        want = module(x)["map"].permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(reference.outputs(2)["map"], want, rtol=0, atol=1e-6)
    assert str(check_target(CheckRequest(target=bundle.path)).verdict) == "PASS"


def _module(folder: Path) -> nn.Module:
    from tpu2edge.export.sources import load_source

    module = load_source(f"{folder}/net.py:net").module
    assert module is not None
    return module


def test_transposes_that_are_needed_are_told_with_their_line(folder: Path) -> None:
    bundle = export(
        folder, "flat", "net.py:flat", channels_last=("x",), channels_last_output=("output_0",)
    )
    assert str(bundle.verdict) == "PASS"
    assert transposes(bundle) == 1  # flatten runs over channels first
    line = next(i for i, text in enumerate(MODEL.splitlines(), 1) if 'mode="bilinear"' in text)
    assert "1 TRANSPOSE left" in note(bundle)
    assert f"net.py:{line}" in note(bundle)


def test_channels_last_goes_with_shapes_dynamic_and_samples_in_the_files_layout(
    folder: Path,
) -> None:
    rng = np.random.default_rng(0)
    np.savez(folder / "nhwc.npz", x=rng.normal(size=(3, 1, 16, 12, 3)).astype(np.float32))
    shaped = export(
        folder,
        "shaped",
        "net.py:net",
        channels_last=("x",),
        shapes=("x=1x16x12x3,2x8x8x3",),
        inputs=(folder / "nhwc.npz",),
    )
    assert str(shaped.verdict) == "PASS"
    assert shaped.signatures == ("serving_default", "serving_default_2x8x8x3")
    assert shaped.model().signature("serving_default").output("map").shape == (1, 4, 8, 6)
    dynamic = export(folder, "dynamic", "net.py:net", channels_last=("x",), dynamic=("x.0=1:4",))
    assert str(dynamic.verdict) == "PASS"
    assert {"smallest-size", "largest-size"} <= set(dynamic.reference().sample_ids)
    np.savez(folder / "nchw.npz", x=rng.normal(size=(1, 3, 16, 12)).astype(np.float32))
    with pytest.raises(tpu2edge.errors.DataError, match=r"channels are first.*\n?.*0, 2, 3, 1"):
        export(
            folder,
            "refused",
            "net.py:net",
            channels_last=("x",),
            inputs=(folder / "nchw.npz",),
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels_last": ("y",)}, "names no input"),
        ({"channels_last_output": ("y",)}, "names no output"),
        ({"channels_last_output": ("output_1",), "source": "net.py:flat"}, "has 2 axes"),
    ],
)
def test_names_that_do_not_fit_are_refused(
    folder: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(OptionError, match=words):
        export(folder, "refused", **{"source": "net.py:net", **options})


def test_plain_exports_have_no_note_on_transposes(folder: Path) -> None:
    bundle = export(folder, "plain", "net.py:net", num_samples=1)
    assert not [n for n in bundle.notes if n.code == "transposes"]
    assert transposes(bundle) <= 2
