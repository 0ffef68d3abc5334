"""Runs a job in a child process and survives it.

torch, the converter and LiteRT write to descriptors 1 and 2 as they like, and can end the process
by a signal. So the work is done in a child (:mod:`tpu2edge.cli.job`) whose output is a log file,
and this side turns whatever becomes of it into a result, an error in words, or an interruption that
left nothing behind. It imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tpu2edge.children import signal_name
from tpu2edge.cli.display import Display
from tpu2edge.cli.job import GRACE_S
from tpu2edge.errors import DeviceError, Tpu2EdgeError, error_from_json
from tpu2edge.types import Note

__all__ = ["JobBug", "JobInterrupted", "Outcome", "run_job"]

_TICK_S = 0.1
_TAIL_LINES = 12
_TAIL_WIDTH = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a job that came to its end returned, and how it went."""

    result: Mapping[str, Any]
    notes: tuple[Note, ...]
    stages: tuple[tuple[str, float], ...]  # name and seconds, in order
    seconds: float

    @property
    def exit_code(self) -> int:
        """The exit status that the result asks for."""
        return int(self.result["exit_code"])


class JobBug(Exception):
    """A fault of tpu2edge itself in the child: ``traceback`` is the child's."""

    def __init__(self, traceback: str, log: Path) -> None:
        super().__init__(traceback)
        self.traceback = traceback
        self.log = log


class JobInterrupted(KeyboardInterrupt):
    """Ctrl-C, SIGTERM or SIGHUP; the child is gone and what it had begun is removed."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """128 + the signal, as a shell has it: 130 for Ctrl-C."""
        return 128 + self.signum


@dataclass
class _Followed:
    """What the events have told so far."""

    stage: str = "start"
    stage_since: float = 0.0
    stages: list[tuple[str, float]] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    result: dict[str, Any] | None = None
    error: Tpu2EdgeError | None = None
    bug: str | None = None


def run_job(
    job: str,
    request: Mapping[str, Any],
    *,
    display: Display,
    output: Path | None = None,
) -> Outcome:
    """What the job returned.

    Args:
        job: a name of :data:`tpu2edge.cli.job.JOBS`, or ``package.module:function``.
        request: what the job's function is given; plain data.
        display: where progress, notes and (verbose) the log are shown.
        output: the folder that the job makes; temporary ones of the job beside it
            (``.NAME.tmp-*``) are removed when it could not do so itself.

    A Tpu2EdgeError of the child is raised here again. A child that dies is a DeviceError which
    names the stage and the signal and quotes the log; a fault of ours is a JobBug; Ctrl-C is
    JobInterrupted.
    """
    before = _temporaries(output)
    log_fd, log_name = tempfile.mkstemp(prefix="tpu2edge-", suffix=".log")
    log = Path(log_name)
    keep_log = False
    read_fd, write_fd = os.pipe()
    followed = _Followed()
    begun = followed.stage_since = time.monotonic()
    child: subprocess.Popen[bytes] | None = None
    try:
        with _signals_as_interrupt(), display, log.open("rb") as log_reader:
            try:
                child = subprocess.Popen(
                    [
                        sys.executable,
                        # -P: a file types.py or inspect.py in the user's folder is none of ours.
                        *("-P", "-u", "-X", "faulthandler", "-m", "tpu2edge.cli.job"),
                        *(job, str(write_fd), log_name),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log_fd,
                    stderr=log_fd,
                    pass_fds=(write_fd,),
                    # torch's threads wait asleep: spinning, they take each other's cores where
                    # other programs run too (a ResNet-50 took 22 instead of 29 CPU seconds).
                    env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
                    process_group=0,  # Ctrl-C reaches the child through us only
                )
                os.close(write_fd)
                write_fd = -1
                _send_request(child, request)
                for line in _lines(read_fd, child, display, log_reader):
                    _follow(line, followed, display)
                # The outcome is known or never will be; a child that hangs in its exit is ended.
                _wait(child, GRACE_S)
            except KeyboardInterrupt as err:
                if followed.result is None:
                    if child is not None:
                        display.stopping()
                        _stop(child)
                    signum = err.signum if isinstance(err, JobInterrupted) else signal.SIGINT
                    raise JobInterrupted(signum) from None
            finally:
                if child is not None:
                    _kill(child)
                display.log(log_reader.read())
            if followed.result is None:
                assert child is not None
                keep_log = followed.error is None or followed.error.exit_code not in (1, 2)
                raise _failure(job, followed, child, log, keep_log)
        _end_stage(followed, time.monotonic())
        return Outcome(
            result=followed.result,
            notes=tuple(followed.notes),
            stages=tuple(followed.stages),
            seconds=time.monotonic() - begun,
        )
    finally:
        for fd in (log_fd, read_fd, write_fd):
            if fd >= 0:
                os.close(fd)
        if followed.result is None:
            for leftover in _temporaries(output) - before:
                shutil.rmtree(leftover, ignore_errors=True)
        if not keep_log:
            log.unlink(missing_ok=True)  # gone already when the job moved it into its bundle


@contextlib.contextmanager
def _signals_as_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP become a JobInterrupted, so that they clean up as Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise JobInterrupted(signum)

    earlier: dict[signal.Signals, Any] = {}
    try:
        for signum in (signal.SIGTERM, signal.SIGHUP):
            # nohup leaves SIGHUP ignored: let it be. Other threads cannot set handlers.
            if signal.getsignal(signum) != signal.SIG_IGN:
                with contextlib.suppress(ValueError):
                    earlier[signum] = signal.signal(signum, interrupt)
        yield
    finally:
        for changed, handler in earlier.items():
            signal.signal(changed, handler)


def _temporaries(output: Path | None) -> set[Path]:
    if output is None:
        return set()
    output = output.absolute()
    # A plain comparison: the name may hold the special characters of glob.
    prefix = f".{output.name}.tmp-"
    with contextlib.suppress(OSError):
        return {p for p in output.parent.iterdir() if p.name.startswith(prefix)}
    return set()


def _send_request(child: subprocess.Popen[bytes], request: Mapping[str, Any]) -> None:
    """Sends it and leaves the pipe open: its end tells the child that we are gone."""
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the child died at once: seen by what follows
        child.stdin.write(json.dumps(request, default=str).encode() + b"\n")
        child.stdin.flush()


def _lines(
    events: int, child: subprocess.Popen[bytes], display: Display, log: Any
) -> Iterator[bytes]:
    """The child's events until it closes the pipe or is gone; shows the log meanwhile."""
    buffered = b""
    while True:
        # Asked first, read after: what it wrote before its end is in the pipe then.
        is_gone = child.poll() is not None
        while select.select([events], [], [], 0 if is_gone else _TICK_S)[0]:
            part = os.read(events, 1 << 16)
            *lines, buffered = (buffered + part).split(b"\n")
            yield from lines
            display.log(log.read())
            if not part:
                return
        display.log(log.read())
        display.tick()
        if is_gone:
            return


