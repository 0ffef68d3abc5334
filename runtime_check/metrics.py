"""Distances between a reference and a candidate, in float64, per output over all samples.

NaN and infinity are compared as patterns first and never averaged away; then every number is taken
over the elements that are finite in the reference. The formulas:

- SQNR of a sample: 10 log10(sum ref^2 / sum (ref - x)^2) in dB (power ratio), +inf when equal. A
  sample whose own power is below 1e-8 of the mean power over the samples counts with that floor, so
  that an almost silent sample does not decide for all. Given are the worst and the median sample.
- range error: max |ref - x| over all samples, divided by (max ref - min ref) over all samples.
- cosine of a sample: sum ref x / (|ref| |x|), 1 when both are zero; it is blind to scale and nearly
  blind to a dropped transpose, so no default budget rests on it.
- top-1: share of rows (last axis) whose arg-max is the same. A row whose two largest reference values
  are closer than twice the reference's own error (its rounding on a TPU) may flip without a fault;
  ``top1_decided`` is the share over the other rows only.
- mismatch: share of elements that differ at all; what counts for integers and booleans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tpu2edge.types import Array

__all__ = ["OutputMeter", "OutputMetrics", "cosine", "largest_share", "sqnr_db"]

_POWER_FLOOR = 1e-8  # of the mean signal power over the samples


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputMetrics:
    """How far one output is from its reference, over all samples; see the module for formulas."""

    samples: int
    sqnr_db_worst: float | None  # None for integers and booleans
    sqnr_db_median: float | None
    max_abs: float
    range_error: float | None
    cosine_worst: float | None
    top1: float | None  # None when rows have fewer than two elements
    mismatch: float
    worst_sample: str  # the sample with the worst SQNR (or the largest mismatch)
    reference_min: float
    reference_max: float
    top1_decided: float | None = (
        None  # as top1, over rows that the reference's own error cannot flip
    )
    decided_rows: int | None = None  # how many of those rows there are; None: every row counts

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinities and NaN as strings, since JSON has neither."""
        return {name: _plain(value) for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OutputMetrics:
        """The inverse of :meth:`to_json`."""
        return cls(**{name: _number(value) for name, value in data.items()})


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def sqnr_db(reference: Array, candidate: Array) -> float:
    """Signal-to-quantization-noise ratio in dB: 10 log10(sum ref^2 / sum (ref - x)^2).

    Equal arrays give +inf; a NaN in either gives NaN, which passes no bound.

    >>> round(sqnr_db(np.array([3.0, 4.0]), np.array([3.0, 4.5])), 1)
    20.0
    """
    ref = np.asarray(reference, np.float64)
    with np.errstate(invalid="ignore"):  # inf - inf is NaN, and that is the answer
        difference = ref - np.asarray(candidate, np.float64)
    return _ratio_db(float(np.vdot(ref, ref)), float(np.vdot(difference, difference)))


def _ratio_db(signal: float, noise: float) -> float:
    if math.isnan(signal) or math.isnan(noise):
        return math.nan
    if noise == 0.0:
        return math.inf
    if signal == 0.0:
        return -math.inf
    return 10.0 * math.log10(signal / noise)


def cosine(reference: Array, candidate: Array) -> float:
    """Cosine of the angle between two arrays seen as vectors; 1 if both are zero, 0 if one is.

    >>> cosine(np.array([1.0, 0.0]), np.array([3.0, 0.0]))
    1.0
    """
    a = np.asarray(reference, np.float64).ravel()
    b = np.asarray(candidate, np.float64).ravel()
    norm = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    if norm == 0.0:
        return 1.0 if not a.any() and not b.any() else 0.0
    return float(a @ b) / norm


def largest_share(signal: Sequence[float], noise: Sequence[float]) -> float:
    """The largest sqrt(noise / signal) of the samples' powers, an almost silent one as for the SQNR.

    >>> largest_share([4.0, 1.0], [0.01, 0.01])
    0.1
    """
    floor = _POWER_FLOOR * sum(signal) / max(len(signal), 1)
    powers = [(max(one, floor), other) for one, other in zip(signal, noise, strict=True)]
    return math.sqrt(max((n / s for s, n in powers if s > 0), default=0.0))


def _all_are(array: NDArray[Any], value: np.generic) -> bool:
    return bool(np.all(np.isnan(array) if value != value else array == value))


class OutputMeter:
    """Takes one output sample by sample and keeps numbers only, so memory does not grow."""

    def __init__(self, error_bound: float | None = None) -> None:
        self._error_bound = error_bound  # largest error of the reference itself, in its own unit
        self._decided = self._same_decided = 0
        self._ids: list[str] = []
        self._signal: list[float] = []
        self._noise: list[float] = []
        self._cosine: list[float] = []
        self._wrong: list[float] = []
        self._max_abs = 0.0
        self._low, self._high = math.inf, -math.inf
        self._rows = self._same_rows = 0
        self._elements = self._differing = 0
        self._float = False
        self._first: np.generic | None = None
        self._first_candidate: np.generic | None = None
        self.reference_constant = True
        self.candidate_constant = True
        #: Why the patterns of NaN and infinity differ, and in which sample; None while they agree.
        self.pattern_fault: tuple[str, str] | None = None

    def add(self, sample: str, reference: Array, candidate: Array) -> None:
        """Compare one sample; the shapes must be equal (the caller has looked)."""
        ref_raw, got_raw = np.asarray(reference), np.asarray(candidate)
        self._float = self._float or ref_raw.dtype.kind == "f"
        self._watch_constancy(ref_raw, got_raw)
        ref, got = ref_raw.astype(np.float64), got_raw.astype(np.float64)
        self._watch_patterns(sample, ref, got)
        finite = np.isfinite(ref) & np.isfinite(got)
        if not finite.all():
            ref, got = ref[finite], got[finite]
        difference = ref - got
        self._ids.append(sample)
        self._signal.append(float(np.vdot(ref, ref)))
        self._noise.append(float(np.vdot(difference, difference)))
        self._cosine.append(cosine(ref, got))
        if ref.size:
            self._max_abs = max(self._max_abs, float(np.abs(difference).max()))
            self._low = min(self._low, float(ref.min()))
            self._high = max(self._high, float(ref.max()))
        differing = int(np.count_nonzero(difference))
        self._wrong.append(differing / max(ref.size, 1))
        self._differing += differing
        self._elements += ref.size
        if ref_raw.ndim and ref_raw.shape[-1] > 1 and ref_raw.size:
            self._rows += ref_raw.size // ref_raw.shape[-1]
            same = np.argmax(ref_raw, axis=-1) == np.argmax(got_raw, axis=-1)
            self._same_rows += int(np.count_nonzero(same))
            if self._error_bound is not None:
                top = np.partition(ref_raw.astype(np.float64), -2, axis=-1)[..., -2:]
                decided = top[..., 1] - top[..., 0] > 2 * self._error_bound
                self._decided += int(np.count_nonzero(decided))
                self._same_decided += int(np.count_nonzero(decided & same))

    def _watch_constancy(self, ref: NDArray[Any], got: NDArray[Any]) -> None:
        if not ref.size:
            return
        if self._first is None or self._first_candidate is None:
            self._first, self._first_candidate = ref.reshape(-1)[0], got.reshape(-1)[0]
        if self.reference_constant:
            assert self._first is not None
            self.reference_constant = _all_are(ref, self._first)
        if self.candidate_constant:
            assert self._first_candidate is not None
            self.candidate_constant = _all_are(got, self._first_candidate)

    def _watch_patterns(self, sample: str, ref: NDArray[Any], got: NDArray[Any]) -> None:
        if self.pattern_fault is not None:
            return
        for what, left, right in (
            ("NaN", np.isnan(ref), np.isnan(got)),
            ("+inf", np.isposinf(ref), np.isposinf(got)),
            ("-inf", np.isneginf(ref), np.isneginf(got)),
        ):
            if not np.array_equal(left, right):
                counts = f"{int(left.sum())} {what} in the reference, {int(right.sum())} here"
                self.pattern_fault = (counts, sample)
                return

    def metrics(self) -> OutputMetrics:
        """The numbers over all samples so far; ValueError if there were none."""
        if not self._ids:
            raise ValueError("no sample was compared")
        floor = _POWER_FLOOR * sum(self._signal) / len(self._signal)
        ratios = [
            _ratio_db(max(signal, floor), noise)
            for signal, noise in zip(self._signal, self._noise, strict=True)
        ]
        spread = self._high - self._low
        range_error = None
        if self._float:
            empty = 0.0 if self._max_abs == 0 else math.inf
            range_error = self._max_abs / spread if spread > 0 else empty
        keyed = ratios if self._float else [-wrong for wrong in self._wrong]
        worst = min(range(len(keyed)), key=lambda i: (keyed[i], i))
        return OutputMetrics(
            samples=len(self._ids),
            sqnr_db_worst=min(ratios) if self._float else None,
            sqnr_db_median=float(np.median(ratios)) if self._float else None,
            max_abs=self._max_abs,
            range_error=range_error,
            cosine_worst=min(self._cosine) if self._float else None,
            top1=self._same_rows / self._rows if self._rows else None,
            mismatch=self._differing / max(self._elements, 1),
            worst_sample=self._ids[worst],
            reference_min=self._low,
            reference_max=self._high,
            top1_decided=self._same_decided / self._decided if self._decided else None,
            decided_rows=self._decided if self._error_bound is not None and self._rows else None,
        )
