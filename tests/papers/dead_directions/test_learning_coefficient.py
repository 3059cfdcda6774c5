"""The comparison in small: what the reading finds by itself, what it costs, and what it refuses."""

import pytest
import torch
from torch import Tensor

from papers.dead_directions.families.reduced_rank import ReducedRank, learning_coefficient
from papers.dead_directions.learning_coefficient import (
    CASES,
    Gradients,
    Sampling,
    compare,
    half_square,
    read_coefficient,
    singular_module,
    table,
    verdict,
)
from raising import refused
from topograd.errors import GeometryError


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    "model", [*CASES, ReducedRank(3, 2, 7, 1), ReducedRank(3, 1, 3, 0), ReducedRank(6, 5, 5, 4)]
)
def test_the_reading_is_exact(model: ReducedRank) -> None:
    found = read_coefficient(singular_module(model), normal(2 * model.inputs, model.inputs))
    exact = learning_coefficient(model.inputs, model.hidden, model.outputs, model.rank)
    assert (found.coefficient, found.crossing.multiplicity) == exact
    assert found.dimensions == (model.inputs - model.rank, model.outputs - model.rank)
    assert found.regular == model.expected_counts[2]
    assert found.crossing.orders == (1, 1)
    assert found.crossing.consistent
    assert found.batch_gradients == 5 * model.outputs + 15  # five Jacobians and three lines of five points
    assert found.example_gradients == found.batch_gradients * 2 * model.inputs


def test_another_representative_reads_the_same() -> None:
    model = ReducedRank(5, 3, 4, 2)
    module = singular_module(model, gauge=normal(3, 3, seed=3))
    assert read_coefficient(module, normal(12, 5)).coefficient == learning_coefficient(5, 3, 4, 2)[0]


def test_derivatives_are_those_of_autograd() -> None:
    module, inputs = singular_module(ReducedRank(3, 2, 2, 1)), normal(4, 3)
    gradients = Gradients(module, inputs)
    v = normal(len(gradients.point), seed=5)
    jacobian = gradients.jacobian(gradients.point)
    outputs = module(inputs)
    for i in range(4):
        for o in range(2):
            parts = torch.autograd.grad(outputs[i, o], list(module.parameters()), retain_graph=True)
            assert torch.allclose(jacobian[i, o], torch.cat([p.flatten() for p in parts]))
    expected = (jacobian @ v).square().sum(1).mean()
    assert torch.allclose(gradients.fisher(gradients.point, v), expected)
    assert gradients.count == 3


def test_points_that_it_refuses() -> None:
    inputs = normal(12, 5)
    with refused(GeometryError, setting="model", given=2):
        read_coefficient(singular_module(ReducedRank(5, 3, 4, 1)), inputs)
    module = singular_module(ReducedRank(5, 3, 4, 2))
    with torch.no_grad():
        next(module.parameters()).add_(normal(3, 5, seed=1))  # no longer singular
    with refused(GeometryError, setting="model", given=0):
        read_coefficient(module, inputs)


def test_the_comparison_in_small() -> None:
    model = ReducedRank(3, 2, 3, 1)
    reading, samplings = compare(model, budgets=((40, 0.2), (120, 0.1)), runs=2)
    exact, _ = learning_coefficient(3, 2, 3, 1)
    assert reading.coefficient == exact
    for one, draws in zip(samplings, (40, 120), strict=True):
        assert one.batch_gradients == 4 * (draws + draws // 2)
        assert one.example_gradients == 50 * one.batch_gradients
        assert len(one.estimates) == 2
        assert 0 < one.error < exact
    assert samplings[1].example_gradients > 100 * reading.example_gradients
    assert [row[0] for row in table(model, reading, samplings).rows] == [
        "rates, m = 2",
        "SGLD 40",
        "SGLD 120",
    ]


def test_the_verdict_takes_the_first_budget_that_is_good_enough() -> None:
    reading = read_coefficient(singular_module(ReducedRank(3, 2, 3, 1)), normal(6, 3))  # 30 and 180 gradients
    samplings = [
        Sampling(d, (), e, 30 * d, 1800 * d) for d, e in ((10, 0.5), (20, 0.2), (40, 0.1), (80, 0.3))
    ]
    first, least = verdict(reading, samplings).split("\n")
    assert "(0.200, 20 draws): 20 times the batch gradients, 200 times" in first
    assert "(0.100, 40 draws): 40 times the batch gradients, 400 times" in least
    assert "not reached" in verdict(reading, samplings[:1])


def test_the_loss_is_a_log_likelihood() -> None:
    outputs, targets = normal(6, 2), normal(6, 2, seed=1)
    gaussian = torch.distributions.Normal(outputs, 1.0).log_prob(targets).sum(1).mean()
    at_best = torch.distributions.Normal(targets, 1.0).log_prob(targets).sum(1).mean()
    assert half_square(outputs, targets).item() == pytest.approx((at_best - gaussian).item())
