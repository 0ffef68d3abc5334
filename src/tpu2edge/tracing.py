"""From what the user gave as a model to traced programs, one for each signature of the file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpu2edge.errors import DataError, OptionError

if TYPE_CHECKING:
    import torch

    from tpu2edge.export.program import TracedProgram
    from tpu2edge.export.sources import LoadedSource

__all__ = [
    "Entries",
    "checkpoint_owner",
    "entry_of",
    "is_program",
    "origin_of",
    "trace_entries",
    "weights_of",
]

#: Name of a signature -> module, method of one, or saved program; its args and kwargs.
Entries = Mapping[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]


def is_program(target: Any) -> bool:
    """Whether ``target`` is an ExportedProgram; asked without importing torch."""
    return hasattr(target, "graph_signature")


def trace_entries(
    entries: Entries,
    dynamic: Mapping[str, Mapping[int, Any]] | None,
    shapes: Mapping[str, Sequence[Sequence[int]]] | None,
    last: tuple[tuple[str, ...], tuple[str, ...]],
    several: bool,
) -> list[TracedProgram]:
    """One traced program a signature: the entries, or the only entry in several shapes.

    ``last`` has the inputs and the outputs with channels last; ``several`` says that the user gave
    a mapping of signatures, of one entry maybe.

    Raises:
        OptionError: options that do not go together, or a name that cannot be a signature's.
        ConversionError: an entry cannot be traced.
    """
    from tpu2edge.export.methods import module_of
    from tpu2edge.export.program import trace_module, trace_program

    for name in entries:
        _refuse_signature_name(name, main=name == next(iter(entries)))
    if shapes and (several or dynamic):
        other = "--dynamic" if dynamic else "a mapping of signatures"
        raise OptionError(
            f"--shapes does not go with {other}", do="give a signature of its own for each shape"
        )
    if several and any(last):
        raise OptionError(
            "--channels-last does not go with a mapping of signatures",
            do="permute in the methods: x.permute(0, 3, 1, 2) costs nothing before a convolution",
        )
    if not several:
        ((name, (target, args, kwargs)),) = entries.items()
        if is_program(target):
            if dynamic or shapes or any(last):
                raise OptionError(
                    "--dynamic, --shapes and --channels-last go with a module, not with a saved "
                    "program",
                    do="give dynamic_shapes to torch.export.export before saving",
                )
            return [trace_program(target, signature_name=name)]
        return [
            trace_module(
                module_of(target, name),
                args,
                kwargs,
                dynamic=dynamic,
                shapes=sizes,
                channels_last=last[0],
                channels_last_output=last[1],
                signature_name=each,
            )
            for each, sizes in _named_shapes(name, shapes or {})
        ]
    programs: list[TracedProgram] = []
    for name, (target, args, kwargs) in entries.items():
        if not args and not kwargs:
            raise DataError(f"signature '{name}' has no example inputs", do="give (module, args)")
        module = module_of(target, name)
        own = {key: axes for key, axes in (dynamic or {}).items() if _takes(module, key)}
        programs.append(trace_module(module, args, kwargs, dynamic=own, signature_name=name))
    known = {spec.name for program in programs for spec in program.signature.inputs}
    if unknown := sorted(set(dynamic or {}) - known):
        raise OptionError(f"--dynamic names no input {unknown}", do=f"inputs: {sorted(known)}")
    return programs


def _takes(module: torch.nn.Module, input_name: str) -> bool:
    import inspect

    return input_name.split(".")[0] in inspect.signature(module.forward).parameters


_SIGNATURE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def _refuse_signature_name(name: str, *, main: bool) -> None:
    """A further signature's reference has a folder of its name beside "oracle" and the samples."""
    if main or (_SIGNATURE_NAME.fullmatch(name) and name != "oracle"):
        return
    raise OptionError(
        f"a signature cannot be called '{name}'",
        do="use letters, digits, '_', '-' and '.'; 'oracle' is taken",
    )


