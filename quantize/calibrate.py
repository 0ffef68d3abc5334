"""Ranges of a float file's activations (and moments, for GPTQ and OSCAR), counted while it runs.

The file runs in a process of its own (``calibrate_child.py``). What that process reads is decided
here from the graph: float activations only, each once; those that hold the same elements as another
(a reshape, a transpose) not at all.
"""

from __future__ import annotations

import io
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from tpu2edge.children import ending
from tpu2edge.errors import BundleError, DataError, DeviceError, OptionError, Place
from tpu2edge.files import sha256_of, sha256_of_arrays, write_atomically
from tpu2edge.flatbuffer import SignatureEntry, Subgraph, TfliteFile, read_tflite, signatures_of
from tpu2edge.quantize.apply import Ranges
from tpu2edge.quantize.estimators import ESTIMATORS, Histogram, mse_range, percentile_range
from tpu2edge.quantize.moments import Moments, MomentsWanted, moments_wanted
from tpu2edge.quantize.recipes import Recipe
from tpu2edge.quantize.saturation import SAME_ELEMENTS, Known, floors_of
from tpu2edge.types import Array, Dim, Note, Progress, Signature, Tensors, no_progress

__all__ = ["Calibration", "calibrate", "check_samples"]

#: 1 (2026-12): least, largest, their means over samples, floors, histograms, moments.
FORMAT_VERSION = 1

