"""Small jobs for the tests of supervise: each goes wrong, or right, in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tpu2edge.cli.job import JobContext
from tpu2edge.errors import DataError, LoweringError, Place
from tpu2edge.types import Note


def chatter(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    context.progress("load")
    os.write(1, b"W0000 the converter's chatter on 1\n")
    os.system("echo a grandchild on 2 >&2")
    context.note(Note(code="eval-mode", text="the model was in training mode: eval() was called"))
    context.progress("run")
    for i in range(1000):
        context.progress("run", i + 1, 1000)
    print(repr(sys.stdin.read()))  # nothing, and no wait
    return {"exit_code": request["exit_code"], "pid": os.getpid(), "log": str(context.log_path)}


def stages(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    context.progress("load")
    context.progress("run", 5, 10)
    return {"exit_code": 0}


def segfault(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    context.progress("convert")
    print("MLIR: about to die")
    Path(request["temporary"]).mkdir()
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def killed(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    context.progress("convert")
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def crash_after_the_work(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    import atexit

    atexit.register(os.abort)
    return {"exit_code": 0}


def silent_end(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    os._exit(3)


def refuse(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    raise DataError("input 'x' has the shape 1x3, expected 1x4", do="give 1x4")


def cannot_lower(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    raise LoweringError(
        "aten.sort has no lowering", place=Place(module="head", op="aten.sort", file="m.py", line=7)
    )


class NotAnException(BaseException):
    pass


def bug(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    raise NotAnException("we divided by a banana")


def slow(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Makes a temporary folder, starts a worker, and cleans up when interrupted."""
    folder = Path(request["temporary"])
    folder.mkdir()
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(request["pids"]).write_text(f"{os.getpid()} {worker.pid}")
    try:
        context.progress("convert")
        time.sleep(60)
    finally:
        folder.rmdir()
    return {"exit_code": 0}


def deaf(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """Neither hears Ctrl-C nor cleans up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Path(request["temporary"]).mkdir()
    Path(request["pids"]).write_text(f"{os.getpid()}")
    context.progress("convert")
    time.sleep(60)
    return {"exit_code": 0}
