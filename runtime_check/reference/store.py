"""A Reference on disk: ``manifest.json`` and ``samples-*.safetensors``, never the model.

Each sample's tensors are stored under ``<index>/input/<name>`` and ``<index>/output/<name>``. A
reference may borrow its inputs from the folder above it (``"inputs": ".."``): a bundle keeps the
float64 oracle beside its main reference without a second copy of the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tpu2edge.errors import BundleError
from tpu2edge.files import canonical_json, sha256_of, write_atomically
from tpu2edge.types import Array, Sample, Signature, Tensors

__all__ = ["FORMAT_VERSION", "PROVIDERS", "Reference", "ReferenceWriter"]

# 1 (2026-11-30): first version.
FORMAT_VERSION = 1

#: Who computed the outputs, and in which words that is said.
PROVIDERS: Mapping[str, str] = {
    "eager": "the torch module in float32 on the CPU",
    "oracle-f64": "the traced program in float64 on the CPU",
    "litert": "a LiteRT file on this machine",
    "torch_tpu": "a TPU through TorchTPU",
    "torch_xla": "an XLA device through PyTorch/XLA",
    "torchax": "a JAX device through torchax",
    "tpu-emulated": "predicted for a TPU on the CPU",
    "tpu-emulated-naive": "predicted on the CPU, every matmul rounded alike",
    "external": "golden outputs from elsewhere",
}

_SHARD_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Samples and trusted outputs of one signature; read lazily, sample by sample.

    ``provider`` is a key of PROVIDERS, ``precision`` one of ``f32``, ``f64``, ``bf16-default``,
    ``bf16_3x-high``, ``f32-highest``. ``data`` says where the inputs come from.
    """

    path: Path
    signature: Signature
    provider: str
    precision: str
    sample_ids: tuple[str, ...]
    weights_sha256: str | None
    data: Mapping[str, Any]
    extra: Mapping[str, Any]
    _shards: tuple[tuple[str, int, int], ...]  # file, first sample, count
    _inputs_from: Path | None = None
    _files: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.sample_ids)

    @classmethod
    def load(cls, path: Path | str, *, verify: bool = True) -> Reference:
        """The reference in the folder ``path``.

        Raises:
            BundleError: it is none, of a newer format, incomplete, or (``verify``) damaged.
        """
        folder = Path(path)
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
        except (OSError, ValueError) as err:
            raise BundleError(
                f"'{folder}' is no reference: {err}", do="give a folder that holds manifest.json"
            ) from err
        if not isinstance(manifest, dict) or manifest.get("kind") != "tpu2edge-reference":
            raise BundleError(f"'{folder}' is no reference", do="give a folder made by tpu2edge")
        version = manifest.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise BundleError(
                f"'{folder}' has reference format {version}, this tpu2edge "
                f"reads up to {FORMAT_VERSION}",
                do="upgrade tpu2edge",
            )
        try:
            if not isinstance(version, int):
                raise ValueError(f"format_version is {version!r}")
            return cls._from_manifest(folder, manifest, verify)
        except (KeyError, TypeError, ValueError) as err:
            raise BundleError(
                f"'{folder}' is damaged: manifest.json: {type(err).__name__}: {err}",
                do="copy the whole folder again",
            ) from err

    @classmethod
    def _from_manifest(cls, folder: Path, manifest: dict[str, Any], verify: bool) -> Reference:
        for shard in manifest["shards"]:
            file = folder / shard["file"]
            if not file.is_file():
                raise BundleError(f"'{file}' is missing", do="copy the whole folder again")
            if verify and sha256_of(file) != shard["sha256"]:
                raise BundleError(f"'{file}' is damaged: its sha256 is not the recorded one")
        borrowed = manifest.get("inputs")
        return cls(
            path=folder,
            signature=Signature.from_json(manifest["signature"]),
            provider=manifest["provider"],
            precision=manifest["precision"],
            sample_ids=tuple(manifest["samples"]),
            weights_sha256=manifest.get("weights_sha256"),
            data=manifest["data"],
            extra=manifest.get("extra", {}),
            _shards=tuple((s["file"], s["first"], s["count"]) for s in manifest["shards"]),
            _inputs_from=folder / borrowed if borrowed else None,
        )

    def inputs(self, index: int) -> dict[str, Array]:
        """The inputs of one sample by name."""
        if self._inputs_from is not None:
            parent = self._files.get("parent")
            if parent is None:
                parent = Reference.load(self._inputs_from, verify=False)
                if parent.sample_ids != self.sample_ids:
                    raise BundleError(
                        f"'{self.path}' and '{self._inputs_from}', whose inputs it uses, hold "
                        "other samples",
                        do="copy both folders again",
                    )
                self._files["parent"] = parent
            return dict(parent.inputs(index))
        return self._tensors(index, "input")

    def outputs(self, index: int) -> dict[str, Array]:
        """The trusted outputs of one sample by name."""
        outputs = self._tensors(index, "output")
        if missing := [s.name for s in self.signature.outputs if s.name not in outputs]:
            raise BundleError(
                f"'{self.path}' is incomplete: sample '{self.sample_ids[index]}' lacks the outputs "
                f"{missing}",
                do="make the reference anew",
            )
        return outputs

    def samples(self) -> Iterator[Sample]:
        """All samples' inputs in order."""
        for index, name in enumerate(self.sample_ids):
            yield Sample(id=name, inputs=self.inputs(index))

    def _tensors(self, index: int, kind: str) -> dict[str, Array]:
        from safetensors import safe_open

        for file, first, count in self._shards:
            if first <= index < first + count:
                opened = self._files.get(file)
                if opened is None:
                    opened = safe_open(self.path / file, framework="np")
                    self._files[file] = (opened, list(opened.keys()))  # type: ignore[no-untyped-call]
                    opened = self._files[file]
                handle, keys = opened
                prefix = f"{index:06d}/{kind}/"
                return {
                    key.removeprefix(prefix): handle.get_tensor(key)
                    for key in keys
                    if key.startswith(prefix)
                }
        raise BundleError(
            f"'{self.path}' is incomplete: sample {index} is in none of its files",
            do="copy the whole folder again, or make the reference anew",
        )

    def describe(self) -> str:
        """One line: who computed it, in which precision, on how many samples of what data."""
        who = PROVIDERS.get(self.provider, self.provider)
        kind = self.data.get("kind", "unknown")
        return f"{who} ({self.precision}), {len(self)} samples, {kind} data"


