"""From what the user calls MODEL to a module (or a saved program) with its example inputs.

MODEL is ``file.py``, ``file.py:name``, ``package.module:name`` or a ``.pt2`` file. The code in it
is the user's own and is run; a ``.pt2`` is data, and nothing in it is allowed to run.
"""

from __future__ import annotations

import inspect
import io
import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import DataError, ModelSourceError, Place
from tpu2edge.files import sha256_of
from tpu2edge.types import Note
from tpu2edge.usercode import closest, import_dotted, import_file, shown_path, user_code

if TYPE_CHECKING:
    import torch

__all__ = [
    "ARGS_NAMES",
    "KWARGS_NAMES",
    "MODEL_NAMES",
    "LoadedSource",
    "load_source",
    "signatures_from_mapping",
]

#: Names that are looked for when MODEL names no function, group after group. The first group that
#: has a name in the file decides; two names of one group are refused. ``get_model`` is
#: litert-cli's name; ``get_signatures`` gives several entries of one file.
MODEL_NAMES: tuple[tuple[str, ...], ...] = (
    ("get_signatures",),
    ("get_model",),
    ("make_model", "make", "build_model", "create_model"),
    ("model", "net"),
    ("Model", "Net"),
)

#: Names beside the model's that give example inputs when the model comes without (a function or a
#: value): ``get_args`` is litert-cli's. Two of them in one file are refused.
ARGS_NAMES: tuple[str, ...] = ("get_args", "get_inputs", "get_example_inputs", "example_inputs")

#: The same for inputs by name.
KWARGS_NAMES: tuple[str, ...] = ("get_kwargs",)

#: What a returned dict may hold.
_DICT_KEYS = ("model", "args", "kwargs")

_FORMS = "MODEL is file.py, file.py:function, package.module:function or a saved program.pt2"

#: Endings of files that are no MODEL, with what to do instead.
_OTHER_FILES = {
    ".pt": "weights are passed with --checkpoint; MODEL is the code that builds the network",
    ".pth": "weights are passed with --checkpoint; MODEL is the code that builds the network",
    ".bin": "weights are passed with --checkpoint; MODEL is the code that builds the network",
    ".ckpt": "weights are passed with --checkpoint; MODEL is the code that builds the network",
    ".safetensors": "weights are passed with --checkpoint; MODEL is the code that builds the "
    "network",
    ".tflite": "it is converted already: tpu2edge check compares it, tpu2edge inspect shows it",
    ".onnx": "write a file.py with get_model() that builds the PyTorch model",
    ".ipynb": "put the function that builds the model into a file.py",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedSource:
    """What MODEL came to: exactly one of ``module``, ``program`` and ``signatures`` is set.

    ``signatures`` maps the name of each entry of the file to (module or method, args, kwargs).

    ``args`` is None when the source has no example inputs, and ``()`` when all of them are in
    ``kwargs``. ``origin`` is MODEL as the user wrote it, without an absolute path; ``sha256`` is
    that of the source file (code or ``.pt2``), None when there is no file.
    """

    module: torch.nn.Module | None
    program: torch.export.ExportedProgram | None
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any]
    origin: str
    sha256: str | None
    notes: tuple[Note, ...]
    signatures: Mapping[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] | None = None

    def refuse_without_inputs(self, source: str) -> None:
        """Refuse a module, ``source`` to the user, that came without example inputs.

        Raises:
            DataError: there are none, and no saved program that has its own.
        """
        if self.program is None and self.args is None and not self.kwargs:
            raise DataError(
                f"'{source}' gives no example inputs",
                do="let its function return (module, args), or define get_args() beside it",
            )


