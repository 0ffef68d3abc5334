"""From an ExportedProgram to StableHLO, the form in which the TPU compiler and XLA:CPU take it.

Three routes lead there, tried in this order unless one is named:

- ``torchtpu``: TorchTPU's own lowering, hence what really runs on a TPU. It has no public function
  for this, so it is only taken with the version whose internals are known here.
- ``torchax``: decomposed operators traced through JAX.
- ``litert-torch``: the first half of the way to a ``.tflite`` file; always installed.

On every route weights stay arguments of the program, so its text is small and hashing it is cheap.
int64 and float64: ``torchax`` computes them as int32 and float32 (as JAX does by default on a TPU);
the other two keep them as they are. Either way the outputs list the model's own dtypes.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from tpu2edge.errors import ConversionError, LoweringError, OptionError, Place, Tpu2EdgeError
from tpu2edge.types import Array, HloArgument, Note, StableHlo, TensorSpec

if TYPE_CHECKING:
    import torch

__all__ = [
    "ROUTES",
    "available_routes",
    "import_torchax",
    "keep_jax_off_absent_tpus",
    "stablehlo_from_program",
]

#: Known routes, best first.
ROUTES = ("torchtpu", "torchax", "litert-torch")

#: The packages that a route is made of; the first one decides whether the route is there.
_PACKAGES = {
    "torchtpu": ("torch_tpu", "torch"),
    "torchax": ("torchax", "jax", "torch"),
    "litert-torch": ("litert_torch", "jax", "torch"),
}
_TORCH_TPU_KNOWN = "0.2."  # the internals used below are those of this series

_Lowered = tuple[str, tuple[Note, ...]]


def available_routes() -> tuple[str, ...]:
    """The routes whose packages are installed, best first; nothing is imported.

    TorchTPU and torchax both take torch's one slot for a device of another vendor: a process that
    has loaded one of them cannot take the other's route.
    """
    rivals = {"torchtpu": "torchax", "torchax": "torch_tpu"}
    return tuple(
        route
        for route in ROUTES
        if importlib.util.find_spec(_PACKAGES[route][0]) is not None
        and rivals.get(route) not in sys.modules
    )


def stablehlo_from_program(
    program: torch.export.ExportedProgram,
    *,
    route: str | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> StableHlo:
    """``program`` as StableHLO, by ``route`` or the best one that is installed.

    Inputs are named by forward's argument names, outputs by the keys of what it returns (nested
    ones dotted, ``output_<i>`` where there are no keys), unless names are handed in.
    Buffer updates are not outputs. Raises ConversionError with the operator, module and source line
    where they are known.
    """
    if route is None:
        # An unknown TorchTPU is passed over with a note; asked for by name, it is refused.
        route, notes = _default_route()
    else:
        notes = ()
        if route not in ROUTES:
            raise OptionError(f"no route {route!r} to StableHLO", do=f"take one of {ROUTES}")
        if route not in available_routes():
            raise OptionError(
                f"the route {route!r} is not there: {_PACKAGES[route][0]} is not installed, or "
                "shut out by torch_tpu or torchax, of which a process can hold one",
                do=f"install it, or take one of {available_routes()}",
            )
    lower: Callable[[_Program], _Lowered] = {
        "torchtpu": _lower_by_torchtpu,
        "torchax": _lower_by_torchax,
        "litert-torch": _lower_by_litert_torch,
    }[route]
    if route != "torchtpu":
        keep_jax_off_absent_tpus()
    flat = _Program(program, _decomposed(program, route))
    try:
        text, more = lower(flat)
    except Tpu2EdgeError:
        raise
    except Exception as exc:
        raise _lowering_error(route, exc) from exc
    arguments, outputs = flat.arguments(text, input_names), flat.outputs(output_names)
    return StableHlo(
        module=text.encode(),
        route=route,
        versions=_versions(_PACKAGES[route]),
        arguments=arguments,
        outputs=outputs,
        notes=(*notes, *more),
    )


def _default_route() -> tuple[str, tuple[Note, ...]]:
    routes = available_routes()
    if not routes:
        raise OptionError("no route to StableHLO is installed", do="pip install torchax")
    if routes[0] == "torchtpu":
        version = importlib.metadata.version("torch_tpu")
        if version.startswith(_TORCH_TPU_KNOWN):
            return "torchtpu", ()
        note = Note(
            code="torchtpu-unknown",
            text=f"torch_tpu {version} is not known here ({_TORCH_TPU_KNOWN}x is); "
            f"lowered by {routes[1]} instead",
        )
        return routes[1], (note,)
    return routes[0], ()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _decomposed(program: torch.export.ExportedProgram, route: str) -> torch.export.ExportedProgram:
    """The program in core operators.

    Undecomposed, TorchTPU lowers attention to a custom call that only a TPU can run, and buffer
    updates show in the signature only after decomposing.
    """
    import torch

    from tpu2edge.export import quantized

    try:
        table: Any = torch.export.default_decompositions()
        table.update(quantized.TAKEN_APART)  # a TPU computes what is quantized in floats
        decomposed: torch.export.ExportedProgram = program.run_decompositions(table)
    except Exception as exc:
        raise _lowering_error(route, exc, what="cannot be decomposed into core operators") from exc
    return decomposed


class _Program:
    """What the routes share: the flat arguments of a decomposed program, in graph order."""

    def __init__(
        self, original: torch.export.ExportedProgram, decomposed: torch.export.ExportedProgram
    ) -> None:
        import torch
        from torch.export.graph_signature import ConstantArgument, InputKind, TensorArgument

        self.original = original
        self.program = decomposed
        self._signature = decomposed.graph_signature
        placeholders = [n for n in decomposed.graph.nodes if n.op == "placeholder"]
        #: one entry a placeholder: (weight's name | None, value: tensor, FakeTensor or constant)
        self.entries: list[tuple[str | None, Any]] = []
        for node, spec in zip(placeholders, self._signature.input_specs, strict=True):
            if isinstance(spec.arg, ConstantArgument):
                self.entries.append((None, spec.arg.value))
                continue
            if not isinstance(spec.arg, TensorArgument):
                raise ConversionError(
                    f"input {node.name!r} of the program is a {type(spec.arg).__name__}; "
                    "only tensors and constants can become StableHLO",
                    place=Place(tensor=node.name),
                )
            value = node.meta["val"]
            if any(not isinstance(size, int) for size in value.shape):
                raise ConversionError(
                    f"input {node.name!r} has dynamic dimensions {tuple(value.shape)}; "
                    "the TPU compiler takes fixed sizes only",
                    do="export the program with fixed sizes for this check",
                    place=Place(tensor=node.name),
                )
            if spec.kind is InputKind.USER_INPUT:
                self.entries.append((None, value))
            else:
                assert spec.target is not None
                self.entries.append((spec.target, self._state(spec.target)))
        self._tensor_type = torch.Tensor

    def _state(self, target: str) -> torch.Tensor:
        for state in (self.program.state_dict, self.program.constants):
            if target in state:
                return cast("torch.Tensor", state[target])
        raise ConversionError(
            f"the program lists {target!r} but holds no value for it", place=Place(tensor=target)
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The values (user's inputs: fake ones) of those placeholders that become arguments."""
        return [value for _, value in self.entries if isinstance(value, self._tensor_type)]

    def graph_arguments(self, arguments: Sequence[Any]) -> list[Any]:
        """``arguments`` with the constants put between, one value for every placeholder."""
        rest = iter(arguments)
        return [
            next(rest) if isinstance(value, self._tensor_type) else value
            for _, value in self.entries
        ]

    def user_outputs(self, results: Sequence[Any]) -> list[Any]:
        """Those of the graph's results that are tensors which forward returns."""
        from torch.export.graph_signature import OutputKind, TensorArgument

        return [
            result
            for spec, result in zip(self._signature.output_specs, results, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT and isinstance(spec.arg, TensorArgument)
        ]

    def arguments(self, text: str, names: Sequence[str] | None) -> tuple[HloArgument, ...]:
        """Name, shape, dtype in the StableHLO text, and value of every argument."""
        dtypes = _argument_dtypes(text)
        tensors = [(n, v) for n, v in self.entries if isinstance(v, self._tensor_type)]
        if len(dtypes) != len(tensors):
            raise ConversionError(
                f"the StableHLO program takes {len(dtypes)} arguments, the model {len(tensors)}"
            )
        found = _names_of_inputs(self.original)
        users = [
            found[i]
            for i, (_, value) in enumerate(e for e in self.entries if e[0] is None)
            if isinstance(value, self._tensor_type)
        ]
        if names is not None:
            if len(names) != len(users):
                raise ConversionError(f"{len(names)} input names for the inputs {users}")
            users = list(names)
        rest = iter(users)
        return tuple(
            HloArgument(
                name=next(rest) if weight is None else weight,
                shape=tuple(value.shape),
                dtype=dtype,
                array=None if weight is None else functools.partial(_numpy, value, dtype),
            )
            for (weight, value), dtype in zip(tensors, dtypes, strict=True)
        )

    def outputs(self, names: Sequence[str] | None) -> tuple[TensorSpec, ...]:
        """Name, shape and the model's own dtype of every output."""
        (node,) = (n for n in self.program.graph.nodes if n.op == "output")
        values = [result.meta["val"] for result in self.user_outputs(node.args[0])]
        if names is None:
            from torch.export.graph_signature import OutputKind, TensorArgument

            specs = [
                s
                for s in self.original.graph_signature.output_specs
                if s.kind is OutputKind.USER_OUTPUT
            ]
            names = [
                name
                for name, spec in zip(_names_of_outputs(self.original), specs, strict=True)
                if isinstance(spec.arg, TensorArgument)
            ]
        if len(names) != len(values):
            raise ConversionError(f"{len(names)} output names for {len(values)} outputs")
        return tuple(
            TensorSpec(name=name, shape=tuple(v.shape), dtype=str(v.dtype).removeprefix("torch."))
            for name, v in zip(names, values, strict=True)
        )


def _numpy(tensor: torch.Tensor, dtype: str) -> Array:
    """A weight as the program takes it; no copy when the layout and dtype already fit."""
    import numpy as np
    import torch

    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes  # comes with jax

        array: Array = tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    else:
        array = tensor.numpy()
    if array.dtype != dtype and array.dtype.kind in "iu":
        limits = np.iinfo(dtype)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise ConversionError(f"an integer weight does not fit {dtype}: {array.max()}")
    if dtype != "bfloat16":
        array = array.astype(dtype, copy=False)
    return np.require(array, requirements="C")


# --- names ---------------------------------------------------------------------------------------


def _dotted(prefix: str, path: Sequence[Any]) -> str:
    parts = [prefix] if prefix else []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts)


