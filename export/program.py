"""One traced program: the ExportedProgram, its names and types, and two ways to run it on the CPU.

``eager`` is the user's own module in float32; ``oracle`` is the traced program in float64, the
nearest thing to the true result. Both take and give NumPy arrays by name.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.utils.rnn import PackedSequence

from tpu2edge.errors import DataError, ExportError, OptionError, Place, Tpu2EdgeError
from tpu2edge.export import blame, half_precision, names, oracle, quantized, taps
from tpu2edge.export import state as states
from tpu2edge.export.buckets import shapes_instead
from tpu2edge.export.prepare import prepare_module
from tpu2edge.export.rewrites import recurrent
from tpu2edge.types import Array, Dim, Note, Signature, Tensors, TensorSpec

__all__ = ["TracedProgram", "keep_global_state", "trace_module", "trace_program"]

#: What LiteRT stores a torch type as. 64-bit types are narrowed: its CPU kernels and delegates
#: are built for 32 bits.
EDGE_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "float32",
    torch.float32: "float32",
    torch.float16: "float32",
    torch.bfloat16: "float32",
    torch.int64: "int32",
    torch.int32: "int32",
    torch.int16: "int16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedProgram:
    """A model as one graph, with the names and types that its LiteRT file will have.

    ``signature`` gives the edge types (64-bit ones narrowed); ``input_dtypes`` the program's own.
    ``constant_outputs`` do not depend on any input. ``state`` gives for each input and output that
    carries a buffer of the module from call to call (see state.py) that buffer's path.
    """

    program: ExportedProgram
    signature: Signature
    input_dtypes: tuple[torch.dtype, ...]
    example: Tensors
    notes: tuple[Note, ...]
    constant_outputs: frozenset[str]
    tapped: ExportedProgram  # with the values before final activations as further outputs
    taps: tuple[str, ...]  # names of those, in the order of tapped's outputs behind the program's
    tapped_outputs: tuple[str, ...]  # the outputs that the taps lie before
    tap_nodes: tuple[str, ...]  # the exported graph's nodes that compute them
    state: Mapping[str, str]
    _eager: nn.Module | None
    _layout: _Layout | None
    _oracle: oracle.Oracle
    _state: states.State

    def eager(self, inputs: Tensors) -> dict[str, Array]:
        """The user's module in float32 on one sample: arrays by name, in the program's types.

        Raises:
            ExportError: the module raises on this sample, or returns other outputs than traced.
        """
        tensors = self._tensors(inputs)
        found = self._eager_outputs(tensors)
        if self.taps:
            with torch.no_grad(), keep_global_state():
                every = self._named(self.tapped.module()(*self._tensors(inputs)))
            found.update({name: every[name] for name in self.taps})
        return found

    def _eager_outputs(self, tensors: tuple[torch.Tensor, ...]) -> dict[str, Array]:
        with torch.no_grad(), keep_global_state():
            if self._eager is None or self._layout is None:
                flat = self.program.module()(*tensors)
                return self._named(flat if isinstance(flat, (tuple, list)) else (flat,))
            layout, module = self._layout, self._eager
            count = len(layout.inner.names)
            try:
                outputs, after = self._state.run(
                    lambda: layout.call(module, tensors[:count]), tensors[count:]
                )
            except Tpu2EdgeError:
                raise
            except Exception as err:
                raise ExportError(
                    f"the module fails on a sample: {type(err).__name__}: {err}",
                    do="check the sample's values, or give real --inputs",
                    place=blame.place_of_exception(err, self._eager),
                ) from err
        expected = tuple(s.name for s in self.signature.outputs if s.name not in self.state)
        if outputs.names != expected:
            raise ExportError(
                f"the module returns other outputs on another sample: {list(outputs.names)}, "
                f"traced {list(expected)}",
                do="make the outputs independent of the values of the inputs",
            )
        return self._named((*outputs.tensors, *after))

    def oracle(self, inputs: Tensors) -> dict[str, Array]:
        """The traced program in float64 on one sample; integers and booleans stay what they are."""
        with keep_global_state():
            return self._named(self._oracle.run(self._tensors(inputs)))

    def oracles(self, samples: Iterable[Tensors]) -> Iterator[dict[str, Array]]:
        """The same for each sample, in order; several are computed at once."""
        found = self._oracle.run_many(self._tensors(inputs) for inputs in samples)
        while True:
            with keep_global_state():
                tensors = next(found, None)
            if tensors is None:
                return
            yield self._named(tensors)

    @property
    def oracle_exceptions(self) -> tuple[str, ...]:
        """Operators that the oracle had to compute in the program's own precision."""
        return self._oracle.exceptions

    @property
    def quantization(self) -> str | None:
        """How the model was quantized before it came here, as a file's name says it; None: float."""
        return quantized.quantization_of(self.program)

    @property
    def is_channels_last(self) -> bool:
        """Whether inputs or outputs of the file have another layout than the module's."""
        layout = self._layout
        return layout is not None and bool(layout.last_inputs or layout.last_outputs)

    def _named(self, tensors: Sequence[torch.Tensor]) -> dict[str, Array]:
        names = [spec.name for spec in self.signature.outputs]
        if len(tensors) > len(names):
            names += self.taps
        return {n: numpy_from_tensor(tensor) for n, tensor in zip(names, tensors, strict=True)}

    @property
    def tapped_signature(self) -> Signature:
        """``signature`` with the values before final activations as further outputs."""
        values = {node.name: node.meta["val"] for node in self.program.graph.nodes if node.meta}
        more = tuple(
            TensorSpec(name=name, shape=tuple(values[node].shape), dtype="float32")
            for name, node in zip(self.taps, self.tap_nodes, strict=True)
        )
        return replace(self.signature, outputs=self.signature.outputs + more)

    def _tensors(self, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        out: list[torch.Tensor] = []
        for spec, dtype in zip(self.signature.inputs, self.input_dtypes, strict=True):
            if spec.name not in inputs:
                raise DataError(
                    f"a sample lacks input '{spec.name}'",
                    do=f"give {[s.name for s in self.signature.inputs]}",
                )
            # A copy: forward may write to its inputs.
            out.append(torch.from_numpy(np.array(inputs[spec.name], copy=True)).to(dtype))
        return tuple(out)


#: Channels behind the other axes, by rank, and the way back.
_LAST = {3: (0, 2, 1), 4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
_FIRST = {3: (0, 2, 1), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Layout:
    """Calls of forward on tensors as the file takes and gives them: some have channels last."""

    inner: names.CallLayout
    last_inputs: frozenset[str]
    last_outputs: frozenset[str]

    def to_file(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """forward's inputs as the file takes them."""
        if unknown := sorted(self.last_inputs - set(self.inner.names)):
            raise OptionError(
                f"--channels-last names no input {unknown}", do=f"inputs: {list(self.inner.names)}"
            )
        return tuple(
            _permuted(name, tensor, _LAST, "input") if name in self.last_inputs else tensor
            for name, tensor in zip(self.inner.names, tensors, strict=True)
        )

    def call(self, forward: Any, tensors: tuple[torch.Tensor, ...]) -> names.OutputLayout:
        """The outputs as the file gives them."""
        own = tuple(
            _permuted(name, tensor, _FIRST, "input") if name in self.last_inputs else tensor
            for name, tensor in zip(self.inner.names, tensors, strict=True)
        )
        outputs = names.output_layout(self.inner.call(forward, own))
        if not self.last_outputs:
            return outputs
        if unknown := sorted(self.last_outputs - set(outputs.names)):
            raise OptionError(
                f"--channels-last-output names no output {unknown}",
                do=f"outputs: {list(outputs.names)}",
            )
        return replace(
            outputs,
            tensors=tuple(
                _permuted(name, tensor, _LAST, "output") if name in self.last_outputs else tensor
                for name, tensor in zip(outputs.names, outputs.tensors, strict=True)
            ),
        )


def _permuted(
    name: str, tensor: torch.Tensor, orders: Mapping[int, tuple[int, ...]], kind: str
) -> torch.Tensor:
    if tensor.dim() not in orders:
        raise OptionError(
            f"{kind} '{name}' has {tensor.dim()} axes, so it has no channels to be put last",
            do="name inputs and outputs of 3 to 5 axes: batch, channels, and those of the image",
        )
    return tensor.permute(orders[tensor.dim()])


class _Flat(nn.Module):
    """The module with tensors in and tensors out, so that a trace has nothing but tensors."""

    def __init__(self, inner: nn.Module, layout: _Layout) -> None:
        super().__init__()
        self.inner = inner
        self.layout = layout
        self.state = states.State()
        self.seen = _Seen()

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(self.layout.inner.names)
        held = states.held(self.inner)
        outputs, after = self.state.run(
            lambda: self.layout.call(self.inner, tensors[:count]), tensors[count:]
        )
        self.seen.assigned = states.assigned(self.inner, held)
        self.seen.names, self.seen.left_out = outputs.names, outputs.left_out
        return (*outputs.tensors, *after)


class _Seen:
    """What the trace learned about outputs and state; an object of its own, since torch.export puts the
    module's attributes back after tracing."""

    names: tuple[str, ...] = ()
    left_out: tuple[Note, ...] = ()
    assigned: Sequence[str] = ()


def trace_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic: Mapping[str, Mapping[int, Any]] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    channels_last: Sequence[str] = (),
    channels_last_output: Sequence[str] = (),
    signature_name: str = "serving_default",
) -> TracedProgram:
    """``module`` traced on the example inputs; the module and its random state stay as they were.

    Args:
        module: any torch module, on any device, in any mode (see prepare_module).
        args: example positional inputs.
        kwargs: example keyword inputs.
        dynamic: for each input name, which axes may change between which sizes: Dim of this
            package or torch.export.Dim.
        shapes: other shapes of inputs than the example's, which is repeated or cut along its axes.
        channels_last: inputs that the file takes with channels last (NHWC); the example has them as
            forward takes it. Axes of ``dynamic`` and ``shapes`` are those of the file.
        channels_last_output: outputs that the file gives with channels last.
        signature_name: the name of the entry in the LiteRT file.

    Raises:
        ExportError: torch.export cannot capture it; the place is the user's own line.
        ModelSourceError: the example inputs do not fit forward.
        OptionError: ``dynamic`` names an unknown input or axis.
    """
    dynamic = {name: _own_dims(name, axes) for name, axes in (dynamic or {}).items()}
    with keep_global_state():
        prepared = prepare_module(module)
        notes = list(prepared.notes)
        quantized.fixed_fake_quants(prepared.module, notes)
        call = names.call_layout(prepared.module.forward, args, kwargs or {})
        layout = _Layout(
            inner=call,
            last_inputs=frozenset(channels_last),
            last_outputs=frozenset(channels_last_output),
        )
        given = _reshaped(call.names, layout.to_file(call.tensors), shapes or {})
        tensors = tuple(
            _edge_input(name, tensor, notes) for name, tensor in zip(call.names, given, strict=True)
        )
        symbols = _dynamic_shapes(call.names, tensors, dynamic or {})
        tensors = _roomy(tensors, call.names, dynamic or {})
        flat = _Flat(prepared.module, layout).eval()
        try:
            program = _export_with_state(flat, tensors, symbols, notes)
        except ExportError:
            if not prepared.half_dtypes:
                raise
            # Forward casts to half precision by itself, which does not go with weights in float32:
            # traced as the module is, the program is widened as a whole afterwards.
            own = prepare_module(module, keep_half=True)
            flat = _Flat(own.module, layout).eval()
            given = _roomy(given, call.names, dynamic or {})
            given = tuple(t.detach().cpu() for t in given)
            program = _export_with_state(flat, given, symbols, notes)
        carried = _state_names(flat, call.names)
        tensors = (
            *tensors,
            *(
                _edge_input(name, value, notes)
                for name, value in zip(carried, flat.state.initial(), strict=True)
            ),
        )
    notes.extend(flat.seen.left_out)
    half = half_precision.compute_in_float32(program)
    if half:
        text = (
            f"{half} operators compute in half precision: they are computed in float32, and so is "
        )
        notes.append(Note(code="computed-in-float32", text=text + "what the file is compared with"))
    notes.extend(
        Note(code="baked-in", text=f"argument '{name}' is {value}: fixed in the file")
        for name, value in call.constants.items()
        if value != "None"
    )
    quantized.normalize(program, notes)
    if carried:
        text = (
            f"state: {', '.join(carried)} go in and come out at every call, starting from the "
            "values in the module (docs/state.md)"
        )
        notes.append(Note(code="state", text=text))
    return _traced(
        program,
        (*call.names, *carried),
        (*flat.seen.names, *carried),
        dynamic or {},
        signature_name,
        notes,
        None if half else prepared.module,
        layout,
        tensors,
        flat.state,
        carried,
    )


def trace_program(
    program: ExportedProgram, *, signature_name: str = "serving_default"
) -> TracedProgram:
    """A saved ExportedProgram as a TracedProgram; its own example inputs are the example.

    Raises:
        ExportError: it has no example inputs, or inputs that are no tensors.
    """
    if program.example_inputs is None:
        raise ExportError(
            "the saved program holds no example inputs",
            do="save it with torch.export.save right after torch.export.export",
        )
    args, kwargs = program.example_inputs
    module = program.module()
    layout = names.call_layout(module.forward, tuple(args), dict(kwargs))
    wrapped = trace_module(
        module,
        tuple(args),
        dict(kwargs),
        dynamic=_dims_of(program, layout.names),
        signature_name=signature_name,
    )
    note = Note(code="program", text="the source is a saved program: eager is that program")
    return replace(wrapped, notes=(note, *wrapped.notes))


# ---------------------------------------------------------------------------------------- export


def _edge_input(name: str, tensor: torch.Tensor, notes: list[Note]) -> torch.Tensor:
    if tensor.dtype not in EDGE_DTYPES:
        raise DataError(
            f"input '{name}' has the type {tensor.dtype}, which LiteRT does not take",
            do=f"use one of {sorted(str(d).removeprefix('torch.') for d in EDGE_DTYPES)}",
            place=Place(tensor=name),
        )
    tensor = tensor.detach().cpu().contiguous()
    edge = EDGE_DTYPES[tensor.dtype]
    own = str(tensor.dtype).removeprefix("torch.")
    if own != edge:
        widened = own in ("float16", "bfloat16")
        notes.append(
            Note(
                code="widened-input" if widened else "narrowed-input",
                text=f"input '{name}': {own} {'computed' if widened else 'narrowed'} as {edge}",
            )
        )
    if tensor.dtype in (torch.float16, torch.bfloat16, torch.float64):
        return tensor.to(torch.float32)
    return tensor


def _own_dims(name: str, axes: Mapping[int, Any]) -> dict[int, Dim]:
    """torch.export's dimensions as ours; each needs both ends, which are checked."""
    own: dict[int, Dim] = {}
    for axis, dim in axes.items():
        low, high = getattr(dim, "min", None), getattr(dim, "max", None)
        if low == 0:  # torch.export.Dim's own default; no runtime takes empty inputs
            low = 1
        if not isinstance(low, int) or not isinstance(high, int) or high >= _INT32.max:
            raise OptionError(
                f"the dynamic axis {axis} of input '{name}' has no largest size",
                do=f'give both ends: torch.export.Dim("{name}_{axis}", min=1, max=8)',
            )
        if not 1 <= low <= high:
            raise OptionError(
                f"the dynamic axis {axis} of input '{name}' has no size from {low} to {high}"
            )
        own[axis] = dim if isinstance(dim, Dim) else Dim(name=f"{name}_{axis}", min=low, max=high)
    return own


def _reshaped(
    input_names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    shapes: Mapping[str, Sequence[int]],
) -> tuple[torch.Tensor, ...]:
    """The example in the shapes that are asked for."""
    for name in shapes:
        if name not in input_names:
            raise OptionError(
                f"--shapes names no input '{name}'", do=f"inputs: {list(input_names)}"
            )
    out: list[torch.Tensor] = []
    for name, tensor in zip(input_names, tensors, strict=True):
        wanted = tuple(shapes.get(name, tensor.shape))
        if len(wanted) != tensor.dim() or (tensor.numel() == 0 and wanted != tensor.shape):
            raise OptionError(
                f"--shapes: the example of input '{name}' has the shape {list(tensor.shape)}, "
                f"which cannot become {list(wanted)}",
                do="give as many sizes as the input has axes",
            )
        for axis, size in enumerate(wanted):
            if tensor.shape[axis] != size:
                places = torch.arange(size, device=tensor.device) % tensor.shape[axis]
                tensor = tensor.detach().index_select(axis, places)
        out.append(tensor)
    return tuple(out)


def _dynamic_shapes(
    input_names: tuple[str, ...],
    tensors: tuple[torch.Tensor, ...],
    dynamic: Mapping[str, Mapping[int, Dim]],
) -> tuple[tuple[dict[int, Any], ...]] | None:
    """What torch.export is asked for; it finds by itself which of the sizes must be equal."""
    if not dynamic:
        return None
    for name, axes in dynamic.items():
        if name not in input_names:
            raise OptionError(
                f"--dynamic names no input '{name}'", do=f"inputs: {list(input_names)}"
            )
        rank = tensors[input_names.index(name)].dim()
        for axis in axes:
            if not 0 <= axis < rank:
                raise OptionError(f"--dynamic: input '{name}' has axes 0 to {rank - 1}, not {axis}")
    flat = tuple(
        {
            axis: torch.export.Dim.DYNAMIC(min=dim.min, max=dim.max)
            for axis, dim in dynamic.get(name, {}).items()
        }
        for name in input_names
    )
    return (flat,)


def _roomy(
    tensors: tuple[torch.Tensor, ...],
    input_names: tuple[str, ...],
    dynamic: Mapping[str, Mapping[int, Dim]],
) -> tuple[torch.Tensor, ...]:
    """The example with dynamic axes of size 0 or 1 repeated: torch.export takes those as fixed."""
    out: list[torch.Tensor] = []
    for name, tensor in zip(input_names, tensors, strict=True):
        for axis, dim in dynamic.get(name, {}).items():
            if tensor.shape[axis] == 1 and dim.max > 1:
                repeats = [1] * tensor.dim()
                repeats[axis] = min(3, dim.max)
                tensor = tensor.repeat(repeats)
        out.append(tensor)
    return tuple(out)


def _export_with_state(
    flat: _Flat, tensors: tuple[torch.Tensor, ...], symbols: Any, notes: list[Note]
) -> ExportedProgram:
    """The traced program; buffers that it writes to have become further inputs and outputs."""
    program = _export(flat, tensors, symbols, flat.layout.inner.names)
    wrapper = "inner."
    for index in states.input_writes(program):
        text = (
            f"forward writes to its input '{flat.layout.inner.names[index]}': the file computes with the "
            "new values, but the caller's array stays as it was"
        )
        notes.append(Note(code="input-written", text=text))
    buffers, parameters = states.written(program)
    if parameters:  # at worst too many were found: the decomposition knows
        states.refuse_state(_parameter_writes(program))
    found = list(
        dict.fromkeys((*(path.removeprefix(wrapper) for path in buffers), *flat.seen.assigned))
    )
    if not found:
        return program
    flat.state = states.State.of(flat.inner, found)
    program = _export_given_state(flat, tensors, symbols)
    judged = states.unread(program, len(tensors))
    if not judged.unread and not judged.unchanged:
        return program
    paths = flat.state.names
    scratch = [path for index, path in enumerate(paths) if index in judged.unread]
    kept = [
        path for index, path in enumerate(paths) if index not in judged.unread | judged.unchanged
    ]
    if scratch:
        shown = ", ".join(f"'{blame.strip_wrapper(path)}'" for path in scratch)
        text = f"{shown}: written by forward, but nothing reads it; it is not in the file"
        notes.append(Note(code="state-left-out", text=text))
    flat.state = states.State.of(flat.inner, kept, scratch)
    return _export_given_state(flat, tensors, symbols)


def _export_given_state(
    flat: _Flat, tensors: tuple[torch.Tensor, ...], symbols: Any
) -> ExportedProgram:
    initial = flat.state.initial()
    if symbols is not None:
        symbols = ((*symbols[0], *({} for _ in initial)),)
    every = (*tensors, *(value.clone() for value in initial))
    return _export(flat, every, symbols, flat.layout.inner.names)


def _parameter_writes(program: ExportedProgram) -> ExportedProgram:
    """The program in functional form, without what its signature says of buffers."""
    functional: ExportedProgram = program.run_decompositions()
    functional.graph_signature.output_specs = [
        spec
        for spec in functional.graph_signature.output_specs
        if spec.kind is not OutputKind.BUFFER_MUTATION
    ]
    return functional


def _state_names(flat: _Flat, input_names: Sequence[str]) -> tuple[str, ...]:
    """``state.<path>``, under another first word if an input or output is called so already."""
    taken = (*input_names, *flat.seen.names)
    prefix, number = "state", 1
    while any(name == prefix or name.startswith(f"{prefix}.") for name in taken):
        number += 1
        prefix = f"state{number}"
    return tuple(f"{prefix}.{blame.strip_wrapper(path)}" for path in flat.state.names)


def _export(
    flat: _Flat,
    tensors: tuple[torch.Tensor, ...],
    shapes: tuple[tuple[dict[int, Any], ...]] | None,
    input_names: tuple[str, ...],
) -> ExportedProgram:
    try:
        with torch.no_grad(), recurrent.quick_shapes(), quantized.tracing():
            return torch.export.export(flat, tensors, dynamic_shapes=shapes, strict=False)
    except Tpu2EdgeError:
        raise
    except Exception as err:
        buckets = ""
        if shapes is not None:
            buckets = shapes_instead(
                (name, [axes.get(axis, size) for axis, size in enumerate(tensor.shape)])
                for name, tensor, axes in zip(input_names, tensors, shapes[0], strict=True)
            )
        raise _export_error(err, flat.inner, buckets) from err


def _export_error(err: Exception, inner: nn.Module, buckets: str) -> ExportError:
    text = str(err)
    place = blame.place_of_exception(err, inner)
    kind = type(err).__name__
    if "data-dependent" in text or kind.startswith("GuardOnDataDependent"):
        return ExportError(
            "the model branches on, or takes a size from, the values of a tensor, so it is not one "
            "graph",
            do="use torch.where or torch.cond, fix the flag before exporting, or move this part "
            "out of the model",
            place=place,
        )
    if _holds_packed_sequence(err):
        return ExportError(
            "the model packs sequences of different lengths (PackedSequence), which is not one graph",
            do="feed the padded tensor to the recurrent layer, or export one length",
            place=place,
        )
    if buckets and kind in ("UserError", "ConstraintViolationError"):
        return ExportError(
            f"the dynamic dimensions do not fit the model: {_first_lines(text)}",
            do=f"correct --dynamic, or export fixed sizes, which share the weights: {buckets}",
            place=place,
        )
    return ExportError(
        f"torch.export cannot capture the model: {kind}: {_first_lines(text)}",
        do="change this line, or leave this part out of the exported module",
        place=place,
    )


def _holds_packed_sequence(err: BaseException) -> bool:
    trace = err.__traceback__
    while trace is not None:
        if any(isinstance(value, PackedSequence) for value in trace.tb_frame.f_locals.values()):
            return True
        trace = trace.tb_next
    return False


def _first_lines(text: str, count: int = 3) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:count])[:400]


def _traced(
    program: ExportedProgram,
    input_names: tuple[str, ...],
    output_names: tuple[str, ...],
    dynamic: Mapping[str, Mapping[int, Dim]],
    signature_name: str,
    notes: list[Note],
    eager: nn.Module | None,
    layout: _Layout,
    tensors: tuple[torch.Tensor, ...],
    state: states.State,
    carried: Sequence[str],
) -> TracedProgram:
    check_constants(program)
    output_values = _output_values(program)
    if dynamic:
        dynamic = _dims_of(program, input_names, dynamic)
    inputs = tuple(
        TensorSpec(
            name=name,
            shape=_shape(tensor.shape, dynamic.get(name, {})),
            dtype=EDGE_DTYPES[tensor.dtype],
        )
        for name, tensor in zip(input_names, tensors, strict=True)
    )
    dims = {dim.name: dim for axes in dynamic.values() for dim in axes.values()}
    outputs: list[TensorSpec] = []
    for name, value in zip(output_names, output_values, strict=True):
        dtype = value.dtype
        if dtype not in EDGE_DTYPES:
            raise ExportError(
                f"output '{name}' has the type {dtype}, which LiteRT does not have",
                do="return real numbers (view_as_real), integers or booleans",
                place=Place(tensor=name),
            )
        if dtype in (torch.int64, torch.float64):
            own = str(dtype).removeprefix("torch.")
            notes.append(
                Note(
                    code="narrowed-output",
                    text=f"output '{name}': {own} narrowed as {EDGE_DTYPES[dtype]}",
                )
            )
        outputs.append(
            TensorSpec(name=name, shape=_symbolic(value.shape, dims), dtype=EDGE_DTYPES[dtype])
        )
    tapped, squashed = taps.with_taps(program, output_names)
    return TracedProgram(
        program=program,
        tapped=tapped,
        taps=tuple(taps.tap_name(name) for name in squashed),
        tapped_outputs=squashed,
        tap_nodes=taps.tap_nodes(program, tapped),
        signature=Signature(name=signature_name, inputs=inputs, outputs=tuple(outputs)),
        input_dtypes=tuple(t.dtype for t in tensors),
        example={
            name: numpy_from_tensor(t).astype(spec.dtype)
            for name, t, spec in zip(input_names, tensors, inputs, strict=True)
        },
        notes=tuple(notes),
        constant_outputs=frozenset(_independent_outputs(program, output_names)),
        state={
            name: blame.strip_wrapper(path) for name, path in zip(carried, state.names, strict=True)
        },
        _eager=eager,
        _layout=layout,
        _oracle=oracle.Oracle(tapped),
        _state=state,
    )


def _shape(shape: Sequence[int], axes: Mapping[int, Dim]) -> tuple[int | Dim, ...]:
    return tuple(axes.get(axis, int(size)) for axis, size in enumerate(shape))


def _symbolic(shape: Sequence[Any], dims: Mapping[str, Dim]) -> tuple[int | Dim, ...]:
    out: list[int | Dim] = []
    for index, size in enumerate(shape):
        if isinstance(size, int):
            out.append(size)
            continue
        expression = str(size)
        known = dims.get(expression)
        low = min((d.min for d in dims.values()), default=0)
        out.append(known or Dim(name=f"dim{index}[{expression}]", min=min(low, 0), max=2**31 - 1))
    return tuple(out)


def _dims_of(
    program: ExportedProgram,
    input_names: tuple[str, ...],
    asked: Mapping[str, Mapping[int, Dim]] | None = None,
) -> dict[str, dict[int, Dim]]:
    """The dynamic axes as the program has them; axes of one symbol share one Dim."""
    ranges = {str(symbol): value for symbol, value in program.range_constraints.items()}
    result: dict[str, dict[int, Dim]] = {}
    for name, node in zip(input_names, _user_inputs(program), strict=True):
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, int):
                continue
            symbol = str(size.node.expr)
            bound = ranges.get(symbol)
            low = max(1, int(bound.lower)) if bound is not None else 1
            high = min(int(bound.upper), 2**31 - 1) if bound is not None else 2**31 - 1
            wish = (asked or {}).get(name, {}).get(axis)
            if wish is not None:
                # A lower end of 2 is torch.export's own caution about sizes 0 and 1; the check at
                # both ends shows whether 1 works.
                low = wish.min if low <= 2 else max(low, wish.min)
                high = min(high, wish.max)
            result.setdefault(name, {})[axis] = Dim(name=symbol, min=low, max=high)
    return result


