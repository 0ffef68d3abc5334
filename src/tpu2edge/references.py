"""Which reference the numbers are held to, and how each kind is made.

    PATH                       outputs captured on a TPU (or anywhere), a folder
    tpu-emulated[:GEN][@PREC]  predicted for a TPU: the TPU compiler's own decisions, run on the CPU
    tpu-emulated-naive[@PREC]  the same without the TPU compiler: every matmul rounded alike
    eager                      the torch module in float32
    f64                        the traced program in float64

Without a word it is ``tpu-emulated`` for v5e when libtpu is installed (the extra ``tpu``), else
``tpu-emulated-naive``. The eager module and the float64 oracle are always computed as well.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge.children import ending, follow_child
from tpu2edge.errors import DataError, DeviceError, OptionError, Place, error_from_json
from tpu2edge.types import Array, Note, Progress, Sample, Signature, Tensors, Verdict

if TYPE_CHECKING:
    import torch

    from tpu2edge.runtime_check.metrics import OutputMetrics
    from tpu2edge.runtime_check.parity import CaseReport
    from tpu2edge.runtime_check.reference import Reference

__all__ = [
    "Predicted",
    "ReferenceChoice",
    "predict_isolated",
    "predict_outputs",
    "prove_reference",
    "replay",
]

_WORDS = re.compile(
    r"^(?P<kind>tpu-emulated-naive|tpu-emulated|eager|f64)(?::(?P<generation>\w+))?(?:@(?P<precision>\w+))?$"
)
_PRECISIONS = ("default", "high", "highest")
_LABELS = {"bf16-default": "default", "bf16_3x-high": "high", "f32-highest": "highest"}

#: A captured TPU output has to be this much nearer to the CPU running TPU numerics than to the
#: float64 oracle: then at most a quarter of the noise power is left unexplained. Where the TPU's own
#: transcendental functions limit what can be explained, a distance above the second number will do.
PROOF_MARGIN_DB = 6.0
PROOF_ENOUGH_DB = 70.0
#: The same for outputs captured on a CPU in float32: two builds of torch are nearer than that.
PROOF_EAGER_DB = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceChoice:
    """What was asked for; ``kind`` is auto, given, eager, f64, tpu-emulated or …-naive."""

    kind: str = "auto"
    generation: str = "v5e"
    precision: str = "default"
    path: Path | None = None

    @classmethod
    def parse(cls, text: str | Path | None) -> ReferenceChoice:
        """The choice that ``text`` describes; a text that is no word of the list is a path.

        Raises:
            OptionError: an unknown TPU generation or precision, or a path that is not there.
        """
        if text is None or text == "auto":
            return cls()
        match = _WORDS.match(str(text))
        if match is None:
            path = Path(text)
            if not path.exists():
                raise OptionError(
                    f"--reference '{text}' is neither a folder nor a known word",
                    do="give a reference folder, eager, f64, tpu-emulated[:v5e][@high] or "
                    "tpu-emulated-naive",
                )
            return cls(kind="given", path=path)
        kind, precision = match["kind"], match["precision"] or "default"
        if precision not in _PRECISIONS:
            raise OptionError(
                f"--reference: unknown precision '{precision}'",
                do=f"known: {', '.join(_PRECISIONS)}",
            )
        generation = match["generation"] or "v5e"
        if match["generation"]:
            from tpu2edge.runtime_check.reference.tpu.topologies import topology_named

            if kind != "tpu-emulated":
                raise OptionError(
                    f"--reference: {kind} knows no TPU generation", do=f"leave :{generation} away"
                )
            topology_named(generation)
        return cls(kind=kind, generation=generation, precision=precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Outputs predicted for a TPU, with what a Reference says about them."""

    outputs: Sequence[Tensors]
    provider: str
    precision: str
    extra: dict[str, Any]
    notes: tuple[Note, ...]


