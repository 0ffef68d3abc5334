"""All files of one family: made from one float file by recipes, in parallel, and each checked.

An export and ``tpu2edge quantize`` end in the same way, and this is it: ranges of activations are
measured once, the quantizer's processes work while files are being checked, ``auto`` is searched for
last, and every file gets its budget and its cases.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tpu2edge import references
from tpu2edge.errors import DataError, QuantizationError
from tpu2edge.files import sha256_of
from tpu2edge.options import parse_budget
from tpu2edge.refusals import refuse_unrunnable
from tpu2edge.types import EdgeModel, Note, Progress, Signature, Tensors

if TYPE_CHECKING:
    from tpu2edge.quantize.apply import Applied, Ranges
    from tpu2edge.quantize.calibrate import Calibration
    from tpu2edge.quantize.moments import Moments
    from tpu2edge.quantize.recipes import Recipe
    from tpu2edge.quantize.scan import QuantizationScan
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.devices.client import Tap
    from tpu2edge.runtime_check.devices.profiles import Profile
    from tpu2edge.runtime_check.parity import CaseReport, ParityReport
    from tpu2edge.runtime_check.task_metric import TaskMetric
    from tpu2edge.truths import Truth

__all__ = [
    "AUTO",
    "CALIBRATION",
    "FLOAT",
    "Family",
    "FamilyOptions",
    "Made",
    "Part",
    "refuse_twice",
]

FLOAT, AUTO = "float32", "auto"

#: Statistics of the float file's activations in a bundle, for a later `tpu2edge quantize`.
CALIBRATION = "calibration.npz"

# Hessians of GPTQ are kept in a bundle up to here; half of it is written. MiniLM has 67 MB.
_MOST_HESSIANS = 128 << 20

_KEPT = ".float"  # folder beside a reference for the float file's outputs, while a job runs

# ai-edge-quantizer holds the file, its tensors as arrays and the new file: measured 3 to 5 times the
# file's size, with the interpreter and libraries on top.
_TIMES_FILE, _BASE_BYTES = 6, 300 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyOptions:
    """Which files are wanted, and how they are made and judged."""

    recipes: tuple[Recipe, ...]  # FLOAT has no rules; AUTO neither: it is searched for
    budgets: tuple[str, ...] = ()
    budget: Budget | None = None  # in place of all others
    keep_float: tuple[str, ...] = ()
    calibration: tuple[Any, ...] = ()  # see calibration.py; the samples of the check if empty
    estimator: str = "minmax"
    metric: TaskMetric | None = None
    optimize: str = "size"
    levels: tuple[str, ...] = ()  # that a search may choose from; () for all
    max_size: float | None = None  # largest file of a search, as a share of the float file
    max_latency: float | None = None  # longest run, likewise
    time_limit_s: float | None = None
    devices: tuple[Profile, ...] = ()
    threads: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The recipes' names."""
        return tuple(recipe.name for recipe in self.recipes)

    def budget_of(self, recipe: str, truths: Sequence[Truth] = ()) -> Budget:
        """What the files of ``recipe`` are held to, against these references."""
        from tpu2edge.runtime_check.budget import (
            TASK_DEFAULT,
            UNPROVED_LEAST_DB,
            budget_against_tpu,
            default_budget,
        )

        if self.budget is not None:
            return self.budget
        base = default_budget(recipe, has_metric=self.metric is not None)
        rounded = [truth for truth in truths if references.is_rounded(truth.reference)]
        if rounded:
            # The floor of captured outputs holds their faults, too: what they should be is better.
            floors = [truth.expected or truth.floor for truth in rounded]
            unproved = any(truth.is_given and not truth.expected for truth in rounded)
            least = UNPROVED_LEAST_DB if unproved else -math.inf
            base = budget_against_tpu(recipe, floors, least_db=least, base=base)
        full = parse_budget(self.budgets, base)
        if self.metric is not None and not full.task:
            full = replace(full, task=TASK_DEFAULT)
        return full


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One signature of the file, with what it is held to."""

    signature: Signature
    where: str  # folder of its reference in the bundle
    truth: Truth
    constant_outputs: frozenset[str] = frozenset()
    initial: Mapping[str, Any] = field(default_factory=dict)  # the state that an app starts from
    state: Mapping[str, str] = field(default_factory=dict)
    taps: tuple[str, ...] = ()
    find_taps: Callable[[Path], list[Tap]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One file, what it was held to, and how it can be made again."""

    model: EdgeModel
    budget: Budget
    about: Mapping[str, Any] = field(default_factory=dict)  # for the manifest