# ------------------------------------------------------------------------------- looking at graphs


def _user_inputs(program: ExportedProgram) -> list[torch.fx.Node]:
    wanted = set(program.graph_signature.user_inputs)
    return [n for n in program.graph.nodes if n.op == "placeholder" and n.name in wanted]


def _output_node(program: ExportedProgram) -> torch.fx.Node:
    node: torch.fx.Node = next(n for n in reversed(program.graph.nodes) if n.op == "output")
    return node


def _output_values(program: ExportedProgram) -> list[torch.Tensor]:
    count = len(program.graph_signature.user_outputs)
    flat = list(_output_node(program).args[0])  # type: ignore[arg-type]
    return [node.meta["val"] for node in flat[len(flat) - count :]]


def _independent_outputs(program: ExportedProgram, output_names: Sequence[str]) -> Iterator[str]:
    """Names of outputs that no user input reaches."""
    reached: set[torch.fx.Node] = set(_user_inputs(program))
    for node in program.graph.nodes:
        if any(source in reached for source in node.all_input_nodes):
            reached.add(node)
    flat = list(_output_node(program).args[0])  # type: ignore[arg-type]
    for name, node in zip(output_names, flat[len(flat) - len(output_names) :], strict=True):
        if node not in reached:
            yield name


def check_constants(program: ExportedProgram) -> None:
    """Refuse constants and literals that the narrowing to 32 bits would change.

    Raises:
        ExportError: an int64 constant, or a literal beside an int64 tensor, outside of int32.
    """
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.USER_INPUT or spec.target is None:
            continue
        tensor = program.state_dict.get(spec.target)
        if tensor is None:
            tensor = program.constants.get(spec.target)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.int64:
            continue
        if tensor.numel() and (int(tensor.min()) < _INT32.min or int(tensor.max()) > _INT32.max):
            raise ExportError(
                f"the int64 constant '{blame.strip_wrapper(spec.target)}' holds values outside of "
                f"int32 ({int(tensor.min())} to {int(tensor.max())})",
                do="keep values within 32 bits; LiteRT files are exported with 32-bit integers",
                place=Place(tensor=blame.strip_wrapper(spec.target)),
            )
    for node in program.graph.nodes:
        if node.op != "call_function" or not _is_int64(node):
            continue
        for value in _literals(node):
            if isinstance(value, int) and not _INT32.min <= value <= _INT32.max:
                raise ExportError(
                    f"the number {value} beside an int64 tensor does not fit into int32",
                    do="keep values within 32 bits; LiteRT files are exported with 32-bit integers",
                    place=blame.place_of_node(node),
                )


