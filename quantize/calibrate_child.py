"""Runs a float ``.tflite`` on samples and counts its activations; started as a script.

Standard library, NumPy and ai_edge_litert only. What to read comes as one JSON line (the *plan*) on
stdin, then the samples, each a JSON line (signature, dtypes and shapes) followed by the raw tensors.
Each sample is answered by one JSON line; a line with ``end`` makes it write the counts to the file
that the plan names, and Hessians to files beside it.

Activations are read where LiteRT keeps them, without a copy, right after the run. Bodies of loops,
branches and decompositions are run once more from here, with the values they had in the graph:
LiteRT keeps only their last values, or none where a delegate computed the whole.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import time
import warnings
from typing import Any

import numpy as np

# Beyond it, a value stands for "minus infinity" (masks); ai-edge-quantizer leaves the same out.
HUGE = 3e38

# A row of logits below it has no position that is not masked.
MASKED = -1e3

# Rows of a Hessian that are added to at once.
BLOCK = 256

# Outputs of the run whose tensors are kept may differ by rounding from those of the plain run.
SAME = 1e-4


class Counts:
    """What is known of each tensor so far; nothing in it depends on the order of the samples."""

    def __init__(
        self, rows: int, softmaxes: int, binaries: int, bins: int, moments: Moments
    ) -> None:
        self.moments = moments
        self.low = np.full(rows, np.inf, np.float32)
        self.high = np.full(rows, -np.inf, np.float32)
        self.low_sum = np.zeros(rows)
        self.high_sum = np.zeros(rows)
        self.seen = np.zeros(rows, np.int64)
        self.infinite = np.zeros(rows, bool)  # held -inf or a value that stands for it
        self.bad = np.zeros(rows, np.int64)  # samples with NaN, +inf or only infinite values
        self.floors = np.full((softmaxes, 2), np.inf)
        self.binary = np.ones(binaries, bool)
        self.sample_low = np.empty(rows, np.float32)
        self.sample_high = np.empty(rows, np.float32)
        self.histograms = [Bins(bins) if bins else None for _ in range(rows)]
        self.begin()

    def begin(self) -> None:
        """A sample starts."""
        self.sample_low.fill(np.inf)
        self.sample_high.fill(-np.inf)

    def end(self) -> None:
        """A sample's own least and largest values go into those of all."""
        seen = self.sample_low <= self.sample_high
        np.minimum(self.low, self.sample_low, out=self.low)
        np.maximum(self.high, self.sample_high, out=self.high)
        self.low_sum[seen] += self.sample_low[seen]
        self.high_sum[seen] += self.sample_high[seen]
        self.seen += seen


