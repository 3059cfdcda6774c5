"""Reduced-rank regression: Fisher by autograd, the counts along the approach, the gauge, and λ."""

import math

import pytest
import torch
from torch import Tensor

from papers.dead_directions.families import Family
from papers.dead_directions.families.reduced_rank import (
    ReducedRank,
    jacobian,
    learning_coefficient,
    spectrum,
)
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid

CASES = [ReducedRank(3, 3, 3, 2), ReducedRank(4, 3, 4, 2), ReducedRank(5, 2, 4, 1), ReducedRank(5, 4, 6, 2)]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_fisher_is_that_of_autograd() -> None:
    W1, W2 = random(2, 5, seed=0), random(4, 2, seed=1)

    def product(flat: Tensor) -> Tensor:
        return (flat[10:].reshape(4, 2) @ flat[:10].reshape(2, 5)).flatten()

    J = torch.func.jacrev(product)(torch.cat((W1.flatten(), W2.flatten())))
    assert torch.allclose(jacobian(W1, W2), J)
    dense = torch.linalg.eigvalsh(J.T @ J).flip(0)
    assert torch.allclose(spectrum(W1, W2), dense, atol=1e-12)


@pytest.mark.parametrize(
    ("model", "zero", "vanishing"), [(CASES[0], 9, 1), (CASES[1], 9, 3), (CASES[2], 4, 6), (CASES[3], 16, 10)]
)
def test_counts_along_the_approach(model: ReducedRank, zero: int, vanishing: int) -> None:
    found = model.counts()
    assert (found.zero, found.vanishing, found.constant) == model.expected_counts
    assert (found.zero, found.vanishing) == (zero, vanishing)
    assert found.slopes == pytest.approx([2.0] * vanishing, abs=0.01)


@pytest.mark.parametrize("model", CASES[:3])
def test_the_rate_belongs_to_the_quotient(model: ReducedRank) -> None:
    h = model.hidden
    for gauge in (5 * torch.eye(h).double(), random(h, h, seed=4)):
        found = model.counts(gauge)
        assert (found.zero, found.vanishing, found.constant) == model.expected_counts
        assert found.slopes == pytest.approx([2.0] * found.vanishing, abs=0.01)
    W1, W2 = model.factors(0.3)
    other = spectrum(5 * W1, W2 / 5)
    assert not torch.allclose(other, spectrum(W1, W2), rtol=0.1), "the eigenvalues themselves do change"


@pytest.mark.parametrize("model", CASES)
def test_the_family_along_its_approach(model: ReducedRank) -> None:
    family: Family = model
    t = log_grid(1e-3, 3e-2)
    assert fit_rate(t, model.fisher(t)).order == pytest.approx(model.order, abs=1e-9)
    assert torch.allclose(model.fisher(t) * t**2 / model.kl(t), torch.tensor(8.0).double())
    W1, W2 = model.factors(0.02)
    d1, d2 = (model.factors(1.0)[i] - model.factors(0.0)[i] for i in (0, 1))
    v = torch.cat((d1.flatten(), d2.flatten()))
    moved = jacobian(W1, W2) @ v
    assert (moved @ moved).item() == pytest.approx(model.fisher(torch.tensor([0.02])).item(), rel=1e-6)
    x = random(200_000, model.inputs, seed=7)
    sampled = ((x @ (W2 @ W1 - model.teacher()).T) ** 2).sum(1).mean() / 2
    assert sampled.item() == pytest.approx(model.kl(torch.tensor([0.02])).item(), rel=0.02)
    assert str(model.rank) in family.name
    assert "dead" in family.direction


def test_known_coefficients() -> None:
    # hidden = rank + 1: r(M+N-r)/2 regular directions, and |u|²|v|² with u in R^(M-r), v in R^(N-r)
    for M in range(1, 7):
        for N in range(1, 7):
            for r in range(min(M, N)):
                regular, a, b = r * (M + N - r) / 2, M - r, N - r
                assert learning_coefficient(M, r + 1, N, r) == (regular + min(a, b) / 2, 1 + (a == b))


def test_coefficients_of_the_ends() -> None:
    assert learning_coefficient(5, 3, 4, 3) == (
        3 * (5 + 4 - 3) / 2,
        1,
    )  # nothing singular: the quotient's dimension / 2
    assert learning_coefficient(2, 9, 3, 1) == (3.0, 1)  # wide enough to be any matrix
    for sizes in ((3, 2, 4, 1), (7, 3, 5, 0), (6, 6, 6, 2), (5, 4, 5, 1)):
        M, H, N, r = sizes
        value, _ = learning_coefficient(M, H, N, r)
        assert value == learning_coefficient(N, H, M, r)[0], "inputs and outputs are alike"
        assert value <= H * (M + N - H) / 2, "no more than a regular model of this dimension"
        assert value <= learning_coefficient(M, H, N, r + 1)[0] <= M * N / 2, "a richer teacher costs more"


def test_the_volume_law_agrees() -> None:
    """M = N = 2, h = 1, r = 0: K = |u|²|v|²/2, λ = 1, m = 2, by the volume of {K < ε} in the unit discs."""
    levels = torch.logspace(-12, -8, 9, dtype=torch.float64)
    rho = torch.linspace(-40, 0, 200001, dtype=torch.float64)[:, None]  # |v|² = e^rho
    inner = torch.minimum(torch.ones(()), 2 * levels / rho.exp())  # the part of the disc of u
    volume = (inner * rho.exp()).sum(0) * (rho[1] - rho[0])
    value, multiplicity = learning_coefficient(2, 1, 2, 0)
    scaled = volume / levels.log().neg() ** (multiplicity - 1)
    assert fit_rate(levels, scaled).slope == pytest.approx(value, abs=0.01)


def test_refusals() -> None:
    for sizes in ((3, 3, 3, 3), (2, 3, 4, 1), (3, 2, 3, -1)):
        with refused(GeometryError, setting="hidden"):
            ReducedRank(*sizes)
    with refused(GeometryError, setting="rank", given=3):
        learning_coefficient(3, 2, 3, 3)
    with refused(GeometryError, setting="grid"):
        ReducedRank(4, 3, 4, 2).counts(grid=log_grid(0.05, 20.0))
    assert math.isfinite(learning_coefficient(1, 1, 1, 1)[0])