def load_source(spec: str) -> LoadedSource:
    """The model that ``spec`` names, with its example inputs if it has any.

    The named thing is a function without required arguments, an ``nn.Module``, or a subclass of it
    that needs no arguments. A function returns a model, ``(model, args)``, ``(model, args,
    kwargs)``, ``{"model", "args", "kwargs"}``, or, for several signatures of one file, a dict of
    ``name: (module or method, args)`` or ``name: (module or method, args, kwargs)``; args are one
    tensor, a tuple or list of inputs, or a dict (then they are kwargs). A plain ``file.py`` is
    searched for :data:`MODEL_NAMES`, and :data:`ARGS_NAMES` beside the model give its inputs. The
    model is neither copied nor changed.

    The file's folder (the current folder for a package) is put first on ``sys.path`` and stays
    there, because models import their neighbours late. A file is run anew at each call.

    Raises ModelSourceError when the file or name is not there or is ambiguous, when the user's code
    raises (the place is the innermost line of theirs), when a function needs arguments or returns
    something else, and when a ``.pt2`` is damaged or would need code to be unpickled.
    """
    head, _, name = spec.rpartition(":") if ":" in spec else (spec, "", "")
    if not head or (":" in spec and not name):
        raise ModelSourceError(f"MODEL {spec!r} names nothing", do=_FORMS)
    suffix = Path(head).suffix.lower()
    if suffix == ".pt2":
        if name:
            raise ModelSourceError(
                f"{_origin(head, '')} holds one program, so {name!r} cannot be picked from it",
                do=f"pass {_origin(head, '')} alone",
            )
        return _load_program(Path(head))
    if suffix in _OTHER_FILES and ("/" in head or Path(head).exists()):
        raise ModelSourceError(f"{head} is no MODEL", do=_OTHER_FILES[suffix])
    if suffix == ".py" or "/" in head or Path(head).is_file():
        module, path = import_file(Path(head), what="MODEL", forms=_FORMS)
    else:
        module, path = import_dotted(head, what="MODEL", forms=_FORMS)
    return _from_namespace(module, name, path, origin=_origin(head, name))


def _origin(head: str, name: str) -> str:
    path = Path(head)
    if path.is_absolute():
        head = shown_path(path)
    return f"{head}:{name}" if name else head


# ---- from names to a model --------------------------------------------------------------------


def _from_namespace(
    module: ModuleType, name: str, path: Path | None, *, origin: str
) -> LoadedSource:
    shown = shown_path(path) if path is not None else module.__name__
    notes: list[Note] = []
    if not name:
        name = _find_model(module, shown)
        notes.append(Note(code="model-name", text=f"the model is {name} of {shown}"))
        origin = f"{origin}:{name}"
    value = _attribute(module, name, shown)
    result = _call(value, name, shown, wants="a model")
    if _is_signatures(result, name):
        return LoadedSource(
            module=None,
            program=None,
            args=None,
            kwargs={},
            origin=origin,
            sha256=sha256_of(path) if path is not None and path.is_file() else None,
            notes=tuple(notes),
            signatures=signatures_from_mapping(result, name),
        )
    found, args, kwargs = _unpack(result, name)
    if args is None and not kwargs:
        args, kwargs = _inputs_beside(module, name, shown, notes)
    else:
        unused = [n for n in (*ARGS_NAMES, *KWARGS_NAMES) if n in vars(module) and n != name]
        if unused:
            notes.append(
                Note(
                    code="inputs-source",
                    text=f"example inputs: those that {name} returned; {', '.join(unused)} "
                    f"of {shown} not used",
                )
            )
    import torch

    sha256 = sha256_of(path) if path is not None and path.is_file() else None
    if isinstance(found, torch.export.ExportedProgram):
        if args is None and found.example_inputs is not None:
            args, kwargs = tuple(found.example_inputs[0]), dict(found.example_inputs[1])
        return LoadedSource(
            module=None,
            program=found,
            args=args,
            kwargs=kwargs,
            origin=origin,
            sha256=sha256,
            notes=tuple(notes),
        )
    return LoadedSource(
        module=found,
        program=None,
        args=args,
        kwargs=kwargs,
        origin=origin,
        sha256=sha256,
        notes=tuple(notes),
    )


