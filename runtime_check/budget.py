"""Parity budgets: what an output has to keep, as text, as data, and with defaults by recipe.

A budget is a conjunction of bounds, for all outputs or for one::

    sqnr>=30dB,cosine>=0.999          all float outputs
    logits:sqnr>=25dB,top1>=0.99      the output 'logits' only
    boxes:max_abs<=0.5

Metrics: ``sqnr`` (worst sample, dB), ``sqnr_median`` (dB), ``range_error``, ``max_abs``, ``cosine``
(worst sample), ``top1``, ``top1_decided``, ``mismatch``. Formulas: metrics.py. ``allow_constant``
stands for "this output may be the same for every sample".

A task metric of the user's own (task_metric.py) is bounded as a whole::

    metric>=0.95                      its value (``<=`` where less is better)
    metric_drop<=0.01                 at most so much below the reference's on the same samples
    metric_drop<=1%                   the same as a share of the reference's
    metric_rise<=1%                   the same where less is better
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tpu2edge.errors import OptionError
from tpu2edge.runtime_check.metrics import OutputMetrics
from tpu2edge.types import AS_QUANTIZED

__all__ = [
    "DEFAULT_SOURCES",
    "TASK_DEFAULT",
    "UNPROVED_LEAST_DB",
    "Bound",
    "Budget",
    "TaskBound",
    "budget_against_tpu",
    "default_budget",
]

# metric -> (field of OutputMetrics, the only direction that makes sense)
_METRICS: dict[str, tuple[str, str]] = {
    "sqnr": ("sqnr_db_worst", ">="),
    "sqnr_median": ("sqnr_db_median", ">="),
    "range_error": ("range_error", "<="),
    "max_abs": ("max_abs", "<="),
    "cosine": ("cosine_worst", ">="),
    "top1": ("top1", ">="),
    "top1_decided": ("top1_decided", ">="),
    "mismatch": ("mismatch", "<="),
}
_BOUND = re.compile(
    r"^\s*(?P<metric>[a-z0-9_]+)\s*(?P<op>>=|<=)\s*(?P<value>[-+0-9.eE]+)\s*(?P<unit>dB|%)?\s*$"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """One bound on one metric: ``sqnr >= 30`` (dB for sqnr, else the metric's own number)."""

    metric: str
    value: float

    @property
    def op(self) -> str:
        """The direction, which the metric decides."""
        return _METRICS[self.metric][1]

    def __str__(self) -> str:
        unit = "dB" if self.metric.startswith("sqnr") else ""
        return f"{self.metric}{self.op}{_exactly(self.value)}{unit}"

    def applies(self, metrics: OutputMetrics) -> bool:
        """Whether the metric exists for this output (no SQNR of integers, no top-1 of scalars)."""
        return getattr(metrics, _METRICS[self.metric][0]) is not None

    def widened(self, range_error: float, share: float) -> Bound:
        """The bound with an error of so much of the range, and of the signal's norm, besides."""
        if self.metric.startswith("sqnr"):
            if share <= 0:
                return self
            value = -20 * math.log10(10 ** (-self.value / 20) + share)
            return Bound(metric=self.metric, value=math.floor(value * 100) / 100)
        if self.metric in ("range_error", "mismatch"):
            # As text it is 0.12, and not 0.12000000000000001.
            return Bound(metric=self.metric, value=float(f"{self.value + range_error:.12g}"))
        return self

    def margin_db(self, metrics: OutputMetrics) -> float:
        """How far inside of the bound the metric is, in dB of noise power; negative outside of it.

        SQNR: the difference. Errors (amplitudes): 20 log10(bound / got). Shares that should be 1:
        10 log10((1 - bound) / (1 - got)); for a cosine that is the ratio of noise powers again, since
        1 - cos = noise / (2 signal) for small noise. +inf where the bound does not apply.
        """
        got = getattr(metrics, _METRICS[self.metric][0])
        if got is None:
            return math.inf
        if self.metric.startswith("sqnr"):
            room = got - self.value
        elif self.op == "<=":
            room = _room_db(self.value, got, 20.0)
        else:
            room = _room_db(1.0 - self.value, 1.0 - got, 10.0)
        return _signed(room, self.check(metrics) is None)

    def check(self, metrics: OutputMetrics) -> str | None:
        """None when it holds or does not apply; else a sentence with wanted and got."""
        attribute, op = _METRICS[self.metric]
        got = getattr(metrics, attribute)
        if got is None:
            return None
        # Written so that NaN fails: no comparison with NaN holds.
        holds = got >= self.value if op == ">=" else got <= self.value
        if holds:
            return None
        unit = " dB" if self.metric.startswith("sqnr") else ""
        word = "at least" if op == ">=" else "at most"
        return f"{self.metric} {_short(got)}{unit}, wanted {word} {self.value:g}{unit}"


_ROOM_DB = 60.0  # rooms are told up to here: an error of nothing at all is no use to a search


def _room_db(allowed: float, got: float, factor: float) -> float:
    if not got > 0 or not math.isfinite(got):
        return math.nan if math.isnan(got) else (-_ROOM_DB if got == math.inf else _ROOM_DB)
    return factor * math.log10(max(allowed, 1e-12) / got)


def _signed(room: float, holds: bool) -> float:
    """The room, bounded, and with the sign of what the bound itself says."""
    if math.isnan(room):
        return -math.inf
    return min(max(room, 0.0), _ROOM_DB) if holds else min(room, -1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskBound:
    """One bound on the task metric: on its value, or on its drop (rise) from the reference's."""

    metric: str  # "metric", "metric_drop" or "metric_rise"
    op: str  # ">=" or "<="
    value: float
    is_share: bool = False  # of the reference's value

    def __str__(self) -> str:
        value = f"{_exactly(self.value * 100)}%" if self.is_share else _exactly(self.value)
        return f"{self.metric}{self.op}{value}"

    def _got(self, value: float, reference: float) -> float:
        if self.metric == "metric":
            return value
        lost = reference - value if self.metric == "metric_drop" else value - reference
        if not self.is_share:
            return lost
        if reference == 0:
            return 0.0 if lost <= 0 else math.inf
        return lost / abs(reference)

    def check(self, value: float, reference: float) -> str | None:
        """None when it holds; else a sentence with wanted and got."""
        got = self._got(value, reference)
        # 0.95 - 0.94 is a little above 0.01 in binary: that is no drop of more than 0.01.
        slack = 1e-12 * max(abs(value), abs(reference), 1.0)
        if got >= self.value - slack if self.op == ">=" else got <= self.value + slack:
            return None
        word = "at least" if self.op == ">=" else "at most"
        shown = f"{got:.3%}" if self.is_share else _short(got)
        limit = f"{self.value:.4g}" if not self.is_share else f"{self.value:.4%}"
        return (
            f"{self.metric} {shown}, wanted {word} {limit} "
            f"(value {_short(value)}, the reference's {_short(reference)})"
        )

    def margin_db(self, value: float, reference: float) -> float:
        """How far inside of the bound the metric is, as :meth:`Bound.margin_db`."""
        got = self._got(value, reference)
        if self.metric == "metric":
            scale = max(abs(self.value), abs(reference), 1e-12)
            distance = (got - self.value) if self.op == ">=" else (self.value - got)
            room = 10.0 * distance / scale
        else:
            room = _room_db(self.value, got, 10.0)
        return _signed(room, self.check(value, reference) is None)


_TASK = re.compile(
    r"^\s*(?P<metric>metric|metric_drop|metric_rise)\s*(?P<op>>=|<=)\s*(?P<value>[-+0-9.eE]+)"
    r"\s*(?P<unit>%)?\s*$"
)


def _parse_task_bound(text: str) -> TaskBound | None:
    match = _TASK.match(text)
    if match is None:
        return None
    metric, op, is_share = match["metric"], match["op"], match["unit"] is not None
    if metric == "metric" and is_share:
        raise OptionError("--budget: metric has no %", do=f"write metric{op}NUMBER")
    if metric != "metric" and op == ">=":
        raise OptionError(f"--budget: {metric}>= makes no sense", do=f"write {metric}<=NUMBER")
    value = _number(match["value"])
    return TaskBound(
        metric=metric, op=op, value=value / 100 if is_share else value, is_share=is_share
    )


def _exactly(value: float) -> str:
    """The shortest text that reads back as the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _short(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Bounds for all outputs, and for single outputs in place of those.

    ``integers`` holds the bounds for integer and boolean outputs that are not named.
    """

    floats: tuple[Bound, ...] = ()
    integers: tuple[Bound, ...] = ()
    outputs: Mapping[str, tuple[Bound, ...]] = field(default_factory=dict)
    may_be_constant: frozenset[str] = frozenset()
    source: str = "given"  # where the numbers come from, shown in the report
    task: tuple[TaskBound, ...] = ()  # on the user's own metric

    @classmethod
    def parse(cls, *texts: str, base: Budget | None = None) -> Budget:
        """The budget that ``texts`` describe, on top of ``base`` for what they leave open.

        Raises:
            OptionError: an unknown metric, a direction or number that makes no sense.
        """
        floats: tuple[Bound, ...] = ()
        task: tuple[TaskBound, ...] = ()
        outputs: dict[str, tuple[Bound, ...]] = {}
        constant: set[str] = set()
        for text in texts:
            of_task, left = _task_bounds(text)
            task += of_task
            if of_task and not left:
                continue
            name, bounds, allows = _parse_one(left)
            if name is None:
                floats += bounds
                continue
            if bounds:
                outputs[name] = outputs.get(name, ()) + bounds
            if allows:
                constant.add(name)
        base = base or cls()
        integer_metrics = ("mismatch", "top1", "max_abs")
        integers = tuple(b for b in floats if b.metric in integer_metrics)
        return cls(
            floats=floats or base.floats,
            integers=integers or base.integers,
            outputs={**base.outputs, **outputs},
            may_be_constant=base.may_be_constant | constant,
            source="given" if floats or outputs or task else base.source,
            task=task or base.task,
        )

    def bounds(self, output: str, *, is_float: bool) -> tuple[Bound, ...]:
        """What the output called ``output`` has to keep."""
        if output in self.outputs:
            return self.outputs[output]
        return self.floats if is_float else self.integers

    def describe(self, output: str, *, is_float: bool) -> str:
        """The same as text, as :meth:`parse` reads it."""
        return ",".join(str(bound) for bound in self.bounds(output, is_float=is_float)) or "none"

    def relaxed(
        self, range_error: float, why: str, shares: Mapping[str, float] | None = None
    ) -> Budget:
        """The budget with what another device may add: an error of ``range_error`` of the range.

        Errors over the range get it added, and integers may differ in that share more. An SQNR of S
        dB becomes -20 log10(10^(-S/20) + share): by the triangle inequality that is what a file that
        keeps S keeps after an error of that share of the signal's norm. ``shares`` are by output,
        where they are known; ``range_error`` stands in where they are not.
        Bounds on absolute errors, cosines, top-1 and the task metric stay: they say what is needed.
        """
        if range_error <= 0:
            return self

        def wider(bounds: Iterable[Bound], share: float) -> tuple[Bound, ...]:
            return tuple(bound.widened(range_error, share) for bound in bounds)

        outputs = {
            name: self.outputs.get(name, self.floats) for name in (*self.outputs, *(shares or {}))
        }
        return Budget(
            floats=wider(self.floats, range_error),
            integers=wider(self.integers, range_error),
            outputs={
                name: wider(bounds, (shares or {}).get(name, range_error))
                for name, bounds in outputs.items()
            },
            may_be_constant=self.may_be_constant,
            source=f"{self.source}; {why}",
            task=self.task,
        )

    def unknown_outputs(self, known: Iterable[str]) -> list[str]:
        """Outputs that the budget names but the model does not have."""
        names = set(known)
        return sorted((set(self.outputs) | self.may_be_constant) - names)

    def to_json(self) -> dict[str, Any]:
        """Plain data, stored in the bundle with each model."""
        return {
            "floats": [str(b) for b in self.floats],
            "integers": [str(b) for b in self.integers],
            "outputs": {name: [str(b) for b in bounds] for name, bounds in self.outputs.items()},
            "may_be_constant": sorted(self.may_be_constant),
            "source": self.source,
            **({"task": [str(b) for b in self.task]} if self.task else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Budget:
        """The inverse of :meth:`to_json`."""
        return cls(
            floats=tuple(_parse_bound(t) for t in data["floats"]),
            integers=tuple(_parse_bound(t) for t in data["integers"]),
            outputs={
                name: tuple(_parse_bound(t) for t in texts)
                for name, texts in data["outputs"].items()
            },
            may_be_constant=frozenset(data["may_be_constant"]),
            source=data["source"],
            task=tuple(b for t in data.get("task", ()) if (b := _parse_task_bound(t))),
        )


def _task_bounds(text: str) -> tuple[tuple[TaskBound, ...], str]:
    """The bounds on the task metric in ``text``, and what is left of it."""
    parts = text.split(",")
    found = [(part, _parse_task_bound(part)) for part in parts]
    task = tuple(bound for _, bound in found if bound is not None)
    return task, ",".join(part for part, bound in found if bound is None) if task else text


def _parse_one(text: str) -> tuple[str | None, tuple[Bound, ...], bool]:
    name: str | None = None
    rest = text
    head, colon, tail = text.rpartition(":")
    if colon and not re.search(r"[<>]=", head):
        name, rest = head.strip(), tail
    bounds: list[Bound] = []
    allows = False
    for part in rest.split(","):
        if part.strip() == "allow_constant":
            if name is None:
                raise OptionError(
                    "--budget allow_constant needs the output it is for",
                    do="write NAME:allow_constant",
                )
            allows = True
        elif part.strip():
            bounds.append(_parse_bound(part))
    if not bounds and not allows:
        raise OptionError(
            f"--budget '{text}' holds no bound", do="write e.g. sqnr>=30dB,top1>=0.99"
        )
    return name, tuple(bounds), allows


def _parse_bound(text: str) -> Bound:
    match = _BOUND.match(text)
    if match is None:
        raise OptionError(
            f"--budget: '{text.strip()}' is no bound",
            do="write METRIC>=NUMBER or METRIC<=NUMBER, e.g. sqnr>=30dB",
        )
    metric = match["metric"]
    if metric not in _METRICS:
        close = difflib.get_close_matches(metric, _METRICS, n=1)
        hint = f"the closest is '{close[0]}'; " if close else ""
        known = ", ".join((*_METRICS, "metric", "metric_drop", "metric_rise"))
        raise OptionError(f"--budget: unknown metric '{metric}'", do=f"{hint}known: {known}")
    expected = _METRICS[metric][1]
    if match["op"] != expected:
        raise OptionError(
            f"--budget: {metric}{match['op']} makes no sense", do=f"write {metric}{expected}NUMBER"
        )
    value = _number(match["value"])
    unit = match["unit"]
    if unit == "dB" and not metric.startswith("sqnr"):
        raise OptionError(f"--budget: {metric} has no dB", do=f"write {metric}{expected}NUMBER")
    if unit == "%":
        if metric not in ("top1", "mismatch", "range_error"):
            raise OptionError(f"--budget: {metric} is no share", do="leave the % away")
        value /= 100.0
    return Bound(metric=metric, value=value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OptionError(f"--budget: '{text}' is no number", do="write e.g. 30")
    return value


def _bounds(*texts: str) -> tuple[Bound, ...]:
    return tuple(_parse_bound(text) for text in texts)


_EXACT = _bounds("mismatch<=0")

#: Why the default of each family of recipes is what it is (docs/budgets.md tells more).
DEFAULT_SOURCES: Mapping[str, str] = {
    "float32": "right float conversions of public models: error over range 3.6e-7 in the median, "
    "at most 2e-5; a dropped transpose gives 1.6e-3 or more",
    "float16": "weights rounded to 11 bits: 6.02 * 11 + 1.76 - 10 log10(layers) is about 50 to "
    "67 dB; measured 61 to 89 dB",
    "weight-int8": "one layer: 10 log10(12 * 127^2 / 16) = 40.8 dB for Gaussian weights clipped at "
    "4 sigma, less 10 log10(layers); measured 21 to 48 dB on trained networks",
    "dynamic-int8": "the same for weights and again for activations; measured 13 to 39 dB on "
    "trained networks: the default finds a broken file, not a bad one",
    "int4": "one layer: 10 log10(12 * 7^2 / 16) = 15.7 dB, less 10 log10(layers); measured 3 to "
    "18 dB; int2 less: 0 dB is what an output of zeros has, so the default finds a broken file only: "
    "give a budget or a task metric of your own",
    "as_quantized_weights": "the module's own arithmetic with the same integers: as float32; "
    "measured 125 to 141 dB",
    "as_quantized_dynamic": "held to the quantized module; its kernels choose the scales of "
    "activations and the file's do so by themselves: measured 37 to 51 dB on small networks",
    "as_quantized_static": "held to the quantized module; a value at the middle of two steps comes "
    "out one step apart: measured 38 dB to no difference on small networks",
    "static-int8": "measured -0.7 to 35 dB on trained networks, and two of seven no longer did their "
    "task: no default can stand for a task metric, so give a budget of your own",
    "static-int16": "measured 12 to 41 dB on trained networks, and 3.7 dB on one that it destroyed",
    "custom": "the recipe is not one of the known, so it is held as dynamic int8 is, to find a broken "
    "file only: give a budget or a task metric of your own",
    "auto": "LiteRT's own gate for a converted file is 30 dB, and a search needs a goal",
}

_DEFAULTS: dict[str, tuple[tuple[Bound, ...], tuple[Bound, ...]]] = {
    "float32": (_bounds("range_error<=1e-4", "sqnr>=80dB"), _EXACT),
    "as_quantized_weights": (_bounds("range_error<=1e-4", "sqnr>=80dB"), _EXACT),
    "as_quantized_dynamic": (_bounds("sqnr>=15dB"), _bounds("mismatch<=0.1")),
    "as_quantized_static": (_bounds("sqnr>=20dB"), _bounds("mismatch<=0.1")),
    "float16": (_bounds("sqnr>=45dB", "range_error<=2e-2"), _bounds("mismatch<=0.01")),
    "weight-int8": (_bounds("sqnr>=18dB"), _bounds("mismatch<=0.05")),
    "dynamic-int8": (_bounds("sqnr>=10dB"), _bounds("mismatch<=0.1")),
    "int4": (_bounds("sqnr>=0dB"), _bounds("mismatch<=0.5")),
    "static-int8": (_bounds("sqnr>=5dB"), _bounds("mismatch<=0.2")),
    "static-int16": (_bounds("sqnr>=10dB"), _bounds("mismatch<=0.1")),
    "custom": (_bounds("sqnr>=10dB"), _bounds("mismatch<=0.1")),
    "auto": (_bounds("sqnr>=30dB"), _bounds("mismatch<=0.05")),
}


#: For a task metric that is given without a bound: MLPerf Inference asks of a quantized model 99 % of
#: the float model's accuracy.
TASK_DEFAULT = (TaskBound(metric="metric_drop", op="<=", value=0.01, is_share=True),)


def default_budget(recipe: str, *, has_metric: bool = False) -> Budget:
    """The budget a recipe is held to when none is given; ``source`` says what it rests on.

    ``has_metric``: a task metric decides how good a quantized file is, so that the bounds on its
    outputs only have to find a broken one.
    """
    family = _family(recipe)
    if has_metric and family not in ("float32", "float16"):
        family = "int4"
    floats, integers = _DEFAULTS[family]
    return Budget(
        floats=floats, integers=integers, source=f"default for {family}: {DEFAULT_SOURCES[family]}"
    )


#: How far below the TPU's own noise floor a file may be against a TPU's outputs. The file's own error
#: adds to the TPU's rounding; 3 dB is as much again.
FLOOR_MARGIN_DB = 3.0
#: Below this nobody's rounding explains a captured output: whole models in bfloat16 are at 33 dB
#: after 48 transformer layers, a TPU's default precision at 42 dB.
UNPROVED_LEAST_DB = 20.0


def budget_against_tpu(
    recipe: str,
    floors: Sequence[Mapping[str, OutputMetrics]],
    *,
    least_db: float = -math.inf,
    base: Budget | None = None,
) -> Budget:
    """The default when the reference is a TPU's (or predicted for one).

    Args:
        recipe: name of the recipe.
        floors: for each signature and output, the reference compared with the float64 oracle: the
            noise that the TPU's own rounding makes, which no file can be held to be below. Where two
            signatures have an output of one name, the larger noise counts.
        least_db: what a file has to reach whatever the floor says (or the recipe's default, if that
            is less): for outputs that nothing has shown to be this model's.
        base: what stands for the recipe's default.

    Returns:
        Per output the recipe's default, but at most 3 dB below that noise floor; for integers the
        recipe's default share of differences, but at least 1.5 times the reference's own.
    """
    usual = base or default_budget(recipe)
    wanted = next((b.value for b in usual.floats if b.metric == "sqnr"), 0.0)
    allowed = next((b.value for b in usual.integers if b.metric == "mismatch"), 0.0)
    outputs: dict[str, tuple[Bound, ...]] = {}
    for name in {name: None for floor in floors for name in floor}:
        known = [floor[name] for floor in floors if name in floor]
        noise = [m.sqnr_db_worst for m in known if m.sqnr_db_worst is not None]
        if noise:
            value = round(min(wanted, max(min(noise) - FLOOR_MARGIN_DB, least_db)), 2)
            outputs[name] = (Bound(metric="sqnr", value=value),)
        else:
            share = max(allowed, 1.5 * max(m.mismatch for m in known))
            outputs[name] = (Bound(metric="mismatch", value=share),)
    return Budget(
        floats=usual.floats,
        integers=usual.integers,
        outputs=outputs,
        source=f"the smaller of the default for {recipe} and the reference's own noise floor less "
        f"{FLOOR_MARGIN_DB:g} dB",
    )


def _family(recipe: str) -> str:
    """By the name alone, upstream's or a plain one; a recipe file is "custom" whatever its name."""
    name = re.sub("-(octav|mse|recover|gptq|oscar)$", "", recipe)
    if name in ("float32", "float16", "auto") or name in AS_QUANTIZED:
        return name
    for family, pattern in _FAMILIES:
        if re.fullmatch(pattern, name):
            return family
    return "custom"


_FAMILIES = (
    ("int4", r"(dynamic|weight_only)_wi[24]\w*|default_af32w4float|int[24](-[a-z]+\d*)*"),
    ("static-int16", r"static_wi\d_ai16|default_a16w8|int16-static(-io)?"),
    ("static-int8", r"static_wi\d_ai8|default_a8w8|int8-static(-io)?"),
    (
        "weight-int8",
        r"weight_only_wi8\w*|default_af32w8float|int8-weight-only",
    ),
    ("dynamic-int8", r"dynamic_(legacy_)?wi8\w*|int8"),
)