class Moments:
    """Hessians and squares of what linear layers read, as ai-edge-quantizer 0.10 defines them.

    Sums in float32: a sum of some thousand samples is right to 1e-5, where GPTQ adds 1e-2 to the
    diagonal before it inverts; float64 would take twice the memory.
    """

    def __init__(self, hessians: list[int], squares: list[int]) -> None:
        self.hessians = [np.zeros((width, width), np.float32) for width in hessians]
        self.squares = [np.zeros(width) for width in squares]
        self.scratch = np.empty(BLOCK * max(hessians, default=0), np.float32)
        self.hessian_counts = np.zeros(len(hessians), np.int64)
        self.square_counts = np.zeros(len(squares), np.int64)

    def add(self, view: Any, width: int, hessian: int, square: int) -> None:
        """Count a tensor's rows of ``width`` values; place -1 stands for not wanted."""
        if not view.size:
            return
        count = view.shape[0] if view.ndim else 1
        rows = view.reshape(-1, width)
        if not np.isfinite(rows.sum(dtype=np.float64)):
            rows = rows[np.isfinite(rows).all(axis=1)]
            if not len(rows):
                return
        if hessian >= 0:
            self._add_products(self.hessians[hessian], rows)
            self.hessian_counts[hessian] += count
        if square >= 0:
            # Squared as float64, which one of float32 could exceed.
            mean = np.mean(np.square(rows, dtype=np.float64), axis=0)
            self.squares[square] += count * mean
            self.square_counts[square] += count

    def _add_products(self, sums: Any, rows: Any) -> None:
        """Add rowsᵀ rows to the lower triangle, by blocks that stay in the cache.

        ``rows.T @ rows`` at once makes another array as large, and copies its triangle: 64 rows of
        4096 took 147 ms, this takes 13.
        """
        width = len(sums)
        for begin in range(0, width, BLOCK):
            end = min(begin + BLOCK, width)
            part = self.scratch[: (end - begin) * end].reshape(end - begin, end)
            np.matmul(rows[:, begin:end].T, rows[:, :end], out=part)
            kept = sums[begin:end, :end]
            kept += part

    def save(self, folder: str) -> dict[str, Any]:
        """Write the Hessians to files of their own, each then let go; gives what is small."""
        for place, count in enumerate(self.hessian_counts.tolist()):
            hessian, self.hessians[place] = self.hessians[place], np.empty((0, 0), np.float32)
            if not count:
                continue
            hessian *= np.float32(2 / count)
            width = len(hessian)
            for begin in range(0, width, BLOCK):
                end = min(begin + BLOCK, width)
                hessian[:end, begin:end] = hessian[begin:end, :end].T
            np.save(os.path.join(folder, f"hessian{place}.npy"), hessian)  # noqa: PTH118
        for square, seen in zip(self.squares, self.square_counts.tolist(), strict=True):
            square /= max(seen, 1)
        return {
            "hessian_counts": self.hessian_counts,
            "square_counts": self.square_counts,
            "squares": np.concatenate([*self.squares, np.zeros(0)]),
        }