_CHILD = Path(__file__).with_name("calibrate_child.py")
_FREE = ("minmax", "moving-average")  # known from what is read anyway
_BINS = 2048  # of a histogram: 8 for each step of int8
_AHEAD = 4  # samples that are sent before the first of them is answered
_BITS = (8, 16)  # of the activations that floors are known for
_MASKED = -1e3  # as in the child
_CUT_AT_ZERO = ("RELU", "RELU6", "LOGISTIC", "SOFTMAX")
_CALLS = ("STABLEHLO_COMPOSITE", "WHILE", "IF")
_DYING_S = 5.0
DEFAULT_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """What is known of the activations of one float file.

    ``tensors`` are the tensors' names; the arrays have one row for each. ``floors`` (one column for
    8 bits, one for 16) are the values below which nothing changes what a softmax gives; -inf where
    there is none. ``unmeasured`` are float activations that no sample computed.
    """

    source_sha256: str
    samples: int
    estimators: tuple[str, ...]
    tensors: tuple[str, ...]
    ranks: tuple[int, ...]
    low: NDArray[np.float32]
    high: NDArray[np.float32]
    low_mean: NDArray[np.float32]
    high_mean: NDArray[np.float32]
    floors: NDArray[np.float32]
    histograms: Mapping[str, Histogram] = field(default_factory=dict)
    moments: Moments = field(default_factory=Moments)
    unmeasured: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    samples_per_s: float = 0.0  # of the runs alone, without the start of the process
    cpu_ms: float = 0.0  # of one run, counting included

    def ranges(self, estimator: str = "minmax", *, bits: int = 8) -> Ranges:
        """The range of each tensor by ``estimator``, for activations of ``bits`` bits.

        Arrays have the shape (1,) * rank, as ai-edge-quantizer takes them.

        Raises:
            OptionError: there is no such estimator, or it was not collected.
        """
        if estimator not in ESTIMATORS:
            raise OptionError(
                f"unknown range estimator '{estimator}'", do=f"known: {', '.join(ESTIMATORS)}"
            )
        if estimator not in self.estimators:
            raise OptionError(
                f"these statistics have nothing for the range estimator '{estimator}'",
                do=f"they have {', '.join(self.estimators)}; calibrate again for others",
            )
        if bits not in _BITS:
            raise OptionError(f"no ranges for activations of {bits} bits", do="8 or 16")
        ranges: dict[str, tuple[Array, Array]] = {}
        for row, (name, rank) in enumerate(zip(self.tensors, self.ranks, strict=True)):
            low, high = self._range(row, name, estimator, bits)
            floor = float(self.floors[row, _BITS.index(bits)])
            if float(self.low[row]) < floor:
                # Everything below is clipped to the floor itself: higher would unmask it.
                low, high = floor, max(high, floor)
            shape = (1,) * rank
            ranges[name] = (
                np.full(shape, low, dtype=np.float32),
                np.full(shape, high, dtype=np.float32),
            )
        return ranges

    def _range(self, row: int, name: str, estimator: str, bits: int) -> tuple[float, float]:
        low, high = float(self.low[row]), float(self.high[row])
        if estimator == "moving-average":
            return float(self.low_mean[row]), float(self.high_mean[row])
        histogram = self.histograms.get(name)
        if estimator == "minmax" or histogram is None:
            return low, high
        # A low of -inf stands for a mask, which the histogram leaves out.
        least = max(low, float(histogram.edges[0]))
        if estimator == "percentile":
            return percentile_range(histogram, least, high, bits)
        return mse_range(histogram, least, high, bits)

    def check_belongs(self, source: Path) -> None:
        """DataError if these are statistics of another file."""
        found = sha256_of(source)
        if found != self.source_sha256:
            raise DataError(
                f"the calibration is of another file than '{source}': sha256 "
                f"{self.source_sha256[:12]}…, the file's is {found[:12]}…",
                do="calibrate this file: ranges of another model, or another export, are wrong here",
            )

    def lacks(self, source: Path, recipes: Sequence[Recipe]) -> bool:
        """Whether moments of ``source`` are missing that the recipes need and a sample computes."""
        if not any(recipe.needs_moments for recipe in recipes):
            return False
        file = read_tflite(source)
        wanted = moments_wanted(file, recipes)
        computed = set(self.tensors)
        return any(
            name in computed and name not in known
            for keys, known in (
                (wanted.hessians, self.moments.hessians),
                (wanted.squares, self.moments.squares),
            )
            for name in (file.tensor(index, number).name for number, index in keys)
        )

    def save(self, path: Path) -> None:
        """Write everything to one ``.npz`` file."""
        meta = {
            "format_version": FORMAT_VERSION,
            "source_sha256": self.source_sha256,
            "samples": self.samples,
            "estimators": self.estimators,
            "tensors": self.tensors,
            "ranks": self.ranks,
            "unmeasured": self.unmeasured,
            "notes": [[note.code, note.text] for note in self.notes],
            "samples_per_s": self.samples_per_s,
            "cpu_ms": self.cpu_ms,
            "histograms": [
                [name, h.exponent, h.base, h.zeros] for name, h in self.histograms.items()
            ],
            "hessians": list(self.moments.hessians),
            "squares": list(self.moments.squares),
        }
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        for number, hessian in enumerate(self.moments.hessians.values()):
            arrays[f"hessian{number}"] = hessian[np.tril_indices(len(hessian))]
        for number, squares in enumerate(self.moments.squares.values()):
            arrays[f"squares{number}"] = squares
        if self.histograms:
            arrays["histogram_counts"] = np.stack([h.counts for h in self.histograms.values()])
        stream = io.BytesIO()
        text = np.frombuffer(json.dumps(meta).encode(), np.uint8)
        np.savez_compressed(stream, meta=text, **arrays)
        write_atomically(path, stream.getvalue())

    @classmethod
    def load(cls, path: Path, *, source: Path | None = None) -> Calibration:
        """The statistics in ``path``, of the file ``source`` if that is given.

        Raises:
            BundleError: the file is no such file, or damaged.
            DataError: they are statistics of another file than ``source``.
        """
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as data:
                meta = json.loads(bytes(data["meta"]))
                version = meta["format_version"]
                if version != FORMAT_VERSION:
                    raise BundleError(
                        f"'{path}' has statistics of format {version}, known is {FORMAT_VERSION}",
                        do="calibrate again, or update tpu2edge",
                    )
                arrays = {name: data[name] for name in _ARRAYS}
                counts = data["histogram_counts"] if meta["histograms"] else ()
                rows = len(meta["tensors"])
                if any(len(array) != rows for array in arrays.values()):
                    raise ValueError("arrays of different lengths")
                calibration = cls(
                    source_sha256=meta["source_sha256"],
                    samples=meta["samples"],
                    estimators=tuple(meta["estimators"]),
                    tensors=tuple(meta["tensors"]),
                    ranks=tuple(meta["ranks"]),
                    **arrays,
                    histograms={
                        name: Histogram(exponent=exponent, base=base, zeros=zeros, counts=counted)
                        for (name, exponent, base, zeros), counted in zip(
                            meta["histograms"], counts, strict=True
                        )
                    },
                    moments=Moments(
                        hessians={
                            name: _symmetric(data[f"hessian{number}"])
                            for number, name in enumerate(meta.get("hessians", ()))
                        },
                        squares={
                            name: data[f"squares{number}"]
                            for number, name in enumerate(meta.get("squares", ()))
                        },
                    ),
                    unmeasured=tuple(meta["unmeasured"]),
                    notes=tuple(Note(code=code, text=text) for code, text in meta["notes"]),
                    samples_per_s=meta["samples_per_s"],
                    cpu_ms=meta["cpu_ms"],
                )
        except BundleError:
            raise
        except Exception as err:
            raise BundleError(
                f"'{path}' is no calibration file, or damaged: {type(err).__name__}: {err}",
                do="calibrate again",
            ) from err
        if source is not None:
            calibration.check_belongs(source)
        return calibration