def _find_model(module: ModuleType, shown: str) -> str:
    for group in MODEL_NAMES:
        there = [name for name in group if _may_be_model(vars(module).get(name))]
        if len(there) > 1:
            raise ModelSourceError(
                f"{shown} defines {' and '.join(there)}: which one is the model?",
                do=f"name it: {shown}:{there[0]}",
            )
        if there:
            return there[0]
    known = ", ".join(name for group in MODEL_NAMES for name in group)
    defined = _defined(module)
    raise ModelSourceError(
        f"{shown} has none of {known}; it defines {_listed(defined)}",
        do=f"name the function or class: {shown}:{defined[0].split(' ')[0]}"
        if defined
        else "define get_model(), which returns the model",
    )


def _may_be_model(value: Any) -> bool:
    """A function, class or module; a string called ``model`` or an imported file is none."""
    return callable(value)


def _defined(module: ModuleType) -> list[str]:
    """What the file itself defines, functions first, as "name (kind)"."""
    import torch

    functions, classes, instances = [], [], []
    for name, value in vars(module).items():
        if name.startswith("_") or isinstance(value, ModuleType):
            continue
        if isinstance(value, torch.nn.Module):
            instances.append(f"{name} (nn.Module)")
        elif getattr(value, "__module__", None) != module.__name__:
            continue
        elif isinstance(value, type):
            if issubclass(value, torch.nn.Module):
                classes.append(f"{name} (nn.Module class)")
        elif callable(value):
            functions.append(f"{name} (function)")
    return functions + instances + classes


def _listed(names: list[str], count: int = 12) -> str:
    if not names:
        return "no function, module or module class"
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def _attribute(module: ModuleType, name: str, shown: str) -> Any:
    value: Any = module
    for part in name.split("."):
        try:
            with user_code(f"looking up {name} in {shown}", None):
                value = getattr(value, part)
        except ModelSourceError as err:
            if not isinstance(err.__cause__, AttributeError):
                raise
            defined = _defined(module)
            near = closest(part, [d.split(" ")[0] for d in defined])
            raise ModelSourceError(
                f"{shown} has no {name!r}{near}; it defines {_listed(defined)}",
                do=f"name one of them: {shown}:{defined[0].split(' ')[0]}" if defined else "",
            ) from err.__cause__
    return value


def _call(value: Any, name: str, shown: str, *, wants: str) -> Any:
    """What the named thing gives: called when it is a function or class, else itself."""
    import torch

    if isinstance(value, (torch.nn.Module, torch.export.ExportedProgram)) or not callable(value):
        return value
    needed = _required(value)
    if needed:
        what = "class" if isinstance(value, type) else "function"
        raise ModelSourceError(
            f"{what} {name} of {shown} needs arguments ({', '.join(needed)}), "
            f"but it is called without any",
            place=_definition(value),
            do=f"write a function without arguments that returns {wants}, "
            f"e.g. def get_model(): return {name}({', '.join(f'{n}=…' for n in needed)})",
        )
    with user_code(f"calling {name}() of {shown}", None):
        return value()


def _required(value: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in free]


def _definition(value: Any) -> Place | None:
    try:
        file = inspect.getsourcefile(value)
        lines, line = inspect.getsourcelines(value)
    except (OSError, TypeError):
        return None
    return Place(file=shown_path(file), line=line, code=lines[0].strip()) if file else None


def _is_signatures(result: Any, name: str) -> bool:
    if name.rpartition(".")[2] == "get_signatures":
        return True
    return (
        isinstance(result, Mapping)
        and bool(result)
        and not set(result) & set(_DICT_KEYS)
        and all(isinstance(entry, (tuple, list)) for entry in result.values())
    )


