"""What only running a file on a device shows, besides its numbers: :func:`check_device`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from tpu2edge.runtime_check.devices.client import DEFAULT_TIMEOUT_S, Coverage, Session
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import launch_of
from tpu2edge.types import Array, Tensors

__all__ = ["DeviceChecks", "check_device"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChecks:
    """Figures of one file on one device, for the samples that were given."""

    device: str
    repeatable: bool  # the same input twice gave the same bits
    # output -> largest difference of 1 to N threads / range; nothing where there is one thread only
    thread_range_error: dict[str, float]
    threads: int  # that N
    load_ms: float
    first_ms: float
    steady_ms: float  # the mean of all but the first
    peak_rss_kb: int
    emulated: bool  # then times are no device's times, and memory has the emulator's in it
    delegated: bool | None  # the whole graph is run by the delegate; None: the device does not tell
    coverage: Coverage | None  # this machine's Interpreter and GPUs tell
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        coverage = self.coverage
        return {
            "device": self.device,
            "repeatable": self.repeatable,
            "thread_range_error": self.thread_range_error,
            "threads": self.threads,
            "load_ms": self.load_ms,
            "first_ms": self.first_ms,
            "steady_ms": self.steady_ms,
            "peak_rss_kb": self.peak_rss_kb,
            "emulated": self.emulated,
            "delegated": self.delegated,
            "ops": None if coverage is None else coverage.ops,
            "left_ops": None if coverage is None else coverage.left_ops,
            "left": None if coverage is None else [list(pair) for pair in coverage.left],
            "notes": list(self.notes),
        }


def check_device(
    model: Path,
    profile: Profile,
    signature: str,
    samples: Sequence[Tensors],
    *,
    threads: int = 4,
    log: IO[bytes] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> DeviceChecks:
    """Run ``samples`` once, the first one again, and the first one with ``threads`` threads.

    That every output is written is checked by each run (UnwrittenError).

    Raises:
        DeviceError: the device is not ready, or fails.
        DataError: a sample does not fit.
    """
    launch = launch_of(profile)
    with Session(model, launch=launch, log=log, timeout_s=timeout_s) as session:
        outputs = list(session.run(signature, samples))
        times, peak = dict(session.times), session.peak_rss_kb
        (again,) = session.run(signature, samples[:1])
        repeatable = all(_same(again[name], array) for name, array in outputs[0].items())
        gpu = "GPU" in launch.load.get("accelerators", ())
        tells = gpu or launch.load.get("runtime") == "interpreter"
        coverage = session.coverage() if tells else None
        delegated = session.delegated if coverage is None else not coverage.left_ops
        notes = list(session.notes)
    errors: dict[str, float] = {}
    if "threads" in launch.load:
        with Session(
            model, launch=launch, threads=threads, log=log, timeout_s=timeout_s
        ) as session:
            (parallel,) = session.run(signature, samples[:1])
        errors = {name: _range_error(array, parallel[name]) for name, array in outputs[0].items()}
    count = max(int(times["samples"]) - 1, 1)
    if not repeatable:
        notes.append("the same input gave other outputs the second time")
    if launch.emulated:
        notes.append("times are the emulator's, not a device's")
    return DeviceChecks(
        device=profile.name,
        repeatable=repeatable,
        thread_range_error=errors,
        threads=threads,
        load_ms=times["load_ms"],
        first_ms=times["first_ms"],
        steady_ms=max(times["total_ms"] - times["first_ms"], 0.0) / count,
        peak_rss_kb=peak,
        emulated=launch.emulated,
        delegated=delegated,
        coverage=coverage,
        notes=tuple(notes),
    )


def _same(first: Array, second: Array) -> bool:
    return first.tobytes() == second.tobytes()


def _range_error(wanted: Array, got: Array) -> float:
    """Largest difference over the wanted array's range; infinite where one of them is no number."""
    if not wanted.size:
        return 0.0
    a, b = wanted.astype(np.float64), got.astype(np.float64)
    if not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(a)
    if not finite.any():
        return 0.0
    difference = float(np.abs(a - b)[finite].max())
    spread = float(np.ptp(a[finite])) or float(np.abs(a[finite]).max())
    return difference / spread if spread else difference
