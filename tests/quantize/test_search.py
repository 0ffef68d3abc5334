"""The search: on made-up noises, where the answer is known, and on real files."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tpu2edge.errors import BundleError, OptionError, QuantizationError
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.quantize.apply import Quantizer
from tpu2edge.quantize.calibrate import calibrate
from tpu2edge.quantize.measuring import remove_dead
from tpu2edge.quantize.recipes import Recipe, recipe, recipe_from_file
from tpu2edge.quantize.search import Candidate, Evaluation, pareto, search
from tpu2edge.quantize.sensitivity import (
    FLOAT,
    LEVELS,
    expected_bytes,
    rules_of,
    shared_bytes,
    units_of,
)
from tpu2edge.runtime_check.devices.client import Session

WIDTHS = (64, 96, 128, 32, 64, 160, 64)


@pytest.fixture(scope="module")
def chain(make_linear) -> Path:
    """Six linear layers of several sizes, one after the other."""
    rng = np.random.default_rng(3)
    return make_linear(
        *(
            (rng.standard_t(4, (after, width)) / math.sqrt(2 * width)).astype("float32")
            for width, after in itertools.pairwise(WIDTHS)
        )
    )


class Imagined:
    """A quantizer and an evaluator of a made-up world in which noises add up exactly.

    A "file" is its rules as JSON, padded to the size that it would have.
    """

    def __init__(
        self, source: Path, target_db: float, *, flatters_db: float = 0.0, seed: int = 7
    ) -> None:
        self.source = source
        self.units = units_of(read_tflite(source))
        self.target_db = target_db
        self.flatters_db = flatters_db  # by how much search samples look better than held-out ones
        self.float_bytes = source.stat().st_size
        # Units differ by up to 20 dB; and from what a level is usually worth, by up to 4 dB.
        rng = np.random.default_rng(seed)
        self.noises = [
            {
                level: float(LEVELS[level].noise * worth * 10 ** rng.uniform(-0.4, 0.4))
                for level in unit.levels
            }
            for unit, worth in zip(
                self.units, 10 ** rng.uniform(-6.0, -4.0, len(self.units)), strict=True
            )
        ]
        self.runs: list[tuple[str, bool]] = []
        self.stop_at: int | None = None

    def quantize(
        self, target: Path, recipe: Recipe, ranges: Any = None, *, moments: Any = None
    ) -> None:
        text = json.dumps(recipe.to_json())
        size = self.size(self.levels(recipe.to_json()))
        target.write_text(text.ljust(size))

    def levels(self, rules: list[Any]) -> tuple[str, ...]:
        found = []
        for unit in self.units:
            level = FLOAT
            for rule in rules:
                if rule["operation"] in ("*", unit.op) and re.search(rule["regex"], unit.name):
                    for known in LEVELS.values():
                        same = known.rule(rule["regex"]) == {**rule, "operation": "*"}
                        if same and known.name in unit.levels:
                            level = known.name
            found.append(level)
        return tuple(found)

    def size(self, levels: tuple[str, ...]) -> int:
        saved = sum(expected_bytes(u, level) for u, level in zip(self.units, levels, strict=True))
        return self.float_bytes + saved + shared_bytes(self.units, levels)

    def noise(self, levels: tuple[str, ...]) -> float:
        return sum(noises[level] for noises, level in zip(self.noises, levels, strict=True))

    def __call__(self, model: Path, *, held_out: bool) -> Evaluation:
        if self.stop_at is not None and len(self.runs) >= self.stop_at:
            raise KeyboardInterrupt
        data = model.read_bytes()
        is_float = data == self.source.read_bytes()
        text = "[]" if is_float else data.decode().strip()
        self.runs.append((text, held_out))
        noise = 1e-12 + self.noise(self.levels(json.loads(text)))
        sqnr = -10 * math.log10(noise) - (self.flatters_db if held_out else 0.0)
        return Evaluation(
            budget_margin=sqnr - self.target_db, sqnr_db=sqnr, latency_ms=1.0, size_bytes=0
        )

    def smallest(self) -> int:
        """Size of the smallest of all assignments within the budget."""
        allowed = 10 ** (-(self.target_db + self.flatters_db) / 10) - 1e-12
        # Units one by one; of two beginnings the one that is larger and noisier is dropped.
        fronts: dict[frozenset[int], list[tuple[int, float]]] = {frozenset(): [(0, 0.0)]}
        for unit, noises in zip(self.units, self.noises, strict=True):
            after: dict[frozenset[int], list[tuple[int, float]]] = {}
            for matrices, front in fronts.items():
                for level, noise in noises.items():
                    key = matrices | ({unit.rotation} if LEVELS[level].rotates else set())
                    after.setdefault(key, []).extend(
                        (size + expected_bytes(unit, level), total + noise)
                        for size, total in front
                        if total + noise <= allowed
                    )
            fronts = {}
            for key, states in after.items():
                kept: list[tuple[int, float]] = []
                for state in sorted(states):
                    if not kept or state[1] < kept[-1][1]:
                        kept.append(state)
                fronts[key] = kept
        return self.float_bytes + min(
            front[0][0] + sum(4 * rows * rows for rows in key)
            for key, front in fronts.items()
            if front
        )


def found_by(world: Imagined, folder: Path, **options: Any):
    return search(world.source, folder / "best.tflite", quantizer=world, evaluator=world, **options)


class Timed(Imagined):
    """The same with times: what an op takes at a level depends on its kind."""

    #: Dynamic convolutions that are slow and matrices that are fast, as on x86.
    TIMES: Mapping[str, Mapping[str, float]] = {
        "CONV_2D": {"int8-dynamic": 3.0, "int8-weights": 1.1},
        "CONV_2D_TRANSPOSE": {"int8-dynamic": 3.0, "int8-weights": 1.1},
        "DEPTHWISE_CONV_2D": {"int8-dynamic": 3.0, "int8-weights": 1.1},
        "FULLY_CONNECTED": {"int8-dynamic": 0.3, "int8-weights": 1.1},
    }

    def __call__(self, model: Path, *, held_out: bool) -> Evaluation:
        evaluation = super().__call__(model, held_out=held_out)
        levels = self.levels(json.loads(self.runs[-1][0]))
        took = [
            unit.macs * self.TIMES.get(unit.op, {}).get(level, 1.0)
            for unit, level in zip(self.units, levels, strict=True)
        ]
        return replace(evaluation, latency_ms=sum(took) / 1e6)


def test_the_fastest_mix_goes_by_what_each_kind_of_op_takes_here(mixed: Path, tmp_path: Path):
    world = Timed(mixed, 30.0)
    found = found_by(world, tmp_path, optimize="latency")
    assert found.met
    chosen = world.levels(list(found.best.recipe.rules))
    for unit, level in zip(world.units, chosen, strict=True):
        if "CONV" in unit.op:
            assert level != "int8-dynamic"
    fast = sum(
        unit.macs
        for unit, level in zip(world.units, chosen, strict=True)
        if unit.op == "FULLY_CONNECTED" and level == "int8-dynamic"
    )
    assert fast > 0.5 * sum(unit.macs for unit in world.units if unit.op == "FULLY_CONNECTED")
    # No whole recipe is as fast: int8 slows the convolutions down, float32 the matrices.
    whole = [row.evaluation.latency_ms for row in found.rows if row.recipe.name != "auto"]
    assert found.best.evaluation.latency_ms < 0.999 * min(whole)


@pytest.mark.parametrize("seed", [3, 4])
@pytest.mark.parametrize("target_db", [20, 36, 52])
def test_the_file_is_within_three_percent_of_the_smallest_there_is(
    chain: Path, tmp_path: Path, target_db: float, seed: int
):
    world = Imagined(chain, target_db, seed=seed)
    found = found_by(world, tmp_path)
    assert found.met
    assert found.finished
    assert found.best.evaluation.budget_margin >= 0
    assert found.best.held_out is not None
    assert found.best.evaluation.size_bytes <= 1.03 * world.smallest()
    assert found.evaluations < 50
    assert (tmp_path / "best.tflite").stat().st_size == found.best.evaluation.size_bytes


def test_the_same_inputs_give_the_same_answer_and_the_same_way_to_it(chain: Path, tmp_path: Path):
    first, second = Imagined(chain, 40), Imagined(chain, 40)
    one, two = found_by(first, tmp_path), found_by(second, tmp_path)
    assert first.runs == second.runs
    assert one.best == two.best
    assert one.sha256 == two.sha256


@pytest.mark.parametrize("stop_at", [0, 6, 13])
def test_a_search_that_was_killed_goes_on_and_ends_the_same_with_nothing_run_twice(
    chain: Path, tmp_path: Path, stop_at: int
):
    whole = Imagined(chain, 40)
    wanted = found_by(whole, tmp_path)
    world = Imagined(chain, 40)
    world.stop_at = stop_at
    checkpoint = tmp_path / "checkpoint.json"
    with pytest.raises(KeyboardInterrupt):
        found_by(world, tmp_path, checkpoint=checkpoint)
    world.stop_at = None
    found = found_by(world, tmp_path, checkpoint=checkpoint)
    assert world.runs == whole.runs
    assert len(set(world.runs)) == len(world.runs)
    assert found.best == wanted.best
    assert found.sha256 == wanted.sha256
    assert found.evaluations == wanted.evaluations
    assert found.evaluations_now == len(whole.runs) - stop_at
    # Once more: all is known.
    again = found_by(world, tmp_path, checkpoint=checkpoint)
    assert again.evaluations_now == 0
    assert again.best == wanted.best


def test_what_a_killed_search_has_left_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for pid in (gone.pid, os.getpid()):
        (tmp_path / f".tpu2edge-search-{pid}-abc").mkdir()
    remove_dead(tmp_path, ".tpu2edge-search-")
    assert [one.name for one in tmp_path.iterdir()] == [f".tpu2edge-search-{os.getpid()}-abc"]


def test_a_file_within_the_budget_is_on_disk_as_soon_as_one_is_known(chain: Path, tmp_path: Path):
    world = Imagined(chain, 40)
    world.stop_at = 1
    with pytest.raises(KeyboardInterrupt):
        found_by(world, tmp_path)
    assert (tmp_path / "best.tflite").read_bytes() == chain.read_bytes()
    world = Imagined(chain, 40)
    world.stop_at = 2  # float16 is known by now, and fits
    with pytest.raises(KeyboardInterrupt):
        found_by(world, tmp_path)
    stored = recipe_from_file(tmp_path / "best.recipe.json")
    assert world.levels(list(stored.rules)) == ("float16",) * 6
    assert list(tmp_path.glob(".*")) == []


def test_the_time_limit_ends_it_with_the_best_so_far(chain: Path, tmp_path: Path):
    world = Imagined(chain, 40)
    found = found_by(world, tmp_path, time_limit_s=0.0)
    assert not found.finished
    assert found.met
    assert found.best.recipe.rules == ()  # float32 itself: nothing else was begun
    assert found.evaluations == 2  # and its held-out figures
    few = found_by(Imagined(chain, 40), tmp_path, max_evaluations=8)
    assert not few.finished
    assert few.met
    assert few.best.evaluation.size_bytes < chain.stat().st_size / 1.8
    assert few.evaluations <= 9


def test_what_held_out_samples_refute_is_given_up_for_a_quieter_file(chain: Path, tmp_path: Path):
    world = Imagined(chain, 40, flatters_db=0.8)
    found = found_by(world, tmp_path)
    assert found.met
    assert found.best.held_out is not None
    assert found.best.held_out.budget_margin >= 0
    assert found.best.evaluation.budget_margin >= 0.8
    assert any(row.held_out and row.held_out.budget_margin < 0 for row in found.rows)
    assert found.best.evaluation.size_bytes <= 1.03 * world.smallest()


def test_an_unreachable_budget_tells_how_far_it_got_and_what_stands_in_the_way(
    chain: Path, tmp_path: Path
):
    world = Imagined(chain, 62)
    for noises in world.noises:
        noises.update(dict.fromkeys(noises, 1e-8) | {FLOAT: 0.0})
    # However they are quantized: 40 and 50 dB, where 62 are wanted. In float32 w2 is 9 % of the
    # weights, w4 is 23 %, so that only w2 can be within a file of 30 %.
    for index, noise in ((2, 1e-4), (4, 1e-5)):
        world.noises[index].update(dict.fromkeys(world.noises[index], noise) | {FLOAT: 0.0})
    found = found_by(world, tmp_path, largest=0.3)
    assert not found.met
    assert found.finished
    best = found.best.evaluation
    assert best.size_bytes <= 0.3 * chain.stat().st_size
    assert best.budget_margin == pytest.approx(50 - 62, abs=0.1)
    assert [(o.tensors, o.op) for o in found.obstacles] == [(("w4",), "FULLY_CONNECTED")]
    assert found.obstacles[0].sqnr_db == pytest.approx(50, abs=0.1)
    assert found.obstacles[0].share == pytest.approx(1.0, abs=0.01)
    assert (tmp_path / "best.tflite").stat().st_size == best.size_bytes


def test_when_float32_itself_misses_no_layer_is_blamed(chain: Path, tmp_path: Path):
    found = found_by(Imagined(chain, 130), tmp_path)
    assert not found.met
    assert found.float32.evaluation.budget_margin == pytest.approx(-10.0)
    assert found.obstacles == ()


def test_files_that_do_not_run_are_passed_over(chain: Path, tmp_path: Path):
    class Broken(Imagined):
        def __call__(self, model: Path, *, held_out: bool) -> Evaluation:
            e = super().__call__(model, held_out=held_out)
            levels = self.levels(json.loads(self.runs[-1][0]))
            if "int8-dynamic" in levels or "int4-dynamic" in levels:
                return replace(e, sqnr_db=-math.inf, budget_margin=-math.inf)
            if set(levels) == {FLOAT}:  # equal to the reference, bit for bit
                return replace(e, sqnr_db=math.inf, budget_margin=math.inf)
            return e

    found = found_by(Broken(chain, 36), tmp_path)
    assert found.met
    assert found.best.evaluation.size_bytes < chain.stat().st_size / 3
    assert not {"int8-dynamic", "int4-dynamic"} & set(found.best.levels)


def test_a_checkpoint_of_another_search_is_refused(chain: Path, tmp_path: Path):
    checkpoint = tmp_path / "checkpoint.json"
    found_by(Imagined(chain, 40), tmp_path, checkpoint=checkpoint, fingerprint="a")
    with pytest.raises(OptionError, match="its fingerprint is 'a', not 'b'"):
        found_by(Imagined(chain, 40), tmp_path, checkpoint=checkpoint, fingerprint="b")
    checkpoint.write_text(checkpoint.read_text()[:100])
    with pytest.raises(BundleError, match="damaged"):
        found_by(Imagined(chain, 40), tmp_path, checkpoint=checkpoint, fingerprint="a")


def test_unknown_levels_and_goals_are_refused(chain: Path, tmp_path: Path):
    with pytest.raises(OptionError, match="unknown level 'int7'"):
        found_by(Imagined(chain, 40), tmp_path, levels=["int7"])
    with pytest.raises(OptionError, match="cannot optimize 'beauty'"):
        found_by(Imagined(chain, 40), tmp_path, optimize="beauty")


def test_pareto_keeps_what_no_other_beats():
    def row(size: int, sqnr: float, ms: float) -> Candidate:
        return Candidate(
            recipe=Recipe(name="x", rules=()),
            ranges=None,
            evaluation=Evaluation(budget_margin=0, sqnr_db=sqnr, latency_ms=ms, size_bytes=size),
        )

    small, quiet, fast = row(1, 10, 3), row(3, 50, 3), row(3, 10, 1)
    beaten = row(3, 10, 3)
    assert pareto([beaten, fast, quiet, small]) == (small, quiet, fast)


# -------------------------------------------------------------------------------- real files


class Real:
    """Runs files for real, and compares one output with the float file's."""

    def __init__(
        self, source: Path, target_db: float, samples: list[dict[str, Any]], output: str
    ) -> None:
        self.target_db = target_db
        half = len(samples) // 2
        self.samples = {False: samples[:half], True: samples[half:]}
        self.output = output
        self.session = Session(source)
        self.wanted = {key: self._run(samples) for key, samples in self.samples.items()}
        self.runs = 0

    def _run(self, samples: list[dict[str, Any]]) -> np.ndarray:
        name = self.session.signatures[0].name
        outs = self.session.run(name, samples)
        return np.stack([out[self.output] for out in outs]).astype("float64")

    def __call__(self, model: Path, *, held_out: bool) -> Evaluation:
        self.runs += 1
        self.session.load(model)
        wanted = self.wanted[held_out]
        error = np.square(self._run(self.samples[held_out]) - wanted).sum()
        sqnr = 10 * math.log10(np.square(wanted).sum() / error) if error else 150.0
        return Evaluation(
            budget_margin=sqnr - self.target_db, sqnr_db=sqnr, latency_ms=1.0, size_bytes=0
        )


