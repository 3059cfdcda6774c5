"""Ratios, next orders and regimes: closed forms, exact families, and a chain probed at fixed weights."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from papers.dead_directions.expansion import (
    Moments,
    basin_exponent,
    ladder,
    leading_ratio,
    mixture_moments,
    mixture_next_ratio,
    next_coefficient,
    ratio_of_order,
    read_regime,
)
from papers.dead_directions.families.gaussian import Gaussian
from papers.dead_directions.families.mixture import Merge
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid

WEIGHTS = (0.5, 0.3, 0.2, 0.1)
POLE = (1 - math.sqrt(0.5)) / 2


def tanh_slope(z: Tensor) -> Tensor:
    return 1 - torch.tanh(z) ** 2


def step(z: Tensor) -> Tensor:
    return (z > 0).to(z.dtype)


CHAINS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "linear": (torch.clone, torch.ones_like),
    "relu": (F.relu, step),
    "tanh": (torch.tanh, tanh_slope),
}


def dead_entries(t: float, depth: int, activation: str, noise: float) -> list[float]:
    """Dead entries of G_1 ... G_L: weights diag(1, .., 1, t), teacher at t = 0, each output's noise alone."""
    function, derivative = CHAINS[activation]
    x = torch.randn(1000, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def forward(dead: float) -> tuple[Tensor, list[Tensor]]:
        W = torch.diag(torch.tensor([1.0, 1.0, 1.0, dead], dtype=torch.float64))
        zs = [x @ W]
        for _ in range(depth - 1):
            zs.append(function(zs[-1]) @ W)
        return W, zs

    W, zs = forward(t)
    outputs = torch.eye(4, dtype=torch.float64)[:, None] * noise
    deltas = torch.cat([(zs[-1] - forward(0.0)[1][-1])[None], outputs.expand(4, *x.shape)])
    entries = [deltas[..., 3].square().mean(-1).sum().item()]
    for z in reversed(zs[:-1]):
        deltas = deltas @ W.mT * derivative(z)
        entries.append(deltas[..., 3].square().mean(-1).sum().item())
    return entries[::-1]


def measured_ladder(depth: int, activation: str, noise: float) -> list[float]:
    grid = log_grid(1e-3, 3e-2, 6)
    rows = [dead_entries(t, depth, activation, noise) for t in grid.tolist()]
    entries = torch.tensor(rows, dtype=torch.float64)
    slopes = [fit_rate(grid, column).slope for column in entries.unbind(1)]
    return [math.nan if slope is None else slope for slope in slopes]


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_leading_ratio_of_a_gaussian_is_exact(k: int) -> None:
    t, family = log_grid(1e-3, 1e-1), Gaussian(k)
    read = leading_ratio(t, family.fisher(t), family.kl(t))
    assert read.value == pytest.approx(ratio_of_order(k), abs=1e-12)
    assert read.spread < 1e-12
    assert read.order == pytest.approx(k)


@pytest.mark.parametrize("weight", WEIGHTS)
def test_the_leading_ratio_of_a_merge_is_8_and_not_12(weight: float) -> None:
    t, family = log_grid(1e-3, 2e-2), Merge((1 - weight, weight))
    read = leading_ratio(t, family.fisher(t), family.kl(t))
    assert read.value == pytest.approx(8, abs=1e-4)
    assert 0 < read.spread < 1e-3


def test_a_window_keeps_the_rest_out() -> None:
    t, family = log_grid(1e-3, 1.0), Merge()
    whole = leading_ratio(t, family.fisher(t), family.kl(t))
    inner = leading_ratio(t, family.fisher(t), family.kl(t), window=(1e-3, 1e-2))
    assert whole.spread > 0.5 > 1e-3 > inner.spread
    assert inner.window == pytest.approx((1e-3, 1e-2))
    assert whole.value == inner.value, "the value is that of the smallest t"


def test_ratios_that_have_no_limit_are_refused() -> None:
    t = log_grid(1e-3, 1e-1)
    with pytest.raises(GeometryError, match="K or t not above 0"):
        leading_ratio(t, t, torch.zeros_like(t))
    with pytest.raises(GeometryError, match="as many of each"):
        leading_ratio(t, t[1:], t)
    with pytest.raises(GeometryError, match="no t lies in"):
        leading_ratio(t, t, t, window=(1.0, 2.0))


@pytest.mark.parametrize(("weight", "expected"), [(0.5, 12.00), (0.3, 10.59), (0.2, 4.29), (0.1, 25.71)])
def test_next_coefficients_of_a_merge(weight: float, expected: float) -> None:
    t, family, moments = log_grid(1e-2, 1e-1), Merge((1 - weight, weight)), mixture_moments(weight)
    fisher = next_coefficient(t, family.fisher(t), 2, moments.fisher[0])
    kl = next_coefficient(t, family.kl(t), 4, moments.kl[0])
    assert fisher == pytest.approx(moments.fisher[1], rel=2e-3)
    assert kl == pytest.approx(moments.kl[1], rel=2e-3)
    assert fisher / kl == pytest.approx(expected, rel=0.01)
    assert mixture_next_ratio(weight) == pytest.approx(expected, abs=0.005)
    assert mixture_next_ratio(weight) == pytest.approx(moments.fisher[1] / moments.kl[1])


def test_the_next_ratio_has_a_pole_between_its_ends() -> None:
    assert mixture_next_ratio(1e-9) == pytest.approx(18, abs=1e-5)
    assert mixture_next_ratio(POLE - 1e-3) > 100
    assert mixture_next_ratio(POLE + 1e-3) < -100
    with pytest.raises(GeometryError, match=r"π = 0\.1464"):
        mixture_next_ratio(POLE)
    assert mixture_moments(POLE).kl[1] == pytest.approx(0, abs=1e-16), (
        "the coefficients themselves are finite"
    )


def test_moments_with_all_their_terms() -> None:
    # p_t / p_0 on three points, k = 2: F and K as plain sums, against their expansion.
    q = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
    r2 = torch.tensor([1.0, 1.0, -1.0], dtype=torch.float64)
    r3 = torch.tensor([0.5, -0.5, 0.0], dtype=torch.float64)  # E r2 r3 = 0
    r4 = torch.tensor([0.6, -0.2, -0.2], dtype=torch.float64)
    moments = Moments(*(float(q @ product) for product in (r2 * r2, r3 * r3, r2 * r4, r2**3)))
    t = log_grid(1e-2, 5e-2)[:, None]
    density = 1 + r2 * t**2 + r3 * t**3 + r4 * t**4
    fisher = ((2 * r2 * t + 3 * r3 * t**2 + 4 * r4 * t**3) ** 2 / density) @ q
    kl = (density - 1 - torch.log(density)) @ q
    assert [float(q @ r) for r in (r2, r3, r4, r2 * r3)] == pytest.approx([0, 0, 0, 0], abs=1e-16)
    assert next_coefficient(t[:, 0], fisher, 2, moments.fisher[0]) == pytest.approx(
        moments.fisher[1], rel=1e-2
    )
    assert next_coefficient(t[:, 0], kl, 4, moments.kl[0]) == pytest.approx(moments.kl[1], rel=1e-2)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_volume_of_a_basin(k: int) -> None:
    line = torch.linspace(0, 1, 200_001, dtype=torch.float64)[1:]
    kl = Gaussian(k).kl(line)
    levels = log_grid(1e-5, 1e-2)
    volumes = torch.stack([(kl < level).double().mean() for level in levels])
    assert fit_rate(levels, volumes).slope == pytest.approx(basin_exponent(k), abs=2e-3)


@pytest.mark.parametrize("activation", list(CHAINS))
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_the_regime_of_a_chain(depth: int, activation: str) -> None:
    noisy, exact = measured_ladder(depth, activation, 1.0), measured_ladder(depth, activation, 0.0)
    assert noisy == pytest.approx(ladder(depth, "noisy"), abs=0.01)
    assert exact == pytest.approx(ladder(depth, "noise-free"), abs=0.01)
    assert read_regime(noisy) == "noisy"
    assert read_regime(exact) == "noise-free"
    assert [b - a for a, b in zip(noisy, exact, strict=True)] == pytest.approx([2 * depth] * depth, abs=0.02)


def test_known_ladders_and_what_is_neither() -> None:
    assert ladder(2, "noise-free") == (6, 4)
    assert ladder(6, "noise-free") == (22, 20, 18, 16, 14, 12)
    assert ladder(6, "noisy") == (10, 8, 6, 4, 2, 0)
    assert read_regime([10.0, 8.0, 6.0, 4.0, 2.0]) == "neither", "five rungs of a chain of six"
    assert read_regime([0.0, 0.0, 0.0]) == "neither"
    assert read_regime([4.0, 2.0, math.nan]) == "neither"
    assert read_regime([4.06, 2.0, 0.0]) == "neither"
    with pytest.raises(GeometryError, match="0 layers"):
        read_regime([])


def test_bad_orders_and_weights_are_named() -> None:
    with pytest.raises(GeometryError, match="KL order of 0"):
        basin_exponent(0)
    with pytest.raises(GeometryError, match=r"weight of 1\.0"):
        mixture_moments(1.0)
    with pytest.raises(GeometryError, match="3 or more"):
        next_coefficient(torch.ones(2), torch.ones(2), 2, 1.0)
