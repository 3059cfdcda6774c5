"""Predictions from kernels: exact where they should be, and wrong by the right order elsewhere."""

from collections.abc import Callable

import pytest
import torch

from papers.gram_metrics.checks import Problem, random_problem
from papers.gram_metrics.kernel import kernel
from papers.gram_metrics.network import FieldError
from papers.gram_metrics.prediction import frozen, predict, relinearised
from papers.gram_metrics.simulation import Trajectory, simulate
from raising import refused

Make = Callable[..., Problem]


def run(how: Callable[..., Trajectory], problem: Problem, eta: float, steps: int) -> Trajectory:
    return how(problem.weights, problem.inputs, problem.targets, eta=eta, steps=steps, unseen=problem.unseen)


def apart(a: Trajectory, b: Trajectory) -> float:
    return max(float((x - y).abs().max()) for x, y in ((a.residuals, b.residuals), (a.unseen, b.unseen)))


def test_frozen_is_a_power_of_one_matrix(make: Make) -> None:
    problem = make(6, 8, 8)
    K = kernel(problem.weights, problem.inputs).total
    found = run(frozen, problem, 0.1, 7).residuals
    power = torch.linalg.matrix_power(torch.eye(5, dtype=torch.float64) - (2 * 0.1 / 5) * K, 7)
    assert torch.allclose(found[7], power @ found[0])


def test_one_hidden_layer_without_crossings_is_exact(make: Make) -> None:
    problem = make(6, 8)
    true = simulate(
        problem.weights, problem.inputs, problem.targets, eta=0.01, steps=4, unseen=problem.unseen
    )
    assert int(true.crossings.sum()) == 0
    for how in (frozen, relinearised):
        assert apart(run(how, problem, 0.01, 4), true) < 1e-14


def test_relinearised_errs_by_the_step_and_frozen_does_not_stop() -> None:
    problem = random_problem(3, 16, 4, seed=3)
    time, missed = 0.02, {}
    for steps in (8, 16, 32):
        true = run(simulate, problem, time / steps, steps)
        assert isinstance(true.losses, torch.Tensor)
        missed[steps] = [
            apart(run(how, problem, time / steps, steps), true) for how in (frozen, relinearised)
        ]
    assert missed[8][1] / missed[16][1] == pytest.approx(2, rel=0.1)
    assert missed[16][1] / missed[32][1] == pytest.approx(2, rel=0.1)
    assert missed[32][0] > 0.8 * missed[8][0] > 10 * missed[32][1]


def test_wider_networks_stay_closer_to_the_frozen_kernel() -> None:
    def drift(width: int) -> float:
        problem = random_problem(2, width, 6, seed=1)  # a teacher as wide: the residual shrinks as well
        return apart(run(frozen, problem, 0.1, 10), run(simulate, problem, 0.1, 10))

    assert drift(512) < drift(16) / 4


def test_no_steps_and_one_step(make: Make) -> None:
    problem = make(6, 8, 8)
    for how in (frozen, relinearised):
        assert run(how, problem, 0.1, 0).residuals.shape == (1, 5)
    assert apart(run(frozen, problem, 0.1, 1), run(relinearised, problem, 0.1, 1)) == 0


def test_one_kernel_a_step() -> None:
    K = [torch.tensor([[2.0]]), torch.tensor([[0.5]])]
    found = predict(K, torch.tensor([3.0]), torch.tensor([1.0]), 0.25)
    assert found.residuals.flatten().tolist() == [2.0, 0.0, 0.0]


@pytest.mark.parametrize("how", [frozen, relinearised])
def test_bad_problems(make: Make, how: Callable[..., Trajectory]) -> None:
    problem = make(6, 8)
    with refused(FieldError, setting="targets"):
        how(problem.weights, problem.inputs, problem.targets[1:], eta=0.1, steps=1)
    with refused(FieldError, setting="eta", given=-1):
        how(problem.weights, problem.inputs, problem.targets, eta=-1, steps=1)