@pytest.fixture
def real(chain: Path) -> Iterator[Real]:
    rows = np.random.default_rng(11).standard_normal((24, 1, WIDTHS[0])).astype("float32")
    evaluator = Real(chain, 30.0, [{"x": x} for x in rows], "y")
    yield evaluator
    evaluator.session.close()


@pytest.fixture
def real_mixed(mixed: Path) -> Iterator[Real]:
    rng = np.random.default_rng(12)
    samples = [
        {
            "image": rng.standard_normal((1, 3, 16, 16)).astype("float32"),
            "ids": rng.integers(0, 100, (1, 12)).astype("int32"),
        }
        for _ in range(32)
    ]
    evaluator = Real(mixed, 30.0, samples, "logits")
    yield evaluator
    evaluator.session.close()


@pytest.fixture(scope="module")
def wide_ranges(mixed_ranges) -> dict[str, Any]:
    """Of the mixed network, with room for the samples that are made up here."""
    return {"minmax": {name: (low * 1.5, high * 1.5) for name, (low, high) in mixed_ranges.items()}}


def test_static_levels_that_were_asked_for_are_mixed_until_the_budget_is_met(
    mixed: Path, real_mixed: Real, wide_ranges, tmp_path: Path
):
    real_mixed.target_db = 45.0  # between all in 8 bits and all in 16
    with Quantizer(mixed, remember=True) as quantizer:
        found = search(
            mixed,
            tmp_path / "best.tflite",
            quantizer=quantizer,
            evaluator=real_mixed,
            ranges=wide_ranges,
            levels=("int8-static", "int16-static"),
        )
        whole = {row.recipe.name: row for row in found.rows if row.recipe.name != "auto"}
        assert (
            whole["int8-static"].evaluation.sqnr_db < 45 < whole["int16-static"].evaluation.sqnr_db
        )
        assert found.met
        assert found.best.levels["int8-static"] >= 1
        # Rows that are looked up have no static kernel: what the static recipes do to them, too.
        assert set(found.best.levels) == {"int8-static", "int16-static", "int8-dynamic"}
        assert found.best.levels["int8-dynamic"] == 1
        again = tmp_path / "again.tflite"
        quantizer.quantize(
            again, recipe_from_file(tmp_path / "best.recipe.json"), wide_ranges["minmax"]
        )
    assert again.read_bytes() == (tmp_path / "best.tflite").read_bytes()
    tensors = read_tflite(again).subgraphs[0].tensors
    assert {"int8", "int16"} <= {tensor.dtype for tensor in tensors}


