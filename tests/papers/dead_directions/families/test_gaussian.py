"""N(t^k, 1): the closed forms against integrals of their definitions."""

import pytest
import torch

from papers.dead_directions.families.gaussian import Gaussian
from papers.dead_directions.quadrature import REACH, normal_rule
from raising import refused
from topograd.errors import GeometryError


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("t", [0.3, 1.2])
def test_closed_forms_are_the_integrals(k: int, t: float) -> None:
    x, weights = normal_rule(-REACH, REACH + 4, torch.device("cpu"))
    point = torch.tensor(t, dtype=torch.float64, requires_grad=True)
    ratio = (x - point**k).square() / 2 - x.square() / 2  # log p_0 / p_t
    at = point.detach()[None]
    assert Gaussian(k).kl(at).item() == pytest.approx(float(weights @ ratio.detach()), rel=1e-12)
    (score,) = torch.autograd.functional.jvp(lambda s: -((x - s**k) ** 2) / 2, at, torch.ones(1).double())[1:]
    density = weights * torch.exp(-ratio.detach())
    assert Gaussian(k).fisher(at).item() == pytest.approx(float(density @ score**2), rel=1e-12)


def test_an_order_below_1_is_refused() -> None:
    with refused(GeometryError, setting="order", given=0):
        Gaussian(0)
