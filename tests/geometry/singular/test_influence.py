"""Loss kernel and influence: loops, a closed form, and the draws of a chain."""

import math

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry import learning_coefficient
from topograd.geometry.singular.influence import bayesian_influence, loss_kernel
from topograd.geometry.singular.langevin import Langevin


def test_the_kernel_is_the_correlation() -> None:
    losses = torch.randn(50, 6, generator=torch.Generator().manual_seed(0)).double()
    losses[:, 5] = 2.0
    kernel = loss_kernel(losses)
    torch.testing.assert_close(kernel[:5, :5], torch.corrcoef(losses[:, :5].T))
    assert not kernel[5].any()
    torch.testing.assert_close(loss_kernel(losses, [3, 1]), torch.corrcoef(losses[:, [3, 1]].T))


def test_influence_is_the_derivative_by_the_weight_of_a_term() -> None:
    """One weight w, losses ½(w - y_i)²: the posterior is normal, so that E[ℓ_j] is known."""
    y = torch.tensor([0.0, 1.0, 3.0]).double()
    beta = 0.7

    def mean_loss(weights: torch.Tensor, j: int) -> float:
        precision = beta * float(weights.sum())
        mean = float((weights * y).sum() / weights.sum())
        return ((mean - float(y[j])) ** 2 + 1 / precision) / 2

    generator = torch.Generator().manual_seed(0)
    draws = y.mean() + torch.randn(400_000, generator=generator).double() / math.sqrt(3 * beta)
    losses = (draws[:, None] - y).square() / 2
    found = bayesian_influence(losses, beta)
    h = 1e-4
    for i in range(3):
        for j in range(3):
            up, down = (
                torch.ones(3).double().index_add(0, torch.tensor([i]), torch.tensor([s]).double())
                for s in (h, -h)
            )
            slope = (mean_loss(up, j) - mean_loss(down, j)) / (2 * h)
            assert float(found[i, j]) == pytest.approx(slope, abs=0.02)
    torch.testing.assert_close(bayesian_influence(losses, beta, [0], [2]), found[:1, 2:])


def test_the_chains_of_the_coefficient_give_both() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    x = torch.randn(40, 2).double()
    x[1] = x[0]
    y = model(x).detach() + torch.randn(40, 1).double()
    y[1] = y[0]
    found = learning_coefficient(
        model, "squared-error", (x, y), Langevin(burn_in=40, draws=30, thin=2, chains=2)
    )
    assert found.losses is not None
    assert found.losses.shape == (60, 40)
    kernel = loss_kernel(found.losses)
    assert float(kernel[0, 1]) == pytest.approx(1.0), "twins are treated alike"
    influence = bayesian_influence(found.losses, found.n_beta / found.terms)
    assert float(influence.diagonal().max()) <= 0, "more of a term lowers its own loss"


def test_bad_requests() -> None:
    losses = torch.ones(4, 3)
    with refused(GeometryError, setting="losses"):
        loss_kernel(losses[0])
    with refused(GeometryError, setting="terms"):
        loss_kernel(losses, [3])
    with refused(GeometryError, setting="beta"):
        bayesian_influence(losses, 0.0)
    with refused(GeometryError, setting="terms"):
        loss_kernel(torch.ones(2, 20000))
