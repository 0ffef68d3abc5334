"""The vocabulary that the stages share: plain frozen data, no torch, no LiteRT.

Arrays are NumPy's. Data types carry NumPy names ("float32", "int8", "bool"). A name of an input or
output is always the user's own (forward's argument names, the keys of the returned dict, nested
ones dotted), never a position.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.generic]
else:
    Array = Any

__all__ = [
    "AS_QUANTIZED",
    "BASE_RECIPE",
    "Array",
    "Dim",
    "EdgeModel",
    "HloArgument",
    "LayerSource",
    "Note",
    "Progress",
    "Sample",
    "Signature",
    "StableHlo",
    "TensorSpec",
    "Verdict",
    "is_base",
    "no_progress",
]

#: The recipe of the file that a float model is converted to.
BASE_RECIPE = "float32"

#: What takes its place for a model that was quantized in PyTorch: weights and activations, weights
#: and at run time activations, weights only. Such a file is held to the quantized module.
AS_QUANTIZED = ("as_quantized_static", "as_quantized_dynamic", "as_quantized_weights")


def is_base(recipe: str) -> bool:
    """Whether a file of this recipe is what the conversion gave, with nothing quantized by us."""
    return recipe == BASE_RECIPE or recipe in AS_QUANTIZED


#: One set of arrays by name: the inputs (or the outputs) of one run of a signature.
Tensors = Mapping[str, Array]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A dynamic dimension: every size from ``min`` to ``max``, both included."""

    name: str
    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min}..{self.max}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One input or output of a signature.

    ``scale`` and ``zero_point`` are set on tensors that are quantized at the boundary (static int8
    models): real = scale * (stored - zero_point).
    """

    name: str
    shape: tuple[int | Dim, ...]
    dtype: str  # NumPy name
    scale: float | None = None
    zero_point: int | None = None

    @property
    def is_dynamic(self) -> bool:
        """Whether any dimension can change from run to run."""
        return any(isinstance(size, Dim) for size in self.shape)

    def __str__(self) -> str:
        shape = "x".join(str(size) for size in self.shape) or "scalar"
        return f"{self.name}: {self.dtype}[{shape}]"

    def to_json(self) -> dict[str, Any]:
        """Plain data; a dynamic dimension becomes ``{"name", "min", "max"}``."""
        data: dict[str, Any] = {
            "name": self.name,
            "shape": [
                {"name": s.name, "min": s.min, "max": s.max} if isinstance(s, Dim) else s
                for s in self.shape
            ],
            "dtype": self.dtype,
        }
        if self.scale is not None:
            data["scale"] = self.scale
            data["zero_point"] = self.zero_point
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorSpec:
        """The inverse of :meth:`to_json`."""
        return cls(
            name=data["name"],
            shape=tuple(Dim(**s) if isinstance(s, dict) else int(s) for s in data["shape"]),
            dtype=data["dtype"],
            scale=data.get("scale"),
            zero_point=data.get("zero_point"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A named entry of a ``.tflite`` file, inputs and outputs in the model's own order."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def input(self, name: str) -> TensorSpec:
        """The input called ``name``; KeyError if there is none."""
        return _named(self.inputs, name)

    def output(self, name: str) -> TensorSpec:
        """The output called ``name``; KeyError if there is none."""
        return _named(self.outputs, name)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "inputs": [spec.to_json() for spec in self.inputs],
            "outputs": [spec.to_json() for spec in self.outputs],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Signature:
        """The inverse of :meth:`to_json`."""
        return cls(
            name=data["name"],
            inputs=tuple(TensorSpec.from_json(s) for s in data["inputs"]),
            outputs=tuple(TensorSpec.from_json(s) for s in data["outputs"]),
        )


def _named(specs: Sequence[TensorSpec], name: str) -> TensorSpec:
    for spec in specs:
        if spec.name == name:
            return spec
    raise KeyError(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSource:
    """Which torch module, operator and source line a LiteRT tensor comes from."""

    module: str
    op: str
    file: str | None = None
    line: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data without the fields that are not known."""
        data: dict[str, Any] = {"module": self.module, "op": self.op}
        if self.file is not None:
            data["file"] = self.file
            data["line"] = self.line
        return data


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeModel:
    """A ``.tflite`` file that was written, read back and run once.

    ``layers`` maps a LiteRT tensor's name to the places in the torch model it was computed by
    (several when the converter fused them).
    """

    path: Path
    signatures: tuple[Signature, ...]
    recipe: str
    sha256: str
    size_bytes: int
    layers: Mapping[str, tuple[LayerSource, ...]] = field(default_factory=dict)

    def signature(self, name: str | None = None) -> Signature:
        """The signature called ``name``, or the only one; KeyError if there is no such one."""
        if name is None:
            if len(self.signatures) != 1:
                raise KeyError(f"one of {[s.name for s in self.signatures]} must be named")
            return self.signatures[0]
        for signature in self.signatures:
            if signature.name == name:
                return signature
        raise KeyError(name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One set of inputs by name, with the name it is reported under."""

    id: str  # "digits.npz#7", "example", "variation-3"
    inputs: Tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One line on something that was done to, or noticed about, what the user handed in."""

    code: str  # stable, for machines: "eval-mode", "unwrapped-compile", "narrowed-input" …
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class HloArgument:
    """One flat argument of a StableHLO program: a weight, or an input of the user's.

    ``dtype`` is the program's own (an int64 input may be int32 there). A weight's values are
    fetched by calling ``array``, which returns them without a copy where that is possible.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    array: Callable[[], Array] | None = field(default=None, repr=False, compare=False)

    @property
    def is_weight(self) -> bool:
        """Whether the value comes with the program (parameter, buffer, constant)."""
        return self.array is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class StableHlo:
    """A program as StableHLO, with weights as arguments beside the user's inputs.

    Operations carry the torch module they come from as a location ``module:<path>`` when the route
    knows it. ``outputs`` stand in the program's order and carry the model's own dtypes, which the
    program may have narrowed (int64 to int32, float64 to float32).
    """

    module: bytes = field(repr=False)  # MLIR text, UTF-8
    route: str  # "torchtpu", "torchax" or "litert-torch"
    versions: Mapping[str, str]
    arguments: tuple[HloArgument, ...]
    outputs: tuple[TensorSpec, ...]
    notes: tuple[Note, ...] = ()

    @property
    def inputs(self) -> tuple[HloArgument, ...]:
        """The user's inputs, in the program's order."""
        return tuple(argument for argument in self.arguments if not argument.is_weight)


class Verdict(enum.StrEnum):
    """What a check came to; ERROR means that a device or a tool broke, not the model."""

    PASS = "PASS"
    FAIL = "FAIL"
    ERROR = "ERROR"


class Progress(Protocol):
    """What long work calls to say where it is; must be cheap and must not raise."""

    def __call__(self, stage: str, done: float | None = None, total: float | None = None) -> None:
        """``stage`` in the user's words; ``done`` of ``total`` when a count is known."""


def no_progress(stage: str, done: float | None = None, total: float | None = None) -> None:
    """The default :class:`Progress`: says nothing."""


#: A function that takes a note as it happens.
NoteSink = Callable[[Note], None]
