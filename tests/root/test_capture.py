"""Capturing a reference: the same names as an export, nothing changed, refused when it is not ours."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import tpu2edge
from tpu2edge.capturing import capture_source, move_to_device
from tpu2edge.errors import BundleError, DataError, DeviceError, ExportError, OptionError
from tpu2edge.export.prepare import weights_digest
from tpu2edge.export.program import trace_module
from tpu2edge.requests import CaptureRequest
from tpu2edge.types import Dim, Sample

EXAMPLE = (torch.tensor([[1, 2, 3]]), {"gain": torch.ones(1), "bias": torch.zeros(4)})


class Result(NamedTuple):
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, torch.Tensor]


class Net(nn.Module):
    """Nested inputs and outputs, an int64 input, dropout, and a counter that forward turns."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor, opts: dict[str, torch.Tensor], scale: float = 2.0) -> Any:
        assert ids.dtype is torch.int64
        h = self.drop(self.norm(self.table(ids)))
        out = self.head(h) * opts["gain"] + opts["bias"]
        return Result(out * scale, (h, h.argmax(-1)))


class Plain(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.second(torch.tanh(self.first(x)))}


def rows(count: int = 3) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    return [{"x": random.standard_normal((2, 4)).astype(np.float32)} for _ in range(count)]


def test_names_types_and_order_are_those_of_an_export(tmp_path: Path) -> None:
    model = Net().train()
    made = tpu2edge.capture(model, EXAMPLE, output=tmp_path / "ref", num_samples=3)
    expected = trace_module(model, EXAMPLE).signature
    assert made.signature == expected
    assert [spec.name for spec in expected.inputs] == ["ids", "opts.gain", "opts.bias"]
    assert [spec.name for spec in expected.outputs] == ["logits", "hidden.0", "hidden.1"]
    assert made.sample_ids == ("example", "variation-1", "variation-2")
    assert made.data["kind"] == "synthetic"


def test_a_capture_changes_nothing_and_says_where_it_is_from(tmp_path: Path) -> None:
    model = Net().train()
    model.drop.eval()
    before, digest = model.state_dict()["calls"].clone(), weights_digest(model)
    torch.manual_seed(5)
    state, precision = torch.get_rng_state(), torch.get_float32_matmul_precision()
    made = tpu2edge.capture(model, EXAMPLE, output=tmp_path / "ref", precision="highest")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == precision
    assert (model.training, model.norm.training, model.drop.training) == (True, True, False)
    assert torch.equal(model.calls, before)
    assert (made.provider, made.precision, len(made)) == ("eager", "f32", 8)
    assert made.weights_sha256 == digest == weights_digest(model)
    told = made.extra
    assert told["mode"] == "eager"
    assert told["versions"]["torch"] == torch.__version__
    assert len(told["inputs_sha256"]) == len(told["outputs_sha256"]) == 64
    model.eval()
    with torch.no_grad():
        logits = model(*EXAMPLE).logits
    np.testing.assert_array_equal(made.outputs(0)["logits"], logits.numpy())


def test_a_compiled_capture_says_so_and_agrees(tmp_path: Path) -> None:
    model = Plain()
    eager = tpu2edge.capture(model, rows(), output=tmp_path / "eager")
    for name, taken in (("compiled", model), ("was", torch.compile(model))):
        # A module that was compiled by the user is captured as it is asked for: here eager.
        made = tpu2edge.capture(taken, rows(), output=tmp_path / name, compiled=name == "compiled")
        assert made.extra["mode"] == ("compiled" if name == "compiled" else "eager")
        assert made.weights_sha256 == eager.weights_sha256
        for index in range(3):
            np.testing.assert_allclose(
                made.outputs(index)["y"], eager.outputs(index)["y"], atol=1e-6
            )


def test_samples_are_streamed_and_a_size_that_changes_is_a_dimension(tmp_path: Path) -> None:
    seen: list[str] = []

    def stream() -> Iterator[Sample]:
        for size in (2, 5, 3):
            seen.append("drawn")
            yield Sample(id=f"rows-{size}", inputs={"x": torch.ones(size, 4)})

    def progress(stage: str, done: float | None = None, total: float | None = None) -> None:
        seen.append(f"done {done}")

    made = tpu2edge.capture(Plain(), stream(), output=tmp_path / "ref", progress=progress)
    assert seen == ["drawn", "done 0", "done 1", "drawn", "done 2", "drawn", "done 3"]
    (spec,) = made.signature.inputs
    size = spec.shape[0]
    assert isinstance(size, Dim)
    assert (size.min, size.max, spec.shape[1]) == (2, 5, 4)
    assert made.sample_ids == ("rows-2", "rows-5", "rows-3")


def test_a_model_in_half_precision_is_labelled_so(tmp_path: Path) -> None:
    made = tpu2edge.capture(Plain().bfloat16(), rows(), output=tmp_path / "half")
    assert made.precision == "bf16-model"
    assert made.outputs(0)["y"].dtype == np.float32
    assert (
        tpu2edge.capture(
            Plain().double(), (torch.ones(2, 4, dtype=torch.float64),), output=tmp_path / "double"
        ).precision
        == "f64"
    )


