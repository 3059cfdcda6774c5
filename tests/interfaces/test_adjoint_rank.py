"""Ranks of adjoints: by hand, and on a model whose gradient has a known rank."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.effective_rank import effective_rank
from topograd.interfaces.adjoint_rank import boundary_adjoints, boundary_ranks, energy_rank
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology

VOCAB, CONTEXT, WIDTH = 11, 8, 8


def model() -> GPT:
    torch.manual_seed(0)
    stack = GPT(layers=4, width=WIDTH, heads=2, vocab=VOCAB, context=CONTEXT).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(VOCAB, (2, 4, CONTEXT), generator=torch.Generator().manual_seed(1))
    targets[0, 2] = -100
    return inputs, targets


@pytest.mark.parametrize(
    ("values", "share", "rank"),
    [([1, 1, 1, 1], 0.75, 3), ([1, 1, 1, 1], 0.76, 4), ([5, 0, 0], 0.99, 1), ([0, 0], 0.9, 0)],
)
def test_energy_rank_by_hand(values: list[float], share: float, rank: int) -> None:
    assert energy_rank(torch.tensor(values, dtype=torch.float64), share) == rank


def test_adjoints_are_derivatives_of_the_loss() -> None:
    """By adding a leaf behind each layer, one at a time."""
    stack, (inputs, targets) = model(), batch()
    found = boundary_adjoints(stack, Topology.chain("2,2"), inputs, targets)
    for behind in range(4):
        h = stack.embed(inputs)
        ctx = stack.layer_context(h, inputs)
        leaf = torch.zeros_like(h, requires_grad=True)
        for i, layer in enumerate(stack.layers):
            h = layer(h, ctx) + (leaf if i == behind else 0)
        loss = F.cross_entropy(stack.readout(h, 1).flatten(0, 1).float(), targets.flatten())
        (expected,) = torch.autograd.grad(loss, leaf)
        torch.testing.assert_close(found[behind], expected, rtol=1e-6, atol=1e-9)


def test_an_interface_bounds_the_rank_at_its_boundary() -> None:
    """A residual interface of r = 3 lets at most three directions of gradient through."""
    stack, topology = model(), Topology.regions("2,2", "residual:r=3")
    prepare(stack, topology)
    found = boundary_ranks(stack, topology, *batch())
    assert [one["layer"] for one in found] == [1, 2, 3]
    assert found[1]["rank_99"] <= 3
    assert found[1]["effective_rank"] < 3 + 1e-3
    assert max(found[0]["rank_99"], found[2]["rank_99"]) > 3
    assert all(one["rank_90"] <= one["rank_99"] <= WIDTH for one in found)


def test_in_parts_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target weighs alike, whichever part it is in; a part without any says nothing."""
    stack, topology, (inputs, targets) = model(), Topology.chain("4"), batch()
    targets[1] = -100
    told: list[tuple[int, int]] = []
    whole = boundary_adjoints(stack, topology, inputs, targets)
    expected = [torch.linalg.svdvals(adjoints.flatten(0, -2)) for adjoints in whole[:-1]]
    monkeypatch.setattr("topograd.interfaces.adjoint_rank.AT_ONCE", CONTEXT)
    found = boundary_ranks(stack, topology, inputs, targets, lambda *done: told.append(done))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]
    for one, singular in zip(found, expected, strict=True):
        assert one["effective_rank"] == pytest.approx(effective_rank(singular).item(), rel=1e-6)
        assert one["rank_99"] == energy_rank(singular, 0.99)


def test_nothing_of_the_model_changes() -> None:
    stack = model().requires_grad_(False)
    before = {name: value.clone() for name, value in stack.state_dict().items()}
    boundary_ranks(stack, Topology.chain("4"), *batch())
    assert all(torch.equal(value, before[name]) for name, value in stack.state_dict().items())
    assert not any(len(layer._forward_hooks) for layer in stack.layers)
