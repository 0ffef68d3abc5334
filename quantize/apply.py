"""Recipes applied to one float ``.tflite``, in a process of its own that stays for many recipes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from tpu2edge.children import ending
from tpu2edge.errors import DeviceError, OptionError, QuantizationError
from tpu2edge.files import temporary_beside
from tpu2edge.flatbuffer import read_tflite
from tpu2edge.quantize.moments import Moments
from tpu2edge.quantize.recipes import Recipe
from tpu2edge.quantize.recipes import recipe as recipe_called
from tpu2edge.quantize.rules import stored_as_text
from tpu2edge.quantize.scopes import OpScope, op_scopes

if TYPE_CHECKING:
    from tpu2edge.types import Array

__all__ = ["Applied", "Deviation", "Quantizer", "Ranges", "quantize_file"]

_CHILD = Path(__file__).with_name("child.py")

#: Tensor name to the smallest and largest value, float32, shaped as ai-edge-quantizer has them
#: (an array of ones in each dimension, for activations).
Ranges = Mapping[str, "tuple[Array, Array]"]

# A minute or two for the largest files that were tried (3 GB); MSE and OCTAV are slower.
DEFAULT_TIMEOUT_S = 3600.0

# How long a child whose pipe is closed may take to end.
_DYING_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Deviation:
    """An op that ai-edge-quantizer cannot quantize as the recipe says.

    ``instead`` says what was done: "float32", or what an earlier rule that fits the op says.
    """

    subgraph: int
    index: int
    op: str
    scope: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"{self.op} '{self.scope.rstrip(';')}' {_done(self.instead)}: {self.why}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Applied:
    """What one quantization did: ``recipe`` holds the rules that give the file byte for byte.

    That is the recipe asked for, with further rules for the ops in ``deviations``.
    """

    recipe: Recipe
    deviations: tuple[Deviation, ...]
    size_bytes: int


class Quantizer:
    """ai-edge-quantizer holding one float file, in a process that lives until it is closed.

    A process that dies or hangs is an error for the recipe it was at; the next recipe gets a new
    one. Several Quantizers may work at once, each with a process of its own.

    Args:
        source: the float ``.tflite`` file.
        log: where the process's stderr goes.
        timeout_s: how long one recipe may take.
        remember: keep each weight's integers and scales from one recipe to the next, which makes
            many similar recipes some times faster and takes the memory of all these weights.
    """

    def __init__(
        self,
        source: Path,
        *,
        log: IO[bytes] | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        remember: bool = False,
    ) -> None:
        self.source = source
        self.remember = remember
        self.timeout_s = timeout_s
        self._log = log
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._logged = 0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._ranges: Ranges | None = None
        self._ranges_files: dict[str, str] | None = None
        self._moments: Moments | None = None
        self._moments_folder: tempfile.TemporaryDirectory[str] | None = None
        self._scopes: list[OpScope] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def scopes(self) -> list[OpScope]:
        """Each op of the source: its name and scope, which rules are matched against, its weight."""
        if self._scopes is None:
            self._scopes = op_scopes(self.source)
        return self._scopes

    def quantize(
        self,
        target: Path,
        recipe: Recipe,
        ranges: Ranges | None = None,
        *,
        moments: Moments | None = None,
        strict: bool = False,
    ) -> Applied:
        """Write to ``target`` what ``recipe`` makes of the source, whole or not at all.

        Args:
            target: the file to write; it may exist.
            recipe: what to do.
            ranges: of the activations, for static recipes.
            moments: of the activations, for rules of GPTQ and OSCAR; an op without them gets the
                rule before.
            strict: refuse where an op cannot be quantized as the recipe says, instead of doing
                the next best thing and saying so.

        Raises:
            OptionError: the recipe quantizes nothing, or needs ranges or moments and got none.
            BundleError: the source is no ``.tflite`` file.
            QuantizationError: the recipe cannot be applied.
            DeviceError: the quantizer's process died or hung.
        """
        _check_wanted(recipe, ranges, moments)
        with temporary_beside(target) as temporary:
            answer = self._ask(
                recipe.name,
                {
                    "target": str(temporary),
                    "rules": recipe.to_json(),
                    "ranges": self._written(ranges) if recipe.needs_ranges else None,
                    "moments": self._written_moments(moments) if recipe.needs_moments else None,
                    "strict": strict,
                },
            )
            deviations = tuple(_deviation(op) for op in answer.get("deviations", ()))
            if not answer["ok"]:
                raise self._refusal(recipe, answer, deviations)
            temporary.replace(target)
        return Applied(
            recipe=Recipe(name=recipe.name, rules=tuple(answer["rules"])),
            deviations=deviations,
            size_bytes=target.stat().st_size,
        )

    def close(self) -> None:
        """End the process; a later :meth:`quantize` starts another."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.close()
            try:
                child.wait(_DYING_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()
        self._pass_on_stderr()
        if self._stderr is not None:
            self._stderr.close()
            self._stderr = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = self._ranges = self._ranges_files = None
        if self._moments_folder is not None:
            self._moments_folder.cleanup()
            self._moments_folder = self._moments = None

    # ------------------------------------------------------------------------------ the process

    def _start(self) -> subprocess.Popen[bytes]:
        if self._stderr is None:
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        return subprocess.Popen(
            # -P: this folder's modules are not the child's.
            [
                *(sys.executable, "-P", "-u", str(_CHILD), str(self.source)),
                *(("--remember",) if self.remember else ()),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            # GPTQ's products are small: with two threads they take longer (MiniLM 4.4 s, 3.0 with
            # one), and several times as long where a core is busy.
            env={"OPENBLAS_NUM_THREADS": "1", **os.environ},
        )

    def _ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any]:
        if self._child is None:
            self._child = self._start()
        child = self._child
        try:
            line = self._exchange(child, json.dumps(request).encode() + b"\n")
        except TimeoutError as err:
            self._abandon(kill=True)
            raise DeviceError(
                f"ai-edge-quantizer took more than {self.timeout_s:g} s at recipe '{name}'",
                do="try another recipe; the other recipes of this run are not affected",
                step="quantize",
            ) from err
        except BaseException:
            self._abandon(kill=True)
            raise
        self._pass_on_stderr()
        if not line:
            tail = self._tail()
            status = self._abandon(kill=False)
            if status == 0:
                raise DeviceError(
                    f"ai-edge-quantizer gave no answer at recipe '{name}'", step="quantize"
                )
            raise DeviceError(
                f"ai-edge-quantizer died by {ending(status)} at recipe '{name}': {tail}",
                do="try another recipe; the other recipes of this run are not affected",
                step="quantize",
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes) -> bytes:
        """The child's line in answer to ``request``; nothing if it ended instead."""
        assert child.stdin is not None
        assert child.stdout is not None
        until = time.monotonic() + self.timeout_s
        try:
            child.stdin.write(request)
            child.stdin.flush()
        except BrokenPipeError:
            return b""
        got = b""
        while not got.endswith(b"\n"):
            wait = until - time.monotonic()
            if wait <= 0 or not select.select([child.stdout], [], [], wait)[0]:
                raise TimeoutError
            more = os.read(child.stdout.fileno(), 1 << 16)
            if not more:
                return b""
            got += more
        return got

    def _abandon(self, *, kill: bool) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        if kill:
            child.kill()
        try:
            status = child.wait(_DYING_S)
        except subprocess.TimeoutExpired:
            child.kill()
            status = child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._pass_on_stderr()
        return status

    def _pass_on_stderr(self) -> None:
        if self._stderr is None or self._log is None:
            return
        size = os.fstat(self._stderr.fileno()).st_size
        self._log.write(os.pread(self._stderr.fileno(), size - self._logged, self._logged))
        self._logged = size

    def _tail(self) -> str:
        assert self._stderr is not None
        size = os.fstat(self._stderr.fileno()).st_size
        data = os.pread(self._stderr.fileno(), 4096, max(0, size - 4096))
        return " / ".join(data.decode(errors="replace").strip().splitlines()[-3:])

    # ------------------------------------------------------------------------------- what it says

    def _written(self, ranges: Ranges | None) -> dict[str, str]:
        """Files that hold the ranges; the same mapping is written once."""
        import numpy as np

        assert ranges is not None
        if self._ranges_files is None or self._ranges is not ranges:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="tpu2edge-ranges-")
            index: list[tuple[str, list[int], int, int]] = []
            parts: list[Any] = []
            at = 0
            for name, (low, high) in ranges.items():
                low, high = np.asarray(low, "<f4"), np.asarray(high, "<f4")
                if low.shape != high.shape:
                    raise ValueError(f"ranges of '{name}': {low.shape} and {high.shape}")
                index.append((name, list(low.shape), at, at + low.size))
                parts += [low.ravel(), high.ravel()]
                at += 2 * low.size
            folder = Path(self._folder.name)
            np.save(folder / "values.npy", np.concatenate(parts) if parts else np.zeros(0, "<f4"))
            (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
            self._ranges = ranges
            self._ranges_files = {
                "index": str(folder / "index.json"),
                "values": str(folder / "values.npy"),
            }
        return self._ranges_files

    def _written_moments(self, moments: Moments | None) -> str:
        """A folder that holds them, which no other ones have: the child remembers by its name."""
        import numpy as np

        assert moments is not None
        if self._moments is not moments or self._moments_folder is None:
            if self._moments_folder is not None:
                self._moments_folder.cleanup()
            self._moments_folder = tempfile.TemporaryDirectory(prefix="tpu2edge-moments-")
            index: dict[str, dict[str, str]] = {}
            for key, arrays in (("hessian", moments.hessians), ("mu2", moments.squares)):
                for number, (name, array) in enumerate(arrays.items()):
                    file = f"{key}{number}.npy"
                    np.save(Path(self._moments_folder.name) / file, array)
                    index.setdefault(name, {})[key] = file
            text = json.dumps(index)
            (Path(self._moments_folder.name) / "index.json").write_text(text, encoding="utf-8")
            self._moments = moments
        return self._moments_folder.name

    def _refusal(
        self, recipe: Recipe, answer: Mapping[str, Any], deviations: Sequence[Deviation]
    ) -> Exception:
        if answer["stage"] == "load":
            read_tflite(self.source)  # says better what the file is, if it is none
        if answer["type"] == "Refused":
            ops = [f"{d.op} '{d.scope.rstrip(';')}': {d.why}" for d in deviations]
            more = f"; and {len(ops) - 10} more" if len(ops) > 10 else ""
            return QuantizationError(
                f"recipe '{recipe.name}' cannot be applied to {len(ops)} "
                f"{'op' if len(ops) == 1 else 'ops'}: {'; '.join(ops[:10])}{more}",
                do="let these ops stay float, or use another recipe for them",
                step="quantize",
            )
        return QuantizationError(
            f"recipe '{recipe.name}' cannot be applied: {answer['type']}: {answer['error']}",
            do="try another recipe, e.g. dynamic_wi8_afp32 or weight_only_wi8_afp32",
            step="quantize",
        )


def _deviation(told: Mapping[str, Any]) -> Deviation:
    """What the child told of one op, in words."""
    config = told.get("instead")
    instead = "float32" if config is None else stored_as_text(config["weight_tensor_config"])
    # The reason stands after the quantizer's own words on which tensor it was at.
    why = re.sub(
        r"^ValueError: Failed to get quantization parameters for tensor: .*?\. Error: ",
        "",
        told["why"],
        flags=re.DOTALL,
    )
    return Deviation(**{**told, "why": why, "instead": instead})


def _done(instead: str) -> str:
    return "left float" if instead == "float32" else f"stored as {instead}"


def _check_wanted(recipe: Recipe, ranges: Ranges | None, moments: Moments | None) -> None:
    if not recipe.rules:
        raise OptionError(
            f"recipe '{recipe.name}' quantizes nothing", do="use the float file as it is"
        )
    if recipe.needs_moments and not moments:
        raise OptionError(
            f"recipe '{recipe.name}' needs calibration: {' and '.join(recipe.needs_moments)} weighs "
            "errors by what the layers read",
            do="give calibration data",
        )
    if recipe.needs_ranges and not ranges:
        raise OptionError(
            f"recipe '{recipe.name}' needs calibration: the ranges of the activations",
            do="give calibration data",
        )


def quantize_file(
    source: Path,
    target: Path,
    recipe: str | Recipe,
    ranges: Ranges | None = None,
    *,
    moments: Moments | None = None,
    log: IO[bytes] | None = None,
    strict: bool = False,
) -> Applied:
    """Write to ``target`` what ``recipe``, or the one of that name, makes of ``source``.

    Raises:
        OptionError: there is no such recipe, it quantizes nothing, or it needs ranges or moments and
            got none.
        BundleError: the source is no ``.tflite`` file.
        QuantizationError: the recipe cannot be applied.
        DeviceError: the quantizer's process died.
    """
    wanted = recipe_called(recipe) if isinstance(recipe, str) else recipe
    _check_wanted(wanted, ranges, moments)
    with Quantizer(source, log=log) as quantizer:
        return quantizer.quantize(target, wanted, ranges, moments=moments, strict=strict)
