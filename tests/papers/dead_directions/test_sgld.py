"""The sampled learning coefficient, on models where it is known; costs, divergence, what is left alone."""

import math

import pytest
import torch
from torch import Tensor, nn

from papers.dead_directions.families.reduced_rank import ReducedRank, learning_coefficient
from papers.dead_directions.sgld import Sgld, sample_learning_coefficient
from raising import refused
from topograd.errors import DivergenceError, GeometryError


class Power(nn.Module):
    """N(w^k, 1) at w = 0."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return (self.w**self.k).expand(len(x), 1)


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(-1).mean() / 2


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def linear(width: int, n: int) -> tuple[nn.Linear, Tensor, Tensor]:
    module = nn.Linear(width, 1, bias=False, dtype=torch.float64)
    inputs = normal(n, width)
    return module, inputs, module(inputs).detach()


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_power_has_one_over_2k(k: int) -> None:
    """E[nβ w^{2k}/2] = 1/(2k) exactly where nothing localises; the tolerance is about 3 standard errors."""
    n = 50
    zeros = torch.zeros(n, 1, dtype=torch.float64)
    step = (0.1 if k == 1 else 0.3) * math.log(n) / n
    settings = Sgld(step=step, localization=0.0, chains=400, burn_in=150, draws=150)
    found = sample_learning_coefficient(Power(k), half_square, zeros, zeros, settings)
    assert found.estimate == pytest.approx(1 / (2 * k), abs=0.03)


@pytest.mark.parametrize("batch", [None, 50])
def test_a_regular_model_has_half_its_dimension(batch: int | None) -> None:
    module, inputs, targets = linear(6, 500)
    settings = Sgld(
        0.1 * math.log(500) / 500, localization=0.0, chains=96, burn_in=100, draws=150, batch=batch
    )
    found = sample_learning_coefficient(module, half_square, inputs, targets, settings)
    assert found.estimate == pytest.approx(3.0, rel=0.08)  # 2.6 % of it is the step's bias
    assert found.batch_gradients == 96 * 250
    assert found.example_gradients == 96 * 250 * (batch or 500)
    assert len(found.by_chain) == 96
    assert found.estimate == pytest.approx(sum(found.by_chain) / 96)


def test_localisation_counts_each_direction_for_less() -> None:
    module, inputs, targets = linear(6, 500)
    tempered = 500 / math.log(500)
    settings = Sgld(0.05 / tempered, localization=tempered, chains=96, burn_in=100, draws=120)
    found = sample_learning_coefficient(module, half_square, inputs, targets, settings)
    assert found.estimate == pytest.approx(1.5, rel=0.08)


def test_reduced_rank_regression() -> None:
    model = ReducedRank(4, 3, 4, 2)
    W1, W2 = model.factors(0.0)
    module = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 4, bias=False)).double()
    module.load_state_dict({"0.weight": W1, "1.weight": W2})
    inputs = normal(1000, 4)
    settings = Sgld(0.1 * math.log(1000) / 1000, chains=48, burn_in=200, draws=200, batch=50)
    found = sample_learning_coefficient(module, half_square, inputs, module(inputs).detach(), settings)
    exact, _ = learning_coefficient(4, 3, 4, 2)
    assert found.estimate == pytest.approx(exact, rel=0.08)
    assert abs(found.estimate - 24 / 2) > 3, "half the number of parameters"


def test_steps_are_those_of_the_formula() -> None:
    """Three steps of two chains, with plain autograd and the same noise."""
    module, inputs, targets = linear(3, 20)
    center, tempered = module.weight.detach().clone(), 20 / math.log(20)
    settings = Sgld(step=0.03, localization=2.0, chains=2, burn_in=1, draws=3)
    found = sample_learning_coefficient(module, half_square, inputs, targets, settings, seed=9)
    generator = torch.Generator().manual_seed(9)
    chains = [center.clone(), center.clone()]
    losses = torch.zeros(4, 2, dtype=torch.float64)
    for i in range(4):
        noise = torch.randn(2, *center.shape, generator=generator, dtype=torch.float64)
        for c, w in enumerate(chains):
            w.requires_grad_(True)
            loss = half_square(inputs @ w.T, targets)
            (gradient,) = torch.autograd.grad(loss, w)
            pull = tempered * gradient + 2.0 * (w - center)
            losses[i, c] = loss.detach()
            chains[c] = (w - 0.015 * pull + 0.03**0.5 * noise[c]).detach()
    assert found.by_chain == pytest.approx((tempered * losses[1:].mean(0)).tolist(), rel=1e-10)


def test_the_module_is_left_alone_and_frozen_parameters_stay() -> None:
    first = nn.Linear(3, 2).double().requires_grad_(False)
    nn.init.eye_(first.weight)  # so that the last layer has a curvature of about 1 in each direction
    nn.init.zeros_(first.bias)
    module = nn.Sequential(first, nn.Linear(2, 1).double())
    before = {name: p.clone() for name, p in module.named_parameters()}
    inputs = normal(200, 3)
    settings = Sgld(0.05 * math.log(200) / 200, localization=0.0, chains=96, burn_in=100, draws=100)
    found = sample_learning_coefficient(module, half_square, inputs, module(inputs).detach(), settings)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in module.named_parameters())
    assert found.estimate == pytest.approx(1.5, rel=0.15), "the last layer alone has three parameters"
    again = sample_learning_coefficient(module, half_square, inputs, module(inputs).detach(), settings)
    assert again == found, "a seed decides"


def test_divergence_names_chain_and_draw() -> None:
    zeros = torch.zeros(50, 1, dtype=torch.float64)
    with refused(DivergenceError, setting="step", given=5.0):
        sample_learning_coefficient(
            Power(3), half_square, zeros, zeros, Sgld(step=5.0, chains=3, burn_in=0, draws=300)
        )
    with refused(DivergenceError, setting="step", given=5.0):
        sample_learning_coefficient(
            Power(3), half_square, zeros, zeros, Sgld(step=5.0, chains=3, burn_in=300)
        )


def test_refusals() -> None:
    module, inputs, targets = linear(2, 10)
    with refused(GeometryError, setting="targets", given=5):
        sample_learning_coefficient(module, half_square, inputs, targets[:5])
    with refused(GeometryError, setting="targets", given=0):
        sample_learning_coefficient(module, half_square, inputs[:0], targets[:0])
    with refused(GeometryError, setting="module"):
        sample_learning_coefficient(nn.Identity(), half_square, inputs, targets)
    with torch.no_grad():
        module.weight[0, 0] = math.nan
    with refused(GeometryError, setting="model", given="weight"):
        sample_learning_coefficient(module, half_square, inputs, targets)
    for step, localization, setting in (
        (0.0, 1.0, "step"),
        (math.nan, 1.0, "step"),
        (0.1, -1.0, "localization"),
    ):
        with refused(GeometryError, setting=setting):
            Sgld(step, localization)
    for name, value in (("chains", 0), ("draws", 0), ("burn_in", -1), ("batch", 0)):
        with refused(GeometryError, setting=name, given=value):
            Sgld(**{name: value})


def test_one_chain_has_no_spread() -> None:
    module, inputs, targets = linear(2, 10)
    settings = Sgld(chains=1, burn_in=0, draws=3)
    assert math.isnan(sample_learning_coefficient(module, half_square, inputs, targets, settings).spread)
