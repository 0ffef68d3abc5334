"""What one would write without tpu2edge: convert, export, one run. ``bare.py MODEL FILE``."""

from __future__ import annotations

import sys

import litert_torch
import models
import numpy as np
from ai_edge_litert.interpreter import Interpreter

module, args = getattr(models, sys.argv[1])()
litert_torch.convert(module, args).export(sys.argv[2])
interpreter = Interpreter(model_path=sys.argv[2])
runner = interpreter.get_signature_runner()
outputs = runner(
    **{
        f"args_{i}": arg.numpy().astype(np.dtype(d["dtype"]))
        for (i, arg), d in zip(enumerate(args), runner.get_input_details().values(), strict=True)
    }
)
print({name: value.shape for name, value in outputs.items()})