@dataclass(kw_only=True)
class Family:
    """Makes and checks the files of a family in ``folder``.

    ``modules`` are the torch modules that each tensor of the float file was computed by, ``nodes`` the
    exported program's (node name -> its place in the model); ``checkpoint`` is where a search keeps
    what it has measured, so that a killed one can go on.
    """

    options: FamilyOptions
    folder: Path
    parts: Sequence[Part]
    base: Path  # the float file
    modules: Mapping[str, Sequence[str]]
    nodes: Mapping[str, Any]
    progress: Progress
    say: Callable[[Sequence[Note]], None]
    log: IO[bytes]
    checkpoint: Path | None = None
    calibrated: Path | None = None  # statistics of this very float file, from an earlier bundle
    as_it_came: str | None = None  # the name of the file when the model was quantized in PyTorch
    is_new: bool = True  # the float file was just converted: LiteRT's refusals are about the model

    def run(self) -> tuple[ParityReport, list[Made]]:
        """The report on all files, and the files that were wanted."""
        from tpu2edge.runtime_check.parity import ParityReport

        wanted = self.options.names
        if self.as_it_came is not None:
            return self._as_it_came(self.as_it_came)
        quantized = [recipe for recipe in self.options.recipes if recipe.name not in (FLOAT, AUTO)]
        reports: list[ParityReport] = []
        made: list[Made] = []
        with self._quantizing(quantized) as pending:
            float_report, float_made = self._checked(self.base, FLOAT, {})
            if FLOAT in wanted:
                reports.append(float_report)
                made.append(float_made)
            pending.begin_calibrated(self._calibration_for(quantized), self.options.estimator)
            for recipe in quantized:
                file = self._file(recipe.name)
                self.progress(f"quantize {recipe.name}")
                applied, found, notes = pending.result(recipe)
                self.say(notes)
                about = _about(applied, found)
                report, one = self._checked(file, recipe.name, about)
                reports.append(report)
                made.append(one)
        if AUTO in wanted:
            about = self._search()
            report, one = self._checked(self._file(AUTO), AUTO, about)
            reports.append(report)
            made.append(one)
        for part in self.parts:
            shutil.rmtree(self.folder / part.where / _KEPT, ignore_errors=True)
        if FLOAT not in wanted:
            self.base.unlink()
        merged = reduce(ParityReport.merged, reports)
        proofs = [case for part in self.parts for case in part.truth.proof]
        return replace(merged, cases=(*proofs, *merged.cases)), made

    def _as_it_came(self, name: str) -> tuple[ParityReport, list[Made]]:
        """The one file of a model that was quantized in PyTorch: it is not quantized again."""
        refuse_twice(self.options.names)
        file = self._file(name)
        self.base.rename(file)
        report, made = self._checked(file, name, {})
        proofs = [case for part in self.parts for case in part.truth.proof]
        return replace(report, cases=(*proofs, *report.cases)), [made]

    # ----------------------------------------------------------------------------- making files

    def _file(self, recipe: str) -> Path:
        return self.folder / f"model.{recipe}.tflite"

    @contextlib.contextmanager
    def _quantizing(self, recipes: Sequence[Recipe]) -> Iterator[_Pending]:
        pending = _Pending(self.base, self._file, self._kept_float(recipes), self.log)
        try:
            yield pending
        finally:
            pending.close()

    def _kept_float(self, recipes: Sequence[Recipe]) -> list[Recipe]:
        """The recipes with what ``keep_float`` says."""
        patterns = self.options.keep_float
        if not patterns:
            return list(recipes)
        from tpu2edge.quantize.recipes import keep_float
        from tpu2edge.quantize.scopes import op_scopes

        scopes = op_scopes(self.base)
        return [keep_float(recipe, patterns, self.modules, scopes) for recipe in recipes]

    def _calibration_for(self, recipes: Sequence[Recipe]) -> Calibration | None:
        """What recipes need to know of activations; measured once."""
        if not any(recipe.needs_calibration for recipe in recipes):
            return None
        return self.calibrate(self.options.estimator)

    def calibrate(self, *estimators: str) -> Calibration:
        """Ranges of activations of the float file, by several estimators, in one pass.

        With them come the moments that the family's recipes need, whoever asks.
        """
        from tpu2edge.calibration import calibration_samples, samples_of_reference
        from tpu2edge.quantize.calibrate import calibrate, check_samples

        recipes = self._kept_float(
            [one for one in self.options.recipes if one.needs_moments] + self._searched_moments()
        )
        if (known := self._known_statistics(estimators, recipes)) is not None:
            return known
        noted: list[Note] = []
        data: dict[str, list[Tensors]] = {}
        parity = {
            part.signature.name: samples_of_reference(
                part.truth.reference, range(len(part.truth.reference))
            )
            for part in self.parts
        }
        if self.options.calibration:
            data = calibration_samples(
                self.options.calibration,
                [part.signature for part in self.parts],
                initial={part.signature.name: part.initial for part in self.parts},
                on_note=noted.append,
            )
            for name, samples in data.items():
                noted += check_samples(samples, parity[name])
        else:
            for part in self.parts:
                picks = search_picks(len(part.truth.reference))
                data[part.signature.name] = samples_of_reference(part.truth.reference, picks)
            count = sum(map(len, data.values()))
            text = (
                f"no --calibration-data: activations are measured on {count} of the samples that "
                "are checked, so the parity of recipes that need this looks better than it is"
            )
            noted.append(Note(code="calibration-data", text=text))
        self.say(noted)
        measured = calibrate(
            self.base,
            data,
            estimators=estimators,
            recipes=recipes,
            threads=self.options.threads,
            progress=self.progress,
            log=self.log,
        )
        self.say(measured.notes)
        text = f"calibrated on {measured.samples} samples, ranges by {', '.join(estimators)}"
        if needed := dict.fromkeys(key for one in recipes for key in one.needs_moments):
            text += f", moments for {' and '.join(needed)}"
        self.say([Note(code="calibrated", text=text)])
        # How fast it was is no property of the file: the same command gives the same bundle.
        kept = replace(measured, samples_per_s=0.0, cpu_ms=0.0)
        if measured.moments.size_bytes > _MOST_HESSIANS:
            kept = replace(kept, moments=replace(measured.moments, hessians={}))
            text = (
                f"the Hessians of GPTQ take {measured.moments.size_bytes / 1e6:.0f} MB and are not kept "
                "in the bundle: a later `tpu2edge quantize` measures them again"
            )
            self.say([Note(code="calibration-size", text=text)])
        kept.save(self.folder / CALIBRATION)
        return measured

    def _searched_moments(self) -> list[Recipe]:
        """Recipes that need the moments that a search's levels do; none whose bundle lacked them."""
        if AUTO not in self.options.names:
            return []
        from tpu2edge.flatbuffer import read_tflite
        from tpu2edge.quantize.moments import moments_wanted
        from tpu2edge.quantize.recipes import recipe
        from tpu2edge.quantize.sensitivity import LEVELS

        levels = self.options.levels or LEVELS
        algorithms = {LEVELS[level].moments for level in levels}
        found = [recipe("int8-oscar")] if "OSCAR" in algorithms else []
        if "GPTQ" in algorithms:
            gptq = recipe("int4-gptq")
            size = moments_wanted(read_tflite(self.base), [gptq]).size_bytes
            if size <= _MOST_HESSIANS or self.options.levels:
                found.append(gptq)
        return found

    def _known_statistics(
        self, estimators: Sequence[str], recipes: Sequence[Recipe]
    ) -> Calibration | None:
        """Statistics that are there already, when they are of this file and hold all of this."""
        from tpu2edge.quantize.calibrate import Calibration

        own = self.folder / CALIBRATION
        file = own if own.is_file() else self.calibrated
        if file is None or not file.is_file() or (file != own and self.options.calibration):
            return None
        found = Calibration.load(file, source=self.base)
        if not set(estimators) <= set(found.estimators) or found.lacks(self.base, recipes):
            return None
        if file != own:
            what = "ranges and moments" if found.moments else "ranges"
            text = f"{what} of activations are those that {found.samples} samples gave the source bundle"
            self.say([Note(code="calibration-reused", text=text)])
            shutil.copyfile(file, own)
        return found

    def _search(self) -> dict[str, Any]:
        from tpu2edge.autotuning import search_auto

        return search_auto(self, self._file(AUTO))

    # --------------------------------------------------------------------------- checking files

    def _checked(
        self, file: Path, recipe: str, about: Mapping[str, Any]
    ) -> tuple[ParityReport, Made]:
        """One file on all devices with the samples of all signatures."""
        from tpu2edge.runtime_check.parity import ParityReport, is_host

        model = EdgeModel(
            path=file,
            signatures=tuple(part.signature for part in self.parts),
            recipe=recipe,
            sha256=sha256_of(file),
            size_bytes=file.stat().st_size,
        )
        budget = self.options.budget_of(recipe, [part.truth for part in self.parts])
        reports: list[ParityReport] = []
        # A float file that nobody asked for is run here only: its outputs split the error.
        asked = recipe in self.options.names or recipe == self.as_it_came
        for device in (self.options.devices if asked else ()) or (None,):
            for part in self.parts:
                report = self._check(model, budget, device, part)
                if self.is_new and recipe in (FLOAT, self.as_it_came) and is_host(device):
                    refuse_unrunnable(report, file, self.nodes, part.truth.reference)
                if is_host(device):
                    cases = self._check_taps(model, budget, part)
                    report = replace(report, cases=(*report.cases, *cases))
                reports.append(report)
        return reduce(ParityReport.merged, reports), Made(model=model, budget=budget, about=about)

    def _check(
        self, model: EdgeModel, budget: Budget, device: Profile | None, part: Part
    ) -> ParityReport:
        from tpu2edge.runtime_check.budget import default_budget
        from tpu2edge.runtime_check.parity import check_model, is_host
        from tpu2edge.runtime_check.reference import Reference

        # The float file's own outputs tell conversion from quantization.
        kept = self.folder / part.where / _KEPT
        is_float = model.recipe == FLOAT
        keep = is_float and is_host(device) and any(name != FLOAT for name in self.options.names)
        known = not is_float and (kept / "manifest.json").is_file()
        truth = part.truth
        return check_model(
            model,
            truth.reference,
            budget,
            oracle=truth.oracle,
            eager=truth.eager,
            conversion=default_budget(self.as_it_came or FLOAT),
            floor=truth.floor,
            float_outputs=Reference.load(kept, verify=False) if known else None,
            profile=device,
            threads=self.options.threads,
            constant_outputs=part.constant_outputs,
            other_outputs=frozenset(
                name
                for other in self.parts
                for name in (*(spec.name for spec in other.signature.outputs), *other.taps)
            ),
            keep=kept if keep else None,
            metric=self.options.metric if part is self.parts[0] else None,
            log=self.log,
            progress=self.progress,
        )

    def _check_taps(self, model: EdgeModel, budget: Budget, part: Part) -> tuple[CaseReport, ...]:
        """The values before a final softmax or sigmoid, where the file still has them."""
        from tpu2edge.runtime_check.budget import default_budget
        from tpu2edge.runtime_check.parity import check_taps

        if part.find_taps is None:
            return ()
        truth = part.truth
        return check_taps(
            model,
            truth.reference,
            part.find_taps(model.path),
            budget,
            oracle=truth.oracle,
            eager=truth.eager,
            conversion=default_budget(self.as_it_came or FLOAT),
            floor=truth.floor,
            threads=self.options.threads,
            log=self.log,
        )