# Ends of ranges are given as huge numbers (x[3:] is slice(3, 2**63 - 1)): no values.
_RANGE_OPS = ("slice", "index_select", "narrow", "clamp")


def _is_int64(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    if any(part in str(node.target) for part in _RANGE_OPS):
        return False
    return isinstance(value, torch.Tensor) and value.dtype is torch.int64


def _literals(node: torch.fx.Node) -> Iterator[Any]:
    for value in (*node.args, *node.kwargs.values()):
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


# ------------------------------------------------------------------------------------- conversions


def numpy_from_tensor(tensor: torch.Tensor) -> Array:
    """A NumPy copy of ``tensor``; bfloat16 becomes float32 (NumPy has no bfloat16)."""
    tensor = tensor.detach().cpu()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.float()
    return np.array(tensor.resolve_conj().resolve_neg().numpy(), copy=True)


@contextlib.contextmanager
def keep_global_state() -> Iterator[None]:
    """Put random generators, grad mode and the default dtype back as they were.

    A caller's autocast and default device are left outside: the export is in float32 on the CPU.
    So are warnings turned into errors, which torch.export's own would set off.
    """
    default = torch.get_default_dtype()
    numpy_state, python_state = np.random.get_state(), random.getstate()
    grad = torch.is_grad_enabled()
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=devices))
            if any(action == "error" for action, *_ in warnings.filters):
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("default")
            if torch.is_autocast_enabled("cpu"):
                stack.enter_context(torch.autocast("cpu", enabled=False))
            if torch.get_default_device().type != "cpu":
                stack.enter_context(torch.device("cpu"))
            yield
    finally:
        torch.set_grad_enabled(grad)
        torch.set_default_dtype(default)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