@pytest.mark.parametrize(
    ("samples", "error", "words"),
    [
        ([], DataError, "no sample"),
        ([{"z": np.ones((2, 4), np.float32)}], Exception, "do not fit forward"),
        ([*rows(1), {"z": np.ones((2, 4), np.float32)}], DataError, "has the inputs \\['z'\\]"),
        ([*rows(1), {"x": np.ones((2, 4, 1), np.float32)}], DataError, "has the shape"),
        ([{"x": np.ones((2, 5), np.float32)}], ExportError, "fails on a sample"),
        ([torch.ones(2, 4)], DataError, "not inputs by name"),
        ([{"x": np.full((2, 4), 2**40)}], DataError, "do not fit into int32"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_nothing(
    tmp_path: Path, samples: Any, error: type[Exception], words: str
) -> None:
    model = Plain().train()
    with pytest.raises(error, match=words):
        tpu2edge.capture(model, samples, output=tmp_path / "ref")
    assert list(tmp_path.iterdir()) == []
    assert model.training


def test_a_reference_is_replaced_only_by_force_and_other_folders_never(tmp_path: Path) -> None:
    first = tpu2edge.capture(Plain(), rows(1), output=tmp_path / "ref")
    with pytest.raises(BundleError, match="exists"):
        tpu2edge.capture(Plain(), rows(), output=tmp_path / "ref")
    assert len(tpu2edge.Reference.load(first.path)) == 1
    assert len(tpu2edge.capture(Plain(), rows(), output=tmp_path / "ref", force=True)) == 3
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years")
    with pytest.raises(BundleError, match="is no reference"):
        tpu2edge.capture(Plain(), rows(), output=tmp_path / "other", force=True)


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("tpu", DeviceError, "torch_tpu|no device 'tpu'"),
        ("xla", DeviceError, "torch_xla"),
        ("cuda", DeviceError, r"no device 'cuda' on this machine \(here: cpu"),
        ("meta", DeviceError, "no device 'meta'"),
        ("gpu", OptionError, "knows no such device"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    device: str, error: type[Exception], words: str
) -> None:
    if device in ("tpu", "xla") and importlib.util.find_spec(f"torch_{device}") is not None:
        pytest.skip(f"torch_{device} is installed")
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(error, match=words):
        move_to_device(Plain(), device)


def test_the_cpu_is_a_device_too() -> None:
    model = Plain()
    move_to_device(model, "cpu")
    assert model.first.weight.device.type == "cpu"


SOURCE = """
import torch
from torch import nn

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

def get_args():
    return (torch.ones(2, 4),)
"""


def test_a_model_on_the_command_line_is_captured_with_its_files(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    np.savez(tmp_path / "x.npz", input=np.random.default_rng(0).random((3, 2, 4), np.float32))
    request = CaptureRequest(
        source=str(tmp_path / "net.py"),
        output=tmp_path / "ref",
        inputs=(tmp_path / "x.npz",),
        device="cpu",
    )
    assert CaptureRequest.from_json(json.loads(json.dumps(request.to_json()))) == request
    made = capture_source(request)
    assert made.sample_ids == ("x.npz#0", "x.npz#1", "x.npz#2")
    assert made.data["kind"] == "files"
    assert made.extra["source"]["origin"].endswith("net.py:get_model")


def test_a_model_on_a_jax_device_is_captured_and_exported_against(tmp_path: Path) -> None:
    if importlib.util.find_spec("torchax") is None:
        pytest.skip("needs torchax: pip install 'tpu2edge[tpu]'")
    # In a process of its own: importing torchax renames a torch backend for good.
    script = f"""
        import torch, numpy as np, tpu2edge
        from torch import nn
        from tpu2edge.capturing import move_to_device
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        move_to_device(model, "jax")
        model.train()
        for compiled in (False, True):
            made = tpu2edge.capture(
                model, (torch.ones(2, 4),), output={str(tmp_path)!r} + f"/jax-{{compiled}}",
                precision="default", compiled=compiled,
            )
            assert (made.provider, made.precision) == ("torchax", "f32"), made
            assert [s.name for s in made.signature.inputs] == ["input"]
            assert model.training
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    made = tpu2edge.export_model(
        model, torch.ones(2, 4), output=tmp_path / "out", reference=tmp_path / "jax-True"
    )
    assert str(made.verdict) == "PASS"
    assert made.reference().provider == "torchax"
    proof = made.report.case("output_0", recipe="reference", device="the module on this CPU")
    assert proof.metrics is not None
    assert proof.metrics.sqnr_db_worst is not None
    assert proof.metrics.sqnr_db_worst > 110


@pytest.mark.slow
def test_a_model_on_an_xla_device_is_captured(tmp_path: Path) -> None:
    """PyTorch/XLA on its CPU plugin, in an environment of its own: it needs torch 2.9."""
    venv = tmp_path / "venv"
    python = venv / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    wanted = ("torch==2.9.1", "torch_xla==2.9.0", "numpy", "safetensors")
    done = subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", *wanted],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        pytest.skip(f"needs {' and '.join(wanted[:2])}: {last[0]}")
    script = f"""
        import torch, tpu2edge
        from torch import nn
        from tpu2edge.capturing import move_to_device
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).train()
        eager = tpu2edge.capture(model, (torch.ones(2, 4),), output={str(tmp_path)!r} + "/eager")
        move_to_device(model, "xla")
        made = tpu2edge.capture(model, (torch.ones(2, 4),), output={str(tmp_path)!r} + "/xla")
        assert made.provider == "torch_xla", made
        assert made.weights_sha256 == eager.weights_sha256
        for i in range(len(made)):
            a, b = (r.outputs(i)["output_0"].astype("float64") for r in (eager, made))
            assert (a**2).sum() / max(((a - b) ** 2).sum(), 1e-300) > 1e11
        assert model.training
    """
    done = subprocess.run(
        [str(python), "-W", "ignore", "-c", textwrap.dedent(script)],
        env={
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "PYTHONPATH": str(Path(tpu2edge.__file__).parents[1]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
