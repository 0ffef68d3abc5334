"""References: samples with the outputs that are trusted, written once and replayed anywhere."""

from tpu2edge.runtime_check.reference.store import Reference, ReferenceWriter

__all__ = ["Reference", "ReferenceWriter"]
