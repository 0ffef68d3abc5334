"""Child processes that tell what they do as JSON lines on their stdout."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Sequence
from typing import IO, Any

from tpu2edge.types import Progress

__all__ = ["ending", "follow_child"]


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
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
