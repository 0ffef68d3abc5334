"""The commands together, and what becomes of an exception.

    Tpu2EdgeError      its words on stderr, its own exit status
    usage              what is wrong and the nearest known word, 2
    Ctrl-C             130 (another signal: 128 + its number)
    closed pipe        silent, 141 as a shell reports SIGPIPE
    anything else      a fault of tpu2edge: its traceback, 70

With ``--json`` an error is one document on stdout, ``{"error": {...}}``.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from typer.main import get_command

import tpu2edge
from tpu2edge.cli import devices, reference
from tpu2edge.cli.capture import capture
from tpu2edge.cli.check import check
from tpu2edge.cli.doctor import doctor
from tpu2edge.cli.export import export
from tpu2edge.cli.inspect import inspect
from tpu2edge.cli.quantize import quantize
from tpu2edge.errors import Tpu2EdgeError

__all__ = ["app", "run"]

BUG_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h
_PIPE_EXIT_CODE = 141  # 128 + SIGPIPE

app = typer.Typer(
    name="tpu2edge",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: rich would cost a third of the time it takes
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for command in (export, quantize, check, capture, inspect, doctor):
    app.command()(command)
app.add_typer(reference.app, name="reference")
app.add_typer(devices.app, name="devices")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"tpu2edge {tpu2edge.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """From a PyTorch model trained on TPU to a checked LiteRT (.tflite) file.

    \b
    Examples:
      tpu2edge doctor
      tpu2edge export model.py -o out
      tpu2edge export package.module:get_model --checkpoint step-1000/ --inputs samples.npz -o out
      tpu2edge quantize out --recipe auto --budget 'sqnr>=35dB' -o smaller
      tpu2edge check out
      tpu2edge capture model.py --device tpu -o ref
      tpu2edge inspect out/model.float32.tflite

    \b
    Exit status: 0 all right, 1 the numbers are outside of the budget, 2 wrong usage or input,
    3 the model cannot be exported or converted, 4 a device or tool broke, 130 interrupted,
    70 a fault of tpu2edge itself.
    """


def run(argv: list[str] | None = None) -> int:
    """The exit status of ``tpu2edge ARGV``; raises nothing."""
    args = sys.argv[1:] if argv is None else list(argv)
    is_json = "--json" in args
    try:
        code = _invoke(args)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
        return _PIPE_EXIT_CODE
    except typer.TyperException as err:
        if is_json:
            _print_json_error("UsageError", err.format_message(), err.exit_code)
        elif (show := getattr(err, "show", None)) is not None:
            show()
        else:
            print(f"error: {err.format_message()}", file=sys.stderr)
        return err.exit_code
    except typer.Abort:
        return 130
    except Tpu2EdgeError as err:
        notes = getattr(err, "__notes__", [])
        if is_json:
            _print_json({"error": {**err.to_json(), "notes": notes}})
        else:
            print("\n".join([f"{_error_word()} {err}", *notes]), file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt as err:
        said = "interrupted: nothing was written"
        exit_code = int(getattr(err, "exit_code", 130))
        if is_json:
            _print_json_error("Interrupted", said, exit_code)
        else:
            print(said, file=sys.stderr)
        return exit_code
    except Exception as err:  # noqa: BLE001 - reported in full
        return _report_bug(err, is_json)
    return code


def _invoke(args: list[str]) -> int:
    command = get_command(app)
    # Not command.main(): it swallows closed pipes and Ctrl-C into exit statuses of its own.
    try:
        with command.make_context("tpu2edge", args) as context:
            code = command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return int(code or 0)


def _report_bug(err: Exception, is_json: bool) -> int:
    text = str(getattr(err, "traceback", "")) or traceback.format_exc()
    log = getattr(err, "log", None)
    said = f"this is a bug of tpu2edge {tpu2edge.__version__}: please report it with the above"
    if log is not None:
        said += f" and the log {log}"
    if is_json:
        _print_json(
            {
                "error": {
                    "kind": "Bug",
                    "what": said,
                    "exit_code": BUG_EXIT_CODE,
                    "traceback": text,
                }
            }
        )
    print(f"{text.rstrip()}\n{_error_word()} {said}", file=sys.stderr)
    return BUG_EXIT_CODE


def _error_word() -> str:
    is_colored = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return "\x1b[1;31merror:\x1b[0m" if is_colored else "error:"


def _print_json_error(kind: str, what: str, exit_code: int) -> None:
    _print_json({"error": {"kind": kind, "what": what, "exit_code": exit_code}})


def _print_json(data: Mapping[str, Any]) -> None:
    from tpu2edge.cli.printing import print_json

    print_json(data)


def _silence_stdout() -> None:
    """Lets the interpreter flush what is left into nothing when it ends."""
    try:
        fd = sys.stdout.fileno()
    except (OSError, ValueError):
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, fd)
    os.close(nothing)
