"""The subspace interface: its statement, its full rank, its basis."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from topograd.exec.forward import Predictor
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.interface_config import Basis, ResidualInterface
from topograd.nn.residual_interface import ResidualRelay
from topograd.topology.dag import Topology

WIDTH, CONTEXT, VOCAB = 8, 6, 11
REGIONS = Topology.regions("2,1,1")


def model(settings: ResidualInterface | None) -> GPT:
    torch.manual_seed(0)
    stack = GPT(layers=4, width=WIDTH, heads=2, vocab=VOCAB, context=CONTEXT).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if settings is not None:
        add_interfaces(stack, settings, 3, WIDTH, CONTEXT)
        orthonormal(stack)
    return stack


def relays(stack: GPT) -> list[ResidualRelay]:
    return [relay for relay in stack.learned_relays().values() if isinstance(relay, ResidualRelay)]


def orthonormal(stack: GPT) -> None:
    """The stack became float64 after U was made in float32."""
    with torch.no_grad():
        for relay in relays(stack):
            relay.basis.copy_(torch.linalg.qr(relay.basis).Q)


def tokens() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(VOCAB, (2, 3, CONTEXT), generator=torch.Generator().manual_seed(1))
    return inputs, targets


def gradients(stack: GPT, topology: Any) -> tuple[float, dict[str, Tensor]]:
    loss = train_step(stack, topology, *tokens())[-1].item()
    return loss, {n: p.grad for n, p in stack.named_parameters() if p.grad is not None and "relays" not in n}


@pytest.mark.parametrize("basis", ["fixed", "learned"])
def test_at_full_rank_it_is_the_dense_model(basis: Basis) -> None:
    """The positive control: loss and every gradient to rounding."""
    dense, expected = gradients(model(None), Topology.chain("4"))
    loss, actual = gradients(model(ResidualInterface(rank=WIDTH, basis=basis)), REGIONS)
    assert loss == pytest.approx(dense, abs=1e-14)
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-13)


def test_below_full_rank_it_is_not() -> None:
    inputs, _ = tokens()
    dense = model(None)(inputs)
    bounded = Predictor(model(ResidualInterface(rank=WIDTH - 1)), REGIONS)(inputs)
    assert (dense - bounded).abs().max() > 1e-3


@pytest.mark.parametrize("basis", ["fixed", "learned"])
def test_it_is_the_statement(basis: Basis) -> None:
    """m ← m + Uᵀ (h - x), x = x0 + U m, region by region."""
    stack = model(ResidualInterface(rank=3, basis=basis))
    U = torch.linalg.qr(relays(stack)[0].basis).Q
    inputs, _ = tokens()
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    m = x0.new_zeros(*x0.shape[:2], 3)
    for region in REGIONS.stages:
        x = h = x0 + m @ U.T
        for layer in range(region.start, region.stop):
            h = stack.layers[layer](h, ctx)
        m = m + (h - x) @ U
    expected = stack.readout(h, 2)
    torch.testing.assert_close(Predictor(stack, REGIONS)(inputs), expected, rtol=1e-11, atol=1e-12)


def test_a_fixed_basis_is_one_and_does_not_learn_and_a_learned_one_does() -> None:
    fixed, learned = model(ResidualInterface(rank=3)), model(ResidualInterface(rank=3, basis="learned"))
    first, second = (relay.basis for relay in relays(fixed))
    assert torch.equal(first, second)
    torch.testing.assert_close(first.T @ first, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-14)
    for stack, learns in ((fixed, False), (learned, True)):
        train_step(stack, REGIONS, *tokens())
        for relay in relays(stack):
            gradient = relay.basis.grad
            assert (gradient is not None and bool(gradient.abs().max() > 1e-8)) == learns


def test_another_seed_is_another_basis() -> None:
    settings = ResidualInterface(rank=3)
    one, other = ResidualRelay(settings, WIDTH), ResidualRelay(replace(settings, seed=1), WIDTH)
    assert not torch.equal(one.basis, other.basis)
