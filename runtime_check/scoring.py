"""How far many files are inside or outside of a budget, on the same samples, in one worker.

What a search for the smallest file asks again and again: the samples are read once, the worker stays,
and only another file is loaded. The report that a user sees comes from parity.py, not from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Self

import numpy as np

from tpu2edge.errors import DeviceError
from tpu2edge.runtime_check.budget import Budget
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.metrics import OutputMeter, OutputMetrics
from tpu2edge.runtime_check.parity import fit_sample, real_values
from tpu2edge.runtime_check.reference.store import Reference
from tpu2edge.runtime_check.task_metric import TaskMetric, TaskValue
from tpu2edge.types import Array, Tensors

__all__ = ["Score", "Scorer"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One file on some samples.

    ``margin_db`` is the worst bound's distance (Bound.margin_db), negative when the budget is not met;
    ``sqnr_db`` the worst output's worst sample; ``latency_ms`` the least mean of a run of samples.
    """

    margin_db: float
    sqnr_db: float
    latency_ms: float
    size_bytes: int
    outputs: Mapping[str, OutputMetrics] = field(default_factory=dict)  # "signature:output"
    task: TaskValue | None = None
    worst: str = ""  # the bound that decides, in words
    error: str = ""  # the device's, when the file does not run


@dataclass(frozen=True, slots=True)
class _Samples:
    """One signature's samples, read once."""

    signature: str
    ids: tuple[str, ...]
    inputs: tuple[dict[str, Array], ...]
    wanted: tuple[dict[str, Array], ...]


class Scorer:
    """Scores files on samples of one or several references (one a signature).

    Args:
        references: what each signature is held to.
        budget: bounds on each output.
        picks: for each reference the samples to use; all if None.
        metric: the user's own, for the first reference; bounded by ``budget.task``.
        threads: LiteRT threads.
        rounds: how often the samples are run for the latency; the best round counts.
        log: where the worker's stderr goes.
    """

    def __init__(
        self,
        references: Sequence[Reference],
        budget: Budget,
        *,
        picks: Sequence[Sequence[int]] | None = None,
        metric: TaskMetric | None = None,
        threads: int | None = None,
        rounds: int = 1,
        log: IO[bytes] | None = None,
    ) -> None:
        self._budget = budget
        self._metric = metric
        self._threads = threads
        self._rounds = rounds
        self._log = log
        self._session: Session | None = None
        self._samples: list[_Samples] = []
        for place, reference in enumerate(references):
            picked = range(len(reference)) if picks is None else picks[place]
            names = [spec.name for spec in reference.signature.outputs]
            outputs = [reference.outputs(i) for i in picked]
            self._samples.append(
                _Samples(
                    reference.signature.name,
                    tuple(reference.sample_ids[i] for i in picked),
                    tuple(reference.inputs(i) for i in picked),
                    tuple({name: one[name] for name in names} for one in outputs),
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def score(self, model: Path) -> Score:
        """The score of one file; a file that LiteRT refuses, or dies of, has the margin -inf."""
        size = model.stat().st_size
        try:
            return self._score(model, size)
        except DeviceError as error:
            self.close()  # the next file gets a new worker
            return Score(
                margin_db=-math.inf,
                sqnr_db=-math.inf,
                latency_ms=math.inf,
                size_bytes=size,
                error=error.what,
            )

    def outputs(self, model: Path) -> list[list[dict[str, Array]]]:
        """What a file gives: for each reference one dict of real values for each sample.

        Raises:
            DeviceError: it does not run.
        """
        session = self._loaded(model)
        return [self._run(session, samples)[0] for samples in self._samples]

    def _loaded(self, model: Path) -> Session:
        if self._session is None:
            self._session = Session(model, threads=self._threads, log=self._log)
        else:
            self._session.load(model)
        return self._session

    def _run(self, session: Session, samples: _Samples) -> tuple[list[dict[str, Array]], float]:
        actual = next(
            (s for s in session.signatures if s.name == samples.signature), session.signatures[0]
        )
        specs = {spec.name: spec for spec in actual.outputs}
        feeds = [
            fit_sample(one, actual, name)
            for one, name in zip(samples.inputs, samples.ids, strict=True)
        ]
        found = [
            {name: real_values(stored[name], specs[name]) for name in wanted}
            for stored, wanted in zip(session.run(actual.name, feeds), samples.wanted, strict=True)
        ]
        for _ in range(self._rounds - 1):
            for _stored in session.run(actual.name, feeds):
                pass
        latency = session.times.pop("steady_ms", session.times.get("first_ms", math.inf))
        return found, latency

    def _score(self, model: Path, size: int) -> Score:
        session = self._loaded(model)
        outputs: dict[str, OutputMetrics] = {}
        margins: list[tuple[float, str]] = []
        latency = 0.0
        task: TaskValue | None = None
        for place, samples in enumerate(self._samples):
            found, took = self._run(session, samples)
            latency += took
            meters = {name: OutputMeter() for name in samples.wanted[0]}
            for identity, wanted, got in zip(samples.ids, samples.wanted, found, strict=True):
                for name, meter in meters.items():
                    if np.shape(got[name]) != np.shape(wanted[name]):
                        raise DeviceError(
                            f"output '{name}' has the shape {list(np.shape(got[name]))}, expected "
                            f"{list(np.shape(wanted[name]))}"
                        )
                    meter.add(identity, wanted[name], got[name])
            for name, meter in meters.items():
                metrics = meter.metrics()
                outputs[f"{samples.signature}:{name}"] = metrics
                margins += self._margins(name, meter, metrics)
            if self._metric is not None and place == 0:
                task = self._task(samples, found)
                margins += [
                    (bound.margin_db(task.value, task.reference), f"{task.name}: {bound}")
                    for bound in self._budget.task
                ]
        worst = min(margins, key=lambda one: one[0], default=(math.inf, ""))
        decibels = [m.sqnr_db_worst for m in outputs.values() if m.sqnr_db_worst is not None]
        return Score(
            margin_db=worst[0],
            sqnr_db=min(decibels, default=math.inf),
            latency_ms=latency,
            size_bytes=size,
            outputs=outputs,
            task=task,
            worst=worst[1],
        )

    def _margins(
        self, name: str, meter: OutputMeter, metrics: OutputMetrics
    ) -> list[tuple[float, str]]:
        if meter.pattern_fault is not None:
            return [(-math.inf, f"{name}: {meter.pattern_fault[0]}")]
        is_float = metrics.sqnr_db_worst is not None
        return [
            (bound.margin_db(metrics), f"{name}: {bound}")
            for bound in self._budget.bounds(name, is_float=is_float)
            if bound.applies(metrics)
        ]

    def _task(self, samples: _Samples, found: Sequence[Tensors]) -> TaskValue:
        assert self._metric is not None
        return self._metric(found, inputs=samples.inputs, ids=samples.ids, reference=samples.wanted)
