"""Optimizers that are equivariant under a network's gauges: DDCAdam, DDCMomentum, DDCMuon."""

from topograd.optim.conditioner import DDCMomentum, DDCMuon
from topograd.optim.ddc_adam import DDCAdam
from topograd.optim.discovery import Found, find_gauges
from topograd.optim.gauges import (
    CEShiftBias,
    CEShiftRowShift,
    ChainedReLURescale,
    Gauge,
    HeadShift,
    LNScale,
    ReLURescale,
)

__all__ = [
    "CEShiftBias",
    "CEShiftRowShift",
    "ChainedReLURescale",
    "DDCAdam",
    "DDCMomentum",
    "DDCMuon",
    "Found",
    "Gauge",
    "HeadShift",
    "LNScale",
    "ReLURescale",
    "find_gauges",
]