class Bins:
    """A histogram of at most ``limit`` bins that widens to hold what comes.

    Bins start at multiples of a width that is a power of two, so that two neighbours merge exactly:
    the counts are those of one pass with the final width, whatever came first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.low = self.high = 0.0  # zero is in every range
        self.exponent = -200
        self.base = 0
        self.zeros = 0
        self.counts = np.zeros(limit, np.int64)

    def add(self, values: Any, low: float, high: float) -> None:
        """Count ``values``, a flat array of float32 that lies within [low, high]."""
        self._widen(min(self.low, low), max(self.high, high))
        if self.exponent >= -126:
            q = values * np.float32(2.0**-self.exponent)  # exact, and vectorized
        else:
            q = np.ldexp(values, -self.exponent)
        np.floor(q, out=q)
        q -= np.float32(self.base)
        self.counts += np.bincount(q.astype(np.intp), minlength=self.limit)
        self.zeros += values.size - int(np.count_nonzero(values))

    def _widen(self, low: float, high: float) -> None:
        if (low, high) == (self.low, self.high):
            return
        exponent = self._exponent(low, high)
        held = np.flatnonzero(self.counts)
        counts = self.counts[held]
        # Less only where nothing but zeros had come, which are in bin 0 at any width.
        places = (held + self.base) >> min(max(exponent - self.exponent, 0), 62)
        self.low, self.high, self.exponent = low, high, exponent
        self.base = math.floor(math.ldexp(low, -exponent))
        self.counts = np.zeros(self.limit, np.int64)
        np.add.at(self.counts, places - self.base, counts)

    def _exponent(self, low: float, high: float) -> int:
        # The least one whose bins are few enough; grows with the range, never shrinks.
        exponent = max(math.frexp(high - low)[1] - self.limit.bit_length(), -149)
        while (
            math.floor(math.ldexp(high, -exponent)) - math.floor(math.ldexp(low, -exponent))
            >= self.limit
        ):
            exponent += 1
        return exponent


class Runner:
    """The file on LiteRT with all tensors kept."""

    def __init__(self, plan: dict[str, Any], counts: Counts, *, delegate: bool = True) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        kernels = (
            OpResolverType.AUTO if delegate else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        )
        self.plan, self.counts = plan, counts
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that keeping all tensors takes memory
            self.interpreter = Interpreter(
                model_path=plan["path"],
                num_threads=plan["threads"],
                experimental_op_resolver_type=kernels,
                experimental_preserve_all_tensors=True,
            )
        # The wrapped object's calls take a subgraph, and give views of the tensors.
        self.raw: Any = self.interpreter._interpreter
        self.shapes: dict[int, Any] = {}

    def run(self, graph: int, inputs: list[tuple[int, Any]]) -> None:
        """Run one subgraph."""
        run_graph(self.raw, self.shapes, graph, inputs)

    def measure(self, signature: dict[str, Any], inputs: list[tuple[int, Any]]) -> None:
        """Run one sample and count it."""
        if signature["variables"]:
            self.interpreter.reset_all_variables()
        self.run(signature["subgraph"], inputs)
        self.counts.begin()
        self._read(signature["subgraph"])
        self.counts.end()

    def _read(self, number: int) -> None:
        graph = self.plan["graphs"][str(number)]
        counts, raw = self.counts, self.raw
        tensor, least, most = raw.tensor, np.minimum.reduce, np.maximum.reduce
        low, high = counts.sample_low, counts.sample_high
        lows, highs = [], []
        for index, both in graph["reads"]:
            try:
                view = tensor(raw, index, number)
                highs.append(most(view, axis=None))
                # Where an activation cuts at zero the least value cannot matter: zero is in range.
                lows.append(least(view, axis=None) if both else 0.0)
            except ValueError:  # not computed, or empty
                lows.append(np.inf)
                highs.append(-np.inf)
        view = None
        rows = graph["rows"]
        if rows:
            found_low, found_high = np.array(lows, np.float32), np.array(highs, np.float32)
            odd = ~((found_low > -HUGE) & (found_high < HUGE)) & ~(
                (found_low == np.inf) & (found_high == -np.inf)
            )
            for place in np.flatnonzero(odd).tolist():
                found_low[place], found_high[place] = self._odd(
                    rows[place], tensor(raw, graph["reads"][place][0], number)
                )
            low[rows] = np.minimum(low[rows], found_low)
            high[rows] = np.maximum(high[rows], found_high)
        for kind, target, source in graph["derived"]:
            counts.infinite[target] |= counts.infinite[source]
            a, b = low[source], high[source]
            if a > b:
                continue
            if kind == "neg":
                a, b = -b, -a
            elif kind == "relu":
                a, b = max(a, np.float32(0)), max(b, np.float32(0))
            low[target], high[target] = min(low[target], a), max(high[target], b)
        for index, place, row in graph["softmaxes"]:
            least_seen = -math.inf if counts.infinite[row] else float(low[row])
            self._softmax(tensor(raw, index, number), place, least_seen, float(high[row]))
        for index, place in graph["binaries"]:
            if counts.binary[place]:
                view = tensor(raw, index, number)
                counts.binary[place] = bool(((view == 0) | (view == 1)).all())
                view = None
        if self.plan["bins"]:
            self._histograms(graph, number)
        for index, *wanted in graph["moments"]:
            with contextlib.suppress(ValueError):  # not computed, or empty
                counts.moments.add(tensor(raw, index, number), *wanted)
        for call in graph["calls"]:
            self._call(call, number)

    def _odd(self, row: int, view: Any) -> tuple[float, float]:
        """Least and largest of the values that are numbers; notes the others."""
        kept = view[(view > -HUGE) & (view < HUGE)]
        self.counts.infinite[row] |= bool((view <= -HUGE).any())
        if not kept.size or bool(~(view < HUGE).all()):
            self.counts.bad[row] += 1
        if not kept.size:
            return np.inf, -np.inf
        return kept.min(), kept.max()

    def _softmax(self, view: Any, place: int, low: float, high: float) -> None:
        """What a softmax cannot tell from minus infinity, at 8 and at 16 bits of output.

        A value t below its row's largest gives exp(-t) of the largest's share. All n of a row
        together stay below half an output step, 2^-bits-1, where t >= ln(n 2^(bits+1)).
        """
        width = view.shape[-1] if view.ndim else 1
        reaches = [math.log(width * 2.0 ** (bits + 1)) for bits in (8, 16)]
        floors = self.counts.floors[place]
        if high - low <= reaches[0] and view.size:
            np.minimum(floors, low, out=floors)
            return
        rows = view.reshape(-1, width)
        largest = np.maximum.reduce(rows, axis=-1, initial=-np.inf)
        kept = (largest > MASKED) & (largest < HUGE)
        if not kept.any():
            return
        least = np.minimum.reduce(rows, axis=-1, initial=np.inf)[kept]
        for position, reach in enumerate(reaches):
            floor = float(np.maximum(least, largest[kept] - reach).min())
            floors[position] = min(floors[position], floor)

    def _histograms(self, graph: dict[str, Any], number: int) -> None:
        masked = set(graph["masked"])
        for (index, _), row in zip(graph["reads"], graph["rows"], strict=True):
            bins = self.counts.histograms[row]
            low, high = float(self.counts.sample_low[row]), float(self.counts.sample_high[row])
            if bins is None or low > high:
                continue
            values = self.raw.tensor(self.raw, index, number).reshape(-1)
            if self.counts.infinite[row] or self.counts.bad[row]:
                values = values[(values > -HUGE) & (values < HUGE)]
            if index in masked and low < MASKED:
                # What stands for minus infinity would take all bins.
                values = values[values > MASKED]
                low = float(values.min(initial=0.0))
            if values.size:
                bins.add(values, low, high)

    def _call(self, call: dict[str, Any], number: int) -> None:
        raw = self.raw
        values = [raw.GetTensor(index, number) for index in call["inputs"]]
        if call["kind"] == "STABLEHLO_COMPOSITE":
            self._nested(call["subgraphs"][0], values)
        elif call["kind"] == "IF":
            self._nested(call["subgraphs"][0 if values[0].reshape(-1)[0] else 1], values[1:])
        else:
            condition, body = call["subgraphs"]
            while True:
                (go,) = self._nested(condition, values)
                if not go.reshape(-1)[0]:
                    break
                values = self._nested(body, values)

    def _nested(self, number: int, values: list[Any]) -> list[Any]:
        graph = self.plan["graphs"][str(number)]
        self.run(number, [(index, values[position]) for position, index in graph["inputs"]])
        # Before what it calls itself is run: that could write to the same memory.
        results = [self.raw.GetTensor(index, number) for index in graph["outputs"]]
        low, high = self.counts.sample_low, self.counts.sample_high
        for position, row in graph["unused"]:
            if values[position].size:
                low[row] = min(low[row], values[position].min())
                high[row] = max(high[row], values[position].max())
        self._read(number)
        return results


def run_graph(raw: Any, shapes: dict[int, Any], graph: int, inputs: list[tuple[int, Any]]) -> None:
    """Set the inputs of one subgraph, sized as they come, and run it."""
    wanted = [value.shape for _, value in inputs]
    if shapes.get(graph) != wanted:
        for index, value in inputs:
            if tuple(raw.TensorSize(index, graph)) != value.shape:
                raw.ResizeInputTensor(index, np.array(value.shape, np.int32), False, graph)
        raw.AllocateTensors(graph)
        shapes[graph] = wanted
    for index, value in inputs:
        raw.SetTensor(index, value, graph)
    raw.Invoke(graph)


def _outputs(raw: Any, signature: dict[str, Any]) -> dict[str, Any]:
    return {
        name: raw.GetTensor(index, signature["subgraph"]) for name, index in signature["outputs"]
    }


def _differs(plain: dict[str, Any], kept: dict[str, Any]) -> str:
    """The name of an output that is not the same in both runs, or ""."""
    for name, a in plain.items():
        b = kept[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            return name
        if a.dtype.kind != "f":
            continue  # an index may flip where two values are equal but for rounding
        if (np.isnan(a) != np.isnan(b)).any():
            return name
        known = np.isfinite(a) & np.isfinite(b)
        scale = float(np.abs(a[known]).max(initial=0.0))
        if not (np.abs(a[known] - b[known]) <= SAME * scale).all():
            return name
    return ""


class Session:
    """A plan, the interpreter it is carried out with, and the check of that interpreter."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.plan = plan
        self.counts = Counts(
            plan["rows"],
            plan["softmax_count"],
            plan["binary_count"],
            plan["bins"],
            Moments(plan["hessians"], plan["squares"]),
        )
        self.delegate = True
        self.runner = Runner(plan, self.counts)
        self.checked: set[str] = set()

    def sample(self, name: str, inputs: list[tuple[int, Any]]) -> None:
        """Count one sample of the signature ``name``."""
        signature = self.plan["signatures"][name]
        if name not in self.checked:
            self._check(signature, inputs)
            self.checked.add(name)
        self.runner.measure(signature, inputs)

    def _check(self, signature: dict[str, Any], inputs: list[tuple[int, Any]]) -> None:
        """That keeping all tensors does not change the outputs; without the delegate if it does."""
        from ai_edge_litert.interpreter import Interpreter

        plain = Interpreter(model_path=self.plan["path"], num_threads=self.plan["threads"])
        run_graph(plain._interpreter, {}, signature["subgraph"], inputs)
        wanted = _outputs(plain._interpreter, signature)
        del plain
        for delegate in (self.delegate, False):
            if delegate != self.delegate:
                self.delegate = delegate
                self.runner = Runner(self.plan, self.counts, delegate=False)
            if signature["variables"]:
                self.runner.interpreter.reset_all_variables()
            self.runner.run(signature["subgraph"], inputs)
            wrong = _differs(wanted, _outputs(self.runner.raw, signature))
            if not wrong:
                return
        raise ValueError(
            f"output '{wrong}' changes when LiteRT keeps all tensors: the activations are not those "
            "of the model"
        )

    def save(self, seconds: float, cpu_seconds: float) -> None:
        """Write the counts where the plan says."""
        counts = self.counts
        arrays = {
            name: getattr(counts, name)
            for name in (
                "low",
                "high",
                "low_sum",
                "high_sum",
                "seen",
                "infinite",
                "bad",
                "floors",
                "binary",
            )
        }
        filled = [(row, bins) for row, bins in enumerate(counts.histograms) if bins is not None]
        if filled:
            arrays["bins_row"] = np.array([row for row, _ in filled])
            arrays["bins_place"] = np.array([(b.exponent, b.base, b.zeros) for _, b in filled])
            arrays["bins_counts"] = np.stack([b.counts for _, b in filled])
        arrays |= counts.moments.save(os.path.dirname(self.plan["result"]))  # noqa: PTH120
        times = np.array([seconds, cpu_seconds])
        np.savez(self.plan["result"], times=times, **arrays)


