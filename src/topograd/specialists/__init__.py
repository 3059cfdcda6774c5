"""Specialists: stages added to a frozen base, each a small folder of its own.

Names are imported when they are first used: the settings need no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from topograd.specialists.attach import new_specialist, open_specialist
    from topograd.specialists.finetune import FineTuning
    from topograd.specialists.model import SpecialistPool
    from topograd.specialists.preservation import Preservation
    from topograd.specialists.settings import FineTune
else:
    _HOME = {
        "FineTune": "settings",
        "FineTuning": "finetune",
        "Preservation": "preservation",
        "SpecialistPool": "model",
        "new_specialist": "attach",
        "open_specialist": "attach",
    }

    def __getattr__(name: str) -> object:
        import importlib

        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


__all__ = [
    "FineTune",
    "FineTuning",
    "Preservation",
    "SpecialistPool",
    "new_specialist",
    "open_specialist",
]
