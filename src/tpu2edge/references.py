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
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge.bundle import load_bundle
from tpu2edge.children import ending, follow_child
from tpu2edge.errors import (
    BundleError,
    DataError,
    DeviceError,
    OptionError,
    Place,
    error_from_json,
)
from tpu2edge.types import (
    Array,
    Dim,
    HloArgument,
    Note,
    Progress,
    Sample,
    Signature,
    StableHlo,
    Tensors,
    TensorSpec,
    Verdict,
)

if TYPE_CHECKING:
    import torch

    from tpu2edge.runtime_check.parity import CaseReport
    from tpu2edge.runtime_check.reference import Reference

__all__ = [
    "Predicted",
    "ReferenceChoice",
    "choice_of",
    "generation_of",
    "is_rounded",
    "long_recurrence",
    "precision_of_label",
    "predict_isolated",
    "predict_outputs",
    "prove_reference",
    "references_in",
    "replay",
]

_WORDS = re.compile(
    r"^(?P<kind>tpu-emulated-naive|tpu-emulated|eager|f64)(?::(?P<generation>\w+))?(?:@(?P<precision>\w+))?$"
)
_PRECISIONS = ("default", "high", "highest")
_LABELS = {"bf16-default": "default", "bf16_3x-high": "high", "f32-highest": "highest"}

#: How near captured TPU outputs have to be to this CPU running TPU numerics. The machines differ in
#: the order of additions (1e-7) and in exp and the like (up to 1e-5): that moves some values across
#: a rounding boundary to the next bfloat16, and so on layer by layer. So the prediction is made once
#: more with weights disturbed by PROOF_DISTURBANCE, and its distance from the first one is as near as
#: a right reference can be expected to come. Measured on a 12-layer transformer (floor 44.6 dB):
#: disturbed by 1e-7, 1e-6, 1e-5 it is 50.8, 50.2, 50.2 dB away from itself; a single layer scaled by
#: 1.01 comes to 39.9-42.0 dB. A fixed margin to the noise floor cannot tell these: a network of one
#: layer comes 20 dB nearer to itself than to float64, this one 5.6 dB.
PROOF_DISTURBANCE = 1e-5
PROOF_MARGIN_DB = 2.0
#: Nearer than this is always enough: at high and highest precision the TPU's own exp, log and tanh,
#: which are not modelled, limit a right reference to 84 dB and more.
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


def choice_of(reference: Reference | Path | str) -> ReferenceChoice:
    """The choice of ``export_model``'s argument: a word, a path, or a reference itself."""
    if isinstance(reference, (str, Path)):
        return ReferenceChoice.parse(reference)
    return ReferenceChoice(kind="given")


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """Outputs predicted for a TPU, with what a Reference says about them."""

    outputs: Sequence[Tensors]
    provider: str
    precision: str
    extra: dict[str, Any]
    notes: tuple[Note, ...]
    twin: Sequence[Tensors] = ()  # the same with disturbed weights, when asked for


