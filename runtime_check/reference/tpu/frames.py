"""Messages between this process and its child: a JSON header and raw arrays after it.

One message: the header's length (8 bytes, little endian), the header (JSON, with the list of the
arrays' dtypes and shapes), and each array's bytes. NumPy only, so that both sides start fast.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from tpu2edge.types import Array

__all__ = ["receive", "send"]


def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # noqa: F401  # comes with jax; makes the dtype known to NumPy
    return np.dtype(name)


def send(
    stream: BinaryIO,
    header: Mapping[str, Any],
    arrays: Iterable[Array] = (),
    layout: Sequence[tuple[str, Sequence[int]]] | None = None,
) -> None:
    """Write one message; with ``layout`` given, ``arrays`` are fetched one by one as they go."""
    if layout is None:
        arrays = [np.asarray(a) for a in arrays]
        layout = [(a.dtype.name, a.shape) for a in arrays]
    head = json.dumps({**header, "arrays": [[d, list(s)] for d, s in layout]}).encode()
    stream.write(struct.pack("<Q", len(head)) + head)
    for array, (dtype, shape) in zip(arrays, layout, strict=True):
        if array.dtype.name != dtype or array.shape != tuple(shape):
            raise ValueError(f"array is {array.dtype}{array.shape}, announced {dtype}{shape}")
        if array.size:
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    stream.flush()


def receive(stream: BinaryIO) -> tuple[dict[str, Any], list[Array]]:
    """Read one message; EOFError when the other side is gone."""
    (length,) = struct.unpack("<Q", _exactly(stream, 8))
    header: dict[str, Any] = json.loads(_exactly(stream, length))
    arrays: list[Array] = []
    for name, shape in header.pop("arrays"):
        array = np.empty(tuple(shape), _dtype(name))
        if array.size:
            view = memoryview(array.reshape(-1).view(np.uint8).data)
            while view:
                count = stream.readinto(view)  # type: ignore[attr-defined]
                if not count:
                    raise EOFError("the other process closed the stream inside an array")
                view = view[count:]
        arrays.append(array)
    return header, arrays


def _exactly(stream: BinaryIO, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = stream.read(count - len(data))
        if not more:
            raise EOFError("the other process closed the stream")
        data += more
    return bytes(data)
