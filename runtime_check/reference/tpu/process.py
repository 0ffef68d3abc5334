"""Start the child that holds JAX, talk to it, and say in words how it ended.

Why a child: libtpu ends its process on dynamic shapes and some other input; a process that trains
has a JAX (and perhaps a TPU) of its own, which must not be told to use the CPU; and what JAX
allocates is given back when the child ends. The parent never imports JAX.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, cast

import tpu2edge
from tpu2edge.children import signal_name
from tpu2edge.errors import DeviceError
from tpu2edge.runtime_check.reference.tpu.frames import receive, send
from tpu2edge.types import Array

__all__ = ["Child"]

#: What a process without a TPU needs before libtpu is loaded into it.
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # JAX's own default device; the TPU compiler is asked for by name
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu asks the cloud's metadata server, for minutes
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else a lock file ends the second process
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # silences a warning; the topology is named on compile
    "TPU_WORKER_ID": "0",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}
#: Flags of the user's training job: they would change the result without being part of its label.
_REMOVED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


class Child:
    """A child process that answers requests, one at a time; a context manager.

    ``what`` completes the sentence "the child that …" in error messages.
    """

    def __init__(self, what: str, *, timeout_s: float) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._timed_out = False
        environment = {k: v for k, v in os.environ.items() if k not in _REMOVED}
        root = str(Path(tpu2edge.__file__).parent.parent)
        paths = [root, environment.get("PYTHONPATH", "")]
        environment |= {**_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed with the child
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tpu2edge.runtime_check.reference.tpu.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=environment,
        )

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:  # what the child did not read any more
                continue

    def ask(
        self,
        header: Mapping[str, Any],
        arrays: Iterable[Array] = (),
        layout: Sequence[tuple[str, Sequence[int]]] | None = None,
    ) -> tuple[dict[str, Any], list[Array]]:
        """The child's reply; DeviceError when it died or took longer than the timeout.

        A reply of the form ``{"error": …, "text": …}`` is returned like any other.
        """
        timer = threading.Timer(self._timeout_s, self._stop)
        timer.start()
        try:
            send(cast(BinaryIO, self._process.stdin), header, arrays, layout)
            return receive(cast(BinaryIO, self._process.stdout))
        except (EOFError, BrokenPipeError) as exc:
            raise self._ended() from exc
        finally:
            timer.cancel()

    def _stop(self) -> None:
        self._timed_out = True
        self._process.kill()

    def _ended(self) -> DeviceError:
        status = self._process.wait()
        if self._timed_out:
            return DeviceError(
                f"the child that {self._what} took longer than {self._timeout_s:g} s",
                do="allow it more time, or take a smaller batch",
                step="tpu",
            )
        self._stderr.seek(0)
        text = self._stderr.read().decode(errors="replace")
        if status == -signal.SIGKILL:
            how = "was killed (most likely for want of memory)"
        elif status < 0:
            how = f"crashed with {signal_name(-status)}"
        else:
            how = f"ended with status {status}"
        return DeviceError(
            f"the child that {self._what} {how}{_last_words(text)}",
            do="dynamic shapes and unsupported operations end the TPU compiler this way; "
            "compile a smaller part of the model to find which",
            step="tpu",
        )


def _last_words(stderr: str) -> str:
    """The most telling line of the child's stderr: the last fatal one, else the last."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("F0") or "Check failed" in line]
    telling = (fatal or [x for x in lines if "Error" in x] or lines)[-1:]
    return f": {telling[0][:300]}" if telling else ""