def _named_shapes(
    name: str, shapes: Mapping[str, Sequence[Sequence[int]]]
) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
    """The name of each signature and the shapes of its inputs."""
    counts = {key: len(given) for key, given in shapes.items()}
    if not counts:
        return [(name, {})]
    if len(set(counts.values())) > 1 or 0 in counts.values():
        listed = ", ".join(f"{key}: {count}" for key, count in counts.items())
        raise OptionError(
            f"--shapes gives different numbers of shapes ({listed})",
            do="give every input as many; the k-th shapes of all inputs belong together",
        )
    made: list[tuple[str, dict[str, tuple[int, ...]]]] = []
    for index in range(next(iter(counts.values()))):
        sizes = {key: tuple(int(s) for s in given[index]) for key, given in shapes.items()}
        texts = ("x".join(map(str, size)) or "scalar" for size in sizes.values())
        made.append(("_".join((name, *texts)) if index else name, sizes))
    twice = [each for each, _ in made if [n for n, _ in made].count(each) > 1]
    if twice or any(sizes == made[0][1] for _, sizes in made[1:]):
        raise OptionError("--shapes gives the same shapes twice", do="give each once")
    return made


def _owners(entries: Entries) -> list[Any]:
    """The modules (or the program) whose weights the entries use, each once."""
    from tpu2edge.export.methods import module_of, owner_of

    found: dict[int, Any] = {}
    for name, (target, _, _) in entries.items():
        owner = target if is_program(target) else owner_of(target) or module_of(target, name)
        found[id(owner)] = owner
    return list(found.values())


def weights_of(entries: Entries) -> str:
    """The digest of all weights that the entries use."""
    import hashlib

    from tpu2edge.export.prepare import weights_digest

    digests = [
        weights_digest(owner.module() if is_program(owner) else owner) for owner in _owners(entries)
    ]
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("|".join(digests).encode()).hexdigest()


def origin_of(entries: Entries) -> str:
    """The classes of the modules that the entries use, for the manifest."""
    names = []
    for owner in _owners(entries):
        kind = type(owner.module() if is_program(owner) else owner)
        names.append(f"{kind.__module__}.{kind.__qualname__}")
    return ", ".join(names)


def entry_of(loaded: LoadedSource, name: str | None, *, option: str) -> str:
    """The one signature that is meant of a source with a mapping of them.

    Args:
        loaded: a source whose ``signatures`` are not None.
        name: what the user named; None may stand for the only one.
        option: where the user names one.

    Raises:
        OptionError: there is none of that name, or several and none is named.
    """
    assert loaded.signatures is not None
    known = list(loaded.signatures)
    if name in known:
        return str(name)
    if name is None and len(known) == 1:
        return known[0]
    listed = ", ".join(known)
    if name is None:
        raise OptionError(
            f"{loaded.origin} gives several signatures, and this takes one at a time: {listed}",
            do=f"name it: {option} {known[0]}",
        )
    raise OptionError(
        f"{loaded.origin} gives no signature '{name}'", do=f"{option}: one of {listed}"
    )


def checkpoint_owner(loaded: LoadedSource) -> torch.nn.Module:
    """The one module that a checkpoint is for.

    Raises:
        OptionError: there is none, or several.
    """
    if loaded.program is not None:
        raise OptionError(
            "--checkpoint goes with a module, not with a saved program",
            do="leave --checkpoint away: the .pt2 file holds its weights",
        )
    if loaded.module is not None:
        return loaded.module
    assert loaded.signatures is not None
    owners = _owners(loaded.signatures)
    if len(owners) != 1:
        raise OptionError(
            f"the signatures use {len(owners)} modules, so it is not known which one --checkpoint "
            "is for",
            do="make the signatures from methods of one module, or load the weights in the model "
            "file",
        )
    return owners[0]  # type: ignore[no-any-return]
