"""Cases of a parity report as data: numbers, verdict, reasons and the error split."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tpu2edge.runtime_check.metrics import OutputMetrics
from tpu2edge.runtime_check.task_metric import TaskValue
from tpu2edge.types import Verdict

__all__ = [
    "REPORT_FORMAT_VERSION",
    "CaseReport",
    "ErrorSplit",
    "ParityReport",
    "Reason",
]

# 1 (2026-11-30): first version.
REPORT_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a case is not a PASS, or (code ``flag-…``) what to know about one that is."""

    code: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSplit:
    """The size of each step of the error, as SQNR in dB against the float64 oracle, pooled.

    Two branches leave the oracle: ``tpu_db`` is reference - oracle (the TPU's own rounding; None
    when the reference is the eager module), and eager - oracle (``float32_db``), float ``.tflite``
    - eager (``conversion_db``), quantized - float ``.tflite`` (``quantization_db``; None for a float
    model, and with the conversion in it where the float file's outputs are not known) lead to the
    file, which is ``edge_db`` away from the oracle. The smaller the number, the larger the step.
    """

    float32_db: float
    conversion_db: float | None = None
    quantization_db: float | None = None
    tpu_db: float | None = None
    edge_db: float | None = None
    device_db: float | None = None  # device - host, the same file; None on the host itself

    @property
    def as_right_as_tpu(self) -> bool:
        """Whether the file is no further from the oracle than the TPU itself is."""
        if self.tpu_db is None or self.edge_db is None:
            return False
        return self.edge_db >= self.tpu_db

    @property
    def largest(self) -> str:
        """The step that spends most of the budget: tpu, float32, conversion, quantization, device."""
        steps = {
            "tpu": self.tpu_db,
            "float32": self.float32_db,
            "conversion": self.conversion_db,
            "quantization": self.quantization_db,
            "device": self.device_db,
        }
        known = {name: value for name, value in steps.items() if value is not None}
        return min(known, key=lambda name: known[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseReport:
    """One output of one model on one device: numbers, verdict and reasons."""

    model: str  # file name
    recipe: str
    device: str
    signature: str
    output: str
    verdict: Verdict
    budget: str
    reasons: tuple[Reason, ...] = ()
    metrics: OutputMetrics | None = None
    split: ErrorSplit | None = None
    against_eager: OutputMetrics | None = None  # when the reference is not the eager module itself
    task: TaskValue | None = None  # a case of the user's own metric, over all outputs
    against_host: OutputMetrics | None = None  # on another device: the same file on this machine

    @property
    def in_words(self) -> str | None:
        """Which step spends most of the error and what that means; None without a split."""
        return _in_words(self)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        split = None
        if self.split is not None:
            split = {
                "float32_db": _plain(self.split.float32_db),
                "conversion_db": _plain(self.split.conversion_db),
                "quantization_db": _plain(self.split.quantization_db),
                "tpu_db": _plain(self.split.tpu_db),
                "edge_db": _plain(self.split.edge_db),
                **(
                    {"device_db": _plain(self.split.device_db)}
                    if self.split.device_db is not None
                    else {}
                ),
                "largest": self.split.largest,
            }
        return {
            "model": self.model,
            "recipe": self.recipe,
            "device": self.device,
            "signature": self.signature,
            "output": self.output,
            "verdict": str(self.verdict),
            "budget": self.budget,
            "reasons": [{"code": r.code, "text": r.text} for r in self.reasons],
            "metrics": self.metrics.to_json() if self.metrics else None,
            "against_eager": self.against_eager.to_json() if self.against_eager else None,
            "error_split": split,
            "in_words": _in_words(self),
            **({"task": self.task.to_json()} if self.task else {}),
            **({"against_host": self.against_host.to_json()} if self.against_host else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CaseReport:
        """The inverse of :meth:`to_json`."""
        split = data.get("error_split")
        return cls(
            model=data["model"],
            recipe=data["recipe"],
            device=data["device"],
            signature=data["signature"],
            output=data["output"],
            verdict=Verdict(data["verdict"]),
            budget=data["budget"],
            reasons=tuple(Reason(**item) for item in data["reasons"]),
            metrics=OutputMetrics.from_json(data["metrics"]) if data["metrics"] else None,
            split=None
            if split is None
            else ErrorSplit(
                float32_db=float(split["float32_db"]),
                conversion_db=_optional(split["conversion_db"]),
                quantization_db=_optional(split["quantization_db"]),
                tpu_db=_optional(split.get("tpu_db")),
                edge_db=_optional(split.get("edge_db")),
                device_db=_optional(split.get("device_db")),
            ),
            against_eager=OutputMetrics.from_json(data["against_eager"])
            if data.get("against_eager")
            else None,
            task=TaskValue(**data["task"]) if data.get("task") else None,
            against_host=OutputMetrics.from_json(data["against_host"])
            if data.get("against_host")
            else None,
        )


def _plain(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParityReport:
    """All cases of a check; ``verdict`` is ERROR if a device broke, else FAIL if a case failed."""

    cases: tuple[CaseReport, ...]
    reference: str  # one line: who, which precision, how many samples of what data
    data_kind: str  # "synthetic", "files", …
    samples: int
    times: Mapping[str, Any] = field(default_factory=dict)  # per model file and device, ms
    # By the same keys: DeviceChecks.to_json() with the model's name, recipe and signature.
    devices: Mapping[str, Any] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the cases; a report without cases is an ERROR."""
        verdicts = {case.verdict for case in self.cases}
        if Verdict.ERROR in verdicts or not verdicts:
            return Verdict.ERROR
        return Verdict.FAIL if Verdict.FAIL in verdicts else Verdict.PASS

    @property
    def words(self) -> tuple[str, ...]:
        """Whose error it is, one sentence for each model and output that has an error split."""
        return tuple(
            f"{case.recipe} on {case.device}, '{case.output}': {text}"
            for case in self.cases
            if (text := _in_words(case)) is not None
        )

    @property
    def exit_code(self) -> int:
        """0 all PASS, 1 a FAIL, 4 an ERROR."""
        return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.ERROR: 4}[self.verdict]

    @property
    def device_words(self) -> tuple[str, ...]:
        """Where a device's numbers give another verdict than this machine's, one sentence each."""
        host = {
            (c.model, c.signature, c.output): c.verdict for c in self.cases if c.device == "host"
        }
        found: list[str] = []
        for case in self.cases:
            here = host.get((case.model, case.signature, case.output))
            if case.device == "host" or here is None or here is case.verdict:
                continue
            if Verdict.ERROR in (here, case.verdict):  # it broke: that says nothing of its numbers
                continue
            text = (
                f"{case.recipe}, '{case.output}': {here} on host, {case.verdict} on {case.device}"
            )
            if case.against_host is not None and case.against_host.range_error is not None:
                text += (
                    f", whose kernels move it by {case.against_host.range_error:.2g} of its range"
                )
            found.append(text)
        return tuple(found)

    def case(
        self,
        output: str,
        *,
        recipe: str = "float32",
        device: str = "host",
        signature: str | None = None,
    ) -> CaseReport:
        """The case of one output, of the first signature that has it; KeyError if there is none."""
        for case in self.cases:
            if (case.output, case.recipe, case.device) == (output, recipe, device) and (
                signature in (None, case.signature)
            ):
                return case
        raise KeyError((output, recipe, device, signature))

    def to_json(self, *, times: bool = True) -> dict[str, Any]:
        """Plain data; without ``times`` the same check gives the same data."""
        data: dict[str, Any] = {
            "kind": "tpu2edge-parity",
            "format_version": REPORT_FORMAT_VERSION,
            "verdict": str(self.verdict),
            "reference": self.reference,
            "data": self.data_kind,
            "samples": self.samples,
            "cases": [case.to_json() for case in self.cases],
        }
        if words := self.device_words:
            data["device_words"] = list(words)
        if times:
            data["times"] = dict(self.times)
            if self.devices:
                data["devices"] = dict(self.devices)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ParityReport:
        """The inverse of :meth:`to_json`."""
        return cls(
            cases=tuple(CaseReport.from_json(item) for item in data["cases"]),
            reference=data["reference"],
            data_kind=data["data"],
            samples=data["samples"],
            times=data.get("times", {}),
            devices=data.get("devices", {}),
        )

    def merged(self, other: ParityReport) -> ParityReport:
        """Both reports as one; the line on the reference is this one's."""
        return replace(
            self,
            cases=self.cases + other.cases,
            times={**self.times, **other.times},
            devices={**self.devices, **other.devices},
        )


_STEP_WORDS = {
    "tpu": "the TPU's own rounding",
    "float32": "rounding to float32",
    "conversion": "the conversion",
    "quantization": "the quantization",
    "device": "the device's kernels",
}


def _in_words(case: CaseReport) -> str | None:
    """Which step spends most of the error, how large the others are, and what that means."""
    split = case.split
    if split is None:
        return None
    steps = {
        name: value for name in _STEP_WORDS if (value := getattr(split, f"{name}_db")) is not None
    }
    largest = split.largest
    others = ", ".join(f"{name} {_shown(v)}" for name, v in steps.items() if name != largest)
    text = f"the largest step of the error is {_STEP_WORDS[largest]}: {_shown(steps[largest])}"
    text += f" ({others})" if others else ""
    if split.tpu_db is not None and split.edge_db is not None:
        text += (
            f"; from float64 the TPU is {_shown(split.tpu_db)} away, the file "
            f"{_shown(split.edge_db)}"
        )
        if split.as_right_as_tpu:
            text += ": the file is as right as the TPU"
    return text


def _shown(value: float) -> str:
    return f"{value:.1f} dB" if math.isfinite(value) else f"{value} dB"
