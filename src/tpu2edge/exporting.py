"""The one job of an export: trace, compute references, lower, quantize, check, write the bundle."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge import bundle as bundles
from tpu2edge import references
from tpu2edge.autotuning import search_checkpoint
from tpu2edge.bundle import Bundle
from tpu2edge.delegates import note_of_xnnpack
from tpu2edge.family import Family, Made, Part, refuse_twice
from tpu2edge.folders import staged
from tpu2edge.logs import log_stream, warnings_to
from tpu2edge.places import taps_in, transposes_left
from tpu2edge.sampling import SampleSet
from tpu2edge.truths import Truth, TruthMaker
from tpu2edge.types import Note
from tpu2edge.writing import BundleJob, layers_in

if TYPE_CHECKING:
    from tpu2edge.export.lower import Lowered
    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.parity import ParityReport

__all__ = ["ExportJob"]


@dataclass(kw_only=True, slots=True)
class ExportJob(BundleJob):
    """What an export was asked for, and all its work."""

    choice: references.ReferenceChoice
    isolate: bool  # convert in a process of its own; the command line's job is one already

    def check_budgets(self) -> None:
        """Refuse a budget that cannot be read before any work is done."""
        for recipe in self.family.names:
            self.family.budget_of(recipe)

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
        self.say(notes)
        with (
            keep_global_state(),  # importing litert_torch alone seeds torch and NumPy anew
            staged(self.output, force=self.force) as folder,
            log_stream(self.log_path or folder / "log.txt") as log,
            warnings_to(log),
        ):
            self.progress("trace")
            programs = traced()
            for program in programs:
                self.say(program.notes)
            came = next((p.quantization for p in programs if p.quantization), None)
            if came is not None:
                refuse_twice(self.family.names)
            maker = TruthMaker(
                choice=self.choice,
                weights_sha256=provenance.get("weights_sha256"),
                isolate=self.isolate,
                log=log,
                progress=self.progress,
                say=self.say,
            )
            truths: list[tuple[str, Truth]] = []
            for program, samples in zip(programs, data(programs), strict=True):
                self.say(samples.notes)
                where = "reference" if not truths else f"reference/{program.signature.name}"
                truths.append((where, maker.make(folder / where, program, samples)))
            _release_memory()
            base, lowered = self._lower(folder, programs, log)
            parts = [
                _part(program, where, truth, lowered)
                for program, (where, truth) in zip(programs, truths, strict=True)
            ]
            if any(program.is_channels_last for program in programs):
                self.say([transposes_left(base, lowered.nodes)])
            self.say(note_of_xnnpack(base, lowered.nodes))
            _release_memory()
            report, made = self._family(folder, parts, base, lowered, came, log)
            self.progress("write bundle")
            layers = layers_in([one.model.path for one in made], lowered.nodes)
            self.write(
                folder,
                parts=parts,
                report=report,
                made=made,
                layers=layers,
                content=provenance,
                started=started,
                log=log,
            )
        return self.verified()

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
        self.say(lowered.notes)
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
            say=self.say,
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