def _follow(line: bytes, followed: _Followed, display: Display) -> None:
    event = json.loads(line)
    kind = event.pop("event")
    if kind == "stage":
        if event["stage"] != followed.stage or not followed.stages:
            now = time.monotonic()
            _end_stage(followed, now)
            followed.stage, followed.stage_since = event["stage"], now
        display.stage(event["stage"], event["done"], event["total"])
    elif kind == "note":
        note = Note(code=event["code"], text=event["text"])
        followed.notes.append(note)
        display.note(note)
    elif kind == "result":
        followed.result = event
    elif kind == "error":
        followed.error = error_from_json(event)
    elif kind == "bug":
        followed.bug = event["traceback"]


def _end_stage(followed: _Followed, now: float) -> None:
    followed.stages.append((followed.stage, now - followed.stage_since))
    followed.stage_since = now


def _wait(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Asks the child to stop; _kill sees to it after the time is up or at a second Ctrl-C."""
    with contextlib.suppress(KeyboardInterrupt):
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            _wait(child, GRACE_S)


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and the workers that it may have left, and reaps it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()


def _failure(
    job: str, followed: _Followed, child: subprocess.Popen[bytes], log: Path, keep_log: bool
) -> JobBug | Tpu2EdgeError:
    if followed.bug is not None:
        return JobBug(followed.bug, log)
    if followed.error is not None:
        error = followed.error
        if keep_log:
            error.add_note(f"log: {log}")
        return error
    status = child.returncode
    name = job.partition(":")[2] or job
    if status < 0:
        ended = f"was killed by {_signal_words(-status)}"
    else:
        ended = f"ended with exit status {status} and without a result"
    tail = _tail(log)
    said = "\nIts last words:\n" + "\n".join(f"    {line}" for line in tail) if tail else ""
    do = f"read the whole log: {log}"
    if status == -signal.SIGKILL:
        do = f"was the memory full? A smaller model, or a machine with more, helps then; or {do}"
    return DeviceError(
        f"the {name} process {ended} while at '{followed.stage}'{said}",
        do=do,
        step=followed.stage,
    )


def _signal_words(number: int) -> str:
    name = signal_name(number)
    words = signal.strsignal(number) if not name.startswith("signal") else None
    return f"{name} ({words.split(':')[0].lower()})" if words else name


def _tail(log: Path) -> list[str]:
    """The log's last lines, cut to a terminal's measure."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 64 * 1024))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    fault = next(
        (i for i, line in enumerate(lines) if line.startswith("Fatal Python error")), len(lines)
    )
    # faulthandler's report is longer than the words before it, which tell more: half of each.
    # Of its stacks (innermost frame first) only the thread that crashed matters.
    stack = lines[fault:]
    current = next((i for i, line in enumerate(stack) if line.startswith("Current thread")), 0)
    frames = [line for line in stack[current + 1 :] if "<frozen runpy>" not in line]
    end = next((i for i, line in enumerate(frames) if not line.startswith("  File")), len(frames))
    stack = stack[:1] + frames[:end]
    half = _TAIL_LINES // 2
    shown = lines[:fault][-(half if stack else _TAIL_LINES) :] + stack[:half]
    return [line if len(line) <= _TAIL_WIDTH else line[: _TAIL_WIDTH - 1] + "…" for line in shown]
