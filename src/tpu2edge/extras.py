"""What an installation without an extra lacks, told before any work is done.

``pip install tpu2edge`` brings what runs and checks files; making them needs torch and the converter,
which the extra ``export`` brings.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from tpu2edge.errors import DeviceError

__all__ = ["EXPORT_MODULES", "need_modules"]

#: What `tpu2edge export` imports, sooner or later, of the extra ``export``.
EXPORT_MODULES = ("torch", "litert_torch", "ai_edge_quantizer", "jax")


def need_modules(
    job: str, modules: Sequence[str] = EXPORT_MODULES, *, extra: str = "export"
) -> None:
    """Nothing, when all ``modules`` can be imported; they are looked up, not imported.

    Args:
        job: who needs them, for the message.
        modules: top-level names.
        extra: the extra of tpu2edge that brings them.

    Raises:
        DeviceError: some are not installed; the message names them and the extra.
    """
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise DeviceError(
            f"{job} needs {', '.join(missing)}, not installed here",
            do=f"pip install 'tpu2edge[{extra}]', or in a clone: pip install -c constraints.txt -e "
            f"'.[{extra}]'",
            step="install",
        )
