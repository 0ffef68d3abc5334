"""From an exception or a graph node back to the user's own module and source line."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from tpu2edge.errors import Place
from tpu2edge.types import LayerSource

__all__ = ["module_path", "place_of_exception", "place_of_node", "source_of_node"]

# The wrapper that flattens inputs and outputs is the top module while tracing (see program.py).
_WRAPPER_ATTRIBUTE = "inner"
_METHOD_ATTRIBUTE = "method_owner"  # below it, where a method is traced (see methods.py)

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)')
_LIBRARIES = tuple(
    str(Path(path).resolve()) + os.sep
    for path in {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        sysconfig.get_path("stdlib"),
    }
    if path
)
_OWN = str(Path(__file__).resolve().parent) + os.sep


def module_path(node: torch.fx.Node) -> str:
    """The torch module path that computed ``node``, "" for the top module."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [strip_wrapper(entry[0]) for entry in stack.values()]
    return paths[-1] if paths else ""


def strip_wrapper(path: str) -> str:
    """``path`` as the user knows it, without the tracing wrapper and torch.export's prefixes."""
    path = path.removeprefix("L['self'].").removeprefix("L__self___").split("@")[0]
    for attribute in (_WRAPPER_ATTRIBUTE, _METHOD_ATTRIBUTE):
        if path == attribute:
            return ""
        path = path.removeprefix(attribute + ".")
    return path


def place_of_node(node: torch.fx.Node) -> Place:
    """Operator, module path, and the innermost source line outside of libraries."""
    file, line, code = _innermost(node.meta.get("stack_trace") or "")
    return Place(module=module_path(node), op=_op(node), file=file, line=line, code=code)


def source_of_node(node: torch.fx.Node) -> LayerSource:
    """The same as plain data for the map from LiteRT tensors to the torch model."""
    file, line, _ = _innermost(node.meta.get("stack_trace") or "")
    return LayerSource(module=module_path(node), op=_op(node), file=file, line=line)


def _op(node: torch.fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op


def _innermost(stack_trace: str) -> tuple[str | None, int | None, str | None]:
    """The user's last frame of a recorded trace; a library's own last frame if there is none."""
    lines = stack_trace.splitlines()
    last: tuple[str | None, int | None, str | None] = (None, None, None)
    user = last
    for index, text in enumerate(lines):
        if (match := _FRAME.search(text)) is None:
            continue
        code = lines[index + 1].strip() if index + 1 < len(lines) else None
        frame = (_shown(match["file"]), int(match["line"]), code)
        if _is_own(match["file"]):
            continue
        last = frame
        if not _is_library(match["file"]):
            user = frame
    return user if user[0] else last


def place_of_exception(error: BaseException, module: nn.Module) -> Place:
    """Where in the user's code ``error`` was raised, and in which submodule of ``module``."""
    names = {id(child): name for name, child in module.named_modules()}
    path: str | None = None
    user: tuple[str, int] | None = None
    for frame, line in _frames(error):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            path = names[id(owner)]
        file = frame.f_code.co_filename
        if not _is_library(file) and not _is_own(file) and not file.startswith("<"):
            user = (file, line)
    if user is None:
        found = _innermost(str(error))
        return Place(module=path, file=found[0], line=found[1], code=found[2])
    file, line = user
    code = linecache.getline(file, line).strip() or None
    return Place(module=path, file=_shown(file), line=line, code=code)


def _frames(error: BaseException) -> list[tuple[Any, int]]:
    chain: list[BaseException] = [error]
    while (
        inner := chain[-1].__cause__ or chain[-1].__context__
    ) is not None and inner not in chain:
        chain.append(inner)
    frames: list[tuple[Any, int]] = []
    for one in chain:
        trace: TracebackType | None = one.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame, trace.tb_lineno))
            trace = trace.tb_next
    return frames


def _is_own(file: str) -> bool:
    # Frames hold the path as it was imported, which may lead through a link.
    return os.path.realpath(file).startswith(_OWN)


def _is_library(file: str) -> bool:
    resolved = os.path.realpath(file)
    return resolved.startswith(_LIBRARIES) or file.startswith("<frozen") or _is_torch(resolved)


def _is_torch(file: str) -> bool:
    home = Path(torch.__file__ or "").parent
    return file.startswith(f"{home}{os.sep}")


def _shown(file: str) -> str:
    """The path relative to the current folder when it lies below it: shorter, and repeatable."""
    try:
        return str(Path(file).resolve().relative_to(Path.cwd()))
    except ValueError:
        return file