def test_float32_is_no_answer_where_only_static_levels_were_asked_for(
    mixed: Path, real_mixed: Real, wide_ranges, tmp_path: Path
):
    real_mixed.target_db = 90.0
    with Quantizer(mixed, remember=True) as quantizer:
        found = search(
            mixed,
            tmp_path / "best.tflite",
            quantizer=quantizer,
            evaluator=real_mixed,
            ranges=wide_ranges,
            levels=("int8-static",),
        )
    assert not found.met
    assert found.best.recipe.rules
    assert found.float32.evaluation.budget_margin > 0


def test_levels_that_weigh_errors_by_activations_make_the_file_smaller(chain: Path, tmp_path: Path):
    rng = np.random.default_rng(17)
    mix = rng.standard_normal((8, WIDTHS[0]))  # few directions are what real inputs have, too
    rows = (rng.standard_normal((224, 1, 8)) @ mix).astype("float32")
    samples = [{"x": x} for x in rows]
    real = Real(chain, 24.0, samples[200:], "y")
    recipes = [recipe("int8-oscar"), recipe("int4-gptq")]
    moments = calibrate(chain, {"serving_default": samples[:200]}, recipes=recipes).moments
    found = {}
    with real.session, Quantizer(chain, remember=True) as quantizer:
        for name, known in (("without", None), ("with", moments)):
            target = tmp_path / f"{name}.tflite"
            found[name] = search(chain, target, quantizer=quantizer, evaluator=real, moments=known)
            assert found[name].met
        weighed = {level for level in found["with"].best.levels if LEVELS[level].moments}
        assert weighed
        again = tmp_path / "again.tflite"
        quantizer.quantize(again, found["with"].recipe, moments=moments)
    sizes = [found[name].best.evaluation.size_bytes for name in ("with", "without")]
    assert sizes[0] < sizes[1]
    assert again.read_bytes() == (tmp_path / "with.tflite").read_bytes()


