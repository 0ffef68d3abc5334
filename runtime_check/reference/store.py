"""A Reference on disk: ``manifest.json`` and ``samples-*.safetensors``, never the model.

Each sample's tensors are stored under ``<index>/input/<name>`` and ``<index>/output/<name>``. A
reference may borrow its inputs from the folder above it (``"inputs": ".."``): a bundle keeps the
float64 oracle beside its main reference without a second copy of the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tpu2edge.errors import BundleError, DataError, OptionError, Place
from tpu2edge.files import canonical_json, sha256_of, write_atomically
from tpu2edge.folders import staged
from tpu2edge.types import Array, Dim, Sample, Signature, Tensors, TensorSpec

__all__ = [
    "FORMAT_VERSION",
    "PRECISIONS",
    "PROVIDERS",
    "Reference",
    "ReferenceWriter",
    "SignatureGatherer",
    "edge_array",
]

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

#: Known precision labels: in what the outputs were computed.
PRECISIONS: Mapping[str, str] = {
    "f32": "float32 throughout, as on a CPU",
    "f64": "float64",
    "bf16-default": "a TPU's default: float32 matmuls in one bfloat16 pass",
    "bf16_3x-high": "a TPU's 'high': float32 matmuls in three bfloat16 passes",
    "f32-highest": "a TPU's 'highest': float32 matmuls in six bfloat16 passes",
    "bf16-model": "a model whose weights are bfloat16",
    "f16-model": "a model whose weights are float16",
}

#: What LiteRT stores a type as, where that is another one.
_EDGE = {
    "float64": "float32",
    "float16": "float32",
    "bfloat16": "float32",
    "int64": "int32",
}

_SHARD_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Samples and trusted outputs of one signature; read lazily, sample by sample.

    ``provider`` is a key of PROVIDERS or ``torch-<device>``; ``precision`` a key of PRECISIONS or,
    for other devices than a TPU, ``<device>-<setting>``. ``data`` says where the inputs come from.
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
    def from_arrays(
        cls,
        path: Path | str,
        *,
        inputs: Mapping[str, Array] | Sequence[Tensors],
        outputs: Mapping[str, Array] | Sequence[Tensors],
        precision: str,
        batch: int | None = None,
        provider: str = "external",
        signature_name: str = "serving_default",
        sample_ids: Sequence[str] | None = None,
        data: Mapping[str, Any] | None = None,
        weights_sha256: str | None = None,
        extra: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> Reference:
        """A reference made of outputs that somebody has already, written to the folder ``path``.

        Args:
            path: the folder to make; it appears in one rename.
            inputs: arrays by the model's input names, or one such mapping for each sample.
            outputs: the same by output names, for the same samples in the same order.
            precision: in what the outputs were computed, a key of PRECISIONS.
            batch: how many rows of the arrays are one sample. None: the first axis counts the
                samples and is no part of them. Of no effect when there is a mapping per sample.
            provider: who computed them, a key of PROVIDERS.
            signature_name: name of the entry.
            sample_ids: names of the samples; ``sample-0`` … if not given.
            data: where the inputs come from, plain data with ``kind``.
            weights_sha256: ``weights_digest`` of the model, if known; else nothing but the numbers
                can tell whether they are this model's.
            extra: what else is known, plain data; ``device_kind`` ("TPU v5e") names the TPU.
            force: replace a reference that is there.

        Raises:
            DataError: there is no sample, or not the same number of them in every array.
            OptionError: an unknown precision or provider.
            BundleError: something is there already.
        """
        if precision not in PRECISIONS:
            raise OptionError(
                f"unknown precision label '{precision}'", do=f"known: {', '.join(PRECISIONS)}"
            )
        if provider not in PROVIDERS:
            raise OptionError(f"unknown provider '{provider}'", do=f"known: {', '.join(PROVIDERS)}")
        ins, outs = _per_sample(inputs, batch, "input"), _per_sample(outputs, batch, "output")
        if len(ins) != len(outs):
            raise DataError(
                f"there are {len(ins)} samples of inputs and {len(outs)} of outputs",
                do="give as many outputs as inputs; --batch says how many rows are one sample",
            )
        ids = (
            list(sample_ids) if sample_ids is not None else [f"sample-{i}" for i in range(len(ins))]
        )
        if len(ids) != len(ins) or len(set(ids)) != len(ids):
            raise DataError(f"there are {len(ins)} samples and {len(set(ids))} different names")
        gatherer = SignatureGatherer(signature_name)
        with staged(Path(path), force=force, kind="tpu2edge-reference") as folder:
            writer = ReferenceWriter(
                folder,
                Signature(name=signature_name, inputs=(), outputs=()),
                provider=provider,
                precision=precision,
                data=data or {"kind": "given", "count": len(ins)},
                weights_sha256=weights_sha256,
                extra=extra,
            )
            for name, taken, given in zip(ids, ins, outs, strict=True):
                sample = Sample(id=name, inputs={n: edge_array(n, a) for n, a in taken.items()})
                results = {n: _without_bfloat16(np.asarray(a)) for n, a in given.items()}
                gatherer.add(sample.inputs, results)
                writer.add(sample, results)
            writer.amend(signature=gatherer.signature().to_json())
            writer.close()
        return cls.load(path, verify=False)

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

    def amend(self, **head: Any) -> None:
        """Change what the manifest will say: what is only known when all samples are through."""
        unknown = set(head) - set(self._head)
        assert not unknown, unknown
        self._head.update(head)

    def close(self) -> Reference:
        """Write what is left and the manifest; gives the finished reference."""
        self._flush()
        manifest = {**self._head, "samples": self._ids, "shards": self._shards}
        write_atomically(self.path / "manifest.json", canonical_json(manifest))
        return Reference.load(self.path, verify=False)


class SignatureGatherer:
    """Finds names, types and sizes from samples as they pass; a size that changes becomes a Dim."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._specs: dict[str, dict[str, tuple[str, list[tuple[int, int]]]]] = {}

    def add(self, inputs: Tensors, outputs: Tensors) -> None:
        """One sample; names, types and ranks must be those of the first.

        Raises:
            DataError: they are not.
        """
        for kind, tensors in (("input", inputs), ("output", outputs)):
            found = {
                name: (_edge_dtype(name, array.dtype), [(n, n) for n in array.shape])
                for name, array in tensors.items()
            }
            known = self._specs.setdefault(kind, found)
            if known.keys() != found.keys():
                raise DataError(
                    f"one sample has the {kind}s {sorted(found)}, another {sorted(known)}",
                    do="give every sample the same names",
                )
            for name, (dtype, sizes) in found.items():
                before, ranges = known[name]
                if before != dtype or len(ranges) != len(sizes):
                    raise DataError(
                        f"{kind} '{name}' is {before} with {len(ranges)} dimensions in one sample, "
                        f"{dtype} with {len(sizes)} in another",
                        place=Place(tensor=name),
                    )
                ranges[:] = [
                    (min(low, size), max(high, size))
                    for (low, high), (size, _) in zip(ranges, sizes, strict=True)
                ]

    def signature(self) -> Signature:
        """What all samples so far fit into."""

        def specs(kind: str) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(
                    name=name,
                    dtype=dtype,
                    shape=tuple(
                        low if low == high else Dim(name=f"{name}_{axis}", min=low, max=high)
                        for axis, (low, high) in enumerate(ranges)
                    ),
                )
                for name, (dtype, ranges) in self._specs.get(kind, {}).items()
            )

        return Signature(name=self._name, inputs=specs("input"), outputs=specs("output"))