def predict_isolated(
    program: torch.export.ExportedProgram,
    signature: Signature,
    samples: Sequence[Sample],
    choice: ReferenceChoice,
    *,
    log: IO[bytes] | None = None,
    progress: Progress,
) -> Predicted:
    """As :func:`predict_outputs`, in a process of its own: jax stays out of the caller's.

    Raises:
        DeviceError: the process died; beside what predict_outputs raises.
    """
    import torch

    from tpu2edge.runtime_check.reference import Reference, ReferenceWriter

    with tempfile.TemporaryDirectory(prefix="tpu2edge-") as name:
        folder = Path(name)
        torch.export.save(program, folder / "program.pt2")
        request = {
            "signature": signature.to_json(),
            "choice": {
                "kind": choice.kind,
                "generation": choice.generation,
                "precision": choice.precision,
            },
        }
        (folder / "request.json").write_text(json.dumps(request))
        head = {"provider": "eager", "precision": "f32", "data": {}}
        with ReferenceWriter(folder / "inputs", signature, **head) as writer:  # type: ignore[arg-type]
            for sample in samples:
                writer.add(sample, {})
        command = [sys.executable, "-P", "-m", "tpu2edge.predict_child", name]
        last, status = follow_child(command, log=log, progress=progress)
        kind = last.pop("event", None)
        if kind == "error":
            raise error_from_json(last)
        if kind != "result":
            raise DeviceError(
                f"the process that predicts for a TPU died ({ending(status)})",
                do="see the log; or use --reference eager",
                step="reference",
            )
        predicted = Reference.load(folder / "predicted")
        return Predicted(
            outputs=[predicted.outputs(index) for index in range(len(predicted))],
            provider=last["provider"],
            precision=last["precision"],
            extra=last["extra"],
            notes=tuple(Note(code=code, text=text) for code, text in last["notes"]),
        )


def predict_outputs(
    program: torch.export.ExportedProgram,
    signature: Signature,
    samples: Sequence[Sample],
    choice: ReferenceChoice,
    *,
    progress: Progress,
) -> Predicted:
    """What a TPU would give for ``samples``, as far as that can be told without one.

    Raises:
        ConversionError: the program cannot be lowered to StableHLO.
        DeviceError: the TPU compiler refuses the program or dies.
        OptionError: the kind needs libtpu, which is not installed.
    """
    from tpu2edge.export.stablehlo import stablehlo_from_program
    from tpu2edge.runtime_check.reference.tpu.compile import libtpu_version
    from tpu2edge.runtime_check.reference.tpu.emulate import predict

    if any(spec.is_dynamic for spec in signature.inputs):
        raise OptionError(
            "a TPU prediction needs fixed shapes", do="use --reference eager with --dynamic"
        )
    naive = choice.kind == "tpu-emulated-naive"
    if choice.kind == "auto":
        naive = libtpu_version() is None
    progress("reference: lower to StableHLO")
    lowered = stablehlo_from_program(
        program,
        input_names=[spec.name for spec in signature.inputs],
        output_names=[spec.name for spec in signature.outputs],
    )
    words = "naive TPU rounding" if naive else f"compile for TPU {choice.generation} and run"
    progress(f"reference: {words}")
    found = predict(
        lowered,
        [sample.inputs for sample in samples],
        generation=choice.generation,
        precision=choice.precision,
        naive=naive,
    )
    extra: dict[str, Any] = {
        "label": found.label,
        "topology": found.topology,
        "libtpu": found.libtpu,
        "libtpu_build": found.libtpu_build,
        "jax": found.jax,
        "route": found.route,
        "not_modelled": list(found.not_modelled),
        "matmuls": dict(found.plan.counts()),
    }
    counts = ", ".join(f"{count} {mode}" for mode, count in found.plan.counts().items())
    where = "no TPU compiler: all alike" if naive else f"by the compiler for {found.topology}"
    text = f"TPU numerics are {found.label}, not measured ({where}; matmuls: {counts or 'none'})"
    notes = [Note(code="predicted-reference", text=text)]
    if naive:
        more = "install tpu2edge[tpu] to let the TPU compiler decide which matmuls are rounded"
        notes.append(Note(code="naive-reference", text=more))
    return Predicted(
        outputs=found.outputs,
        provider=found.provider,
        precision=found.precision_label,
        extra=extra,
        notes=(*lowered.notes, *notes),
    )


