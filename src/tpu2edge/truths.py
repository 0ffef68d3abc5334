"""What a file is compared with: the reference asked for, the eager module, the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge import references
from tpu2edge.bundle import Bundle
from tpu2edge.errors import ConversionError, DataError, DeviceError, OptionError
from tpu2edge.sampling import SampleSet
from tpu2edge.types import Note, Progress, Sample

if TYPE_CHECKING:
    from tpu2edge.export.program import TracedProgram
    from tpu2edge.runtime_check.metrics import OutputMetrics
    from tpu2edge.runtime_check.parity import CaseReport
    from tpu2edge.runtime_check.reference import Reference, ReferenceWriter

__all__ = ["Truth", "TruthMaker", "truth_at", "truth_of"]


@dataclass(slots=True)
class Truth:
    """What the files are compared with; ``eager`` is None when it is the reference itself."""

    reference: Reference
    oracle: Reference | None
    eager: Reference | None = None
    floor: dict[str, OutputMetrics] = field(default_factory=dict)
    is_given: bool = False  # captured elsewhere, not predicted here
    expected: dict[str, OutputMetrics] = field(default_factory=dict)  # the floor it should have
    proof: list[CaseReport] = field(default_factory=list)


def truth_of(bundle: Bundle, signature: str) -> Truth:
    """What a bundle's own signature was held to when it was made."""
    return truth_at(bundle.reference(signature=signature).path)


def truth_at(path: Path) -> Truth:
    """The reference in the folder ``path``, with the oracle and the eager outputs beside it, if any."""
    from tpu2edge.runtime_check.parity import noise_floor
    from tpu2edge.runtime_check.reference import Reference

    truth = Truth(Reference.load(path), None)
    if (path / "oracle").is_dir():
        truth.oracle = Reference.load(path / "oracle")
        if (path / "eager").is_dir():
            truth.eager = Reference.load(path / "eager")
            truth.floor = noise_floor(truth.reference, truth.oracle)
    return truth


