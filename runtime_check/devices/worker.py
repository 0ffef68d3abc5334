"""Runs one ``.tflite`` file in a process of its own; started as a script, never imported.

Standard library, NumPy and ai_edge_litert only, so that it starts in a third of a second and runs
where torch is not installed. The protocol, on stdin and stdout, is the same for every device:

    u32 little-endian length | UTF-8 JSON header | raw little-endian tensors in the header's order

The header lists ``tensors`` as {name, dtype, shape}. Requests have an ``op``: ``load``, ``run``,
``quit``; answers have ``ok``. One ``run`` carries many samples, stacked along a new first axis, so
that a small model is not slowed down by the pipe.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import struct
import sys
import time
from typing import Any

_Arrays = dict[str, Any]
_Results = tuple[dict[str, list[Any]], dict[str, Any]]

# Outputs of a CompiledModel start as this byte; 0xFF makes a float NaN, so that what stays unwritten
# shows. The second one tells a value that is equal by chance.
_POISONS = (0xFF, 0x5A)

_started = time.perf_counter()
# Native code prints to fd 1; the protocol gets a descriptor of its own.
_out = os.fdopen(os.dup(1), "wb", buffering=1 << 20)
os.dup2(2, 1)
_in = os.fdopen(os.dup(0), "rb", buffering=1 << 20)

import numpy as np  # noqa: E402


def _send(header: dict[str, Any], arrays: dict[str, Any] | None = None) -> None:
    arrays = {name: np.ascontiguousarray(a) for name, a in (arrays or {}).items()}
    # ascontiguousarray turns a scalar into shape (1,): the shape is the caller's.
    header["tensors"] = [
        {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
        for name, array in arrays.items()
    ]
    data = json.dumps(header).encode()
    _out.write(struct.pack("<I", len(data)) + data)
    for array in arrays.values():
        _out.write(array.data.cast("B") if array.size else b"")
    _out.flush()


def _exactly(count: int) -> bytes:
    data = _in.read(count)
    if len(data) < count:  # the parent is gone
        sys.exit(0)
    return data


def _receive() -> tuple[dict[str, Any], dict[str, Any]]:
    (length,) = struct.unpack("<I", _exactly(4))
    header = json.loads(_exactly(length))
    arrays = {}
    for tensor in header.get("tensors", []):
        dtype = np.dtype(tensor["dtype"])
        count = int(np.prod(tensor["shape"], dtype=np.int64)) * dtype.itemsize
        array = np.frombuffer(_exactly(count), dtype)
        arrays[tensor["name"]] = array.reshape(tensor["shape"])
    return header, arrays


class _Model:
    """A loaded file; every signature by name, tensors by name, never by position."""

    delegated: bool | None = None  # only a CompiledModel tells

    def __init__(self, header: dict[str, Any]) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        kernels = {
            "default": OpResolverType.AUTO,
            "builtin": OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
            "reference": OpResolverType.BUILTIN_REF,
        }[header.get("kernels", "default")]
        started = time.perf_counter()
        self.interpreter = Interpreter(
            model_path=header["path"],
            num_threads=header.get("threads") or 1,
            experimental_op_resolver_type=kernels,
            # Otherwise the values in between are gone (XNNPACK) or overwritten after the run.
            experimental_preserve_all_tensors=bool(header.get("taps")),
        )
        self.taps = [
            (tap["name"], tap["index"], tap["signature"]) for tap in header.get("taps", [])
        ]
        self.interpreter.allocate_tensors()
        self.load_ms = (time.perf_counter() - started) * 1e3
        self.details = _details(self.interpreter)
        self.runners: dict[str, Any] = {}

    def run(self, signature: str, count: int, stacked: _Arrays) -> _Results:
        inputs, outputs = _checked(self.details, signature, stacked)
        step = self._direct if len(self.details) == 1 else self._by_runner
        return step(signature, count, stacked, inputs, outputs)

    def _direct(
        self, signature: str, count: int, stacked: _Arrays, inputs: Any, outputs: Any
    ) -> _Results:
        """One signature: indexes once, then the interpreter's own three calls for each sample."""
        interpreter = self.interpreter
        resized = False
        for name, array in stacked.items():
            index, shape = inputs[name]["index"], list(array.shape[1:])
            details = interpreter.get_input_details()[_position(interpreter, index)]
            if list(details["shape"]) != shape:
                interpreter.resize_tensor_input(index, shape, strict=True)
                resized = True
        if resized:
            interpreter.allocate_tensors()
        feeds = [(inputs[name]["index"], array) for name, array in stacked.items()]
        reads = [(name, details["index"]) for name, details in outputs.items()]
        reads += [(name, index) for name, index, _ in self.taps]
        set_tensor, invoke, get_tensor = (
            interpreter.set_tensor,
            interpreter.invoke,
            interpreter.get_tensor,
        )
        results: dict[str, list[Any]] = {name: [] for name, _ in reads}
        clock = time.perf_counter
        first = 0.0
        begin = clock()
        for position in range(count):
            for index, array in feeds:
                set_tensor(index, array[position])
            invoke()
            for name, index in reads:
                results[name].append(get_tensor(index))
            if position == 0:
                first = clock() - begin
        return results, {"first_ms": first * 1e3, "total_ms": (clock() - begin) * 1e3}

    def _by_runner(
        self, signature: str, count: int, stacked: _Arrays, inputs: Any, outputs: Any
    ) -> _Results:
        runner = self.runners.get(signature)
        if runner is None:
            runner = self.runners[signature] = self.interpreter.get_signature_runner(signature)
        _check_shapes(inputs, stacked)
        results: dict[str, list[Any]] = {name: [] for name in outputs}
        taps = [(name, index) for name, index, of in self.taps if of == signature]
        results.update({name: [] for name, _ in taps})
        first = 0.0
        begin = time.perf_counter()
        for position in range(count):
            out = runner(**{name: array[position] for name, array in stacked.items()})
            for name, value in out.items():
                results[name].append(value)
            for name, index in taps:
                # The subgraph that the runner belongs to is not told by the public interface.
                graph = runner._subgraph_index
                results[name].append(self.interpreter.get_tensor(index, graph))
            if position == 0:
                first = time.perf_counter() - begin
        return results, {"first_ms": first * 1e3, "total_ms": (time.perf_counter() - begin) * 1e3}

    def coverage(self) -> dict[str, Any]:
        """How many operators the first graph has, and those that no delegate took over.

        LiteRT lists a delegate behind the operators that it replaced, with its outer tensors: what
        lies between its outputs and its inputs is what it replaced.
        """
        details = self.interpreter._get_ops_details()
        plain = [op for op in details if op["op_name"] != "DELEGATE"]
        makers = {int(out): op for op in plain for out in op["outputs"]}
        taken: set[int] = set()
        for delegate in details[len(plain) :]:
            outer = {int(tensor) for tensor in delegate["inputs"]}
            ahead = [int(tensor) for tensor in delegate["outputs"]]
            while ahead:
                op = makers.get(ahead.pop())
                if op is not None and op["index"] not in taken:
                    taken.add(op["index"])
                    ahead += [int(t) for t in op["inputs"] if int(t) not in outer]
        left = [op for op in plain if op["index"] not in taken]
        names = {d["index"]: d["name"] for d in self.interpreter.get_tensor_details()}
        return {
            "ops": len(plain),
            "left": [
                {"op": op["op_name"], "tensor": names.get(int(op["outputs"][0]), "")}
                for op in left
                if len(op["outputs"])
            ],
        }