def _names_of_inputs(program: torch.export.ExportedProgram) -> list[str]:
    """Forward's argument names, nested ones dotted, in the flat order of the user's inputs."""
    from torch.utils import _pytree as pytree

    placeholders = list(program.graph_signature.user_inputs)
    spec = program.call_spec.in_spec
    if spec is None:
        return [str(name) for name in placeholders]
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    args, kwargs = tree
    entry = program.module_call_graph[0].signature
    forward = list(getattr(entry, "forward_arg_names", None) or ())
    names: dict[int, str] = {}
    for i, arg in enumerate(args):
        # *args of forward have no names of their own; the exporter lists the named ones only.
        top = forward[i] if i < len(forward) - len(kwargs) else f"args.{i}"
        for path, index in pytree.tree_flatten_with_path(arg)[0]:
            names[index] = _dotted(top, path)
    for key, value in kwargs.items():
        for path, index in pytree.tree_flatten_with_path(value)[0]:
            names[index] = _dotted(key, path)
    return [names[i] for i in range(spec.num_leaves)]


def _names_of_outputs(program: torch.export.ExportedProgram) -> list[str]:
    """The keys of what forward returns, dotted; ``output_<i>`` where there are none."""
    from torch.utils import _pytree as pytree

    spec = program.call_spec.out_spec
    assert spec is not None
    if spec.num_leaves == 1 and spec.is_leaf():
        return ["output_0"]
    tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    names = []
    for path, _ in pytree.tree_flatten_with_path(tree)[0]:
        name = _dotted("", path)
        names.append(f"output_{name}" if name[:1].isdigit() else name)
    return names


_TYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "i64": "int64",
    "i32": "int32",
    "i16": "int16",
    "i8": "int8",
    "ui64": "uint64",
    "ui32": "uint32",
    "ui16": "uint16",
    "ui8": "uint8",
    "i1": "bool",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
}
_MAIN = re.compile(r"func\.func (?:public )?@main\((.*?)\) ?(?:->|\{|attributes)", re.DOTALL)
_ARGUMENT = re.compile(r"%\w+: tensor<(?:[\dx]*x)?((?:complex<)?[a-z]+\d+>?)>")


def _argument_dtypes(text: str) -> list[str]:
    """NumPy dtypes of the arguments of ``@main``, read from the text."""
    head = _MAIN.search(text)
    if head is None:
        raise ConversionError("the StableHLO program has no function @main")
    return [_TYPES[element] for element in _ARGUMENT.findall(head.group(1))]


# --- the routes ----------------------------------------------------------------------------------


def _module_of(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _lower_by_torchax(flat: _Program) -> _Lowered:
    import jax

    torchax = import_torchax()
    from torchax import decompositions
    from torchax import export as torchax_export
    from torchax.ops import mappings

    torchax.default_env()  # fills the table of operators
    program = flat.program.run_decompositions(decompositions.DECOMPOSITIONS)
    flat = _Program(flat.original, program)

    class Interpreter(torchax_export.JaxInterpreter):  # type: ignore[misc]  # untyped package
        """Runs a node under its module's name, so that the name lands in the locations."""

        def run_node(self, n: torch.fx.Node) -> Any:
            with jax.named_scope(f"module:{_module_of(n)}"):
                return super().run_node(n)

    def run(*arguments: Any) -> list[Any]:
        values = flat.graph_arguments(arguments)
        results = Interpreter(program.graph_module).run(*values, enable_io_processing=False)
        return flat.user_outputs(results)

    avals = [
        jax.ShapeDtypeStruct(tuple(t.shape), mappings.t2j_dtype(t.dtype)) for t in flat.tensors
    ]
    frames = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)  # module names are enough
    try:
        # The caller's own JAX settings must not decide what the model's program is.
        with jax.enable_x64(False), jax.default_matmul_precision("default"):
            lowered = jax.jit(run, keep_unused=True).lower(*avals)
            module: Any = lowered.compiler_ir("stablehlo")
            text: str = module.operation.get_asm(enable_debug_info=True)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", frames)
    notes = []
    wide = sorted({str(t.dtype) for t in flat.tensors if t.dtype.itemsize == 8})
    if wide:
        note = "int64 and float64 values are computed as int32 and float32, as JAX does on a TPU"
        notes.append(Note(code="narrowed", text=note))
    return text, tuple(notes)


