"""A bundle made without torch: ready files, with samples, outputs and budgets."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu2edge.bundle import write_manifest
from tpu2edge.files import canonical_json, sha256_of
from tpu2edge.runtime_check.budget import Budget, default_budget
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.parity import ParityReport
from tpu2edge.runtime_check.reference import ReferenceWriter
from tpu2edge.types import Sample

WEIGHT = np.random.default_rng(0).standard_normal((3, 3)).astype("float32")
SHIFT = np.random.default_rng(1).standard_normal((3, 3)).astype("float32")
SAMPLES = np.random.default_rng(2).standard_normal((3, 3, 3)).astype("float32")


def write_bundle(folder: Path, models: dict[str, Path], budgets: dict[str, Budget]) -> Path:
    """A bundle of ready files of ``affine_graph``, held to x * WEIGHT and x + SHIFT."""
    folder.mkdir()
    entries = []
    for recipe, path in models.items():
        file = folder / f"model.{recipe}.tflite"
        shutil.copy(path, file)
        with Session(file) as session:
            (signature,) = session.signatures
        entries.append(
            {
                "file": file.name,
                "recipe": recipe,
                "sha256": sha256_of(file),
                "size_bytes": file.stat().st_size,
                "signatures": [signature.to_json()],
                "budget": budgets[recipe].to_json(),
            }
        )
    head = {"provider": "eager", "precision": "f32", "data": {"kind": "given"}}
    with ReferenceWriter(folder / "reference", signature, **head) as writer:
        for index, x in enumerate(SAMPLES):
            outputs = {"scaled": x * WEIGHT, "shifted": x + SHIFT}
            writer.add(Sample(id=f"s{index}", inputs={"x": x}), outputs)
    report = ParityReport(cases=(), reference="eager", data_kind="given", samples=3)
    (folder / "parity.json").write_text(canonical_json(report.to_json(times=False)))
    manifest = {"models": entries, "notes": [], "signature": signature.to_json()}
    write_manifest(folder, manifest)
    return folder


@pytest.fixture
def affine_bundle(make_affine: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A bundle of two files: the right one, and one whose weights may be other ones."""

    def make(second: Any = WEIGHT) -> Path:
        models = {"float32": make_affine(WEIGHT, SHIFT), "float16": make_affine(second, SHIFT)}
        budgets = {name: default_budget("float32") for name in models}
        return write_bundle(tmp_path / "out", models, budgets)

    return make
