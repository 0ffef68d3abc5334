"""``tpu2edge doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from tpu2edge.cli.options import AsJson

__all__ = ["doctor"]


def doctor(
    tpu: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Compile this model for TPUs instead (none is needed), and say in what precision "
            "each would compute it.",
        ),
    ] = None,
    generation: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --tpu: v2, v3, v4, v5e, v5p, v6e or tpu7x. Repeatable. [v4 and later]",
        ),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="NAME", help="With --tpu: default, high or highest.")
    ] = "default",
    signature_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="With --tpu: which of the model's signatures."),
    ] = None,
    json: AsJson = False,
) -> int:
    """Say what is installed here, and what is missing.

    Versions, whether LiteRT runs, and what a TPU, adb or QEMU would need.

    Ends with 0 when `tpu2edge export` can run on this machine, with 4 when not. With --tpu: 0 when
    every generation compiles the model, 3 when one does not, 4 without the TPU's compiler.

    \b
    Examples:
      tpu2edge doctor
      tpu2edge doctor --tpu model.py --generation v5e --generation tpu7x
    """
    from tpu2edge.cli import printing

    if tpu is not None:
        from tpu2edge.cli.display import Display
        from tpu2edge.cli.supervise import run_job
        from tpu2edge.requests import SurveyRequest

        request = SurveyRequest(
            source=tpu,
            generations=tuple(generation or ()),
            precision=precision,
            signature_name=signature_name,
        )
        outcome = run_job("survey", request.to_json(), display=Display())
        printing.print_survey(outcome, as_json=json)
        return outcome.exit_code
    if generation or precision != "default" or signature_name:
        raise typer.BadParameter(
            "--generation, --precision and --signature-name go with --tpu MODEL"
        )
    from tpu2edge.doctor import diagnose

    found = diagnose()
    if json:
        printing.print_json(found.to_json())
    else:
        printing.print_diagnosis(found)
    return found.exit_code
