"""The smallest (or fastest) mixed recipe within a budget: ``--recipe auto``.

The search is a function of what it measures, and of nothing else: no clock and no random number
decides which file comes next. Every measurement goes into the checkpoint at once, so that a search
that was killed is run again from the start with all answers at hand, and ends as if it had not
been.

1. The float file and the plain recipes are measured. From now on there is a best file on disk.
2. Units (see sensitivity.py) are measured alone, at the level that matters most for this budget.
3. The cheapest assignment whose noises add up to what the budget allows is computed; noises it
   rests on that are only guessed are measured, until none is left.
4. That file is made and measured; how far the sum was off corrects the allowance; again from 3.
5. From the best file, single exchanges and pairs that would save bytes are tried.
6. If a static recipe would cost less than the best file, or only static levels were asked for: ops
   without weights become units, too, each is measured alone in integers, and 3 to 5 come again.
7. The best candidates are measured on the held-out samples. What fails there raises the bar, and
   the search goes on.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tpu2edge.errors import OptionError, QuantizationError
from tpu2edge.files import canonical_json, sha256_of, temporary_beside, write_atomically
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.quantize.apply import Ranges
from tpu2edge.quantize.measuring import (
    Bench,
    Evaluation,
    Evaluator,
    Memo,
    QuantizerLike,
    TimeIsOut,
    remove_dead,
    scratch_place,
)
from tpu2edge.quantize.moments import Moments
from tpu2edge.quantize.recipes import Recipe, recipe
from tpu2edge.quantize.sensitivity import (
    FLOAT,
    LEVELS,
    Assignment,
    NoiseModel,
    Unit,
    between_of,
    cheapest,
    producers_of,
    rules_of,
    shared_bytes,
    units_of,
)
from tpu2edge.quantize.splicing import Splicer
from tpu2edge.types import Progress, no_progress

__all__ = [
    "Candidate",
    "Evaluation",
    "Evaluator",
    "Obstacle",
    "QuantizerLike",
    "SearchResult",
    "pareto",
    "search",
]

Goal = Literal["size", "latency"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One file that was measured in full; ``ranges`` names the estimator of a static recipe's."""

    recipe: Recipe
    ranges: str | None
    evaluation: Evaluation  # on the samples of the search
    held_out: Evaluation | None = None
    levels: Mapping[str, int] = field(
        default_factory=dict
    )  # units at each level; {}: a whole recipe

    @property
    def met(self) -> bool:
        """Whether the budget is met on all samples it was measured on."""
        return self.evaluation.budget_margin >= 0 and (
            self.held_out is None or self.held_out.budget_margin >= 0
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Obstacle:
    """A unit that stands in the way: alone, at its ``level``, its SQNR is ``sqnr_db``."""

    tensors: tuple[str, ...]  # names of its weights in the file
    scope: str
    op: str
    level: str
    sqnr_db: float
    share: float  # of the noise of the file in question


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What a search came to. ``best`` meets the budget if ``met``, else it is the nearest miss."""

    met: bool
    best: Candidate
    recipe: Recipe  # of the best file byte for byte, with what the quantizer did instead where it had to
    sha256: str
    rows: tuple[Candidate, ...]  # all that were measured in full, the smallest first
    #: The noisiest units of ``best``; if not met: what must get quieter. None if float32 itself misses.
    obstacles: tuple[Obstacle, ...]
    evaluations: int  # runs of the evaluator, of earlier parts of a resumed search too
    evaluations_now: int
    seconds: float
    finished: bool  # False: the time was out
    float32: Candidate


def pareto(rows: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """Those that no other beats in size, SQNR and latency at once, the smallest first."""
    kept: list[Candidate] = []
    for row in rows:
        mine = _figures(row)
        if not any(
            all(a <= b for a, b in zip(_figures(other), mine, strict=True))
            and _figures(other) != mine
            for other in rows
        ):
            kept.append(row)
    return tuple(sorted(kept, key=_figures))


def _figures(row: Candidate) -> tuple[float, float, float]:
    e = row.evaluation
    return (e.size_bytes, -e.sqnr_db, e.latency_ms)


def search(
    source: Path,
    target: Path,
    *,
    quantizer: QuantizerLike,
    evaluator: Evaluator,
    ranges: Mapping[str, Ranges] | None = None,
    moments: Moments | None = None,
    levels: Iterable[str] | None = None,
    optimize: Goal = "size",
    slowest: float | None = None,
    largest: float | None = None,
    time_limit_s: float | None = None,
    max_evaluations: int | None = None,
    checkpoint: Path | None = None,
    fingerprint: str = "",
    progress: Progress = no_progress,
) -> SearchResult:
    """Write to ``target`` the best file within the evaluator's budget, and tell how it was found.

    ``target`` and the recipe beside it (``target`` with the suffix ``.recipe.json``) are replaced
    in one rename each whenever a better file is known.

    Args:
        source: the float file.
        target: where the best file goes.
        quantizer: makes the files; it holds ``source``.
        evaluator: measures them.
        ranges: ranges of activations by estimator; static levels are left out without them.
        moments: of what linear layers read; levels of GPTQ and OSCAR are left out without them.
        levels: names of LEVELS to choose from, and no other for what can have one of them; all that
            can be had if None.
        optimize: the fewest bytes, or the shortest run.
        slowest: the longest run that a file may take, in units of the float file's; any if None.
            With it the answer depends on latencies, which are not the same every time.
        largest: the most bytes that a file may have, in units of the float file's; any if None.
        time_limit_s: after this, no evaluation is begun but those that the best file's held-out
            figures need.
        max_evaluations: the same, counted.
        checkpoint: a file that keeps all that was measured; if it is there, it is gone on with.
        fingerprint: of what the evaluator compares with (samples, reference, budget): a checkpoint
            with another one is refused.
        progress: told what is under way.

    Raises:
        OptionError: an unknown level, or a checkpoint of another search.
        QuantizationError: not even the plain recipes can be applied.
    """
    if levels is not None:
        levels = tuple(levels)
        unknown = [level for level in levels if level not in LEVELS]
        if unknown:
            raise OptionError(f"unknown level '{unknown[0]}'", do=f"known: {', '.join(LEVELS)}")
        for level in levels:
            lacks = LEVELS[level].activations and not ranges and "the ranges of the activations"
            lacks = lacks or (LEVELS[level].moments and not moments and "moments of them")
            if lacks:
                raise QuantizationError(
                    f"level '{level}' needs calibration: {lacks}",
                    do="give calibration data, or choose other levels",
                    step="quantize",
                )
    if optimize not in ("size", "latency"):
        raise OptionError(f"cannot optimize '{optimize}'", do="known: size, latency")
    place = scratch_place(source, target)
    remove_dead(place, _PREFIX)
    with (
        tempfile.TemporaryDirectory(prefix=f"{_PREFIX}{os.getpid()}-", dir=place) as folder,
        Bench(
            source,
            Path(folder),
            quantizer=quantizer,
            ranges=dict(ranges or {}),
            moments=moments,
            memo=Memo(checkpoint, source, fingerprint),
            time_limit_s=time_limit_s,
            max_evaluations=max_evaluations,
        ) as bench,
    ):
        run = _Search(
            source=source,
            target=target,
            bench=bench,
            evaluator=evaluator,
            levels=levels,
            goal=optimize,
            slowest=slowest,
            largest=largest,
            progress=progress,
        )
        return run.run()


# Of the folder for files that are only measured; the process's number follows.
_PREFIX = ".tpu2edge-search-"

# Plain recipes to begin with, by the level that they give to all units.
_WHOLE = {
    "float16": "float16",
    "int8-dynamic": "dynamic_wi8_afp32",
    "int8-dynamic-oscar": "dynamic_wi8_afp32-oscar",
    "int8-weights": "default_af32w8float",
    "int8-weights-gptq": "default_af32w8float-gptq",
    "int8-dynamic-hadamard": "dynamic_wi8c_hr_afp32",
    "int4-dynamic": "int4",
}

# Plain static recipes, by the level that they give to all ops.
_STATIC = {"int8-static": "int8-static", "int16-static": "int16-static"}
_STATIC_PARTS = 64  # each costs a run; more than that are not tried unless static was asked for

# Levels that these recipes give to what cannot have theirs.
_INSTEAD = {
    "int4-dynamic": ("int8-dynamic",),
    "int8-dynamic-oscar": ("int8-dynamic",),
    "int8-weights-gptq": ("int8-weights",),
}

# Share of the allowed noise from which on a guessed noise is not good enough.
_UNKNOWN_SHARE = 0.02  # of a unit that was never measured
_DERIVED_SHARE = 0.10  # of one that was, at another level

_HOPE = 0.7  # what a guessed noise is multiplied by before it is measured
_HOPE_SMALL = 0.3
_MISSES = 40  # steps of 1.3 in the noise: 46 dB
_ALIKE_TIMES = 0.15  # shares of the float file's that two runs of one file may differ by
_ALIKE = 0.05  # times, as shares of the float file's
_OBSTACLES = 8
_ASTRAY = 2.0  # by how much a sum of noises may be off before its parts are measured again
_QUICK_MACS = 20_000_000  # models below are so quick that probes take all samples too
_SPLICED = 8 << 20  # files below are made as quickly as they are patched

_TIE = 0.003
_GPTQ_SHARE = 0.1  # of a file's noise: below, GPTQ is not what fails on other samples
_OVERFIT = 30.0
_CHANCES = 12  # files below the bar that are run on held-out samples all the same
_LIKE = 24
_HURRY = 3.0  # float files' bytes that all of its time is worth at most
_FITS = 10  # rounds of steps 3 and 4
_PATIENCE = 3  # exchanges in a row that gain nothing before step 5 ends
_SMALL = 12  # up to so many units, exchanges are cheap and few: more are tried
_PATIENCE_SMALL = 24
_TELLING = 0.05
_NEAR = 1.1  # times the allowed noise: what is predicted to be beyond is not tried
_WORTH = 0.003  # share of the file that an exchange must save
_WORTH_SMALL = 0.001


@dataclass(kw_only=True)
class _Search:
    source: Path
    target: Path
    bench: Bench
    evaluator: Evaluator
    levels: tuple[str, ...] | None
    goal: Goal
    slowest: float | None
    largest: float | None
    progress: Progress

    def __post_init__(self) -> None:
        self.file = read_tflite(self.source)
        known = self.bench.moments
        self.algorithms = [
            algorithm
            for algorithm, found in (
                ("GPTQ", known.hessians if known else ()),
                ("OSCAR", known.squares if known else ()),
            )
            if found
        ]
        self.units = units_of(self.file, self.levels, moments=self.algorithms)
        self.macs = sum(unit.macs for unit in self.units) or 1
        self.model = NoiseModel(self.units)
        self.rows: dict[str, Candidate] = {}
        self.assignments: dict[str, Assignment] = {}
        self.best: Candidate | None = None
        self.on_disk = ""
        self.published = Recipe(name=FLOAT, rules=())  # makes what is there, byte for byte
        self.floor = 0.0
        self.kept_size = self.source.stat().st_size
        probe = getattr(self.evaluator, "probe", None)
        self.probe: Callable[[Path], Evaluation] | None = probe if self.macs > _QUICK_MACS else None
        self.bar = 0.0  # margin that the search samples must show, raised by held-out failures
        self.weights = len(self.units)  # the units that have some; others come behind them
        self.statics = [
            level
            for level in LEVELS
            if self.bench.ranges
            and LEVELS[level].activations
            and (self.levels is None or level in self.levels)
        ]
        self.estimator = min(self.bench.ranges, default=None)
        self.opened = False  # static levels are among the units'
        self.producers: list[frozenset[int | None]] = []
        self.fully: set[tuple[int, str]] = set()  # measured alone, on all samples
        self.float_ms = math.inf
        self.added_times: dict[tuple[str, str], float] = {}  # by all units of an op at a level
        self.hurry = _TIE  # share of the float file's bytes that all of its time is worth
        self.overfit = 1.0  # by how much GPTQ is noisier on samples that it has not seen
        self.scale = 1.0  # what sums of noises have to be multiplied by
        self.splicer: Splicer | None = None
        if self.source.stat().st_size >= _SPLICED:
            patched = self.bench.place.with_name("patched.tflite")
            self.splicer = Splicer(self.file, patched, self._whole_file)

    # ---------------------------------------------------------------------------- measuring

    def _whole_file(self, level: str) -> Path:
        """A file that has all units at a level, to take weights from."""
        return self.bench.beside(
            f"{level}.tflite",
            Recipe(name="auto", rules=rules_of(self.units, self._everywhere(level))),
        )

    def _full(
        self,
        what: Recipe,
        ranges: str | None = None,
        assignment: Assignment | None = None,
        *,
        whole: bool = False,
    ) -> Candidate:
        """The figures of one file on all samples of the search; it may become the best."""
        key = self.bench.key(what, ranges, "full")
        if key in self.rows:
            return self.rows[key]
        evaluation = self.bench.measure(
            what, ranges, "full", lambda path: self.evaluator(path, held_out=False)
        )
        counts: dict[str, int] = {}
        for level in () if whole else (assignment or ())[: self.weights]:
            counts[level] = counts.get(level, 0) + 1
        row = Candidate(
            recipe=what,
            ranges=ranges if what.needs_ranges else None,
            evaluation=evaluation,
            levels=counts,
        )
        self.rows[key] = row
        if assignment is not None:
            self.assignments[key] = assignment
        self._consider(row)
        self.progress("search", len(self.bench.memo.measured), None)
        return row

    def _consider(self, row: Candidate) -> None:
        margin = self._margin(row)
        if math.isnan(margin) or not row.met or not self._allows(row):
            return
        if margin < self.bar and row.held_out is None:
            return
        if self.best is None or self._cost(row) < self._cost(self.best):
            self.best = row
            self._publish(row)

    def _publish(self, row: Candidate) -> None:
        """Put the file and its recipe on disk, unless they are there."""
        key = self.bench.key(row.recipe, row.ranges, "full")
        if key == self.on_disk:
            return
        self.bench.build(row.recipe, row.ranges)
        self.published = self.bench.made_by
        with temporary_beside(self.target) as temporary:
            shutil.copyfile(self.bench.place, temporary)
            temporary.replace(self.target)
        write_atomically(
            self.target.with_suffix(".recipe.json"), canonical_json(self.published.to_json())
        )
        self.on_disk = key

    def _cost(self, row: Candidate) -> tuple[float, float]:
        e = row.evaluation
        if self.goal == "latency":
            # In parts of the float file's: a hundredth faster is not worth twice the bytes.
            return (math.ceil(e.latency_ms / self.float_ms / _ALIKE), e.size_bytes)
        return (e.size_bytes + _TIE * self._usual_time(row) * self.kept_size, e.size_bytes)

    def _usual_time(self, row: Candidate) -> float:
        """By LEVELS' figures, as a share of float32's: the same on every machine."""
        assignment = self.assignments.get(self.bench.key(row.recipe, row.ranges, "full"))
        if assignment is None:
            whole = next((one for one, name in _STATIC.items() if name == row.recipe.name), FLOAT)
            return LEVELS[whole].time
        return self._total_time(assignment) * self.macs / sum(unit.macs for unit in self.units)

    def _allows(self, row: Candidate) -> bool:
        """Whether it is as small and as fast as was asked for, and has the levels."""
        if not row.recipe.rules and self.levels is not None and FLOAT not in self.levels:
            return False
        return self._small_enough(row) and self._fast_enough(row)

    def _small_enough(self, row: Candidate) -> bool:
        size = row.evaluation.size_bytes
        return self.largest is None or size <= self.largest * self.source.stat().st_size

    def _fast_enough(self, row: Candidate) -> bool:
        if self.slowest is None or not row.recipe.rules:
            return True
        return row.evaluation.latency_ms <= self.slowest * self.float_ms

    def _time(self, index: int, level: str) -> float:
        """What a unit takes at a level, as a share of the float file's time.

        By usual figures, so that what is the smallest does not hang on how busy the machine is; by
        measured ones where time is what was asked for.
        """
        unit = self.units[index]
        share = unit.macs / self.macs
        usual = LEVELS[level].time_of(unit.op)
        like = LEVELS[level].like or level
        added = self.added_times.get((unit.op, like))
        if added is None or level == FLOAT or not unit.macs:
            return share * usual
        ratio = usual / LEVELS[like].time_of(unit.op)
        all_of_op = sum(one.macs for one in self.units if one.op == unit.op)
        return max(0.02 * share, (share + added * unit.macs / all_of_op) * ratio)

    def _noise(self, evaluation: Evaluation) -> float:
        if math.isnan(evaluation.sqnr_db):
            return math.inf
        return max(0.0, 10 ** (-evaluation.sqnr_db / 10) - self.floor)

    def _probe(self, unit: int, level: str, *, quick: bool = True) -> None:
        """Measure one unit at a level, all others float; not ``quick``: on all samples."""
        quick = quick and self.probe is not None
        if (unit, level) in (self.model.measured if quick else self.fully):
            return
        assignment = tuple(level if index == unit else FLOAT for index in range(len(self.units)))
        alone = Recipe(name="auto", rules=rules_of(self.units, assignment))
        ranges = self.estimator if alone.needs_ranges else None
        if not quick:
            self.fully.add((unit, level))
        run, kind = self.probe, "probe"
        if not quick or run is None:
            run, kind = (lambda path: self.evaluator(path, held_out=False)), "full"
        splicer = self.splicer if LEVELS[level].dequantizes else None
        make = None
        if splicer is not None and splicer.possible(self.units[unit]):
            make, kind = (lambda: splicer.put(self.units[unit], level)), f"spliced {kind}"
        try:
            evaluation = self.bench.measure(alone, ranges, kind, run, make)
        except QuantizationError:  # upstream cannot, whatever its policy says
            self.model.measured[unit, level] = math.inf
            return
        noise = 10 ** (-evaluation.sqnr_db / 10) - self.floor
        self.model.measured[unit, level] = max(noise, 1e-15) if noise == noise else math.inf
        if make is None and not LEVELS[level].activations:  # QUANTIZE ops do not add up
            self.model.bytes[unit, level] = (
                evaluation.size_bytes - self.kept_size - shared_bytes(self.units, assignment)
            )
        self.progress("search", len(self.bench.memo.measured), None)

    # -------------------------------------------------------------------------------- steps

    def run(self) -> SearchResult:
        finished = True
        if not self.timed:  # what is made meanwhile takes some of the machine
            self.bench.expect(self._wholes().values())
        float32 = self._full_unlimited()
        try:
            self._plain()
            self._mixes()
        except TimeIsOut:
            finished = False
        best, met = self._finish(float32)
        return self._result(best, met, finished, float32)

    def _full_unlimited(self) -> Candidate:
        self.bench.unlimited = True
        row = self._full(Recipe(name=FLOAT, rules=()))
        self.bench.unlimited = False
        floor = 10 ** (-row.evaluation.sqnr_db / 10)
        self.floor = floor if math.isfinite(floor) else 0.0
        self.float_ms = row.evaluation.latency_ms
        return row

    @property
    def timed(self) -> bool:
        """Whether measured times decide."""
        return self.goal == "latency" or self.slowest is not None

    @property
    def small(self) -> bool:
        """Whether exchanges are so few and cheap that more are tried."""
        return self.weights <= _SMALL

    def _offered(self, level: str) -> bool:
        return any(level in unit.levels for unit in self.units)

    def _plain(self) -> None:
        refused: list[QuantizationError] = []
        for level, whole in self._wholes().items():
            try:
                row = self._full(whole, None, self._everywhere(level), whole=True)
            except QuantizationError as err:
                refused.append(err)
                continue
            self.model.totals[level] = self._noise(row.evaluation)
        for level, name in _STATIC.items():
            # LiteRT has no fast kernels for 16 bits: not run unless it was asked for.
            if level not in self.statics or (self.levels is None and level == "int16-static"):
                continue
            known = level == "int16-static" and "int8-static" in self.model.totals
            for estimator in [self.estimator] if known else sorted(self.bench.ranges):
                try:
                    row = self._full(recipe(name), estimator)
                except QuantizationError as err:
                    refused.append(err)
                    continue
                noise = self._noise(row.evaluation)
                if noise < self.model.totals.get(level, math.inf):
                    self.model.totals[level], self.estimator = noise, estimator
        if refused and len(self.rows) == 1:
            raise refused[0]
        if self.timed:
            self._time_ops(_WHOLE)

    def _wholes(self) -> dict[str, Recipe]:
        """The plain recipes to begin with."""
        return {
            level: recipe(name)
            for level, name in _WHOLE.items()
            if self._offered(level) and not self._not_worth_it(level)
        }

    def _not_worth_it(self, level: str) -> bool:
        """A rotation of all layers: twice as slow as OSCAR, at about the same noise."""
        return LEVELS[level].rotates and "OSCAR" in self.algorithms

    def _time_ops(self, levels: Iterable[str]) -> None:
        """What each kind of op gains or loses at each level, all others of the file float."""
        kinds = {unit.op for unit in self.units[: self.weights]}
        for kind, level in itertools.product(sorted(kinds), levels):
            assignment = self._joined(
                tuple(
                    one if unit.op == kind or not unit.elements else FLOAT
                    for unit, one in zip(self.units, self._everywhere(level), strict=True)
                )
            )
            if level not in assignment[: self.weights]:
                continue
            try:
                row = self._mix(assignment)
            except QuantizationError:
                continue
            took = row.evaluation.latency_ms
            if 0 < took < math.inf and 0 < self.float_ms < math.inf:
                added = took / self.float_ms - 1
                # Weights that become float when the file is loaded cost no time after that.
                self.added_times[kind, level] = 0.0 if abs(added) < _ALIKE_TIMES else added

    def _everywhere(self, level: str) -> Assignment:
        """What the plain recipe of a level does to each unit."""
        return tuple(
            next((one for one in (level, *_INSTEAD.get(level, ())) if one in unit.levels), FLOAT)
            for unit in self.units
        )

    def _mixes(self) -> None:
        if self.levels is not None and self.statics:
            self._open_static()
        if not any(len(unit.levels) > 1 for unit in self.units):
            return
        self._kept()
        self._pivot()
        self._learn_overfit()
        while True:
            known = len(self.rows)
            self._pivot()
            self._improve()
            if self._static_pays():
                self._open_static()
                self._improve()
            if self.best is None:
                self._nearest_miss()
            if self._confirmed() or (self.best is None and len(self.rows) == known):
                if self.small:
                    self._second_chances()
                return

    def _improve(self) -> None:
        """Steps 3 to 5."""
        while True:
            before = self.best
            self._fit()
            self._retreat()
            self._exchange()
            if self.best is before or not self.small:
                return

    def _nearest_miss(self) -> None:
        """The quietest file of the size that was asked for, when it is not quiet enough."""
        allowed = self._allowed()
        if allowed <= 0 or self.largest is None:
            return
        limit = self.largest * self.source.stat().st_size - self.kept_size
        for _ in range(_MISSES):
            allowed *= 1.3
            assignment = self._cheapest(allowed / self.scale)
            if assignment is None or self._total_size(assignment) > limit:
                continue
            settled = self._settled(allowed / self.scale)
            if settled is not None and self._small_enough(row := self._mix(settled)):
                self._reconcile(settled, self._noise(row.evaluation))
                return

    def _total_size(self, assignment: Assignment) -> int:
        sizes = [self.model.size(index, level) for index, level in enumerate(assignment)]
        return sum(sizes) + shared_bytes(self.units, assignment)

    def _kept(self) -> None:
        """Bytes of the float file as ai-edge-quantizer writes it, which others are compared to."""
        size = self.bench.memo.measured.get("kept")
        if size is None:
            keep_all = Recipe(name=FLOAT, rules=(LEVELS[FLOAT].rule(".*"),))
            self.bench.build(keep_all, None)
            size = Evaluation(
                budget_margin=0.0,
                sqnr_db=0.0,
                latency_ms=0.0,
                size_bytes=self.bench.place.stat().st_size,
            )
            self.bench.memo.put("kept", size, self.bench.seconds)
        self.kept_size = size.size_bytes

    def _allowed(self) -> float:
        """Noise at which the budget is just met, by what is known now."""
        margins = [
            (row.evaluation.sqnr_db, row.evaluation.budget_margin - self.bar)
            for row in self.rows.values()
            if math.isfinite(row.evaluation.sqnr_db) and math.isfinite(row.evaluation.budget_margin)
        ]
        if not margins:
            return 0.0
        met = [sqnr for sqnr, margin in margins if margin >= 0]
        missed = [sqnr for sqnr, margin in margins if margin < 0]
        sqnr, margin = min(margins, key=lambda pair: abs(pair[1]))
        limit = sqnr - margin
        if (met and limit > min(met) + 1e-6) or (missed and limit <= max(missed) - 1e-6):
            # The margin is not counted in dB of SQNR: between what passed and what did not.
            if met and missed and max(missed) < min(met):
                limit = (max(missed) + min(met)) / 2
            elif met:
                limit = min(met)
            else:
                limit = max(missed) + 1.0
        return max(0.0, float(10 ** (-limit / 10)) - self.floor)

    def _pivot(self) -> None:
        """Measure every unit at the level whose whole recipe is nearest to the allowance."""
        allowed = self._allowed()
        known = {level: total for level, total in self.model.totals.items() if 0 < total < math.inf}
        if not known or allowed <= 0:
            return
        pivot = min(known, key=lambda level: abs(math.log(known[level] / allowed)))
        total = sum(unit.elements for unit in self.units)
        for index, unit in sorted(
            enumerate(self.units), key=lambda pair: (-pair[1].elements, pair[0])
        ):
            level = pivot if pivot in unit.levels else self._nearest(unit, pivot)
            if level != FLOAT and unit.elements >= total * 1e-3:
                self._probe(index, level)

    def _nearest(self, unit: Unit, level: str) -> str:
        worth = LEVELS[level].noise
        others = [other for other in unit.levels if other != FLOAT]
        if not others:
            return FLOAT
        return min(others, key=lambda other: abs(math.log(LEVELS[other].noise / worth)))

    def _price(self, index: int, level: str) -> float:
        """What a level costs: bytes, or time; a little of the other decides ties."""
        size = self.model.size(index, level)
        time = self._time(index, level) * self.kept_size
        return time + 0.01 * size if self.goal == "latency" else size + self.hurry * time

    def _cheapest(self, allowed: float) -> Assignment | None:
        """Of those with rotations and those without: the matrices do not add up over the units."""
        found: list[tuple[float, Assignment]] = []
        for rotated in (False, True):
            levels = [
                [level for level in self._choices(i) if rotated or not LEVELS[level].rotates]
                for i in range(len(self.units))
            ]
            picks = cheapest(
                [
                    [self._hoped(i, level, allowed) for level in some]
                    for i, some in enumerate(levels)
                ],
                [[self._price(i, level) for level in some] for i, some in enumerate(levels)],
                allowed,
            )
            if picks is not None:
                assignment = tuple(some[pick] for some, pick in zip(levels, picks, strict=True))
                found.append((self._total_price(assignment), assignment))
        return self._joined(min(found)[1]) if found else None

    def _choices(self, index: int) -> list[str]:
        """The levels of a unit; float32 only if it was named, or there is no other."""
        levels = list(self.units[index].levels)
        if self.levels is None or FLOAT in self.levels:
            return levels
        others = [
            level
            for level in levels
            if level != FLOAT and self.model.measured.get((index, level), 0.0) < math.inf
        ]
        return others or [FLOAT]

    def _quietest_choices(self) -> Assignment:
        return tuple(
            min(self._choices(index), key=lambda level: self.model.noise(index, level))
            for index in range(len(self.units))
        )

    def _joined(self, assignment: Assignment) -> Assignment:
        """The same, ops without weights static only behind such as are: others gain nothing."""
        if not self.opened or (self.levels is not None and FLOAT not in self.levels):
            return assignment
        levels = list(assignment)
        changed = True
        while changed:
            changed = False
            for index in range(self.weights, len(levels)):
                bits = LEVELS[levels[index]].activations
                if bits and any(
                    maker is None or LEVELS[levels[maker]].activations != bits
                    for maker in self.producers[index]
                ):
                    levels[index] = FLOAT
                    changed = True
        return tuple(levels)

    def _hoped(self, unit: int, level: str, allowed: float) -> float:
        """The noise, a guessed one that will be measured taken for less than it likely is."""
        noise = self.model.noise(unit, level) * self._flattery(level)
        if (unit, level) in self.model.measured or noise <= allowed * self._negligible(unit):
            return noise
        return noise * (_HOPE_SMALL if self.small else _HOPE)

    def _total_price(self, assignment: Assignment) -> float:
        prices = [self._price(index, level) for index, level in enumerate(assignment)]
        return math.fsum(prices) + shared_bytes(self.units, assignment)

    def _settled(self, allowed: float) -> Assignment | None:
        """The cheapest assignment, once nothing that it rests on is a guess."""
        assignment: Assignment | None = None
        for _ in range(3 * len(LEVELS)):
            assignment = self._cheapest(allowed)
            guessed = [
                (self.model.noise(index, level) * self._flattery(level), index, level)
                for index, level in enumerate(assignment or self._quietest_choices())
                if level != FLOAT
                and (index, level) not in self.model.measured
                and self.model.noise(index, level) * self._flattery(level)
                > allowed * self._negligible(index)
            ]
            if not guessed:
                return assignment
            for _, index, level in sorted(guessed, reverse=True):
                self._probe(index, level)
        return assignment

    def _negligible(self, unit: int) -> float:
        """Share of the allowed noise up to which a guess of the unit's noise is good enough."""
        derived = any((unit, level) in self.model.measured for level in LEVELS)
        share = _DERIVED_SHARE if derived else _UNKNOWN_SHARE
        return share / 5 if self.small else share

    def _mix(self, assignment: Assignment) -> Candidate:
        mix = Recipe(name="auto", rules=rules_of(self.units, assignment))
        return self._full(mix, self.estimator if mix.needs_ranges else None, assignment)

    def _fit(self) -> None:
        """Steps 3 and 4."""
        tried: set[Assignment] = set()
        nudge = 1.0
        for _ in range(_FITS):
            allowed = self._allowed()
            if allowed <= 0:
                return
            assignment = self._settled(allowed / self.scale * nudge)
            if assignment is None:
                if tried:
                    return
                assignment = self._quietest_choices()  # the sum may be far too high
            if assignment in tried:
                if self._hurry_up(assignment):
                    continue
                passes = self._margin(self._mix(assignment)) >= self.bar
                nudge *= 1.05 if passes else 0.95
                continue
            tried.add(assignment)
            row = self._mix(assignment)
            actual = self._noise(row.evaluation)
            self._reconcile(assignment, actual)
            sum_ = self.model.total(assignment)
            if sum_ > 0 and math.isfinite(actual):
                self.scale = min(20.0, max(0.05, actual / sum_))
            near = actual * self._flattered(assignment) >= 0.97 * self._allowed()
            if self._margin(row) >= self.bar and near:
                if self._hurry_up(assignment):
                    continue
                return

    def _retreat(self) -> None:
        """Where no sum came out right: less and less noise, until a file passes."""
        for part in (0.9, 0.8, 0.65, 0.5, 0.35, 0.2):
            allowed = self._allowed()
            if allowed <= 0 or self._best_mix() is not None:
                return
            assignment = self._settled(allowed / self.scale * part)
            if assignment is None:
                return
            if self._margin(self._mix(assignment)) >= self.bar:
                self._hurry_up(assignment)

    def _reconcile(self, assignment: Assignment, actual: float) -> None:
        """Measure the parts of a sum anew, on all samples, if it is far from what came out."""
        sum_ = self.model.total(assignment) * self.scale
        if 1 / _ASTRAY <= actual / max(sum_, 1e-20) <= _ASTRAY:
            return
        for index, level in enumerate(assignment):
            if level != FLOAT:
                self._probe(index, level, quick=False)

    def _hurry_up(self, assignment: Assignment) -> bool:
        """Whether time is worth more from now on, since this assignment is too slow.

        So much more that the cheapest assignment is fast enough, by what this one took.
        """
        row = self._mix(assignment)
        if self._fast_enough(row) or self.hurry > _HURRY:
            return False
        assert self.slowest is not None
        took = row.evaluation.latency_ms / self.float_ms
        slower = max(1.0, took / self._total_time(assignment))
        allowed = self._allowed() / self.scale
        while self.hurry <= _HURRY:
            self.hurry *= 1.5
            quicker = self._cheapest(allowed)
            if quicker is None or self._total_time(quicker) * slower <= self.slowest:
                break
        return True

    def _total_time(self, assignment: Assignment) -> float:
        return math.fsum(self._time(index, level) for index, level in enumerate(assignment))

    def _exchange(self) -> None:
        """Step 5."""
        few = self.small
        patience = _PATIENCE_SMALL if few else _PATIENCE
        misses = 0
        tried: set[Assignment] = set(self.assignments.values())
        while misses < patience:
            best = self._best_mix()
            if best is None:
                return
            row, current = best
            step = self._next_exchange(row, current, tried)
            if step is None:
                return
            tried.add(step)
            after = self._mix(step)
            self._learn(current, row, step, after)
            improved = (
                self._margin(after) >= self.bar
                and self._allows(after)
                and self._cost(after) < self._cost(row)
            )
            misses = 0 if improved else misses + 1

    def _worth(self, row: Candidate) -> float:
        """Bytes that another file must save to be tried."""
        return row.evaluation.size_bytes * (_WORTH_SMALL if self.small else _WORTH)

    def _best_mix(self) -> tuple[Candidate, Assignment] | None:
        rows = [
            (self._cost(row), key)
            for key, row in self.rows.items()
            if key in self.assignments
            and self._margin(row) >= self.bar
            and row.met
            and self._allows(row)
        ]
        if not rows:
            return None
        key = min(rows)[1]
        return self.rows[key], self.assignments[key]

    def _next_exchange(
        self, row: Candidate, current: Assignment, tried: set[Assignment]
    ) -> Assignment | None:
        """The untried change of one or two units that saves most and is likely to pass."""
        allowed = self._allowed()
        here = self._noise(row.evaluation) * self._flattered(current)
        worth = self._worth(row)
        steps: list[tuple[float, float, int, str]] = []  # saved, noise added, unit, level
        for index in range(len(self.units)):
            for level in self._choices(index):
                if level == current[index]:
                    continue
                saved = self._price(index, current[index]) - self._price(index, level)
                added = self.scale * (
                    self.model.noise(index, level) * self._flattery(level)
                    - self.model.noise(index, current[index]) * self._flattery(current[index])
                )
                if math.isfinite(added):
                    steps.append((saved, added, index, level))
        down = sorted((s for s in steps if s[0] > worth), key=lambda s: -s[0])[:120]
        up = sorted((s for s in steps if s[1] < 0), key=lambda s: s[1])[:120]
        shared = shared_bytes(self.units, current)

        def option(*parts: tuple[float, float, int, str]) -> tuple[float, float, Assignment]:
            changed = list(current)
            for _, _, index, level in parts:
                changed[index] = level
            after = self._joined(tuple(changed))
            saved = sum(part[0] for part in parts) + shared - shared_bytes(self.units, after)
            return saved, sum(part[1] for part in parts), after

        options = [option(step) for step in down]
        options += [
            option(d, u)
            for d, u in itertools.product(down, up)
            if d[2] != u[2]
            and d[0] + u[0] > worth
            and -u[1] > _TELLING * max(d[1], 0.0)  # or else d alone would do as well
            and here + d[1] + u[1] <= _NEAR * allowed
        ]

        def rank(one: tuple[float, float, Assignment]) -> tuple[int, float, Assignment]:
            saved, added, assignment = one
            # Likely to pass first, by what it saves; then those a little over, by how much.
            if here + added <= allowed:
                return (0, -saved, assignment)
            return (1, added, assignment)

        for saved, added, assignment in sorted(options, key=rank):
            if saved > worth and here + added <= _NEAR * allowed and assignment not in tried:
                return assignment
        return None

    def _learn(self, before: Assignment, row: Candidate, after: Assignment, new: Candidate) -> None:
        """Correct the noise of the unit that made most of the difference by what came out."""
        changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        actual = self._noise(new.evaluation) - self._noise(row.evaluation)
        if not math.isfinite(actual):
            return
        steps = {i: self.model.noise(i, after[i]) - self.model.noise(i, before[i]) for i in changed}
        index = max(changed, key=lambda i: steps[i])
        if after[index] == FLOAT:
            return
        rest = math.fsum(step for i, step in steps.items() if i != index)
        noise = self.model.noise(index, before[index]) + actual / self.scale - rest
        self.model.measured[index, after[index]] = max(noise, 1e-15)

    def _static_pays(self) -> bool:
        """Whether a static mix may cost less than the best file: not less than the whole recipe."""
        whole = [row for row in self.rows.values() if row.recipe.name in _STATIC.values()]
        if self.opened or not whole:
            return False
        parts = self.weights + len(between_of(self.file, self.statics))
        cheap = min(self._cost(row) for row in whole)
        return parts <= _STATIC_PARTS and (self.best is None or cheap < self._cost(self.best))

    def _open_static(self) -> None:
        """Step 6: static levels for the units, and units for the ops between them."""
        self.opened = True
        between = between_of(self.file, self.statics)
        self.units = (
            *units_of(self.file, self.levels, calibrated=True, moments=self.algorithms),
            *between,
        )
        self.model.units = self.units
        self.producers = producers_of(self.file, self.units)
        floats = (FLOAT,) * len(between)
        self.assignments = {key: known + floats for key, known in self.assignments.items()}
        for index, unit in enumerate(self.units):
            level = next((one for one in self.statics if one in unit.levels), None)
            if level is not None:
                self._probe(index, level)
        if self.timed:
            self._time_ops(level for level in ("int8-static",) if level in self.statics)

    # ------------------------------------------------------------------------------ the end

    def _held_out(self, row: Candidate) -> Candidate:
        """The same with its figures on the held-out samples."""
        if row.held_out is not None:
            return row
        key = self.bench.key(row.recipe, row.ranges, "full")
        evaluation = self.bench.measure(
            row.recipe, row.ranges, "held-out", lambda path: self.evaluator(path, held_out=True)
        )
        new = self.rows[key] = replace(row, held_out=evaluation)
        return new

    def _confirmed(self) -> bool:
        """Whether the best file holds on the held-out samples; if not, more is asked for now."""
        self._consider_all()
        if self.best is None:
            return True
        best = self._held_out(self.best)
        self.best = best
        if not best.met:
            self._raise_bar(best)
        return best.met

    def _raise_bar(self, failed: Candidate) -> None:
        """Ask for more by what the samples of the search flatter.

        That is what all files lack on others, or, where much of the noise is of GPTQ, which has
        rounded by what these samples said, what GPTQ's noise has to be multiplied by.
        """
        assert failed.held_out is not None
        lacked = -failed.held_out.budget_margin
        before = self.overfit
        self._overfits(failed)
        if self.overfit == before or self._margin(failed) >= self.bar:
            step = min(2.0, max(0.1, lacked)) if math.isfinite(lacked) else 2.0
            self.bar = max(self.bar, self._margin(failed)) + step
        self._consider_all()

    def _second_chances(self) -> None:
        """Held-out figures of smaller files that are below the bar: not all flatter alike."""
        best = self.best
        if best is None:
            return
        self._try_like_those_that_failed(best)
        limit = self._cost(best)[0] - self._worth(best)
        rows = [
            row
            for row in self.rows.values()
            if row.held_out is None
            and row.evaluation.budget_margin >= 0
            and self._allows(row)
            and self._cost(row)[0] <= limit
        ]
        rows.sort(key=lambda row: (-self._margin(row), self._cost(row)))
        for row in rows[:_CHANCES]:
            self._held_out(row)
        self._consider_all()

    def _try_like_those_that_failed(self, best: Candidate) -> None:
        """Run what differs in one unit from files that failed on held-out samples only."""
        raised, self.bar = self.bar, 0.0
        allowed = _NEAR * self._allowed()
        self.bar = raised
        found: dict[Assignment, float] = {}
        for key, current in self.assignments.items():
            row = self.rows[key]
            if row.met or row.evaluation.budget_margin < 0 or self._cost(row) >= self._cost(best):
                continue
            for index in range(len(self.units)):
                for level in self._choices(index):
                    changed = self._joined((*current[:index], level, *current[index + 1 :]))
                    noise = self._noise(row.evaluation) + self.scale * (
                        self.model.noise(index, level) - self.model.noise(index, current[index])
                    )
                    paid = self._total_price(changed) - self._total_price(current)
                    if noise <= allowed and row.evaluation.size_bytes + paid < self._cost(best)[0]:
                        found[changed] = min(noise, found.get(changed, math.inf))
        for assignment in sorted(found, key=lambda one: (found[one], one))[:_LIKE]:
            self._mix(assignment)

    def _learn_overfit(self) -> None:
        """See by the whole recipe what GPTQ is on other samples, before much rests on it."""
        for row in list(self.rows.values()):
            if row.recipe.name == _WHOLE["int8-weights-gptq"]:
                self._overfits(self._held_out(row))

    def _overfits(self, row: Candidate) -> None:
        """Learn of a row with both figures what GPTQ's noise has to be multiplied by."""
        assert row.held_out is not None
        assignment = self.assignments.get(self.bench.key(row.recipe, row.ranges, "full"))
        share = self._share_of_gptq(assignment) if assignment is not None else 0.0
        gap = row.evaluation.sqnr_db - row.held_out.sqnr_db
        if share > _GPTQ_SHARE and 0 < gap < math.inf:
            factor = 1 + (10 ** (gap / 10) - 1) / share
            self.overfit = min(_OVERFIT, max(self.overfit, factor))

    def _consider_all(self) -> None:
        """Choose the best anew: what margins are likely on other samples is known better by now."""
        self.best = None
        for row in sorted(self.rows.values(), key=self._cost):
            self._consider(row)

    def _flattery(self, level: str) -> float:
        """What the noise at a level is on other samples, of what it is on those of the search."""
        return self.overfit if LEVELS[level].moments == "GPTQ" else 1.0

    def _flattered(self, assignment: Assignment) -> float:
        """The same of a whole assignment."""
        return 1 + self._share_of_gptq(assignment) * (self.overfit - 1)

    def _share_of_gptq(self, assignment: Assignment) -> float:
        noises = [self.model.noise(index, level) for index, level in enumerate(assignment)]
        total = math.fsum(noises)
        if not 0 < total < math.inf:
            return 0.0
        of_gptq = (
            noise
            for noise, level in zip(noises, assignment, strict=True)
            if LEVELS[level].moments == "GPTQ"
        )
        return math.fsum(of_gptq) / total

    def _margin(self, row: Candidate) -> float:
        """The margin that is likely on other samples."""
        assignment = self.assignments.get(self.bench.key(row.recipe, row.ranges, "full"))
        if assignment is None or self.overfit == 1.0:
            return row.evaluation.budget_margin
        return row.evaluation.budget_margin - 10 * math.log10(self._flattered(assignment))

    def _finish(self, float32: Candidate) -> tuple[Candidate, bool]:
        """The best that holds on the held-out samples, or the nearest miss."""
        while self.best is not None:
            row = self._held_out(self.best)
            self.best = row
            if row.met:
                self._publish(row)
                return row, True
            self._raise_bar(row)
        rows = [row for row in self.rows.values() if not math.isnan(row.evaluation.budget_margin)]
        quantized = [row for row in rows if row.recipe.rules] or [float32]
        quantized = [row for row in quantized if self._allows(row)] or quantized
        nearest = max(
            quantized, key=lambda row: (row.evaluation.budget_margin, -self._cost(row)[0])
        )
        nearest = self._held_out(nearest)
        self._publish(nearest)
        return nearest, False

    def _result(
        self, best: Candidate, met: bool, finished: bool, float32: Candidate
    ) -> SearchResult:
        key = self.bench.key(best.recipe, best.ranges, "full")
        return SearchResult(
            met=met,
            best=best,
            recipe=self.published,
            sha256=sha256_of(self.target),
            rows=tuple(sorted(self.rows.values(), key=_figures)),
            obstacles=self._obstacles(self.assignments.get(key), met)
            if float32.evaluation.budget_margin >= 0
            else (),
            evaluations=sum(key != "kept" for key in self.bench.memo.measured),
            evaluations_now=self.bench.measured_now,
            seconds=self.bench.seconds,
            finished=finished,
            float32=self.rows[self.bench.key(float32.recipe, None, "full")],
        )

    def _obstacles(self, assignment: Assignment | None, met: bool) -> tuple[Obstacle, ...]:
        """The units that make up the noise, the noisiest first, until the rest would do."""
        if assignment is None:
            assignment = tuple(self._quietest(index) for index in range(len(self.units)))
        noises = [
            (self.model.noise(index, level), index)
            for index, level in enumerate(assignment)
            if level != FLOAT
        ]
        total = math.fsum(noise for noise, _ in noises)
        if not total:
            return ()
        allowed = self._allowed()
        left = total
        found: list[Obstacle] = []
        for noise, index in sorted(noises, reverse=True):
            enough = max(allowed, 0.05 * total * self.scale)
            if len(found) >= _OBSTACLES or (found and not met and left * self.scale <= enough):
                break
            unit = self.units[index]
            found.append(
                Obstacle(
                    tensors=unit.tensors,
                    scope=unit.name,
                    op=unit.op,
                    level=assignment[index],
                    sqnr_db=-10 * math.log10(noise) if noise > 0 else math.inf,
                    share=noise / total if math.isfinite(total) else math.nan,
                )
            )
            left -= noise
        return tuple(found)

    def _quietest(self, index: int) -> str:
        levels = [level for level in self.units[index].levels if level != FLOAT] or [FLOAT]
        return min(levels, key=lambda level: self.model.noise(index, level))
