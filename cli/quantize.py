"""``tpu2edge quantize``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpu2edge.cli.options import (
    AsJson,
    Budgets,
    BundleForce,
    CalibrationData,
    CalibrationMethod,
    DeviceFiles,
    Devices,
    KeepFloat,
    Levels,
    MaxLatency,
    MaxSize,
    Metric,
    Optimize,
    Quiet,
    RecipeFiles,
    Recipes,
    Seed,
    Threads,
    TimeLimit,
)

__all__ = ["quantize"]


def quantize(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="BUNDLE_OR_TFLITE",
            help="A bundle that holds its float32 file, or a float .tflite.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The bundle folder to make.")
    ],
    recipe: Recipes = None,
    recipe_file: RecipeFiles = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Samples to check a .tflite with, by input name: .npz, .safetensors, or a folder of "
            "them. Repeatable. Without it: random numbers. A bundle has its own.",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="What a .tflite is held to: a reference folder or a bundle. Without it: the "
            ".tflite's own outputs.",
        ),
    ] = None,
    num_samples: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="How many samples to make up without --inputs. [8]"),
    ] = None,
    budget: Budgets = None,
    metric: Metric = None,
    keep_float: KeepFloat = None,
    calibration_data: CalibrationData = None,
    calibration_method: CalibrationMethod = "minmax",
    optimize: Optimize = "size",
    levels: Levels = None,
    max_size: MaxSize = None,
    max_latency: MaxLatency = None,
    time_limit: TimeLimit = None,
    device: Devices = None,
    device_file: DeviceFiles = None,
    threads: Threads = None,
    seed: Seed = 0,
    force: BundleForce = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what ai-edge-quantizer writes.")
    ] = False,
) -> int:
    """Quantize a float .tflite file, and check what comes out.

    \b
    Examples:
      tpu2edge quantize out --recipe int8 --recipe int4 -o smaller
      tpu2edge quantize model.tflite --inputs samples.npz --recipe int8-static -o smaller
      tpu2edge quantize model.tflite --inputs samples.npz --recipe auto --budget 'sqnr>=35dB' -o best
    """
    from tpu2edge.cli import printing
    from tpu2edge.cli.display import Display
    from tpu2edge.cli.supervise import run_job
    from tpu2edge.requests import QuantizeRequest

    request = QuantizeRequest(
        source=source,
        output=output,
        recipes=tuple(recipe or (() if recipe_file else ("int8",))),
        recipe_files=tuple(recipe_file or ()),
        inputs=tuple(inputs or ()),
        reference=reference,
        num_samples=num_samples,
        budgets=tuple(budget or ()),
        metric=metric,
        keep_float=tuple(keep_float or ()),
        calibration=tuple(calibration_data or ()),
        estimator=calibration_method,
        optimize=optimize,
        levels=tuple(levels or ()),
        max_size=max_size,
        max_latency=max_latency,
        time_limit_s=time_limit,
        devices=tuple(device or ()),
        device_files=tuple(device_file or ()),
        threads=threads,
        seed=seed,
        force=force,
    )
    outcome = run_job(
        "quantize", request.to_json(), display=Display(quiet=quiet, verbose=verbose), output=output
    )
    printing.print_export(outcome, output, as_json=json, quiet=quiet, word="quantize")
    return outcome.exit_code
