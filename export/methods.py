"""Methods of a module as modules of their own, so that each can be a signature of one file."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from tpu2edge.errors import ModelSourceError

__all__ = ["module_of", "owner_of"]


class _Method(nn.Module):
    """Calls one method of a module; its forward has that method's own arguments."""

    def __init__(self, owner: nn.Module, method: str) -> None:
        super().__init__()
        self.method_owner = owner  # the name is taken off paths again in blame.py
        self.method = method

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        return getattr(self.method_owner, self.method)  # type: ignore[no-any-return]


def module_of(target: Any, signature: str) -> nn.Module:
    """A module to trace for ``target``: a module itself, or a bound method of one.

    Raises:
        ModelSourceError: it is neither, so it is not known whose weights it uses.
    """
    if isinstance(target, nn.Module):
        return target
    owner = owner_of(target)
    if owner is None:
        raise ModelSourceError(
            f"signature '{signature}' is made from a {type(target).__name__}, not a module or a "
            "method of one",
            do="give a module, or a method of a module (model.encode, without brackets)",
        )
    if target.__name__ == "forward":
        return owner
    return _Method(owner, target.__name__)


def owner_of(target: Any) -> nn.Module | None:
    """The module itself, or the module of a bound method; None for anything else."""
    if isinstance(target, nn.Module):
        return target
    owner = target.__self__ if inspect.ismethod(target) else None
    return owner if isinstance(owner, nn.Module) else None
