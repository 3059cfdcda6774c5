from __future__ import annotations

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError
from topograd.runs.device import usable_device


def test_a_device_that_is_there() -> None:
    assert usable_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    "name", ["abacus", "cuda:99", "cuda:-1", "cuda:x", "", "meta", "hpu", "mkldnn", "x" * 5000]
)
def test_a_device_that_cannot_be_used(name: str) -> None:
    """Torch says so by four types of errors, or not at all (meta)."""
    with refused(ConfigError, setting="device", given=name) as caught:
        usable_device(name)
    assert len(str(caught.value)) < 400
