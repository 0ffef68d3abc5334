"""The comparison: a LiteRT file on a device against a reference, output by output, to a verdict."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from tpu2edge.errors import (
    DataError,
    DeviceError,
    DeviceMemoryError,
    DeviceTimeoutError,
    OptionError,
    Place,
)
from tpu2edge.runtime_check.budget import Budget
from tpu2edge.runtime_check.devices.cache import CachedSession
from tpu2edge.runtime_check.devices.checks import DeviceChecks, check_session
from tpu2edge.runtime_check.devices.client import Session, Tap
from tpu2edge.runtime_check.devices.profiles import Profile, profile_named
from tpu2edge.runtime_check.devices.runners import launch_of
from tpu2edge.runtime_check.metrics import OutputMeter, OutputMetrics, largest_share
from tpu2edge.runtime_check.reference.store import Reference, ReferenceWriter
from tpu2edge.runtime_check.report.cases import (
    REPORT_FORMAT_VERSION,
    CaseReport,
    ErrorSplit,
    ParityReport,
    Reason,
)
from tpu2edge.runtime_check.task_metric import TaskMetric, TaskValue
from tpu2edge.types import (
    Array,
    EdgeModel,
    Progress,
    Sample,
    Signature,
    Tensors,
    TensorSpec,
    Verdict,
    is_base,
    no_progress,
)

__all__ = [
    "REPORT_FORMAT_VERSION",
    "CaseReport",
    "ErrorSplit",
    "ParityReport",
    "Reason",
    "check_model",
    "check_taps",
    "fit_sample",
    "is_host",
    "noise_floor",
    "opened",
    "real_values",
]


def check_model(
    model: EdgeModel,
    reference: Reference,
    budget: Budget,
    *,
    oracle: Reference | None = None,
    eager: Reference | None = None,
    conversion: Budget | None = None,
    floor: Mapping[str, OutputMetrics] | None = None,
    float_outputs: Reference | None = None,
    profile: Profile | None = None,
    threads: int | None = None,
    signature: str | None = None,
    constant_outputs: frozenset[str] = frozenset(),
    other_outputs: frozenset[str] = frozenset(),
    keep: Path | None = None,
    metric: TaskMetric | None = None,
    device_checks: bool = False,
    log: IO[bytes] | None = None,
    progress: Progress = no_progress,
) -> ParityReport:
    """Run ``model`` on every sample of ``reference`` and hold each output to ``budget``.

    Args:
        model: the file to check.
        reference: samples and what they should give.
        budget: bounds per output.
        oracle: the float64 outputs for the error split; no split without it.
        eager: the float32 module's outputs, when ``reference`` is a TPU's.
        conversion: what a float file has to keep against ``eager``; a fault there is the
            conversion's, whatever the distance to the TPU.
        floor: the reference against the oracle (:func:`noise_floor`), for the rows whose arg-max the
            TPU's own rounding can flip.
        float_outputs: the float file's own outputs, to tell conversion from quantization.
        profile: the device; this machine if None. Elsewhere the file runs on this machine too, to
            tell the device's part of the error, and the budget gets what the profile's tolerance adds.
        threads: LiteRT threads.
        signature: the signature to check; the reference's own name by default.
        constant_outputs: outputs known not to depend on any input.
        other_outputs: outputs of the file's other signatures, which the budget may name, too.
        keep: folder to keep the file's outputs in, as a reference of provider "litert".
        metric: the user's own, over all samples: a case of its own, held to ``budget.task``.
        device_checks: run the first sample again, and with more threads (or one), and report the
            figures (``report.devices``). An output that is not repeated within what the profile's
            tolerance allows is a FAIL.
        log: where the worker's stderr goes.
        progress: told about each sample.

    Returns:
        A report with one case per output (and one for ``metric``). A device that breaks gives
        ERROR cases, no exception.

    Raises:
        OptionError: the budget names unknown outputs, the file lacks the signature.
        DataError: the samples do not fit the file's inputs.
    """
    expected = reference.signature
    names = [spec.name for spec in expected.outputs]
    known = [*names, *sorted(other_outputs - set(names))]
    if unknown := budget.unknown_outputs(known):
        raise OptionError(f"--budget names no output {unknown}", do=f"outputs: {known}")
    constant = constant_outputs | budget.may_be_constant
    device = profile.name if profile is not None else "host"
    added = profile.tolerance.range_error(model.recipe) if profile is not None else 0.0
    why = ""
    if profile is not None and added:
        why = f"{device} may add {added:g} of the range ({profile.tolerance.name})"
    if eager is None:
        conversion = None

    def judging(shares: Mapping[str, float]) -> _Cases:
        bounds = conversion.relaxed(added, why, shares) if conversion is not None else None
        return _Cases(model, device, expected, budget.relaxed(added, why, shares), bounds)

    cases = judging({})
    if not len(reference):
        raise DataError("the reference holds no sample", do="give at least one sample")

    def report(
        found: tuple[CaseReport, ...],
        times: Mapping[str, Any],
        devices: Mapping[str, Any] | None = None,
    ) -> ParityReport:
        return ParityReport(
            cases=found,
            reference=reference.describe(),
            data_kind=str(reference.data.get("kind", "unknown")),
            samples=len(reference),
            times=times,
            devices=devices or {},
        )

    stage = f"check {model.path.name} on {device}"
    times: dict[str, Any] = {}
    given: list[Tensors] | None = [] if metric is not None else None
    first: list[Tensors] = []
    checks: DeviceChecks | None = None
    try:
        with opened(model.path, profile, threads, log) as session:
            actual = _matching(session.signatures, signature, expected.name)
            if fault := _missing_outputs(expected, actual):
                return report(cases.all(Verdict.FAIL, fault), {})
            host = (
                None if is_host(profile) else _host_outputs(model, reference, actual, threads, log)
            )
            meters = _run(
                session,
                actual,
                reference,
                _Side(
                    oracle,
                    eager,
                    floor or {},
                    float_outputs,
                    keep,
                    model.recipe,
                    _is_tpu(reference),
                    host,
                    {name: added * _range(host, name) for name in names} if host else {},
                ),
                lambda done: progress(stage, done, len(reference)),
                given,
                first,
            )
            which = f"#{actual.name}" if len(session.signatures) > 1 else ""
            key = f"{model.path.name}@{device}{which}"
            times[key] = {
                **session.times,
                "peak_rss_kb": session.peak_rss_kb,
            }
            if device_checks:
                progress(f"{stage}: once more")
                sample = fit_sample(reference.inputs(0), actual, reference.sample_ids[0])
                used = threads or (profile.threads if profile is not None else 1)
                checks = _checks(session, actual.name, sample, first[0], used, log)
    except DeviceError as error:
        told = _with_whose_fault(error, model, reference, profile, signature, threads, log)
        reason = Reason(code=f"device-{error.step}", text=str(told))
        return report(cases.all(Verdict.ERROR, reason), {})
    moved = {name: share for name in names if (share := meters[name].moved_share()) is not None}
    cases = judging(moved)
    found = tuple(cases.judge(meters[name], name, constant) for name in names)
    if checks is not None:
        found = tuple(_with_checks(case, checks, added) for case in found)
    if metric is not None and given is not None:
        found += (cases.judge_task(_task_value(metric, reference, given)),)
    if checks is None:
        return report(found, times)
    figures = {"model": model.path.name, "recipe": model.recipe, "signature": expected.name}
    return report(found, times, {key: {**figures, **checks.to_json()} for key in times})


#: Threads that one thread is compared with: what phones have of fast cores.
_MANY_THREADS = 4

#: Other threads sum in another order; float32 in a range that no profile has to allow.
_THREAD_RANGE_ERROR = 1e-5


def _checks(
    session: Session | CachedSession,
    signature: str,
    sample: Tensors,
    outputs: Tensors,
    used: int,
    log: IO[bytes] | None,
) -> DeviceChecks:
    threads = (used, _MANY_THREADS if used == 1 else 1)
    if isinstance(session, CachedSession):
        return session.checks(signature, sample, outputs, threads=threads)
    return check_session(session, signature, sample, outputs, threads=threads, log=log)


def _with_checks(case: CaseReport, checks: DeviceChecks, allowed: float) -> CaseReport:
    """A case with what running it again has shown; ``allowed`` is what the device may add."""
    reasons = list(case.reasons)
    verdict = case.verdict
    repeat = checks.repeat_range_error.get(case.output)
    if repeat is not None:
        text = f"the same input gave another output the second time, by {repeat:.2g} of its range"
        if repeat > allowed:
            verdict = Verdict.FAIL
            reasons.insert(0, Reason(code="not-repeatable", text=text))
        else:
            reasons.append(Reason(code="flag-not-repeatable", text=text))
    moved = checks.thread_range_error.get(case.output, 0.0)
    if moved > max(allowed, _THREAD_RANGE_ERROR):
        text = f"1 and {checks.threads} threads differ by {moved:.2g} of its range"
        reasons.append(Reason(code="flag-threads", text=text))
    return replace(case, verdict=verdict, reasons=tuple(reasons))


def is_host(profile: Profile | None) -> bool:
    """Whether a device is this machine as it is."""
    return profile is None or profile.name == "host"


def opened(
    model: Path, profile: Profile | None, threads: int | None, log: IO[bytes] | None = None
) -> Session | CachedSession:
    """A file on a device, ready to run; what another device than the host gives is kept.

    Raises:
        DeviceError: the device is not ready, or LiteRT refuses the file.
    """
    if profile is None:
        return Session(model, threads=threads, log=log)
    if is_host(profile):
        return Session(model, launch=launch_of(profile), threads=threads, log=log)
    return CachedSession(model, profile, threads=threads, log=log)


def _host_outputs(
    model: EdgeModel,
    reference: Reference,
    actual: Signature,
    threads: int | None,
    log: IO[bytes] | None,
) -> list[dict[str, Array]] | None:
    """What the file gives on this machine; None where it does not run here."""
    feeds = (
        fit_sample(reference.inputs(i), actual, name) for i, name in enumerate(reference.sample_ids)
    )
    specs = {spec.name: spec for spec in actual.outputs}
    try:
        # Kept, as a device's: with five devices the file runs here once.
        here = CachedSession(model.path, profile_named("host"), threads=threads, log=log)
        with here as session:
            return [
                {name: real_values(array, specs[name]) for name, array in outputs.items()}
                for outputs in session.run(actual.name, feeds)
            ]
    except DeviceError:
        return None


_RUNTIMES = {"gpu": "LiteRT's GPU accelerator", "wasm": "LiteRT.js"}


def _with_whose_fault(
    error: DeviceError,
    model: EdgeModel,
    reference: Reference,
    profile: Profile | None,
    signature: str | None,
    threads: int | None,
    log: IO[bytes] | None,
) -> DeviceError:
    """The error of another device with whether the file's first sample runs on this machine."""
    if (
        profile is None
        or is_host(profile)
        or error.step not in ("load", "run")
        or isinstance(error, DeviceMemoryError | DeviceTimeoutError)
    ):
        return error
    try:
        with opened(model.path, profile_named("host"), threads, log) as session:
            actual = _matching(session.signatures, signature, reference.signature.name)
            sample = fit_sample(reference.inputs(0), actual, reference.sample_ids[0])
            list(session.run(actual.name, [sample]))
    except DeviceError as other:
        words = f"it does not run on this machine either: {other.what.splitlines()[0]}"
        do = error.do
    else:
        who = _RUNTIMES.get(profile.runner, f"LiteRT on device '{profile.name}'")
        words = (
            f"the same file runs on this machine: {who} cannot {error.step} it, by a limit or fault "
            "of its own; the file is not damaged"
        )
        where = "run this file on the CPU there" if profile.runner == "gpu" else "leave it out"
        do = f"another recipe may work on '{profile.name}'; else {where}"
    return type(error)(f"{error.what}\n    {words}", do=do, place=error.place, step=error.step)


