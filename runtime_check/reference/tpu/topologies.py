"""The TPU generations that libtpu compiles for, as data."""

from __future__ import annotations

from dataclasses import dataclass

from tpu2edge.errors import OptionError

__all__ = ["TOPOLOGIES", "Topology", "topology_named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """One TPU generation, with the smallest topology that libtpu 0.0.52 accepts for it."""

    generation: str
    libtpu_name: str
    also: tuple[str, ...] = ()  # other names people use for the generation


#: By generation. Names that libtpu refuses although they are in use elsewhere stand in ``also``.
TOPOLOGIES: dict[str, Topology] = {
    t.generation: t
    for t in (
        Topology(generation="v2", libtpu_name="v2:2x2"),
        Topology(generation="v3", libtpu_name="v3:2x2"),
        Topology(generation="v4", libtpu_name="v4:2x2x1"),
        Topology(generation="v5e", libtpu_name="v5e:1x1", also=("v5litepod", "v5lite")),
        Topology(generation="v5p", libtpu_name="v5p:1x1x1", also=("v5",)),
        Topology(generation="v6e", libtpu_name="v6e:1x1", also=("trillium",)),
        Topology(generation="tpu7x", libtpu_name="tpu7x:2x2x1", also=("v7x", "ironwood")),
    )
}


def topology_named(name: str) -> Topology:
    """The topology of the generation ``name``; OptionError listing the known ones otherwise."""
    for topology in TOPOLOGIES.values():
        if name == topology.generation or name in topology.also:
            return topology
    raise OptionError(f"no TPU generation {name!r}", do=f"take one of {', '.join(TOPOLOGIES)}")
