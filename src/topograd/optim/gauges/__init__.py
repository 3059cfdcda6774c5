"""Gauges: symmetries of networks with their tensors, actions, invariants and checks."""

from topograd.optim.gauges.base import Gauge
from topograd.optim.gauges.homogeneous import ChainedReLURescale, LNScale, ReLURescale
from topograd.optim.gauges.translation import CEShiftBias, CEShiftRowShift, HeadShift

__all__ = [
    "CEShiftBias",
    "CEShiftRowShift",
    "ChainedReLURescale",
    "Gauge",
    "HeadShift",
    "LNScale",
    "ReLURescale",
]