def _range(outputs: Sequence[Tensors], name: str) -> float:
    """The largest less the smallest finite value over all samples."""
    flat = [np.asarray(one[name]).reshape(-1) for one in outputs]
    values = np.concatenate([one[np.isfinite(one)] for one in flat]).astype(np.float64)
    return float(np.ptp(values)) if values.size else 0.0


def _task_value(metric: TaskMetric, reference: Reference, given: Sequence[Tensors]) -> TaskValue:
    every = range(len(reference))
    names = [spec.name for spec in reference.signature.outputs]
    trusted = [{name: reference.outputs(i)[name] for name in names} for i in every]
    return metric(
        given,
        inputs=[reference.inputs(i) for i in every],
        ids=reference.sample_ids,
        reference=trusted,
    )


def check_taps(
    model: EdgeModel,
    reference: Reference,
    taps: Sequence[Tap],
    budget: Budget,
    *,
    oracle: Reference | None = None,
    eager: Reference | None = None,
    conversion: Budget | None = None,
    floor: Mapping[str, OutputMetrics] | None = None,
    float_outputs: Reference | None = None,
    threads: int | None = None,
    log: IO[bytes] | None = None,
) -> tuple[CaseReport, ...]:
    """The values before a final softmax or sigmoid, on this machine, as cases of their own.

    Squashed outputs hide faults: where a softmax is saturated, logits that are wrong by a factor
    give the same probabilities. A tap whose values the reference does not hold (one that was
    captured without them) is left out. LiteRT has to keep every tensor for this, which may change
    what is fused: where that changes an output, the case says so.

    Args:
        taps: tensors of the file; each name is one that the references hold beside the outputs.
        budget: the bounds, by the taps' names or for all floats.

    Other arguments, and errors: as in :func:`check_model`.
    """
    known = set(reference.outputs(0))
    taps = [tap for tap in taps if tap.name in known]
    if not taps:
        return ()
    specs = tuple(TensorSpec(name=tap.name, shape=(), dtype="float32") for tap in taps)
    expected = replace(reference.signature, outputs=specs)
    cases = _Cases(model, "host", expected, budget, conversion if eager is not None else None)
    is_tpu = _is_tpu(reference)
    side = _Side(oracle, eager, floor or {}, float_outputs, None, model.recipe, is_tpu)
    gathered = {tap.name: _new_output(tap.name, side) for tap in taps}
    same = True
    try:
        with (
            Session(model.path, threads=threads, log=log) as plain,
            Session(model.path, threads=threads, log=log, taps=taps) as tapped,
        ):
            actual = _matching(plain.signatures, taps[0].signature, expected.name)
            feeds = [
                fit_sample(reference.inputs(i), actual, name)
                for i, name in enumerate(reference.sample_ids)
            ]
            runs = zip(plain.run(actual.name, feeds), tapped.run(actual.name, feeds), strict=True)
            for index, (outputs, values) in enumerate(runs):
                same = same and all(np.array_equal(values[n], a) for n, a in outputs.items())
                got = {tap.name: np.asarray(values[tap.name]) for tap in taps}
                _gather(gathered, expected, reference, side, index, got)
    except DeviceError as error:
        return cases.all(Verdict.ERROR, Reason(code=f"device-{error.step}", text=str(error)))
    found = [cases.judge(gathered[tap.name], tap.name, budget.may_be_constant) for tap in taps]
    if not same:
        flag = Reason(
            code="flag-other-kernels",
            text="looking inside changes the file's outputs (other kernels): near, not exact",
        )
        found = [replace(case, reasons=(*case.reasons, flag)) for case in found]
    return tuple(found)