class _Compiled:
    """The same through LiteRT's CompiledModel, the runtime that new apps use."""

    def __init__(self, header: dict[str, Any]) -> None:
        from ai_edge_litert.compiled_model import CompiledModel
        from ai_edge_litert.cpu_kernel_mode import CpuKernelMode
        from ai_edge_litert.hardware_accelerator import HardwareAccelerator
        from ai_edge_litert.interpreter import Interpreter, OpResolverType
        from ai_edge_litert.options import Options

        if header.get("taps"):
            raise ValueError("a CompiledModel does not show tensors inside of the graph")
        started = time.perf_counter()
        # From memory: from_file ends the process on many damaged files.
        with open(header["path"], "rb") as stream:  # noqa: PTH123 - no pathlib here: it costs 10 ms
            content = stream.read()
        # A CompiledModel tells no scales and no dynamic sizes.
        plain = Interpreter(
            model_content=content,
            experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        )
        self.details = _details(plain)
        del plain
        accelerators = header.get("accelerators", ["CPU"])
        wanted = HardwareAccelerator(0)
        for name in accelerators:
            wanted |= HardwareAccelerator[name]
        options = Options(hardware_accelerators=wanted)
        if "CPU" in accelerators:
            kernels = {"default": "DELEGATE", "builtin": "BUILTIN", "reference": "REFERENCE"}
            options.cpu_options.num_threads = header.get("threads") or 1
            options.cpu_options.kernel_mode = CpuKernelMode[
                kernels[header.get("kernels") or "default"]
            ]
            if header.get("xnnpack_flags") is not None:
                options.cpu_options.xnnpack_flags = header["xnnpack_flags"]
        for name, value in header.get("gpu", {}).items():
            setattr(options.gpu_options, name, value)
        self.model = CompiledModel.from_buffer(content, options=options)
        self.delegated = self.model.is_fully_accelerated()
        self.load_ms = (time.perf_counter() - started) * 1e3
        self.names = self.model.get_signature_list()
        self.buffers: dict[str, tuple[list[Any], list[Any], set[str]]] = {}
        self.shapes: dict[str, Any] = {}
        self.checked: set[str] = set()  # signatures whose outputs were seen to be written

    def run(self, signature: str, count: int, stacked: _Arrays) -> _Results:
        inputs, outputs = _checked(self.details, signature, stacked)
        _check_shapes(inputs, stacked)
        shapes = {name: array.shape[1:] for name, array in stacked.items()}
        if self.shapes.get(signature) != shapes:
            self._prepare(signature, shapes, inputs, outputs)
            self.shapes[signature] = shapes
            self.checked.discard(signature)
        now = self.model.get_output_tensor_details(signature)
        sizes = {
            name: (tuple(int(n) for n in now[name]["shape"]), np.dtype(details["dtype"]))
            for name, details in outputs.items()
        }
        results: dict[str, list[Any]] = {name: [] for name in outputs}
        first = 0.0
        unwritten: dict[str, int] = {}
        begin = time.perf_counter()
        for position in range(count):
            sample = {name: array[position] for name, array in stacked.items()}
            found = self._once(signature, sample, sizes, 0)
            for name, value in found.items():
                results[name].append(value)
            if position == 0:
                first = time.perf_counter() - begin
            if signature not in self.checked:
                self.checked.add(signature)
                unwritten = self._unwritten(signature, sample, sizes, found)
                begin = time.perf_counter() - first
        total = time.perf_counter() - begin
        return results, {
            "first_ms": first * 1e3,
            "total_ms": total * 1e3,
            "unwritten": unwritten,
        }

    def _prepare(self, signature: str, shapes: Any, inputs: Any, outputs: Any) -> None:
        model = self.model
        for name, shape in shapes.items():
            if -1 in inputs[name]["shape_signature"]:
                model.resize_input_tensor_by_name(signature, name, shape)
        # LiteRT gives one memory to a tensor: an output that is an input, or another output, too.
        by_tensor: dict[int, Any] = {}
        for name in self.names[signature]["inputs"]:
            by_tensor[inputs[name]["index"]] = model.create_input_buffer_by_name(signature, name)
        shared = {name for name in outputs if outputs[name]["index"] in by_tensor}
        for name in self.names[signature]["outputs"]:
            index = outputs[name]["index"]
            if index not in by_tensor:
                by_tensor[index] = model.create_output_buffer_by_name(signature, name)
        self.buffers[signature] = (
            [by_tensor[inputs[n]["index"]] for n in self.names[signature]["inputs"]],
            [by_tensor[outputs[n]["index"]] for n in self.names[signature]["outputs"]],
            shared,
        )

    def _once(self, signature: str, sample: _Arrays, sizes: Any, poison: int) -> _Arrays:
        names = self.names[signature]
        sources, targets, shared = self.buffers[signature]
        for name, target in zip(names["outputs"], targets, strict=True):
            shape, dtype = sizes[name]
            if name not in shared:
                raw = np.full(math.prod(shape) * dtype.itemsize, _POISONS[poison], np.uint8)
                target.write(raw.view(dtype) if dtype != np.bool_ else raw.view(np.bool_))
        for name, source in zip(names["inputs"], sources, strict=True):
            source.write(np.ascontiguousarray(sample[name]))
        self.model.run_by_index(self.model.get_signature_index(signature), sources, targets)
        return {
            name: target.read(math.prod(sizes[name][0]), sizes[name][1]).reshape(sizes[name][0])
            for name, target in zip(names["outputs"], targets, strict=True)
        }

    def _unwritten(
        self, signature: str, sample: _Arrays, sizes: Any, found: _Arrays
    ) -> dict[str, int]:
        """How many elements of each output keep the poison, whichever it is."""
        marks = {name: _still(value, 0) for name, value in found.items()}
        if not any(mark.any() for mark in marks.values()):
            return {}
        again = self._once(signature, sample, sizes, 1)
        counts = {name: int((mark & _still(again[name], 1)).sum()) for name, mark in marks.items()}
        return {name: count for name, count in counts.items() if count}