@dataclass(frozen=True, kw_only=True, slots=True)
class TruthMaker:
    """Makes what the files of an export are compared with."""

    choice: references.ReferenceChoice
    weights_sha256: str | None
    isolate: bool  # predict in a process of its own
    log: IO[bytes]
    progress: Progress
    say: Callable[[Sequence[Note]], None]

    def make(self, where: Path, program: TracedProgram, data: SampleSet) -> Truth:
        """All references of one signature, written to ``where`` and below it."""
        from tpu2edge.runtime_check.parity import noise_floor

        if not data.samples:
            raise DataError("there is no sample to check with", do="give --inputs with samples")
        main = self._main_outputs(program, data)
        common: dict[str, Any] = {
            "data": data.source,
            "weights_sha256": self.weights_sha256,
        }
        writers = {
            "oracle": _writer(where / "oracle", program, "oracle-f64", "f64", common, borrow=True)
        }
        if main is None:
            writers["eager"] = _writer(where, program, "eager", "f32", common)
        else:
            writers["main"] = _writer(
                where, program, main.provider, main.precision, common, extra=main.extra
            )
            writers["eager"] = _writer(
                where / "eager", program, "eager", "f32", common, borrow=True
            )
        oracles = program.oracles(sample.inputs for sample in data.samples)
        for index, sample in enumerate(data.samples):
            self.progress("reference: eager and float64", index, len(data.samples))
            known = data.eager.get(sample.id)
            oracle = next(oracles)
            if main is not None:
                outputs = main.outputs[index] if main.provider != "oracle-f64" else oracle
                writers["main"].add(sample, outputs)
            eager = program.eager(sample.inputs) if known is None else known
            writers["eager"].add(sample, eager)
            writers["oracle"].add(sample, oracle)
        if program.oracle_exceptions:
            names = ", ".join(program.oracle_exceptions)
            text = f"the float64 oracle computes {names} in the program's own precision"
            self.say([Note(code="oracle-exception", text=text)])
        closed = {
            name: writers[name].close() for name in ("main", "eager", "oracle") if name in writers
        }
        truth = Truth(closed.get("main", closed["eager"]), closed["oracle"])
        if main is not None:
            truth.eager = closed["eager"]
            truth.floor = noise_floor(truth.reference, closed["oracle"])
            if data.given is not None:
                truth.is_given = True
                truth.proof = self._prove(program, data, truth)
        return truth

    def _main_outputs(self, program: TracedProgram, data: SampleSet) -> references.Predicted | None:
        """The outputs that the file is held to; None for the eager module's."""
        choice = self.choice
        if data.given is not None:
            given = data.given
            return references.Predicted(
                outputs=_LazyOutputs(given),
                provider=given.provider,
                precision=given.precision,
                extra=dict(given.extra),
                notes=(),
            )
        if choice.kind == "eager":
            return None
        if choice.kind == "f64":
            return references.Predicted(
                outputs=(), provider="oracle-f64", precision="f64", extra={}, notes=()
            )
        if choice.kind == "auto" and (steps := references.long_recurrence(program.program)):
            # TPU lowerings take recurrent layers apart step by step: minutes for a long sequence.
            text = (
                f"compared with the torch module in float32: a recurrent layer of {steps} steps takes "
                "long to predict for a TPU (--reference tpu-emulated does it)"
            )
            self.say([Note(code="no-prediction", text=text)])
            return None
        try:
            predicted = self._predict(program, data.samples, choice)
        except (ConversionError, DeviceError, OptionError) as error:
            if choice.kind != "auto":
                raise
            text = f"compared with the torch module in float32: no TPU prediction: {error.what}"
            self.say([Note(code="no-prediction", text=text)])
            return None
        self.say(predicted.notes)
        return predicted

    def _predict(
        self,
        program: TracedProgram,
        samples: Sequence[Sample],
        choice: references.ReferenceChoice,
        twin: bool = False,
    ) -> references.Predicted:
        wanted = (program.tapped, program.tapped_signature, samples, choice)
        if self.isolate:
            return references.predict_isolated(
                *wanted, twin=twin, log=self.log, progress=self.progress
            )
        return references.predict_outputs(*wanted, twin=twin, progress=self.progress)

    def _prove(self, program: TracedProgram, data: SampleSet, truth: Truth) -> list[CaseReport]:
        """The first comparison: were the captured outputs made from these weights and inputs?"""
        from tpu2edge.runtime_check.parity import noise_floor

        reference, eager = truth.reference, truth.eager
        assert eager is not None and truth.oracle is not None  # noqa: PT018
        precision = references.precision_of_label(reference.precision)
        if reference.provider.startswith("tpu-emulated"):
            return []
        if precision is None:
            if reference.precision != "f32":
                text = (
                    "whether the reference belongs to these weights is not proved: nothing here "
                    f"computes in the precision '{reference.precision}'"
                )
                self.say([Note(code="not-proved", text=text)])
                return []
            return references.prove_reference(
                reference, _LazyOutputs(eager), "the module on this CPU"
            )
        generation = references.generation_of(reference)
        choice = references.ReferenceChoice(
            kind="tpu-emulated", generation=generation, precision=precision
        )
        try:
            predicted = self._predict(program, data.samples, choice, twin=True)
        except (ConversionError, DeviceError, OptionError) as error:
            text = f"whether the reference belongs to these weights is not proved: {error.what}"
            self.say([Note(code="not-proved", text=f"{text} ({error.do})")])
            return []
        label = f"this CPU with TPU {generation} numerics"
        truth.expected = noise_floor(reference, truth.oracle, outputs=predicted.outputs)
        return references.prove_reference(reference, predicted.outputs, label, twin=predicted.twin)


class _LazyOutputs(Sequence[Any]):
    """A reference's outputs as a sequence, read one by one."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference

    def __len__(self) -> int:
        return len(self._reference)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)  # what ends an iteration
        return self._reference.outputs(index)


def _writer(
    path: Path,
    program: TracedProgram,
    provider: str,
    precision: str,
    common: Mapping[str, Any],
    *,
    borrow: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> ReferenceWriter:
    from tpu2edge.runtime_check.reference import ReferenceWriter

    return ReferenceWriter(
        path,
        program.signature,
        provider=provider,
        precision=precision,
        borrow_inputs=".." if borrow else None,
        extra=extra,
        **common,
    )
