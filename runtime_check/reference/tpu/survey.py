"""What each TPU generation would make of a program: whether it compiles, and in what precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpu2edge.errors import DeviceError
from tpu2edge.runtime_check.reference.tpu.compile import compile_program, default_cache
from tpu2edge.runtime_check.reference.tpu.plan import PrecisionPlan, plan_from_compiled
from tpu2edge.runtime_check.reference.tpu.topologies import TOPOLOGIES, topology_named
from tpu2edge.types import Progress, StableHlo, no_progress

__all__ = ["TopologyReport", "TpuReport", "report"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TopologyReport:
    """One generation's part: figures when it compiles, else the reason in words."""

    generation: str
    topology: str
    reason: str | None = None  # why it does not compile, or why the plan is not known
    plan: PrecisionPlan | None = None
    flops: float | None = None
    memory: Mapping[str, int] | None = None  # bytes: arguments, outputs, temporary, code
    compile_s: float | None = None

    @property
    def compiles(self) -> bool:
        """Whether the TPU compiler takes the program."""
        return self.flops is not None

    @property
    def hbm_bytes(self) -> int | None:
        """Device memory in all; None when it does not compile."""
        return None if self.memory is None else sum(self.memory.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data; matmuls are counted and grouped by module, not listed."""
        data: dict[str, Any] = {
            "generation": self.generation,
            "topology": self.topology,
            "compiles": self.compiles,
            "reason": self.reason,
        }
        if self.compiles:
            data |= {
                "flops": self.flops,
                "memory": dict(self.memory or {}),
                "compile_s": self.compile_s,
            }
        if self.plan is not None:
            data |= {
                "matmuls": self.plan.counts(),
                "modules": {m: list(names) for m, names in self.plan.modules_by_mode().items()},
            }
        return data


@dataclass(frozen=True, kw_only=True, slots=True)
class TpuReport:
    """One program on several generations, at one precision setting."""

    precision: str
    route: str
    libtpu: str | None
    topologies: tuple[TopologyReport, ...]

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Generations that compute every matmul in the same precision, together."""
        found: dict[tuple[str, ...], list[str]] = {}
        for one in self.topologies:
            if one.plan is not None:
                found.setdefault(one.plan.modes, []).append(one.generation)
        return tuple(tuple(names) for names in found.values())

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "precision": self.precision,
            "route": self.route,
            "libtpu": self.libtpu,
            "same_precision": [list(names) for names in self.groups],
            "topologies": [one.to_json() for one in self.topologies],
        }


def report(
    program: StableHlo,
    generations: Sequence[str] = tuple(TOPOLOGIES),
    *,
    precision: str = "default",
    timeout_s: float = 600.0,
    cache: Path | bool | None = True,
    progress: Progress = no_progress,
) -> TpuReport:
    """``program`` compiled for each of ``generations``; a refusal is a result, not an error."""
    topologies = [topology_named(name) for name in generations]
    folder = default_cache() if cache is True else (cache or None)
    results, libtpu = [], None
    for i, topology in enumerate(topologies):
        progress(f"compile for TPU {topology.generation}", i, len(topologies))
        try:
            compiled = compile_program(
                program, topology, precision=precision, timeout_s=timeout_s, cache=folder
            )
        except DeviceError as exc:
            results.append(
                TopologyReport(
                    generation=topology.generation,
                    topology=topology.libtpu_name,
                    reason=exc.what,
                )
            )
            continue
        libtpu = compiled.libtpu
        plan, reason = None, None
        try:
            plan = plan_from_compiled(compiled)
        except DeviceError as exc:
            reason = exc.what
        results.append(
            TopologyReport(
                generation=topology.generation,
                topology=topology.libtpu_name,
                reason=reason,
                plan=plan,
                flops=compiled.flops,
                memory=compiled.memory,
                compile_s=compiled.seconds,
            )
        )
    return TpuReport(
        precision=precision, route=program.route, libtpu=libtpu, topologies=tuple(results)
    )
