"""What stands in a ``.tflite`` file, read without running it.

The file is a flatbuffer (schema of LiteRT, ``ai_edge_litert.schema_py_generated``) and is read in
place through the generated accessors: a Path is mapped into memory, so weights cost nothing until
:meth:`TfliteFile.constant` asks for them. Everything that the file says of itself (indexes,
offsets, lengths) is checked before it is believed; what does not hold together is a
:class:`~tpu2edge.errors.BundleError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tpu2edge.errors import BundleError, Place
from tpu2edge.types import Dim, Signature, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from tpu2edge.types import Array

__all__ = [
    "SQUASHING",
    "UNBOUNDED",
    "BufferPlace",
    "Operator",
    "Quantization",
    "SignatureEntry",
    "Subgraph",
    "Summary",
    "Tensor",
    "TfliteFile",
    "Weight",
    "read_models",
    "read_tflite",
    "signatures_of",
    "summarize",
]

_T = TypeVar("_T")

#: ``Dim.max`` of a dynamic dimension: the file knows none, and LiteRT's sizes are int32.
UNBOUNDED = 2**31 - 1

_IDENTIFIER = b"TFL3"  # file_identifier of LiteRT's schema, at bytes 4..8

# Bits of one element, by the schema's TensorType in lower case. Strings have no fixed size.
_BITS = {
    "float32": 32,
    "float16": 16,
    "int32": 32,
    "uint8": 8,
    "int64": 64,
    "bool": 8,
    "int16": 16,
    "complex64": 64,
    "int8": 8,
    "float64": 64,
    "complex128": 128,
    "uint64": 64,
    "uint32": 32,
    "uint16": 16,
    "int4": 4,
    "bfloat16": 16,
    "int2": 2,
    "uint4": 4,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
}
_FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", "complex64", "complex128"})

# Data that is no .tflite but is often handed in as one: first bytes -> what it is.
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive (a .pt, .pt2, .npz or .task file?)"),
    (b"LITERTLM", "a .litertlm bundle of a language model"),
    (b"\x89HDF", "an HDF5 file (Keras?)"),
    (b"ML\xefR", "MLIR bytecode"),
    (b"\x80\x02", "a pickle"),
    (b"<", "a text file"),
    (b"{", "a JSON file"),
    (b"version https://git-lfs", "a Git LFS pointer: the file itself was not downloaded"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How a tensor's stored integers stand for real numbers: real = scale * (q - zero_point).

    One scale for the whole tensor, one for each index of axis ``dimension``, or (block-wise) one
    for each ``block_size`` elements of that axis, which are kept in the tensor ``scales_tensor``.
    """

    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    dimension: int = 0
    block_size: int | None = None
    scales_tensor: int | None = None
    zero_points_tensor: int | None = None

    def __str__(self) -> str:
        if self.block_size is not None:
            return f"blocks of {self.block_size}"
        if len(self.scales) == 1:
            return "per-tensor"
        return f"per-channel axis {self.dimension}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferPlace:
    """Where a tensor's bytes lie: in this file from ``start``, or in the file ``external``."""

    start: int
    size: int
    external: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One tensor of a subgraph; ``dtype`` is NumPy's name, or "int4", "bfloat16", "string" …"""

    index: int
    name: str
    shape: tuple[int, ...]
    shape_signature: tuple[int, ...]  # -1: dynamic; the shape where the file has none
    dtype: str
    buffer: int
    size_bytes: int  # of a constant's stored data, else 0
    is_constant: bool
    is_variable: bool = False
    is_sparse: bool = False
    quantization: Quantization | None = None

    @property
    def stored_as(self) -> str:
        """In words, "float32" or "int8 per-channel axis 0"."""
        return self.dtype if self.quantization is None else f"{self.dtype} {self.quantization}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """One operator: its name in LiteRT's schema (or its custom code), and its tensors."""

    index: int
    name: str
    version: int
    inputs: tuple[int, ...]  # -1: an optional input that is left out
    outputs: tuple[int, ...]
    composite: str | None = None  # "odml.scaled_dot_product_attention" of a STABLEHLO_COMPOSITE
    activation: str | None = None  # fused: "RELU", "RELU6" …
    subgraphs: tuple[int, ...] = ()  # that it runs: condition and body of a WHILE, a decomposition


