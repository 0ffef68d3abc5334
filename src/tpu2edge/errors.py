"""Every error that a user can cause or meet, as one tree.

    Tpu2EdgeError
    ├── InputError            exit 2   what was handed in is wrong
    │   ├── ModelSourceError           MODEL cannot be found, imported or called
    │   ├── CheckpointError            the checkpoint does not fit the model
    │   ├── DataError                  samples of the wrong name, shape, dtype or value
    │   ├── OptionError                an unknown recipe, device, budget, output …
    │   └── BundleError                a bundle that exists, is damaged or is none
    ├── ConversionError       exit 3   the model cannot be exported, converted or quantized
    │   ├── ExportError                torch.export stops
    │   ├── LoweringError              an operator has no way to LiteRT
    │   └── QuantizationError          a recipe cannot be applied
    ├── DeviceError           exit 4   a device, a worker or a tool broke
    │   ├── DeviceCrashError           the process died by a signal, or ended by itself
    │   ├── DeviceTimeoutError         no answer in the time given
    │   ├── DeviceMemoryError          more memory than the device has
    │   ├── UnsupportedError           an operator or a type that the device cannot run
    │   └── UnwrittenError             an output, or a part of it, that the device left as it was
    └── ParityError           exit 1   the numbers are not within the budget

A message says what happened, where, and what to do next. Faults of tpu2edge itself are not in this
tree, so they keep their traceback.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "BundleError",
    "CheckpointError",
    "ConversionError",
    "DataError",
    "DeviceCrashError",
    "DeviceError",
    "DeviceMemoryError",
    "DeviceTimeoutError",
    "ExportError",
    "InputError",
    "LoweringError",
    "ModelSourceError",
    "OptionError",
    "ParityError",
    "Place",
    "QuantizationError",
    "Tpu2EdgeError",
    "UnsupportedError",
    "UnwrittenError",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where in the user's own things something happened; every field is optional."""

    module: str | None = None  # torch module path, "encoder.layers.0"
    op: str | None = None  # "aten.sort.default"
    file: str | None = None
    line: int | None = None
    tensor: str | None = None  # name of an input, output, weight or LiteRT tensor
    code: str | None = None  # the source line itself

    def __str__(self) -> str:
        parts: list[str] = []
        if self.op:
            parts.append(f"op {self.op}")
        if self.module is not None:
            parts.append(f"module '{self.module}'" if self.module else "the top module")
        if self.tensor:
            parts.append(f"tensor '{self.tensor}'")
        if self.file:
            parts.append(self.file if self.line is None else f"{self.file}:{self.line}")
        text = ", ".join(parts)
        return f"{text}: {self.code}" if self.code else text

    def __bool__(self) -> bool:
        return any((self.module is not None, self.op, self.file, self.tensor))


class Tpu2EdgeError(Exception):
    """Base of all errors of tpu2edge: what happened, what to do, and the place.

    Args:
        what: one sentence on what happened, with what was expected and what came.
        do: one sentence on what the user can do about it.
        place: where in the user's model or data.
        step: the stage it happened in, when the message alone does not tell.
    """

    exit_code = 2

    def __init__(
        self, what: str, *, do: str = "", place: Place | None = None, step: str = ""
    ) -> None:
        super().__init__(what, do, place, step)
        self.what = what
        self.do = do
        self.place = place if place else None
        self.step = step

    def __reduce__(self) -> tuple[object, ...]:
        # By default an exception is made again from its positional arguments alone, and fails.
        return (error_from_json, (self.to_json(),))

    @property
    def kind(self) -> str:
        """Class name, the machine-readable kind of the error."""
        return type(self).__name__

    def __str__(self) -> str:
        lines = [self.what]
        if self.place:
            lines.append(f"  at {self.place}")
        if self.do:
            lines.append(f"  Next: {self.do}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, object]:
        """Plain data for ``--json`` and for passing an error between processes."""
        place = self.place
        return {
            "kind": self.kind,
            "what": self.what,
            "do": self.do,
            "step": self.step,
            "exit_code": self.exit_code,
            "place": None
            if place is None
            else {
                name: value
                for name in ("module", "op", "file", "line", "tensor", "code")
                if (value := getattr(place, name)) is not None
            },
        }


class InputError(Tpu2EdgeError):
    """What the user handed in is wrong (usage, file, name, shape); exit status 2."""


class ModelSourceError(InputError):
    """MODEL cannot be found, imported or called, or returns something that is no model."""


class CheckpointError(InputError):
    """The checkpoint cannot be read safely, or its keys or shapes do not fit the model."""


class DataError(InputError):
    """A sample has a name, shape, dtype or value that the model cannot take."""


class OptionError(InputError):
    """An option has an unknown or impossible value; the message lists the known ones."""


class BundleError(InputError):
    """A bundle is damaged, incomplete, of an unknown format, or would be overwritten."""


class ConversionError(Tpu2EdgeError):
    """The model cannot be exported, converted or quantized; exit status 3."""

    exit_code = 3


class ExportError(ConversionError):
    """torch.export cannot capture the model as one graph, or captures another one."""


class LoweringError(ConversionError):
    """An operator (or the whole graph) has no way into a LiteRT file that runs."""


class QuantizationError(ConversionError):
    """A recipe cannot be applied to this model, or changes nothing."""


class DeviceError(Tpu2EdgeError):
    """A device, a worker process or an outside tool broke; exit status 4."""

    exit_code = 4


class DeviceCrashError(DeviceError):
    """The device's process died by a signal, or ended by itself."""


class DeviceTimeoutError(DeviceError):
    """The device gave no answer in the time given, and was ended."""


class DeviceMemoryError(DeviceError):
    """The model needs more memory than the device has, or than its profile allows."""


class UnsupportedError(DeviceError):
    """An operator, a type or a size that the device's LiteRT cannot run."""


class UnwrittenError(DeviceError):
    """The device reported success and left an output, or a part of it, as it was before."""


class ParityError(Tpu2EdgeError):
    """The outputs are outside of the budget; exit status 1."""

    exit_code = 1


def error_from_json(data: dict[str, object]) -> Tpu2EdgeError:
    """The error that :meth:`Tpu2EdgeError.to_json` described, of the same class."""
    known = {cls.__name__: cls for cls in _tree(Tpu2EdgeError)}
    cls = known.get(str(data.get("kind")), Tpu2EdgeError)
    place = data.get("place")
    return cls(
        str(data.get("what", "")),
        do=str(data.get("do", "")),
        place=Place(**place) if isinstance(place, dict) else None,
        step=str(data.get("step", "")),
    )


def _tree(cls: type[Tpu2EdgeError]) -> list[type[Tpu2EdgeError]]:
    return [cls, *(sub for child in cls.__subclasses__() for sub in _tree(child))]