def _matching(signatures: Sequence[Signature], asked: str | None, usual: str) -> Signature:
    for signature in signatures:
        if signature.name == (asked or usual):
            return signature
    if asked is None and len(signatures) == 1:  # the reference may come from elsewhere
        return signatures[0]
    raise OptionError(
        f"the file has no signature '{asked or usual}'",
        do=f"it has {[s.name for s in signatures]}",
    )


def _missing_outputs(expected: Signature, actual: Signature) -> Reason | None:
    wanted = {spec.name for spec in expected.outputs}
    got = {spec.name for spec in actual.outputs}
    if wanted == got:
        return None
    parts = []
    if wanted - got:
        parts.append(f"lacks {sorted(wanted - got)}")
    if got - wanted:
        parts.append(f"has besides {sorted(got - wanted)}")
    return Reason(
        code="outputs",
        text=f"the file has {len(got)} outputs, the reference {len(wanted)}: it "
        f"{' and '.join(parts)}",
    )


# ------------------------------------------------------------------------------------- running


@dataclass(frozen=True, slots=True)
class _Side:
    oracle: Reference | None
    eager: Reference | None
    floor: Mapping[str, OutputMetrics]
    float_outputs: Reference | None
    keep: Path | None
    recipe: str
    is_tpu: bool  # whether the reference is a TPU's, captured or predicted
    host: Sequence[Tensors] | None = None  # the same file's outputs on this machine
    may_move: Mapping[str, float] = field(default_factory=dict)  # an element, from those


