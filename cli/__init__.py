"""The command ``tpu2edge``: words in, words out; the work is the library's.

Importing this package and printing help loads no torch, jax, LiteRT or NumPy.
"""

from __future__ import annotations

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit status (DESIGN: 0, 1, 2, 3, 4, 70 or 130)."""
    from tpu2edge.cli.app import run

    return run(argv)
