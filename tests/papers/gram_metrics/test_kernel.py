"""The kernel from fields is the tangent kernel from Jacobians, whole, by layer and between two sets."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from papers.gram_metrics.checks import Problem, relative_error
from papers.gram_metrics.field_state import state_of
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.network import FieldError
from raising import refused
from tests.oracles.fields import descend
from tests.oracles.ntk import empirical_ntk
from topograd.memory import peak_bytes

Make = Callable[..., Problem]
EXACT = 1e-12
WIDTHS = [(6, 8), (6, 8, 8), (8, 8, 8, 8), (3, 7, 5, 8), (5, 4, 9, 6, 3, 7, 6)]


@pytest.mark.parametrize("widths", WIDTHS)
def test_it_is_the_tangent_kernel(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths, examples=7)
    ours, theirs = kernel(problem.weights, problem.inputs), empirical_ntk(problem.weights, problem.inputs)
    assert ours.layers.shape == (len(widths) - 1, 7, 7)
    assert relative_error(ours.total, torch.stack(theirs).sum(0)) < EXACT
    for part, layer in zip(ours.layers, theirs, strict=True):
        assert relative_error(part, layer) < EXACT
    assert torch.equal(ours.total, ours.layers.sum(0))


@pytest.mark.parametrize("widths", WIDTHS)
def test_between_training_and_unseen_inputs(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths, examples=6, unseen=4)
    ours = kernel(problem.weights, problem.unseen, problem.inputs)
    theirs = torch.stack(empirical_ntk(problem.weights, problem.unseen, problem.inputs))
    assert ours.total.shape == (4, 6)
    assert relative_error(ours.layers, theirs) < EXACT


def test_it_is_made_of_overlaps(make: Make) -> None:
    problem = make(3, 7, 5, 8)
    state = state_of(problem.weights, problem.inputs)
    parts = [state.Q(layer - 1) * state.S(layer) for layer in (1, 2, 3)]
    assert torch.allclose(kernel(problem.weights, problem.inputs).layers, torch.stack(parts))


@pytest.mark.parametrize("depth", [2, 4])
def test_the_residual_follows_it_to_first_order(make: Make, depth: int) -> None:
    problem = make(*[8] * (depth + 1))
    K = kernel(problem.weights, problem.inputs)

    def missed(eta: float) -> float:
        true = descend(problem.weights, problem.inputs, problem.targets, eta, 1)
        assert int(true.crossings) == 0
        drift = K.drift(true.residuals[0], eta).sum(0)
        return float((true.residuals[1] - true.residuals[0] - drift).abs().max())

    assert missed(1e-3) / missed(5e-4) == pytest.approx(4, rel=0.05)


def test_unseen_outputs_follow_the_rectangular_one(make: Make) -> None:
    problem = make(8, 8, 8)
    K = kernel(problem.weights, problem.unseen, problem.inputs)

    def missed(eta: float) -> float:
        true = descend(problem.weights, problem.inputs, problem.targets, eta, 1, problem.unseen)
        drift = K.drift(true.residuals[0], eta).sum(0)
        return float((true.unseen[1] - true.unseen[0] - drift).abs().max())

    assert missed(1e-3) / missed(5e-4) == pytest.approx(4, rel=0.05)


def test_a_residual_of_the_wrong_length(make: Make) -> None:
    problem = make(4, 6)
    K = kernel(problem.weights, problem.unseen, problem.inputs)
    with refused(FieldError, setting="residual"):
        K.drift(torch.zeros(3, dtype=torch.float64), 0.1)


def test_it_is_symmetric_and_positive_semidefinite(make: Make) -> None:
    problem = make(3, 7, 5, 8)
    for part in kernel(problem.weights, problem.inputs).layers:
        assert torch.allclose(part, part.T, rtol=0, atol=1e-15)
        assert torch.linalg.eigvalsh(part).min() > -1e-13 * part.trace()


def test_float32_and_what_a_module_keeps() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6, bias=False), nn.ReLU(), nn.Linear(6, 6, bias=False), nn.ReLU())
    x = torch.randn(5, 4, requires_grad=True)
    found = kernel(network, x).total
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert relative_error(found, kernel(network.double(), x.detach().double()).total.float()) < 1e-5
    assert all(parameter.grad is None for parameter in network.parameters())


def test_it_stays_on_its_device(make: Make) -> None:
    problem = make(4, 6, 5)
    K = kernel([W.to("meta") for W in problem.weights], problem.unseen.to("meta"), problem.inputs.to("meta"))
    assert K.total.device.type == K.layers.device.type == "meta"


def test_no_jacobian_is_formed(make: Make) -> None:
    problem = make(*[32] * 5, examples=24)
    peak = peak_bytes(lambda: kernel(problem.weights, problem.inputs))
    jacobian = 8 * 24 * 4 * 32 * 32
    assert peak < jacobian / 4
    assert peak_bytes(lambda: empirical_ntk(problem.weights, problem.inputs)) >= jacobian
