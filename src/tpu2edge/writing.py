"""What a job writes into its bundle: report, layers, state, recipes, and the manifest last."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge.files import canonical_json, write_atomically
from tpu2edge.flatbuffer import read_tflite

if TYPE_CHECKING:
    from tpu2edge.family import Made, Part
    from tpu2edge.runtime_check.parity import ParityReport

__all__ = ["layers_in", "write_contents"]

_PACKAGES = (
    "tpu2edge",
    "torch",
    "litert-torch",
    "litert-converter",
    "ai-edge-litert",
    "ai-edge-quantizer",
    "jax",
    "numpy",
)


def layers_in(files: Sequence[Path], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """For the tensors of these files the places in the torch model that they were made at."""
    layers: dict[str, Any] = {}
    for file in files:
        tensors = [t.name for graph in read_tflite(file).subgraphs for t in graph.tensors]
        layers.update(bundles.layers_of_tensors(tensors, nodes))
    return layers


def write_contents(
    folder: Path,
    *,
    parts: Sequence[Part],
    report: ParityReport,
    made: Sequence[Made],
    layers: Mapping[str, Any],
    content: Mapping[str, Any],
    stages_s: Mapping[str, float],
    started: float,
) -> None:
    """Write all of a bundle but its files and references, which are in ``folder`` already.

    ``content`` is what else the manifest says; ``stages_s`` the seconds that each stage took,
    ``started`` the time of day, in seconds since 1970.
    """
    write_atomically(folder / "parity.json", canonical_json(report.to_json(times=False)))
    write_atomically(folder / "layers.json", canonical_json(layers))
    _write_state(folder / "state.npz", parts)
    bundles.write_manifest(
        folder,
        {
            **content,
            "verdict": str(report.verdict),
            "signature": parts[0].signature.to_json(),
            "constant_outputs": sorted(parts[0].constant_outputs),
            "signatures": [
                {
                    "signature": part.signature.to_json(),
                    "reference": part.where,
                    "constant_outputs": sorted(part.constant_outputs),
                    "state": dict(part.state),
                }
                for part in parts
            ],
            "models": [
                {
                    "recipe": one.model.recipe,
                    "file": one.model.path.name,
                    "sha256": one.model.sha256,
                    "size_bytes": one.model.size_bytes,
                    "signatures": [s.to_json() for s in one.model.signatures],
                    "budget": one.budget.to_json(),
                    **one.about,
                }
                for one in made
            ],
            "versions": _versions(),
            "times": {
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
                "stages_s": dict(stages_s),
                "devices": dict(report.times),
            },
        },
    )


def _write_state(file: Path, parts: Sequence[Part]) -> None:
    """The values that an app starts from; signatures that share a buffer share its value."""
    import numpy as np

    values: dict[str, Any] = {name: v for part in parts for name, v in part.initial.items()}
    if values:
        np.savez(file, **values)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
