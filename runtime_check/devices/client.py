"""The parent's side of the worker protocol: one process for one model on one device.

Whatever kills the process (a signal from native code, the kernel's memory killer, a hang) becomes a
DeviceError that names it and ends with the last lines of the process's stderr.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

import numpy as np

from tpu2edge.children import ending
from tpu2edge.errors import DataError, DeviceError, Place
from tpu2edge.runtime_check.devices.host import host_command
from tpu2edge.runtime_check.devices.runners import Launch
from tpu2edge.types import Array, Dim, Signature, Tensors, TensorSpec

__all__ = ["Session", "Tap", "host_command"]

# One request carries as many samples as fit into this, so that memory stays bounded.
_CHUNK_BYTES = 32 << 20
_CHUNK_SAMPLES = 1024

# An answer's header names tensors; anything longer comes from something that is no worker.
_HEADER_BYTES = 64 << 20

# How long a worker that has closed its pipes may take to end.
_DYING_S = 5.0

# A request that has not been answered by then has hung: a corrupted file can do that.
DEFAULT_TIMEOUT_S = 600.0


class Tap(NamedTuple):
    """A tensor inside the graph of one signature, and the name its values come under."""

    name: str
    tensor: int
    signature: str


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
        self._threads, self._kernels, self._taps = threads, kernels, tuple(taps)
        self.times: dict[str, float] = {}
        self.peak_rss_kb = 0
        self._log = log
        self._timeout_s = timeout_s
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", **launch.env}
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
        self.signatures = tuple(_signature(item) for item in answer["signatures"])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
            if self._log is not None:
                self._stderr.seek(0)
                self._log.write(self._stderr.read())
            self._stderr.close()

    def run(self, signature: str, samples: Iterable[Tensors]) -> Iterator[dict[str, Array]]:
        """The outputs of each sample, by name, in order; quantized ones as they are stored.

        Samples must have the file's own data types. Many are sent at once.

        Raises:
            DataError: a sample does not fit the signature.
            DeviceError: the process dies, hangs, or LiteRT fails.
        """
        weight = _Weight()
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
            times = answer["times"]
            self.times.setdefault("first_ms", times["first_ms"])
            self.times["total_ms"] = self.times.get("total_ms", 0.0) + times["total_ms"]
            self.times["samples"] = self.times.get("samples", 0.0) + count
            if count > 1:  # a lone sample is the first: packing weights is in its time
                steady = (times["total_ms"] - times["first_ms"]) / (count - 1)
                self.times["steady_ms"] = min(self.times.get("steady_ms", math.inf), steady)
            self.peak_rss_kb = max(self.peak_rss_kb, int(answer["peak_rss_kb"]))
            weight.output = sum(array.nbytes for array in outputs.values()) // count
            for position in range(count):
                yield {name: array[position] for name, array in outputs.items()}

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
            raise DeviceError(
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
        how = ending(code)
        if -code == signal.SIGKILL:
            how += " (the system may be out of memory)"
        return DeviceError(
            f"the process of device '{self.device}' died by {how} while it was to {step} "
            f"{self.model.name}{self._tail()}",
            do="the file is damaged, or LiteRT has a fault with it: `tpu2edge inspect` reads it "
            "without running it",
            step=step,
        )

    def _garbled(self, step: str) -> DeviceError:
        self._process.kill()
        return DeviceError(
            f"device '{self.device}' does not speak the worker protocol{self._tail()}",
            do="something in the worker's environment prints to its standard output",
            step=step,
        )

    def _refused(self, header: dict[str, Any], step: str) -> DeviceError:
        text = f"{header['error']}".strip()
        return DeviceError(
            f"LiteRT on device '{self.device}' cannot {step} {self.model.name}: "
            f"{header['type']}: {text}{self._tail()}",
            do="see the log; an operator may have no kernel in this LiteRT version",
            step=step,
        )

    def _tail(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").splitlines()
        kept = [line.strip() for line in lines if line.strip() and not line.startswith("INFO:")]
        return "".join(f"\n    {line}" for line in kept[-5:])


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
    """Bytes that one sample's outputs take, known after the first answer."""

    output: int | None = None


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
            fits = max(1, min(_CHUNK_SAMPLES, _CHUNK_BYTES // max(one, 1)))
            most = 1 if weight.output is None else fits
        # By name: a dictionary of the same names may have them in another order.
        for name, array in zip(sample, arrays, strict=True):
            columns[name].append(array)
        count += 1
    if count:
        yield columns, count
