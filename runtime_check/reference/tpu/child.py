"""The child process that holds JAX: compiles for a TPU topology, or runs on XLA:CPU.

Started by ``process`` as ``python -m``; speaks the messages of ``frames`` on stdin and stdout.
Requests:

- ``about``: libtpu's own words on its build out.
- ``compile``: module, topology and precision in; compiled HLO, cost and matmuls out.
- ``load``: module, plan and weights in; then any number of ``run``, inputs in and outputs out.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tpu2edge.runtime_check.reference.tpu.frames import receive, send
from tpu2edge.types import Array


def main() -> None:
    """Serve requests until stdin ends."""
    stdin: BinaryIO = sys.stdin.buffer
    # Libraries print to file descriptor 1: keep the real one for messages, send theirs to stderr.
    stdout: BinaryIO = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    runner: _Runner | None = None
    while True:
        try:
            request, arrays = receive(stdin)
        except EOFError:
            return
        results: list[Array] = []
        try:
            if request["do"] == "compile":
                reply = _compile(arrays[0].tobytes(), request)
            elif request["do"] == "about":
                reply = {"libtpu_build": _platform_version(_topology("v5e:1x1").devices[0])}
            elif request["do"] == "load":
                runner = _Runner(arrays[0].tobytes(), request, arrays[1:])
                reply = runner.about
            else:
                assert runner is not None
                results, reply = runner.run(arrays)
        except Exception as exc:  # noqa: BLE001  # the parent puts it into words
            reply = {"error": type(exc).__name__, "text": str(exc)}
        send(stdout, reply, results)


def _options(xla: Any, flags: dict[str, Any]) -> Any:
    options = xla.CompileOptions()
    options.num_replicas = options.num_partitions = 1
    options.env_option_overrides = list(flags.items())
    return options


def _topology(name: str) -> Any:
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=name)


def _platform_version(device: Any) -> str:
    return " ".join(str(device.client.platform_version).split())


def _compile(data: bytes, request: dict[str, Any]) -> dict[str, Any]:
    import jax
    from jax._src.lib import xla_client as xla

    from tpu2edge.runtime_check.reference.tpu import program

    module = program.parse(data)
    program.raise_precision(module, request["precision"])
    matmuls = program.tag_matmuls(module)
    device = _topology(request["topology"]).devices[0]
    flags: dict[str, Any] = {"xla_allow_excess_precision": bool(request["excess_precision"])}
    with tempfile.TemporaryDirectory() as folder:
        if request.get("prelayout"):
            flags |= {
                "xla_dump_to": folder,
                "xla_dump_hlo_as_text": True,
                "xla_dump_large_constants": True,
                "xla_dump_hlo_pass_re": "layout-assignment",
            }
        options = _options(xla, flags)
        options.device_assignment = xla.DeviceAssignment.create(np.array([[device.id]]))
        start = time.monotonic()
        executable = device.client.compile(module, xla.DeviceList((device,)), options)
        seconds = time.monotonic() - start
        snapshots = sorted(Path(folder).glob("*before_layout-assignment.txt"))
        prelayout = snapshots[0].read_text() if snapshots else None
    cost = executable.cost_analysis()
    cost = cost[0] if isinstance(cost, list) else cost
    memory = executable.get_compiled_memory_stats()
    return {
        "hlo": executable.hlo_modules()[0].to_string(),
        "prelayout": prelayout,
        "matmuls": matmuls,
        "seconds": seconds,
        "flops": float(cost.get("flops", float("nan"))),
        "memory": {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        "libtpu_build": _platform_version(device),
        "device_kind": str(device.device_kind),
        "jax": jax.__version__,
    }


class _Runner:
    """A program compiled for XLA:CPU, with its weights."""

    def __init__(self, data: bytes, request: dict[str, Any], weights: list[Array]) -> None:
        import jax
        import jax.extend.backend
        from jax._src.lib import xla_client as xla

        from tpu2edge.runtime_check.reference.tpu import program

        # Programs of two routes take int64; without this, JAX would narrow what is handed to them.
        jax.config.update("jax_enable_x64", True)
        put: Any = jax.device_put
        start = time.monotonic()
        if request.get("prelayout"):
            module = program.parse(_from_hlo(request["prelayout"]))
        else:
            module = program.parse(data)
        program.raise_precision(module, request["precision"])
        matmuls = program.tag_matmuls(module)
        modes = request["modes"]
        if modes is None:  # naive: the same for all, decided where the matmuls are known
            modes = [
                request["naive"] if m["elements"] == ["f32", "f32"] else "native" for m in matmuls
            ]
        if len(modes) != len(matmuls):
            raise ValueError(f"{len(modes)} modes for {len(matmuls)} matmuls")
        program.rewrite(module, modes)
        backend: Any = jax.extend.backend
        client = backend.get_backend("cpu")
        self._device = client.local_devices()[0]
        options = _options(xla, {"xla_allow_excess_precision": False})
        devices = xla.DeviceList((self._device,))
        self._executable = client.compile_and_load(program.text_of(module), devices, options)
        self._is_weight: list[bool] = request["is_weight"]
        self._put: Callable[[Array], Any] = functools.partial(put, device=self._device)
        self._weights = [self._put(w) for w in weights]
        self.about: dict[str, Any] = {
            "matmuls": matmuls,
            "modes": modes,
            "seconds": time.monotonic() - start,
            "jax": jax.__version__,
        }

    def run(self, inputs: list[Array]) -> tuple[list[Array], dict[str, Any]]:
        import resource

        start = time.monotonic()
        weights, users = iter(self._weights), (self._put(i) for i in inputs)
        arguments = [next(weights) if w else next(users) for w in self._is_weight]
        results = self._executable.execute_sharded(arguments)
        arrays = []
        for (shard,) in results.disassemble_into_single_device_arrays():
            array = np.asarray(shard)
            if array.dtype.name in ("bfloat16", "float16"):
                array = array.astype(np.float32)
            arrays.append(array)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak *= 1 if sys.platform == "darwin" else 1024
        return arrays, {"seconds": time.monotonic() - start, "peak_bytes": peak}


def _from_hlo(text: str) -> bytes:
    """StableHLO of the TPU compiler's HLO as it stood before layouts were assigned.

    Up to that pass the text is plain HLO, save for fusions (turned back into calls) and two
    markers around gathers that pass their operand on.
    """
    import re

    from jaxlib import _hlo
    from jaxlib import _jax as jaxlib_jax

    text = re.sub(
        r" fusion\(([^)]*)\), kind=\w+, (?:output_to_operand_aliasing=\{[^}]*\}, )?"
        r"calls=(%[\w.\-]+)",
        r" call(\1), to_apply=\2",
        text,
    )
    text = re.sub(
        r" custom-call\((%[\w.\-]+)\), custom_call_target=\""
        r"(?:AssumeGatherIndicesInBound|GatherScatterIndicesBitpacked)\"[^\n]*",
        r" copy(\1)",
        text,
    )
    proto = _hlo.hlo_module_from_text(text).as_serialized_hlo_module_proto()
    module = jaxlib_jax.mlir.hlo_to_stablehlo(proto)
    return module if isinstance(module, bytes) else str(module).encode()


if __name__ == "__main__":
    main()