def predict_isolated(
    program: torch.export.ExportedProgram,
    signature: Signature,
    samples: Sequence[Sample],
    choice: ReferenceChoice,
    *,
    twin: bool = False,
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
            "twin": twin,
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

        def outputs(name: str) -> list[Tensors]:
            found = Reference.load(folder / name)
            return [found.outputs(index) for index in range(len(found))]

        return Predicted(
            outputs=outputs("predicted"),
            twin=outputs("twin") if twin else (),
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
    twin: bool = False,
    progress: Progress,
) -> Predicted:
    """What a TPU would give for ``samples``, as far as that can be told without one.

    With ``twin`` also what it would give with weights disturbed by PROOF_DISTURBANCE.

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
    again: Sequence[Tensors] = ()
    if twin:
        progress(f"reference: {words}, disturbed")
        again = predict(
            _disturbed(lowered),
            [sample.inputs for sample in samples],
            generation=choice.generation,
            precision=choice.precision,
            naive=naive,
        ).outputs
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
        twin=again,
    )


def _disturbed(program: StableHlo) -> StableHlo:
    """The same program with every float weight off by a part in PROOF_DISTURBANCE of its own."""
    import numpy as np

    def disturbed(place: int, argument: HloArgument) -> HloArgument:
        get = argument.array
        if get is None or argument.dtype != "float32":
            return argument

        def array() -> Array:
            value = np.asarray(get(), np.float32)
            noise = np.random.default_rng(place).standard_normal(value.shape, np.float32)
            return np.asarray(value * (1 + np.float32(PROOF_DISTURBANCE) * noise), np.float32)

        return replace(argument, array=array)

    return replace(
        program, arguments=tuple(disturbed(i, a) for i, a in enumerate(program.arguments))
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
            if not _fits(known[spec.name], spec):
                raise DataError(
                    f"the reference was made with other shapes: {known[spec.name]}, expected {spec}",
                    do="capture it with the shapes that are exported",
                    place=Place(tensor=spec.name),
                )
    for spec in signature.inputs:
        theirs_dtype = reference.signature.input(spec.name).dtype
        if theirs_dtype != spec.dtype:
            raise DataError(
                f"input '{spec.name}' of the reference is {theirs_dtype}, the model's {spec.dtype}",
                do="save it in the type that the model takes",
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


def _fits(theirs: TensorSpec, ours: TensorSpec) -> bool:
    """Whether every size that the reference holds is one that the model has."""

    def bounds(size: int | Dim) -> tuple[int, int]:
        return (size.min, size.max) if isinstance(size, Dim) else (size, size)

    if len(theirs.shape) != len(ours.shape):
        return False
    for mine, other in zip(ours.shape, theirs.shape, strict=True):
        (low, high), (least, most) = bounds(mine), bounds(other)
        if not low <= least <= most <= high:
            return False
    return True


def prove_reference(
    reference: Reference,
    near: Sequence[Tensors],
    label: str,
    *,
    twin: Sequence[Tensors] = (),
) -> list[CaseReport]:
    """The first comparison: captured outputs against this machine running the same numerics.

    It shows whether weights and inputs are those of the model, below the TPU's own rounding: a
    right pair is about as near to each other as ``near`` is to itself when it is disturbed.

    Args:
        reference: the captured outputs.
        near: this machine's outputs for the same samples.
        label: what ``near`` is, for the report.
        twin: ``near`` once more with disturbed weights; none for a reference in float32.
    """
    from tpu2edge.runtime_check.metrics import OutputMeter, OutputMetrics
    from tpu2edge.runtime_check.parity import CaseReport, Reason

    def distance(name: str, others: Sequence[Tensors], outputs: Sequence[Tensors]) -> OutputMetrics:
        meter = OutputMeter()
        for identity, one, other in zip(reference.sample_ids, outputs, others, strict=True):
            meter.add(identity, one[name], other[name])
        return meter.metrics()

    given = [reference.outputs(index) for index in range(len(reference))]
    cases: list[CaseReport] = []
    for spec in reference.signature.outputs:
        metrics = distance(spec.name, near, given)
        itself = distance(spec.name, twin, near).sqnr_db_worst if twin else None
        bound, got = _proof_bound(itself, near[0][spec.name].size), metrics.sqnr_db_worst
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


def _proof_bound(itself_db: float | None, elements: int) -> float:
    """The least SQNR in dB; ``itself_db`` is the prediction's distance from its disturbed twin.

    Both are the worst sample's. The power of the error of n elements scatters by sqrt(2 / n) of
    itself, 4.34 sqrt(2 / n) dB: twice that is allowed on top of PROOF_MARGIN_DB.
    """
    if itself_db is None:
        return PROOF_EAGER_DB
    margin = PROOF_MARGIN_DB + 2 * 4.34 * math.sqrt(2 / max(elements, 1))
    return min(itself_db - margin, PROOF_ENOUGH_DB)


#: Steps of a recurrent layer up to which a prediction is made unasked.
QUICK_STEPS = 16
_RECURRENT = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")


def long_recurrence(program: torch.export.ExportedProgram) -> int:
    """The steps of the longest recurrent layer, where there are more than QUICK_STEPS; else 0."""
    longest = 0
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith(_RECURRENT):
            sizes = [size for size in node.args[0].meta["val"].shape if isinstance(size, int)]
            longest = max(longest, *sizes[:2])  # batch or time first: either way it is in there
    return longest if longest > QUICK_STEPS else 0


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


def is_rounded(reference: Reference) -> bool:
    """Whether its outputs carry rounding of their own (a TPU's, half precision), real or predicted.

    Then no file can be held to be nearer to them than they are to float64.
    """
    return reference.precision not in ("f32", "f64")


def references_in(path: Path, signature: str | None) -> list[Reference]:
    """All references of a bundle (that of ``signature``), or the one in a folder of its own.

    A folder without a manifest, whose folders are references, stands for those: one a signature.

    Raises:
        BundleError: there is none, or it is damaged.
        DataError: two of one signature.
    """
    from tpu2edge.runtime_check.reference import Reference

    inner = path / "reference"
    if inner.is_dir() and (path / "manifest.json").is_file():
        bundle = load_bundle(path)
        if signature is not None and len(bundle.signatures) == 1:
            return [bundle.reference()]  # the file may call it otherwise
        names = bundle.signatures if signature is None else (signature,)
        return [bundle.reference(signature=name) for name in names]
    below = sorted(one.parent for one in path.glob("*/manifest.json"))
    if below and not (path / "manifest.json").exists():
        found: dict[str, Reference] = {}
        for folder in below:
            one = Reference.load(folder)
            name = one.signature.name
            if name in found:
                raise DataError(
                    f"'{found[name].path}' and '{folder}' are both of the signature '{name}'",
                    do="keep one; `tpu2edge capture --signature-name` names what it captures",
                )
            found[name] = one
        if signature is not None and signature not in found:
            raise BundleError(
                f"'{path}' has no reference of the signature '{signature}'",
                do=f"it has {sorted(found)}",
            )
        return list(found.values()) if signature is None else [found[signature]]
    return [Reference.load(path)]