def main() -> None:
    """Count what the parent sends until it says that this was all."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # native code prints to stdout
    source = io.BufferedReader(io.FileIO(os.dup(0)), 1 << 20)

    def send(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")

    warnings.simplefilter("ignore", RuntimeWarning)  # NaN and infinity are looked for, not avoided
    session = None
    seconds = cpu_seconds = 0.0
    while line := source.readline():
        begun, cpu_begun = time.perf_counter(), time.process_time()
        message = json.loads(line)
        try:
            if "plan" in message:
                session = Session(message["plan"])
                send(ok=True)
                continue
            assert session is not None
            if "end" in message:
                session.save(seconds, cpu_seconds)
                send(ok=True)
                return
            inputs = []
            for index, dtype, shape in message["tensors"]:
                array = np.empty(shape, dtype)
                if array.size and source.readinto(array.data.cast("B")) < array.nbytes:
                    return  # the parent is gone
                inputs.append((index, array))
            first = message["signature"] not in session.checked
            session.sample(message["signature"], inputs)
            if not first:  # the first is run three times and prepares memory
                seconds += time.perf_counter() - begun
                cpu_seconds += time.process_time() - cpu_begun
            send(ok=True)
        except Exception as error:  # noqa: BLE001 - told to the parent in full
            send(ok=False, type=type(error).__name__, error=str(error))
            return


if __name__ == "__main__":
    main()
