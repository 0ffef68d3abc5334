"""A TPU's numerics without a TPU: its compiler decides each matmul's precision, the CPU computes.

``predict`` gives outputs, ``report`` what each generation would do. Neither imports JAX here; that
happens in child processes.
"""

from tpu2edge.runtime_check.reference.tpu.compile import (
    PRECISIONS,
    Compiled,
    compile_program,
    libtpu_build,
    libtpu_version,
)
from tpu2edge.runtime_check.reference.tpu.emulate import NOT_MODELLED, Prediction, predict
from tpu2edge.runtime_check.reference.tpu.plan import Matmul, PrecisionPlan, plan_from_compiled
from tpu2edge.runtime_check.reference.tpu.survey import TopologyReport, TpuReport, report
from tpu2edge.runtime_check.reference.tpu.topologies import TOPOLOGIES, Topology, topology_named

__all__ = [
    "NOT_MODELLED",
    "PRECISIONS",
    "TOPOLOGIES",
    "Compiled",
    "Matmul",
    "PrecisionPlan",
    "Prediction",
    "Topology",
    "TopologyReport",
    "TpuReport",
    "compile_program",
    "libtpu_build",
    "libtpu_version",
    "plan_from_compiled",
    "predict",
    "report",
    "topology_named",
]
