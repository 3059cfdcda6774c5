"""Field dynamics of ReLU networks: activation and conjugate fields, tangent kernels by layer, exact runs."""

from topograd.fields.field_state import State, state_of
from topograd.fields.history import evolve, hidden
from topograd.fields.kernel import Kernel, kernel, kernel_of
from topograd.fields.network import weights_of
from topograd.fields.simulation import Simulation, Trajectory, simulate
from topograd.fields.staged import StagedKernel, staged_kernel

__all__ = [
    "Kernel",
    "Simulation",
    "StagedKernel",
    "State",
    "Trajectory",
    "evolve",
    "hidden",
    "kernel",
    "kernel_of",
    "simulate",
    "staged_kernel",
    "state_of",
    "weights_of",
]
