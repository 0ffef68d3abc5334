"""The process that runs ai-edge-quantizer: ``python child.py SOURCE [--remember]``, one request a line.

A process of its own, because the quantizer can take the whole process down, and one that stays,
because importing it and reading the file take as long as quantizing. It imports nothing of
tpu2edge. A request is a JSON object::

    {"target": PATH, "rules": [...], "ranges": {"index": PATH, "values": PATH} | null, "strict": …}

The answer is one line of JSON on the descriptor that was stdout (stdout itself becomes stderr,
where the library prints)::

    {"ok": true, "bytes": N, "left_float": [{"subgraph", "index", "op", "scope", "why"}], "rules": …}
    {"ok": false, "stage": "load" | "rules" | "quantize", "type": …, "error": …, "left_float": […]}

Ops that the quantizer cannot do (an odd width in blocks, say) are left float by further rules,
which the answer's ``rules`` hold; with ``strict`` they are told as an error instead.

With ``--remember`` the integers and scales of each weight are kept from one recipe to the next: a
recipe that differs in one op from those before costs a walk over the graph and the writing. The
files are the same to the byte.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from ai_edge_quantizer import (
    algorithm_manager,
    model_modifier,
    params_generator,
    recipe_manager,
)
from ai_edge_quantizer.algorithms.utils import common_utils
from ai_edge_quantizer.utils import tfl_flatbuffer_utils

# One pass finds all ops that fail by themselves; leaving these float can let others fail.
_PASSES = 8


class Refused(Exception):
    """Some ops cannot be quantized, and the caller wants that to be an error."""


class Table(common_utils.TensorQuantParamsCache):  # type: ignore[misc]
    """Upstream's table of quantized weights, by buffer and config, kept for many recipes.

    Within one recipe a buffer has one algorithm; here several, so that it is a part of the key.
    """

    algorithm = ""

    def lookup(self, buffer_id: Any, quant_config: Any) -> Any:
        """What is known of a buffer, or None."""
        return super().lookup((self.algorithm, buffer_id), quant_config)

    def insert(self, buffer_id: Any, quant_config: Any, quant_params: Any) -> Any:
        """Keep it; gives it back."""
        return super().insert((self.algorithm, buffer_id), quant_config, quant_params)


class Source:
    """The float file, read once; its weights stay in the mapped file."""

    def __init__(self, path: str, *, remember: bool = False) -> None:
        self.table = Table() if remember else None
        self.model = tfl_flatbuffer_utils.read_model(tfl_flatbuffer_utils.get_model_content(path))

    def quantize(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Carry one request out; gives the answer."""
        stage = "rules"
        left: list[dict[str, Any]] = []
        try:
            rules = list(request["rules"])
            self._manager(rules)
            stage = "quantize"
            ranges = _read_ranges(request["ranges"]) if request["ranges"] else None
            for _ in range(_PASSES):
                manager = self._manager(rules)
                params, failed = self._params(manager, ranges)
                if not failed:
                    break
                left += failed
                if request["strict"]:
                    raise Refused
                rules += _rules_to_leave(failed)
            else:
                raise RuntimeError(f"ops still fail after {_PASSES} passes")
            model = model_modifier.ModelModifier(self.model).modify_model(
                params, serialize_to_path=request["target"]
            )
        except Exception as error:  # noqa: BLE001 - told to the parent in full
            answer = _told(error, stage)
            answer["left_float"] = left
            return answer
        return {"ok": True, "bytes": len(model), "left_float": left, "rules": rules}

    def _manager(self, rules: list[dict[str, Any]]) -> recipe_manager.RecipeManager:
        manager = recipe_manager.RecipeManager()
        manager.load_quantization_recipe(rules)
        return manager

    def _params(
        self, manager: recipe_manager.RecipeManager, ranges: dict[str, Any] | None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The quantization of each tensor, and the ops that failed and are left float in it."""
        generator = params_generator.ParamsGenerator(self.model)
        if self.table is not None:
            generator._tensor_quant_params_cache = self.table
        failed: list[dict[str, Any]] = []
        real = algorithm_manager.get_quantization_func

        def guarded(algorithm: Any, op_key: Any, mode: Any) -> Any:
            function = real(algorithm, op_key, mode)

            def run(op_info: Any, graph_info: Any, **rest: Any) -> Any:
                if self.table is not None:
                    self.table.algorithm = str(algorithm)
                try:
                    return function(op_info=op_info, graph_info=graph_info, **rest)
                except Exception as error:  # noqa: BLE001 - told to the parent in full
                    failed.append(self._failure(op_info, graph_info, error))
                    return generator._get_params_for_no_quant_op(
                        op_info.subgraph_op_index, op_info.op, graph_info.subgraph_tensors
                    )

            return run

        algorithm_manager.get_quantization_func = guarded
        try:
            params = generator.generate_quantization_parameters(
                manager, ranges, enable_progress_bar=False
            )
        finally:
            algorithm_manager.get_quantization_func = real
        return params, failed

    def _failure(self, op_info: Any, graph_info: Any, error: Exception) -> dict[str, Any]:
        tensors = graph_info.subgraph_tensors
        subgraph = next(
            number
            for number, graph in enumerate(self.model.subgraphs)
            if graph.tensors is tensors
        )
        return {
            "subgraph": subgraph,
            "index": op_info.subgraph_op_index,
            "op": str(getattr(op_info.op_name, "value", op_info.op_name)),
            "scope": tfl_flatbuffer_utils.get_op_scope(op_info.op, tensors),
            "why": f"{type(error).__name__}: {error}",
        }


def _rules_to_leave(failed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rules that leave these ops float: one for each kind of op."""
    scopes: dict[str, list[str]] = {}
    for op in failed:
        scopes.setdefault(op["op"], []).append(re.escape(op["scope"]))
    made: list[dict[str, Any]] = []
    for op, names in scopes.items():
        regex = f"^(?:{'|'.join(names)})$"
        made.append({"regex": regex, "operation": op, "algorithm_key": "no_quantize"})
    return made


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


def _told(error: Exception, stage: str) -> dict[str, Any]:
    return {"ok": False, "stage": stage, "type": type(error).__name__, "error": str(error)}


def main() -> None:
    """Answer requests until stdin ends."""
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
