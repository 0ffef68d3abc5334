"""The parent's side of the worker protocol: one process for one model on one device.

Whatever kills the process (a signal from native code, the kernel's memory killer, a hang) becomes a
DeviceError that names it and ends with the last lines of the process's stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np

from tpu2edge.children import ending
from tpu2edge.errors import (
    DataError,
    DeviceCrashError,
    DeviceError,
    DeviceMemoryError,
    DeviceTimeoutError,
    Place,
    UnsupportedError,
    UnwrittenError,
)
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.runtime_check.devices.host import host_command
from tpu2edge.runtime_check.devices.runners import Launch
from tpu2edge.types import Array, Dim, Signature, Tensors, TensorSpec

__all__ = ["Coverage", "Session", "Tap", "host_command"]

# One request carries as many samples as fit into this, so that memory stays bounded.
_CHUNK_BYTES = 32 << 20
_CHUNK_SAMPLES = 1024

# ... and as many as take this share of the time that one request has.
_SHARE_OF_TIMEOUT = 0.25

# An answer's header names tensors; anything longer comes from something that is no worker.
_HEADER_BYTES = 64 << 20

# How long a worker that has closed its pipes may take to end.
_DYING_S = 5.0

# Lines of stderr that say nothing about a failure: every start of LiteRT prints them.
_CHATTER = re.compile(
    r"\s*(INFO|VERBOSE|DEBUG):|WARNING: \[(npu_registry|gpu_registry|compiler_plugin)"
    r"|\s*(└|\|)? ?Could not load shared library|\s*└\s*$"
    # ... every start of QEMU as an x86-64 CPU ...
    r"|qemu-x86_64: warning: TCG doesn't support requested feature"
    # ... and every start of the GPU accelerator: its own, Dawn's and Abseil's logs.
    r"|I\d{4} \d\d:|W(ARNING|arning): (Logging before InitGoogle|maxDynamic\w+BuffersPer)"
)

# What LiteRT, C++ and NumPy print or say when memory is short, and when an operator is unknown.
_NO_MEMORY = re.compile(
    r"bad_alloc|out of memory|cannot allocate|unable to allocate|failed to allocate(?! tensors)"
    r"|MemoryError|MemoryAllocationFailure|mmap.*failed",
    re.IGNORECASE,
)
# A reason of its own: any word that is no general statement of LiteRT's that something failed.
_REASON = re.compile(r"^(?!\s*$|.*Failed to allocate tensors|\w+\(.*\): status 3$).+", re.MULTILINE)
_NO_KERNEL = re.compile(
    r"didn't find op for builtin|unresolved custom op|op builtin_code out of range"
    r"|^Unsupported|unsupported dtype|unsupported type",
    re.IGNORECASE,
)

# "MAXIMUM: reason", one a line for each kind of operator, and how many the GPU takes.
_GPU_LEAVES = re.compile(
    r"Following operations are not supported by GPU delegate:\n(?P<why>.*?)\n"
    r"(?:(?P<gpu>\d+)|No) operations will run on the GPU, and (?:the remaining|all) (?P<cpu>\d+) ",
    re.DOTALL,
)

# A request that has not been answered by then has hung: a corrupted file can do that.
DEFAULT_TIMEOUT_S = 600.0


class Tap(NamedTuple):
    """A tensor inside the graph of one signature, and the name its values come under."""

    name: str
    tensor: int
    signature: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """How much of a graph the delegate (XNNPACK, a GPU) runs."""

    ops: int
    left_ops: int  # how many of them it does not run
    left: tuple[
        tuple[str, str], ...
    ]  # those: (operator, its first output tensor, or a GPU's reason)


class Session:
    """A model loaded on a device; close it, or use it as a context manager.

    Args:
        model: the ``.tflite`` file.
        launch: how a device's worker is started (:func:`runners.launch_of`); this machine if None.
        command: what starts the worker process instead.
        threads: LiteRT's number of threads; the launch's own, or 1, if None.
        kernels: "default" (XNNPACK where it applies), "builtin" or "reference"; the launch's own
            if None.
        taps: tensors inside the graph whose values are wanted besides the outputs. LiteRT keeps
            every tensor then, and XNNPACK may fuse less: check that the outputs stay what they are.
        device: the device's name for messages; the launch's own if None.
        log: where the process's stderr goes, besides the tail kept for messages.
        timeout_s: how long one request may take.

    Raises:
        DeviceError: the process does not start, dies, hangs, or LiteRT refuses the file.
    """

    def __init__(
        self,
        model: Path,
        *,
        launch: Launch | None = None,
        command: Sequence[str] | None = None,
        threads: int | None = None,
        kernels: str | None = None,
        taps: Sequence[Tap] = (),
        device: str | None = None,
        log: IO[bytes] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if launch is None:
            launch = Launch(device=device or "host", command=tuple(command or host_command()))
        self.launch = launch
        self.device = device = device or launch.device
        self.model = model
        self.delegated: bool | None = None  # whether all of the file is with a delegate, if told
        self.notes: tuple[str, ...] = ()  # the worker's own words on the file
        self._threads, self._kernels, self._taps = threads, kernels, tuple(taps)
        self.times: dict[str, float] = {}
        self.peak_rss_kb = 0
        self._weights: dict[str, _Weight] = {}
        self._log = log
        self._timeout_s = timeout_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **launch.env}
        if launch.prepare is not None:
            try:
                launch.prepare()
            except BaseException:
                self._stderr.close()
                raise
        try:
            self._process = subprocess.Popen(
                list(command or launch.command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                env=env,
                bufsize=0,
            )
        except OSError as err:
            self._stderr.close()
            if launch.cleanup is not None:
                launch.cleanup()
            raise DeviceError(
                f"device '{device}' cannot be started: {err}",
                do="run `tpu2edge doctor`",
                step="start",
            ) from err
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)  # a worker that hangs must time out
        try:
            self.hello, _ = self._answer("start")
            self.load(model)
        except BaseException:
            self.close()
            raise

    def load(self, model: Path) -> None:
        """Take another file in place of the present one, in the same process: half a second saved.

        Raises:
            DeviceError: LiteRT refuses the file, or the process dies; then the session is over.
        """
        self.model = model
        header: dict[str, Any] = {
            **self.launch.load,
            "op": "load",
            "path": self.launch.path_on_device(model),
            "taps": [
                {"name": tap.name, "index": tap.tensor, "signature": tap.signature}
                for tap in self._taps
            ],
        }
        if self.launch.limit_bytes is not None:
            header["limit_bytes"] = self.launch.limit_bytes
        if self._threads is not None:
            header["threads"] = self._threads
        if self._kernels is not None:
            header["kernels"] = self._kernels
        answer, _ = self._request(header, {}, "load")
        self.times = {"load_ms": float(answer["load_ms"])}
        self.delegated = answer.get("delegated")
        self.notes = tuple(answer.get("notes", ()))
        self.signatures = tuple(_signature(item) for item in answer["signatures"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; its stderr goes to the log."""
        process = self._process
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if not self._stderr.closed:
            if self.launch.cleanup is not None:
                self.launch.cleanup()
            if self._log is not None:
                self._stderr.seek(0)
                self._log.write(self._stderr.read())
            self._stderr.close()

    def run(self, signature: str, samples: Iterable[Tensors]) -> Iterator[dict[str, Array]]:
        """The outputs of each sample, by name, in order; quantized ones as they are stored.

        Samples must have the file's own data types. Many are sent at once.

        Raises:
            DataError: a sample does not fit the signature.
            DeviceError: the process dies, hangs, LiteRT fails, or an output is not written.
        """
        weight = self._weights.setdefault(signature, _Weight())
        wanted = next((s for s in self.signatures if s.name == signature), None)
        if wanted is None:
            raise DataError(
                f"{self.model.name} has no signature '{signature}'",
                do=f"it has {[s.name for s in self.signatures]}",
            )
        for columns, count in _chunks(samples, weight):
            # The others have the same names, shapes and types as the first.
            _check_fits(wanted, {name: column[0] for name, column in columns.items()})
            stacked = {name: np.stack(column) for name, column in columns.items()}
            header = {"op": "run", "signature": signature, "count": count}
            answer, outputs = self._request(header, stacked, "run")
            self._check_written(answer, outputs)
            times = answer["times"]
            self.times.setdefault("first_ms", times["first_ms"])
            for name in ("total_ms", "invoke_ms"):
                if name in times:
                    self.times[name] = self.times.get(name, 0.0) + times[name]
            self.times["samples"] = self.times.get("samples", 0.0) + count
            if count > 1:  # a lone sample is the first: packing weights is in its time
                steady = (times["total_ms"] - times["first_ms"]) / (count - 1)
                self.times["steady_ms"] = min(self.times.get("steady_ms", math.inf), steady)
            self.peak_rss_kb = max(self.peak_rss_kb, int(answer["peak_rss_kb"]))
            weight.output = sum(array.nbytes for array in outputs.values()) // count
            # A slow device must not hang by being given too much at once.
            each_s = max(times["total_ms"] / count, 1e-3) / 1e3
            weight.most = max(1, int(_SHARE_OF_TIMEOUT * self._timeout_s / each_s))
            for position in range(count):
                yield {name: array[position] for name, array in outputs.items()}

    def coverage(self) -> Coverage:
        """Which operators of the first graph the delegate took over.

        This machine's Interpreter and GPUs tell.

        Raises:
            DeviceError: the device's worker does not tell.
        """
        if "GPU" in self.launch.load.get("accelerators", ()):
            self._stderr.seek(0)
            return _gpu_coverage(self._stderr.read().decode(errors="replace"), self.model)
        answer, _ = self._request({"op": "coverage"}, {}, "look into")
        left = tuple((item["op"], item["tensor"]) for item in answer["left"])
        return Coverage(ops=int(answer["ops"]), left_ops=len(left), left=left)

    # ------------------------------------------------------------------------------- the pipe

    def _request(
        self, header: dict[str, Any], arrays: Mapping[str, Array], step: str
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        header["tensors"] = [
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
            for name, array in arrays.items()
        ]
        data = json.dumps(header).encode()
        deadline = time.monotonic() + self._timeout_s
        try:
            self._write(struct.pack("<I", len(data)) + data, deadline, step)
            for array in arrays.values():
                if array.size:
                    flat = np.ascontiguousarray(array).reshape(-1)
                    self._write(flat.view(np.uint8).data, deadline, step)
        except BrokenPipeError:
            raise self._died(step) from None
        return self._answer(step, deadline)

    def _answer(
        self, step: str, deadline: float | None = None
    ) -> tuple[dict[str, Any], dict[str, Array]]:
        deadline = deadline or time.monotonic() + self._timeout_s
        (length,) = struct.unpack("<I", self._read(4, deadline, step))
        if length > _HEADER_BYTES:
            raise self._garbled(step)
        try:
            header = json.loads(bytes(self._read(length, deadline, step)))
        except ValueError:
            raise self._garbled(step) from None
        if not header["ok"]:
            raise self._refused(header, step)
        arrays: dict[str, Array] = {}
        for tensor in header["tensors"]:
            array = np.empty(tensor["shape"], dtype=tensor["dtype"])
            if array.size:
                self._read_into(array.reshape(-1).view(np.uint8).data, deadline, step)
            arrays[tensor["name"]] = array
        return header, arrays

    def _write(self, data: bytes | memoryview, deadline: float, step: str) -> None:
        assert self._process.stdin is not None
        fd = self._process.stdin.fileno()
        view = memoryview(data)
        while len(view):
            self._wait(fd, False, deadline, step)
            view = view[os.write(fd, view[: 1 << 20]) :]

    def _read(self, count: int, deadline: float, step: str) -> bytearray:
        data = bytearray(count)
        self._read_into(memoryview(data), deadline, step)
        return data

    def _read_into(self, view: memoryview, deadline: float, step: str) -> None:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while len(view):
            self._wait(fd, True, deadline, step)
            count = os.readv(fd, [view])
            if count == 0:
                raise self._died(step)
            view = view[count:]

    def _wait(self, fd: int, reading: bool, deadline: float, step: str) -> None:
        left = deadline - time.monotonic()
        ready = select.select([fd] if reading else [], [] if reading else [fd], [], max(left, 0))
        if not (ready[0] or ready[1]):
            self._process.kill()
            self._process.wait()
            raise DeviceTimeoutError(
                f"device '{self.device}' gave no answer in {self._timeout_s:.0f} s while it was to "
                f"{step} {self.model.name}{self._tail()}",
                do="the file may be damaged; or give it more time",
                step=step,
            )

    # -------------------------------------------------------------------------------- failures

    def _died(self, step: str) -> DeviceError:
        try:
            code = self._process.wait(timeout=_DYING_S)
        except subprocess.TimeoutExpired:  # it closed its pipes and lives on
            self._process.kill()
            code = self._process.wait()
        if self.launch.shell_status and code > 128:
            code = 128 - code
        how, tail = ending(code), self._tail()
        what = f"the process of device '{self.device}' died by {how}"
        where = f"while it was to {step} {self.model.name}{tail}"
        if self.launch.memory_mb is not None and (
            _NO_MEMORY.search(tail) or -code == signal.SIGKILL
        ):
            return self._out_of_memory(f"{what} {where}", step)
        if -code == signal.SIGKILL:
            what += " (the system may be out of memory)"
        return DeviceCrashError(
            f"{what} {where}",
            do="the file is damaged, or LiteRT has a fault with it: `tpu2edge inspect` reads it "
            "without running it",
            step=step,
        )

    def _out_of_memory(self, what: str, step: str) -> DeviceError:
        limit = self.launch.memory_mb
        has = "" if limit is None else f": device '{self.device}' has {limit} MB"
        return DeviceMemoryError(
            f"out of memory{has}; {what}",
            do="a smaller recipe or shape, or a profile with more memory_mb",
            step=step,
        )

    def _check_written(self, answer: Mapping[str, Any], outputs: Mapping[str, Array]) -> None:
        for name, count in answer.get("unwritten", {}).items():
            size = outputs[name][0].size
            raise UnwrittenError(
                f"device '{self.device}' says that it ran {self.model.name}, but left "
                f"{count} of {size} elements of output '{name}' as they were before",
                do="the delegate has a fault with this graph; another device, or kernels = "
                "'builtin', tells whether the file itself is right",
                place=Place(tensor=name),
                step="run",
            )

    def _garbled(self, step: str) -> DeviceError:
        self._process.kill()
        return DeviceError(
            f"device '{self.device}' does not speak the worker protocol{self._tail()}",
            do="something in the worker's environment prints to its standard output",
            step=step,
        )

    def _refused(self, header: dict[str, Any], step: str) -> DeviceError:
        text, tail = f"{header['type']}: {header['error']}".strip(), self._tail()
        what = f"LiteRT on device '{self.device}' cannot {step} {self.model.name}: {text}{tail}"
        if _NO_MEMORY.search(text + tail):
            return self._out_of_memory(what, step)
        if self.launch.memory_mb is not None and (
            not _REASON.search(tail) and not _REASON.search(str(header["error"]))
        ):
            return self._out_of_memory(
                f"LiteRT gives no reason, this is the likely one; {what}", step
            )
        if _NO_KERNEL.search(text) or _NO_KERNEL.search(tail):
            return UnsupportedError(
                what,
                do="this device's LiteRT has no kernel for it: `tpu2edge inspect` lists the "
                "operators",
                step=step,
            )
        return DeviceError(
            what,
            do="see the log; an operator may have no kernel in this LiteRT version",
            step=step,
        )

    def _tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        kept = [line.strip() for line in lines if line.strip() and not _CHATTER.match(line)]
        return "".join(f"\n    {line}" for line in kept[-5:])


def _gpu_coverage(stderr: str, model: Path) -> Coverage:
    """What the GPU's delegate says while it loads a file; nothing when it takes all of the graph."""
    found = _GPU_LEAVES.search(stderr)
    if found is None:
        return Coverage(ops=len(read_tflite(model).subgraphs[0].operators), left_ops=0, left=())
    here, there = int(found["gpu"] or 0), int(found["cpu"])
    left = [line.split(": ", 1) for line in found["why"].splitlines()]
    reasons = tuple((op, why[0] if why else "") for op, *why in left)
    return Coverage(ops=here + there, left_ops=there, left=reasons)


def _check_fits(wanted: Signature, sample: Mapping[str, Array]) -> None:
    if set(sample) != {spec.name for spec in wanted.inputs}:
        raise DataError(
            f"a sample has the inputs {sorted(sample)}, signature '{wanted.name}' takes "
            f"{[spec.name for spec in wanted.inputs]}"
        )
    for spec in wanted.inputs:
        array = sample[spec.name]
        fits = len(spec.shape) == array.ndim and all(
            isinstance(want, Dim) or want == have
            for want, have in zip(spec.shape, array.shape, strict=True)
        )
        if not fits or array.dtype.name != spec.dtype:
            raise DataError(
                f"input '{spec.name}' is {array.dtype}{list(array.shape)}, expected {spec}",
                place=Place(tensor=spec.name),
            )


def _signature(data: Mapping[str, Any]) -> Signature:
    def spec(item: Mapping[str, Any]) -> TensorSpec:
        shape = tuple(
            Dim(name=f"dim{axis}", min=0, max=2**31 - 1) if size < 0 else size
            for axis, size in enumerate(item["shape"])
        )
        return TensorSpec(
            name=item["name"],
            shape=shape,
            dtype=item["dtype"],
            scale=item.get("scale"),
            zero_point=item.get("zero_point"),
        )

    return Signature(
        name=data["name"],
        inputs=tuple(spec(item) for item in data["inputs"]),
        outputs=tuple(spec(item) for item in data["outputs"]),
    )


@dataclass(slots=True)
class _Weight:
    """What one sample takes, known after the first answer: its outputs' bytes, and the most of its
    kind that one request may carry for the time they take.
    """

    output: int | None = None
    most: int = _CHUNK_SAMPLES


def _chunks(
    samples: Iterable[Tensors], weight: _Weight
) -> Iterator[tuple[dict[str, list[Array]], int]]:
    """Runs of samples of one shape, as many as one request may carry; the first goes alone.

    Columns by input name, and their length. Runs once a sample, so it does as little as it can.
    """
    columns: dict[str, list[Array]] = {}
    kind: list[Any] = []
    count = most = 0
    for sample in samples:
        arrays = [np.asarray(array) for array in sample.values()]
        this = [(array.shape, array.dtype) for array in arrays]
        if count and (count >= most or this != kind or sample.keys() != columns.keys()):
            yield columns, count
            count = 0
        if not count:
            kind, columns = this, {name: [] for name in sample}
            one = sum(array.nbytes for array in arrays) + (weight.output or 0)
            fits = max(1, min(_CHUNK_SAMPLES, weight.most, _CHUNK_BYTES // max(one, 1)))
            most = 1 if weight.output is None else fits
        # By name: a dictionary of the same names may have them in another order.
        for name, array in zip(sample, arrays, strict=True):
            columns[name].append(array)
        count += 1
    if count:
        yield columns, count