def test_static_levels_without_ranges_are_refused(chain: Path, real: Real, tmp_path: Path):
    with pytest.raises(QuantizationError, match="'int8-static' needs calibration"):
        search(
            chain,
            tmp_path / "best.tflite",
            quantizer=Quantizer(chain),
            evaluator=real,
            levels=("int8-weights", "int8-static"),
        )


def test_on_real_files_it_finds_what_trying_all_finds(chain: Path, real: Real, tmp_path: Path):
    levels = ("int8-weights", "int4-dynamic")
    units = units_of(read_tflite(chain), levels)
    target = tmp_path / "all.tflite"
    with Quantizer(chain, remember=True) as quantizer:
        found = search(
            chain,
            tmp_path / "best.tflite",
            quantizer=quantizer,
            evaluator=real,
            levels=levels,
        )
        sizes = []
        # Float32 is four times int8: with it a unit never is among the smallest here.
        for choice in itertools.product(levels, repeat=len(units)):
            quantizer.quantize(target, Recipe(name="all", rules=rules_of(units, choice)))
            both = [real(target, held_out=held_out).budget_margin for held_out in (False, True)]
            if min(both) >= 0:
                sizes.append(target.stat().st_size)
    assert found.met
    assert found.best.evaluation.size_bytes <= 1.03 * min(sizes)
    assert found.evaluations < 40


