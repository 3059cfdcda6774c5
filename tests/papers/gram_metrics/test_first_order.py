"""Changes of the fields against true steps: half the step, a fourth of the error, if no mask changes."""

from collections.abc import Callable

import pytest
import torch

from papers.gram_metrics.checks import Problem
from papers.gram_metrics.field_state import State, state_of
from papers.gram_metrics.first_order import activation_change, first_order
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.simulation import crossings
from tests.oracles.fields import descend

Make = Callable[..., Problem]
DEEP = [(8, 8, 8), (4, 7, 5, 8), (6, 6, 6, 6, 6), (5, 6, 7, 6, 5, 8, 7)]


def errors(problem: Problem, eta: float, rows: torch.Tensor) -> tuple[dict[str, float], int]:
    """Largest error of Δu and Δb by layer, and the crossings, of one true step."""
    true = descend(problem.weights, problem.inputs, problem.targets, eta, 1)
    before, after = (state_of(weights, rows) for weights in true.weights)
    change = first_order(problem.weights, before, true.residuals[0], eta)
    found = {}
    for layer in change.u:
        found[f"u{layer}"] = _largest(after.u[layer] - before.u[layer] - change.u[layer])
        found[f"b{layer}"] = _largest(after.b[layer] - before.b[layer] - change.b[layer])
    found["Y"] = _largest(after.Y - before.Y - change.Y)
    return found, int(crossings(before, after))


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().max())


@pytest.mark.parametrize("widths", DEEP)
def test_second_order_is_what_is_missed(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths)
    rows = torch.cat([problem.inputs, problem.unseen])
    whole, crossed = errors(problem, 1e-3, rows)
    half, _ = errors(problem, 5e-4, rows)
    assert crossed == 0
    exact = {"u1", f"b{len(widths) - 1}", f"b{len(widths) - 2}"}
    for name in whole:
        if name in exact:  # these are linear in one weight
            assert whole[name] < 1e-14
        else:
            assert whole[name] / half[name] == pytest.approx(4, rel=0.05), name


def test_one_hidden_layer_is_exact_between_crossings(make: Make) -> None:
    problem = make(6, 8)
    found, crossed = errors(problem, 0.05, problem.inputs)
    assert crossed == 0
    assert max(found.values()) < 1e-14


def test_a_crossing_breaks_it(make: Make) -> None:
    problem = make(8, 8, 8)
    found, crossed = errors(problem, 2.0, problem.inputs)
    assert crossed > 0
    assert found["b1"] > 0.1


@pytest.mark.parametrize("widths", [(6, 8), *DEEP])
def test_the_mean_of_the_last_field_is_the_kernel(make: Make, widths: tuple[int, ...]) -> None:
    problem = make(*widths)
    state = state_of(problem.weights, torch.cat([problem.inputs, problem.unseen]))
    r, eta = state.Y[:5] - problem.targets, 0.7
    change = first_order(problem.weights, state, r, eta)
    K = kernel(problem.weights, torch.cat([problem.inputs, problem.unseen]), problem.inputs)
    assert torch.allclose(change.Y, K.drift(r, eta).sum(0), rtol=1e-12, atol=1e-15)


def test_contributions_of_layers_carried_forward(make: Make) -> None:
    """Equation 153: the same as a sum over layers m, each carried forward by F_{m→l}."""
    problem = make(4, 7, 5, 8)
    state, W = state_of(problem.weights, problem.inputs), problem.weights
    r, eta = state.Y - problem.targets, 0.3
    expected = torch.zeros_like(state.u[3])
    for m in (1, 2, 3):
        expected += _carried(state, W, m, r, eta)
    assert torch.allclose(activation_change(W, state, r, eta)[3], expected)


def _carried(state: State, W: list[torch.Tensor], m: int, r: torch.Tensor, eta: float) -> torch.Tensor:
    Q = state.Q(m - 1)
    answer = torch.zeros_like(state.u[3])
    for i in range(5):
        for j in range(5):
            x = state.a[m][i] * state.a[m][j] * state.b[m][j]
            for layer in range(m + 1, 4):
                x = state.a[layer][i] * (W[layer - 1] @ x)
            answer[i] -= (2 * eta / 5) * Q[i, j] * r[j] * x
    return answer