def signatures_from_mapping(
    result: Any, what: str
) -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """``{name: (module or method, args[, kwargs])}``, checked, with args and kwargs filled in.

    Raises:
        ModelSourceError: another form.
    """
    form = 'return {"encode": (model.encode, (x,)), "decode": (model.decode, (y,))}'
    if not isinstance(result, Mapping) or not result:
        got = "an empty dict" if isinstance(result, Mapping) else f"a {type(result).__name__}"
        raise ModelSourceError(f"{what} gives {got}, where signatures were expected", do=form)
    signatures: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
    for name, entry in result.items():
        if not isinstance(name, str) or not isinstance(entry, (tuple, list)):
            raise ModelSourceError(
                f"{what}: {name!r} has a {type(entry).__name__}, where (module or method, args) "
                "was expected",
                do=form,
            )
        if not 2 <= len(entry) <= 3:
            raise ModelSourceError(
                f"{what}: {name!r} has {len(entry)} things; (module or method, args, kwargs) "
                "are 2 or 3",
                do=form,
            )
        target, args, kwargs = (*entry, None)[:3]
        positional, named = _inputs(args, f"the args of {name!r}")
        if kwargs is not None:
            if not isinstance(kwargs, Mapping):
                raise ModelSourceError(f"{what}: the kwargs of {name!r} are no dict", do=form)
            named = _merged(named, kwargs, name)
        signatures[name] = (target, positional or (), named)
    return signatures


def _unpack(result: Any, name: str) -> tuple[Any, tuple[Any, ...] | None, dict[str, Any]]:
    """The model, args and kwargs in what a function returned."""
    _refuse_quant_config(result, name)
    if isinstance(result, Mapping):
        unknown = [key for key in result if key not in _DICT_KEYS]
        if "model" not in result or unknown:
            raise ModelSourceError(
                f"{name} returns a dict with the keys {', '.join(map(repr, result)) or '(none)'}; "
                f"'model', 'args' and 'kwargs' are known, and 'model' is needed",
                do='return {"model": model, "args": (x,)}',
            )
        return _checked(result["model"], result.get("args"), result.get("kwargs"), name)
    if isinstance(result, (tuple, list)):
        if not 1 <= len(result) <= 3:
            raise ModelSourceError(
                f"{name} returns {len(result)} things; (model, args, kwargs) are at most 3",
                do="put all inputs in one tuple: return model, (x, y)",
            )
        model, args, kwargs = (*result, None, None)[:3]
        return _checked(model, args, kwargs, name)
    return _checked(result, None, None, name)


def _refuse_quant_config(result: Any, name: str) -> None:
    """A config for litert_torch.convert quantizes nothing: a float model would come out unsaid."""
    things = list(result.values()) if isinstance(result, Mapping) else result
    for thing in things if isinstance(things, (tuple, list)) else ():
        kind = type(thing)
        if kind.__module__.startswith("litert_torch.quantize"):
            raise ModelSourceError(
                f"{name} returns a {kind.__name__}, which quantizes nothing by itself",
                do="prepare_pt2e(…, quantizer), run samples, convert_pt2e, and return the model that "
                "gives; or return the float model and name a --recipe",
            )


def _checked(
    model: Any, args: Any, kwargs: Any, name: str
) -> tuple[Any, tuple[Any, ...] | None, dict[str, Any]]:
    import torch

    if not isinstance(model, (torch.nn.Module, torch.export.ExportedProgram)):
        do = f"return an nn.Module from {name}"
        if isinstance(model, type) and issubclass(model, torch.nn.Module):
            what, do = f"the class {model.__name__}", f"return an instance: {model.__name__}()"
        elif isinstance(model, Mapping):
            what = "a dict"
            do = "a state dict has no code: build the module and load it, or use --checkpoint"
        else:
            what = "None" if model is None else f"a {type(model).__name__}"
        raise ModelSourceError(f"{name} gives {what} where a model was expected", do=do)
    positional, named = _inputs(args, f"the args of {name}")
    if kwargs is not None:
        if not isinstance(kwargs, Mapping):
            raise ModelSourceError(
                f"{name} returns (model, args, kwargs), but kwargs is a {type(kwargs).__name__}",
                do="kwargs is a dict by name; put positional inputs in one tuple: "
                "return model, (x, y)",
            )
        named = _merged(named, kwargs, name)
        positional = () if positional is None else positional
    return model, positional, named


