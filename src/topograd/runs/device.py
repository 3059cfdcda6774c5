"""Devices that settings, flags or the environment name: one check for all of them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from topograd.errors import ConfigError

if TYPE_CHECKING:
    import torch


def usable_device(name: str) -> torch.device:
    """The device of a name, after a number went there and came back.

    A name that torch does not know, a device that is not there, and one without numbers (meta) are refused.
    """
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):  # of names that torch gave up: it refuses them next
            device = torch.device(name)
        torch.zeros(1, device=device).cpu()
    except (RuntimeError, AssertionError, ImportError) as error:  # torch imports a backend by its name
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"device {name[:80]!r} cannot be used ({reason[:200]})",
            setting="device",
            given=name,
            remedy="try 'cpu'",
        ) from None
    return device
