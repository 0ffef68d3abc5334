"""Code of the user's own: imported, called, and its errors told with the line of theirs.

What is named as ``file.py``, ``file.py:name`` or ``package.module:name`` (a model, calibration data, a
task metric) goes through here. The code is the user's and is run.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import hashlib
import importlib
import importlib.machinery
import importlib.util
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from tpu2edge.errors import ModelSourceError, Place

__all__ = [
    "closest",
    "import_dotted",
    "import_file",
    "load_function",
    "place_of",
    "shown_path",
    "user_code",
]


def load_function(spec: str, *, what: str) -> tuple[Callable[..., Any], Path | None]:
    """The function that ``file.py:name`` or ``package.module:name`` names, and its file.

    Raises:
        ModelSourceError: there is no such file, module or function, or importing it raises.
    """
    forms = f"write {what} file.py:function or {what} package.module:function"
    head, _, name = spec.rpartition(":")
    if not head or not name:
        raise ModelSourceError(f"{what} '{spec}' names no function", do=forms)
    if Path(head).suffix.lower() == ".py" or "/" in head:
        module, path = import_file(Path(head), what=what, forms=forms)
    else:
        module, path = import_dotted(head, what=what, forms=forms)
    value: Any = module
    for part in name.split("."):
        with user_code(f"looking up {name} in {head}", None):
            if not hasattr(value, part):
                known = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
                raise ModelSourceError(
                    f"{head} has no '{name}'{closest(name, known)}",
                    do=f"it has: {', '.join(known) or 'no function'}",
                )
            value = getattr(value, part)
    if not callable(value):
        raise ModelSourceError(f"{spec} is no function but {type(value).__name__}", do=forms)
    return value, path


def shown_path(path: Path | str) -> str:
    """A path to show: relative below the current folder, else the file's name alone."""
    path = Path(path)
    if not path.is_absolute():
        return str(path)
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return path.name


class _FreshLoader(importlib.machinery.SourceFileLoader):
    """Compiles the file as it stands now: a bytecode cache can be a version behind."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def import_file(path: Path, *, what: str, forms: str) -> tuple[ModuleType, Path | None]:
    """The module that a file of the user's is, run anew, and its path.

    ``what`` is the option the file was named with and ``forms`` how it may be written, for messages.
    """
    if path.is_dir():
        found = ", ".join(sorted(p.name for p in path.glob("*.py"))[:8]) or "no .py file"
        raise ModelSourceError(f"{what} {shown_path(path)} is a folder (in it: {found})", do=forms)
    if not path.is_file():
        near = (
            [p.name for p in path.parent.iterdir() if p.suffix in (".py", ".pt2")]
            if path.parent.is_dir()
            else []
        )
        raise ModelSourceError(
            f"there is no file {shown_path(path)}" + closest(path.name, near), do=forms
        )
    path = path.resolve()
    linecache.checkcache(str(path))
    with user_code(f"importing {shown_path(path)}", str(path)):
        tree = ast.parse(path.read_bytes(), filename=str(path))
    if any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)):
        # Relative imports work only inside a package: import the file as that package's module.
        top = path.parent
        while (top.parent / "__init__.py").is_file():
            top = top.parent
        dotted = ".".join(path.relative_to(top.parent).with_suffix("").parts)
        _put_on_path(top.parent)
        with user_code(f"importing {shown_path(path)}", str(path)), _own_argv(path):
            return importlib.import_module(dotted), path
    _put_on_path(path.parent)
    name = _module_name(path)
    loader = _FreshLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        with user_code(f"importing {shown_path(path)}", str(path)), _own_argv(path):
            loader.exec_module(module)
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    return module, path


def _module_name(path: Path) -> str:
    """The file's stem when ``import stem`` would find this very file, else a name of its own."""
    stem = path.stem
    loaded = sys.modules.get(stem)
    if loaded is not None:
        home = getattr(loaded, "__file__", None)
    else:
        try:
            found = importlib.util.find_spec(stem) if stem.isidentifier() else None
        except (ImportError, ValueError):
            found = None
        home = found.origin if found is not None else None
    if home is not None and Path(home).resolve() == path:
        return stem
    tag = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"_model_{re.sub(r'[^0-9a-zA-Z]', '_', stem)}_{tag}"