def edge_array(name: str, value: Any) -> Array:
    """An input as the edge model takes it: 64-bit types narrowed, 16-bit floats widened.

    Raises:
        DataError: an integer does not fit into 32 bits, or the type is one that LiteRT lacks.
    """
    array = np.asarray(value)
    wanted = _edge_dtype(name, array.dtype)
    if array.dtype.kind in "iu" and wanted != array.dtype.name and array.size:
        limits = np.iinfo(wanted)
        low, high = int(array.min()), int(array.max())
        if low < limits.min or high > limits.max:
            raise DataError(
                f"input '{name}' holds values that do not fit into {wanted} ({low} to {high})",
                place=Place(tensor=name),
            )
    return np.ascontiguousarray(array.astype(wanted, copy=False)).reshape(array.shape)


def _edge_dtype(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in "biuf" and dtype.name != "bfloat16":
        raise DataError(
            f"'{name}' is of the type {dtype}, which LiteRT does not have",
            do="give numbers or booleans",
            place=Place(tensor=name),
        )
    return _EDGE.get(dtype.name, dtype.name)


def _without_bfloat16(array: Array) -> Array:
    """safetensors' NumPy writer has no bfloat16; float32 holds the same value."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


def _per_sample(
    arrays: Mapping[str, Array] | Sequence[Tensors], batch: int | None, kind: str
) -> list[dict[str, Array]]:
    if not isinstance(arrays, Mapping):
        samples = [{name: np.asarray(a) for name, a in one.items()} for one in arrays]
    else:
        whole = {name: np.asarray(array) for name, array in arrays.items()}
        counts: dict[str, int] = {}
        for name, array in whole.items():
            if array.ndim == 0:
                raise DataError(
                    f"{kind} '{name}' is a single number: its first axis must count samples",
                    do="give it one more axis in front",
                    place=Place(tensor=name),
                )
            counts[name], rest = divmod(array.shape[0], batch or 1)
            if rest or (batch is not None and batch < 1):
                raise DataError(
                    f"{kind} '{name}' has {array.shape[0]} rows, no multiple of {batch}",
                    place=Place(tensor=name),
                )
        if len(set(counts.values())) > 1:
            listed = ", ".join(f"{name}: {count}" for name, count in counts.items())
            raise DataError(
                f"the {kind}s hold different numbers of samples ({listed})",
                do="give every array as many samples (np.repeat one that is the same in all)",
            )
        count = next(iter(counts.values()), 0)
        samples = [
            {
                name: array[i] if batch is None else array[i * batch : (i + 1) * batch]
                for name, array in whole.items()
            }
            for i in range(count)
        ]
    if not samples or not samples[0]:
        raise DataError(f"there is no sample among the {kind}s")
    return samples