@dataclass(frozen=True, kw_only=True, slots=True)
class Subgraph:
    """One graph of the file."""

    index: int
    name: str
    tensors: tuple[Tensor, ...]
    operators: tuple[Operator, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureEntry:
    """A named entry: signature names to tensor indexes, in the order of the subgraph's own I/O."""

    name: str
    subgraph: int
    inputs: Mapping[str, int]
    outputs: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TfliteFile:
    """All that a ``.tflite`` file says, weights excepted (those on request)."""

    size_bytes: int
    version: int
    description: str
    subgraphs: tuple[Subgraph, ...]
    signatures: tuple[SignatureEntry, ...]
    metadata: Mapping[str, bytes]
    buffers: tuple[BufferPlace, ...] = field(repr=False)
    external_buffers: Mapping[int, BufferPlace] = field(repr=False)
    path: Path | None = None
    _data: memoryview = field(repr=False, compare=False)

    @property
    def op_histogram(self) -> Mapping[str, int]:
        """How often each operator occurs over all subgraphs, the most frequent first."""
        counts = Counter(op.name for graph in self.subgraphs for op in graph.operators)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def tensor(self, index: int, subgraph: int = 0) -> Tensor:
        """The tensor ``index`` of a subgraph; IndexError if there is none."""
        if index < 0:
            raise IndexError(index)
        return self.subgraphs[subgraph].tensors[index]

    def constant(self, index: int, subgraph: int = 0) -> Array:
        """The stored values of a constant tensor, read-only, in the tensor's shape.

        Still quantized where the tensor is. 4- and 2-bit integers come unpacked as int8 (uint8),
        bfloat16 and float8 exactly widened to float32; all else is a view of the file.
        """
        import numpy as np

        tensor = self.tensor(index, subgraph)
        where = Place(tensor=tensor.name, file=str(self.path) if self.path else None)
        if not tensor.is_constant:
            raise BundleError(f"tensor '{tensor.name}' is computed, not stored", place=where)
        place = self._place(tensor)
        if place.external is not None:
            raise BundleError(
                f"the values of '{tensor.name}' lie in another file, '{place.external}'",
                place=where,
            )
        if tensor.is_sparse or tensor.dtype not in _BITS:
            kind = "sparse" if tensor.is_sparse else tensor.dtype
            raise BundleError(f"the values of '{tensor.name}' are {kind}: not read", place=where)
        raw = np.frombuffer(self._data, np.uint8, tensor.size_bytes, place.start)
        return _values(raw, tensor.dtype, math.prod(tensor.shape)).reshape(tensor.shape)

    def _place(self, tensor: Tensor) -> BufferPlace:
        external = self.external_buffers.get(-tensor.buffer)
        return external if external is not None else self.buffers[tensor.buffer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """One stored buffer of weights, and what uses it."""

    name: str
    subgraph: int
    index: int
    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    stored_as: str  # "float32", "int8 per-channel axis 0", "int4 blocks of 32"
    used_by: tuple[str, ...]  # operator names

    @property
    def is_float(self) -> bool:
        """Whether it stayed floating point (half precision included)."""
        return self.dtype in _FLOATS


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """The weights in numbers; a buffer that several tensors share is counted once.

    ``weights`` are floats and quantized integers, the largest first. Other constants (shapes,
    axes, indexes) count in ``constant_bytes_by_dtype`` only, as do the scales of blocks.
    """

    file_bytes: int
    weight_bytes: int
    float_bytes: int  # of weight_bytes: what stayed floating point
    constant_bytes_by_dtype: Mapping[str, int]
    weight_bytes_by_kind: Mapping[str, int]  # by Weight.stored_as
    weights: tuple[Weight, ...]

    @property
    def float_share(self) -> float:
        """``float_bytes`` of ``weight_bytes``, 0..1; 0 where there are no weights."""
        return self.float_bytes / self.weight_bytes if self.weight_bytes else 0.0


def read_tflite(data: bytes | Path) -> TfliteFile:
    """What the file (or its bytes) says: signatures, graphs, tensors, quantization, metadata.

    Nothing is run. A Path is mapped, not loaded. A file that is damaged, cut off or no ``.tflite``
    raises BundleError; damage to the weights' values alone cannot be seen here (compare hashes).
    """
    path = data if isinstance(data, Path) else None
    view = memoryview(data) if isinstance(data, bytes) else _map(data)
    _check_kind(view, path)
    try:
        return _Reader(view, path).read()
    except _Damaged as err:
        raise _damaged(str(err), path) from err
    except (
        struct.error,
        ValueError,  # NumPy's word for beyond the end; UnicodeDecodeError too
        TypeError,
        IndexError,
        KeyError,
        OverflowError,
        AttributeError,
        MemoryError,
    ) as err:
        raise _damaged(f"{type(err).__name__}: {err}", path) from err


def read_models(path: Path) -> tuple[TfliteFile, ...]:
    """The file, or every ``.tflite`` file of the folder by name; BundleError if it has none."""
    if not path.is_dir():
        return (read_tflite(path),)
    files = sorted(path.glob("*.tflite"))
    if not files:
        raise BundleError(
            f"the folder '{path}' holds no .tflite file",
            do="name a .tflite file, or a bundle folder as `tpu2edge export` makes it",
        )
    return tuple(read_tflite(file) for file in files)


def signatures_of(file: TfliteFile) -> tuple[Signature, ...]:
    """The file's signatures with the names, shapes and dtypes of their inputs and outputs.

    A dynamic dimension is a Dim named ``<tensor>_<axis>`` up to UNBOUNDED. Empty for files without
    signatures (made before 2021, or stripped).
    """

    def spec(graph: Subgraph, name: str, index: int) -> TensorSpec:
        tensor = graph.tensors[index]
        shape = tuple(
            Dim(name=f"{name}_{axis}", min=1, max=UNBOUNDED) if declared < 0 else size
            for axis, (size, declared) in enumerate(
                zip(tensor.shape, tensor.shape_signature, strict=True)
            )
        )
        quantization = tensor.quantization
        if quantization is None or len(quantization.scales) != 1:
            return TensorSpec(name=name, shape=shape, dtype=tensor.dtype)
        return TensorSpec(
            name=name,
            shape=shape,
            dtype=tensor.dtype,
            scale=quantization.scales[0],
            zero_point=quantization.zero_points[0] if quantization.zero_points else 0,
        )

    return tuple(
        Signature(
            name=entry.name,
            inputs=tuple(spec(file.subgraphs[entry.subgraph], *i) for i in entry.inputs.items()),
            outputs=tuple(spec(file.subgraphs[entry.subgraph], *o) for o in entry.outputs.items()),
        )
        for entry in file.signatures
    )


def summarize(file: TfliteFile) -> Summary:
    """How many bytes are stored as what, and how each weight is quantized."""
    seen: set[tuple[int, int]] = set()
    by_dtype: Counter[str] = Counter()
    weights: list[Weight] = []
    for graph in file.subgraphs:
        used_by: dict[int, list[str]] = {}
        for op in graph.operators:
            for index in op.inputs:
                used_by.setdefault(index, []).append(op.name)
        helpers = {
            index
            for t in graph.tensors
            if t.quantization is not None
            for index in (t.quantization.scales_tensor, t.quantization.zero_points_tensor)
            if index is not None
        }
        for tensor in graph.tensors:
            key = (tensor.buffer, file._place(tensor).start)
            if not tensor.is_constant or key in seen:
                continue
            seen.add(key)
            by_dtype[tensor.dtype] += tensor.size_bytes
            if tensor.index in helpers or not (
                tensor.dtype in _FLOATS or tensor.quantization is not None
            ):
                continue
            weights.append(
                Weight(
                    name=tensor.name,
                    subgraph=graph.index,
                    index=tensor.index,
                    shape=tensor.shape,
                    dtype=tensor.dtype,
                    size_bytes=tensor.size_bytes,
                    stored_as=tensor.stored_as,
                    used_by=tuple(dict.fromkeys(used_by.get(tensor.index, ()))),
                )
            )
    weights.sort(key=lambda w: (-w.size_bytes, w.subgraph, w.index))
    by_kind: Counter[str] = Counter()
    for weight in weights:
        by_kind[weight.stored_as] += weight.size_bytes
    return Summary(
        file_bytes=file.size_bytes,
        weight_bytes=sum(w.size_bytes for w in weights),
        float_bytes=sum(w.size_bytes for w in weights if w.is_float),
        constant_bytes_by_dtype=dict(by_dtype.most_common()),
        weight_bytes_by_kind=dict(by_kind.most_common()),
        weights=tuple(weights),
    )


#: Operators that squash their input: a wrong value before them can hide behind a saturated one.
SQUASHING = ("SOFTMAX", "LOG_SOFTMAX", "LOGISTIC")
_SAME_VALUES = ("RESHAPE", "CONCATENATION", "SQUEEZE", "EXPAND_DIMS")  # a copy or another shape


def before_squashing(file: TfliteFile) -> dict[tuple[str, str], int]:
    """For each output that ends in a softmax, log-softmax or sigmoid: the tensor before it.

    (signature, output name) -> index of that operator's input in the signature's subgraph.
    Reshapes and copies between the operator and the output are looked through.
    """
    found: dict[tuple[str, str], int] = {}
    for entry in file.signatures:
        graph = file.subgraphs[entry.subgraph]
        makers = {index: op for op in graph.operators for index in op.outputs}
        for name, index in entry.outputs.items():
            op = makers.get(index)
            while op is not None and op.name in _SAME_VALUES:
                sources = [i for i in op.inputs if i >= 0 and not graph.tensors[i].is_constant]
                op = makers.get(sources[0]) if len(sources) == 1 else None
            if op is not None and op.name in SQUASHING:
                found[entry.name, name] = op.inputs[0]
    return found


class _Damaged(Exception):
    """What the file says of itself does not hold together."""


def _damaged(why: str, path: Path | None) -> BundleError:
    name = f"'{path}'" if path else "the data"
    return BundleError(
        f"{name} is a damaged .tflite file: {why}",
        do="export it again, or copy it again from where it came from",
        place=Place(file=str(path)) if path else None,
    )


def _map(path: Path) -> memoryview:
    try:
        with path.open("rb") as file:
            if path.stat().st_size == 0:
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as err:
        raise BundleError(f"'{path}' cannot be read: {err.strerror or err}") from err


def _check_kind(view: memoryview, path: Path | None) -> None:
    if len(view) >= 8 and view[4:8] == _IDENTIFIER:
        return
    name = f"'{path}'" if path else "the data"
    head = bytes(view[:32])
    kind = next((words for start, words in _FOREIGN if head.startswith(start)), None)
    if not head:
        kind = "empty"
    elif kind is None:
        kind = f"something else: it starts with {head[:8].hex(' ')}, not with the mark TFL3"
    raise BundleError(
        f"{name} is no .tflite file but {kind}",
        do="name the .tflite file, or a bundle folder that holds one",
    )


def _values(raw: np.ndarray[Any, np.dtype[np.uint8]], dtype: str, count: int) -> Array:
    import numpy as np

    if dtype in ("int4", "uint4", "int2"):
        bits = _BITS[dtype]
        # The element with the lowest index is in the lowest bits: LiteRT's dense packing.
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        parts = ((raw[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:count]
        if dtype == "uint4":
            values: Array = parts
        else:
            signed = parts.astype(np.int8)
            values = np.where(signed >= 1 << (bits - 1), signed - (1 << bits), signed).astype(
                np.int8
            )
    elif dtype == "bfloat16":
        values = (raw.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    elif dtype.startswith("float8"):
        import ml_dtypes

        values = raw.view(getattr(ml_dtypes, dtype)).astype(np.float32)
    else:
        values = raw[: count * _BITS[dtype] // 8].view(np.dtype(dtype).newbyteorder("<"))
    values.flags.writeable = False
    return values


@cache
def _names(enum: str) -> Mapping[int, str]:
    """Value to name of one of the schema's enums (0 has the first name that it was given)."""
    from ai_edge_litert import schema_py_generated as schema

    members = vars(getattr(schema, enum))
    return {value: name for name, value in members.items() if isinstance(value, int)}


class _Reader:
    """One reading of one file; the accessors are trusted with nothing but in-range positions."""

    def __init__(self, view: memoryview, path: Path | None) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema = schema
        self.view = view
        self.path = path
        self.model = schema.Model.GetRootAs(view, 0)
        self.buffers: tuple[BufferPlace, ...] = ()
        self.external: dict[int, BufferPlace] = {}

    def read(self) -> TfliteFile:
        model = self.model
        version = int(model.Version())
        if version != 3:  # the schema's only version since 2017
            raise _Damaged(f"schema version {version}, known is 3")
        self.buffers = tuple(
            self._buffer(b, i)
            for i, b in enumerate(self._tables(model.BuffersLength, model.Buffers, "buffers"))
        )
        groups = [
            self._text(group.Name())
            for group in self._tables(
                model.ExternalBufferGroupsLength, model.ExternalBufferGroups, "buffer groups"
            )
        ]
        for item in self._tables(
            model.ExternalBuffersLength, model.ExternalBuffers, "external buffers"
        ):
            self.external[int(item.Id())] = BufferPlace(
                start=int(item.Offset()),
                size=int(item.Length()),
                external=_at(groups, int(item.Group()), "external buffer group"),
            )
        codes = [
            self._op_code(code)
            for code in self._tables(model.OperatorCodesLength, model.OperatorCodes, "op codes")
        ]
        subgraphs = tuple(
            self._subgraph(graph, i, codes)
            for i, graph in enumerate(
                self._tables(model.SubgraphsLength, model.Subgraphs, "subgraphs")
            )
        )
        if not subgraphs:
            raise _Damaged("it has no graph")
        metadata = {}
        for item in self._tables(model.MetadataLength, model.Metadata, "metadata"):
            place = _at(self.buffers, int(item.Buffer()), "metadata's buffer")
            metadata[self._text(item.Name())] = bytes(
                self.view[place.start : place.start + place.size]
            )
        return TfliteFile(
            size_bytes=len(self.view),
            version=version,
            description=self._text(model.Description()),
            subgraphs=subgraphs,
            signatures=tuple(
                self._signature(entry, subgraphs)
                for entry in self._tables(
                    model.SignatureDefsLength, model.SignatureDefs, "signatures"
                )
            ),
            metadata=metadata,
            buffers=self.buffers,
            external_buffers=self.external,
            path=self.path,
            _data=self.view,
        )

    def _tables(
        self, length: Callable[[], int], item: Callable[[int], Any], what: str
    ) -> Iterator[Any]:
        count = int(length())
        if count * 4 > len(self.view):  # each takes an offset of 4 bytes at least
            raise _Damaged(f"it claims {count} {what}, more than fit into it")
        for i in range(count):
            table = item(i)
            # An offset that points before the start would be read from the end, quietly.
            position = table._tab.Pos
            vtable = position - struct.unpack_from("<i", self.view, position)[0]
            if not 0 < position < len(self.view) or not 0 < vtable < len(self.view):
                raise _Damaged(f"{what}[{i}] points outside of the file")
            yield table

    def _ints(self, vector: Any) -> tuple[int, ...]:
        # The accessor answers 0 where there is no vector.
        return () if isinstance(vector, int) else tuple(vector.tolist())

    def _text(self, value: Any) -> str:
        return "" if value is None else bytes(value).decode("utf-8")

    def _buffer(self, buffer: Any, index: int) -> BufferPlace:
        # offset and size are used where the data lies behind the flatbuffer: files over 2 GB.
        # Offset 1 is the schema's mark for "to be filled in", never a place.
        offset, size = int(buffer.Offset()), int(buffer.Size())
        if offset > 1:
            start = offset
        elif int(buffer.DataLength()):
            slot = buffer._tab.Offset(4)
            start, size = int(buffer._tab.Vector(slot)), int(buffer.DataLength())
        else:
            return BufferPlace(start=0, size=0)
        if start + size > len(self.view):
            raise _Damaged(
                f"buffer {index} is cut off: it ends at byte {start + size:,}, "
                f"the file at {len(self.view):,}"
            )
        return BufferPlace(start=start, size=size)

    def _op_code(self, code: Any) -> tuple[str, int]:
        # Codes up to 126 stand in the older, one-byte field, 127 marks that the newer one is used.
        number = max(int(code.DeprecatedBuiltinCode()), int(code.BuiltinCode()))
        name = _names("BuiltinOperator").get(number)
        if name is None:
            raise _Damaged(f"operator code {number} is unknown")
        if name == "CUSTOM":
            name = self._text(code.CustomCode()) or "CUSTOM"
        return name, int(code.Version())

    def _subgraph(self, graph: Any, index: int, codes: list[tuple[str, int]]) -> Subgraph:
        tensors = tuple(
            self._tensor(t, i)
            for i, t in enumerate(self._tables(graph.TensorsLength, graph.Tensors, "tensors"))
        )
        operators = []
        for i, op in enumerate(self._tables(graph.OperatorsLength, graph.Operators, "operators")):
            name, version = _at(codes, int(op.OpcodeIndex()), f"operator {i}'s code")
            inputs, outputs = self._ints(op.InputsAsNumpy()), self._ints(op.OutputsAsNumpy())
            for tensor in inputs:
                if tensor != -1:
                    _at(tensors, tensor, f"an input of operator {i} ({name})")
            for tensor in outputs:
                _at(tensors, tensor, f"an output of operator {i} ({name})")
            operators.append(
                Operator(
                    index=i,
                    name=name,
                    version=version,
                    inputs=inputs,
                    outputs=outputs,
                    composite=self._composite(op) if name == "STABLEHLO_COMPOSITE" else None,
                    activation=self._activation(op),
                    subgraphs=self._subgraphs_of(op, name),
                )
            )
        ends = self._ints(graph.InputsAsNumpy()), self._ints(graph.OutputsAsNumpy())
        for tensor in ends[0] + ends[1]:
            _at(tensors, tensor, f"an input or output of subgraph {index}")
        for t in tensors:
            if t.quantization is not None:
                for other in (t.quantization.scales_tensor, t.quantization.zero_points_tensor):
                    if other is not None:
                        _at(tensors, other, f"the scales of tensor '{t.name}'")
        return Subgraph(
            index=index,
            name=self._text(graph.Name()),
            tensors=tensors,
            operators=tuple(operators),
            inputs=ends[0],
            outputs=ends[1],
        )

    def _composite(self, op: Any) -> str | None:
        options = self._options2(op, "StableHLOCompositeOptions")
        return None if options is None else self._text(options.Name())

    def _options2(self, op: Any, kind: str) -> Any:
        table = op.BuiltinOptions2()
        if table is None:
            return None
        options = getattr(self.schema, kind)()
        options.Init(table.Bytes, table.Pos)
        return options

    def _activation(self, op: Any) -> str | None:
        table = op.BuiltinOptions()
        if table is None:
            return None
        kind = _names("BuiltinOptions").get(int(op.BuiltinOptionsType()), "")
        options = getattr(self.schema, kind, None)
        if options is None or not hasattr(options, "FusedActivationFunction"):
            return None
        read = options()
        read.Init(table.Bytes, table.Pos)
        name = _names("ActivationFunctionType").get(int(read.FusedActivationFunction()))
        return None if name == "NONE" else name

    def _subgraphs_of(self, op: Any, name: str) -> tuple[int, ...]:
        if name == "STABLEHLO_COMPOSITE":
            options = self._options2(op, "StableHLOCompositeOptions")
            return () if options is None else (int(options.DecompositionSubgraphIndex()),)
        readers = {
            "WHILE": ("WhileOptions", ("CondSubgraphIndex", "BodySubgraphIndex")),
            "IF": ("IfOptions", ("ThenSubgraphIndex", "ElseSubgraphIndex")),
        }
        table = op.BuiltinOptions()
        if name not in readers or table is None:
            return ()
        kind, fields = readers[name]
        options = getattr(self.schema, kind)()
        options.Init(table.Bytes, table.Pos)
        return tuple(int(getattr(options, field)()) for field in fields)

    def _tensor(self, tensor: Any, index: int) -> Tensor:
        name = self._text(tensor.Name())
        kind = _names("TensorType").get(int(tensor.Type()))
        if kind is None:
            raise _Damaged(f"tensor {index} ('{name}') has the unknown type {tensor.Type()}")
        dtype = kind.lower()
        shape = self._ints(tensor.ShapeAsNumpy())
        if any(size < 0 for size in shape):
            raise _Damaged(f"tensor {index} ('{name}') has the shape {list(shape)}")
        declared = self._ints(tensor.ShapeSignatureAsNumpy())
        if len(declared) != len(shape):
            if declared:
                raise _Damaged(f"tensor {index} ('{name}') has shapes of two ranks")
            declared = shape
        buffer, place = self._stored(tensor, name)
        is_sparse = tensor.Sparsity() is not None
        if place.size and not is_sparse and dtype in _BITS:
            needed = (math.prod(shape) * _BITS[dtype] + 7) // 8
            if place.size < needed:
                raise _Damaged(
                    f"tensor '{name}' ({dtype}{list(shape)}) needs {needed:,} bytes, "
                    f"its buffer holds {place.size:,}"
                )
        return Tensor(
            index=index,
            name=name,
            shape=shape,
            shape_signature=declared,
            dtype=dtype,
            buffer=buffer,
            size_bytes=place.size,
            is_constant=place.size > 0,
            is_variable=bool(tensor.IsVariable()),
            is_sparse=is_sparse,
            quantization=self._quantization(tensor.Quantization(), name),
        )

    def _stored(self, tensor: Any, name: str) -> tuple[int, BufferPlace]:
        external = int(tensor.ExternalBuffer())
        if external:
            if external not in self.external:
                raise _Damaged(f"tensor '{name}' names external buffer {external}: there is none")
            return -external, self.external[external]
        buffer = int(tensor.Buffer())
        if not self.buffers and buffer == 0:
            return 0, BufferPlace(start=0, size=0)
        return buffer, _at(self.buffers, buffer, f"the buffer of tensor '{name}'")

    def _quantization(self, parameters: Any, name: str) -> Quantization | None:
        if parameters is None:
            return None
        kinds = _names("QuantizationDetails")
        kind = kinds.get(int(parameters.DetailsType()))
        if kind in ("BlockwiseQuantization", "MultiAxisQuantization"):
            table = parameters.Details()
            details = getattr(self.schema, kind)()
            details.Init(table.Bytes, table.Pos)
            zero_points = int(details.ZeroPoints())
            return Quantization(
                dimension=int(parameters.QuantizedDimension()),
                block_size=int(details.BlockSize()),
                scales_tensor=int(details.Scales()),
                # 0 and below: no such tensor; tensor 0 is an input of the graph.
                zero_points_tensor=zero_points if zero_points > 0 else None,
            )
        scale = parameters.ScaleAsNumpy()
        if isinstance(scale, int) or len(scale) == 0:
            return None  # only min and max, as some converters leave them: not quantized
        zero_points_vector = self._ints(parameters.ZeroPointAsNumpy())
        if len(zero_points_vector) not in (0, 1, len(scale)):
            raise _Damaged(
                f"tensor '{name}' has {len(scale)} scales and {len(zero_points_vector)} zero points"
            )
        return Quantization(
            scales=tuple(scale.tolist()),
            zero_points=zero_points_vector,
            dimension=int(parameters.QuantizedDimension()),
        )

    def _signature(self, entry: Any, subgraphs: tuple[Subgraph, ...]) -> SignatureEntry:
        name = self._text(entry.SignatureKey())
        graph = _at(subgraphs, int(entry.SubgraphIndex()), f"the graph of signature '{name}'")

        def named(
            length: Callable[[], int], item: Callable[[int], Any], order: tuple[int, ...]
        ) -> dict[str, int]:
            pairs = [
                (self._text(m.Name()), int(m.TensorIndex()))
                for m in self._tables(length, item, f"names of signature '{name}'")
            ]
            for key, tensor in pairs:
                _at(graph.tensors, tensor, f"'{key}' of signature '{name}'")
            rank = {tensor: i for i, tensor in reversed(list(enumerate(order)))}
            return dict(sorted(pairs, key=lambda pair: rank.get(pair[1], len(order))))

        return SignatureEntry(
            name=name,
            subgraph=graph.index,
            inputs=named(entry.InputsLength, entry.Inputs, graph.inputs),
            outputs=named(entry.OutputsLength, entry.Outputs, graph.outputs),
        )


def _at(items: Sequence[_T], index: int, what: str) -> _T:
    if not 0 <= index < len(items):
        raise _Damaged(f"{what} has the index {index}, of {len(items)}")
    return items[index]