class _Output:
    """All that is gathered about one output while the samples go by."""

    def __init__(
        self, error_bound: float | None, has_eager: bool, is_tpu: bool, has_host: bool
    ) -> None:
        self.is_tpu = is_tpu
        self.host_meter = OutputMeter() if has_host else None
        self.meter = OutputMeter(error_bound)
        self.eager_meter = OutputMeter() if has_eager else None
        self.fault: Reason | None = None
        steps = ("tpu", "float32", "conversion", "quantization", "device", "edge")
        self.steps = dict.fromkeys(steps, 0.0)
        self.signal = 0.0
        self.has_split = self.has_float = False
        self._powers: list[tuple[float, float]] = []  # of the reference, of what the device may do

    def add_move(self, truth: Array, host: Array, found: Array, may_move: float) -> None:
        """Take what the device has moved one sample by; no element counts with more than it may."""
        wide = [np.asarray(one).astype(np.float64) for one in (truth, host, found)]
        finite = np.logical_and.reduce([np.isfinite(one) for one in wide])
        t, h, d = (one[finite] for one in wide)
        move = np.clip(d - h, -may_move, may_move)
        self._powers.append((float(t @ t), float(move @ move)))

    def moved_share(self) -> float | None:
        """The largest of a sample, over the norm of the reference; None where it is not known."""
        if not self._powers:
            return None
        signal, noise = zip(*self._powers, strict=True)
        return largest_share(signal, noise)

    def split(self, quantized: bool) -> ErrorSplit | None:
        if not self.has_split:
            return None
        db = {name: _db(self.signal, noise) for name, noise in self.steps.items()}
        return ErrorSplit(
            float32_db=db["float32"],
            conversion_db=db["conversion"] if not quantized or self.has_float else None,
            quantization_db=db["quantization"] if quantized else None,
            tpu_db=db["tpu"] if self.is_tpu else None,
            edge_db=db["edge"],
            device_db=db["device"] if self.host_meter is not None else None,
        )


