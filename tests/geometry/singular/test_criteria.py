"""Losses from λ, m and ν, against posteriors of N(a w^k, 1) on a grid."""

import math

import pytest
import torch
from torch import Tensor

from raising import refused
from tests.oracles.posterior import data_free_fluctuation, power_model_losses, power_model_posterior
from topograd.errors import GeometryError
from topograd.geometry.singular.criteria import waic
from topograd.geometry.singular.invariants import singular_fluctuation


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def within(values: Tensor, expected: float, sigmas: float = 4.0) -> bool:
    """The mean is within so many standard errors; the seeds are fixed."""
    return bool((values.mean() - expected).abs() < sigmas * values.std() / len(values) ** 0.5)


@pytest.mark.parametrize(("k", "beta", "scale"), [(1, 1.0, 1.0), (2, 1.0, 1.0), (2, 2.0, 3.0), (3, 0.5, 1.0)])
def test_expected_losses(k: int, beta: float, scale: float) -> None:
    n, sets = 100, 400
    nu = singular_fluctuation(k, beta)
    shared = (1 / (2 * k) - nu) / beta
    parts = normal(sets, n, seed=k).split(100)
    nG, nT, V = (
        torch.cat(x) for x in zip(*(power_model_losses(k, p, beta, scale) for p in parts), strict=True)
    )
    assert within(nG, shared + nu)
    assert within(nT, shared - nu)
    assert within(V, 2 * nu / beta)
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


def test_refusals() -> None:
    with refused(GeometryError, setting="log_likelihoods"):
        waic(torch.zeros(1, 5))
    with refused(GeometryError, setting="beta", given=-1.0):
        waic(torch.zeros(3, 5), beta=-1.0)
    bad = torch.zeros(3, 5)
    bad[1, 2] = math.nan
    with refused(GeometryError, setting="log_likelihoods"):
        waic(bad)