def keep_jax_off_absent_tpus() -> None:
    """Hold JAX to the CPU in this process when it would search for a TPU that is not there.

    With libtpu installed for its compiler, JAX's first use asks the cloud's metadata server for a
    TPU, for minutes. A process whose JAX is already running, whose user has chosen a platform, or
    whose machine has accelerators is left alone.
    """
    if os.environ.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None:
        return
    if any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*")):
        return
    import jax

    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")  # no effect on backends that already run


class _MissingOverload:
    """Stands for an operator overload that torch no longer has; nothing ever looks it up."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<no overload {self.name}>"


@contextlib.contextmanager
def _missing_overloads_tolerated() -> Iterator[None]:
    """Let ``torch.ops.aten.<op>.<overload>`` name overloads that this torch does not have."""
    import torch

    packet: Any = torch._ops.OpOverloadPacket
    original = packet.__getattr__

    def lookup(self: Any, key: str) -> Any:
        try:
            return original(self, key)
        except AttributeError:
            if key.startswith("_"):
                raise
            return _MissingOverload(f"{self}.{key}")

    packet.__getattr__ = lookup
    try:
        yield
    finally:
        packet.__getattr__ = original


def import_torchax() -> Any:
    """The package torchax, which up to 0.0.13 names 22 overloads that torch 2.13 removed.

    They are named-tensor variants, which an exported program never calls.
    """
    if "torchax" in sys.modules:
        importlib.import_module("torchax.export")
        return sys.modules["torchax"]
    with _missing_overloads_tolerated():
        for name in ("torchax", "torchax.export", "torchax.decompositions", "torchax.amp"):
            importlib.import_module(name)
    decompositions: Any = sys.modules["torchax.decompositions"]
    table = decompositions.DECOMPOSITIONS
    for key in [key for key in table if isinstance(key, _MissingOverload)]:
        del table[key]
    return sys.modules["torchax"]


def _lower_by_litert_torch(flat: _Program) -> _Lowered:
    from litert_torch.backend import debuginfo, export

    original = debuginfo.build_mlir_debuginfo
    debuginfo.build_mlir_debuginfo = lambda node: f"module:{_module_of(node)}"
    try:
        # Weights as arguments: inlined ones would be copied, and infinities clamped in place.
        lowered = export.exported_program_to_mlir(flat.program, inline_constants=False)
    finally:
        debuginfo.build_mlir_debuginfo = original
    with lowered.ctx:
        text = str(lowered.module.operation.get_asm(enable_debug_info=True))
    # Functions are numbered, and named at random besides: without that, equal models give equal
    # bytes.
    return re.sub(r"(@\w+_\d+)_[0-9a-f]{8}\b", r"\1", text), ()


def _lower_by_torchtpu(flat: _Program) -> _Lowered:
    """TorchTPU's StableHLO, built on its graph placeholders without a device."""
    version = importlib.metadata.version("torch_tpu")
    if not version.startswith(_TORCH_TPU_KNOWN):
        raise ConversionError(
            f"torch_tpu {version} cannot be used for lowering: its internals are known here for "
            f"{_TORCH_TPU_KNOWN}x only",
            do="take the route 'torchax' or 'litert-torch'",
        )
    # libtpu starts with the first placeholder, not with the import.
    with _torchtpu_without_device(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="<TorchTpu/ApiStage")  # experimental functions
        return _torchtpu_text(flat), ()


