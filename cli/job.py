"""The child side of a supervised job: ``python -m tpu2edge.cli.job NAME EVENTS_FD LOG_PATH``.

The request comes as one line of JSON on stdin, which then stays open for as long as the parent
lives; what happens goes out as lines of JSON on the descriptor EVENTS_FD:

    {"event": "stage", "stage": ..., "done": ..., "total": ...}
    {"event": "note", "code": ..., "text": ...}
    {"event": "result", "exit_code": ..., ...}      what the job's function returned
    {"event": "error", ...}                         Tpu2EdgeError.to_json()
    {"event": "bug", "traceback": ...}              any other exception

Descriptors 1 and 2 are a log file, for the converter and torch write to them at will. The other
side is :mod:`tpu2edge.cli.supervise`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from tpu2edge.errors import DeviceError, Tpu2EdgeError
from tpu2edge.types import Note, Verdict

__all__ = ["JOBS", "Job", "JobContext", "exit_code_of", "main"]

#: Seconds that a job has to clean up after Ctrl-C, or after its parent is gone.
GRACE_S = 10.0

_MIN_INTERVAL_S = 0.05  # between two counts of one stage: progress must stay cheap


class JobContext:
    """How a job's function talks to the user: both methods may be called from any thread."""

    def __init__(self, events_fd: int, log_path: Path) -> None:
        self.log_path = log_path
        self._fd = events_fd
        self._lock = threading.Lock()
        self._last: tuple[str, float] = ("", 0.0)

    def progress(self, stage: str, done: float | None = None, total: float | None = None) -> None:
        """A :class:`tpu2edge.types.Progress`."""
        now = time.monotonic()
        last_stage, last_time = self._last
        is_end = done is not None and done == total
        if stage == last_stage and now - last_time < _MIN_INTERVAL_S and not is_end:
            return
        self._last = (stage, now)
        self.send({"event": "stage", "stage": stage, "done": done, "total": total})

    def note(self, note: Note) -> None:
        """A :data:`tpu2edge.types.NoteSink`."""
        self.send({"event": "note", "code": note.code, "text": note.text})

    def send(self, event: Mapping[str, Any]) -> None:
        """Writes one event; says nothing when the parent is gone (the job is stopped then)."""
        data = json.dumps(event, default=str).encode() + b"\n"
        with self._lock, contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._fd, data) :]


class Job(Protocol):
    """A function that does one job; its result goes to the parent as the event "result"."""

    def __call__(self, request: dict[str, Any], context: JobContext) -> dict[str, Any]:
        """Plain data that holds at least ``exit_code``."""
        ...


def exit_code_of(verdict: Verdict) -> int:
    """0 PASS, 1 FAIL, 4 ERROR."""
    return {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.ERROR: 4}[verdict]


