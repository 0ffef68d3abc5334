"""Child processes that tell what they do as JSON lines on their stdout: both sides of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, NoReturn

from tpu2edge.errors import Tpu2EdgeError
from tpu2edge.types import Progress

__all__ = ["ending", "follow_child", "run_child", "signal_name"]


def follow_child(
    command: Sequence[str], *, log: IO[bytes] | None, progress: Progress
) -> tuple[dict[str, Any], int]:
    """Run ``command`` to its end; gives the last line it sent and its exit status.

    Lines with the event "stage" go to ``progress`` as they come; stderr goes to ``log``. Whatever
    interrupts the wait ends the child.
    """
    last: dict[str, Any] = {}
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log if log is not None else subprocess.DEVNULL,
    ) as child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                last = json.loads(line)
                if last["event"] == "stage":
                    progress(last["stage"], last["done"], last["total"])
        except BaseException:
            child.kill()
            raise
    return last, child.returncode


def ending(status: int) -> str:
    """ "exit status 3" or "signal SIGSEGV" for a returned status."""
    if status >= 0:
        return f"exit status {status}"
    name = signal_name(-status)
    return name if name.startswith("signal") else f"signal {name}"


def signal_name(number: int) -> str:
    """ "SIGSEGV"; "signal 40" for one without a name, as most real-time signals are."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_child(work: Callable[[Progress], Mapping[str, Any]]) -> NoReturn:
    """The child's side of :func:`follow_child`: do ``work``, say its result or error, and end.

    What ``work`` returns is the last line's content, beside the event "result". The lines go out on
    the descriptor that was stdout; stdout itself becomes stderr, where native code prints.
    """
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(**event: Any) -> None:
        out.write(json.dumps(event) + "\n")

    def progress(stage: str, done: float | None = None, total: float | None = None) -> None:
        send(event="stage", stage=stage, done=done, total=total)

    warnings.simplefilter("ignore")
    try:
        send(event="result", **work(progress))
    except Tpu2EdgeError as error:
        send(event="error", **error.to_json())
    sys.stderr.flush()
    os._exit(0)  # all is written; taking torch and MLIR down in order costs a second