def _db(signal: float, noise: float) -> float:
    if math.isnan(noise) or math.isnan(signal):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def _run(
    session: Session | CachedSession,
    actual: Signature,
    reference: Reference,
    side: _Side,
    done: Any,
    given: list[Tensors] | None = None,  # takes all outputs
    first: list[Tensors] | None = None,  # takes those of the first sample, as they are stored
) -> dict[str, _Output]:
    expected = reference.signature
    outputs = {spec.name: _new_output(spec.name, side) for spec in expected.outputs}
    specs = {spec.name: spec for spec in actual.outputs}
    feeds = (
        fit_sample(reference.inputs(i), actual, reference.sample_ids[i])
        for i in range(len(reference))
    )
    writer = _writer(side, reference)
    runs = session.run(actual.name, feeds)
    for index, stored in zip(range(len(reference)), runs, strict=True):
        got = {name: real_values(stored[name], specs[name]) for name in outputs}
        _gather(outputs, expected, reference, side, index, got)
        if first is not None and not index:
            first.append({name: np.array(value) for name, value in stored.items()})
        if given is not None:
            given.append({name: np.array(value) for name, value in got.items()})
        if writer is not None:
            writer.add(Sample(id=reference.sample_ids[index], inputs={}), got)
        done(index + 1)
    if writer is not None:
        writer.close()
    return outputs


#: Precision labels of a TPU; every other one is a CPU's or somebody's own.
TPU_LABELS = ("bf16-default", "bf16_3x-high", "f32-highest")


def _is_tpu(reference: Reference) -> bool:
    return reference.precision in TPU_LABELS


