"""``tpu2edge check``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpu2edge.cli.options import AsJson, DeviceFiles, Devices, Metric, Quiet, Threads

__all__ = ["check"]


def check(
    target: Annotated[
        Path, typer.Argument(metavar="BUNDLE_OR_TFLITE", help="A bundle folder or a .tflite file.")
    ],
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR_OR_FILE",
            help="Inputs and outputs to compare with: a reference folder (or one of those, a signature "
            "each), or a bundle. Without it: the "
            "bundle's own.",
        ),
    ] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT",
            help="Bounds that the numbers must keep, as 'sqnr>=30dB' or 'logits:top1>=0.99'. "
            "Repeatable. Without it: the bundle's or the recipe's own.",
        ),
    ] = None,
    device: Devices = None,
    device_file: DeviceFiles = None,
    threads: Threads = None,
    signature: Annotated[
        str | None, typer.Option(metavar="NAME", help="The entry to check; else all of them.")
    ] = None,
    metric: Metric = None,
    junit: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report as JUnit XML, too, for CI."),
    ] = None,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what LiteRT writes.")
    ] = False,
) -> int:
    """Run a .tflite file and compare its outputs with a reference.

    \b
    Examples:
      tpu2edge check out
      tpu2edge check out --budget 'logits:sqnr>=60dB' --json
      tpu2edge check model.tflite --reference tpu-reference/
      tpu2edge check out --device host,arm-v8.0,arm-v8.2-dotprod --junit report.xml
    """
    from tpu2edge.cli import printing
    from tpu2edge.cli.display import Display
    from tpu2edge.cli.supervise import run_job
    from tpu2edge.requests import CheckRequest

    request = CheckRequest(
        target=target,
        reference=reference,
        budgets=tuple(budget or ()),
        devices=tuple(device or ()),
        device_files=tuple(device_file or ()),
        threads=threads,
        signature=signature,
        metric=metric,
        junit=junit,
    )
    outcome = run_job("check", request.to_json(), display=Display(quiet=quiet, verbose=verbose))
    printing.print_check(outcome, target, as_json=json, quiet=quiet)
    return outcome.exit_code
