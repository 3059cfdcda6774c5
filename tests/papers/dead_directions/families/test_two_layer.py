"""Two layers: the dead unit, the gradient factor and the Schur constant against networks and samples."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from papers.dead_directions.families.two_layer import (
    ACTIVATIONS,
    DeadUnit,
    activation,
    relu_schur_fraction,
    schur_fraction,
)
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid

SMALL = torch.tensor([1e-3], dtype=torch.float64)


def samples(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_derivatives_are_those_of_the_functions(name: str) -> None:
    kind = activation(name)
    z = torch.linspace(-3, 3, 62, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kind.function(z).sum(), z)
    torch.testing.assert_close(kind.derivative(z.detach()), slope)
    assert kind.function(torch.zeros(1, dtype=torch.float64)).item() == 0


def test_functions_are_those_of_torch() -> None:
    z = torch.linspace(-3, 3, 62, dtype=torch.float64)
    torch.testing.assert_close(activation("sigmoid").function(z), torch.sigmoid(z) - 0.5)
    torch.testing.assert_close(activation("gelu").function(z), F.gelu(z))


@pytest.mark.parametrize(("name", "expected"), [("linear", 2), ("relu", 1), ("gelu", 0.5), ("tanh", 2)])
def test_a_dead_unit(name: str, expected: float) -> None:
    t, unit = log_grid(1e-4, 1e-2), DeadUnit(name)
    assert fit_rate(t, unit.kl(t)).slope == pytest.approx(4, abs=2e-3)
    assert fit_rate(t, unit.fisher(t)).slope == pytest.approx(2, abs=2e-3)
    assert (unit.fisher(t) / unit.speed**2 / t**2)[0].item() == pytest.approx(expected, rel=1e-4)
    assert expected == 2 * activation(name).gain


@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_a_dead_unit_against_samples(name: str) -> None:
    t, unit = torch.tensor([0.5], dtype=torch.float64), DeadUnit(name)
    x = samples(200_000, 1)[:, 0]
    half = (
        torch.cat((x, -x)) / x.square().mean().sqrt()
    )  # so that even moments are nearly those of the normal
    weights = torch.full_like(half, 0.5)

    def output(w: Tensor) -> Tensor:
        return w * activation(name).function(w * half)

    value, slope = torch.func.jvp(output, (weights,), (torch.ones_like(half),))[:2]
    assert unit.kl(t).item() == pytest.approx(float(value.square().mean()) / 2, rel=0.01)
    assert unit.fisher(t).item() == pytest.approx(float(slope.square().mean()), rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"), [("tanh", 1.0), ("gelu", 0.25), ("sigmoid", 0.0625), ("relu", 0.5), ("linear", 1.0)]
)
@pytest.mark.parametrize("noise", [1.0, 0.3])
def test_the_bottom_of_the_first_gradient_factor(name: str, expected: float, noise: float) -> None:
    entry = DeadUnit(name).gradient_entry(SMALL, noise) / SMALL**2
    assert entry.item() == pytest.approx(noise**2 * expected, rel=1e-4)
    assert activation(name).gain == expected
    d, t, x = 5, 1e-3, samples(20_000, 5)
    diagonal = torch.tensor([1.0] * (d - 1) + [t], dtype=torch.float64)
    slopes = activation(name).derivative(x * diagonal)
    deltas = torch.cat([noise * slopes * (diagonal * basis) for basis in torch.eye(d, dtype=x.dtype)])
    bottom = torch.linalg.svdvals(deltas)[-1] ** 2 / len(x)
    assert bottom.item() == pytest.approx(noise**2 * expected * t**2, rel=0.02)


@pytest.mark.parametrize(("width", "expected"), [(3, 0.1537), (8, 0.2437), (32, 0.2977), (128, 0.3130)])
def test_the_schur_constant_of_relu(width: int, expected: float) -> None:
    assert relu_schur_fraction(width) == pytest.approx(expected, abs=5e-5)
    assert relu_schur_fraction(width) == pytest.approx((width - 1) / (math.pi * (width + math.pi - 2)))
    assert relu_schur_fraction(width) < 1 / math.pi


@pytest.mark.parametrize("width", [3, 8, 32])
def test_the_schur_constant_against_samples(width: int) -> None:
    h = torch.relu(samples(max(50 * width**2, 100_000), width))
    h[:, -1] *= 1e-3
    A = h.mT @ h / len(h)
    b = A[-1, :-1]
    taken = b @ torch.linalg.solve(A[:-1, :-1], b)
    assert (taken / A[-1, -1]).item() == pytest.approx(relu_schur_fraction(width), rel=0.02)
    rest = A[-1, -1] - taken
    assert rest > (1 - 1 / math.pi) * 0.49e-6, "what is left keeps its power of t"


def test_no_mean_takes_nothing_away() -> None:
    assert schur_fraction(9, 0.0, 1.0, 0.4, 0.5) == schur_fraction(9, 0.4, 1.0, 0.0, 0.5) == 0
    assert schur_fraction(10**9, 0.4, 1.0, 0.4, 0.5) == pytest.approx(0.16 / 0.5)


def test_bad_requests_are_named() -> None:
    with refused(GeometryError, setting="name", given="swish"):
        DeadUnit("swish")
    with refused(GeometryError, setting="width", given=1):
        relu_schur_fraction(1)