def _new_output(name: str, side: _Side) -> _Output:
    bound = side.floor[name].max_abs if name in side.floor else None
    return _Output(bound, side.eager is not None, side.is_tpu, side.host is not None)


def _gather(
    outputs: Mapping[str, _Output],
    expected: Signature,
    reference: Reference,
    side: _Side,
    index: int,
    got: Mapping[str, Array],
) -> None:
    """Take one sample into the meters of all outputs."""
    truth = reference.outputs(index)
    oracle = side.oracle.outputs(index) if side.oracle else None
    base = side.float_outputs.outputs(index) if side.float_outputs else {}
    eager = side.eager.outputs(index) if side.eager else truth
    identity = reference.sample_ids[index]
    for name, output in outputs.items():
        found = _as_shaped(got[name], truth[name], expected.output(name))
        _compare(output, identity, expected.output(name), truth[name], found)
        if output.fault is not None:
            continue
        if output.eager_meter is not None:
            output.eager_meter.add(identity, eager[name], found)
        host = side.host[index][name] if side.host is not None else None
        if output.host_meter is not None and host is not None:
            output.host_meter.add(identity, host, found)
            if name in side.may_move and expected.output(name).dtype.startswith("float"):
                output.add_move(truth[name], host, found, side.may_move[name])
        if oracle is not None:
            steps = _Steps(oracle[name], truth[name], eager[name], base.get(name), host, found)
            _add_split(output, steps, not is_base(side.recipe))


def _as_shaped(found: Array, truth: Array, spec: TensorSpec) -> Array:
    """A tap's values in the reference's shape, where only axes of size 1 differ."""
    if spec.shape or np.shape(found) == np.shape(truth):
        return found
    ours, theirs = ([n for n in np.shape(one) if n != 1] for one in (found, truth))
    return np.reshape(found, np.shape(truth)) if ours == theirs else found


def _writer(side: _Side, reference: Reference) -> ReferenceWriter | None:
    if side.keep is None:
        return None
    return ReferenceWriter(
        side.keep,
        reference.signature,
        provider="litert",
        precision="f32",
        data=reference.data,
        borrow_inputs="..",
    )


def fit_sample(inputs: Tensors, actual: Signature, sample: str) -> dict[str, Array]:
    """The sample in the file's own types; floats are quantized where the file wants integers."""
    wanted = {spec.name: spec for spec in actual.inputs}
    if set(wanted) != set(inputs):
        raise DataError(
            f"sample '{sample}' has the inputs {sorted(inputs)}, the file takes {sorted(wanted)}",
            do="name the arrays as the file's inputs (`tpu2edge inspect` lists them)",
        )
    return {name: _as_stored(np.asarray(inputs[name]), wanted[name], sample) for name in wanted}


def _as_stored(array: Array, spec: TensorSpec, sample: str) -> Array:
    fixed = [(i, s) for i, s in enumerate(spec.shape) if isinstance(s, int)]
    if len(spec.shape) != array.ndim or any(array.shape[i] != size for i, size in fixed):
        raise DataError(
            f"sample '{sample}': input '{spec.name}' has the shape {list(array.shape)}, "
            f"expected {[str(s) if not isinstance(s, int) else s for s in spec.shape]}",
            place=Place(tensor=spec.name),
        )
    dtype = np.dtype(spec.dtype)
    if spec.scale is not None and array.dtype.kind == "f" and dtype.kind in "iu":
        if np.isnan(array).any():
            raise DataError(
                f"sample '{sample}': input '{spec.name}' holds NaN, which {spec.dtype} cannot",
                place=Place(tensor=spec.name),
            )
        info = np.iinfo(dtype)
        stored = np.round(np.asarray(array, np.float64) / spec.scale) + (spec.zero_point or 0)
        return np.clip(stored, info.min, info.max).astype(dtype)
    if array.dtype == dtype:
        return array
    if not _narrows(array, dtype):
        raise DataError(
            f"sample '{sample}': input '{spec.name}' is {array.dtype}, expected {spec.dtype}, and "
            "its values do not fit",
            place=Place(tensor=spec.name),
        )
    return array.astype(dtype)


