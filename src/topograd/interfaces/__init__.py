"""Bounded interfaces between regions: Jacobians, suffix scan, backward engines, checks.

A name is imported when it is first used: settings need no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topograd.interfaces.analysis import analyse
    from topograd.interfaces.engines import Hybrid, Scan
    from topograd.nn.config import SegmentInterface
    from topograd.nn.interface import add_interfaces
else:
    _HOME = {
        "Hybrid": "interfaces.engines",
        "Scan": "interfaces.engines",
        "SegmentInterface": "nn.config",
        "add_interfaces": "nn.interface",
        "analyse": "interfaces.analysis",
    }

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"topograd.{_HOME[name]}"), name)
        globals()[name] = value
        return value


__all__ = [
    "Hybrid",
    "Scan",
    "SegmentInterface",
    "add_interfaces",
    "analyse",
]


def __dir__() -> list[str]:
    return __all__
