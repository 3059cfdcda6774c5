"""Bounded interfaces between regions: Jacobians, suffix scan, backward engines, costs, schedules, checks."""

from topograd.interfaces.analysis import analyse
from topograd.interfaces.causality import future_gradient
from topograd.interfaces.engines import Backward, backward
from topograd.interfaces.measure import choose
from topograd.interfaces.separator import check_separator
from topograd.nn.interface import SegmentInterface, add_interfaces

__all__ = [
    "Backward",
    "SegmentInterface",
    "add_interfaces",
    "analyse",
    "backward",
    "check_separator",
    "choose",
    "future_gradient",
]
