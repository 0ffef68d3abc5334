"""``tpu2edge capture``, ``reference`` and ``doctor --tpu`` as they are typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu2edge.cli import main
from tpu2edge.cli.printing import print_survey
from tpu2edge.cli.supervise import Outcome
from tpu2edge.runtime_check.reference.tpu import libtpu_version

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(64, 64)
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        return {"y": self.head(torch.relu(self.body(x)))}

def get_model():
    torch.manual_seed(0)
    return Net()

def get_args():
    return (torch.ones(1, 64),)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(SOURCE)
    return tmp_path / "net.py"


def test_a_capture_is_made_and_shown(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ref = tmp_path / "ref"
    assert main(["capture", str(source), "-o", str(ref), "--num-samples", "2"]) == 0
    said = capfd.readouterr().out
    assert "the torch module in float32 on the CPU (f32), 2 samples, synthetic data" in said
    assert "input  x: float32[1x64]" in said
    assert f"next: tpu2edge export MODEL --reference {ref} -o out" in said
    assert main(["reference", "show", str(ref), "--json"]) == 0
    shown = json.loads(capfd.readouterr().out)
    assert shown["samples"] == ["example", "variation-1"]
    assert shown["extra"]["mode"] == "eager"
    assert main(["capture", str(source), "-o", str(ref)]) == 2
    assert "exists" in capfd.readouterr().err
    no = tmp_path / "no"
    assert main(["capture", str(source), "-o", str(no), "--device", "cuda", "-q"]) == 4
    assert "torch sees no device 'cuda' on this machine" in capfd.readouterr().err
    assert not no.exists()


def test_golden_outputs_are_imported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", x=np.ones((4, 64), np.float32))
    np.savez(tmp_path / "y.npz", y=np.ones((4, 8), np.float32))
    files = ["--inputs", str(tmp_path / "x.npz"), "--outputs", str(tmp_path / "y.npz")]
    command = ["reference", "import", *files, "-o", str(tmp_path / "ref")]
    assert main([*command, "--precision", "bf16"]) == 2
    assert "known: f32, f64, bf16-default" in capfd.readouterr().err
    given = ["--precision", "bf16-default", "--batch", "1", "--device-kind", "TPU v5e"]
    assert main([*command, *given]) == 0
    said = capfd.readouterr().out
    assert "golden outputs from elsewhere (bf16-default), 4 samples" in said
    assert "device: TPU v5e" in said
    assert "weights: not known: proved by the numbers alone" in said


def test_a_survey_says_how_each_tpu_computes_the_model(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    if libtpu_version() is None:
        pytest.skip("needs the TPU compiler: pip install 'tpu2edge[tpu]'")
    monkeypatch.setenv("TPU2EDGE_CACHE", str(tmp_path / "cache"))
    command = ["doctor", "--tpu", str(source), "--generation", "v5e", "--generation", "tpu7x"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    # A single row: v5e multiplies in float32 on its vector unit, tpu7x in bfloat16.
    assert [one["matmuls"] for one in found["topologies"]] == [{"f32": 2}, {"bf16": 2}]
    assert found["topologies"][0]["modules"] == {"f32": ["body", "head"]}
    assert found["same_precision"] == [["v5e"], ["tpu7x"]]
    assert main([*command[:3], "--generation", "v9"]) == 2


def test_a_survey_without_the_tpu_compiler_says_how_to_get_it(
    source: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if libtpu_version() is not None:
        pytest.skip("needs an environment without libtpu")
    assert main(["doctor", "--tpu", str(source)]) == 4
    assert "pip install 'tpu2edge[tpu]'" in capfd.readouterr().err


def test_options_of_a_survey_alone_are_wrong_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--generation", "v5e"]) == 2
    assert "go with --tpu MODEL" in capfd.readouterr().err


def test_a_survey_is_printed_with_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    common = {"flops": 1.5e9, "memory": {"code": 1000, "arguments": 2000}, "compile_s": 1.0}
    survey = {
        "model": "net.py:get_model",
        "precision": "default",
        "route": "torchax",
        "libtpu": "0.0.52",
        "same_precision": [["v5e"], ["tpu7x"]],
        "topologies": [
            {
                "generation": name,
                "compiles": True,
                "reason": None,
                "matmuls": {mode: 2},
                "modules": {mode: ["body", "head"]},
                **common,
            }
            for name, mode in (("v5e", "f32"), ("tpu7x", "bf16"))
        ]
        + [{"generation": "v4", "compiles": False, "reason": "it does not fit"}],
    }
    outcome = Outcome(result={"survey": survey, "exit_code": 3}, notes=(), stages=(), seconds=1.0)
    print_survey(outcome, as_json=False)
    said = capsys.readouterr().out
    assert "v4: it does not fit" in said
    assert "f32 on v5e: body, head" in said
    assert "not the same precision: v5e | tpu7x" in said
