"""What only running a file on a device shows, besides its numbers: :func:`check_device`.

What fails where is said by the caller: a difference is compared with what the profile allows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from tpu2edge.errors import DeviceError
from tpu2edge.runtime_check.devices.client import DEFAULT_TIMEOUT_S, Coverage, Session
from tpu2edge.runtime_check.devices.profiles import Profile
from tpu2edge.runtime_check.devices.runners import launch_of
from tpu2edge.types import Array, Tensors

__all__ = ["DeviceChecks", "check_device", "check_session"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChecks:
    """Figures of one file on one device, for the samples that were given."""

    device: str
    # output -> largest difference / range, where the same input gave other bits the second time
    repeat_range_error: dict[str, float]
    # output -> largest difference of 1 to N threads / range; nothing where there is one thread only
    thread_range_error: dict[str, float]
    threads: int  # that N
    load_ms: float
    first_ms: float
    steady_ms: float | None  # the mean of all but the first; None where there was one sample
    peak_rss_kb: int
    emulated: bool  # then times are no device's times, and memory has the emulator's in it
    delegated: bool | None  # the whole graph is run by the delegate; None: the device does not tell
    coverage: Coverage | None  # this machine's Interpreter and GPUs tell
    notes: tuple[str, ...] = field(default=())

    @property
    def repeatable(self) -> bool:
        """Whether the same input twice gave the same bits."""
        return not self.repeat_range_error

    def to_json(self) -> dict[str, Any]:
        """Plain data; infinities are text."""
        coverage = self.coverage
        return {
            "device": self.device,
            "repeatable": self.repeatable,
            "repeat_range_error": _plain(self.repeat_range_error),
            "thread_range_error": _plain(self.thread_range_error),
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

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceChecks:
        """The inverse of :meth:`to_json`."""
        coverage = None
        if data["ops"] is not None:
            left = tuple((str(op), str(text)) for op, text in data["left"])
            coverage = Coverage(ops=data["ops"], left_ops=data["left_ops"], left=left)
        same = ("device", "threads", "load_ms", "first_ms", "steady_ms", "peak_rss_kb")
        return cls(
            **{name: data[name] for name in (*same, "emulated", "delegated")},
            repeat_range_error={n: float(v) for n, v in data["repeat_range_error"].items()},
            thread_range_error={n: float(v) for n, v in data["thread_range_error"].items()},
            coverage=coverage,
            notes=tuple(data["notes"]),
        )


def _plain(errors: Mapping[str, float]) -> dict[str, float | str]:
    return {name: value if math.isfinite(value) else str(value) for name, value in errors.items()}


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
    with Session(model, launch=launch_of(profile), log=log, timeout_s=timeout_s) as session:
        outputs = list(session.run(signature, samples))
        return check_session(
            session,
            signature,
            samples[0],
            outputs[0],
            threads=(1, threads),
            log=log,
            timeout_s=timeout_s,
        )


def check_session(
    session: Session,
    signature: str,
    sample: Tensors,
    outputs: Tensors,
    *,
    threads: tuple[int, int] = (1, 4),
    times: Mapping[str, float] | None = None,
    peak_rss_kb: int | None = None,
    log: IO[bytes] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> DeviceChecks:
    """The same for a device that has run already: two more runs of one sample, no more.

    Args:
        session: where the file is loaded.
        signature: what was run.
        sample: one input.
        outputs: what it gave, as it is stored; in this process or another one.
        threads: those that the session has, and those to compare with.
        times: of the runs, when they were not this session's.
        peak_rss_kb: likewise.
        log: where the second process's stderr goes.
        timeout_s: how long one request may take.

    Raises:
        DeviceError: the device fails at the second run. With other threads that is a note.
    """
    launch = session.launch
    times = dict(session.times if times is None else times)
    peak = session.peak_rss_kb if peak_rss_kb is None else peak_rss_kb
    (again,) = session.run(signature, [sample])
    repeats = {
        name: _range_error(array, again[name])
        for name, array in outputs.items()
        if not _same(again[name], array)
    }
    gpu = "GPU" in launch.load.get("accelerators", ())
    tells = gpu or launch.load.get("runtime") == "interpreter"
    coverage = session.coverage() if tells else None
    delegated = session.delegated if coverage is None else not coverage.left_ops
    notes = list(session.notes)
    errors: dict[str, float] = {}
    if "threads" in launch.load and threads[0] != threads[1]:
        try:
            with Session(
                session.model, launch=launch, threads=threads[1], log=log, timeout_s=timeout_s
            ) as other:
                (parallel,) = other.run(signature, [sample])
            errors = {name: _range_error(a, parallel[name]) for name, a in outputs.items()}
        except DeviceError as error:
            notes.append(f"with threads = {threads[1]} it breaks: {error.what}")
    if repeats:
        notes.append("the same input gave other outputs the second time")
    if launch.emulated:
        notes.append("times are the emulator's, not a device's")
    count = int(times.get("samples", 0))
    steady = (times["total_ms"] - times["first_ms"]) / (count - 1) if count > 1 else None
    return DeviceChecks(
        device=session.device,
        repeat_range_error=repeats,
        thread_range_error=errors,
        threads=max(threads),
        load_ms=times["load_ms"],
        first_ms=times["first_ms"],
        steady_ms=None if steady is None else max(steady, 0.0),
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
