"""Reading and rewriting of StableHLO modules; runs in the child process (needs jaxlib's MLIR).

The MLIR bindings and the compile call are JAX internals (tried with jax 0.10); everything that
depends on them is in this module and in ``child``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from jax._src.interpreters import mlir as jax_mlir
from jaxlib.mlir import ir

__all__ = ["TAG", "MatmulRecord", "parse", "raise_precision", "rewrite", "tag_matmuls", "text_of"]

#: Operations that a TPU may run on its matrix unit.
_MATMULS = ("stablehlo.dot_general", "stablehlo.dot", "stablehlo.convolution")
#: Operations that call a function of the module, and the attribute that names it.
_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}
#: How a matmul is found again in the TPU compiler's output: as the op_name of its metadata.
TAG = "t2e.matmul."

MatmulRecord = dict[str, Any]


def parse(data: bytes) -> Any:
    """The module in ``data`` with every function that contains a matmul inlined at its calls.

    A function that is called several times is compiled several times, perhaps differently, and
    what is not inlined could not carry one mark for each. Dead and doubled operations are removed,
    as any compiler would: a mark on them would not be found again.
    """
    context = jax_mlir.make_ir_context()
    with context, ir.Location.unknown():
        module = ir.Module.parse(data)
        _inline(module)
        passes = "builtin.module(canonicalize,cse,canonicalize,symbol-dce)"
        from jaxlib.mlir import passmanager

        passmanager.PassManager.parse(passes).run(module.operation)
    return module


def text_of(module: Any) -> str:
    """MLIR text without locations."""
    return str(module.operation.get_asm(enable_debug_info=False))


def _operations(region_holder: Any) -> list[Any]:
    """Every operation inside, inner ones before the one that holds them, in program order."""
    found: list[Any] = []

    def visit(operation: Any) -> None:
        for region in operation.regions:
            for block in region.blocks:
                for op in block.operations:
                    visit(op.operation)
                    found.append(op.operation)

    visit(region_holder)
    return found


def _inline(module: Any) -> None:
    functions = {
        op.attributes["sym_name"].value: op.operation
        for op in module.body.operations
        if op.operation.name == "func.func"
    }

    def callee(op: Any) -> str | None:
        attribute = _CALLS.get(op.name)
        return None if attribute is None else str(op.attributes[attribute].value)

    holds: dict[str, bool] = {}

    def has_matmul(name: str) -> bool:
        if name not in holds:
            holds[name] = False  # StableHLO has no recursion; this only guards against it
            holds[name] = any(
                op.name in _MATMULS or ((inner := callee(op)) is not None and has_matmul(inner))
                for op in _operations(functions[name])
            )
        return holds[name]

    def expand(holder: Any) -> None:
        for op in _operations(holder):
            name = callee(op)
            if name is None or not has_matmul(name):
                continue
            module_path = _module_path(op.location)
            body = functions[name].regions[0].blocks[0]
            values = dict(zip(body.arguments, op.operands, strict=True))
            with ir.InsertionPoint(op):
                for inner in body.operations:
                    if inner.operation.name == "func.return":
                        for old, new in zip(op.results, inner.operands, strict=True):
                            old.replace_all_uses_with(values.get(new, new))
                        break
                    clone = inner.operation.clone()
                    for nested in (*_operations(clone), clone.operation):
                        for i, operand in enumerate(nested.operands):
                            if operand in values:
                                nested.operands[i] = values[operand]
                    if module_path and not _module_path(clone.operation.location):
                        _relocate_calls(clone.operation, module_path)
                    values.update(zip(inner.results, clone.results, strict=True))
            op.erase()

    main = functions["main"]
    while any((name := callee(op)) is not None and has_matmul(name) for op in _operations(main)):
        expand(main)


def _relocate_calls(operation: Any, path: str) -> None:
    """Give matmuls and calls inside the module path of the call they came from."""
    for op in (*_operations(operation), operation):
        if op.name in _MATMULS or op.name in _CALLS:
            op.attributes["t2e.module"] = ir.StringAttr.get(path)


_PATH = re.compile(r'module:([^/"\s]*)')


def _module_path(location: Any) -> str:
    """The innermost torch module named by a location, "" if none is."""
    found = _PATH.findall(str(location))
    return found[-1] if found else ""


def _path_of(op: Any) -> str:
    if "t2e.module" in op.attributes:
        return str(op.attributes["t2e.module"].value)
    return _module_path(op.location)


def _element(value: Any) -> str:
    return str(ir.RankedTensorType(value.type).element_type)


def _contraction_size(op: Any) -> int:
    """How many products each result is the sum of."""
    left, right = (list(ir.RankedTensorType(v.type).shape) for v in op.operands)
    if op.name == "stablehlo.convolution":
        out_features = _convolution_output_features(op)
        size = 1
        for s in right:
            size *= s
        return size // max(out_features, 1)
    if op.name == "stablehlo.dot":
        return int(left[-1])
    text = str(op.attributes["dot_dimension_numbers"])
    axes = re.search(r"lhs_contracting_dimensions = \[([\d, ]*)\]", text)
    size = 1
    for axis in axes.group(1).split(",") if axes else ():
        if axis.strip():
            size *= left[int(axis)]
    return int(size)


def _convolution_output_features(op: Any) -> int:
    from jaxlib.mlir.dialects import stablehlo

    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    shape = list(ir.RankedTensorType(op.operands[1].type).shape)
    return int(shape[numbers.kernel_output_feature_dimension])


def _recreate(op: Any, attributes: dict[str, Any], location: Any) -> None:
    with ir.InsertionPoint(op):
        new = ir.Operation.create(
            op.name,
            results=[r.type for r in op.results],
            operands=list(op.operands),
            attributes=attributes,
            loc=location,
        )
    op.results[0].replace_all_uses_with(new.results[0])
    op.erase()


def _attributes(op: Any) -> dict[str, Any]:
    names = [entry if isinstance(entry, str) else entry.name for entry in op.attributes]
    return {name: op.attributes[name] for name in names if name != "t2e.module"}


def tag_matmuls(module: Any) -> list[MatmulRecord]:
    """Mark every matmul by a location of its own; returns what each one is, in program order."""
    records: list[MatmulRecord] = []
    with module.context:
        for op in _operations(module.operation):
            if op.name not in _MATMULS:
                continue
            index = len(records)
            attributes = _attributes(op)
            records.append(
                {
                    "index": index,
                    "op": op.name.removeprefix("stablehlo."),
                    "module": _path_of(op),
                    "lhs": str(op.operands[0].type).removeprefix("tensor"),
                    "rhs": str(op.operands[1].type).removeprefix("tensor"),
                    "out": str(op.results[0].type).removeprefix("tensor"),
                    "elements": [_element(v) for v in op.operands],
                    "contraction": _contraction_size(op),
                    "precision": _precision_of(attributes),
                }
            )
            _recreate(op, attributes, ir.Location.name(f"{TAG}{index}"))
    return records


def _precision_of(attributes: dict[str, Any]) -> str:
    """The matmul's own setting: "default", "high" or "highest", or its algorithm."""
    if "algorithm" in attributes:
        return str(attributes["algorithm"])
    found = re.findall(r"DEFAULT|HIGHEST|HIGH", str(attributes.get("precision_config", "")))
    order = ("DEFAULT", "HIGH", "HIGHEST")
    return max(found, key=order.index, default="DEFAULT").lower()


