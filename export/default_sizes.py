"""Writes into a ``.tflite`` the sizes that its dynamic inputs have before they are set.

The converter writes 1, and a runtime that loads the file lays it out for that at once: a
convolution of three rows over one row is refused before anyone can say how many there are. The
smallest size that the signature allows is right instead.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tpu2edge.types import Dim, Signature

__all__ = ["write_smallest_sizes"]

_SHAPE = 4  # vtable offset of Tensor.shape: schema.fbs of LiteRT, first field of the table


def write_smallest_sizes(path: Path, signatures: Sequence[Signature]) -> int:
    """Change the file in place; gives the number of sizes that were not 1."""
    smallest = {
        (signature.name, spec.name): spec.shape
        for signature in signatures
        for spec in signature.inputs
        if any(isinstance(size, Dim) and size.min > 1 for size in spec.shape)
    }
    if not smallest:
        return 0
    from ai_edge_litert import schema_py_generated as schema

    count = 0
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        model: Any = schema.Model.GetRootAs(memory, 0)
        entry = graph = mapped = table = None
        for index in range(model.SignatureDefsLength()):
            entry = model.SignatureDefs(index)
            graph = model.Subgraphs(entry.SubgraphIndex())
            for position in range(entry.InputsLength()):
                mapped = entry.Inputs(position)
                key = (entry.SignatureKey().decode(), mapped.Name().decode())
                table = graph.Tensors(mapped.TensorIndex())._tab
                start = table.Vector(table.Offset(_SHAPE))
                for axis, size in enumerate(smallest.get(key, ())):
                    if isinstance(size, Dim) and size.min > 1:
                        struct.pack_into("<i", memory, start + 4 * axis, size.min)
                        count += 1
        del model, entry, graph, mapped, table
    return count
