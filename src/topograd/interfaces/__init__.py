"""Bounded interfaces between regions: Jacobians, suffix scan, backward engines, timelines, checks.

A name is imported when it is first used: settings and cost models need no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topograd.interfaces.analysis import analyse
    from topograd.interfaces.causality import future_gradient
    from topograd.interfaces.engines import Backward, backward, region_step
    from topograd.interfaces.measure import choose
    from topograd.nn.config import SegmentInterface
    from topograd.nn.interface import add_interfaces
else:
    _HOME = {
        "Backward": "interfaces.engines",
        "SegmentInterface": "nn.config",
        "add_interfaces": "nn.interface",
        "analyse": "interfaces.analysis",
        "backward": "interfaces.engines",
        "choose": "interfaces.measure",
        "future_gradient": "interfaces.causality",
        "region_step": "interfaces.engines",
    }

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"topograd.{_HOME[name]}"), name)
        globals()[name] = value
        return value


__all__ = [
    "Backward",
    "SegmentInterface",
    "add_interfaces",
    "analyse",
    "backward",
    "choose",
    "future_gradient",
    "region_step",
]


def __dir__() -> list[str]:
    return __all__
