"""What ``search`` finds on networks with trained weights, against whole recipes and in what time.

``python benchmarks/auto_search.py FOLDER NAME…`` reads ``NAME.tflite`` and ``NAME.npz`` (``E_<input>``
and ``ref_<output>``: samples and what the torch model gives; ``C_<input>``, ``cref_<output>``: the
held-out ones). One line for each whole recipe and for the file that was found; with ``--compare``
the time that one quantization and one run for each op at three levels takes.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from tpu2edge.flatbuffer import read_tflite, signatures_of
from tpu2edge.quantize.apply import Quantizer, Ranges
from tpu2edge.quantize.moments import Moments
from tpu2edge.quantize.recipes import Recipe, recipe
from tpu2edge.quantize.search import Candidate, Evaluation, SearchResult, pareto, search
from tpu2edge.quantize.sensitivity import FLOAT, rules_of, units_of
from tpu2edge.runtime_check.devices.client import Session
from tpu2edge.runtime_check.parity import fit_sample, real_values

PROBE_SAMPLES = 3


class SqnrEvaluator:
    """The Evaluator of a budget on the worst output's SQNR, over all samples or of the worst one."""

    def __init__(
        self,
        samples: Path,
        target_db: float,
        *,
        search_samples: int,
        rounds: int,
        worst_sample: bool = False,
    ) -> None:
        self.worst_sample = worst_sample
        data = np.load(samples)
        self.target_db = target_db
        self.rounds = rounds
        self.session: Session | None = None
        self.sets = {
            held_out: self._samples(data, *keys)
            for held_out, keys in ((False, ("E_", "ref_")), (True, ("C_", "cref_")))
        }
        inputs, outputs = self.sets[False]
        count = len(inputs)
        keep = np.linspace(0, count - 1, min(search_samples, count)).astype(int)
        self.calibration = inputs
        self.sets[False] = ([inputs[i] for i in keep], [outputs[i] for i in keep])
        self.seconds = 0.0

    @staticmethod
    def _samples(data: Any, of_input: str, of_output: str) -> tuple[list[Any], list[Any]]:
        def rows(mark: str) -> list[dict[str, Any]]:
            names = [key for key in data.files if key.startswith(mark)]
            return [
                {key.removeprefix(mark): data[key][i] for key in names}
                for i in range(len(data[names[0]]))
            ]

        return rows(of_input), rows(of_output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.session is not None:
            self.session.close()

    def __call__(self, model: Path, *, held_out: bool) -> Evaluation:
        return self._evaluate(model, *self.sets[held_out], self.rounds)

    def probe(self, model: Path) -> Evaluation:
        """The same on a few samples, for single ops."""
        inputs, outputs = self.sets[False]
        keep = np.linspace(0, len(inputs) - 1, min(PROBE_SAMPLES, len(inputs))).astype(int)
        return self._evaluate(model, [inputs[i] for i in keep], [outputs[i] for i in keep], 1)

    def _evaluate(
        self, model: Path, inputs: Sequence[Any], wanted: Sequence[Any], rounds: int
    ) -> Evaluation:
        begin = time.perf_counter()
        if self.session is None:
            self.session = Session(model)
        else:
            self.session.load(model)
        session = self.session
        signature = session.signatures[0]
        specs = {spec.name: spec for spec in signature.outputs}
        feeds = [fit_sample(one, signature, str(i)) for i, one in enumerate(inputs)]
        powers: dict[str, list[tuple[float, float]]] = {}
        latency = math.inf
        for turn in range(rounds):
            before = self._cpu_ms()
            for stored, want in zip(session.run(signature.name, feeds), wanted, strict=True):
                for name, reference in want.items() if turn == 0 else ():
                    real = real_values(stored[name], specs[name]).astype(np.float64)
                    error = float(np.square(reference - real).sum())
                    power = float(np.square(reference.astype(np.float64)).sum())
                    powers.setdefault(name, []).append((power, error))
            latency = min(latency, (self._cpu_ms() - before) / len(feeds))
        sqnr = min(
            _db(power, error)
            for rows in powers.values()
            for power, error in (
                rows if self.worst_sample else [tuple(map(math.fsum, zip(*rows, strict=True)))]
            )
            if power > 0
        )
        self.seconds += time.perf_counter() - begin
        return Evaluation(
            budget_margin=sqnr - self.target_db,
            sqnr_db=sqnr,
            latency_ms=latency,
            size_bytes=model.stat().st_size,
        )

    def _cpu_ms(self) -> float:
        """CPU time of the worker so far: unlike time on the wall, it holds on a busy machine."""
        assert self.session is not None
        schedule = Path(f"/proc/{self.session._process.pid}/schedstat").read_text()
        return int(schedule.split()[0]) / 1e6


def _db(power: float, error: float) -> float:
    return 10 * math.log10(power / error) if error else 200.0


def line(what: str, row: Candidate, whole: Candidate) -> str:
    e, f = row.evaluation, whole.evaluation
    held = "" if row.held_out is None else f"  held out {row.held_out.sqnr_db:6.2f} dB"
    return (
        f"{what:34s} {e.size_bytes / 2**20:7.3f} MB ({e.size_bytes / f.size_bytes:6.1%})  "
        f"{e.sqnr_db:6.2f} dB  {e.latency_ms:8.3f} ms ({e.latency_ms / f.latency_ms:5.2f})"
        f"{held}  {dict(row.levels) or ''}"
    )


def show(name: str, found: SearchResult) -> None:
    for row in found.rows:
        if not row.levels:
            ranges = f" {row.ranges}" if row.ranges else ""
            print(line(f"{name} {row.recipe.name}{ranges}", row, found.float32))
    for row in pareto(found.rows):
        if row.levels:
            print(line(f"{name}   pareto", row, found.float32))
    print(line(f"{name} auto{'' if found.met else ' (NOT MET)'}", found.best, found.float32))
    print(
        f"{name} {found.evaluations} evaluations, {found.seconds:.1f} s, "
        f"{'finished' if found.finished else 'time is out'}, {len(found.best.recipe.rules)} rules"
    )
    for o in found.obstacles[:4]:
        print(f"   {o.op} {o.tensors[0][:60]} {o.level} {o.sqnr_db:.1f} dB, {o.share:.0%}")


def calibrated(
    source: Path, evaluator: SqnrEvaluator, *, static: bool
) -> tuple[dict[str, Ranges], Moments]:
    """Ranges by each estimator if ``static``, and moments, of all samples that are not held out."""
    from tpu2edge.quantize.calibrate import calibrate

    estimators = ("minmax", "moving-average", "mse")
    (signature,) = signatures_of(read_tflite(source))
    found = calibrate(
        source,
        {signature.name: evaluator.calibration},
        estimators=estimators if static else ("minmax",),
        recipes=[recipe("int8-oscar"), recipe("int4-gptq")],
    )
    ranges = {estimator: found.ranges(estimator) for estimator in estimators} if static else {}
    return ranges, found.moments


def one_by_one(source: Path, evaluator: SqnrEvaluator) -> tuple[int, float]:
    """Evaluations and seconds of each unit alone at three levels, each by the plain quantizer."""
    units = units_of(read_tflite(source))
    begin, count = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder, Quantizer(source) as quantizer:
        target = Path(folder) / "one.tflite"
        for index, unit in enumerate(units):
            for level in ("int4-weights", "int8-weights", "float16"):
                if level not in unit.levels:
                    continue
                levels = tuple(level if i == index else FLOAT for i in range(len(units)))
                quantizer.quantize(target, Recipe(name="one", rules=rules_of(units, levels)))
                evaluator(target, held_out=False)
                count += 1
    return count, time.perf_counter() - begin


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--target", type=float, default=35.0)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--optimize", default="size")
    parser.add_argument("--slowest", type=float, default=None)
    parser.add_argument("--largest", type=float, default=None)
    parser.add_argument("--time-limit", type=float, default=None)
    parser.add_argument("--static", action="store_true", help="static recipes too")
    parser.add_argument("--no-moments", dest="moments", action="store_false")
    parser.add_argument("--levels", nargs="+", help="names of LEVELS to choose from")
    parser.add_argument("--worst-sample", action="store_true")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args(argv)
    for name in options.names:
        source = options.folder / f"{name}.tflite"
        with (
            SqnrEvaluator(
                options.folder / f"{name}.npz",
                options.target,
                search_samples=options.samples,
                rounds=options.rounds,
                worst_sample=options.worst_sample,
            ) as evaluator,
            tempfile.TemporaryDirectory() as folder,
        ):
            with Quantizer(source, remember=True) as quantizer:
                ranges, moments = calibrated(source, evaluator, static=options.static)
                found = search(
                    source,
                    Path(folder) / "best.tflite",
                    quantizer=quantizer,
                    evaluator=evaluator,
                    optimize=options.optimize,
                    ranges=ranges,
                    moments=moments if options.moments else None,
                    levels=options.levels,
                    slowest=options.slowest,
                    largest=options.largest,
                    time_limit_s=options.time_limit,
                )
            show(name, found)
            print(f"{name} of it in the evaluator: {evaluator.seconds:.1f} s")
            if options.compare:
                count, seconds = one_by_one(source, evaluator)
                print(
                    f"{name} one op at a time, three levels: {count} evaluations, {seconds:.1f} s; "
                    f"search / that = {found.seconds / seconds:.2f}"
                )


if __name__ == "__main__":
    main()