def _narrows(array: Array, dtype: np.dtype[Any]) -> bool:
    if array.dtype.kind != dtype.kind:
        return False
    if dtype.kind in "iu" and array.size:
        values = np.asarray(array)
        info = np.iinfo(dtype)
        return bool(values.min() >= info.min and values.max() <= info.max)
    return True


def real_values(stored: Array, spec: TensorSpec) -> Array:
    """What a file gave, as real numbers: scale * (q - zero point) where it is quantized."""
    if spec.scale is None or np.asarray(stored).dtype.kind not in "iu":
        return stored
    values = np.asarray(stored).astype(np.float32)
    return (values - np.float32(spec.zero_point or 0)) * np.float32(spec.scale)


def _compare(output: _Output, sample: str, spec: TensorSpec, truth: Array, got: Array) -> None:
    if output.fault is not None:
        return
    if np.shape(truth) != np.shape(got):
        output.fault = Reason(
            code="shape",
            text=f"sample '{sample}': shape {list(np.shape(got))}, "
            f"expected {list(np.shape(truth))}",
        )
        return
    kind = np.asarray(got).dtype
    if kind.name != spec.dtype:
        output.fault = Reason(
            code="dtype", text=f"sample '{sample}': type {kind.name}, expected {spec.dtype}"
        )
        return
    output.meter.add(sample, truth, got)


@dataclass(frozen=True, slots=True)
class _Steps:
    """One output of one sample at every station of the two branches."""

    oracle: Array
    reference: Array
    eager: Array
    floating: Array | None  # the float file's, when the file is quantized
    host: Array | None  # the file's own on this machine, when it runs on another device
    edge: Array


def _add_split(output: _Output, at: _Steps, quantized: bool) -> None:
    if np.asarray(at.oracle).dtype.kind != "f" or np.shape(at.oracle) != np.shape(at.edge):
        return
    here = at.edge if at.host is None else at.host
    stations = [at.oracle, at.reference, at.eager, at.edge, here]
    output.has_float = output.has_float or at.floating is not None
    if quantized and at.floating is not None:
        stations.append(at.floating)
    wide = [np.asarray(station).astype(np.float64) for station in stations]
    finite = np.logical_and.reduce([np.isfinite(station) for station in wide])
    o, r, e, d, h, *rest = (station[finite] for station in wide)
    # Without the float file's outputs the conversion counts into the quantization.
    c = h if not quantized else (rest[0] if rest else e)
    output.has_split = True
    output.signal += float(o @ o)
    steps = output.steps
    steps["tpu"] += float(np.sum((r - o) ** 2))
    steps["float32"] += float(np.sum((e - o) ** 2))
    steps["edge"] += float(np.sum((d - o) ** 2))
    steps["conversion"] += float(np.sum((c - e) ** 2))
    steps["quantization"] += float(np.sum((h - c) ** 2))
    steps["device"] += float(np.sum((d - h) ** 2))


def noise_floor(
    reference: Reference, oracle: Reference, *, outputs: Sequence[Tensors] | None = None
) -> dict[str, OutputMetrics]:
    """The reference compared with the float64 oracle, per output: what its own rounding makes.

    A file that is no further from the oracle than this is as right as the reference. ``outputs``
    take the place of the reference's own: what it should hold, as far as that can be computed.
    """
    meters: dict[str, OutputMeter] = {}
    for index, identity in enumerate(reference.sample_ids):
        truth = oracle.outputs(index)
        found = reference.outputs(index) if outputs is None else outputs[index]
        for name in found:  # the outputs, and the values before their activations
            if name in truth:
                meters.setdefault(name, OutputMeter()).add(identity, truth[name], found[name])
    return {name: meter.metrics() for name, meter in meters.items()}


# ------------------------------------------------------------------------------------- judging