def test_weights_rounded_in_place_lead_to_the_same_file_with_fewer_made(
    chain: Path, real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real.target_db = 36.0
    made: list[int] = []
    best: list[bytes] = []
    for least in (1 << 40, 0):
        monkeypatch.setattr("tpu2edge.quantize.search._SPLICED", least)
        with Quantizer(chain, remember=True) as quantizer:
            real_quantize, count = quantizer.quantize, len(made)

            def counted(*args: Any, go: Any = real_quantize, **rest: Any) -> Any:
                made[-1] += 1
                return go(*args, **rest)

            made.append(0)
            monkeypatch.setattr(quantizer, "quantize", counted)
            target = tmp_path / f"{count}.tflite"
            found = search(chain, target, quantizer=quantizer, evaluator=real)
        assert found.met
        best.append(target.read_bytes())
    assert best[0] == best[1]
    assert made[1] <= made[0] - len(WIDTHS) // 2


def test_its_recipe_makes_the_same_file_byte_for_byte(chain: Path, real: Real, tmp_path: Path):
    best = tmp_path / "best.tflite"
    real.target_db = 36.0  # a little more than the int8 recipes have
    with Quantizer(chain, remember=True) as quantizer:
        found = search(chain, best, quantizer=quantizer, evaluator=real)
    stored = recipe_from_file(tmp_path / "best.recipe.json")
    assert stored.rules == found.best.recipe.rules
    with Quantizer(chain) as plain:
        plain.quantize(tmp_path / "again.tflite", stored)
    assert (tmp_path / "again.tflite").read_bytes() == best.read_bytes()
    assert len(found.best.levels) > 1
