"""Whole runs in the fields against whole runs in the weights."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from papers.gram_metrics.checks import Problem, random_problem
from papers.gram_metrics.field_state import state_of
from papers.gram_metrics.network import FieldError
from papers.gram_metrics.simulation import crossings, simulate
from raising import refused
from tests.oracles.fields import descend
from topograd.errors import DivergenceError

Make = Callable[..., Problem]


@pytest.mark.parametrize(("depth", "steps"), [(1, 200), (2, 40), (4, 30)])
def test_a_run_is_gradient_descent(depth: int, steps: int) -> None:
    problem = random_problem(depth, 16, 12, seed=depth)
    run = simulate(
        problem.weights, problem.inputs, problem.targets, eta=0.4, steps=steps, unseen=problem.unseen
    )
    true = descend(problem.weights, problem.inputs, problem.targets, 0.4, steps, problem.unseen)
    assert torch.allclose(run.residuals, true.residuals, rtol=0, atol=1e-12)
    assert torch.allclose(run.unseen, true.unseen, rtol=0, atol=1e-12)
    assert torch.equal(run.crossings, true.crossings)
    assert int(run.crossings.sum()) > 10, "the case must have crossings"
    assert run.losses[-1] < run.losses[0] / 2
    assert run.unseen.shape == (steps + 1, 8)


def test_a_sequence_and_no_unseen_inputs() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU()).double()
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    run = simulate(network, x, y, eta=0.1, steps=3)
    assert run.unseen.shape == (4, 0)
    true = descend([network[0].weight], x, y, 0.1, 3)  # type: ignore[list-item]
    assert torch.allclose(run.residuals, true.residuals)


def test_no_steps(make: Make) -> None:
    problem = make(4, 6, 6)
    run = simulate(problem.weights, problem.inputs, problem.targets, eta=0.1, steps=0)
    assert run.residuals.shape == (1, 5)
    assert run.crossings.tolist() == []


@pytest.mark.parametrize(
    ("eta", "steps", "setting"),
    [
        (0.0, 1, "eta"),
        (float("nan"), 1, "eta"),
        (0.1, -1, "steps"),
    ],
)
def test_runs_that_mean_nothing(make: Make, eta: float, steps: int, setting: str) -> None:
    problem = make(4, 6)
    with refused(FieldError, setting=setting):
        simulate(problem.weights, problem.inputs, problem.targets, eta=eta, steps=steps)


def test_a_target_of_the_wrong_shape(make: Make) -> None:
    problem = make(4, 6)
    with refused(FieldError, setting="targets"):
        simulate(problem.weights, problem.inputs, problem.targets[:, None], eta=0.1, steps=1)


def test_divergence_says_when(make: Make) -> None:
    problem = make(4, 6, 6)
    weights = [W.abs() for W in problem.weights]  # all on, and driven up in both layers
    with refused(DivergenceError, setting="eta", given=1e200):
        simulate(weights, problem.inputs.abs(), problem.targets + 100, eta=1e200, steps=3)


def test_crossings_are_counted(make: Make) -> None:
    problem = make(4, 6, 6)
    state = state_of(problem.weights, problem.inputs)
    assert int(crossings(state, state)) == 0
    other = state_of([-problem.weights[0], problem.weights[1]], problem.inputs)
    flipped = int((state.a[2] != other.a[2]).sum())
    assert int(crossings(state, other)) == state.a[1].numel() + flipped
