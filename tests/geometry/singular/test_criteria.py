"""Losses from λ, m and ν, against posteriors of N(a w^k, 1) on a grid."""

import math

import pytest
import torch
from torch import Tensor

from tests.oracles.posterior import power_model_losses, power_model_posterior
from topograd.errors import GeometryError
from topograd.geometry.singular.criteria import expected_losses, free_energy, waic
from topograd.geometry.singular.fluctuation import data_free_fluctuation, singular_fluctuation


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def within(values: Tensor, expected: float, sigmas: float = 4.0) -> bool:
    """The mean is within so many standard errors; the seeds are fixed."""
    return bool((values.mean() - expected).abs() < sigmas * values.std() / len(values) ** 0.5)


@pytest.mark.parametrize(("k", "beta", "scale"), [(1, 1.0, 1.0), (2, 1.0, 1.0), (2, 2.0, 3.0), (3, 0.5, 1.0)])
def test_expected_losses(k: int, beta: float, scale: float) -> None:
    n, sets = 100, 400
    nu = singular_fluctuation(k, beta)
    expected = expected_losses(n, 0.0, 1 / (2 * k), nu, beta)
    parts = normal(sets, n, seed=k).split(100)
    nG, nT, V = (
        torch.cat(x) for x in zip(*(power_model_losses(k, p, beta, scale) for p in parts), strict=True)
    )
    assert within(nG, n * expected.generalization)
    assert within(nT, n * expected.training)
    assert within(V, expected.variance)
    assert within(nG - nT - beta * V, 0.0), "WAIC is unbiased"
    assert not within(nG - nT, 0.0), "the training loss is not"


def test_the_data_free_fluctuation_would_be_seen_to_be_wrong() -> None:
    _, _, V = power_model_losses(2, normal(400, 100, seed=5))
    assert within(V / 2, singular_fluctuation(2))
    assert not within(V / 2, data_free_fluctuation(2))


def test_waic_of_draws_is_that_of_the_grid() -> None:
    data = normal(1, 60, seed=3)
    w, posterior = power_model_posterior(2, data)
    _, nT, V = power_model_losses(2, data)
    chosen = w[torch.multinomial(posterior[0], 20000, True, generator=torch.Generator().manual_seed(0))]
    logs = -((data - chosen[:, None] ** 2) ** 2) / 2 - math.log(2 * math.pi) / 2  # (draws, data)
    found = waic(logs)
    base = float((data**2 / 2).mean()) + math.log(2 * math.pi) / 2
    assert found.training - base == pytest.approx(nT.item() / 60, abs=2e-4)
    assert found.variance == pytest.approx(V.item(), rel=0.03)
    assert found.waic == pytest.approx(found.training + found.variance / 60)
    assert found.fluctuation == pytest.approx(found.variance / 2)
    assert waic(logs, beta=2.0).waic - found.training == pytest.approx(2 * found.variance / 60)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_free_energy_grows_as_rlct(k: int) -> None:
    """log ∫ exp(-n w^{2k}/2) dw on a grid: its slope in log n is -λ."""
    w = torch.linspace(-1, 1, 400001, dtype=torch.float64)
    energies = [-torch.logsumexp(-n * w ** (2 * k) / 2, 0).item() for n in (1e5, 1e6)]
    expected = [free_energy(n, 0.0, 1 / (2 * k)) for n in (10**5, 10**6)]
    assert energies[1] - energies[0] == pytest.approx(expected[1] - expected[0], rel=1e-3)


def test_free_energy_of_a_crossing_has_its_log_log() -> None:
    """x² y² on the unit square: the evidence is ~ n^{-1/2} log n."""
    u = torch.linspace(
        -40, 0, 40001, dtype=torch.float64
    )  # y = e^u; the integral over x is an error function
    energies = []
    for n in (1e8, 1e12):
        root = (n / 2) ** 0.5 * u.exp()
        energies.append(-math.log(float((torch.erf(root) / root * u.exp()).sum() * (u[1] - u[0]))))
    with_log = free_energy(10**12, 0.0, 0.5, 2) - free_energy(10**8, 0.0, 0.5, 2)
    without = free_energy(10**12, 0.0, 0.5) - free_energy(10**8, 0.0, 0.5)
    measured = energies[1] - energies[0]
    assert abs(measured - with_log) < 0.1 < abs(measured - without)


def test_refusals() -> None:
    with pytest.raises(GeometryError, match="3 samples"):
        free_energy(2, 0.0, 0.5)
    with pytest.raises(GeometryError, match="λ > 0"):
        free_energy(10, 0.0, 0.0)
    with pytest.raises(GeometryError, match="positive"):
        expected_losses(10, 0.0, 0.5, 0.5, beta=0.0)
    with pytest.raises(GeometryError, match="both are positive"):
        expected_losses(10, 0.0, 0.5, -0.5)
    with pytest.raises(GeometryError, match="2 draws or more"):
        waic(torch.zeros(1, 5))
    with pytest.raises(GeometryError, match="inverse temperature"):
        waic(torch.zeros(3, 5), beta=-1.0)
    bad = torch.zeros(3, 5)
    bad[1, 2] = math.nan
    with pytest.raises(GeometryError, match="draw 1 at datum 2"):
        waic(bad)
