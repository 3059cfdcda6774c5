"""The autoencoder's two bottoms at fixed weights, and its gradients against autograd."""

import pytest
import torch

from papers.dead_directions.families.autoencoder import Autoencoder
from papers.dead_directions.families.two_layer import activation
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid

NAMES = ["linear", "relu", "gelu", "tanh"]


@pytest.mark.parametrize("seed", [42, 142, 242, 342, 442])
@pytest.mark.parametrize("name", NAMES)
def test_both_rates(name: str, seed: int) -> None:
    t, family = log_grid(1e-4, 1e-2), Autoencoder(name, seed=seed, samples=1000)
    assert fit_rate(t, family.gradient_bottom(t)).slope == pytest.approx(2, abs=0.01)
    assert fit_rate(t, family.activation_bottom(t)).slope == pytest.approx(1, abs=0.01)


def test_large_t_is_no_asymptotic_window() -> None:
    t = log_grid(0.1, 0.5)
    ends = {}
    for name in NAMES:
        bottom = Autoencoder(name, samples=1000).gradient_bottom(t)
        ends[name] = float((bottom[-1] / bottom[0]).log() / (t[-1] / t[0]).log())
    assert ends["gelu"] > 2.1 > ends["relu"] > 1.9
    assert ends["tanh"] < 1.9 < ends["linear"] < 2.1


@pytest.mark.parametrize("name", NAMES)
def test_bottoms_are_those_of_the_network(name: str) -> None:
    family = Autoencoder(name, inputs=5, hidden=3, samples=200)
    t = torch.tensor([0.3], dtype=torch.float64)
    W1, W2 = family.weights(0.3)
    assert W1[-1].norm().item() == pytest.approx(0.3)
    assert W2[:, -1].norm().item() == pytest.approx(0.3)
    x = family.draw()[2]
    z = (x @ W1.mT).requires_grad_()
    h = activation(name).function(z)
    (delta,) = torch.autograd.grad(((h @ W2.mT - x) ** 2).sum() / 2, z)
    G, A = delta.mT @ delta / 200, (h.mT @ h).detach()
    assert family.gradient_bottom(t).item() == pytest.approx(float(torch.linalg.eigvalsh(G)[0]), rel=1e-9)
    assert family.activation_bottom(t).item() ** 2 == pytest.approx(
        float(torch.linalg.eigvalsh(A)[0]), rel=1e-9
    )


@pytest.mark.parametrize("name", NAMES)
def test_divergence_is_that_of_the_two_networks(name: str) -> None:
    family = Autoencoder(name, inputs=4, hidden=3, samples=4)
    t = torch.tensor([0.4], dtype=torch.float64)
    x = torch.randn(200_000, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    outputs = []
    for value in (0.4, 0.0):
        W1, W2 = family.weights(value)
        outputs.append(activation(name).function(x @ W1.mT) @ W2.mT)
    apart = (outputs[0] - outputs[1]).square().sum(-1).mean() / 2
    assert family.kl(t).item() == pytest.approx(apart.item(), rel=0.02)


def test_a_seed_gives_the_same_network() -> None:
    t = log_grid(1e-2, 1e-1)
    first, again, other = (Autoencoder(seed=s, samples=100).gradient_bottom(t) for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_bad_shapes_are_named() -> None:
    with refused(GeometryError, setting="hidden", given=12):
        Autoencoder(hidden=12)
    with refused(GeometryError, setting="name", given="silu"):
        Autoencoder("silu")
