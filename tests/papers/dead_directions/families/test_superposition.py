"""The superposition model: closed forms against gradients of the network itself, tied and free."""

import pytest
import torch
from torch import Tensor

from papers.dead_directions.families.superposition import Superposition
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid

FAMILIES = [Superposition(), Superposition(6, 3, overlap=0.6)]


def white_inputs(features: int) -> Tensor:
    """Inputs whose second moment is the identity, not only nearly."""
    x = torch.randn(50, features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return torch.linalg.qr(x).Q * 50**0.5


def back_propagated(family: Superposition, t: float, noise: float, tied: bool) -> tuple[Tensor, Tensor]:
    """G_out and G_hidden by autograd: of the residual, and of every output's noise by itself."""
    at = torch.tensor([t], dtype=torch.float64)
    W = family.weights(at)[0].requires_grad_()
    decoder = W.mT if tied else W.detach().mT.clone().requires_grad_()
    start = W.detach().clone()
    start[-1] = 0
    x = white_inputs(family.features)
    hidden = x @ W.mT
    output = hidden @ decoder.mT
    residual = output - x @ start.mT @ start
    signals = [residual.detach()]
    signals += [noise * row.expand_as(x) for row in torch.eye(family.features, dtype=x.dtype)]
    totals = [torch.zeros(size, size, dtype=x.dtype) for size in (family.features, family.hidden)]
    for signal in signals:
        (back,) = torch.autograd.grad(output, hidden, signal, retain_graph=True)
        for total, delta in zip(totals, (signal, back), strict=True):
            total += delta.mT @ delta / len(x)
    return totals[0], totals[1]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("noise", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("family", FAMILIES, ids=["plain", "overlap"])
def test_factors_are_those_of_the_network_tied_or_not(
    family: Superposition, noise: float, tied: bool
) -> None:
    for t in (0.05, 0.7):
        at = torch.tensor([t], dtype=torch.float64)
        found = back_propagated(family, t, noise, tied)
        for expected, measured in zip(family.gradient_factors(at, noise), found, strict=True):
            torch.testing.assert_close(expected[0], measured, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("family", FAMILIES, ids=["plain", "overlap"])
def test_dead_entries_are_those_of_the_factors(family: Superposition) -> None:
    t, u = log_grid(1e-2, 1.0), family.direction_vector()
    for noise in (0.0, 0.5):
        output, hidden = family.gradient_factors(t, noise)
        entries = family.dead_entries(t, noise)
        torch.testing.assert_close(entries[0], output @ u @ u)
        torch.testing.assert_close(entries[1], hidden[:, -1, -1])


@pytest.mark.parametrize(("noise", "expected"), [(0.0, (6, 4)), (1.0, (2, 0))])
def test_the_raise_is_that_of_the_missing_noise(noise: float, expected: tuple[int, int]) -> None:
    t, family = log_grid(1e-3, 3e-2), Superposition()
    output, hidden = (fit_rate(t, entry).slope for entry in family.dead_entries(t, noise))
    assert output is not None
    assert hidden is not None
    assert (hidden, output) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES, ids=["plain", "overlap"])
def test_fisher_and_divergence_are_those_of_the_network(family: Superposition) -> None:
    x, u = white_inputs(family.features), family.direction_vector()
    for t in (0.1, 0.8):
        at = torch.tensor([t], dtype=torch.float64)
        W = family.weights(at)[0]
        step = torch.zeros_like(W)
        step[-1] = u
        moved = torch.func.jvp(lambda w: x @ w.mT @ w, (W,), (step,))[1]
        assert family.fisher(at).item() == pytest.approx(float(moved.square().sum(-1).mean()))
        start = W - t * step
        apart = x @ W.mT @ W - x @ start.mT @ start
        assert family.kl(at).item() == pytest.approx(float(apart.square().sum(-1).mean()) / 2)


@pytest.mark.parametrize("overlap", [0.0, 0.6, 0.9])
def test_the_overlap_scales_the_bottom_and_leaves_the_rate(overlap: float) -> None:
    t = log_grid(1e-3, 3e-2)
    bottom = torch.linalg.eigvalsh(Superposition(6, 3, overlap).gradient_factors(t, 1.0)[1])[:, 0]
    rate = fit_rate(t, bottom)
    assert rate.slope == pytest.approx(2, abs=1e-2)
    assert (bottom / t**2)[0].item() == pytest.approx(1 - overlap**2, rel=1e-3)


def test_bad_shapes_are_named() -> None:
    with refused(GeometryError, setting="hidden", given=6):
        Superposition(5, 6)
    with refused(GeometryError, setting="overlap", given=1.0):
        Superposition(overlap=1.0)