def _still(value: Any, poison: int) -> Any:
    flat = np.ascontiguousarray(value).reshape(-1)
    return (flat.view(np.uint8).reshape(flat.size, -1) == _POISONS[poison]).all(axis=1)


def _details(interpreter: Any) -> dict[str, tuple[Any, Any]]:
    """Inputs and outputs of each signature as the file says them."""
    details = {}
    for name in interpreter.get_signature_list():
        runner = interpreter.get_signature_runner(name)
        details[name] = (runner.get_input_details(), runner.get_output_details())
        del runner
    return details


def _describe(details: dict[str, tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "inputs": [_spec(key, spec) for key, spec in inputs.items()],
            "outputs": [_spec(key, spec) for key, spec in outputs.items()],
        }
        for name, (inputs, outputs) in details.items()
    ]


def _checked(details: Any, signature: str, stacked: _Arrays) -> tuple[Any, Any]:
    """Inputs and outputs of the signature, whose names and types the arrays have."""
    if signature not in details:
        raise ValueError(f"no signature '{signature}', the file has {list(details)}")
    inputs, outputs = details[signature]
    if set(stacked) != set(inputs):
        raise ValueError(f"inputs {sorted(stacked)} given, {sorted(inputs)} expected")
    for name, array in stacked.items():
        if array.dtype != inputs[name]["dtype"]:
            expected = np.dtype(inputs[name]["dtype"]).name
            raise ValueError(f"input '{name}': {array.dtype} given, {expected} expected")
    return inputs, outputs


