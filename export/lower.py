"""From a traced program to a float LiteRT file, through litert-torch's own lowerings and converter.

litert-torch's ``convert`` retraces the whole program three times, copies weights, and clamps
infinities inside the caller's tensors. The same building blocks are called here in an order that
needs one or two retraces and leaves the weights alone; the names of inputs and outputs, and of the
torch module behind each LiteRT tensor, are put into the file on the way.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import operator
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple
from unittest import mock

import torch
from torch.export import ExportedProgram

from tpu2edge.children import ending, follow_child
from tpu2edge.errors import (
    ConversionError,
    DeviceError,
    LoweringError,
    Place,
    Tpu2EdgeError,
    error_from_json,
)
from tpu2edge.export import (
    blame,
    dynamic_sizes,
    layout,
    quantized,
    quantized_lowering,
    rewrites,
    state,
)
from tpu2edge.export.buckets import shapes_instead
from tpu2edge.export.default_sizes import write_smallest_sizes
from tpu2edge.export.loops import outline_loops
from tpu2edge.export.own_outputs import own_outputs
from tpu2edge.export.rewrites import native
from tpu2edge.types import LayerSource, Note, Progress, Signature, no_progress

__all__ = ["Lowered", "Loweree", "lower_isolated", "lower_programs"]

# Constants of at least this many bytes are handed to the converter by reference (its
# "lightweight" mode), which keeps the peak near one copy of the weights instead of three.
_BY_REFERENCE_BYTES = 1 << 20

# Programs with these operators are decomposed before litert-torch's layout pass looks for places
# where NCHW can become NHWC; others gain nothing from that retrace (same file, measured on BERT).
_LAYOUT_OPS = (
    "conv",
    "pool",
    "norm",
    "upsample",
    "interpolate",
    "grid_sampler",
    "pixel_shuffle",
    "aten.pad",
)

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """A written, not yet tested, float ``.tflite`` file.

    ``nodes`` maps the name of a node of the lowered graph to its place in the torch model; LiteRT
    tensor names contain these names. ``origins`` maps it to the node of the exported graph.
    """

    path: Path
    nodes: Mapping[str, LayerSource] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


class Loweree(NamedTuple):
    """All that lowering needs to know of a traced program."""

    program: ExportedProgram
    signature: Signature


def lower_isolated(
    programs: Sequence[Loweree],
    path: Path,
    *,
    log: IO[bytes] | None = None,
    progress: Progress = no_progress,
) -> Lowered:
    """As :func:`lower_programs`, in a process of its own: what kills the converter ends only that.

    Raises:
        DeviceError: the process died; the message says at which step and by what.
    """
    with tempfile.TemporaryDirectory(prefix="tpu2edge-") as name:
        folder = Path(name)
        progress("hand over to the converter")
        for index, loweree in enumerate(programs):
            torch.export.save(loweree.program, folder / f"{index:03d}.pt2")
            (folder / f"{index:03d}.json").write_text(json.dumps(loweree.signature.to_json()))
        (folder / "imports").write_text("\n".join(_imports(programs)))
        command = [sys.executable, "-P", "-m", "tpu2edge.export.lower_child", name, str(path)]
        last, status = follow_child(command, log=log, progress=progress)
    kind, stage = last.pop("event", None), last.get("stage", "start")
    if kind == "error":
        raise error_from_json(last)
    if kind != "result":
        raise DeviceError(
            f"the converter's process died by {ending(status)} at the step '{stage}'",
            do="see the log; if the model is large, the machine may be out of memory",
            step=stage,
        )
    return Lowered(
        path=path,
        nodes={name: LayerSource(**source) for name, source in last["nodes"].items()},
        origins=last["origins"],
        notes=tuple(Note(code=code, text=text) for code, text in last["notes"]),
    )


def _imports(programs: Sequence[Loweree]) -> list[str]:
    """The modules that bring the operators which torch itself does not have.

    A custom_op tells its module; of one that is registered otherwise (torchvision's) the namespace
    is the package's name.
    """
    from torch._library.custom_ops import OPDEFS

    found: dict[str, None] = {}
    for loweree in programs:
        for node in loweree.program.graph.nodes:
            if not isinstance(node.target, torch._ops.OpOverload):
                continue
            namespace = node.target.namespace
            if namespace in ("aten", "prim", "prims", "tpu2edge"):
                continue
            defined = OPDEFS.get(node.target._schema.name)
            found[defined._init_fn.__module__ if defined is not None else namespace] = None
    return list(found)


def lower_programs(
    programs: Sequence[Loweree], path: Path, *, progress: Progress = no_progress
) -> Lowered:
    """Write the programs as the signatures of one file; weights they share are stored once.

    Raises:
        LoweringError: an operator has no lowering or no LiteRT form; the place is the user's line.
        ConversionError: the program keeps state, or the converter refuses the graph as a whole.
    """
    progress("import litert-torch")
    toolkit = _Toolkit()
    nodes: dict[str, LayerSource] = {}
    origins: dict[str, str] = {}
    notes: list[Note] = []
    context = toolkit.backend.export_utils.create_ir_context()
    constants = toolkit.inline_consts.InlineConstsContext(enable_resource_constants=True)
    modules: list[Any] = []
    graphs: list[torch.fx.Graph] = []
    shared: dict[tuple[Any, ...], torch.Tensor] = {}
    with toolkit.tamed():
        for index, traced in enumerate(programs):
            progress("decompose")
            program = _decomposed(traced.program, toolkit, notes)
            progress("lower")
            graphs.append(program.graph)
            for node in program.graph.nodes:
                if node.op == "call_function":
                    if index:  # two programs have nodes of one name
                        node.meta[_LABEL] = f"s{index}_{node.name}"
                    nodes.setdefault(_label(node), blame.source_of_node(node))
                    origins.setdefault(_label(node), toolkit.origin(node) or node.name)
            own_memory(program)
            if len(programs) > 1:
                share_constants(program, shared)
            if any(is_dynamic(node) for node in program.graph.nodes):
                constant = toolkit.inline_consts.tensor_lowering_placeholder
                dynamic_sizes.fold_constants(program, constant)
            modules.append(toolkit.mlir(program, traced.signature, context, constants))
        progress("convert")
        as_quantized = any(quantized.is_quantized(traced.program) for traced in programs)
        try:
            merged = toolkit.converter.merge_modules(modules)
            merged = toolkit.to_tfl(merged, context, as_quantized)
            with context:
                outline_loops(toolkit.ir, _operation(merged))
            if any(toolkit.is_by_reference(attr) for attr in constants.constant_cache.values()):
                merged = toolkit.fold(merged, context, notes, as_quantized)
            with context:
                if as_quantized:
                    _use_dynamic_kernels(toolkit, _operation(merged), notes)
                layout.fold_transposes(toolkit.ir, _operation(merged))
                own_outputs(toolkit.ir, _operation(merged))
            progress("write")
            toolkit.converter.export_flatbuffer_to_file(_operation(merged), str(path))
            write_smallest_sizes(path, [traced.signature for traced in programs])
        except Tpu2EdgeError:
            raise
        except Exception as err:
            raise _converter_error(err, graphs) from err
    return Lowered(path=path, nodes=nodes, origins=origins, notes=tuple(notes))


def _use_dynamic_kernels(toolkit: _Toolkit, module: Any, notes: list[Note]) -> None:
    _, idle = quantized_lowering.use_dynamic_kernels(toolkit.ir, module)
    if idle:
        text = (
            f"{idle} activations that the module quantizes at run time stay float32 in the file: "
            "LiteRT has no such kernel for what they go into; the weights keep their integers"
        )
        notes.append(Note(code="float-activations", text=text))


def own_memory(program: ExportedProgram) -> None:
    """Every constant owns contiguous memory: see prepare.py on litert-torch#1238."""
    for store in (program.state_dict, program.constants):
        for name, value in list(store.items()):
            if isinstance(value, torch.Tensor) and not value.is_contiguous():
                store[name] = value.detach().contiguous()


def share_constants(program: ExportedProgram, shared: dict[tuple[Any, ...], torch.Tensor]) -> None:
    """Put in place of each constant the equal one of ``shared``, which learns the new ones.

    By their bytes, since copies are made on the way (a program that went through a file, a buffer,
    a fold of a batch norm); the converter stores one tensor once.
    """
    for store in (program.state_dict, program.constants):
        for name, value in list(store.items()):
            if not isinstance(value, torch.Tensor) or not value.numel():
                continue
            memory = value.detach().reshape(-1).view(torch.uint8).numpy()
            key = (value.dtype, tuple(value.shape), hashlib.sha256(memory.data).digest())
            store[name] = shared.setdefault(key, value)


def _operation(module: Any) -> Any:
    return module.operation if hasattr(module, "operation") else module


# -------------------------------------------------------------------------------- decomposition


def _decomposed(program: ExportedProgram, toolkit: _Toolkit, notes: list[Note]) -> ExportedProgram:
    """The program in the core operators that litert-torch lowers, in as few retraces as possible."""
    fx_infra = toolkit.fx_infra
    program = _shallow(program)
    # By the inputs: a size that hangs on values is fixed by a rewrite, or refused.
    dynamic = any(is_dynamic(node) for node in program.graph.nodes if node.op == "placeholder")
    toolkit.applied.clear()
    rewrites.on_exported(program, notes)
    program = fx_infra.graph_utils.reset_from_node_meta(program)
    try:
        if _wants_layout(program) or _mutates(program):
            program = fx_infra.safe_run_decompositions(
                program,
                toolkit.table(fx_infra.decomp.pre_convert_decomp(), dynamic),
                can_skip=False,
            )
            # Before litert-torch's passes, which drop what is written to buffers without a word.
            state.refuse_state(program)
        program = toolkit.convert_passes(program, dynamic)
        _int32_ranges(program)
        program = fx_infra.safe_run_decompositions(
            program, toolkit.lowering_decompositions(dynamic), can_skip=False
        )
        rewrites.on_decomposed(program, notes, toolkit.applied)
        quantized_lowering.arrange_weights(program)
    except Tpu2EdgeError:
        raise
    except Exception as err:
        raise _decomposition_error(err, program) from err
    return program


def _shallow(program: ExportedProgram) -> ExportedProgram:
    """A program of its own graph and dictionaries, but the same tensors."""
    return ExportedProgram(
        root=program.graph_module,
        graph=copy.deepcopy(program.graph),
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=dict(program.state_dict),
        range_constraints=dict(program.range_constraints),
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=dict(program.constants),
        verifiers=program.verifiers,
    )


def _wants_layout(program: ExportedProgram) -> bool:
    return any(
        part in str(node.target)
        for node in program.graph.nodes
        if node.op == "call_function"
        for part in _LAYOUT_OPS
        if "layer_norm" not in str(node.target) and "linalg" not in str(node.target)
    )


def _mutates(program: ExportedProgram) -> bool:
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            return True
    return False


def _int32_ranges(program: ExportedProgram) -> None:
    """Let ``arange`` give int32 where its ends fit: LiteRT's int64 kernels are few and slow.

    litert-torch does the same, but after its retrace, which then has to be run again.
    """
    targets = (aten.arange.default, aten.arange.start, aten.arange.start_step)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.target not in targets or value is None or value.dtype is not torch.int64:
            continue
        ends = [end for end in node.args[:2] if isinstance(end, (int, float))]
        sizes = [end for end in node.args[:2] if isinstance(end, torch.fx.Node)]
        if len(ends) + len(sizes) != len(node.args[:2]) or any(
            abs(end) > 2**31 - 1 for end in ends
        ):
            continue
        node.target = _Int32Range(node.target)


class _Int32Range:
    """An ``arange`` whose result is int32; a callable, so that the retrace takes it apart."""

    def __init__(self, op: Any) -> None:
        self.op = op
        self.__name__ = "arange_int32"

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if any(isinstance(arg, torch.SymInt) for arg in args):
            return self.op(*args, **{**kwargs, "dtype": torch.int32})  # type: ignore[no-any-return]
        result: torch.Tensor = aten._to_copy.default(self.op(*args, **kwargs), dtype=torch.int32)
        return result


# ------------------------------------------------------------------------------------- litert-torch


class _Toolkit:
    """The parts of litert-torch (0.10) that are used, imported when the first conversion needs them."""

    def __init__(self) -> None:
        os.environ.setdefault("LITERT_TORCH_SHOW_PROGRESS", "n")
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from litert_converter.mlir import ir, passmanager
        from litert_converter.mlir._mlir_libs import converter_api_ext
        from litert_torch import backend, fx_infra
        from litert_torch._convert import core, runtime_fold
        from litert_torch.backend import debuginfo, inline_consts
        from litert_torch.backend import export as backend_export
        from litert_torch.backend.experimental import torch_tfl

        self.backend = backend
        self.backend_export = backend_export
        self.fx_infra = fx_infra
        self.inline_consts = inline_consts
        self.debuginfo = debuginfo
        self.converter = converter_api_ext
        self.ir = ir
        self._passmanager = passmanager
        self._core = core
        self._runtime_fold = runtime_fold
        self._torch_tfl = torch_tfl
        self._signature: Signature | None = None  # of the program that is being lowered
        rewrites.add_lowerings(backend.lowerings.lower)
        quantized_lowering.add_lowerings(backend.lowerings.lower)
        self.applied = set[str]()  # names of the rewrites that were used in place of an operator
        native.register()

    def convert_passes(self, program: ExportedProgram, dynamic: bool) -> ExportedProgram:
        with contextlib.ExitStack() as stack:
            stack.enter_context(layout.group_norm_in_place())
            stack.enter_context(quantized_lowering.in_layout_pass())
            if dynamic:  # composite operators take fixed sizes only
                passes = self._core.fx_passes
                nothing = passes.EliminateDeadCodePass
                stack.enter_context(mock.patch.object(passes, "BuildAtenCompositePass", nothing))
            result: ExportedProgram = self._core._run_convert_passes(program)
        return result

    def table(self, table: Any, dynamic: bool) -> Any:
        """A decomposition table with our rewrites.

        For dynamic sizes without what has a lowering of its own there: the rewrites of those are
        for fixed sizes, and partly in operators of LiteRT that such a lowering does not know.
        """
        if not dynamic:
            return rewrites.add_decompositions(table, self.applied)
        for op in dynamic_sizes.KEPT_WHOLE:
            table.pop(op, None)
        usual = torch.export.default_decompositions()
        for op in dynamic_sizes.TAKEN_APART:
            table[op] = usual[op]
        own = {op: table.get(op) for op in dynamic_sizes.LOWERED}
        table = rewrites.add_decompositions(table, self.applied)
        for op, before in own.items():
            if before is not None:
                table[op] = before
            else:
                table.pop(op, None)
        return table

    def lowering_decompositions(self, dynamic: bool) -> Any:
        # Not `table | {…}`: that gives a plain dict without the composite operators of the table.
        table = self.fx_infra.decomp.pre_lower_decomp()
        multinomial = aten.multinomial.default
        table[multinomial] = self._torch_tfl.decomps[multinomial]
        return self.table(table, dynamic)

    @contextlib.contextmanager
    def tamed(self) -> Iterator[None]:
        """litert-torch without its second decomposition, its clamping and its layer names."""
        export = self.backend_export
        sizes = dynamic_sizes.Lowerings()
        toolkit = self

        class Interpreter(export.LoweringInterpreter):  # type: ignore[misc,name-defined]
            def run_node(self, node: torch.fx.Node) -> Any:
                try:
                    return super().run_node(node)
                except Tpu2EdgeError:
                    raise
                except Exception as err:
                    raise _lowering_error(err, node, toolkit._signature) from err

            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                node: Any = self.lctx.node
                if target is not operator.getitem and _meets_dynamic(node):
                    lowering = dynamic_sizes.lowering_of(target)
                    if lowering is not None:
                        return lowering(sizes, node, *args, **kwargs)
                return super().call_function(target, args, kwargs)

        def keep(program: ExportedProgram, *_args: Any, **_kwargs: Any) -> ExportedProgram:
            return program

        with (
            mock.patch.object(export, "LoweringInterpreter", Interpreter),
            mock.patch.object(export, "_convert_i64_to_i32", return_value=False),
            mock.patch.object(self.inline_consts, "_clamp_inf_values", lambda tensor: tensor),
            mock.patch.object(self.debuginfo, "build_mlir_debuginfo", _layer_name),
            mock.patch.object(
                self.debuginfo, "build_mlir_file_debuginfo", lambda node: (_label_place(node), 0)
            ),
        ):
            self._keep = keep
            yield

    def mlir(
        self, program: ExportedProgram, signature: Signature, context: Any, constants: Any
    ) -> Any:
        """The program as an MLIR module that carries the signature's names."""
        self._signature = signature
        threshold = mock.patch.dict(
            os.environ, {"RESOURCE_CONSTANT_NUMEL_THRESHOLD": str(_BY_REFERENCE_BYTES)}
        )
        skip = mock.patch.object(self.fx_infra, "safe_run_decompositions", self._keep)
        with threshold, skip:
            lowered = self.backend_export.exported_program_to_mlir(
                program, ir_context=context, lowering_context_plugins=[constants]
            )
        self.converter.set_signature(
            lowered.module.operation,
            signature_name=signature.name,
            input_names=[spec.name for spec in signature.inputs],
            output_names=[spec.name for spec in signature.outputs],
        )
        return lowered.module

    def to_tfl(self, module: Any, context: Any, as_quantized: bool) -> Any:
        config = self.converter.ConvertToTFLConfig()
        config.model_origin_framework = "PYTORCH"
        config.unsafe_fuse_dynamic_shaped_broadcast = True
        # Infinities are values of the model; attention masks rely on them.
        config.canonicalizing_inf_as_min_max_float = False
        config.enable_x64 = False
        if as_quantized:  # integers where inputs, weights and output are quantized, else floats
            config.strict_qdq_mode = True
        with context:
            self.converter.run_convert_to_tfl_passes(
                module, self._passmanager.PassManager(), config
            )
        return module

    def origin(self, node: torch.fx.Node) -> str | None:
        """The name of the exported graph's node that ``node`` was decomposed from."""
        name = self.debuginfo.build_nodename_debuginfo(node)
        return str(name) if name else None

    def is_by_reference(self, attribute: Any) -> bool:
        return isinstance(attribute, self.ir.DenseResourceElementsAttr)

    def fold(self, module: Any, context: Any, notes: list[Note], as_quantized: bool) -> Any:
        """Fold what depends on constants only; the converter does not where they are references."""
        try:
            # Folding a DEQUANTIZE would write the user's integers as floats.
            return self._runtime_fold.runtime_fold(
                context, module, fold_dequantize=not as_quantized
            )
        except Exception as err:  # noqa: BLE001 - an optimisation: the file is right without it
            text = f"{type(err).__name__}: {_first_line(err)}"
            notes.append(Note(code="not-folded", text=f"constants were not folded: {text}"))
            return module


def _layer_name(node: torch.fx.Node) -> str | None:
    """The name of the LiteRT tensor: torch module path and node, "encoder.0.linear/addmm_3"."""
    if not node.meta.get("nn_module_stack"):
        return None
    return f"{blame.module_path(node) or 'forward'}/{_label(node)};"


def _label_place(node: torch.fx.Node) -> str:
    """What stands for a file in the converter's errors: "model.py:12:relu_3".

    It prints the file alone, and a line is no node: modules share their ``forward``.
    """
    place = blame.place_of_node(node)
    return f"{place.file}:{place.line}:{_label(node)}"


_LABEL = "tpu2edge_label"


def _label(node: torch.fx.Node) -> str:
    """The node's name in the file."""
    label: str = node.meta.get(_LABEL, node.name)
    return label


# ---------------------------------------------------------------------------------------- errors


def _lowering_error(
    err: Exception, node: torch.fx.Node, signature: Signature | None
) -> LoweringError:
    place = blame.place_of_node(node)
    text = _first_line(err)
    if _meets_dynamic(node):
        said = text if isinstance(err, NotImplementedError) else f"{type(err).__name__}: {text}"
        return LoweringError(
            f"the operator {node.target} cannot be lowered with a dynamic size: {said[:300]}",
            do=_fixed_sizes(signature),
            place=place,
        )
    if "Lowering not found" in text:
        return LoweringError(
            f"LiteRT has no form of the operator {node.target}",
            do="replace it in the model by operators that LiteRT has, or leave this part out",
            place=place,
        )
    return LoweringError(
        f"the operator {node.target} cannot be lowered: {type(err).__name__}: {text[:300]}",
        do="replace it in the model by an equal form, or leave this part out",
        place=place,
    )


def _fixed_sizes(signature: Signature | None) -> str:
    inputs = signature.inputs if signature is not None else ()
    shapes = shapes_instead((spec.name, spec.shape) for spec in inputs)
    shown = shapes or "--shapes NAME=SHAPE,SHAPE"
    return f"export fixed sizes instead of --dynamic, which share one copy of the weights: {shown}"


def _meets_dynamic(node: torch.fx.Node) -> bool:
    return any(is_dynamic(one) for one in (node, *node.all_input_nodes))


def is_dynamic(node: torch.fx.Node) -> bool:
    """Whether the node's result has, or is, a size that is known only when the model runs."""
    value = node.meta.get("val")
    for one in value if isinstance(value, (tuple, list)) else (value,):
        sizes = one.shape if isinstance(one, torch.Tensor) else (one,)
        if any(isinstance(size, (torch.SymInt, torch.SymFloat)) for size in sizes):
            return True
    return False


def _decomposition_error(err: Exception, program: ExportedProgram) -> LoweringError:
    text = str(err)
    place = None
    match = re.search(r"While executing %(\w+)", text)
    if match:
        node = next((n for n in program.graph.nodes if n.name == match[1]), None)
        place = blame.place_of_node(node) if node is not None else None
    return LoweringError(
        "the program cannot be decomposed into core operators: "
        f"{type(err).__name__}: {_first_line(err)[:300]}",
        do="change this part of the model, or leave it out",
        place=place,
    )


def _first_line(err: BaseException) -> str:
    return next((line.strip() for line in str(err).splitlines() if line.strip()), "")


_MLIR_ERROR = re.compile(r":(?P<label>\w+):\d+:\d+\)?: error: ")
_FAILED_OP = re.compile(r"failed to legalize operation '(?P<op>[\w.]+)'|'(?P<other>[\w.]+)' op ")


def _converter_error(err: Exception, graphs: Sequence[torch.fx.Graph]) -> ConversionError:
    text = str(err)
    lines = [line.strip() for line in text.splitlines() if "error:" in line]
    first = lines[0] if lines else next((li for li in text.splitlines() if li.strip()), "")
    message = first.split("error: ", 1)[-1].split(": %")[0][:300]
    label = re.search(r"error: .*?[\w.]+/(?P<label>\w+);", text) or _MLIR_ERROR.search(text)
    place = _place_by_label(graphs, label["label"]) if label else None
    failed = _FAILED_OP.search(text)
    if failed:
        op = failed["op"] or failed["other"]
        return LoweringError(
            f"the converter has no LiteRT form of this: {message}",
            do=f"replace what becomes '{op}' in the model by an equal form, or leave this part out",
            place=place,
        )
    return ConversionError(
        f"the converter refuses the program: {type(err).__name__}: {message}",
        do="see log.txt for the converter's own words; change or leave out this part of the model",
        place=place,
    )


def _place_by_label(graphs: Sequence[torch.fx.Graph], label: str) -> Place | None:
    for graph in graphs:
        for node in graph.nodes:
            if _label(node) == label:
                return blame.place_of_node(node)
    return None
