"""Fields against autograd, and overlaps against sums."""

from collections.abc import Callable

import pytest
import torch

from papers.gram_metrics.checks import Problem
from papers.gram_metrics.field_state import state_of
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.network import FieldError
from raising import refused
from tests.oracles.fields import activations, conjugates, masks
from tests.oracles.ntk import output

Make = Callable[..., Problem]
WIDTHS = [(4, 6), (4, 6, 6), (3, 7, 5, 8), (5, 4, 9, 6, 3, 7, 6)]


@pytest.mark.parametrize("widths", WIDTHS)
def test_fields_are_autograds(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths)
    state = state_of(problem.weights, problem.inputs)
    u, a, b = (f(problem.weights, problem.inputs) for f in (activations, masks, conjugates))
    assert state.depth == len(widths) - 1
    assert widths[-1] == state.N
    assert list(state.u) == list(range(len(widths)))
    for layer in range(1, len(widths)):
        assert torch.allclose(state.u[layer], u[layer])
        assert torch.equal(state.a[layer], a[layer - 1])
        assert torch.equal(state.a[layer], state.v[layer] > 0)
        assert torch.allclose(state.b[layer], b[layer - 1])
        assert torch.equal(state.z[layer], torch.where(state.a[layer], state.b[layer], 0.0))
    assert torch.allclose(state.Y, output(problem.weights, problem.inputs))


@pytest.mark.parametrize("widths", WIDTHS)
def test_the_gradient_of_every_weight(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths)
    state = state_of(problem.weights, problem.inputs)
    leaves = [W.clone().requires_grad_() for W in problem.weights]
    loss = (output(leaves, problem.inputs) - problem.targets).square().mean()
    r, M = state.Y - problem.targets, len(problem.targets)
    for layer, gradient in enumerate(torch.autograd.grad(loss, leaves), start=1):
        found = 2 / (M * state.N) * (r[:, None] * state.z[layer]).T @ state.u[layer - 1]
        assert torch.allclose(found, gradient, rtol=1e-12, atol=1e-14)


def test_overlaps_divide_by_the_width_under_the_readout(make: Make) -> None:
    problem = make(4, 7, 3)
    state = state_of(problem.weights, problem.inputs)
    for i in range(5):
        for j in range(5):
            assert float(state.Q(1)[i, j]) == pytest.approx(float(state.u[1][i] @ state.u[1][j]) / 3)
            assert float(state.S(1)[i, j]) == pytest.approx(float(state.z[1][i] @ state.z[1][j]) / 3)
            both = (state.a[1][i] & state.a[1][j]).sum()
            assert float(state.A(1)[i, j]) == pytest.approx(int(both) / 3)
    assert torch.equal(state.S(2), state.A(2)), "b_L is one"
    assert torch.allclose(state.J(2), state.Q(1) * state.A(2))


def test_one_hidden_layer_is_driven_by_the_collective_kernel(make: Make) -> None:
    one, two = make(4, 6), make(4, 6, 6)
    assert torch.allclose(state_of(one.weights, one.inputs).J(), kernel(one.weights, one.inputs).total)
    deeper = kernel(two.weights, two.inputs)
    assert not torch.allclose(state_of(two.weights, two.inputs).J(1), deeper.layers[0]), "b_1 is not one"
    assert torch.allclose(state_of(two.weights, two.inputs).J(2), deeper.layers[1])


def test_a_neuron_at_zero_is_off() -> None:
    state = state_of([torch.tensor([[1.0, -1.0]])], torch.tensor([[2.0, 2.0]]))
    assert state.v[1].item() == 0
    assert not state.a[1].item()


@pytest.mark.parametrize(
    ("name", "layer", "allowed"), [("Q", 3, "from 0 to 2"), ("S", 0, "from 1 to 2"), ("A", 3, "from 1 to 2")]
)
def test_layers_that_are_not_there(make: Make, name: str, layer: int, allowed: str) -> None:
    problem = make(4, 6, 6)
    with refused(FieldError, setting="layer", given=layer, allowed=allowed):
        getattr(state_of(problem.weights, problem.inputs), name)(layer)


def test_fields_of_some_rows(make: Make) -> None:
    problem = make(4, 6, 5)
    whole, part = state_of(problem.weights, problem.inputs), state_of(problem.weights, problem.inputs[1:3])
    few = whole.rows(slice(1, 3))
    assert all(torch.allclose(few.z[layer], part.z[layer]) for layer in (1, 2))
    assert torch.allclose(few.Y, part.Y)
