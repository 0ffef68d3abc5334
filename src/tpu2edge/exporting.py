"""The one job of an export: trace, compute references, lower, quantize, check, write the bundle."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge import references
from tpu2edge.bundle import Bundle, load_bundle
from tpu2edge.files import canonical_json, sha256_of, write_atomically
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.folders import staged
from tpu2edge.logs import log_stream, warnings_to
from tpu2edge.options import parse_budget
from tpu2edge.places import refuse_unchanged, refuse_unrunnable, taps_in, transposes_left
from tpu2edge.sampling import SampleSet
from tpu2edge.truths import Truth, TruthMaker
from tpu2edge.types import EdgeModel, Note, NoteSink, Progress, Signature

if TYPE_CHECKING:
    from tpu2edge.export.lower import Lowered
    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.parity import CaseReport, ParityReport

__all__ = ["ExportJob", "Stages"]

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

_KEPT = ".float"  # folder beside a reference for the float file's outputs, while a job runs


@dataclass(frozen=True, slots=True)
class _Part:
    """One signature of the file, with what it is held to."""

    program: TracedProgram
    where: str  # folder of its reference in the bundle
    truth: Truth


class Stages:
    """Passes progress on and keeps the seconds of each stage for the manifest."""

    def __init__(self, sink: Progress) -> None:
        self._sink = sink
        self._stage: str | None = None
        self._since = 0.0
        self.seconds: dict[str, float] = {}

    def __call__(self, stage: str, done: float | None = None, total: float | None = None) -> None:
        """A :class:`tpu2edge.types.Progress`."""
        now = time.perf_counter()
        if stage != self._stage:
            self._close(now)
            self._stage, self._since = stage, now
        self._sink(stage, done, total)

    def _close(self, now: float) -> None:
        if self._stage is not None:
            spent = self.seconds.get(self._stage, 0.0)
            self.seconds[self._stage] = round(spent + now - self._since, 3)

    def end(self) -> None:
        """The last stage is over."""
        self._close(time.perf_counter())
        self._stage = None


@dataclass(kw_only=True, slots=True)
class ExportJob:
    """What an export was asked for, and all its work."""

    output: Path
    recipes: tuple[str, ...]
    budgets: tuple[str, ...]
    budget: Any
    devices: tuple[str, ...]
    threads: int | None
    seed: int
    force: bool
    progress: Stages
    on_note: NoteSink | None
    log_path: Path | None
    choice: references.ReferenceChoice
    isolate: bool  # convert in a process of its own; the command line's job is one already
    notes: list[Note] = field(default_factory=list)

    def check_budgets(self) -> None:
        """Refuse a budget that cannot be read before any work is done."""
        for recipe in self.recipes:
            self._budget(recipe)

    def _budget(self, recipe: str, truths: Sequence[Truth] = ()) -> Budget:
        from tpu2edge.runtime_check.budget import (
            UNPROVED_LEAST_DB,
            budget_against_tpu,
            default_budget,
        )

        if self.budget is not None:
            return self.budget  # type: ignore[no-any-return]
        base = default_budget(recipe)
        rounded = [truth for truth in truths if references.is_rounded(truth.reference)]
        if rounded:
            # The floor of captured outputs holds their faults, too: what they should be is better.
            floors = [truth.expected or truth.floor for truth in rounded]
            unproved = any(truth.is_given and not truth.expected for truth in rounded)
            least = UNPROVED_LEAST_DB if unproved else -math.inf
            base = budget_against_tpu(recipe, floors, least_db=least)
        return parse_budget(self.budgets, base)

    def _say(self, notes: Sequence[Note]) -> None:
        for note in notes:
            if note not in self.notes:
                self.notes.append(note)
                if self.on_note is not None:
                    self.on_note(note)

    def run(
        self,
        traced: Callable[[], list[TracedProgram]],
        data: Callable[[Sequence[TracedProgram]], list[SampleSet]],
        provenance: Mapping[str, Any],
        notes: Sequence[Note] = (),
    ) -> Bundle:
        """The verified bundle.

        Args:
            traced: gives the programs; called once the log is open.
            data: gives the samples of each program.
            provenance: what the manifest says of the model, its weights and the options.
            notes: what was noted already.
        """
        from tpu2edge.export.program import keep_global_state

        started = time.time()
        self.check_budgets()
        self._say(notes)
        with (
            keep_global_state(),  # importing litert_torch alone seeds torch and NumPy anew
            staged(self.output, force=self.force) as folder,
            log_stream(self.log_path or folder / "log.txt") as log,
            warnings_to(log),
        ):
            self.progress("trace")
            programs = traced()
            for program in programs:
                self._say(program.notes)
            maker = TruthMaker(
                choice=self.choice,
                weights_sha256=provenance.get("weights_sha256"),
                isolate=self.isolate,
                log=log,
                progress=self.progress,
                say=self._say,
            )
            parts: list[_Part] = []
            for program, samples in zip(programs, data(programs), strict=True):
                self._say(samples.notes)
                where = "reference" if not parts else f"reference/{program.signature.name}"
                truth = maker.make(folder / where, program, samples)
                parts.append(_Part(program, where, truth))
            _release_memory()
            base, lowered = self._lower(folder, programs, log)
            if any(program.is_channels_last for program in programs):
                self._say([transposes_left(base, lowered.nodes)])
            _release_memory()
            report, models = self._family(folder, parts, base, lowered, log)
            self._write(folder, parts, report, models, lowered.nodes, provenance, started)
            if self.log_path is not None:
                log.flush()
                shutil.copyfile(self.log_path, folder / "log.txt")
        self.progress("verify bundle")
        bundle = load_bundle(self.output)
        self.progress.end()
        return bundle

    def _lower(
        self, folder: Path, programs: Sequence[TracedProgram], log: IO[bytes]
    ) -> tuple[Path, Lowered]:
        from tpu2edge.export.lower import Loweree, lower_isolated, lower_programs

        base = folder / "model.float32.tflite"
        lowerees = [Loweree(program.program, program.signature) for program in programs]
        if self.isolate:
            lowered = lower_isolated(lowerees, base, log=log, progress=self.progress)
        else:
            lowered = lower_programs(lowerees, base, progress=self.progress)
        self._say(lowered.notes)
        return base, lowered

    def _family(
        self,
        folder: Path,
        parts: Sequence[_Part],
        base: Path,
        lowered: Lowered,
        log: IO[bytes],
    ) -> tuple[ParityReport, list[tuple[EdgeModel, Budget]]]:
        from tpu2edge.quantize.apply import quantize_file
        from tpu2edge.runtime_check.parity import ParityReport

        reports: list[ParityReport] = []
        models: list[tuple[EdgeModel, Budget]] = []
        quantized = [name for name in self.recipes if name != "float32"]
        for recipe in dict.fromkeys(("float32", *quantized)):
            file = base
            if recipe != "float32":
                file = folder / f"model.{recipe}.tflite"
                self.progress(f"quantize {recipe}")
                quantize_file(base, file, recipe, log=log)
                refuse_unchanged(base, file, recipe)
            model = _tested_model(file, [part.program.signature for part in parts], recipe)
            budget = self._budget(recipe, [part.truth for part in parts])
            for device in self.devices:
                for part in parts:
                    report = self._check(folder, model, budget, device, part, parts, log)
                    if recipe == "float32" and device == "host":
                        refuse_unrunnable(report, file, lowered.nodes)
                    if device == "host":
                        cases = self._check_taps(model, budget, part, lowered, log)
                        report = replace(report, cases=(*report.cases, *cases))
                    if recipe in self.recipes:
                        reports.append(report)
            if recipe in self.recipes:
                models.append((model, budget))
        for part in parts:
            shutil.rmtree(folder / part.where / _KEPT, ignore_errors=True)
        if "float32" not in self.recipes:
            base.unlink()
        merged = reduce(ParityReport.merged, reports)
        proofs = [case for part in parts for case in part.truth.proof]
        return replace(merged, cases=(*proofs, *merged.cases)), models

    def _check(
        self,
        folder: Path,
        model: EdgeModel,
        budget: Budget,
        device: str,
        part: _Part,
        parts: Sequence[_Part],
        log: IO[bytes],
    ) -> ParityReport:
        """One file on one device with one signature's samples."""
        from tpu2edge.runtime_check.budget import default_budget
        from tpu2edge.runtime_check.parity import check_model
        from tpu2edge.runtime_check.reference import Reference

        # The float file's own outputs tell conversion from quantization.
        kept = folder / part.where / _KEPT
        is_float = model.recipe == "float32"
        keep = is_float and any(recipe != "float32" for recipe in self.recipes)
        known = not is_float and (kept / "manifest.json").is_file()
        return check_model(
            model,
            part.truth.reference,
            budget,
            oracle=part.truth.oracle,
            eager=part.truth.eager,
            conversion=default_budget("float32"),
            floor=part.truth.floor,
            float_outputs=Reference.load(kept, verify=False) if known else None,
            device=device,
            threads=self.threads,
            constant_outputs=part.program.constant_outputs,
            other_outputs=frozenset(
                name
                for other in parts
                for name in (
                    *(spec.name for spec in other.program.signature.outputs),
                    *other.program.taps,
                )
            ),
            keep=kept if keep else None,
            log=log,
            progress=self.progress,
        )

    def _check_taps(
        self,
        model: EdgeModel,
        budget: Budget,
        part: _Part,
        lowered: Lowered,
        log: IO[bytes],
    ) -> tuple[CaseReport, ...]:
        """The values before a final softmax or sigmoid, where the file still has them."""
        from tpu2edge.runtime_check.budget import default_budget
        from tpu2edge.runtime_check.parity import check_taps

        if not part.program.taps:
            return ()
        return check_taps(
            model,
            part.truth.reference,
            taps_in(model.path, part.program, lowered.origins),
            budget,
            oracle=part.truth.oracle,
            eager=part.truth.eager,
            conversion=default_budget("float32"),
            floor=part.truth.floor,
            threads=self.threads,
            log=log,
        )

    def _write(
        self,
        folder: Path,
        parts: Sequence[_Part],
        report: ParityReport,
        models: Sequence[tuple[EdgeModel, Budget]],
        nodes: Mapping[str, Any],
        provenance: Mapping[str, Any],
        started: float,
    ) -> None:
        self.progress("write bundle")
        write_atomically(folder / "parity.json", canonical_json(report.to_json(times=False)))
        layers: dict[str, Any] = {}
        for model, _ in models:
            tensors = [t.name for graph in read_tflite(model.path).subgraphs for t in graph.tensors]
            layers.update(bundles.layers_of_tensors(tensors, nodes))
        write_atomically(folder / "layers.json", canonical_json(layers))
        _write_state(folder / "state.npz", [part.program for part in parts])
        self.progress.end()
        bundles.write_manifest(
            folder,
            {
                **provenance,
                "verdict": str(report.verdict),
                "signature": parts[0].program.signature.to_json(),
                "constant_outputs": sorted(parts[0].program.constant_outputs),
                "signatures": [
                    {
                        "signature": part.program.signature.to_json(),
                        "reference": part.where,
                        "constant_outputs": sorted(part.program.constant_outputs),
                        "state": dict(part.program.state),
                    }
                    for part in parts
                ],
                "models": [
                    {
                        "recipe": model.recipe,
                        "file": model.path.name,
                        "sha256": model.sha256,
                        "size_bytes": model.size_bytes,
                        "signatures": [s.to_json() for s in model.signatures],
                        "budget": budget.to_json(),
                    }
                    for model, budget in models
                ],
                "notes": [{"code": note.code, "text": note.text} for note in self.notes],
                "seed": self.seed,
                "threads": self.threads,
                "devices": list(self.devices),
                "versions": _versions(),
                "times": {
                    "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
                    "stages_s": dict(self.progress.seconds),
                    "devices": dict(report.times),
                },
            },
        )


def _write_state(file: Path, programs: Sequence[TracedProgram]) -> None:
    """The values that an app starts from; signatures that share a buffer share its value."""
    import numpy as np

    values: dict[str, Any] = {name: p.example[name] for p in programs for name in p.state}
    if values:
        np.savez(file, **values)


def _tested_model(file: Path, signatures: Sequence[Signature], recipe: str) -> EdgeModel:
    return EdgeModel(
        path=file,
        signatures=tuple(signatures),
        recipe=recipe,
        sha256=sha256_of(file),
        size_bytes=file.stat().st_size,
    )


def _release_memory() -> None:
    """Hand freed memory back to the system, for glibc keeps it: the next stage starts lower."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