def refuse_twice(recipes: Sequence[str]) -> None:
    """For a model that was quantized in PyTorch: no recipe goes with it.

    Raises:
        QuantizationError: one was asked for.
    """
    if asked := [one for one in recipes if one != FLOAT]:
        raise QuantizationError(
            f"the model was quantized in PyTorch already, so --recipe {asked[0]} would quantize it a "
            "second time",
            do="leave --recipe away, which keeps its own integers and scales; or export the float model",
            step="quantize",
        )


def search_picks(count: int) -> list[int]:
    """Which of ``count`` samples a search, or a calibration without data of its own, may use.

    Every second one: the others are held out. A lone sample is both.
    """
    return list(range(0, count, 2))


def held_out_picks(count: int) -> list[int]:
    """The other ones."""
    if count < 2:
        raise DataError(
            "recipe 'auto' needs at least two samples: one to search on and one that is held out",
            do="give more --inputs",
        )
    return list(range(1, count, 2))


def _about(applied: Applied, found: QuantizationScan) -> dict[str, Any]:
    """What the manifest says of a quantized file."""
    return {
        "recipe_json": applied.recipe.to_json(),
        "weights": {
            "bytes_by_kind": dict(found.bytes_by_kind),
            "float_share": round(found.float_share, 6),
            "float": {w.tensor: w.why_float for w in found.weights if w.why_float is not None},
            "size_ratio": round(found.size_ratio, 6),
        },
    }


