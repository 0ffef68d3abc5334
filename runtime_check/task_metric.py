"""A metric of the user's own, computed from all outputs of a file and from the reference's.

``--metric file.py:accuracy`` names a function that gives one number. It may take any of these, by name:

    outputs     list with one dict of arrays by output name for each sample
    inputs      the same for the inputs
    ids         the samples' names, "FILE:INDEX" for samples from files
    reference   the trusted outputs, as ``outputs``

It is called once with the file's outputs and once with the reference's in their place, so a drop is
told against what the torch module (or the TPU) reaches on the same samples.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu2edge.errors import DataError, ModelSourceError
from tpu2edge.files import sha256_of
from tpu2edge.runtime_check.budget import TaskBound
from tpu2edge.types import Tensors
from tpu2edge.usercode import load_function, user_code

__all__ = ["PARAMETERS", "TaskMetric", "TaskValue", "load_task_metric"]

PARAMETERS = ("outputs", "inputs", "ids", "reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskValue:
    """What the metric gave for the file, and for the reference on the same samples."""

    name: str
    value: float
    reference: float

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"name": self.name, "value": self.value, "reference": self.reference}

    def __str__(self) -> str:
        return f"{self.name} {self.value:.6g}, the reference's {self.reference:.6g}"

    def faults(self, bounds: Sequence[TaskBound]) -> list[str]:
        """A sentence for each bound that does not hold."""
        found = (bound.check(self.value, self.reference) for bound in bounds)
        return [f"{self.name}: {text}" for text in found if text is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskMetric:
    """The user's function; call it with what one file gave."""

    name: str
    spec: str
    function: Callable[..., Any]
    wanted: tuple[str, ...]
    sha256: str | None = None  # of the file it is in

    def __call__(
        self,
        outputs: Sequence[Tensors],
        *,
        inputs: Sequence[Tensors],
        ids: Sequence[str],
        reference: Sequence[Tensors],
    ) -> TaskValue:
        """The metric of ``outputs`` and of ``reference``.

        Raises:
            ModelSourceError: the function raises; the place is the innermost line of the user's.
            DataError: it gives no finite number.
        """
        values: list[float] = []
        for given in (outputs, reference):
            known = {
                "outputs": [dict(one) for one in given],
                "inputs": [dict(one) for one in inputs],
                "ids": list(ids),
                "reference": [dict(one) for one in reference],
            }
            with user_code(f"calling the metric {self.name}", None):
                value = self.function(**{name: known[name] for name in self.wanted})
            values.append(self._number(value))
        return TaskValue(name=self.name, value=values[0], reference=values[1])

    def _number(self, value: Any) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError) as err:
            raise DataError(
                f"the metric {self.name} gives {type(value).__name__}, not a number",
                do="return one float",
            ) from err
        if not math.isfinite(number):
            raise DataError(
                f"the metric {self.name} gives {number}",
                do="return a finite number for every model, a bad one included",
            )
        return number


def load_task_metric(spec: str) -> TaskMetric:
    """The metric that ``file.py:function`` or ``package.module:function`` names.

    Raises:
        ModelSourceError: there is no such function, or it wants something that is not known.
    """
    function, path = load_function(spec, what="--metric")
    parameters: Mapping[str, inspect.Parameter] = inspect.signature(function).parameters
    usual = [p for p in parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    unknown = [
        p.name for p in usual if p.name not in PARAMETERS and p.default is inspect.Parameter.empty
    ]
    wanted = tuple(p.name for p in usual if p.name in PARAMETERS)
    if len(usual) < len(parameters):
        wanted = PARAMETERS
    if unknown or not wanted:
        raise ModelSourceError(
            f"the metric {spec} takes {unknown or list(parameters)}",
            do=f"it may take {', '.join(PARAMETERS)}, by these names",
        )
    return TaskMetric(
        name=spec.rpartition(":")[2],
        spec=spec,
        function=function,
        wanted=wanted,
        sha256=sha256_of(path) if path is not None and path.is_file() else None,
    )
