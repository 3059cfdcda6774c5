"""Learning as a dynamics of fields: states, kernels, transport, runs without weights, staged networks."""

from topograd.fields.field_state import State, state_of
from topograd.fields.first_order import Change, first_order
from topograd.fields.history import evolve, hidden
from topograd.fields.kernel import Kernel, kernel, kernel_of
from topograd.fields.network import weights_of
from topograd.fields.prediction import frozen, relinearised
from topograd.fields.simulation import Simulation, Trajectory, simulate
from topograd.fields.staged import StagedKernel, staged_kernel
from topograd.fields.transport import conjugate_change, metric, pullback

__all__ = [
    "Change",
    "Kernel",
    "Simulation",
    "StagedKernel",
    "State",
    "Trajectory",
    "conjugate_change",
    "evolve",
    "first_order",
    "frozen",
    "hidden",
    "kernel",
    "kernel_of",
    "metric",
    "pullback",
    "relinearised",
    "simulate",
    "staged_kernel",
    "state_of",
    "weights_of",
]
