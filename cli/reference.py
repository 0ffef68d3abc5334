"""``tpu2edge reference import`` and ``tpu2edge reference show``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpu2edge.cli.options import AsJson, ReferenceForce, ReferenceOutput, ReferenceSignatureName

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make a reference of golden outputs, or show one.",
)


@app.command("import")
def import_(
    inputs: Annotated[
        Path, typer.Option(metavar="FILE", help="Inputs by name: .npz or .safetensors.")
    ],
    outputs: Annotated[
        Path, typer.Option(metavar="FILE", help="Outputs by name, for the same samples.")
    ],
    precision: Annotated[
        str,
        typer.Option(
            metavar="LABEL",
            help="In what the outputs were computed: f32, f64, bf16-default, bf16_3x-high, "
            "f32-highest (the last three on a TPU), bf16-model or f16-model.",
        ),
    ],
    output: ReferenceOutput,
    batch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="How many rows of the arrays are one sample: the model's batch. Without it the "
            "first axis counts the samples and is no part of them.",
        ),
    ] = None,
    device_kind: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The device they were computed on, e.g. 'TPU v5e'."),
    ] = None,
    signature_name: ReferenceSignatureName = "serving_default",
    force: ReferenceForce = False,
    json: AsJson = False,
) -> int:
    """Make a reference of outputs that you have already.

    Nothing says from which weights they are: the export then proves it by the numbers alone.

    \b
    Example:
      tpu2edge reference import --inputs x.npz --outputs y.npz --precision bf16-default -o ref
    """
    from tpu2edge.capturing import describe_reference, import_reference
    from tpu2edge.cli import printing
    from tpu2edge.requests import ImportRequest

    import_reference(
        ImportRequest(
            inputs=inputs,
            outputs=outputs,
            precision=precision,
            output=output,
            batch=batch,
            device_kind=device_kind,
            signature_name=signature_name,
            force=force,
        )
    )
    printing.print_reference(describe_reference(output), as_json=json)
    return 0


@app.command()
def show(
    path: Annotated[
        Path, typer.Argument(metavar="DIR", help="A reference folder, or a bundle: its reference.")
    ],
    json: AsJson = False,
) -> int:
    """Show who computed a reference, in which precision, on what samples; checks its hashes.

    \b
    Example:
      tpu2edge reference show ref
    """
    from tpu2edge.capturing import describe_reference
    from tpu2edge.cli import printing

    printing.print_reference(describe_reference(path), as_json=json)
    return 0
