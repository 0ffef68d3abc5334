"""Names for inputs and outputs, taken from the model itself and kept in every later stage.

Inputs are called as forward's arguments, outputs as the keys of the returned dict, named tuple or
dataclass, else ``output_0``, ``output_1`` …; nested ones are joined with dots (``opts.k``,
``hidden.0``). Two different tensors never share a name.
"""

from __future__ import annotations

import collections
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpu2edge.errors import DataError, ExportError, ModelSourceError
from tpu2edge.types import Note

__all__ = ["CallLayout", "OutputLayout", "call_layout", "output_layout"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Leaf:
    """The place of the ``index``-th tensor in a nest of containers."""

    index: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CallLayout:
    """How a flat list of tensors becomes the arguments of one call of forward."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]  # the example's, in the order of names
    constants: Mapping[str, str]  # arguments that are no tensors, by name: their repr
    _args: tuple[Any, ...]
    _kwargs: dict[str, Any]

    def call(self, forward: Callable[..., Any], tensors: tuple[torch.Tensor, ...]) -> Any:
        """What ``forward`` returns for these tensors and the example's other arguments."""
        args = tuple(_fill(item, tensors) for item in self._args)
        kwargs = {name: _fill(item, tensors) for name, item in self._kwargs.items()}
        return forward(*args, **kwargs)


def call_layout(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> CallLayout:
    """Names and places of the tensors in ``forward(*args, **kwargs)``.

    Raises:
        ModelSourceError: the arguments do not fit forward's signature.
        DataError: no argument holds a tensor.
    """
    try:
        bound = inspect.signature(forward).bind(*args, **kwargs)
    except TypeError as err:
        raise ModelSourceError(
            f"the example inputs do not fit forward: {err}",
            do=f"forward takes {inspect.signature(forward)}",
        ) from err
    parameters = bound.signature.parameters
    found: list[tuple[str, torch.Tensor]] = []
    constants: dict[str, str] = {}
    new_args: list[Any] = []
    new_kwargs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            new_args.extend(
                _take(item, f"{name}.{i}", found, constants) for i, item in enumerate(value)
            )
        elif kind is inspect.Parameter.VAR_KEYWORD:
            for key, item in value.items():
                new_kwargs[key] = _take(item, key, found, constants)
        elif kind is inspect.Parameter.POSITIONAL_ONLY:
            new_args.append(_take(value, name, found, constants))
        elif kind is inspect.Parameter.KEYWORD_ONLY or name in kwargs:
            new_kwargs[name] = _take(value, name, found, constants)
        else:
            new_args.append(_take(value, name, found, constants))
    if not found:
        raise DataError(
            "the example inputs hold no tensor",
            do="give at least one tensor argument; a model without inputs has nothing to check",
        )
    return CallLayout(
        names=_unique([name for name, _ in found]),
        tensors=tuple(tensor for _, tensor in found),
        constants=constants,
        _args=tuple(new_args),
        _kwargs=new_kwargs,
    )


def _take(
    value: Any, path: str, found: list[tuple[str, torch.Tensor]], constants: dict[str, str]
) -> Any:
    if isinstance(value, torch.Tensor):
        found.append((path, value))
        return _Leaf(len(found) - 1)
    children = _children(value)
    if children is None:
        text = repr(value)
        # The default repr holds an address: another one in every run.
        constants[path] = _describe(value) if " at 0x" in text else text
        return value
    taken = [(key, _take(item, f"{path}.{key}", found, constants)) for key, item in children]
    return _Nest(value, tuple(taken))


@dataclasses.dataclass(frozen=True, slots=True)
class _Nest:
    like: Any
    items: tuple[tuple[str, Any], ...]


def _fill(item: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    if isinstance(item, _Leaf):
        return tensors[item.index]
    if not isinstance(item, _Nest):
        return item
    like = item.like
    values = [_fill(child, tensors) for _, child in item.items]
    if isinstance(like, Mapping):
        filled = dict(zip(like.keys(), values, strict=True))
        if isinstance(like, collections.defaultdict):
            return collections.defaultdict(like.default_factory, filled)
        make: Any = type(like)
        return filled if make is dict else make(filled)
    if _is_namedtuple(like):
        return type(like)(*values)
    if isinstance(like, (list, tuple)):
        return type(like)(values)
    return dataclasses.replace(
        like, **dict(zip((key for key, _ in item.items), values, strict=True))
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OutputLayout:
    """The tensors that one call of forward returned, with their names in order."""

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    left_out: tuple[Note, ...]  # None, numbers and strings: not in the file, said in a note


def output_layout(result: Any) -> OutputLayout:
    """Names and tensors of what forward returned.

    Raises:
        ExportError: it returned no tensor, or an object that holds none that can be found.
    """
    found: list[tuple[str, torch.Tensor]] = []
    left_out: list[Note] = []
    if isinstance(result, torch.Tensor):
        found.append(("output_0", result))
    else:
        children = _children(result)
        if children is None:
            raise ExportError(
                f"forward returned {_describe(result)}, not a tensor or a container of tensors",
                do="return tensors, or a dict, tuple, list or dataclass of tensors",
            )
        prefix = "" if _has_keys(result) else "output_"
        for key, item in children:
            _collect(item, f"{prefix}{key}", found, left_out)
    if not found:
        raise ExportError("forward returned no tensor", do="return at least one tensor")
    return OutputLayout(
        names=_unique([name for name, _ in found]),
        tensors=tuple(tensor for _, tensor in found),
        left_out=tuple(left_out),
    )


def _collect(
    value: Any, path: str, found: list[tuple[str, torch.Tensor]], left_out: list[Note]
) -> None:
    if isinstance(value, torch.Tensor):
        found.append((path, value))
        return
    if value is None or isinstance(value, (bool, int, float, str)):
        text = f"output '{path}' is {_describe(value)}, not a tensor: it is not in the file"
        left_out.append(Note(code="output-left-out", text=text))
        return
    children = _children(value)
    if children is None:
        raise ExportError(
            f"output '{path}' is {_describe(value)}, which holds no tensors that can be exported",
            do="return tensors only (transformers models: use_cache=False)",
        )
    for key, item in children:
        _collect(item, f"{path}.{key}", found, left_out)


# --------------------------------------------------------------------------------------- nesting


def _children(value: Any) -> list[tuple[str, Any]] | None:
    """The named items of a container; None for anything that is not one."""
    if isinstance(value, Mapping):
        return [(str(key), item) for key, item in value.items()]
    if _is_namedtuple(value):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, (list, tuple)):
        return [(str(index), item) for index, item in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _has_keys(value: Any) -> bool:
    return isinstance(value, Mapping) or _is_namedtuple(value) or dataclasses.is_dataclass(value)


def _is_namedtuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _describe(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float, str)):
        return f"the value {value!r}"
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def _unique(names: list[str]) -> tuple[str, ...]:
    """The same names, with ``#2``, ``#3`` … on those that would repeat (keys that hold dots)."""
    taken = set(names)
    given: set[str] = set()
    result: list[str] = []
    for name in names:
        unique, number = name, 1
        while unique in given or (number > 1 and unique in taken):
            number += 1
            unique = f"{name}#{number}"
        given.add(unique)
        result.append(unique)
    return tuple(result)