class ReferenceWriter:
    """Writes a Reference sample by sample; memory stays within one shard.

    The manifest is written last, by :meth:`close`, so a folder without one is unfinished.
    """

    def __init__(
        self,
        path: Path,
        signature: Signature,
        *,
        provider: str,
        precision: str,
        data: Mapping[str, Any],
        weights_sha256: str | None = None,
        extra: Mapping[str, Any] | None = None,
        borrow_inputs: str | None = None,
    ) -> None:
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._signature = signature
        self._head: dict[str, Any] = {
            "kind": "tpu2edge-reference",
            "format_version": FORMAT_VERSION,
            "signature": signature.to_json(),
            "provider": provider,
            "precision": precision,
            "weights_sha256": weights_sha256,
            "data": dict(data),
            "extra": dict(extra or {}),
            "inputs": borrow_inputs,
        }
        self._ids: list[str] = []
        self._pending: dict[str, Array] = {}
        self._pending_bytes = 0
        self._pending_first = 0
        self._shards: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()

    def add(self, sample: Sample, outputs: Tensors) -> None:
        """One sample with its outputs (by name, in the provider's own types)."""
        index = len(self._ids)
        self._ids.append(sample.id)
        if self._head["inputs"] is None:
            self._keep(index, "input", sample.inputs)
        self._keep(index, "output", outputs)
        if self._pending_bytes >= _SHARD_BYTES:
            self._flush()

    def _keep(self, index: int, kind: str, tensors: Tensors) -> None:
        for name, value in tensors.items():
            array = np.array(value, order="C", copy=True)
            self._pending[f"{index:06d}/{kind}/{name}"] = array
            self._pending_bytes += array.nbytes

    def _flush(self) -> None:
        if not self._pending:
            return
        from safetensors.numpy import save

        name = f"samples-{len(self._shards):05d}.safetensors"
        write_atomically(self.path / name, save(self._pending))
        self._shards.append(
            {
                "file": name,
                "first": self._pending_first,
                "count": len(self._ids) - self._pending_first,
                "sha256": sha256_of(self.path / name),
            }
        )
        self._pending, self._pending_bytes = {}, 0
        self._pending_first = len(self._ids)

    def close(self) -> Reference:
        """Write what is left and the manifest; gives the finished reference."""
        self._flush()
        manifest = {**self._head, "samples": self._ids, "shards": self._shards}
        write_atomically(self.path / "manifest.json", canonical_json(manifest))
        return Reference.load(self.path, verify=False)
