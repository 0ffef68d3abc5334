"""``--recipe auto``: the search of quantize/search.py, handed an evaluator that runs real files.

Half of the samples are searched on, the other half is held out and decides. What was measured is
kept in a file beside the output, so that a search that was killed goes on where it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import QuantizationError
from tpu2edge.family import AUTO, CALIBRATION, Family, held_out_picks, search_picks
from tpu2edge.files import canonical_json, sha256_of, write_atomically
from tpu2edge.types import Note

if TYPE_CHECKING:
    from tpu2edge.quantize.apply import Ranges
    from tpu2edge.quantize.moments import Moments
    from tpu2edge.quantize.search import Candidate, Evaluation, SearchResult
    from tpu2edge.runtime_check.scoring import Score, Scorer

__all__ = ["SEARCH_FORMAT_VERSION", "search_auto", "search_checkpoint"]

# 1 (2026-12-01): first version.
SEARCH_FORMAT_VERSION = 1

#: Range estimators that static mixes are tried with; which one is best differs from net to net.
ESTIMATORS = ("minmax", "percentile", "mse", "moving-average")

_PROBES = 3  # samples that a single layer's noise is measured on

_ROUNDS = 3  # of the samples, for the latency

_SLOWER = 1.1  # times on a shared machine differ by less than this between two runs of one file


def search_checkpoint(output: Path) -> Path:
    """Where the search for the bundle ``output`` keeps what it has measured."""
    return output.parent / f".{output.name}.search.json"


def search_auto(family: Family, target: Path) -> dict[str, Any]:
    """Write to ``target`` the smallest file within the budget; gives what the manifest says of it.

    Beside it come the recipe (``target`` with ``.recipe.json``), which makes the same bytes again, and
    ``search.json`` with all that was measured.

    Raises:
        QuantizationError: no recipe can be applied at all.
        DataError: there are fewer than two samples.
    """
    from tpu2edge.quantize.apply import Quantizer
    from tpu2edge.quantize.search import search
    from tpu2edge.runtime_check.scoring import Scorer

    options = family.options
    truths = [part.truth for part in family.parts]
    budget = options.budget_of(AUTO, truths)
    references = [truth.reference for truth in truths]
    picks = [search_picks(len(reference)) for reference in references]
    others = [held_out_picks(len(reference)) for reference in references]
    ranges, moments = _statistics(family)
    measured = family.folder / CALIBRATION
    text = json.dumps(
        [
            [sha256_of(reference.path / "manifest.json") for reference in references],
            budget.to_json(),
            [options.metric.spec, options.metric.sha256] if options.metric else None,
            options.threads,
            options.keep_float,
            [options.max_size, options.max_latency],
            list(options.levels),
            sha256_of(measured) if measured.is_file() else None,
        ]
    )
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    checkpoint = family.checkpoint
    if checkpoint is not None and checkpoint.exists():
        if _belongs(checkpoint, fingerprint, family.base):
            note = f"the search goes on from {checkpoint.name}, which an earlier run has left"
            family.say([Note(code="search-resumed", text=note)])
        else:
            checkpoint.unlink()
    family.progress("search")
    with contextlib.ExitStack() as stack:
        scorers: list[Scorer] = [
            stack.enter_context(
                Scorer(
                    references,
                    budget,
                    picks=chosen,
                    metric=options.metric if with_metric else None,
                    threads=options.threads,
                    rounds=rounds,
                    log=family.log,
                )
            )
            for chosen, rounds, with_metric in (
                (picks, _ROUNDS, True),
                (others, _ROUNDS, True),
                ([some[:_PROBES] for some in picks], 1, False),
            )
        ]
        quantizer = stack.enter_context(Quantizer(family.base, log=family.log, remember=True))
        result = search(
            family.base,
            target,
            quantizer=_KeepFloat(quantizer, family) if options.keep_float else quantizer,
            evaluator=_Evaluator(*scorers),
            ranges=ranges,
            moments=moments,
            optimize="latency" if options.optimize == "latency" else "size",
            levels=options.levels or None,
            largest=options.max_size,
            slowest=options.max_latency,
            time_limit_s=options.time_limit_s,
            checkpoint=checkpoint,
            fingerprint=fingerprint,
            progress=family.progress,
        )
    told = _told(result, family)
    write_atomically(family.folder / "search.json", canonical_json(told))
    family.say(_notes(result, told, family))
    if checkpoint is not None and result.finished:
        checkpoint.unlink(missing_ok=True)
    return {"recipe_json": result.recipe.to_json(), "search": "search.json"}


class _Evaluator:
    """An Evaluator of quantize/search.py: real files, run by LiteRT in a worker."""

    def __init__(self, searched: Scorer, held_out: Scorer, probing: Scorer) -> None:
        self._searched, self._held_out, self._probing = searched, held_out, probing

    def __call__(self, model: Path, *, held_out: bool) -> Evaluation:
        return _evaluation((self._held_out if held_out else self._searched).score(model))

    def probe(self, model: Path) -> Evaluation:
        return _evaluation(self._probing.score(model))


def _evaluation(score: Score) -> Evaluation:
    from tpu2edge.quantize.search import Evaluation

    metrics = {
        name: m.sqnr_db_worst for name, m in score.outputs.items() if m.sqnr_db_worst is not None
    }
    if score.task is not None:
        metrics[score.task.name] = score.task.value
    return Evaluation(
        budget_margin=score.margin_db,
        sqnr_db=score.sqnr_db,
        latency_ms=score.latency_ms,
        size_bytes=score.size_bytes,
        metrics=metrics,
    )


class _KeepFloat:
    """A quantizer whose recipes leave the modules float that the user named."""

    def __init__(self, quantizer: Any, family: Family) -> None:
        self._quantizer, self._family = quantizer, family

    def quantize(
        self,
        target: Path,
        recipe: Any,
        ranges: Ranges | None = None,
        *,
        moments: Moments | None = None,
    ) -> Any:
        from tpu2edge.quantize.recipes import keep_float

        patterns, modules = self._family.options.keep_float, self._family.modules
        kept = keep_float(recipe, patterns, modules, self._quantizer.scopes())
        return self._quantizer.quantize(target, kept, ranges, moments=moments)


def _belongs(checkpoint: Path, fingerprint: str, source: Path) -> bool:
    try:
        data = json.loads(checkpoint.read_text())
        return bool(
            data["fingerprint"] == fingerprint and data["source_sha256"] == sha256_of(source)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _statistics(family: Family) -> tuple[dict[str, Ranges], Moments | None]:
    """Ranges by estimator, and moments; none where activations cannot be measured, which is said.

    Raises:
        QuantizationError: they cannot be, and a level was asked for that needs them.
    """
    from tpu2edge.quantize.sensitivity import LEVELS

    levels = family.options.levels
    asked_for = any(LEVELS[level].activations or LEVELS[level].moments for level in levels)
    if levels and not asked_for:
        return {}, None
    try:
        measured = family.calibrate(*ESTIMATORS)
    except QuantizationError as error:
        if asked_for:
            raise
        text = f"the search leaves out what needs samples of activations: {error.what}"
        family.say([Note(code="search-without-static", text=text)])
        return {}, None
    return {name: measured.ranges(name) for name in ESTIMATORS}, measured.moments


# ------------------------------------------------------------------------------------- in words


def _told(result: SearchResult, family: Family) -> dict[str, Any]:
    """Plain data of the search: all rows, the best, and what stands in the way."""
    from tpu2edge.quantize.search import pareto

    front = {id(row) for row in pareto(result.rows)}
    return {
        "kind": "tpu2edge-search",
        "format_version": SEARCH_FORMAT_VERSION,
        "met": result.met,
        "finished": result.finished,
        "evaluations": result.evaluations,
        "optimize": family.options.optimize,
        "float32": _row(result.float32, family, True),
        "best": _row(result.best, family, True),
        "rows": [_row(row, family, id(row) in front) for row in result.rows],
        "in_the_way": [
            {
                "modules": list(_modules(obstacle.tensors, obstacle.scope, family)),
                "tensors": list(obstacle.tensors),
                "op": obstacle.op,
                "level": obstacle.level,
                "sqnr_db": _finite(obstacle.sqnr_db),
                "share": _finite(obstacle.share),
            }
            for obstacle in result.obstacles
        ],
    }


def _row(row: Candidate, family: Family, on_front: bool) -> dict[str, Any]:
    def figures(e: Evaluation | None) -> dict[str, Any] | None:
        if e is None:
            return None
        return {
            "margin_db": _finite(e.budget_margin),
            "sqnr_db": _finite(e.sqnr_db),
            "latency_ms": round(e.latency_ms, 4) if math.isfinite(e.latency_ms) else None,
            "metrics": {name: _finite(value) for name, value in e.metrics.items()},
        }

    return {
        "recipe": row.recipe.name,
        "levels": dict(row.levels),
        "ranges": row.ranges,
        "size_bytes": row.evaluation.size_bytes,
        "searched": figures(row.evaluation),
        "held_out": figures(row.held_out),
        "met": row.met,
        "pareto": on_front,
    }


def _finite(value: float) -> float | str:
    if math.isfinite(value):
        return round(value, 4)
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _modules(tensors: Sequence[str], scope: str, family: Family) -> list[str]:
    found: dict[str, None] = {}
    names = [name for name in scope.split(";") if name]
    for tensor, modules in family.modules.items():
        if tensor in tensors or tensor == scope.rstrip(";") or tensor.rstrip(";") in names:
            found.update(dict.fromkeys(modules))
    return list(found) or [scope.rstrip(";")]


def _notes(result: SearchResult, told: Mapping[str, Any], family: Family) -> list[Note]:
    best, size = result.best, result.float32.evaluation.size_bytes
    held = best.held_out
    picks = search_picks(len(family.parts[0].truth.reference))
    count = len(family.parts[0].truth.reference)
    share = best.evaluation.size_bytes / size if size else math.nan
    text = (
        f"auto: {best.evaluation.size_bytes / 1e6:.3g} MB, {share:.1%} of float32; worst SQNR "
        f"{best.evaluation.sqnr_db:.1f} dB on the {len(picks)} samples searched on"
    )
    if held is not None:
        text += f", {held.sqnr_db:.1f} dB on the {count - len(picks)} held out"
    text += f"; {result.evaluations} files run in {result.seconds:.0f} s"
    notes = [Note(code="search", text=text)]
    took, whole = best.evaluation.latency_ms, result.float32.evaluation.latency_ms
    if family.options.max_latency is None and took > _SLOWER * whole > 0:
        text = f"auto: the file takes {took / whole:.2f} times as long as float32 here; "
        if "int16-static" in result.best.levels or "int16" in result.best.recipe.name:
            text += "LiteRT has no fast kernels for 16-bit activations"
        else:
            text += "--max-latency 100% searches for one that does not"
        notes.append(Note(code="search-slower", text=text))
    if not result.finished:
        text = "the time limit ended the search: the best so far was taken; run it again to go on"
        notes.append(Note(code="search-time", text=text))
    if not result.met:
        margin = min(e.budget_margin for e in (best.evaluation, held) if e is not None)
        text = f"no file meets the budget: the nearest misses it by {-margin:.1f} dB"
        if result.float32.evaluation.budget_margin < 0:
            text += (
                "; not even the float32 file does, by "
                f"{-result.float32.evaluation.budget_margin:.1f} dB: ask for less, or look at the "
                "conversion and the reference first"
            )
        elif told["in_the_way"]:
            layers = "; ".join(
                f"{', '.join(one['modules'])} ({one['op']}, {one['level']}: {one['sqnr_db']} dB alone)"
                for one in told["in_the_way"][:5]
            )
            text += f"; in the way stand {layers}"
        notes.append(Note(code="search-missed", text=text))
    return notes
