"""Field dynamics of ReLU networks: activation and conjugate fields, tangent kernels by layer, exact runs."""

from topograd.fields.field_state import State, state_of
from topograd.fields.history import evolve, hidden
from topograd.fields.kernel import Kernel, kernel, kernel_of
from topograd.fields.network import weights_of
from topograd.fields.simulation import Simulation, Trajectory, simulate
from topograd.fields.staged import StagedKernel, staged_kernel
from topograd.fields.transport import conjugate_change, metric, pullback

__all__ = [
    "Kernel",
    "Simulation",
    "StagedKernel",
    "State",
    "Trajectory",
    "conjugate_change",
    "evolve",
    "hidden",
    "kernel",
    "kernel_of",
    "metric",
    "pullback",
    "simulate",
    "staged_kernel",
    "state_of",
    "weights_of",
]
