"""Smaller files from a file that is there already: a bundle's float file, or anybody's ``.tflite``.

``quantize_model`` is the Python API, ``quantize_target`` the same from what the command line was given.
A ``.tflite`` from elsewhere is its own reference, unless one is given: what quantization costs is told
against the file it began with.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge.autotuning import search_checkpoint
from tpu2edge.bundle import Bundle, load_bundle, modules_of_tensors
from tpu2edge.errors import BundleError, DataError, OptionError
from tpu2edge.extras import need_modules
from tpu2edge.family import CALIBRATION, FLOAT, Family, Part
from tpu2edge.files import named_digest, sha256_of
from tpu2edge.flatbuffer import TfliteFile, read_tflite, signatures_of, summarize
from tpu2edge.folders import refuse_existing, staged
from tpu2edge.logs import Stages, log_stream
from tpu2edge.options import budget_texts, family_options, options_of
from tpu2edge.requests import QuantizeRequest
from tpu2edge.truths import Truth, truth_at
from tpu2edge.types import (
    Dim,
    Note,
    NoteSink,
    Progress,
    Sample,
    Signature,
    Tensors,
    no_progress,
)
from tpu2edge.writing import BundleJob

if TYPE_CHECKING:
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.reference import Reference

__all__ = ["quantize_model", "quantize_target"]

_SAMPLES = 8  # made up when none are given


def quantize_model(
    source: Bundle | Path | str,
    *,
    output: Path | str,
    recipes: Sequence[str | Path] = ("int8",),
    budget: Budget | str | Sequence[str] | None = None,
    reference: Reference | Path | str | None = None,
    samples: Sequence[Sample | Mapping[str, Any]] | None = None,
    keep_float: Sequence[str] = (),
    calibration_data: Sequence[Any] = (),
    calibration_method: str = "minmax",
    metric: str | None = None,
    optimize: str = "size",
    levels: Sequence[str] = (),
    max_size: float | str | None = None,
    max_latency: float | str | None = None,
    time_limit_s: float | None = None,
    devices: Sequence[str] = ("host",),
    threads: int | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
) -> Bundle:
    """Quantize a bundle's float file, or a float ``.tflite`` from elsewhere, and check what comes out.

    Args:
        source: a bundle that holds its float32 file, or the path of a float ``.tflite``.
        output: the bundle folder to make.
        recipes: as in :func:`tpu2edge.export_model`; "auto" searches.
        budget: bounds for all recipes; defaults by recipe.
        reference: what a ``.tflite`` is held to, a Reference or its folder; its own outputs if None.
        samples: inputs by name for a ``.tflite``; without a reference and samples they are made up.

    The other arguments are those of :func:`tpu2edge.export_model`.

    Raises:
        InputError: the source, the samples or the options do not fit (exit status 2).
        QuantizationError: a recipe cannot be applied, or the file is quantized already (3).
    """
    options = family_options(
        recipes,
        budgets=budget_texts(budget),
        budget=budget if not isinstance(budget, (str, Sequence)) else None,
        keep_float=keep_float,
        calibration=calibration_data,
        estimator=calibration_method,
        metric=metric,
        optimize=optimize,
        levels=levels,
        max_size=max_size,
        max_latency=max_latency,
        time_limit_s=time_limit_s,
        devices=devices,
        threads=threads,
    )
    job = _Job(
        source=source.path if isinstance(source, Bundle) else Path(source),
        output=Path(output),
        family=options,
        seed=seed,
        force=force,
        progress=Stages(progress),
        on_note=on_note,
        reference=Path(reference) if isinstance(reference, (str, Path)) else None,
        given=None if isinstance(reference, (str, Path)) else reference,
        samples=samples,
    )
    return job.run()


def quantize_target(
    request: QuantizeRequest,
    *,
    progress: Progress = no_progress,
    on_note: NoteSink | None = None,
    log_path: Path | None = None,
) -> Bundle:
    """The same for a file named on the command line; see :func:`quantize_model`."""
    job = _Job(
        source=request.source,
        output=request.output,
        family=options_of(request),
        seed=request.seed,
        force=request.force,
        progress=Stages(progress),
        on_note=on_note,
        log_path=log_path,
        reference=request.reference,
        inputs=request.inputs,
        num_samples=request.num_samples,
    )
    return job.run()


@dataclass(kw_only=True, slots=True)
class _Job(BundleJob):
    source: Path
    reference: Path | None = None
    given: Reference | None = None
    inputs: tuple[Path, ...] = ()
    num_samples: int | None = None
    samples: Sequence[Sample | Mapping[str, Any]] | None = None

    def run(self) -> Bundle:
        started = time.time()
        refuse_existing(self.output, force=self.force)
        need_modules("quantizing", ("ai_edge_quantizer",))
        with (
            staged(self.output, force=self.force) as folder,
            log_stream(self.log_path or folder / "log.txt") as log,
        ):
            self.progress("load")
            base = folder / f"model.{FLOAT}.tflite"
            if self.source.is_dir():
                parts, modules, layers, content = self._from_bundle(folder, base)
            else:
                parts, modules, content = self._from_file(folder, base, log)
                layers = {}
            _refuse_quantized(base)
            family = Family(
                options=self.family,
                folder=folder,
                parts=parts,
                base=base,
                modules=modules,
                nodes={},
                progress=self.progress,
                say=self.say,
                log=log,
                checkpoint=search_checkpoint(self.output),
                is_new=False,
                calibrated=self.source / CALIBRATION if self.source.is_dir() else None,
            )
            report, made = family.run()
            self.progress("write bundle")
            self.write(
                folder,
                parts=parts,
                report=report,
                made=made,
                layers=layers,
                content=content,
                started=started,
                log=log,
            )
        return self.verified()

    # ---------------------------------------------------------------------------- from a bundle

    def _from_bundle(
        self, folder: Path, base: Path
    ) -> tuple[list[Part], dict[str, tuple[str, ...]], dict[str, Any], dict[str, Any]]:
        if self.inputs or self.samples is not None or self.reference or self.given:
            raise OptionError(
                "a bundle brings its own samples and reference",
                do="leave --inputs and --reference away, or name its .tflite instead of the folder",
            )
        bundle = load_bundle(self.source)
        known = [model for model in bundle.models if model.recipe == FLOAT]
        if not known:
            raise BundleError(
                f"'{self.source}' holds no float32 file to begin with, only "
                f"{', '.join(model.recipe for model in bundle.models)}",
                do="export again with --recipe float32",
            )
        shutil.copyfile(known[0].path, base)
        shutil.copytree(bundle.path / "reference", folder / "reference")
        initial = _state_of(bundle.path / "state.npz")
        parts = [
            Part(
                signature=Signature.from_json(entry["signature"]),
                where=entry["reference"],
                truth=truth_at(folder / entry["reference"]),
                constant_outputs=frozenset(entry["constant_outputs"]),
                state=entry["state"],
                initial={name: initial[name] for name in entry["state"]},
            )
            for entry in bundle.manifest["signatures"]
        ]
        layers = {
            tensor: [source.to_json() for source in sources]
            for tensor, sources in known[0].layers.items()
        }
        modules = {
            tensor: tuple(dict.fromkeys(source.module for source in sources if source.module))
            for tensor, sources in known[0].layers.items()
        }
        kept = ("source", "checkpoint", "weights_sha256")
        content = {name: bundle.manifest[name] for name in kept if name in bundle.manifest}
        content["options"] = {"quantized_from": known[0].sha256}
        return parts, modules or modules_of_tensors(base, {}), layers, content

    # ---------------------------------------------------------------------------- from a .tflite

    def _from_file(
        self, folder: Path, base: Path, log: IO[bytes]
    ) -> tuple[list[Part], dict[str, tuple[str, ...]], dict[str, Any]]:
        if not self.source.is_file():
            raise BundleError(
                f"there is no file '{self.source}'", do="give a .tflite file or a bundle folder"
            )
        read = read_tflite(self.source)
        shutil.copyfile(self.source, base)
        signatures = _signatures_of(read, self.source)
        if self.reference is not None or self.given is not None:
            truths = self._given_truths(folder, signatures)
        else:
            truths = self._own_outputs(folder, base, signatures, log)
        parts = [
            Part(signature=signature, where=where, truth=truth)
            for signature, (where, truth) in zip(signatures, truths, strict=True)
        ]
        content = {
            "source": {"origin": self.source.name, "sha256": sha256_of(self.source)},
            "options": {"num_samples": self.num_samples},
        }
        return parts, modules_of_tensors(base, {}), content

    def _given_truths(
        self, folder: Path, signatures: Sequence[Signature]
    ) -> list[tuple[str, Truth]]:
        """The reference that was given, copied into the bundle."""
        from tpu2edge.references import references_in

        if self.inputs or self.samples is not None:
            raise OptionError(
                "samples and a reference were both given",
                do="leave --inputs away: a reference brings its own samples",
            )
        found = [self.given] if self.given is not None else []
        if self.reference is not None:
            found = list(references_in(self.reference, None))
        truths: list[tuple[str, Truth]] = []
        for signature in signatures:
            mine = [one for one in found if one.signature.name == signature.name]
            if not mine and len(found) == len(signatures) == 1:
                mine = found
            if not mine:
                raise DataError(
                    f"the reference has no samples for the signature '{signature.name}'",
                    do=f"it has {[one.signature.name for one in found]}",
                )
            where = _where(truths, signature)
            shutil.copytree(mine[0].path, folder / where, dirs_exist_ok=True)
            truths.append((where, truth_at(folder / where)))
        return truths

    def _own_outputs(
        self, folder: Path, base: Path, signatures: Sequence[Signature], log: IO[bytes]
    ) -> list[tuple[str, Truth]]:
        """What the float file itself gives, as the reference."""
        from tpu2edge.runtime_check.devices.client import Session
        from tpu2edge.runtime_check.parity import fit_sample
        from tpu2edge.runtime_check.reference import Reference, ReferenceWriter

        truths: list[tuple[str, Truth]] = []
        with Session(base, threads=self.family.threads, log=log) as session:
            for signature in signatures:
                samples, source = self._samples(signature)
                where = _where(truths, signature)
                writer = ReferenceWriter(
                    folder / where, signature, provider="litert", precision="f32", data=source
                )
                feeds = [fit_sample(one.inputs, signature, one.id) for one in samples]
                runs = session.run(signature.name, feeds)
                for sample, inputs, outputs in zip(samples, feeds, runs, strict=True):
                    writer.add(Sample(id=sample.id, inputs=inputs), outputs)
                writer.close()
                truths.append((where, Truth(Reference.load(folder / where), None)))
        text = "no --reference: the files are compared with the float file's own outputs"
        self.say([Note(code="own-reference", text=text)])
        return truths

    def _samples(self, signature: Signature) -> tuple[list[Sample], dict[str, Any]]:
        from tpu2edge.runtime_check.samples import load_samples

        if self.samples is not None:
            made = [
                one if isinstance(one, Sample) else Sample(id=f"sample-{i}", inputs=dict(one))
                for i, one in enumerate(self.samples)
            ]
            return made, {"kind": "given", "count": len(made)}
        if self.inputs:
            noted: list[Note] = []
            loaded = list(load_samples(self.inputs, signature.inputs, noted.append))
            self.say(noted)
            source = {"kind": "files", "files": [named_digest(path) for path in self.inputs]}
            return loaded, source
        count = self.num_samples or _SAMPLES
        text = f"no --inputs: {count} samples of random numbers, which say little about quality"
        self.say([Note(code="synthetic-data", text=text)])
        return _random_samples(signature, count, self.seed), {
            "kind": "synthetic",
            "seed": self.seed,
            "count": count,
        }


def _where(before: Sequence[Any], signature: Signature) -> str:
    return "reference" if not before else f"reference/{signature.name}"


def _signatures_of(read: TfliteFile, source: Path) -> list[Signature]:
    found = list(signatures_of(read))
    if not found:
        raise BundleError(
            f"'{source.name}' has no signature, so its inputs have no names to go by",
            do="convert it again with signatures, as every converter since 2021 writes them",
        )
    return found


def _random_samples(signature: Signature, count: int, seed: int) -> list[Sample]:
    """Standard normal numbers; there is nothing to go by for integers."""
    import numpy as np

    for spec in signature.inputs:
        if not spec.dtype.startswith("float") or any(isinstance(s, Dim) for s in spec.shape):
            raise DataError(
                f"samples for input '{spec.name}' ({spec}) cannot be made up",
                do="give --inputs with real samples",
            )
    rng = np.random.default_rng(seed)

    def one() -> Tensors:
        return {
            spec.name: rng.standard_normal(tuple(int(str(s)) for s in spec.shape)).astype(
                spec.dtype
            )
            for spec in signature.inputs
        }

    return [Sample(id=f"random-{index}", inputs=one()) for index in range(count)]


def _state_of(file: Path) -> Mapping[str, Any]:
    import numpy as np

    if not file.is_file():
        return {}
    with np.load(file, allow_pickle=False) as data:
        return {name: data[name] for name in data.files}


def _refuse_quantized(base: Path) -> None:
    """A file whose weights are quantized already is not quantized a second time."""
    from tpu2edge.errors import QuantizationError

    summary = summarize(read_tflite(base))
    large = [weight for weight in summary.weights if len(weight.shape) > 1]  # biases stay float
    if large and not any(weight.is_float for weight in large):
        kinds = ", ".join(dict.fromkeys(weight.stored_as for weight in large))
        raise QuantizationError(
            f"the weights are quantized already ({kinds})",
            do="begin with the float file",
            step="quantize",
        )
