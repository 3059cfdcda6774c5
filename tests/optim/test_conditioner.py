"""The other bases: equivariant as DDCAdam is, and their own plain step without gauges."""

from typing import Any

import pytest
import torch
from torch import nn

from papers.dead_directions.equivariance import Case, cases, residual_and_drift
from tests.oracles.muon import muon_step, newton_schulz
from topograd.optim.conditioner import COEFFICIENTS, NS_STEPS, DDCMomentum, DDCMuon, orthogonal_step
from topograd.optim.gauges import Gauge, ReLURescale


@pytest.mark.parametrize("kind", [DDCMomentum, DDCMuon])
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_other_bases_are_equivariant(kind: Any, case: Case) -> None:
    def make(model: nn.Module, gauge: Gauge) -> torch.optim.Optimizer:
        return kind(model.named_parameters(), [gauge], lr=0.01, rms=kind is DDCMuon)

    assert residual_and_drift(case, make, torch.float64, 25, 0)[0] < 1e-13


def test_plain_momentum_is_not_equivariant_under_rescaling() -> None:
    (case,) = [case for case in cases() if case.name == "ReLURescale"]

    def make(model: nn.Module, gauge: Gauge) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    assert residual_and_drift(case, make, torch.float64, 40, 0)[0] > 1e-2


def test_without_gauges_momentum_is_torchs() -> None:
    torch.manual_seed(0)
    one = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    two = nn.Parameter(one.detach().clone())
    ours = DDCMomentum([one], lr=0.1, momentum=0.8)
    theirs = torch.optim.SGD([two], lr=0.1, momentum=0.8)
    for _ in range(4):
        one.grad = torch.randn_like(one)
        two.grad = one.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(one, two, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("shape", [(4, 3), (3, 7)])
def test_without_gauges_muon_is_the_reference(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(shape, dtype=torch.float64))
    expected, buffer = parameter.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    optimizer = DDCMuon([parameter], lr=0.1, momentum=0.8, weight_decay=0.2)
    for _ in range(3):
        parameter.grad = torch.randn_like(parameter)
        expected, buffer = muon_step(
            expected,
            parameter.grad,
            buffer,
            lr=0.1,
            weight_decay=0.2,
            momentum=0.8,
            nesterov=True,
            ns_coefficients=COEFFICIENTS,
            eps=1e-30,
            ns_steps=NS_STEPS,
            adjust_lr_fn="original",
        )
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-11, atol=1e-12)


def test_orthogonal_steps_of_vectors_and_kernels() -> None:
    torch.manual_seed(0)
    vector, kernel = torch.randn(9, dtype=torch.float64), torch.randn(4, 3, 2, dtype=torch.float64)
    step = orthogonal_step(vector)
    assert torch.cosine_similarity(step, vector, dim=0).item() == pytest.approx(1.0, abs=1e-12)
    assert 0.6 < step.square().mean().sqrt() < 1.3  # Newton-Schulz ends in a band around 1
    flat = newton_schulz(kernel.flatten(1), COEFFICIENTS, NS_STEPS, 1e-30)
    torch.testing.assert_close(orthogonal_step(kernel).flatten(1), flat, rtol=1e-11, atol=1e-12)
    assert orthogonal_step(torch.zeros(3, 2)).tolist() == [[0.0] * 2] * 3


def test_momentum_zero_is_the_flow_of_the_invariant_metric() -> None:
    """W_b ← e^{-η r/√2} W_b - η n_b² (g_b - W_b γ_b / n_b²) for one pair."""
    torch.manual_seed(0)
    named = {n: nn.Parameter(torch.randn(s, dtype=torch.float64)) for n, s in (("a", (3, 2)), ("b", (2, 3)))}
    optimizer = DDCMomentum(named.items(), [ReLURescale("a", "b")], lr=0.01, momentum=0.0)
    expected = {}
    g = {name: torch.randn_like(parameter) for name, parameter in named.items()}
    for name, parameter in named.items():
        parameter.grad = g[name]
    gamma = {n: (p.detach() * g[n]).sum() for n, p in named.items()}
    r = (gamma["a"] + gamma["b"]) / 2**0.5
    for name, p in named.items():
        W, n2 = p.detach().clone(), p.detach().square().sum()
        expected[name] = (-0.01 * r / 2**0.5).exp() * W - 0.01 * n2 * (g[name] - W * gamma[name] / n2)
    optimizer.step()
    for name, p in named.items():
        torch.testing.assert_close(p.detach(), expected[name], rtol=1e-12, atol=1e-13)