def raise_precision(module: Any, precision: str) -> None:
    """Ask for ``precision`` on every float32 matmul that asks for nothing itself.

    That is what the frameworks' global settings do: an operation that was given a precision or an
    algorithm of its own keeps it.
    """
    if precision == "default":
        return
    with module.context:
        word = f"#stablehlo<precision {precision.upper()}>"
        config = ir.Attribute.parse(f"[{word}, {word}]")
        for op in _operations(module.operation):
            if op.name in _MATMULS and _precision_of(_attributes(op)) == "default":
                op.attributes["precision_config"] = config


def rewrite(module: Any, modes: Sequence[str]) -> None:
    """Compute each matmul as ``modes`` says, in the order of :func:`tag_matmuls`.

    - ``f32``, ``native``: as it is.
    - ``bf16``: operands rounded to bfloat16, products and sums in float32.
    - ``bf16x3``, ``bf16x6``: operands split into 2 or 3 bfloat16 parts, the 3 or 6 largest
      products added in float32, smallest first.
    """
    with module.context:
        matmuls = [op for op in _operations(module.operation) if op.name in _MATMULS]
        for op, mode in zip(matmuls, modes, strict=True):
            if mode in ("f32", "native"):
                continue
            parts = {"bf16": 1, "bf16x3": 2, "bf16x6": 3}[mode]
            with ir.InsertionPoint(op), ir.Location.unknown():
                result = _split_product(op, parts)
            op.results[0].replace_all_uses_with(result)
            op.erase()


def _split_product(op: Any, parts: int) -> Any:
    attributes = _attributes(op)

    def create(name: str, operands: Sequence[Any], extra: dict[str, Any], kind: Any) -> Any:
        new = ir.Operation.create(name, results=[kind], operands=list(operands), attributes=extra)
        return new.results[0]

    i32 = ir.IntegerType.get_signless(32)
    bfloat16 = {
        "exponent_bits": ir.IntegerAttr.get(i32, 8),
        "mantissa_bits": ir.IntegerAttr.get(i32, 7),
    }

    def split(value: Any) -> list[Any]:
        pieces = []
        for i in range(parts):
            piece = create("stablehlo.reduce_precision", [value], bfloat16, value.type)
            pieces.append(piece)
            if i + 1 < parts:
                value = create("stablehlo.subtract", [value, piece], {}, value.type)
        return pieces

    product: Callable[[Any, Any], Any] = lambda a, b: create(  # noqa: E731  # one expression
        op.name, [a, b], attributes, op.results[0].type
    )
    left, right = split(op.operands[0]), split(op.operands[1])
    pairs = [(i, j) for i in range(parts) for j in range(parts) if i + j < parts]
    total = None
    for i, j in sorted(pairs, key=sum, reverse=True):
        term = product(left[i], right[j])
        total = term if total is None else create("stablehlo.add", [total, term], {}, term.type)
    return total
