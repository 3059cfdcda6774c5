"""Kernels of staged networks against Jacobians, and against what true steps do to each stage's residual."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from papers.gram_metrics.checks import Problem, relative_error
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.network import FieldError
from papers.gram_metrics.staged import staged_kernel
from raising import refused
from tests.oracles.fields import activations, masks, staged_outputs, staged_step
from tests.oracles.ntk import empirical_ntk, jacobians

Make = Callable[..., Problem]
WIDTHS, STAGES = (5, 7, 6, 8, 6, 7), [2, 1, 2]
SPANS = [(0, 2), (2, 3), (3, 5)]


def residuals(problem: Problem, weights: list[Tensor]) -> Tensor:
    return torch.stack(staged_outputs(weights, problem.inputs, STAGES)) - problem.targets


def true_change(problem: Problem, eta: float, only: int | None = None) -> Tensor:
    """Δr_k of one step by autograd, of all stages or of one; no mask may change."""
    after = staged_step(problem.weights, problem.inputs, problem.targets, eta, STAGES)
    if only is not None:
        start, stop = SPANS[only]
        after = [W if start <= i < stop else problem.weights[i] for i, W in enumerate(after)]
    pairs = zip(masks(problem.weights, problem.inputs), masks(after, problem.inputs), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    return residuals(problem, after) - residuals(problem, problem.weights)


def test_each_stage_has_the_tangent_kernel_of_its_own_layers(make: Make) -> None:
    problem = make(*WIDTHS)
    K = staged_kernel(problem.weights, problem.inputs, STAGES)
    u = activations(problem.weights, problem.inputs)
    for own, (start, stop) in zip(K.own, SPANS, strict=True):
        theirs = torch.stack(empirical_ntk(problem.weights[start:stop], u[start]))
        assert relative_error(own.layers, theirs) < 1e-12
        assert relative_error(own.total, theirs.sum(0)) < 1e-12
    assert torch.allclose(K.outputs, torch.stack(staged_outputs(problem.weights, problem.inputs, STAGES)))


def test_the_blocks_below_are_jacobians_of_two_readouts(make: Make) -> None:
    problem = make(*WIDTHS)
    K = staged_kernel(problem.weights, problem.inputs, STAGES)
    J = [jacobians(problem.weights[:stop], problem.inputs) for _, stop in SPANS]  # no stops
    for k in range(3):
        assert len(K.below[k]) == k
        for j in range(k):
            expected = sum(J[k][i].flatten(1) @ J[j][i].flatten(1).T for i in range(*SPANS[j]))
            assert isinstance(expected, Tensor)
            assert relative_error(K.below[k][j], expected) < 1e-12


def test_one_stage_is_the_whole_network(make: Make) -> None:
    problem = make(*WIDTHS)
    K = staged_kernel(problem.weights, problem.inputs, [5])
    assert torch.equal(K.own[0].layers, kernel(problem.weights, problem.inputs).layers)
    assert K.below == ((),)


def test_residuals_of_all_stages_to_first_order(make: Make) -> None:
    problem = make(*WIDTHS)
    K = staged_kernel(problem.weights, problem.inputs, STAGES)

    def missed(eta: float) -> Tensor:
        return (true_change(problem, eta) - K.drift(problem.targets, eta)).abs().amax(-1)

    assert (missed(1e-3) / missed(5e-4)).tolist() == pytest.approx([4] * 3, rel=0.05)


def test_a_stage_that_learns_alone_follows_its_own_kernel(make: Make) -> None:
    problem = make(*WIDTHS)
    K = staged_kernel(problem.weights, problem.inputs, STAGES)
    for k in (0, 2):

        def missed(eta: float, k: int = k) -> float:
            off = true_change(problem, eta, only=k)[k] - K.own_drift(problem.targets, eta)[k]
            return float(off.abs().max())

        assert missed(1e-3) / missed(5e-4) == pytest.approx(4, rel=0.05)
    alone = true_change(problem, 1e-3, only=1)
    assert torch.allclose(alone[1], K.own_drift(problem.targets, 1e-3)[1], rtol=0, atol=1e-15), "one layer"
    assert not alone[0].any(), "nothing flows down"


def test_its_own_kernel_alone_is_wrong_at_first_order_while_others_learn(make: Make) -> None:
    """A known limit: stages below move the inputs of those above, so half the step leaves half the error."""
    problem = make(*WIDTHS)
    K = staged_kernel(problem.weights, problem.inputs, STAGES)

    def missed(eta: float) -> Tensor:
        return (true_change(problem, eta) - K.own_drift(problem.targets, eta)).abs().amax(-1)

    ratios = (missed(1e-3) / missed(5e-4)).tolist()
    assert ratios == pytest.approx([4, 2, 2], rel=0.05)
    share = missed(5e-4) / true_change(problem, 5e-4).abs().amax(-1)
    assert min(share[1:].tolist()) > 0.1, "and not a small one"


@pytest.mark.parametrize("stages", [[], [5, 0], [2, 2], [3, 3]])
def test_stages_that_do_not_add_up(make: Make, stages: list[int]) -> None:
    problem = make(*WIDTHS)
    with refused(FieldError, setting="stages"):
        staged_kernel(problem.weights, problem.inputs, stages)


def test_a_target_of_the_wrong_shape(make: Make) -> None:
    problem = make(*WIDTHS)
    K = staged_kernel(problem.weights, problem.inputs, STAGES)
    with refused(FieldError, setting="targets"):
        K.drift(problem.targets[:4], 0.1)