@dataclass(frozen=True, slots=True)
class _Cases:
    model: EdgeModel
    device: str
    expected: Signature
    budget: Budget
    conversion: Budget | None = None

    def _case(self, output: str, verdict: Verdict, **fields: Any) -> CaseReport:
        is_float = self.expected.output(output).dtype.startswith("float")
        return CaseReport(
            model=self.model.path.name,
            recipe=self.model.recipe,
            device=self.device,
            signature=self.expected.name,
            output=output,
            verdict=verdict,
            budget=self.budget.describe(output, is_float=is_float),
            **fields,
        )

    def all(self, verdict: Verdict, reason: Reason) -> tuple[CaseReport, ...]:
        return tuple(
            self._case(spec.name, verdict, reasons=(reason,)) for spec in self.expected.outputs
        )

    def judge(self, gathered: _Output, name: str, constant: frozenset[str]) -> CaseReport:
        if gathered.fault is not None:
            return self._case(name, Verdict.FAIL, reasons=(gathered.fault,))
        meter = gathered.meter
        metrics = meter.metrics()
        is_float = self.expected.output(name).dtype.startswith("float")
        faults = list(self._faults(meter, metrics, name, is_float, constant))
        if gathered.eager_meter is not None:
            faults += self._conversion_faults(gathered.eager_meter, name, is_float)
        flags = list(_flags(meter, name, is_float, constant))
        return self._case(
            name,
            Verdict.FAIL if faults else Verdict.PASS,
            reasons=tuple(faults + flags),
            metrics=metrics,
            split=gathered.split(not is_base(self.model.recipe)),
            against_eager=gathered.eager_meter.metrics() if gathered.eager_meter else None,
            against_host=gathered.host_meter.metrics() if gathered.host_meter else None,
        )

    def judge_task(self, value: TaskValue) -> CaseReport:
        """The case of the user's own metric."""
        faults = value.faults(self.budget.task)
        reasons = [Reason(code="budget", text=text) for text in faults]
        reasons.append(Reason(code="flag-task", text=str(value)))
        return CaseReport(
            model=self.model.path.name,
            recipe=self.model.recipe,
            device=self.device,
            signature=self.expected.name,
            output=f"metric {value.name}",
            verdict=Verdict.FAIL if faults else Verdict.PASS,
            budget=",".join(map(str, self.budget.task)) or "none",
            reasons=tuple(reasons),
            task=value,
        )

    def _conversion_faults(self, meter: OutputMeter, name: str, is_float: bool) -> Iterator[Reason]:
        """What the float file breaks against the float32 module: the conversion's own fault."""
        if self.conversion is None or not is_base(self.model.recipe):
            return
        metrics = meter.metrics()
        for bound in self.conversion.bounds(name, is_float=is_float):
            if text := bound.check(metrics):
                where = (
                    f"against the torch module in float32 (worst sample '{metrics.worst_sample}')"
                )
                yield Reason(code="conversion", text=f"conversion: {text} {where}")

    def _faults(
        self,
        meter: OutputMeter,
        metrics: OutputMetrics,
        name: str,
        is_float: bool,
        constant: frozenset[str],
    ) -> Iterator[Reason]:
        if meter.pattern_fault is not None:
            counts, sample = meter.pattern_fault
            yield Reason(code="nan-pattern", text=f"sample '{sample}': {counts}")
        if is_float and name not in constant:
            if meter.reference_constant:
                yield Reason(
                    code="constant-reference",
                    text=f"the reference gives {metrics.reference_min:g} everywhere in all "
                    f"{metrics.samples} samples, so nothing is proved: give other --inputs, or "
                    f"--budget '{name}:allow_constant'",
                )
            elif meter.candidate_constant:
                yield Reason(
                    code="constant-output",
                    text="the file gives the same value everywhere, the reference does not",
                )
        bounds = self.budget.bounds(name, is_float=is_float)
        if not any(bound.applies(metrics) for bound in bounds):
            wanted = self.budget.describe(name, is_float=is_float)
            yield Reason(
                code="no-bound",
                text=f"no bound of its budget ({wanted}) applies to this output, so nothing is "
                f"proved: give --budget '{name}:mismatch<=0' or the like",
            )
        for bound in bounds:
            if text := bound.check(metrics):
                where = f" (worst sample '{metrics.worst_sample}')"
                yield Reason(code="budget", text=text + where)


def _flags(
    meter: OutputMeter, name: str, is_float: bool, constant: frozenset[str]
) -> Iterator[Reason]:
    if meter.reference_constant and (not is_float or name in constant):
        yield Reason(
            code="flag-constant", text="the same value in all samples: this output proves little"
        )
