"""What jobs that make a bundle have in common: notes, and what is written around the files.

Report, layers and state come first, the manifest last; then the bundle is read back.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge.bundle import Bundle, load_bundle
from tpu2edge.files import canonical_json, write_atomically
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.logs import Stages
from tpu2edge.types import Note, NoteSink

if TYPE_CHECKING:
    from tpu2edge.family import FamilyOptions, Made, Part
    from tpu2edge.runtime_check.parity import ParityReport

__all__ = ["BundleJob", "layers_in"]

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


@dataclass(kw_only=True, slots=True)
class BundleJob:
    """A job that makes a bundle: what it was asked for, and what every such job does at its end."""

    output: Path
    family: FamilyOptions
    seed: int
    force: bool
    progress: Stages
    on_note: NoteSink | None
    log_path: Path | None = None
    notes: list[Note] = field(default_factory=list)

    def say(self, notes: Sequence[Note]) -> None:
        """Tell each note once, and keep it for the manifest."""
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                if self.on_note is not None:
                    self.on_note(note)

    def write(
        self,
        folder: Path,
        *,
        parts: Sequence[Part],
        report: ParityReport,
        made: Sequence[Made],
        layers: Mapping[str, Any],
        content: Mapping[str, Any],
        started: float,
        log: IO[bytes],
    ) -> None:
        """Write all of the bundle but its files and references, which are in ``folder`` already.

        ``content`` is what else the manifest says, ``started`` the time of day in seconds since 1970.
        """
        self.progress.end()
        _write_contents(
            folder,
            parts=parts,
            report=report,
            made=made,
            layers=layers,
            content={
                **content,
                "notes": [{"code": note.code, "text": note.text} for note in self.notes],
                "seed": self.seed,
                "threads": self.family.threads,
                "devices": [device.name for device in self.family.devices],
            },
            stages_s=self.progress.seconds,
            started=started,
        )
        if self.log_path is not None:
            log.flush()
            shutil.copyfile(self.log_path, folder / "log.txt")

    def verified(self) -> Bundle:
        """The bundle, read back and checked."""
        self.progress("verify bundle")
        bundle = load_bundle(self.output)
        self.progress.end()
        return bundle


def layers_in(files: Sequence[Path], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """For the tensors of these files the places in the torch model that they were made at."""
    layers: dict[str, Any] = {}
    for file in files:
        tensors = [t.name for graph in read_tflite(file).subgraphs for t in graph.tensors]
        layers.update(bundles.layers_of_tensors(tensors, nodes))
    return layers


def _write_contents(
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
