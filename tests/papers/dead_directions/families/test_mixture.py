"""Mixtures against 40 digits of decimal arithmetic, against dense matrices, and their exponents."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from papers.dead_directions.families.mixture import Merge, WeightBoundary
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, local_slope, log_grid

THREE = Merge((0.25, 0.25, 0.5), (3.0,))


def decimal_sums(family: Merge, t: float) -> tuple[float, float]:
    """F and K by the plain formulas, with enough digits for them to cancel."""
    with localcontext() as context:
        context.prec = 40
        weights = [Decimal(w) for w in family.weights]
        pair = weights[0] + weights[1]
        rates = [-weights[1] / pair, weights[0] / pair] + [Decimal(0)] * len(family.others)
        starts = [Decimal(0), Decimal(0), *map(Decimal, family.others)]
        means = [start + rate * Decimal(t) for start, rate in zip(starts, rates, strict=True)]
        fisher = kl = zero = Decimal(0)
        for i in range(-80, 112):
            x = (Decimal(i) + Decimal("0.5")) / 8
            before = sum(
                (w * (-((x - m) ** 2) / 2).exp() for w, m in zip(weights, starts, strict=True)), zero
            )
            bells = [w * (-((x - m) ** 2) / 2).exp() for w, m in zip(weights, means, strict=True)]
            slope = sum((r * (x - m) * b for r, m, b in zip(rates, means, bells, strict=True)), zero)
            after = sum(bells, zero)
            fisher += slope**2 / after
            kl += before * (before / after).ln()
        scale = Decimal(8) * Decimal(2 * math.pi).sqrt()
        return float(fisher / scale), float(kl / scale)


def dense_fisher(family: Merge, t: float, weight: bool) -> Tensor:
    """The Fisher in all means (and the weight) by plain sums over a fine line."""
    x = torch.linspace(-15, 18, 20_001, dtype=torch.float64)
    means = [*(rate * t for rate in family.velocity), *family.others]
    bells = [torch.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in means]
    density = sum((w * b for w, b in zip(family.weights, bells, strict=True)), torch.zeros_like(x))
    rows = [w * (x - m) * b for w, m, b in zip(family.weights, means, bells, strict=True)]
    if weight:
        rows.append(bells[1] - bells[0])
    scores = torch.stack(rows)
    return (scores / density) @ scores.mT * float(x[1] - x[0])


def slope(t: Tensor, values: Tensor) -> float:
    """A plain least-squares slope, where no window is asymptotic."""
    centred = t.log() - t.log().mean()
    return float(centred @ values.log() / (centred @ centred))


def slopes(t: Tensor, spectrum: Tensor) -> list[float | None]:
    return [fit_rate(t, column).slope for column in spectrum.unbind(1)]


@pytest.mark.parametrize("family", [Merge(), Merge((0.7, 0.3)), THREE], ids=["even", "uneven", "three"])
@pytest.mark.parametrize("t", [1e-6, 1e-2, 1.0])
def test_fisher_and_divergence_hold_every_digit(family: Merge, t: float) -> None:
    fisher, kl = decimal_sums(family, t)
    at = torch.tensor([t], dtype=torch.float64)
    assert family.fisher(at).item() == pytest.approx(fisher, rel=3e-15)
    assert family.kl(at).item() == pytest.approx(kl, rel=3e-15)


def test_far_beyond_where_a_log_ratio_is_rounding() -> None:
    t = torch.tensor([1e-30], dtype=torch.float64)
    family = Merge((0.8, 0.2))
    assert family.kl(t).item() == pytest.approx(0.16**2 / 4 * 1e-120, rel=1e-12)
    assert (family.fisher(t) * t**2 / family.kl(t)).item() == pytest.approx(8, rel=1e-12)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("family", [Merge((0.7, 0.3)), THREE], ids=["two", "three"])
def test_spectra_are_those_of_the_dense_matrix(family: Merge, weight: bool) -> None:
    t = torch.tensor([0.5, 1.0], dtype=torch.float64)
    dense = torch.stack([torch.linalg.eigvalsh(dense_fisher(family, v, weight)) for v in t.tolist()])
    torch.testing.assert_close(family.spectrum(t, weight=weight), dense, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("weight", [0.5, 0.3, 0.2, 0.1])
def test_two_components(weight: float) -> None:
    t, family = log_grid(1e-3, 1e-2), Merge((1 - weight, weight))
    assert slopes(t, family.spectrum(t)) == pytest.approx([2, 0], abs=0.01)
    assert slopes(t, family.spectrum(t, weight=True)) == pytest.approx([6, 2, 0], abs=0.01)
    assert fit_rate(t, family.fisher(t)).order == pytest.approx(2, abs=1e-3)
    assert fit_rate(t, family.kl(t)).slope == pytest.approx(4, abs=1e-3)


def test_three_components() -> None:
    t = log_grid(1e-3, 1e-2)
    assert slopes(t, THREE.spectrum(t)) == pytest.approx([2, 0, 0], abs=0.01)


@pytest.mark.parametrize("weight", [0.5, 0.3, 0.1])
def test_divergence_per_unit_of_length(weight: float) -> None:
    family = Merge((1 - weight, weight))
    m = weight * (1 - weight) / (weight**2 + (1 - weight) ** 2)
    t = torch.tensor([1e-4], dtype=torch.float64)
    length = t * math.hypot(*family.velocity)
    assert (family.kl(t) / length**4).item() == pytest.approx(m**2 / 4, rel=1e-7)


def test_only_the_direction_that_keeps_the_mean_is_dead() -> None:
    t = log_grid(1e-3, 1e-2)
    raw = torch.tensor([-1.0, 1.0], dtype=torch.float64) / math.sqrt(2)
    for weight, expected in ((0.5, 2), (0.3, 0)):
        family = Merge((1 - weight, weight))
        along = torch.stack([raw @ dense_fisher(family, v, False) @ raw for v in t.tolist()])
        assert fit_rate(t, along).slope == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize(("weight", "at_one_mean"), [(0.2, 4), (0.5, 6)])
def test_the_weight_hides_the_sixth_power(weight: float, at_one_mean: int) -> None:
    t, family = log_grid(2e-2, 6e-2), Merge((1 - weight, weight))
    entry = torch.stack([dense_fisher(family, v, True)[2, 2] for v in t.tolist()])
    assert local_slope(t, family.spectrum(t, weight=True)[:, 0]) == pytest.approx(6, abs=0.05)
    means = torch.stack([dense_fisher(family, v, True)[:2, :2] for v in t.tolist()])
    cross = torch.stack([dense_fisher(family, v, True)[2, :2] for v in t.tolist()])
    live = torch.ones(2, dtype=torch.float64)  # both means together: the direction that stays
    rest = entry - (cross @ live) ** 2 / torch.einsum("i,nij,j->n", live, means, live)
    assert local_slope(t, entry) == pytest.approx(2, abs=0.01)
    assert local_slope(t, rest) == pytest.approx(at_one_mean, abs=0.05)


def test_a_vanishing_weight_reaches_its_limits() -> None:
    family = WeightBoundary(2.0)
    weight = log_grid(1e-8, 1e-6)
    spectrum = family.spectrum(weight)
    by_mean, by_weight = family.limits
    assert (family.fisher(weight) / weight**2)[0].item() == pytest.approx(by_mean, rel=1e-3)
    rest = torch.linalg.eigvalsh(torch.tensor([[1, 2], [2, by_weight]], dtype=torch.float64))
    assert spectrum[0, 1:].tolist() == pytest.approx(rest.tolist(), rel=1e-3)
    assert fit_rate(weight, family.fisher(weight)).slope == pytest.approx(2, abs=0.01)
    assert slopes(weight, spectrum) == pytest.approx([2, 0, 0], abs=0.01)


def test_slopes_of_a_vanishing_weight_before_the_limit_say_nothing_of_an_order() -> None:
    family, weight = WeightBoundary(3.0), log_grid(1e-4, 1e-2)
    small, _, large = family.spectrum(weight).unbind(1)
    read = [slope(weight, values) for values in (family.fisher(weight), small, large, large / small)]
    assert read == pytest.approx([1.15, 1.40, -0.63, -2.03], abs=0.005)
    assert family.order is None
    assert fit_rate(weight, family.fisher(weight)).refused is not None, "the window is not asymptotic"
    assert fit_rate(weight, family.kl(weight)).refused is not None, "and the divergence is 0 throughout"


def test_bad_mixtures_are_named() -> None:
    with refused(GeometryError, setting="weights"):
        Merge((0.5, 0.25, 0.25))
    with refused(GeometryError, setting="weights"):
        Merge((0.5, 0.4))
    with refused(GeometryError, setting="weights"):
        Merge((1.0, 0.0))
    with refused(GeometryError, setting="others"):
        Merge((0.25, 0.25, 0.5), (0.0,))
    with refused(GeometryError, setting="mean", given=0.0):
        WeightBoundary(0.0)
    with refused(GeometryError, setting="t", given=1.0):
        WeightBoundary(2.0).spectrum(torch.tensor([1.0]))
