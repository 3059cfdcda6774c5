"""The tail's exponent: against the obvious version, on samples with a known exponent, and refusals."""

import pytest
import torch
from torch import Tensor

from papers.gram_metrics.network import FieldError
from papers.gram_metrics.tails import fit_tail, largest_tail
from raising import refused
from tests.oracles.tails import fit_power_law


def pareto(n: int, alpha: float, seed: int = 0, low: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return low * torch.rand(n, generator=generator, dtype=torch.float64) ** (-1 / (alpha - 1))


@pytest.mark.parametrize("seed", range(4))
def test_the_same_as_threshold_after_threshold(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for values in (pareto(40, 2.5, seed), torch.rand(25, generator=generator, dtype=torch.float64)):
        alpha, threshold, count, distance = fit_power_law(values.tolist())
        found = fit_tail(values)
        assert (found.count, found.threshold) == (count, threshold)
        assert found.alpha == pytest.approx(alpha, rel=1e-12)
        assert found.distance == pytest.approx(distance, rel=1e-10)


@pytest.mark.parametrize("alpha", [1.8, 2.5, 4.0])
def test_a_power_law_gives_its_exponent(alpha: float) -> None:
    for seed in range(3):
        found = fit_tail(pareto(1000, alpha, seed))
        assert abs(found.alpha - alpha) < 4 * found.error
        assert found.count > 100
        assert abs(largest_tail(pareto(1000, alpha, seed), 1000) - alpha) < 4 * (alpha - 1) / 1000**0.5


def test_the_body_below_the_threshold_is_left_out() -> None:
    body = torch.linspace(0.01, 1.0, 600, dtype=torch.float64)
    found = fit_tail(torch.cat([body, pareto(600, 2.5, low=1.0)]))
    assert 0.8 < found.threshold < 1.6
    assert abs(found.alpha - 2.5) < 0.3
    whole = largest_tail(torch.cat([body, pareto(600, 2.5)]), 1200)
    assert abs(whole - 2.5) > 0.8, "with the body, the exponent is another"


def test_the_scale_changes_the_threshold_only() -> None:
    one, two = fit_tail(pareto(100, 3.0)), fit_tail(10 * pareto(100, 3.0))
    assert two.alpha == pytest.approx(one.alpha)
    assert two.threshold == pytest.approx(10 * one.threshold)


def test_equal_values_stand_together() -> None:
    values = [1.0, 1.0, 1.0, 2.0, 2.0, 5.0]
    found = fit_tail(torch.tensor(values))
    assert (found.alpha, found.count) == pytest.approx(fit_power_law(values)[::2])


def test_a_random_matrix_has_no_tail_and_its_exponent_jumps() -> None:
    found = []
    for seed in range(8):
        W = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        found.append(fit_tail(torch.linalg.svdvals(W).square()).alpha)
    assert max(found) - min(found) > 2


@pytest.mark.parametrize(
    ("values", "setting"),
    [
        (torch.tensor([1.0]), "values"),
        (torch.ones(4), "values"),
        (torch.tensor([1.0, 0.0, 2.0]), "values"),
        (torch.tensor([1.0, float("nan")]), "values"),
        (torch.ones(2, 2), "values"),
    ],
)
def test_refusals(values: Tensor, setting: str) -> None:
    with refused(FieldError, setting=setting):
        fit_tail(values)


def test_refusals_of_a_given_count() -> None:
    with refused(FieldError, setting="count", given=1):
        largest_tail(torch.tensor([1.0, 2.0, 3.0]), 1)
    with refused(FieldError, setting="values", given=2):
        largest_tail(torch.tensor([1.0, 3.0, 3.0]), 2)