def import_dotted(dotted: str, *, what: str, forms: str) -> tuple[ModuleType, Path | None]:
    """The module ``package.module`` of the current folder or the environment, and its file."""
    if not all(part.isidentifier() for part in dotted.split(".")):
        raise ModelSourceError(f"{what} {dotted!r} is neither a file nor a module", do=forms)
    _put_on_path(Path.cwd())
    importlib.invalidate_caches()
    try:
        with user_code(f"importing {dotted}", None):
            module = importlib.import_module(dotted)
    except ModelSourceError as err:
        cause = err.__cause__
        if (
            isinstance(cause, ModuleNotFoundError)
            and cause.name is not None
            and (dotted == cause.name or dotted.startswith(f"{cause.name}."))
        ):
            do = forms
            if "is not a package" in str(cause) or (cause.name == dotted and "." in dotted):
                head, _, tail = dotted.rpartition(".")
                do = f"if {tail} is a function: {head}:{tail}. {forms}"
            raise ModelSourceError(
                f"there is no module {cause.name!r} in the current folder or this environment",
                do=do,
            ) from cause
        raise
    home = getattr(module, "__file__", None)
    return module, Path(home) if home else None


def _put_on_path(folder: Path) -> None:
    text = str(folder)
    if text not in sys.path:
        sys.path.insert(0, text)


@contextlib.contextmanager
def _own_argv(path: Path) -> Iterator[None]:
    """While user code is imported, argparse at its top level must not meet our arguments."""
    before = sys.argv
    sys.argv = [str(path)]
    try:
        yield
    finally:
        sys.argv = before


# ---- the user's code raises -------------------------------------------------------------------


@contextlib.contextmanager
def user_code(doing: str, path: str | None) -> Iterator[None]:
    """Turns whatever the user's code raises into a ModelSourceError with the line of theirs."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except SystemExit as err:
        raise ModelSourceError(
            f"{doing}: the code ends the program (SystemExit: {err.code})",
            place=place_of(err),
            do="keep what parses arguments or exits under if __name__ == '__main__':",
        ) from err
    except SyntaxError as err:
        raise ModelSourceError(
            f"{doing}: {type(err).__name__}: {err.msg}",
            place=Place(
                file=shown_path(err.filename or path or "?"),
                line=err.lineno,
                code=(err.text or "").strip() or None,
            ),
        ) from err
    except Exception as err:  # the user's code: anything can come
        text = str(err).strip() or "(no text)"
        do = ""
        if isinstance(err, ModuleNotFoundError) and err.name:
            do = f"install {err.name.partition('.')[0]!r} in the environment tpu2edge runs in"
        raise ModelSourceError(
            f"{doing}: {type(err).__name__}: {text}", place=place_of(err), do=do
        ) from err


def place_of(err: BaseException) -> Place | None:
    """The innermost line of the user's own code that the error passed through."""
    for frame in reversed(traceback.extract_tb(err.__traceback__)):
        if not _is_library(frame.filename):
            return Place(
                file=shown_path(frame.filename), line=frame.lineno, code=frame.line or None
            )
    return None


def _is_library(filename: str) -> bool:
    if filename.startswith("<"):
        return True
    paths = sysconfig.get_paths()
    ours = str(Path(__file__).parent)
    folders = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")} | {ours}
    if any(filename.startswith(folder + "/") for folder in folders):
        return True
    return "site-packages" in Path(filename).parts


def closest(name: str, known: list[str]) -> str:
    """``; the closest is NAME``, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; the closest is {near[0]}" if near else ""
