"""Rewrites of the traced program before it is lowered: one file a kind, one row a rewrite.

Each rewrite takes the program as torch.export gave it (its graph is a copy of our own), changes it
in place and gives the number of places; a Note says so. A rewrite gives the same numbers as what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch.export import ExportedProgram

from tpu2edge.export.rewrites import fold_batch_norm
from tpu2edge.types import Note

__all__ = ["REWRITES", "Rewrite", "apply_rewrites"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """One kind of change, with the reason it is needed."""

    name: str
    why: str
    apply: Callable[[ExportedProgram], int]  # changes in place; how many places


REWRITES: tuple[Rewrite, ...] = (
    Rewrite(
        name="fold-batch-norm",
        why="large constants are handed to the converter by reference and not folded there: a "
        "ResNet-50 would keep its 53 multiplications and run at half the speed",
        apply=fold_batch_norm.apply,
    ),
)


def apply_rewrites(program: ExportedProgram, notes: list[Note]) -> ExportedProgram:
    """``program`` after all rewrites, in the table's order; what was done is added to ``notes``."""
    for rewrite in REWRITES:
        count = rewrite.apply(program)
        if count:
            notes.append(
                Note(code=f"rewrite-{rewrite.name}", text=f"{rewrite.name}: {count} places")
            )
    return program
