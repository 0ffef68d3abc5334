"""State: buffers that forward writes to become inputs and outputs of the file (docs/state.md).

A LiteRT file keeps nothing from call to call. The buffer ``cache`` of the module ``a.b`` becomes the
input ``state.a.b.cache``, the value before the call, and the output of the same name, the value
after it; the app hands it on. Plain tensor attributes count as buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from tpu2edge.errors import ConversionError, ExportError, Place
from tpu2edge.export import blame

__all__ = ["State", "assigned", "held", "input_writes", "refuse_state", "unread", "written"]

aten = torch.ops.aten

# May return its input itself, which its schema does not say.
_PASS_THROUGH = ("dropout", "alpha_dropout", "feature_dropout")


@dataclass(frozen=True, slots=True)
class _Cell:
    """All places that hold one tensor: a buffer that two modules share is one state."""

    name: str
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def value(self) -> torch.Tensor:
        owner, key = self.places[0]
        found = getattr(owner, key)
        assert isinstance(found, torch.Tensor)
        return found

    def put(self, value: torch.Tensor) -> None:
        for owner, key in self.places:
            _store(owner, key)[key] = value


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The buffers that are carried from call to call, and those that are written for nothing.

    ``names`` are the tensors' paths in the module. Forward works on copies of both kinds, so the
    module stays what it is.
    """

    names: tuple[str, ...] = ()
    scratch: tuple[str, ...] = ()
    _carried: tuple[_Cell, ...] = field(default=(), repr=False)
    _local: tuple[_Cell, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, module: nn.Module, names: Sequence[str], scratch: Sequence[str] = ()) -> State:
        """The state of ``module`` in the tensors of these paths; those of one tensor are one."""
        carried, local = _cells(module, names), _cells(module, scratch)
        return cls(
            names=tuple(cell.name for cell in carried),
            scratch=tuple(cell.name for cell in local),
            _carried=tuple(carried),
            _local=tuple(local),
        )

    def initial(self) -> tuple[torch.Tensor, ...]:
        """The values in the module, in the order of ``names``."""
        return tuple(cell.value for cell in self._carried)

    def run(
        self, function: Callable[[], Any], values: Sequence[torch.Tensor]
    ) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """What ``function`` returns when the state is ``values``, and the state after it.

        Raises:
            ExportError: a state has another shape or type afterwards.
        """
        cells = (*self._carried, *self._local)
        given = (*values, *(cell.value for cell in self._local))
        before = [[_store(owner, key)[key] for owner, key in cell.places] for cell in cells]
        try:
            for cell, value in zip(cells, given, strict=True):
                cell.put(value.clone())  # forward writes to it
            result = function()
            after = tuple(
                _after(cell, value) for cell, value in zip(self._carried, values, strict=True)
            )
        finally:
            for cell, kept in zip(cells, before, strict=True):
                for (owner, key), value in zip(cell.places, kept, strict=True):
                    _store(owner, key)[key] = value
        return result, after


def _store(owner: nn.Module, key: str) -> dict[str, Any]:
    return owner._buffers if key in owner._buffers else owner.__dict__


def _cells(module: nn.Module, names: Sequence[str]) -> list[_Cell]:
    """One cell a tensor, called by its first path in the module."""
    paths = held(module)
    wanted = {id(paths[name]) for name in names}
    found: dict[int, list[str]] = {}
    for path, value in paths.items():
        if id(value) in wanted:
            found.setdefault(id(value), []).append(path)
    return [_Cell(same[0], tuple(_place(module, path) for path in same)) for same in found.values()]


