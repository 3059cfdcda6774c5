"""Bounded interfaces between regions: Jacobians, the suffix scan, backward engines, costs and schedules."""

from topograd.interfaces.engines import Backward, backward
from topograd.nn.interface import SegmentInterface, add_interfaces

__all__ = ["Backward", "SegmentInterface", "add_interfaces", "backward"]
