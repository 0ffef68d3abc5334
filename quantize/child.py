"""The process that runs ai-edge-quantizer: ``python child.py SOURCE [--remember]``, one request a line.

A process of its own, because the quantizer can take the whole process down, and one that stays,
because importing it and reading the file take as long as quantizing. It imports nothing of
tpu2edge. A request is a JSON object::

    {"target": PATH, "rules": [...], "ranges": {"index": PATH, "values": PATH} | null,
     "moments": FOLDER | null, "strict": …}

The answer is one line of JSON on the descriptor that was stdout (stdout itself becomes stderr,
where the library prints)::

    {"ok": true, "bytes": N, "rules": […],
     "deviations": [{"subgraph", "index", "op", "scope", "why", "instead"}]}
    {"ok": false, "stage": "load" | "rules" | "quantize", "type": …, "error": …, "deviations": […]}

Ops that the quantizer cannot do as the rules say (an odd width in blocks, say) get the rule before
that also fits them, or stay float, by further rules: the answer's ``rules`` hold these too, so that
they give the same file again. With ``strict`` such ops are an error.

With ``--remember`` the integers and scales of each weight are kept from one recipe to the next: a
recipe that differs in one op from those before costs a walk over the graph and the writing. The
files are the same to the byte.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from ai_edge_quantizer import (
    algorithm_manager,
    model_modifier,
    params_generator,
    qtyping,
    recipe_manager,
)
from ai_edge_quantizer.algorithms.uniform_quantize import gptq, uniform_quantize_tensor
from ai_edge_quantizer.algorithms.utils import common_utils
from ai_edge_quantizer.utils import tfl_flatbuffer_utils

# One pass finds all ops that fail by themselves; leaving these float can let others fail.
_PASSES = 8

_LARGE = 32 << 20

# 16-bit activations have steps to spare, and no zero point: with twice the range that was measured they
# lose 6 of some 90 dB, and samples that go further than those of the calibration are not clipped (the
# worst of 32 other samples: digits 37.0 to 46.6 dB, crepe tiny 34.1 to 41.1, O-net 23.9 to 28.2).
_HEADROOM_16 = 2.0

# Options of ops that run other graphs of the file, by which these are named.
_CALLED = {
    "WHILE": ("condSubgraphIndex", "bodySubgraphIndex"),
    "IF": ("thenSubgraphIndex", "elseSubgraphIndex"),
}

# They change what a layer reads by an op before it. ai-edge-quantizer 0.10 quantizes their weights by
# code of its own, which looks neither at compute_precision nor at min_weight_elements.
_SCALING = ("OSCAR", "HADAMARD_ROTATION", "DECOMPOSED_HADAMARD_ROTATION")

# Algorithm to what it needs to know of the tensor that an op reads.
_MOMENTS = {"GPTQ": "hessian", "OSCAR": "mu2"}


class Refused(Exception):
    """Some ops cannot be quantized, and the caller wants that to be an error."""


class Table(common_utils.TensorQuantParamsCache):  # type: ignore[misc]
    """Upstream's table of quantized weights, by buffer and config, kept for many recipes.

    Within one recipe a buffer has one algorithm; here several, so that it is a part of the key,
    with the place of the moments that it weighs errors by.
    """

    algorithm = ""

    def lookup(self, buffer_id: Any, quant_config: Any) -> Any:
        """What is known of a buffer, or None."""
        key: Any = (self.algorithm, buffer_id)
        return super().lookup(key, quant_config)

    def insert(self, buffer_id: Any, quant_config: Any, quant_params: Any) -> Any:
        """Keep it; gives it back."""
        key: Any = (self.algorithm, buffer_id)
        return super().insert(key, quant_config, quant_params)


class Source:
    """The float file, read once; its weights stay in the mapped file."""

    def __init__(self, path: str, *, remember: bool = False) -> None:
        self.remember = remember
        self.table = Table()
        content = tfl_flatbuffer_utils.get_model_content(path)
        self.model: Any = tfl_flatbuffer_utils.read_model(content)

    def quantize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry one request out; gives the answer."""
        stage = "rules"
        deviations: dict[tuple[int, int, str], dict[str, Any]] = {}
        tried: dict[tuple[int, int, str], list[Any]] = {}
        try:
            rules = list(request["rules"])
            _manager(rules)
            stage = "quantize"
            moments = Moments(request["moments"])
            # Not empty: ai-edge-quantizer refuses GPTQ without any statistics.
            ranges: dict[str, Any] = {name: {} for name in moments.files}
            if request["ranges"]:
                ranges = _read_ranges(request["ranges"])
                for end in self._called_ends(_manager(rules)):
                    deviations[_key(end)] = {**end, "instead": None}
                    regex = f"^{re.escape(end['scope'])}$"
                    kept = {"operation": end["op"], "algorithm_key": "no_quantize"}
                    rules.append({"regex": regex, **kept})
                if deviations and request["strict"]:
                    raise Refused
            for _ in range(_PASSES):
                manager = _manager(rules)
                params, failed = self._params(manager, ranges, moments)
                if not failed:
                    break
                if request["strict"]:
                    for op in failed:
                        deviations[_key(op)] = {**op, "instead": None}
                    raise Refused
                scopes: dict[str, list[str]] = {}
                for op in failed:
                    matching = _matching(manager, op)
                    tried.setdefault(_key(op), []).append(_kind_of(matching[-1]))
                    instead = _instead(matching, tried[_key(op)])
                    deviations.setdefault(_key(op), op)["instead"] = instead.get("op_config")
                    rule = json.dumps({"operation": op["op"], **instead})
                    scopes.setdefault(rule, []).append(re.escape(op["scope"]))
                for rule, names in scopes.items():
                    rules.append({"regex": f"^(?:{'|'.join(names)})$", **json.loads(rule)})
            else:
                raise RuntimeError(f"ops still fail after {_PASSES} passes")
            if not self.remember:
                self.table = Table()
            modifier = model_modifier.ModelModifier(self.model)
            _mend(modifier)
            if not self.remember:
                model = modifier.modify_model(params, serialize_to_path=request["target"])
            else:  # short-lived files: upstream's own way waits until they are on the disk
                model = modifier.modify_model(params, enable_progress_bar=False)
                with open(request["target"], "wb") as stream:  # noqa: PTH123
                    stream.write(model)
        except Exception as error:  # noqa: BLE001 - told to the parent in full
            answer = _told(error, stage)
            answer["deviations"] = list(deviations.values())
            return answer
        return {
            "ok": True,
            "bytes": len(model),
            "rules": rules,
            "deviations": list(deviations.values()),
        }

    def _params(
        self, manager: recipe_manager.RecipeManager, ranges: dict[str, Any], moments: Moments
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The quantization of each tensor, and the ops that failed and are left float in it."""
        generator = params_generator.ParamsGenerator(self.model)
        generator._tensor_quant_params_cache = self.table
        failed: list[dict[str, Any]] = []
        wide = _widened(ranges) if ranges is not None else None
        real = algorithm_manager.get_quantization_func

        def left_float(op_info: Any, graph_info: Any) -> Any:
            return generator._get_params_for_no_quant_op(
                op_info.subgraph_op_index, op_info.op, graph_info.subgraph_tensors
            )

        def guarded(algorithm: Any, op_key: Any, mode: Any) -> Any:
            function = real(algorithm, op_key, mode)

            def run(op_info: Any, graph_info: Any, **rest: Any) -> Any:
                activations = op_info.op_quant_config.activation_tensor_config
                precision = op_info.op_quant_config.compute_precision
                if wide is not None and activations is not None and activations.num_bits == 16:
                    rest["tensor_name_to_qsv"] = wide
                try:
                    name = key = str(getattr(algorithm, "value", algorithm))
                    if name in _SCALING and _is_small(op_info, graph_info):
                        return left_float(op_info, graph_info)
                    if name in _MOMENTS:
                        known = moments.added(rest["tensor_name_to_qsv"], name, op_info, graph_info)
                        rest["tensor_name_to_qsv"] = known
                        key += moments.folder
                    self.table.algorithm = key
                    found = function(op_info=op_info, graph_info=graph_info, **rest)
                    if name in _SCALING and precision == qtyping.ComputePrecision.FLOAT:
                        _dequantize_first(found)
                    return found
                except Exception as error:  # noqa: BLE001 - told to the parent in full
                    failed.append(self._failure(op_info, graph_info, error))
                    return left_float(op_info, graph_info)

            return run

        algorithm_manager.get_quantization_func = guarded
        try:
            params = generator.generate_quantization_parameters(
                manager, ranges, enable_progress_bar=False
            )
        finally:
            algorithm_manager.get_quantization_func = real
        return params, failed

    def _called_ends(self, manager: recipe_manager.RecipeManager) -> list[dict[str, Any]]:
        """Inputs and outputs of the graphs inside of loops and branches that rules would quantize.

        ai-edge-quantizer 0.10 does so, but leaves the tensors of the loop itself float, and LiteRT
        refuses the file.
        """
        found: list[dict[str, Any]] = []
        called = {
            number: name
            for graph in self.model.subgraphs
            for op in graph.operators
            for name, attributes in _CALLED.items()
            for number in (getattr(op.builtinOptions, attribute, -1) for attribute in attributes)
            if number >= 0
        }
        for number, name in sorted(called.items()):
            graph = self.model.subgraphs[number]
            ends: list[Any] = tfl_flatbuffer_utils.get_subgraph_input_output_operators(graph)
            for end in ends:
                scope = tfl_flatbuffer_utils.get_op_scope(end, graph.tensors)
                algorithm, _ = manager.get_quantization_configs(end.op_key, scope)
                kept = str(getattr(algorithm, "value", algorithm)) == "no_quantize"
                types = {graph.tensors[i].type for i in (*end.inputs, *end.outputs) if i >= 0}
                if kept or qtyping.TensorType.FLOAT32 not in types:
                    continue
                found.append(
                    {
                        "subgraph": number,
                        "index": -1,
                        "op": str(end.op_key.value),
                        "scope": scope,
                        "why": f"{name} hands floats to the graph inside it, and takes floats back",
                    }
                )
        return found

    def _failure(self, op_info: Any, graph_info: Any, error: Exception) -> dict[str, Any]:
        tensors = graph_info.subgraph_tensors
        subgraph = next(
            number for number, graph in enumerate(self.model.subgraphs) if graph.tensors is tensors
        )
        return {
            "subgraph": subgraph,
            "index": op_info.subgraph_op_index,
            "op": str(getattr(op_info.op_name, "value", op_info.op_name)),
            "scope": tfl_flatbuffer_utils.get_op_scope(op_info.op, tensors),
            "why": f"{type(error).__name__}: {error}",
        }


def _manager(rules: list[dict[str, Any]]) -> recipe_manager.RecipeManager:
    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(rules)
    return manager


def _matching(manager: recipe_manager.RecipeManager, op: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rules that the quantizer could use for an op; it uses the last."""
    found: list[dict[str, Any]] = []
    for rule in manager.get_quantization_recipe():
        if rule["operation"] not in ("*", op["op"]) or not re.search(rule["regex"], op["scope"]):
            continue
        if rule["algorithm_key"] != "no_quantize":
            config = qtyping.OpQuantizationConfig.from_dict(rule["op_config"])
            try:
                algorithm_manager.check_op_quantization_config(
                    rule["algorithm_key"], qtyping.TFLOperationName(op["op"]), config
                )
            except ValueError:
                continue
        found.append(rule)
    return found


def _key(op: Mapping[str, Any]) -> tuple[int, int, str]:
    return op["subgraph"], op["index"], op["op"]


def _kind_of(rule: Mapping[str, Any]) -> Any:
    return rule["algorithm_key"], rule.get("op_config")


def _instead(matching: list[dict[str, Any]], tried: list[Any]) -> dict[str, Any]:
    """What to do with an op that failed: the last rule that was not tried, or nothing."""
    for rule in reversed(matching):
        if rule["algorithm_key"] == "no_quantize":
            break
        if _kind_of(rule) not in tried:
            key = str(getattr(rule["algorithm_key"], "value", rule["algorithm_key"]))
            return {"algorithm_key": key, "op_config": rule["op_config"]}
    return {"algorithm_key": "no_quantize"}


def _mend(modifier: Any) -> None:
    """Make inserted QUANTIZE and DEQUANTIZE ops at the model's outputs leave other ops alone.

    The consumer of an output has the number -1, which ai-edge-quantizer 0.10 takes for an index: the
    last op of the graph is made to read the inserted op's result if it reads that output. It then
    reads floats and writes integers, and computes garbage. And an op inserted for other consumers
    of an output becomes the output. A signature follows an output to the inserted op only if that op
    has no other reader.
    """
    modifier._has_transform_before_output = _reaches_an_output
    registry = modifier._transformation_performer._transformation_registration
    for kind in (
        qtyping.QuantTransformation.ADD_QUANTIZE,
        qtyping.QuantTransformation.ADD_DEQUANTIZE,
    ):
        registry[kind] = _mended(registry[kind])


def _reaches_an_output(instructions: Mapping[str, Any], kind: Any) -> bool:
    return any(
        step.transformation == kind and -1 in step.consumers
        for tensor in instructions.values()
        for step in tensor.instructions
    )


def _mended(insert: Any) -> Any:
    def run(change: Any) -> Any:
        graph = change.subgraph
        if -1 not in change.consumers:
            outputs = list(graph.outputs)
            result = insert(change)
            graph.outputs = outputs
            return result
        nobody = qtyping.OperatorT()
        nobody.inputs, nobody.outputs = [], []
        graph.operators.append(nobody)
        result = insert(change)
        assert graph.operators.pop() is nobody
        return result

    return run


def _is_small(op_info: Any, graph_info: Any) -> bool:
    """Whether the rule is for larger weights."""
    weight = graph_info.subgraph_tensors[op_info.op.inputs[1]]
    return bool(math.prod(weight.shape) < op_info.op_quant_config.min_weight_elements)


def _dequantize_first(tensors: Any) -> None:
    """Make a layer that reads integer weights read floats, from a DEQUANTIZE.

    ai-edge-quantizer 0.10 has the same integers computed with, the activations quantized while it
    runs, where the rule says that weights are dequantized.
    """
    for tensor in tensors:
        for use in tensor.consumers or ():
            use.transformations[:] = [
                qtyping.QuantTransformation.ADD_DEQUANTIZE
                if step == qtyping.QuantTransformation.QUANTIZE_TENSOR
                else step
                for step in use.transformations
            ]


def _mend_large_tensors() -> None:
    """Quantize constants of three dimensions or more and over 32 MiB by slices of the longest one.

    ai-edge-quantizer 0.10 folds such a tensor to two dimensions, and its scales do not fit then.
    """
    real = uniform_quantize_tensor.uniform_quantize

    def by_slices(tensor: Any, params: Any, is_blockwise_quant: bool = False) -> Any:
        if tensor.ndim < 3 or tensor.nbytes <= _LARGE or is_blockwise_quant:
            return real(tensor, params, is_blockwise_quant)
        import numpy as np

        params = uniform_quantize_tensor.fix_quantization_params_rank(tensor, params)
        axis = int(np.argmax(tensor.shape))
        size = tensor.shape[axis]
        step = max(1, _LARGE * size // tensor.nbytes)
        parts = []
        for start in range(0, size, step):
            cut = (slice(None),) * axis + (slice(start, start + step),)
            scale, zero_point = (
                values[cut] if values.shape[axis] == size else values
                for values in (params.scale, params.zero_point)
            )
            part = dataclasses.replace(params, scale=scale, zero_point=zero_point)
            parts.append(real(tensor[cut], part))
        return np.concatenate(parts, axis)

    uniform_quantize_tensor.uniform_quantize = by_slices


def _mend_dequantize() -> None:
    """Take zero points from integers that have room for the difference.

    ai-edge-quantizer 0.10 takes an int8 from an int8: what is more than 127 steps away from the zero
    point comes back 256 steps off, and GPTQ makes up for an error that is not there.
    """
    real = uniform_quantize_tensor.uniform_dequantize

    def widened(tensor: Any, params: Any) -> Any:
        # No wider than needed: float32 scales times int16 are float32.
        wider = {"int8": "int16", "int16": "int32"}.get(tensor.dtype.name)
        return real(tensor if wider is None else tensor.astype(wider), params)

    uniform_quantize_tensor.uniform_dequantize = widened


def _read_ranges(files: Mapping[str, str]) -> dict[str, Any]:
    import numpy as np

    values = np.load(files["values"], mmap_mode="r")
    with open(files["index"], encoding="utf-8") as stream:  # noqa: PTH123
        index = json.load(stream)
    result: dict[str, Any] = {}
    for name, shape, low, high in index:
        size = int(np.prod(shape))
        result[name] = {
            "min": np.array(values[low : low + size]).reshape(shape),
            "max": np.array(values[high : high + size]).reshape(shape),
        }
    return result


def _widened(ranges: Mapping[str, Any]) -> dict[str, Any]:
    """The ranges for 16-bit activations."""
    return {
        name: {
            key: value * _HEADROOM_16 if key in ("min", "max") else value
            for key, value in one.items()
        }
        for name, one in ranges.items()
    }


class Statistics(dict[str, Any]):
    """What is known of one tensor; a Hessian is read when it is asked for, and not kept."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if key != "hessian":
            return value
        import numpy as np

        return np.load(value)


class Moments:
    """Moments of tensors, apart from their ranges.

    ai-edge-quantizer 0.10 keeps them in one table, and what it knows of a reshape's output it
    replaces by what it knows of the input where activations are static.
    """

    def __init__(self, folder: str | None) -> None:
        self.folder = folder or ""
        self.files: dict[str, dict[str, str]] = {}
        if folder:
            with open(os.path.join(folder, "index.json"), encoding="utf-8") as stream:  # noqa: PTH118, PTH123
                self.files = json.load(stream)

    def added(
        self, known: Mapping[str, Any], algorithm: str, op_info: Any, graph_info: Any
    ) -> dict[str, Any]:
        """What is known, with the moments of what an op reads.

        An op whose input was not measured is refused: ai-edge-quantizer would round it without a word.
        """
        import numpy as np

        key = _MOMENTS[algorithm]
        inputs = op_info.op.inputs
        tensor, weight = (graph_info.subgraph_tensors[index] for index in inputs[:2])
        name = tfl_flatbuffer_utils.get_tensor_name(tensor)
        file = self.files.get(name, {}).get(key)
        if file is None:
            raise ValueError(f"no sample computed '{name}', which {algorithm} weighs errors by")
        path = os.path.join(self.folder, file)  # noqa: PTH118
        width = np.load(path, mmap_mode="r").shape[0]
        if weight.shape[-1] != width:
            raise ValueError(
                f"'{name}' was measured for layers {width} wide, not {weight.shape[-1]}"
            )
        value = path if key == "hessian" else np.load(path)
        return {**known, name: Statistics({**known.get(name, {}), key: value})}


def _mend_gptq() -> None:
    """Give GPTQ the upper triangle U of H⁻¹ = Uᵀ U, by whose rows it makes up for errors.

    Its loop is that of E. Frantar et al., 2022, "GPTQ" (algorithm 1): the error of column q goes to
    those after it by U[q, q:] / U[q, q], which is what H⁻¹ has for it once the columns before q are
    fixed. ai-edge-quantizer 0.10 hands the loop H⁻¹ itself, which fits the first column only.
    """
    gptq._prepare_hessian_inverse = _upper_factor


def _upper_factor(hessian: Any, damp_factor: float = 0.01) -> Any:
    import numpy as np
    from scipy.linalg.lapack import dtrtri

    diagonal = np.diag(hessian)
    damped = np.where(diagonal, diagonal, 1.0).astype(np.float64)
    damped += damp_factor * np.mean(damped)
    # H = R Rᵀ with R upper: reversed, the Cholesky factor of H with rows and columns reversed.
    reverse = np.asarray(hessian, np.float64)[::-1, ::-1].copy()
    np.fill_diagonal(reverse, damped[::-1])
    upper = np.asfortranarray(np.linalg.cholesky(reverse)[::-1, ::-1])
    inverse, wrong = dtrtri(upper, lower=0, overwrite_c=1)
    if wrong:
        raise ValueError(f"the Hessian has no inverse (dtrtri {wrong})")
    return inverse.astype(np.float32)


def _told(error: Exception, stage: str) -> dict[str, Any]:
    return {"ok": False, "stage": stage, "type": type(error).__name__, "error": str(error)}


def main() -> None:
    """Answer requests until stdin ends."""
    _mend_large_tensors()
    _mend_dequantize()
    _mend_gptq()
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    source: Source | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if source is None:
                source = Source(sys.argv[1], remember="--remember" in sys.argv[2:])
        except Exception as error:  # noqa: BLE001 - told to the parent in full
            answer = _told(error, "load")
        else:
            answer = source.quantize(request)
        out.write(json.dumps(answer) + "\n")
    sys.stderr.flush()
    os._exit(0)  # all is written


if __name__ == "__main__":
    main()
