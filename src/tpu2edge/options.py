"""Options as the user writes them, checked and parsed."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import DeviceError, OptionError
from tpu2edge.types import Dim

if TYPE_CHECKING:
    from tpu2edge.family import FamilyOptions
    from tpu2edge.quantize.recipes import Recipe
    from tpu2edge.requests import FamilyRequest
    from tpu2edge.runtime_check.budget import Budget
    from tpu2edge.runtime_check.devices.profiles import Profile

__all__ = [
    "budget_texts",
    "chosen_estimator",
    "chosen_recipes",
    "family_options",
    "known_devices",
    "options_of",
    "parse_budget",
    "parse_dynamic",
    "parse_shapes",
    "ready_devices",
    "thread_count",
]


def chosen_recipes(names: Sequence[str | Path]) -> tuple[Recipe, ...]:
    """The recipes, each once: by name, or a path to a recipe file in ai-edge-quantizer's format.

    "auto" has no rules: what it is to be is searched for.

    Raises:
        OptionError: an unknown name, a file that is no recipe, two of one name, or none at all.
    """
    from tpu2edge.quantize.recipes import Recipe, known_recipe, recipe, recipe_from_file

    if isinstance(names, (str, Path)):
        names = (names,)
    if not names:
        raise OptionError("no recipe was given", do="give at least one, e.g. float32")
    found: dict[str, Recipe] = {}
    for name in names:
        if isinstance(name, Path):
            made = recipe_from_file(name)
            made = Recipe(name=re.sub(r"[^A-Za-z0-9_.-]", "_", name.stem), rules=made.rules)
            if made.name in found or made.name in ("auto", "float32"):
                raise OptionError(
                    f"the recipe file '{name.name}' would be called '{made.name}', which is taken",
                    do="give the file another name",
                )
        elif name == "auto":
            made = Recipe(name="auto", rules=())
        elif name == "float32":
            made = Recipe(name="float32", rules=())
        else:
            made = recipe(known_recipe(name).name)
        found[made.name] = made
    return tuple(found.values())


def chosen_estimator(name: str) -> str:
    """The name of a range estimator.

    Raises:
        OptionError: it is unknown.
    """
    from tpu2edge.quantize.estimators import ESTIMATORS

    if name not in ESTIMATORS:
        raise OptionError(
            f"--calibration-method '{name}' is unknown", do=f"known: {', '.join(ESTIMATORS)}"
        )
    return name


def chosen_levels(names: Sequence[str]) -> tuple[str, ...]:
    """The names of levels that a search may choose from.

    Raises:
        OptionError: one is unknown.
    """
    from tpu2edge.quantize.sensitivity import LEVELS

    for name in names:
        if name not in LEVELS:
            raise OptionError(f"--level '{name}' is unknown", do=f"known: {', '.join(LEVELS)}")
    return tuple(dict.fromkeys(names))


def family_options(
    recipes: Sequence[str | Path],
    *,
    budgets: Sequence[str] = (),
    budget: Budget | None = None,
    keep_float: Sequence[str] = (),
    calibration: Sequence[Any] = (),
    estimator: str = "minmax",
    metric: str | None = None,
    optimize: str = "size",
    levels: Sequence[str] = (),
    max_size: float | str | None = None,
    max_latency: float | str | None = None,
    time_limit_s: float | None = None,
    devices: Sequence[str] = ("host",),
    device_files: Sequence[Path] = (),
    threads: int | None = None,
) -> FamilyOptions:
    """What a family of files is asked for, checked before any work is done.

    Raises:
        OptionError: something unknown, or options that do not go together.
        ModelSourceError: the task metric cannot be found.
        DeviceError: a device is not ready.
    """
    from tpu2edge.family import FamilyOptions
    from tpu2edge.runtime_check.task_metric import load_task_metric

    chosen = chosen_recipes(recipes)
    has_auto = any(recipe.name == "auto" for recipe in chosen)
    if optimize not in ("size", "latency"):
        raise OptionError(f"--optimize '{optimize}' is unknown", do="known: size, latency")
    for_search = (max_size, max_latency, time_limit_s)
    if (optimize != "size" or levels or for_search != (None, None, None)) and not has_auto:
        raise OptionError(
            "--optimize, --level, --max-size, --max-latency and --time-limit are for a search",
            do="add --recipe auto, or leave them away",
        )
    if time_limit_s is not None and not time_limit_s > 0:
        raise OptionError(
            f"--time-limit {time_limit_s:g} makes no sense", do="give seconds above 0"
        )
    if calibration and not has_auto and not any(one.needs_calibration for one in chosen):
        raise OptionError(
            "--calibration-data is for static recipes, -gptq and -oscar, and none was chosen",
            do="add --recipe int8-static or int8-oscar, or leave it away",
        )
    if keep_float and all(not one.rules for one in chosen) and not has_auto:
        raise OptionError(
            "--keep-float is for recipes that quantize, and none was chosen",
            do="add a --recipe, or leave it away",
        )
    options = FamilyOptions(
        recipes=chosen,
        budgets=tuple(budgets),
        budget=budget,
        keep_float=tuple(keep_float),
        calibration=tuple(calibration),
        estimator=chosen_estimator(estimator),
        metric=load_task_metric(metric) if metric is not None else None,
        optimize=optimize,
        levels=chosen_levels(levels),
        max_size=_share("--max-size", max_size),
        max_latency=_share("--max-latency", max_latency),
        time_limit_s=time_limit_s,
        devices=ready_devices(devices, device_files),
        threads=thread_count(threads),
    )
    bounds = [options.budget_of(name).task for name in options.names]
    if options.metric is None and any(bounds):
        raise OptionError(
            "--budget bounds a task metric, but there is none",
            do="name it: --metric file.py:function",
        )
    return options


def _share(option: str, value: float | str | None) -> float | None:
    """``40%`` or ``0.4`` as 0.4."""
    if value is None:
        return None
    try:
        text = str(value).strip()
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise OptionError(
            f"{option} '{value}' is no share", do=f"write e.g. {option} 40%, of the float32 file's"
        )
    return share


def options_of(request: FamilyRequest) -> FamilyOptions:
    """The same from what the command line was given."""
    return family_options(
        (*request.recipes, *request.recipe_files),
        budgets=request.budgets,
        keep_float=request.keep_float,
        calibration=request.calibration,
        estimator=request.estimator,
        metric=request.metric,
        optimize=request.optimize,
        levels=request.levels,
        max_size=request.max_size,
        max_latency=request.max_latency,
        time_limit_s=request.time_limit_s,
        devices=request.devices,
        device_files=request.device_files,
        threads=request.threads,
    )


def known_devices(names: Sequence[str], files: Sequence[Path] = ()) -> tuple[Profile, ...]:
    """The profiles of devices, each once; this machine if there is none. "all" stands for those that
    are ready; names may be joined by commas.

    Args:
        names: of profiles: the package's, the user's own, or those in ``files``.
        files: profiles of the user's (TOML), which are meant as well.

    Raises:
        OptionError: an unknown name, or a file that is no profile.
    """
    from tpu2edge.runtime_check.devices.profiles import load_profile, profile_named, profiles
    from tpu2edge.runtime_check.devices.runners import state_of

    if isinstance(names, str):
        names = (names,)
    found: dict[str, Profile] = {}
    for name in (part.strip() for text in names for part in text.split(",") if part.strip()):
        if name == "all":
            found.update((key, one) for key, one in profiles(files).items() if state_of(one).ready)
        else:
            found[name] = profile_named(name, files)
    for file in files:
        one = load_profile(file)
        found[one.name] = one
    return tuple(found.values()) or (profile_named("host"),)


def ready_devices(names: Sequence[str], files: Sequence[Path] = ()) -> tuple[Profile, ...]:
    """The profiles of :func:`known_devices`, all of which can be started now.

    Raises:
        OptionError: an unknown name, or a file that is no profile.
        DeviceError: devices that cannot; the message says what to type.
    """
    from tpu2edge.runtime_check.devices.runners import StateKind, install_command, state_of

    found = known_devices(names, files)
    unready = [(one, state) for one in found if not (state := state_of(one)).ready]
    if unready:
        missing = [one for one, state in unready if state.kind is StateKind.MISSING]
        others = [f"'{one.name}'" for one, state in unready if state.kind is not StateKind.MISSING]
        ways = [f"run `{install_command(*missing)}`"] if missing else []
        ways += [f"leave out {', '.join(others)}"] if others else []
        raise DeviceError(
            "\n".join(f"device '{one.name}' is not ready: {state.text}" for one, state in unready),
            do=f"{', and '.join(ways)}; `--device all` takes those that are ready",
            step="start",
        )
    return found


def thread_count(count: int | None) -> int | None:
    """``count``; None is LiteRT's own choice.

    Raises:
        OptionError: it is not from 1 to 1024.
    """
    if count is not None and not 1 <= count <= 1024:
        raise OptionError(f"--threads {count} makes no sense", do="give 1 to 1024")
    return count


def budget_texts(budget: Any) -> tuple[str, ...]:
    """The texts of a budget that was given as text; none for a Budget or None."""
    if budget is None or not isinstance(budget, (str, Sequence)):
        return ()
    return (budget,) if isinstance(budget, str) else tuple(budget)


def parse_budget(texts: Sequence[str], base: Budget) -> Budget:
    """The bounds in ``texts`` over those of ``base``."""
    from tpu2edge.runtime_check.budget import Budget

    return Budget.parse(*texts, base=base) if texts else base


_DYNAMIC = re.compile(r"^(?P<name>.+)\.(?P<axis>\d+)=(?P<min>\d+):(?P<max>\d+)$")


def parse_dynamic(texts: Sequence[str]) -> dict[str, dict[int, Dim]]:
    """``x.0=1:8`` as ``{"x": {0: Dim(1, 8)}}``.

    Raises:
        OptionError: a text of another form, or an empty range.
    """
    result: dict[str, dict[int, Dim]] = {}
    for text in texts:
        match = _DYNAMIC.match(text.strip())
        if match is None:
            raise OptionError(
                f"--dynamic '{text}' has another form", do="write NAME.AXIS=MIN:MAX, e.g. x.0=1:8"
            )
        low, high = int(match["min"]), int(match["max"])
        if not 1 <= low <= high:
            raise OptionError(f"--dynamic '{text}': no size is in {low}:{high}", do="give MIN:MAX")
        name, axis = match["name"], int(match["axis"])
        result.setdefault(name, {})[axis] = Dim(name=f"{name}_{axis}", min=low, max=high)
    return result


_SHAPES = re.compile(r"^(?P<name>[^=]+)=(?P<shapes>(\d+(x\d+)*)(,\d+(x\d+)*)*)$")


def parse_shapes(texts: Sequence[str]) -> dict[str, list[tuple[int, ...]]]:
    """``x=1x3x8x8,4x3x8x8`` as ``{"x": [(1, 3, 8, 8), (4, 3, 8, 8)]}``.

    Raises:
        OptionError: a text of another form, a size of 0, or an input given twice.
    """
    result: dict[str, list[tuple[int, ...]]] = {}
    for text in texts:
        match = _SHAPES.match(text.strip())
        if match is None:
            raise OptionError(
                f"--shapes '{text}' has another form",
                do="write NAME=SHAPE,SHAPE…, e.g. x=1x3x224x224,8x3x224x224",
            )
        if match["name"] in result:
            raise OptionError(
                f"--shapes gives input '{match['name']}' twice",
                do="list all its shapes in one --shapes, with commas",
            )
        shapes = [tuple(map(int, shape.split("x"))) for shape in match["shapes"].split(",")]
        if any(0 in shape for shape in shapes):
            raise OptionError(f"--shapes '{text}' has a size of 0", do="give sizes from 1 on")
        result[match["name"]] = shapes
    return result