def replay(
    reference: Reference, signature: Signature, weights_sha256: str | None
) -> tuple[list[Sample], list[Note]]:
    """The samples of a given reference, after a look whether it belongs to this model.

    Raises:
        DataError: other names, shapes or types than the model's, or other weights.
    """
    notes: list[Note] = []
    for kind, ours, theirs in (
        ("inputs", signature.inputs, reference.signature.inputs),
        ("outputs", signature.outputs, reference.signature.outputs),
    ):
        if {s.name for s in ours} != {s.name for s in theirs}:
            raise DataError(
                f"the reference has the {kind} {sorted(s.name for s in theirs)}, the model "
                f"{sorted(s.name for s in ours)}",
                do="capture it from this model, or name its arrays as the model does",
            )
        known = {s.name: s for s in theirs}
        for spec in ours:
            if len(spec.shape) != len(known[spec.name].shape):
                raise DataError(
                    f"the reference was made with other shapes: {known[spec.name]}, expected {spec}",
                    do="capture it with the shapes that are exported",
                    place=Place(tensor=spec.name),
                )
    if reference.weights_sha256 is None:
        text = "the reference does not say which weights it was made from"
        notes.append(Note(code="unknown-weights", text=text))
    elif weights_sha256 is not None and reference.weights_sha256 != weights_sha256:
        raise DataError(
            f"the reference was made from other weights (sha256 {reference.weights_sha256[:12]}…, "
            f"the model has {weights_sha256[:12]}…)",
            do="export the checkpoint that the reference was captured from, or capture again",
        )
    return list(reference.samples()), notes


def prove_reference(
    reference: Reference,
    near: Callable[[], Sequence[Tensors]],
    floor: dict[str, OutputMetrics],
    label: str,
) -> list[CaseReport]:
    """The first comparison: captured outputs against this machine running the same numerics.

    It shows whether weights and inputs are those of the model, below the TPU's own rounding: a
    right pair is nearer to each other than the captured outputs are to float64.

    Args:
        reference: the captured outputs.
        near: gives this machine's outputs for the same samples.
        floor: the captured outputs against the float64 oracle, per output.
        label: what ``near`` is, for the report.
    """
    from tpu2edge.runtime_check.metrics import OutputMeter
    from tpu2edge.runtime_check.parity import CaseReport, Reason

    outputs: Sequence[Tensors] = near()
    cases: list[CaseReport] = []
    for spec in reference.signature.outputs:
        meter = OutputMeter()
        for index, identity in enumerate(reference.sample_ids):
            truth: Array = reference.outputs(index)[spec.name]
            meter.add(identity, truth, outputs[index][spec.name])
        metrics = meter.metrics()
        bound, got = _proof_bound(reference, floor.get(spec.name)), metrics.sqnr_db_worst
        reasons: tuple[Reason, ...] = ()
        if got is not None and not got >= bound:
            reasons = (
                Reason(
                    code="weights",
                    text=f"the captured outputs are {got:.1f} dB from {label}, wanted at least "
                    f"{bound:.1f} dB: weights, inputs or precision are not those of this model "
                    f"(worst sample '{metrics.worst_sample}')",
                ),
            )
        cases.append(
            CaseReport(
                model="reference",
                recipe="reference",
                device=label,
                signature=reference.signature.name,
                output=spec.name,
                verdict=Verdict.FAIL if reasons else Verdict.PASS,
                budget=f"sqnr>={bound:.4g}dB" if got is not None else "none",
                reasons=reasons,
                metrics=metrics,
            )
        )
    return cases


def _proof_bound(reference: Reference, floor: OutputMetrics | None) -> float:
    if reference.precision == "f32":
        return PROOF_EAGER_DB
    noise = floor.sqnr_db_worst if floor is not None and floor.sqnr_db_worst is not None else 0.0
    return min(noise + PROOF_MARGIN_DB, PROOF_ENOUGH_DB)


def precision_of_label(label: str) -> str | None:
    """ "default", "high" or "highest" for a TPU's precision label; None for any other."""
    return _LABELS.get(label)


def generation_of(reference: Reference) -> str:
    """The TPU generation a reference was captured on, as topologies.py names it; v5e if unknown."""
    kind = str(reference.extra.get("device_kind", "")).lower()
    for words, name in (
        (("v6 lite", "v6e"), "v6e"),
        (("v5 lite", "v5e"), "v5e"),
        (("v5p", "v5"), "v5p"),
        (("7x", "v7"), "tpu7x"),
        (("v4",), "v4"),
        (("v3",), "v3"),
        (("v2",), "v2"),
    ):
        if any(word in kind for word in words):
            return name
    return "v5e"


def is_tpu(reference: Reference) -> bool:
    """Whether its outputs come from a TPU, or are predicted for one."""
    return reference.precision in _LABELS
