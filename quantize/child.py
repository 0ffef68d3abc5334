"""The process that runs ai-edge-quantizer: ``python child.py SOURCE TARGET RECIPE``.

A process of its own, because the quantizer holds several copies of the model and its native parts
can end the process. Says its result as one JSON line on the descriptor it was given for output.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    """Quantize as the arguments say, and tell the result in one line."""
    source, target, name, upstream = sys.argv[1:5]
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints to stdout
    try:
        from ai_edge_quantizer import algorithm_manager, qtyping, quantizer, recipe

        if upstream:
            worker = quantizer.Quantizer(source, getattr(recipe, upstream)())
        else:  # float16: weights cast, a DEQUANTIZE before each use
            worker = quantizer.Quantizer(source)
            worker.update_quantization_recipe(
                regex=".*",
                operation_name=qtyping.TFLOperationName.ALL_SUPPORTED,
                op_config=qtyping.OpQuantizationConfig(
                    weight_tensor_config=qtyping.TensorQuantizationConfig(
                        num_bits=16, dtype=qtyping.TensorDataType.FLOAT
                    ),
                    compute_precision=qtyping.ComputePrecision.FLOAT,
                    explicit_dequantize=True,
                ),
                algorithm_key=algorithm_manager.AlgorithmName.FLOAT_CASTING,
            )
        if worker.need_calibration:
            raise ValueError(f"recipe {name} needs calibration")
        model = bytes(worker.quantize().quantized_model or b"")
        with open(target, "wb") as stream:  # noqa: PTH123
            stream.write(model)
        answer: dict[str, object] = {"ok": True, "bytes": len(model)}
    except Exception as error:  # noqa: BLE001 - told to the parent in full
        answer = {"ok": False, "type": type(error).__name__, "error": str(error)}
    out.write(json.dumps(answer) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