def _check_shapes(inputs: Any, stacked: _Arrays) -> None:
    """Refuse what LiteRT would resize silently."""
    for name, array in stacked.items():
        fixed = [int(size) for size in inputs[name]["shape_signature"]]
        given = list(array.shape[1:])
        if len(fixed) != len(given) or any(
            f not in (-1, g) for f, g in zip(fixed, given, strict=True)
        ):
            raise ValueError(f"input '{name}': shape {given} given, {fixed} expected")


def _limit_memory(limit: int | None) -> None:
    if limit:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _position(interpreter: Any, index: int) -> int:
    return [d["index"] for d in interpreter.get_input_details()].index(index)


def _spec(name: str, details: dict[str, Any]) -> dict[str, Any]:
    scale, zero_point = details["quantization"]
    spec = {
        "name": name,
        "shape": [int(size) for size in details["shape_signature"]],
        "dtype": np.dtype(details["dtype"]).name,
    }
    if scale:  # 0.0 stands for "not quantized"
        spec["scale"], spec["zero_point"] = float(scale), int(zero_point)
    return spec


def main() -> None:
    """Answer requests until the parent closes the pipe."""
    import ai_edge_litert

    _send(
        {
            "ok": True,
            "op": "hello",
            "protocol": 1,
            "machine": platform.machine(),
            "numpy": np.__version__,
            "litert": getattr(ai_edge_litert, "__version__", "unknown"),
            "start_ms": (time.perf_counter() - _started) * 1e3,
        }
    )
    model: _Model | _Compiled | None = None
    while True:
        header, arrays = _receive()
        try:
            if header["op"] == "quit":
                _send({"ok": True})
                return
            if header["op"] == "load":
                _limit_memory(header.get("limit_bytes"))
                compiled = header.get("runtime") == "compiled"
                model = _Compiled(header) if compiled else _Model(header)
                _send(
                    {
                        "ok": True,
                        "load_ms": model.load_ms,
                        "delegated": model.delegated,
                        "signatures": _describe(model.details),
                    }
                )
            elif header["op"] == "coverage":
                if not isinstance(model, _Model):
                    raise ValueError("only an Interpreter tells which operators are delegated")
                _send({"ok": True, **model.coverage()})
            elif header["op"] == "run":
                if model is None:
                    raise ValueError("run before load")
                results, times = model.run(header["signature"], header["count"], arrays)
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                stacked = {name: np.stack(values) for name, values in results.items()}
                answer = {"ok": True, "unwritten": times.pop("unwritten", {}), "times": times}
                _send({**answer, "peak_rss_kb": peak}, stacked)
            else:
                raise ValueError(f"unknown op {header['op']!r}")
        except Exception as error:  # noqa: BLE001 - sent to the parent in full, then the next request
            _send({"ok": False, "type": type(error).__name__, "error": str(error)})


if __name__ == "__main__":
    main()