def _inputs(args: Any, what: str) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    import torch

    if args is None:
        return None, {}
    if isinstance(args, torch.Tensor):
        return (args,), {}
    if isinstance(args, (tuple, list)):
        return tuple(args), {}
    if isinstance(args, Mapping):
        return (), _merged({}, args, what)
    raise ModelSourceError(
        f"{what} are a {type(args).__name__}; a tensor, a tuple of inputs or a dict by name was "
        f"expected",
        do="an array becomes a tensor with torch.from_numpy(array)",
    )


def _merged(named: dict[str, Any], more: Mapping[Any, Any], what: str) -> dict[str, Any]:
    wrong = [key for key in more if not isinstance(key, str)]
    if wrong:
        raise ModelSourceError(f"{what}: the input name {wrong[0]!r} is no string")
    twice = [key for key in more if key in named]
    if twice:
        raise ModelSourceError(f"{what}: the input {twice[0]!r} is given twice, in args and kwargs")
    return {**named, **more}


def _inputs_beside(
    module: ModuleType, name: str, shown: str, notes: list[Note]
) -> tuple[tuple[Any, ...] | None, dict[str, Any]]:
    """Example inputs from ``get_args`` and its like in the model's own file."""
    args: tuple[Any, ...] | None = None
    named: dict[str, Any] = {}
    used: list[str] = []
    there = [n for n in ARGS_NAMES if n in vars(module) and n != name]
    if len(there) > 1:
        raise ModelSourceError(
            f"{shown} defines {' and '.join(there)}: which one gives the inputs?",
            do=f"keep one of them, or return (model, args) from {name}",
        )
    for source in there:
        value = _call(vars(module)[source], source, shown, wants="the inputs")
        args, named = _inputs(value, f"the inputs that {source} of {shown} gives")
        used.append(source)
    for source in (n for n in KWARGS_NAMES if n in vars(module) and n != name):
        value = _call(vars(module)[source], source, shown, wants="the inputs by name")
        if not isinstance(value, Mapping):
            raise ModelSourceError(
                f"{source} of {shown} gives a {type(value).__name__}; a dict by input name was "
                f"expected"
            )
        named = _merged(named, value, f"{source} of {shown}")
        args = () if args is None else args
        used.append(source)
    if used:
        text = f"example inputs come from {' and '.join(used)} of {shown}"
        notes.append(Note(code="inputs-source", text=text))
    return args, named


# ---- saved programs ---------------------------------------------------------------------------

# torch.export.load unpickles three kinds of records without restriction, loads compiled libraries,
# and evaluates the text of symbolic sizes (read in torch 2.13: torch/export/pt2_archive/_package.py
# and torch/_export/serde/serialize.py). Each is looked through here before it is called.
_SYMBOL = re.compile(r"[a-z]{1,4}\d+|[A-Z]\w*|floor|ceiling|int_oo|oo|and|or|not|nan|zoo|e\d*")
_SYMBOLIC_CHARACTERS = re.compile(r"[\w\s+\-*/%(),.<>=!&|~]*")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]|__")


def _load_program(path: Path) -> LoadedSource:
    shown = shown_path(path)
    if not path.is_file():
        near = [p.name for p in path.parent.glob("*.pt2")] if path.parent.is_dir() else []
        raise ModelSourceError(f"there is no file {shown}" + closest(path.name, near), do=_FORMS)
    import torch
    import torch.ao.quantization.fx._decomposed  # operators of programs quantized with PT2E

    _refuse_unsafe_program(path, shown)
    try:
        program = torch.export.load(path)
    except KeyboardInterrupt:
        raise
    except Exception as err:  # torch raises a dozen classes on a damaged file
        raise ModelSourceError(
            f"{shown} cannot be read as a saved ExportedProgram: "
            f"{type(err).__name__}: {_first_line(err)}",
            do=f"save it again with torch.export.save(program, …) (torch {torch.__version__} "
            "reads it here), on the CPU",
        ) from err
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = {}
    if program.example_inputs is not None:
        args, kwargs = tuple(program.example_inputs[0]), dict(program.example_inputs[1])
    return LoadedSource(
        module=None,
        program=program,
        args=args,
        kwargs=kwargs,
        origin=_origin(str(path), ""),
        sha256=sha256_of(path),
        notes=(),
    )