def run_export(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """The work of ``tpu2edge export``."""
    from tpu2edge.pipeline import export_source
    from tpu2edge.requests import ExportRequest

    bundle = export_source(
        ExportRequest.from_json(request),
        progress=context.progress,
        on_note=context.note,
        log_path=context.log_path,
    )
    return {"bundle": str(bundle.path), "exit_code": exit_code_of(bundle.verdict)}


def run_quantize(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """The work of ``tpu2edge quantize``."""
    from tpu2edge.quantizing import quantize_target
    from tpu2edge.requests import QuantizeRequest

    bundle = quantize_target(
        QuantizeRequest.from_json(request),
        progress=context.progress,
        on_note=context.note,
        log_path=context.log_path,
    )
    return {"bundle": str(bundle.path), "exit_code": exit_code_of(bundle.verdict)}


def run_check(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """The work of ``tpu2edge check``."""
    from tpu2edge.checking import check_target
    from tpu2edge.requests import CheckRequest

    report = check_target(
        CheckRequest.from_json(request),
        progress=context.progress,
        on_note=context.note,
    )
    return {"report": report.to_json(), "exit_code": exit_code_of(report.verdict)}


def run_install(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """The work of ``tpu2edge devices install``."""
    from tpu2edge.devices import install_devices
    from tpu2edge.requests import InstallRequest

    asked = InstallRequest.from_json(request)
    found = install_devices(asked.names, files=asked.device_files, progress=context.progress)
    failed = any(one["state"] != "ready" for one in found)
    return {"devices": found, "exit_code": 4 if failed else 0}


def run_capture(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """The work of ``tpu2edge capture``."""
    from tpu2edge.capturing import capture_source, describe_reference
    from tpu2edge.requests import CaptureRequest

    made = capture_source(
        CaptureRequest.from_json(request), progress=context.progress, on_note=context.note
    )
    return {"reference": describe_reference(made.path), "exit_code": 0}


def run_survey(request: dict[str, Any], context: JobContext) -> dict[str, Any]:
    """The work of ``tpu2edge doctor --tpu``."""
    from tpu2edge.requests import SurveyRequest
    from tpu2edge.surveying import survey_source

    found = survey_source(
        SurveyRequest.from_json(request), progress=context.progress, on_note=context.note
    )
    every = all(one["compiles"] for one in found["topologies"])
    return {"survey": found, "exit_code": 0 if every else 3}


#: Known jobs; another one is named as ``package.module:function``.
JOBS: dict[str, Job] = {
    "export": run_export,
    "quantize": run_quantize,
    "check": run_check,
    "install": run_install,
    "capture": run_capture,
    "survey": run_survey,
}


def _job(name: str) -> Job:
    if name in JOBS:
        return JOBS[name]
    module, _, function = name.partition(":")
    job: Job = getattr(importlib.import_module(module), function)
    return job


def _read_request() -> tuple[dict[str, Any], int]:
    """The request, and a descriptor that ends when the parent does.

    Descriptor 0 becomes empty: what the user's model file reads from stdin must not be our pipe.
    """
    pipe = os.dup(0)
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    data = b""
    while not data.endswith(b"\n"):
        part = os.read(pipe, 1 << 16)
        if not part:
            raise EOFError("the request ended early")
        data += part
    request: dict[str, Any] = json.loads(data)
    return request, pipe


def _stop_with_parent(pipe: int) -> None:
    """Interrupts this process once the parent is gone, and ends it if that does not help."""
    with contextlib.suppress(OSError):
        while os.read(pipe, 1):
            pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(GRACE_S)
    if os.getpgrp() == os.getpid():  # the workers too
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def main(argv: list[str] | None = None) -> int:
    """Runs the job; the exit status is only read when no event told what became of it."""
    name, fd, log_path = sys.argv[1:] if argv is None else argv
    # A shell that starts us in the background leaves SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.set_inheritable(int(fd), False)  # a worker that outlives us must not hold the pipe open
    context = JobContext(int(fd), Path(log_path))
    try:
        request, pipe = _read_request()
        threading.Thread(target=_stop_with_parent, args=(pipe,), daemon=True).start()
        result = _job(name)(request, context)
    except KeyboardInterrupt:
        return 130
    except SystemExit:
        raise
    except Tpu2EdgeError as err:
        traceback.print_exc()  # for the log: the cause stands there
        context.send({"event": "error", **err.to_json()})
        return err.exit_code
    except MemoryError:
        traceback.print_exc()
        error = DeviceError(
            "the memory of this machine did not suffice",
            do="close other programs, or export on a machine with more memory",
        )
        context.send({"event": "error", **error.to_json()})
        return error.exit_code
    except BaseException:  # noqa: BLE001 - torch's CheckpointException is no Exception
        context.send({"event": "bug", "traceback": traceback.format_exc()})
        traceback.print_exc()
        return 70
    context.send({"event": "result", **result})
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written; taking torch, jax and MLIR down in order would cost a second or more.
    os._exit(status)
