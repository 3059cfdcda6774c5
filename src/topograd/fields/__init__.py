"""Field dynamics of ReLU networks: activation and conjugate fields, tangent kernels by layer."""

from topograd.fields.field_state import State, state_of
from topograd.fields.kernel import Kernel, kernel, kernel_of
from topograd.fields.network import weights_of

__all__ = ["Kernel", "State", "kernel", "kernel_of", "state_of", "weights_of"]