#: What was done, what the file holds, and what the user should know.
_Result = tuple["Applied", "QuantizationScan", "tuple[Note, ...]"]


class _Pending:
    """Files being made by the quantizer's processes while others are checked."""

    def __init__(
        self,
        base: Path,
        file_of: Callable[[str], Path],
        recipes: Sequence[Recipe],
        log: IO[bytes],
    ) -> None:
        self._base, self._file_of, self._log = base, file_of, log
        self._recipes = {recipe.name: recipe for recipe in recipes}
        count = max(1, min(_at_once(base.stat().st_size), len(recipes)))
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="quantize")
        self._idle: list[Any] = []
        self._futures: dict[str, Future[_Result]] = {
            recipe.name: self._pool.submit(self._make, recipe, None, None)
            for recipe in recipes
            if not recipe.needs_calibration
        }

    def begin_calibrated(self, calibration: Calibration | None, estimator: str) -> None:
        """The activations are known now: the recipes that need them can be made."""
        for name, recipe in self._recipes.items():
            if recipe.needs_calibration:
                assert calibration is not None
                ranges = None
                if recipe.needs_ranges:
                    ranges = calibration.ranges(estimator, bits=activation_bits(recipe))
                moments = calibration.moments if recipe.needs_moments else None
                self._futures[name] = self._pool.submit(self._make, recipe, ranges, moments)

    def _make(self, recipe: Recipe, ranges: Ranges | None, moments: Moments | None) -> _Result:
        from tpu2edge.quantize.apply import Quantizer
        from tpu2edge.quantize.scan import verified

        try:
            quantizer = self._idle.pop()
        except IndexError:
            quantizer = Quantizer(self._base, log=self._log, remember=len(self._recipes) > 1)
        file = self._file_of(recipe.name)
        try:
            applied = quantizer.quantize(file, recipe, ranges, moments=moments)
        finally:
            self._idle.append(quantizer)
        return applied, *verified(self._base, file, applied)

    def result(self, recipe: Recipe) -> _Result:
        """What was done for ``recipe``, and what the file holds; its error is raised here."""
        return self._futures[recipe.name].result()

    def close(self) -> None:
        """End the processes; what has not begun is not begun."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        for quantizer in self._idle:
            quantizer.close()


def activation_bits(recipe: Recipe) -> int:
    """16 when a static recipe's activations have 16 bits, else 8."""
    bits = {
        int(config["num_bits"])
        for rule in recipe.rules
        if (config := (rule.get("op_config") or {}).get("activation_tensor_config"))
    }
    return 16 if bits == {16} else 8


def _at_once(size_bytes: int) -> int:
    """How many quantizers may hold a file of this size: by cores, and by the memory that is free."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        text = Path("/proc/meminfo").read_text()
        free = next(int(line.split()[1]) for line in text.splitlines() if "MemAvailable" in line)
    except (OSError, StopIteration):
        return 1 if size_bytes > 100 << 20 else cores
    each = _BASE_BYTES + _TIMES_FILE * size_bytes
    # One core is for what is run meanwhile: the files that are done, and calibration.
    return max(1, min(cores - 1, free * 1024 // 2 // each))