def _place(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    owner, _, key = path.rpartition(".")
    return module.get_submodule(owner), key


def _after(cell: _Cell, before: torch.Tensor) -> torch.Tensor:
    now = [getattr(owner, key) for owner, key in cell.places]
    value = now[0]
    if any(other is not value for other in now):
        raise ExportError(
            f"'{cell.name}' is one buffer in several modules before the call and two after it",
            do="write into it (copy_, index_copy_) instead of assigning a new tensor",
            place=Place(tensor=cell.name),
        )
    if not isinstance(value, torch.Tensor) or value.shape != before.shape:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else value
        raise ExportError(
            f"the state '{cell.name}' has the shape {list(before.shape)} before a call and "
            f"{shape} after it",
            do="give it a fixed size (a ring, or a cache of full length and a position)",
            place=Place(tensor=cell.name),
        )
    if value.dtype != before.dtype:
        raise ExportError(
            f"the state '{cell.name}' is {before.dtype} before a call and {value.dtype} after it",
            do="keep its type",
            place=Place(tensor=cell.name),
        )
    return value


# ---------------------------------------------------------------------------------- finding writes


def written(program: ExportedProgram) -> tuple[list[str], list[str]]:
    """Paths of the buffers, and of the parameters, that the traced graph may write to.

    A walk along views of them: cheap, and at worst too many (a reshape that copies).
    """
    targets = {
        spec.arg.name: spec
        for spec in program.graph_signature.input_specs
        if spec.kind is not InputKind.USER_INPUT and hasattr(spec.arg, "name")
    }
    found = {name: targets[name] for name in _written_placeholders(program) if name in targets}
    parameters = [s for s in found.values() if s.kind is InputKind.PARAMETER]
    buffers = [s for s in found.values() if s.kind is not InputKind.PARAMETER]
    return [str(s.target) for s in buffers], [str(s.target) for s in parameters]


def input_writes(program: ExportedProgram) -> list[int]:
    """Which user inputs, by position, the traced graph may write to."""
    order = list(program.graph_signature.user_inputs)
    return sorted(order.index(name) for name in _written_placeholders(program) if name in order)


def _written_placeholders(program: ExportedProgram) -> list[str]:
    sources: dict[fx.Node, frozenset[str]] = {}  # node -> placeholders it may be a view of
    found: dict[str, None] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            sources[node] = frozenset([node.name])
            continue
        schema = getattr(node.target, "_schema", None)
        own = _own_sources(node, schema, sources)
        if own:
            sources[node] = own
        if schema is None or not schema.is_mutable:
            continue
        for argument, value in _arguments(node, schema):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in _nodes(value):
                    found.update(dict.fromkeys(sorted(sources.get(one, ()))))
    return list(found)


def _own_sources(
    node: fx.Node, schema: Any, sources: Mapping[fx.Node, frozenset[str]]
) -> frozenset[str]:
    if node.op != "call_function":
        return frozenset()
    if schema is None:  # getitem of a list of views
        given = node.all_input_nodes
    elif any(part in schema.name for part in _PASS_THROUGH):
        given = node.all_input_nodes[:1]
    elif any(result.alias_info is not None for result in schema.returns):
        given = [
            one
            for argument, value in _arguments(node, schema)
            if argument.alias_info is not None
            for one in _nodes(value)
        ]
    else:
        return frozenset()
    return frozenset().union(*(sources.get(one, frozenset()) for one in given))


def _arguments(node: fx.Node, schema: Any) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)
    return found


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers and plain tensor attributes of all submodules, by path.

    Compared before and after a call, they show what forward assigns: torch.export forgets a buffer
    of a submodule that is assigned, and only warns of an attribute. Tensors in lists are left out:
    torch's own recurrent layers hold their weights so, and exchange them while they are traced.
    """
    return {
        f"{prefix}.{key}" if prefix else key: value
        for prefix, child in module.named_modules()
        for store in (child._buffers, child.__dict__)
        for key, value in store.items()
        if isinstance(value, torch.Tensor)
    }


def assigned(module: nn.Module, before: Mapping[str, torch.Tensor]) -> list[str]:
    """Paths of those tensors of ``before`` (from ``held``) that are other ones now."""
    now = held(module)
    return [path for path, value in before.items() if now.get(path) is not value]


# --------------------------------------------------------------------------------- judging a write


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """States that need not be carried: never changed, or changed but without any effect."""

    unchanged: frozenset[int]
    unread: frozenset[int]


def unread(program: ExportedProgram, inputs: int) -> Unread:
    """Which states, by position, of a program with ``inputs`` true inputs need not be carried.

    The states are the last inputs and the last outputs. One is kept when it reaches an output that
    is no state, or a state that is kept; or when it gathers what the inputs say (a sum over calls),
    for then an app may want it. Left out are counters that nothing reads, and copies of
    intermediate values that no later call looks at.
    """
    functional = program.run_decompositions()
    order = list(functional.graph_signature.user_inputs)
    nodes = {n.name: n for n in functional.graph.nodes if n.op == "placeholder"}
    place = {nodes[str(name)]: index for index, name in enumerate(order)}
    reach: dict[fx.Node, frozenset[int]] = {n: frozenset([i]) for n, i in place.items()}
    for node in functional.graph.nodes:
        if node.op != "call_function":
            continue
        given = node.all_input_nodes
        if node.target is aten.copy.default:  # the first argument is overwritten as a whole
            given = _nodes(node.args[1])
        reach[node] = frozenset().union(*(reach.get(one, frozenset()) for one in given))
    output = next(n for n in reversed(functional.graph.nodes) if n.op == "output")
    results = [
        value
        for value, spec in zip(output.args[0], functional.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    count = len(order) - inputs
    states, others = results[len(results) - count :], results[: len(results) - count]
    unchanged = frozenset(i for i, node in enumerate(states) if place.get(node) == inputs + i)
    needs = [reach.get(node, frozenset()) for node in states]
    live = frozenset().union(*(reach.get(node, frozenset()) for node in others))
    kept: set[int] = set()
    while True:
        more = {
            i
            for i in range(count)
            if i not in kept
            and i not in unchanged
            and (
                inputs + i in live
                or (inputs + i in needs[i] and any(source < inputs for source in needs[i]))
            )
        }
        if not more:
            break
        kept |= more
        live = live.union(*(needs[i] for i in more))
    idle = frozenset(i for i in range(count) if i not in kept and i not in unchanged)
    return Unread(unchanged=unchanged, unread=idle)


# ---------------------------------------------------------------------------------------- refusals


def refuse_state(program: ExportedProgram) -> None:
    """Refuse a decomposed program that writes to its own buffers or parameters.

    Raises:
        ConversionError: it does; LiteRT would start from the same state at every call.
    """
    signature = program.graph_signature
    targets = {
        **signature.buffers_to_mutate,
        **getattr(signature, "parameters_to_mutate", {}),
    }
    if not targets:
        return
    shown = ", ".join(f"'{blame.strip_wrapper(name)}'" for name in dict.fromkeys(targets.values()))
    place = Place(tensor=blame.strip_wrapper(next(iter(targets.values()))))
    for mutated, target in targets.items():
        node = next((n for n in program.graph.nodes if n.name == mutated), None)
        if node is not None and node.meta.get("stack_trace"):
            found = blame.place_of_node(node)
            place = Place(
                module=found.module,
                op=found.op,
                file=found.file,
                line=found.line,
                code=found.code,
                tensor=blame.strip_wrapper(target),
            )
            break
    raise ConversionError(
        f"the model writes to its own weights or state ({shown}), which a LiteRT file would lose: "
        "every call would start again from the values at export",
        do="register what changes as a buffer (register_buffer): buffers become inputs and outputs",
        place=place,
    )
