"""The bundle: the folder that ships, with every file's sha256 in its manifest.

    manifest.json          schema version, hashes, versions, sources of data, options, notes, times
    model.<recipe>.tflite  one file a recipe
    state.npz              initial values of the state, if the model has any (docs/state.md)
    layers.json            LiteRT tensor -> torch module path, operator and source line
    reference/             the samples and the trusted outputs; reference/oracle: in float64
    reference/<signature>/ the same for each further signature of the files, if there are any
    parity.json            every comparison, with its verdict
    log.txt                what third-party libraries printed

A corrupted ``.tflite`` can run and give other numbers without a word, so the hashes are checked
before anything of a bundle is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import BundleError
from tpu2edge.files import canonical_json, sha256_of, write_atomically
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.types import (
    BASE_RECIPE,
    EdgeModel,
    LayerSource,
    Note,
    Signature,
    Verdict,
    is_base,
)

if TYPE_CHECKING:
    from tpu2edge.runtime_check.parity import ParityReport
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["FORMAT_VERSION", "Bundle", "load_bundle"]

# 1 (2026-11-30): first version.
FORMAT_VERSION = 1

_NOT_HASHED = ("manifest.json", "log.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    """A verified bundle. ``verdict`` is that of the parity report made with it."""

    path: Path
    manifest: Mapping[str, Any]
    models: tuple[EdgeModel, ...]
    report: ParityReport
    notes: tuple[Note, ...]

    @property
    def verdict(self) -> Verdict:
        """PASS, FAIL or ERROR over all models, outputs and devices."""
        return self.report.verdict

    def model(self, recipe: str = BASE_RECIPE) -> EdgeModel:
        """The model of one recipe; by default the float file, or that of a model that came quantized.

        Raises:
            BundleError: the bundle has no such recipe; the message lists those it has.
        """
        for model in self.models:
            if model.recipe == recipe or (recipe == BASE_RECIPE and is_base(model.recipe)):
                return model
        raise BundleError(
            f"the bundle has no recipe '{recipe}'", do=f"it has {[m.recipe for m in self.models]}"
        )

    @property
    def signatures(self) -> tuple[str, ...]:
        """The names of the signatures that the files have, the main one first."""
        return tuple(entry["signature"]["name"] for entry in self._entries)

    @property
    def _entries(self) -> list[Mapping[str, Any]]:
        main = {
            "signature": self.manifest["signature"],
            "reference": "reference",
            "constant_outputs": self.manifest.get("constant_outputs", []),
        }
        return self.manifest.get("signatures") or [main]

    def _entry(self, signature: str | None) -> Mapping[str, Any]:
        if signature is None:
            return self._entries[0]
        for entry in self._entries:
            if entry["signature"]["name"] == signature:
                return entry
        raise BundleError(
            f"the bundle has no signature '{signature}'", do=f"it has {list(self.signatures)}"
        )

    def reference(self, name: str = "", *, signature: str | None = None) -> Reference:
        """The reference of a signature (the main one), or the one beside it, ``name="oracle"``.

        Raises:
            BundleError: the bundle has no such signature; the message lists those it has.
        """
        from tpu2edge.runtime_check.reference import Reference

        return Reference.load(self.path / self._entry(signature)["reference"] / name, verify=False)

    def constant_outputs(self, signature: str | None = None) -> frozenset[str]:
        """Outputs of a signature (the main one) that do not depend on any input."""
        return frozenset(self._entry(signature)["constant_outputs"])


def load_bundle(path: Path | str, *, verify: bool = True) -> Bundle:
    """The bundle in the folder ``path``, every file's sha256 checked.

    Raises:
        BundleError: no bundle, a newer format, a missing or a changed file (all are listed).
    """
    folder = Path(path)
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError as err:
        raise BundleError(
            f"'{folder}' is no bundle: it has no manifest.json",
            do="give a folder made by `tpu2edge export`",
        ) from err
    except (OSError, ValueError) as err:
        raise BundleError(
            f"'{folder}' is damaged: manifest.json: {err}", do="export again"
        ) from err
    if not isinstance(manifest, dict) or manifest.get("kind") != "tpu2edge-bundle":
        raise BundleError(f"'{folder}' is no bundle", do="give a folder made by `tpu2edge export`")
    version = manifest.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise BundleError(
            f"'{folder}' has bundle format {version}, this tpu2edge reads up to {FORMAT_VERSION}",
            do="upgrade tpu2edge",
        )
    try:
        if not isinstance(version, int):
            raise ValueError(f"format_version is {version!r}")
        return _bundle_from_manifest(folder, manifest, verify)
    except (KeyError, TypeError, ValueError, OSError) as err:
        raise BundleError(
            f"'{folder}' is damaged: {type(err).__name__}: {err}",
            do="copy it again, or export again",
        ) from err


def _bundle_from_manifest(folder: Path, manifest: dict[str, Any], verify: bool) -> Bundle:
    from tpu2edge.runtime_check.parity import ParityReport

    if verify:
        _verify(
            folder, {**manifest["files"], **{m["file"]: m["sha256"] for m in manifest["models"]}}
        )
    layers = _layers(folder / "layers.json")
    report = json.loads((folder / "parity.json").read_text())
    report["times"] = manifest.get("times", {}).get("devices", {})
    return Bundle(
        path=folder,
        manifest=manifest,
        models=tuple(
            EdgeModel(
                path=folder / entry["file"],
                signatures=tuple(Signature.from_json(s) for s in entry["signatures"]),
                recipe=entry["recipe"],
                sha256=entry["sha256"],
                size_bytes=entry["size_bytes"],
                layers=layers,
            )
            for entry in manifest["models"]
        ),
        report=ParityReport.from_json(report),
        notes=tuple(Note(**note) for note in manifest["notes"]),
    )


def _verify(folder: Path, files: Mapping[str, str]) -> None:
    wrong: list[str] = []
    for name, digest in files.items():
        file = folder / name
        if not file.is_file():
            wrong.append(f"{name} is missing")
        elif sha256_of(file) != digest:
            wrong.append(f"{name} was changed")
    if wrong:
        raise BundleError(
            f"bundle '{folder}' is damaged: {'; '.join(wrong)}",
            do="copy it again, or export again; a damaged .tflite can run and give wrong numbers",
        )


def _layers(file: Path) -> dict[str, tuple[LayerSource, ...]]:
    if not file.is_file():
        return {}
    return {
        tensor: tuple(LayerSource(**source) for source in sources)
        for tensor, sources in json.loads(file.read_text()).items()
    }


# --------------------------------------------------------------------------------------- writing


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write ``manifest.json`` last, with the sha256 of every other file."""
    files = {
        str(file.relative_to(folder)): sha256_of(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and str(file.relative_to(folder)) not in _NOT_HASHED
    }
    data = {
        "kind": "tpu2edge-bundle",
        "format_version": FORMAT_VERSION,
        **content,
        "files": files,
    }
    write_atomically(folder / "manifest.json", canonical_json(data))


_SEGMENT = re.compile(r"(?P<module>[^;/]*)/(?P<node>\w+)")


def layers_of_tensors(
    tensors: list[str], nodes: Mapping[str, LayerSource]
) -> dict[str, list[dict[str, Any]]]:
    """LiteRT tensor name -> places in the torch model, from the node names that it contains."""
    result: dict[str, list[dict[str, Any]]] = {}
    for tensor in tensors:
        found: dict[LayerSource, None] = {}
        for match in _SEGMENT.finditer(tensor):
            source = nodes.get(match["node"])
            if source is not None:
                found[source] = None
        if found:
            result[tensor] = [source.to_json() for source in found]
    return result


def modules_of_tensors(file: Path, nodes: Mapping[str, LayerSource]) -> dict[str, tuple[str, ...]]:
    """LiteRT tensor name -> torch module paths, for every tensor that an operator of ``file`` makes.

    Where the file does not come from a torch program, a tensor's own name stands for a module's.
    """
    read = read_tflite(file)
    made = [
        graph.tensors[index].name
        for graph in read.subgraphs
        for operator in graph.operators
        for index in operator.outputs
    ]
    if not nodes:
        return {name: (name,) for name in made}
    return {
        tensor: tuple(dict.fromkeys(source["module"] for source in sources if source["module"]))
        for tensor, sources in layers_of_tensors(made, nodes).items()
    }
