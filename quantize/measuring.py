"""What a search rests on: files made of recipes, measured once each, and what was measured kept.

A checkpoint holds every measurement by what was measured. A search that was killed is run again from
the start with all answers at hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Self

from tpu2edge.errors import BundleError, OptionError
from tpu2edge.files import sha256_of, write_atomically
from tpu2edge.quantize.apply import Ranges
from tpu2edge.quantize.moments import Moments
from tpu2edge.quantize.recipes import Recipe

__all__ = [
    "Bench",
    "Evaluation",
    "Evaluator",
    "Memo",
    "QuantizerLike",
    "TimeIsOut",
    "remove_dead",
    "scratch_place",
]

#: Of the checkpoint. 1: 2026-12-01.
FORMAT_VERSION = 1

# Files up to this size are measured in memory.
_IN_MEMORY = 512 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """How one file did. ``budget_margin`` is the worst bound's distance from its limit, in dB for
    bounds on the SQNR, relative for others; below 0 the budget is not met."""

    budget_margin: float
    sqnr_db: float  # of the worst output and sample
    latency_ms: float
    size_bytes: int
    metrics: Mapping[str, float] = field(default_factory=dict)


class Evaluator(Protocol):
    """Runs a file and compares it with the reference; what a budget is, is its own affair.

    An evaluator may have a method ``probe(model) -> Evaluation`` besides, which takes fewer of the
    search samples and no care with the latency. Single units are measured by it.
    """

    def __call__(self, model: Path, *, held_out: bool) -> Evaluation:
        """The figures on the samples of the search, or on those that are held out from it."""
        ...


class QuantizerLike(Protocol):
    """What makes files of recipes: a Quantizer, best one that remembers."""

    def quantize(
        self,
        target: Path,
        recipe: Recipe,
        ranges: Ranges | None = None,
        *,
        moments: Moments | None = None,
    ) -> Any:
        """Write to ``target`` what ``recipe`` makes of the float file.

        What it returns has a ``recipe`` whose rules give the file byte for byte; None: that one.
        """
        ...


def remove_dead(place: Path, prefix: str) -> None:
    """Remove the folders ``PREFIX<pid>-…`` of processes that are gone: they were killed."""
    for folder in place.glob(f"{prefix}*-*"):
        pid = folder.name.removeprefix(prefix).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(folder, ignore_errors=True)


def scratch_place(source: Path, target: Path) -> Path:
    """Where the files that are only measured go: into memory if they are small beside it.

    A search writes some gigabytes, and a disk that is busy with them is what it would wait for.
    """
    memory = Path("/dev/shm")
    size = source.stat().st_size
    fits = memory.is_dir() and os.access(memory, os.W_OK) and size <= _IN_MEMORY
    if fits and shutil.disk_usage(memory).free >= 8 * size:
        return memory
    return target.parent


class TimeIsOut(Exception):
    """The time is out, or the number of evaluations."""


class Memo:
    """All measurements by what was measured; on disk after each, if there is a file for it.

    Args:
        path: of that file; if it is there, it is gone on with.
        source: the float file.
        fingerprint: of what files are compared with.

    Raises:
        BundleError: the file is damaged.
        OptionError: it belongs to another search.
    """

    def __init__(self, path: Path | None, source: Path, fingerprint: str) -> None:
        self.path = path
        self.head = {
            "format_version": FORMAT_VERSION,
            "source_sha256": sha256_of(source),
            "fingerprint": fingerprint,
        }
        self.measured: dict[str, Evaluation] = {}
        self.seconds = 0.0
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            head = {key: data[key] for key in self.head}
            measured = {key: Evaluation(**value) for key, value in data["measured"].items()}
            seconds = float(data["seconds"])
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise BundleError(
                f"'{path}' is no checkpoint of a search, or a damaged one: {err}",
                do="remove it to begin anew",
            ) from err
        for key, value in self.head.items():
            if head[key] != value:
                raise OptionError(
                    f"the checkpoint '{path}' belongs to another search: its {key} is "
                    f"'{head[key]}', not '{value}'",
                    do="name another file, or remove it to begin anew",
                )
        self.measured, self.seconds = measured, seconds

    def put(self, key: str, evaluation: Evaluation, seconds: float) -> None:
        """Keep one; ``seconds`` is what the search has taken so far."""
        self.measured[key] = evaluation
        if self.path is None:
            return
        rows = {
            name: {
                "budget_margin": e.budget_margin,
                "sqnr_db": e.sqnr_db,
                "latency_ms": e.latency_ms,
                "size_bytes": e.size_bytes,
                "metrics": dict(e.metrics),
            }
            for name, e in self.measured.items()
        }
        # Not canonical_json: an exact result has an infinite SQNR, which JSON proper cannot say.
        text = json.dumps({**self.head, "seconds": seconds, "measured": rows}, indent=1)
        write_atomically(self.path, text)


class Bench:
    """Makes files of recipes, one at a time in one place, and measures each once.

    Args:
        source: the float file.
        folder: for the files, which are gone with it.
        quantizer: makes them.
        ranges: of activations, by estimator.
        moments: of what layers read.
        memo: what is known, and where it is kept.
        time_limit_s: after this nothing new is measured but on held-out samples.
        max_evaluations: the same, counted.
    """

    def __init__(
        self,
        source: Path,
        folder: Path,
        *,
        quantizer: QuantizerLike,
        ranges: Mapping[str, Ranges],
        moments: Moments | None = None,
        memo: Memo,
        time_limit_s: float | None = None,
        max_evaluations: int | None = None,
    ) -> None:
        self.source = source
        self.place = folder / "candidate.tflite"
        self.ranges = ranges
        self.moments = moments
        self.memo = memo
        self.measured_now = 0
        self.unlimited = False
        self._quantizer = quantizer
        self.made_by = Recipe(name="float32", rules=())  # what makes the file in the place, exactly
        self._built = ""  # what lies in the place
        self._pool = ThreadPoolExecutor(max_workers=1)
        self._ahead: tuple[str, Future[Recipe]] | None = None  # what is made for later
        self._upcoming: list[Recipe] = []
        self._started = time.monotonic()
        self._deadline = None if time_limit_s is None else self._started + time_limit_s
        self._max_evaluations = max_evaluations

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._upcoming = []
        self._pool.shutdown(wait=True, cancel_futures=True)

    def expect(self, recipes: Iterable[Recipe]) -> None:
        """These are measured next, in this order: each is made while the one before runs."""
        self._upcoming = [what for what in recipes if not what.needs_ranges]

    @property
    def seconds(self) -> float:
        """Of the search so far, of its earlier runs too."""
        return self.memo.seconds + time.monotonic() - self._started

    def key(self, what: Recipe, ranges: str | None, kind: str) -> str:
        """What one kind of measurement of one file is called."""
        text = json.dumps([what.to_json(), ranges if what.needs_ranges else None])
        return f"{kind} {hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def build(self, what: Recipe, ranges: str | None) -> Path:
        """The file that a recipe makes; it is there until the next one is made."""
        key = self.key(what, ranges, "file")
        if key == self._built:
            return self.place
        self._built = ""
        if self._ahead is not None and self._ahead[0] == key:
            future, self._ahead = self._ahead[1], None
            self.made_by = future.result()
            self._place_ahead.replace(self.place)
        elif what.rules:
            self.made_by = self._quantize(self.place, what, ranges)
        else:
            self.made_by = what
            shutil.copyfile(self.source, self.place)
        self._built = key
        return self.place

    @property
    def _place_ahead(self) -> Path:
        return self.place.with_name("ahead.tflite")

    def _make_ahead(self) -> None:
        while self._upcoming and self._ahead is None:
            what = self._upcoming.pop(0)
            key = self.key(what, None, "file")
            if key != self._built and self.key(what, None, "full") not in self.memo.measured:
                future = self._pool.submit(self._ask, self._place_ahead, what, None)
                self._ahead = (key, future)

    def beside(self, name: str, what: Recipe) -> Path:
        """A file of that name that stays as long as the folder."""
        target = self.place.with_name(name)
        self._quantize(target, what, None)
        return target

    def _quantize(self, target: Path, what: Recipe, ranges: str | None) -> Recipe:
        if self._ahead is not None:  # the quantizer does one thing at a time
            wait([self._ahead[1]])
        return self._ask(target, what, ranges)

    def _ask(self, target: Path, what: Recipe, ranges: str | None) -> Recipe:
        known = self.ranges[ranges] if ranges is not None and what.needs_ranges else None
        applied = self._quantizer.quantize(
            target, what, known, moments=self.moments if what.needs_moments else None
        )
        return applied.recipe if applied is not None else what

    def measure(
        self,
        what: Recipe,
        ranges: str | None,
        kind: str,
        run: Callable[[Path], Evaluation],
        make: Callable[[], Path] | None = None,
    ) -> Evaluation:
        """What ``run`` says of the file, or has said before.

        Args:
            what: the recipe that makes it.
            ranges: the estimator whose ranges a static recipe takes.
            kind: of measurement; "held-out" ones have no limit.
            run: measures it.
            make: makes a file that stands for it, instead of :meth:`build`.

        Raises:
            TimeIsOut: it is not known, and nothing new is to be measured.
        """
        key = self.key(what, ranges, kind)
        known = self.memo.measured.get(key)
        if known is not None:
            return known
        if kind != "held-out" and not self.unlimited:
            self._check_limits()
        path = make() if make is not None else self.build(what, ranges)
        self._make_ahead()
        evaluation = replace(run(path), size_bytes=path.stat().st_size)
        self.measured_now += 1
        self.memo.put(key, evaluation, self.seconds)
        return evaluation

    def _check_limits(self) -> None:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise TimeIsOut
        if self._max_evaluations is not None and len(self.memo.measured) >= self._max_evaluations:
            raise TimeIsOut
