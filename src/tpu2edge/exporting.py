"""The one job of an export: trace, compute references, lower, quantize, check, write the bundle."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge import references
from tpu2edge.autotuning import search_checkpoint
from tpu2edge.bundle import Bundle, load_bundle
from tpu2edge.delegates import note_of_xnnpack
from tpu2edge.family import Family, FamilyOptions, Made, Part, refuse_twice
from tpu2edge.folders import staged
from tpu2edge.logs import Stages, log_stream, warnings_to
from tpu2edge.places import taps_in, transposes_left
from tpu2edge.sampling import SampleSet
from tpu2edge.truths import Truth, TruthMaker
from tpu2edge.types import Note, NoteSink
from tpu2edge.writing import layers_in, write_contents

if TYPE_CHECKING:
    from tpu2edge.export.lower import Lowered
    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.parity import ParityReport

__all__ = ["ExportJob"]


@dataclass(kw_only=True, slots=True)
class ExportJob:
    """What an export was asked for, and all its work."""

    output: Path
    family: FamilyOptions
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
        for recipe in self.family.names:
            self.family.budget_of(recipe)

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
            came = next((p.quantization for p in programs if p.quantization), None)
            if came is not None:
                refuse_twice(self.family.names)
            maker = TruthMaker(
                choice=self.choice,
                weights_sha256=provenance.get("weights_sha256"),
                isolate=self.isolate,
                log=log,
                progress=self.progress,
                say=self._say,
            )
            truths: list[tuple[str, Truth]] = []
            for program, samples in zip(programs, data(programs), strict=True):
                self._say(samples.notes)
                where = "reference" if not truths else f"reference/{program.signature.name}"
                truths.append((where, maker.make(folder / where, program, samples)))
            _release_memory()
            base, lowered = self._lower(folder, programs, log)
            parts = [
                _part(program, where, truth, lowered)
                for program, (where, truth) in zip(programs, truths, strict=True)
            ]
            if any(program.is_channels_last for program in programs):
                self._say([transposes_left(base, lowered.nodes)])
            self._say(note_of_xnnpack(base, lowered.nodes))
            _release_memory()
            report, made = self._family(folder, parts, base, lowered, came, log)
            self.progress("write bundle")
            layers = layers_in([one.model.path for one in made], lowered.nodes)
            self.progress.end()
            write_contents(
                folder,
                parts=parts,
                report=report,
                made=made,
                layers=layers,
                content={
                    **provenance,
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
        parts: Sequence[Part],
        base: Path,
        lowered: Lowered,
        came: str | None,
        log: IO[bytes],
    ) -> tuple[ParityReport, list[Made]]:
        family = Family(
            options=self.family,
            folder=folder,
            parts=parts,
            base=base,
            modules=bundles.modules_of_tensors(base, lowered.nodes),
            nodes=lowered.nodes,
            progress=self.progress,
            say=self._say,
            log=log,
            checkpoint=search_checkpoint(self.output),
            as_it_came=came,
        )
        return family.run()


def _part(program: TracedProgram, where: str, truth: Truth, lowered: Lowered) -> Part:
    return Part(
        signature=program.signature,
        where=where,
        truth=truth,
        constant_outputs=program.constant_outputs,
        initial={name: program.example[name] for name in program.state},
        state=dict(program.state),
        taps=tuple(program.taps),
        find_taps=partial(taps_in, program=program, origins=lowered.origins)
        if program.taps
        else None,
    )


def _release_memory() -> None:
    """Hand freed memory back to the system, for glibc keeps it: the next stage starts lower."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
