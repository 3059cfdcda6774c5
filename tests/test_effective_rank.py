import math

import pytest
import torch

from raising import refused
from topograd.effective_rank import effective_rank
from topograd.errors import GeometryError


def test_known_spectra() -> None:
    assert effective_rank(torch.ones(7)).item() == pytest.approx(7)
    halves = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert effective_rank(halves).item() == pytest.approx(math.exp(1.5 * math.log(2)))
    singular = torch.tensor([[2.0, 2.0, 2.0, 2.0], [7.0, 0, 0, 0], [0, 0, 0, 0], [1.0, 1.0, 0, 0]])
    assert effective_rank(singular).tolist() == pytest.approx([4, 1, 0, 2])
    assert effective_rank(1e9 * singular).tolist() == pytest.approx([4, 1, 0, 2])


@pytest.mark.parametrize("bad", [-0.1, float("nan")])
def test_negative_values_are_refused(bad: float) -> None:
    with refused(GeometryError, setting="spectrum"):
        effective_rank(torch.tensor([1.0, bad]))