def _first_line(err: BaseException) -> str:
    return (str(err).strip() or "(no text)").splitlines()[0]


def _refuse_unsafe_program(path: Path, shown: str) -> None:
    """Raises ModelSourceError unless every record can be read without running code."""
    again = "save it again with torch.export.save(program, …)"
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
            if broken is not None:
                raise zipfile.BadZipFile(f"{broken} does not have its checksum")
            names = archive.namelist()
            if not any(_is_graph(name) for name in names):
                listed = _listed(sorted(name for name in names if "/." not in name), 5)
                raise ModelSourceError(
                    f"{shown} is no saved ExportedProgram: it holds {listed}",
                    do=f"{again}; weights saved with torch.save go to --checkpoint",
                )
            for name in names:
                reason = _unsafe_reason(archive, name)
                if reason:
                    raise ModelSourceError(
                        f"{shown} was not opened: {name} {reason}, so opening it could run code",
                        do="export the model anew from its code: MODEL as file.py:function",
                    )
    except (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        EOFError,
        LookupError,
        NotImplementedError,
        ValueError,
    ) as err:
        raise ModelSourceError(
            f"{shown} is no saved ExportedProgram, or is damaged ({_first_line(err)})",
            do=f"copy it again, or {again}",
        ) from err


def _is_graph(name: str) -> bool:
    # Until torch 2.7 the records stood at the top: serialized_exported_program.json and others.
    return name.partition("/")[2].startswith("models/") or name.startswith(
        "serialized_exported_program"
    )


def _unsafe_reason(archive: zipfile.ZipFile, name: str) -> str:
    """Why a record may not be handed to torch.export.load; empty when it may."""
    short = name.partition("/")[2]
    folder, _, file = name.rpartition("/")
    if short.startswith("data/aotinductor/"):
        return "is a compiled library"
    if short.startswith("data/constants/") and file.startswith(("custom_obj_", "opaque_obj_")):
        return "is a pickled object"
    pickled: list[str] = []
    if (short.startswith("data/") and file.endswith(".pt")) or name.startswith(
        ("serialized_state_dict", "serialized_constants", "serialized_example_inputs")
    ):
        pickled = [name]
    elif short.startswith("data/") and file.endswith("_config.json"):
        config = json.loads(archive.read(name)).get("config", {})
        pickled = [f"{folder}/{p['path_name']}" for p in config.values() if p.get("use_pickle")]
    elif _is_graph(name):
        for text in _symbolic_texts(json.loads(archive.read(name))):
            if not _is_plain_size(text):
                return f"has a size written as {text[:60]!r}"
    for record in pickled:
        if not _is_weights_only(archive.read(record)):
            return f"needs {record} unpickled" if record != name else "holds more than tensors"
    return ""


def _is_weights_only(data: bytes) -> bool:
    """Whether torch's restricted unpickler reads the bytes; an empty record is fine."""
    import torch

    if not data:
        return True
    try:
        torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError):
        return False
    return True


def _symbolic_texts(data: Any) -> Iterator[str]:
    if isinstance(data, dict):
        for key, value in data.items():
            if key == "expr_str" and isinstance(value, str):
                yield value
            else:
                yield from _symbolic_texts(value)
    elif isinstance(data, list):
        for value in data:
            yield from _symbolic_texts(value)


def _is_plain_size(text: str) -> bool:
    """Whether a symbolic size is arithmetic on symbols, and no call of a Python function.

    torch writes SymPy's srepr: ``Mul(Integer(2), Symbol('s77', positive=True, integer=True))``.
    """
    text = re.sub(r"'\w+'|\b[a-z_]+=(True|False)", "", text)
    if not _SYMBOLIC_CHARACTERS.fullmatch(text) or _ATTRIBUTE.search(text):
        return False
    return all(_SYMBOL.fullmatch(word) for word in re.findall(r"[A-Za-z_]\w*", text))