def _symmetric(triangle: Array) -> Array:
    """The matrix that a lower triangle, row by row, is of."""
    width = math.isqrt(2 * len(triangle))
    full = np.zeros((width, width), np.float32)
    full[np.tril_indices(width)] = triangle
    return full + np.tril(full, -1).T


_ARRAYS = ("low", "high", "low_mean", "high_mean", "floors")


def calibrate(
    source: Path,
    samples: Mapping[str, Iterable[Tensors]],
    *,
    estimators: Sequence[str] = ("minmax",),
    recipes: Sequence[Recipe] = (),
    threads: int | None = None,
    progress: Progress = no_progress,
    log: IO[bytes] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Calibration:
    """Run ``source`` on ``samples`` (signature name -> samples by input name) and count.

    One pass collects what all ``estimators`` need; "minmax" and "moving-average" are always there.
    Where ``recipes`` have rules for GPTQ or OSCAR it collects the moments that these need, too.
    Samples are read one at a time, none is kept. Their order does not matter: state of the model
    (variables) starts anew with each.

    Raises:
        OptionError: an estimator is unknown, or the moments do not fit into memory.
        DataError: a signature has no samples, or a sample does not fit or has NaN or infinity
            (-inf is taken where it is added before a softmax only: a mask).
        DeviceError: the process that runs the file dies or hangs, or LiteRT fails.
    """
    for name in estimators:
        if name not in ESTIMATORS:
            raise OptionError(
                f"unknown range estimator '{name}'", do=f"known: {', '.join(ESTIMATORS)}"
            )
    file = read_tflite(source)
    signatures = {signature.name: signature for signature in signatures_of(file)}
    _check_signatures(source, signatures, samples)
    wanted = moments_wanted(file, recipes)
    wanted.refuse_too_large()
    plan = _Plan(file, bins=0 if set(estimators) <= set(_FREE) else _BINS, moments=wanted)
    total = sum(len(s) for s in samples.values() if isinstance(s, Sized))
    known_total = total if all(isinstance(s, Sized) for s in samples.values()) else None
    with tempfile.TemporaryDirectory(prefix="tpu2edge-") as folder:
        result = Path(folder) / "counts.npz"
        with _Child(source, threads=threads or 1, log=log, timeout_s=timeout_s) as child:
            child.ask(
                {"plan": plan.to_json(source, threads=threads or 1, result=result)}, "load the file"
            )
            count = 0
            for name, items in samples.items():
                signature, entry = signatures[name], plan.entries[name]
                before = count
                for position, sample in enumerate(items):
                    _check_sample(signature, sample, position, plan.masks[name])
                    child.send_sample(name, [(entry.inputs[k], sample[k]) for k in entry.inputs])
                    count += 1
                    progress("calibrate", count, known_total)
                if count == before:
                    raise DataError(
                        f"signature '{name}' has no calibration samples", do="give at least one"
                    )
            child.ask({"end": True}, "save what was counted")
        with np.load(result, allow_pickle=False) as data:
            counts = {name: data[name] for name in data.files}
        # Mapped, not read: they stay as long as the arrays do, though the folder goes.
        hessians = {
            place: np.load(result.with_name(f"hessian{place}.npy"), mmap_mode="r")
            for place in np.flatnonzero(counts["hessian_counts"]).tolist()
        }
    return plan.calibration(
        counts,
        hessians,
        source_sha256=sha256_of(source),
        samples=count,
        estimators=(*_FREE, *(e for e in ESTIMATORS if e in estimators and e not in _FREE)),
        runs=count - len(samples),
    )


def check_samples(calibration: Iterable[Tensors], parity: Iterable[Tensors]) -> tuple[Note, ...]:
    """What makes the calibration samples look unlike those that parity is measured on.

    Compares names, data types and ranges of each input. Both are read once, one sample at a time.

    Raises:
        DataError: different inputs or data types, or NaN in a calibration sample.
    """
    ours, theirs = _Seen("calibration"), _Seen("parity")
    for seen, samples in ((ours, calibration), (theirs, parity)):
        for sample in samples:
            seen.add(sample)
    if not ours.count or not theirs.count:
        empty = "calibration" if not ours.count else "parity"
        raise DataError(f"there are no {empty} samples")
    if set(ours.inputs) != set(theirs.inputs):
        raise DataError(
            f"calibration samples have the inputs {sorted(ours.inputs)}, "
            f"parity samples {sorted(theirs.inputs)}"
        )
    notes: list[Note] = []
    for name, (dtype, low, high) in ours.inputs.items():
        other_dtype, other_low, other_high = theirs.inputs[name]
        if dtype != other_dtype:
            raise DataError(
                f"input '{name}' is {dtype} in the calibration samples and {other_dtype} in the "
                "parity samples",
                place=Place(tensor=name),
            )
        if low == high and other_low != other_high:
            notes.append(
                Note(
                    code="calibration-constant",
                    text=f"input '{name}' is {low:g} in all calibration samples, but "
                    f"{other_low:g}..{other_high:g} in the parity samples: ranges will be wrong",
                )
            )
            continue
        if dtype == "bool":
            continue
        span, other_span = high - low, other_high - other_low
        beyond = max(low - other_low, other_high - high, 0.0)
        if beyond > 0.1 * span:
            notes.append(
                Note(
                    code="calibration-range",
                    text=f"input '{name}' spans {other_low:g}..{other_high:g} in the parity "
                    f"samples, beyond the calibration samples' {low:g}..{high:g}: activations will "
                    "be clipped",
                )
            )
        elif span > 4 * other_span and np.dtype(dtype).kind == "f":
            notes.append(
                Note(
                    code="calibration-range",
                    text=f"input '{name}' spans {low:g}..{high:g} in the calibration samples, much "
                    f"more than the parity samples' {other_low:g}..{other_high:g}: the steps of "
                    "quantized activations will be coarser than they need be",
                )
            )
    shared = len(ours.digests & theirs.digests)
    if shared:
        notes.append(
            Note(
                code="calibration-overlap",
                text=f"{shared} of {theirs.count} parity samples are calibration samples too: the "
                "parity of static recipes will look better than it is",
            )
        )
    return tuple(notes)


class _Seen:
    """Names, data types and ranges of the inputs of a set of samples."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.count = 0
        self.inputs: dict[str, tuple[str, float, float]] = {}
        self.digests: set[str] = set()

    def add(self, sample: Tensors) -> None:
        if self.count and set(sample) != set(self.inputs):
            raise DataError(
                f"{self.what} sample {self.count} has the inputs {sorted(sample)}, "
                f"those before it {sorted(self.inputs)}"
            )
        for name, array in sample.items():
            values = np.asarray(array)
            if values.dtype.kind == "f":
                if np.isnan(values).any():
                    raise _not_a_number(f"{self.what} sample {self.count}", name)
                values = values[np.isfinite(values)]
            low = float(values.min()) if values.size else math.inf
            high = float(values.max()) if values.size else -math.inf
            dtype, least, largest = self.inputs.get(name, (values.dtype.name, math.inf, -math.inf))
            if dtype != values.dtype.name:
                raise DataError(
                    f"input '{name}' is {values.dtype.name} in {self.what} sample {self.count}, "
                    f"{dtype} before",
                    place=Place(tensor=name),
                )
            self.inputs[name] = (dtype, min(low, least), max(high, largest))
        self.digests.add(sha256_of_arrays({k: np.asarray(v) for k, v in sample.items()}))
        self.count += 1


def _not_a_number(where: str, name: str) -> DataError:
    return DataError(
        f"{where} has NaN in input '{name}'",
        do="leave the sample out, or mend it: one NaN spoils the ranges of all that follows",
        place=Place(tensor=name),
    )


def _check_signatures(
    source: Path, signatures: Mapping[str, Signature], samples: Mapping[str, Iterable[Tensors]]
) -> None:
    listed = ", ".join(f"'{name}'" for name in signatures) or "none"
    for name in samples:
        if name not in signatures:
            raise DataError(f"'{source}' has no signature '{name}'", do=f"its signatures: {listed}")
    for name in signatures:
        if name not in samples:
            raise DataError(
                f"signature '{name}' has no calibration samples",
                do=f"every signature needs its own: {listed}",
            )


def _check_sample(
    signature: Signature, sample: Tensors, position: int, masks: frozenset[str]
) -> None:
    where = f"calibration sample {position} of signature '{signature.name}'"
    if set(sample) != {spec.name for spec in signature.inputs}:
        raise DataError(
            f"{where} has the inputs {sorted(sample)}, the signature takes "
            f"{[spec.name for spec in signature.inputs]}"
        )
    for spec in signature.inputs:
        array = sample[spec.name]
        fits = array.ndim == len(spec.shape) and all(
            isinstance(want, Dim) or want == have
            for want, have in zip(spec.shape, array.shape, strict=True)
        )
        if not fits or array.dtype.name != spec.dtype:
            raise DataError(
                f"{where}: input '{spec.name}' is {array.dtype.name}{list(array.shape)}, "
                f"the model takes {spec}",
                place=Place(tensor=spec.name),
            )
        if array.dtype.kind != "f" or bool(np.isfinite(array).all()):
            continue
        if bool(np.isnan(array).any()):
            raise _not_a_number(where, spec.name)
        if bool((array == np.inf).any()) or spec.name not in masks:
            raise DataError(
                f"{where} has infinity in input '{spec.name}'",
                do="an input may hold -inf only where it is added before a softmax: a mask",
                place=Place(tensor=spec.name),
            )


# ---- what to read --------------------------------------------------------------------------------


class _Plan:
    """Which tensors of a file are read, and what follows for the others."""

    def __init__(self, file: TfliteFile, *, bins: int, moments: MomentsWanted) -> None:
        self.file, self.bins, self.moments = file, bins, moments
        self.rows: dict[tuple[int, int], int] = {}
        self.same: dict[int, int] = {}  # row -> the row that has the same values
        self.softmaxes: dict[tuple[int, int], int] = {}
        self.binaries: dict[tuple[int, int], int] = {}
        self.graphs: dict[int, dict[str, Any]] = {}
        self.entries: dict[str, SignatureEntry] = {entry.name: entry for entry in file.signatures}
        self.masks: dict[str, frozenset[str]] = {}
        for entry in file.signatures:
            self._add(entry.subgraph, called=False)
            masked = set(self.graphs[entry.subgraph]["masked"])
            self.masks[entry.name] = frozenset(
                name for name, index in entry.inputs.items() if index in masked
            )

    def to_json(self, source: Path, *, threads: int, result: Path) -> dict[str, Any]:
        """The plan as the child takes it."""
        return {
            "path": str(source),
            "threads": threads,
            "result": str(result),
            "bins": self.bins,
            "rows": len(self.rows),
            "softmax_count": len(self.softmaxes),
            "binary_count": len(self.binaries),
            "hessians": list(self.moments.hessians.values()),
            "squares": list(self.moments.squares.values()),
            "graphs": {str(number): graph for number, graph in self.graphs.items()},
            "signatures": {
                name: {
                    "subgraph": entry.subgraph,
                    "outputs": list(entry.outputs.items()),
                    "variables": any(
                        t.is_variable for graph in self.file.subgraphs for t in graph.tensors
                    ),
                }
                for name, entry in self.entries.items()
            },
        }

    def _add(self, number: int, *, called: bool) -> None:
        if number in self.graphs:
            return
        graph = self.file.subgraphs[number]
        used = {index for op in graph.operators for index in op.inputs} | set(graph.outputs)
        planned: dict[str, Any] = {
            # One that nothing uses has no memory.
            "inputs": [(i, index) for i, index in enumerate(graph.inputs) if index in used],
            "outputs": list(graph.outputs),
            "reads": [],
            "rows": [],
            "unused": [],
            "derived": [],
            "softmaxes": [],
            "binaries": [],
            "calls": [],
            "moments": self._moments_of(number),
        }
        self.graphs[number] = planned
        planned["masked"] = sorted(_on_the_way_to_softmax(graph))
        for position, index in enumerate(graph.inputs):
            if index in used or not called:
                self._read(planned, graph, index)
            elif graph.tensors[index].dtype == "float32":
                row = self.rows[number, index] = len(self.rows)
                planned["unused"].append((position, row))
        for op in graph.operators:
            cut = op.activation in ("RELU", "RELU6") or op.name in _CUT_AT_ZERO
            source = self.rows.get((number, op.inputs[0])) if op.inputs else None
            for index in op.outputs:
                kind = self._derived(op.name) if source is not None else None
                if kind is None or graph.tensors[index].dtype != "float32":
                    self._read(planned, graph, index, both=not cut)
                elif (number, index) not in self.rows and source is not None:
                    row = self.rows[number, index] = len(self.rows)
                    planned["derived"].append((kind, row, source))
                    if kind == "same":
                        self.same[row] = self.same.get(source, source)
            self._special(planned, graph, op.name, op.inputs)
            if op.name in _CALLS and op.subgraphs:
                for other in op.subgraphs:
                    self._add(other, called=True)
                planned["calls"].append(
                    {"kind": op.name, "subgraphs": op.subgraphs, "inputs": list(op.inputs)}
                )

    def _moments_of(self, number: int) -> list[tuple[int, int, int, int]]:
        """Tensor, width, and the places of its Hessian and of its squares or -1."""
        hessians, squares = self.moments.hessians, self.moments.squares
        places = [{key: place for place, key in enumerate(one)} for one in (hessians, squares)]
        return [
            (key[1], width, places[0].get(key, -1), places[1].get(key, -1))
            for key, width in {**squares, **hessians}.items()
            if key[0] == number
        ]

    def _derived(self, op: str) -> str | None:
        """How an operator's output follows from its input without being read."""
        if op in SAME_ELEMENTS:
            return "same"
        if self.bins:
            return None
        return {"NEG": "neg", "RELU": "relu"}.get(op)

    def _read(
        self, planned: dict[str, Any], graph: Subgraph, index: int, *, both: bool = True
    ) -> None:
        tensor = graph.tensors[index]
        key = (graph.index, index)
        if tensor.dtype != "float32" or tensor.is_constant or key in self.rows:
            return
        row = self.rows[key] = len(self.rows)
        planned["reads"].append((index, both))
        planned["rows"].append(row)

    def _special(
        self, planned: dict[str, Any], graph: Subgraph, op: str, inputs: tuple[int, ...]
    ) -> None:
        if op == "SOFTMAX":
            key = (graph.index, inputs[0])
            if key in self.rows and key not in self.softmaxes:
                place = self.softmaxes[key] = len(self.softmaxes)
                planned["softmaxes"].append((inputs[0], place, self.rows[key]))
        elif op == "MUL":
            for one, other in (inputs, inputs[::-1]):
                known = self._constant(graph, one)
                key = (graph.index, other)
                if known is None or known.low > _MASKED or key not in self.rows:
                    continue
                if key not in self.binaries:
                    place = self.binaries[key] = len(self.binaries)
                    planned["binaries"].append((other, place))

    def _constant(self, graph: Subgraph, index: int) -> Known | None:
        tensor = graph.tensors[index]
        if not tensor.is_constant or tensor.dtype != "float32" or tensor.is_sparse:
            return None
        values = self.file.constant(index, graph.index)
        if not values.size:
            return None
        low, high = float(values.min()), float(values.max())
        return Known(
            low=low,
            high=high,
            zero_or_one=bool(((values == 0) | (values == 1)).all()) if low >= 0 else False,
        )

    # ---- what was counted ------------------------------------------------------------------------

    def calibration(
        self,
        counts: Mapping[str, Array],
        hessians: Mapping[int, Array],
        *,
        source_sha256: str,
        samples: int,
        estimators: tuple[str, ...],
        runs: int,
    ) -> Calibration:
        """The child's counts under the tensors' names, with the floors."""
        data: dict[str, Any] = dict(counts)
        seen = data["seen"] > 0
        low = np.where(data["infinite"], -np.inf, data["low"]).astype(np.float32)
        means = [
            np.divide(data[name], np.maximum(data["seen"], 1)).astype(np.float32)
            for name in ("low_sum", "high_sum")
        ]
        floors = self._floors(data, low)
        histograms: dict[int, Histogram] = {}
        if "bins_row" in data:
            for row, (exponent, base, zeros), counted in zip(
                data["bins_row"].tolist(),
                data["bins_place"].tolist(),
                data["bins_counts"],
                strict=True,
            ):
                histograms[row] = Histogram(
                    exponent=exponent, base=base, zeros=zeros, counts=counted
                )
        names: list[str] = []
        ranks: list[int] = []
        table: list[tuple[float, ...]] = []
        unmeasured: list[str] = []
        bad: list[str] = []
        found: dict[str, Histogram] = {}
        for (number, index), row in self.rows.items():
            tensor = self.file.tensor(index, number)
            if data["bad"][self.same.get(row, row)]:
                bad.append(tensor.name)
            if not seen[row]:
                unmeasured.append(tensor.name)
                continue
            floor = floors.get((number, index), (-math.inf, -math.inf))
            # Infinite values that no softmax hides are left out, as ai-edge-quantizer does.
            least = float(low[row]) if floor[0] > -math.inf else float(data["low"][row])
            names.append(tensor.name)
            ranks.append(len(tensor.shape))
            table.append((least, data["high"][row], means[0][row], means[1][row], *floor))
            histogram = histograms.get(self.same.get(row, row))
            if histogram is not None and histogram.counts.any():
                found[tensor.name] = histogram
        for (number, index), floor in floors.items():
            known = self._constant(self.file.subgraphs[number], index)
            if known is not None and known.low < floor[0]:
                tensor = self.file.tensor(index, number)
                names.append(tensor.name)
                ranks.append(len(tensor.shape))
                table.append((known.low, known.high, known.low, known.high, *floor))
        columns = np.array(table, np.float32).reshape(len(names), 6)
        seconds, cpu_seconds = data["times"].tolist()
        return Calibration(
            source_sha256=source_sha256,
            samples=samples,
            estimators=estimators,
            tensors=tuple(names),
            ranks=tuple(ranks),
            low=columns[:, 0],
            high=columns[:, 1],
            low_mean=columns[:, 2],
            high_mean=columns[:, 3],
            floors=columns[:, 4:],
            histograms=found,
            moments=self._moments(counts, hessians),
            unmeasured=tuple(unmeasured),
            notes=_notes(bad, unmeasured),
            samples_per_s=runs / seconds if seconds else 0.0,
            cpu_ms=cpu_seconds * 1e3 / runs if runs else 0.0,
        )

    def _moments(self, counts: Mapping[str, Array], hessians: Mapping[int, Array]) -> Moments:
        """Those of the tensors that some sample computed, under their names."""
        ends = np.cumsum([0, *self.moments.squares.values()]).tolist()
        return Moments(
            hessians={
                self.file.tensor(index, number).name: hessians[place]
                for place, (number, index) in enumerate(self.moments.hessians)
                if place in hessians
            },
            squares={
                self.file.tensor(index, number).name: counts["squares"][begin:end]
                for (number, index), begin, end, count in zip(
                    self.moments.squares, ends, ends[1:], counts["square_counts"], strict=False
                )
                if count
            },
        )

    def _floors(
        self, data: Mapping[str, Any], low: NDArray[np.float32]
    ) -> dict[tuple[int, int], tuple[float, float]]:
        """Floors at 8 and at 16 bits, of the tensors that have values below them."""
        found: dict[tuple[int, int], list[float]] = {}
        for column in range(len(_BITS)):
            for number in self.graphs:
                graph = self.file.subgraphs[number]

                def known(index: int, graph: Subgraph = graph) -> Known | None:
                    row = self.rows.get((graph.index, index))
                    if row is None:
                        return self._constant(graph, index)
                    place = self.binaries.get((graph.index, index))
                    return Known(
                        low=float(data["low"][row]),
                        high=float(data["high"][row]),
                        zero_or_one=place is not None and bool(data["binary"][place]),
                    )

                starts = {
                    index: float(data["floors"][place, column])
                    for (where, index), place in self.softmaxes.items()
                    if where == number
                }
                for index, floor in floors_of(graph, starts, known).items():
                    found.setdefault((number, index), []).append(floor)
        kept: dict[tuple[int, int], tuple[float, float]] = {}
        for key, values in found.items():
            row = self.rows.get(key)
            least = -math.inf if row is None else float(low[row])
            if len(values) == len(_BITS) and least < max(values):
                kept[key] = (values[0], values[1])
        return kept


def _on_the_way_to_softmax(graph: Subgraph) -> dict[int, float]:
    """The tensors whose large negative values only a softmax ever sees."""
    starts = {op.inputs[0]: -1.0 for op in graph.operators if op.name == "SOFTMAX"}
    return floors_of(graph, starts, lambda _: Known(low=0.0, high=0.0, zero_or_one=True))


def _notes(bad: Sequence[str], unmeasured: Sequence[str]) -> tuple[Note, ...]:
    notes: list[Note] = []
    if bad:
        notes.append(
            Note(
                code="calibration-nan",
                text=f"activations with NaN or infinity in some samples, which ranges leave out: "
                f"{_some(bad)}",
            )
        )
    if unmeasured:
        notes.append(
            Note(
                code="calibration-unmeasured",
                text=f"activations that no sample computed, so they can only stay float: "
                f"{_some(unmeasured)}",
            )
        )
    return tuple(notes)


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


# ---- the child process ---------------------------------------------------------------------------


class _Child:
    """The process that runs the file; a few samples are on their way to it at any time."""

    def __init__(
        self, source: Path, *, threads: int, log: IO[bytes] | None, timeout_s: float
    ) -> None:
        self._source, self._log, self._timeout_s = source, log, timeout_s
        self._open = 0
        self._answers = b""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-u", str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={
                "OPENBLAS_NUM_THREADS": str(threads),  # NumPy's, which would take all cores
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "2",
            },
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)  # a child that hangs must time out

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=_DYING_S if error is None else 0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._stderr.seek(0)
            self._log.write(self._stderr.read())
        self._stderr.close()

    def ask(self, message: Mapping[str, Any], step: str) -> None:
        """Send and wait until all is answered."""
        self._write(json.dumps(message).encode() + b"\n", step)
        self._open += 1
        while self._open:
            self._answer(step)

    def send_sample(self, signature: str, tensors: Sequence[tuple[int, Array]]) -> None:
        """Send one sample; waits where too many are on their way."""
        step = "run a sample"
        arrays = [(index, np.ascontiguousarray(array)) for index, array in tensors]
        header = [
            (index, array.dtype.name, given.shape)
            for (index, array), (_, given) in zip(arrays, tensors, strict=True)
        ]
        message = json.dumps({"signature": signature, "tensors": header}).encode() + b"\n"
        self._write(message, step)
        for _, array in arrays:
            if array.size:
                self._write(array.reshape(-1).view(np.uint8).data, step)
        self._open += 1
        while self._open >= _AHEAD:
            self._answer(step)

    def _write(self, data: bytes | memoryview, step: str) -> None:
        view = memoryview(data)
        deadline = time.monotonic() + self._timeout_s
        while len(view):
            left = max(deadline - time.monotonic(), 0)
            readable, writable, _ = select.select([self._out], [self._in], [], left)
            if readable and not writable and self._open:
                self._answer(step)  # which says why nothing more is taken
                continue
            if not writable:
                raise self._hung(step)
            try:
                view = view[os.write(self._in, view[: 1 << 20]) :]
            except BrokenPipeError:
                while self._open:  # it may have said why
                    self._answer(step)
                raise self._died(step) from None

    def _answer(self, step: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._answers:
            left = max(deadline - time.monotonic(), 0)
            if not select.select([self._out], [], [], left)[0]:
                raise self._hung(step)
            got = os.read(self._out, 1 << 16)
            if not got:
                raise self._died(step)
            self._answers += got
        line, _, self._answers = self._answers.partition(b"\n")
        answer = json.loads(line)
        self._open -= 1
        if not answer["ok"]:
            raise DeviceError(
                f"LiteRT cannot {step} of {self._source.name}: {answer['type']}: "
                f"{answer['error']}{self._tail()}",
                do="`tpu2edge check` runs the float file alone and may tell more",
                step="calibrate",
            )

    def _died(self, step: str) -> DeviceError:
        try:
            status = self._process.wait(timeout=_DYING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return DeviceError(
            f"the process that calibrates {self._source.name} died by {ending(status)} while it "
            f"was to {step}{self._tail()}",
            do="the file may be damaged, or memory too small: calibration keeps all activations",
            step="calibrate",
        )

    def _hung(self, step: str) -> DeviceError:
        self._process.kill()
        return DeviceError(
            f"the process that calibrates {self._source.name} gave no answer in "
            f"{self._timeout_s:.0f} s while it was to {step}{self._tail()}",
            do="the file may be damaged; or give it more time",
            step="calibrate",
        )

    def _tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        kept = [line.strip() for line in lines if line.strip() and not line.startswith("INFO:")]
        return "".join(f"\n    {line}" for line in kept[-5:])
