"""``tpu2edge capture``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpu2edge.cli.options import (
    AsJson,
    Checkpoint,
    Quiet,
    ReferenceForce,
    ReferenceOutput,
    Seed,
)

__all__ = ["capture"]


def capture(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="file.py, file.py:function or package.module:function, as for export; with "
            "example inputs.",
        ),
    ],
    output: ReferenceOutput,
    checkpoint: Checkpoint = None,
    inputs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Samples by input name: .npz, .safetensors, or a folder of them. Repeatable. "
            "Without it: the example inputs and seeded variations of them.",
        ),
    ] = None,
    num_samples: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="How many samples to make up when no --inputs are given."
        ),
    ] = 8,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where to run the model: tpu (TorchTPU), xla (PyTorch/XLA), jax (torchax), cuda, "
            "cpu … [where it is]",
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of float32 matmuls: default, high or highest. [as the device is set]",
        ),
    ] = None,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Under torch.compile instead of eager.")
    ] = False,
    signature_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Name of the entry, as for export; of a model with several signatures the one to "
            "run. [serving_default]",
        ),
    ] = None,
    seed: Seed = 0,
    force: ReferenceForce = False,
    json: AsJson = False,
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show what torch and the device write.")
    ] = False,
) -> int:
    """Run a PyTorch model on its device and keep inputs and outputs as a reference.

    The folder can be copied anywhere; `tpu2edge export --reference DIR` holds a file to it.

    \b
    Examples:
      tpu2edge capture model.py --checkpoint step-1000/ --inputs samples.npz --device tpu -o ref
      tpu2edge capture model.py --device jax --compiled --precision highest -o ref
      tpu2edge export model.py --checkpoint step-1000/ --reference ref -o out
      tpu2edge capture coder.py --signature-name encode -o refs/encode
    """
    from tpu2edge.cli import printing
    from tpu2edge.cli.display import Display
    from tpu2edge.cli.supervise import run_job
    from tpu2edge.requests import CaptureRequest

    request = CaptureRequest(
        source=model,
        output=output,
        checkpoint=checkpoint,
        inputs=tuple(inputs or ()),
        num_samples=num_samples,
        device=device,
        precision=precision,
        compiled=compiled,
        signature_name=signature_name,
        seed=seed,
        force=force,
    )
    outcome = run_job(
        "capture",
        request.to_json(),
        display=Display(quiet=quiet, verbose=verbose),
        output=output,
    )
    printing.print_capture(outcome, output, as_json=json, quiet=quiet)
    return outcome.exit_code