def _torchtpu_text(flat: _Program) -> str:
    import torch
    from torch.utils import _pytree as pytree
    from torch_tpu import _loader

    _loader._init_device("tpu")
    from torch_tpu._internal import execution_mode
    from torch_tpu._internal.compile import tpu_torch_compile
    from torch_tpu._internal.export import export as torchtpu_export

    def on_tpu(value: Any) -> Any:
        return torch.device("tpu:0") if isinstance(value, torch.device) else value

    graph = flat.program.graph_module  # decomposed by us, so ours to edit
    for part in graph.modules():
        if isinstance(part, torch.fx.GraphModule):
            for node in part.graph.nodes:
                if node.op == "call_function":
                    node.args, node.kwargs = pytree.tree_map(on_tpu, (node.args, node.kwargs))
    precision = torch.get_float32_matmul_precision()
    mode = execution_mode.EagerMode._INTERNAL_COMPILE_FX_GRAPH
    torch.set_float32_matmul_precision("medium")  # TorchTPU's word for its default, one bf16 pass
    try:
        with execution_mode.set_eager_mode(mode), torch.no_grad():
            # Such a placeholder has no data: even printing it ends the process.
            holders = [
                tpu_torch_compile.placeholder(list(t.shape), t.dtype, False) for t in flat.tensors
            ]
            results = torchtpu_export.EagerLikeFxInterpreter(graph).run(
                *flat.graph_arguments(holders), enable_io_processing=False
            )
            module = tpu_torch_compile.build_mlir(flat.user_outputs(results), holders)
        return str(tpu_torch_compile.serialize_mlir_text(module, enable_debug_info=False))
    finally:
        torch.set_float32_matmul_precision(precision)


@contextlib.contextmanager
def _torchtpu_without_device() -> Iterator[None]:
    """The environment in which TorchTPU starts on a machine that has no TPU.

    Without it, its start asks the cloud's metadata server for minutes. On a TPU host it is left
    as it is.
    """
    settings: Mapping[str, str] = {
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_ID": "0",
    }
    if any(Path("/dev").glob("accel*")) or any(Path("/dev/vfio").glob("[0-9]*")):
        settings = {}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update({name: os.environ.get(name, value) for name, value in settings.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- errors --------------------------------------------------------------------------------------


def _lowering_error(
    route: str, exc: BaseException, *, what: str = "cannot be lowered to StableHLO"
) -> LoweringError:
    node = _node_in(exc.__traceback__)
    place = None if node is None else _place_of(node)
    name = "the program" if place is None or place.op is None else place.op
    others = [r for r in available_routes() if r != route]
    lines = str(exc).strip().splitlines() or [""]
    return LoweringError(
        f"{name} {what} by {route}: {type(exc).__name__}: {lines[0][:300]}",
        do=f"try another route: {', '.join(others)}" if others else "",
        place=place,
        step="stablehlo",
    )


def _node_in(traceback: TracebackType | None) -> torch.fx.Node | None:
    """The graph node that was being handled, from the innermost frame that has one."""
    import torch

    found = None
    while traceback is not None:
        values = traceback.tb_frame.f_locals
        for name in ("n", "node"):
            if isinstance(values.get(name), torch.fx.Node):
                found = values[name]
        traceback = traceback.tb_next
    return found


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _place_of(node: torch.fx.Node) -> Place:
    """Operator, module path and the user's own source line of a graph node."""
    import torch

    library = str(Path(torch.__file__).parent)
    file, line, code = None, None, None
    trace = (node.stack_trace or "").splitlines()
    for i, text in enumerate(trace):
        frame = _FRAME.search(text)
        if frame and not frame.group(1).startswith(library):
            file, line = frame.group(1), int(frame.group(2))
            code = trace[i + 1].strip() if i + 1 < len(trace) else None
    op = str(node.target) if node.op == "call_function" else None
    return Place(module=_module_of(node), op=op, file=file, line=line, code=code)
