"""Silenced messages: what is heard, and what it costs."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from topograd.exec.forward import stage_logits
from topograd.interfaces.ablation import Silence, ablated, silenced
from topograd.interfaces.regions import Regions
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.interface_config import parse_interface
from topograd.nn.stack import LayerContext
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, CONTEXT = 11, 8
CHAIN = Plan.of(Topology.regions("1,1,1"), 3)


def model(form: str = "S=4,r=4") -> GPT:
    torch.manual_seed(0)
    stack = GPT(layers=3, width=8, heads=2, vocab=VOCAB, context=CONTEXT).double()
    add_interfaces(stack, parse_interface(form), 3, 8, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return stack


def batch() -> tuple[Tensor, Tensor]:
    inputs, targets = torch.randint(VOCAB, (2, 3, CONTEXT), generator=torch.Generator().manual_seed(1))
    return inputs, targets


def logits(stack: GPT, inputs: Tensor) -> Tensor:
    return stage_logits(stack, CHAIN, 2, inputs).detach()


def test_silences() -> None:
    stack, (inputs, _) = model(), batch()
    plain, found = logits(stack, inputs), {}
    for how in get_args(Silence):
        with silenced(stack, how):
            found[how] = logits(stack, inputs)
    assert all(not torch.equal(one, plain) for one in found.values())
    assert torch.equal(logits(stack, inputs), plain), "it is over"
    alone = inputs[:1].expand(3, -1)
    with silenced(stack, "shuffled"):
        torch.testing.assert_close(logits(stack, alone), plain[:1].expand(3, -1, -1))


@pytest.mark.parametrize("form", ["S=4,r=4", "residual:r=3"])
def test_costs_are_differences_of_losses(form: str) -> None:
    stack, (inputs, targets) = model(form), batch()

    def loss() -> float:
        return F.cross_entropy(logits(stack, inputs).flatten(0, 1).float(), targets.flatten()).item()

    whole, costs = loss(), ablated(stack, CHAIN, inputs, targets)
    assert list(costs) == ["zero", "shuffled", "mean"]
    for how in get_args(Silence):
        for k, cost in enumerate(costs[how], 1):
            with silenced(stack, how, f"interface-{k}"):
                assert cost == pytest.approx(loss() - whole, abs=1e-12)
            assert cost != 0


def test_a_region_that_does_not_listen_loses_nothing() -> None:
    stack = model("S=4,r=4")
    with torch.no_grad():
        stack.relay("interface-2").decode.outer.weight.zero_()  # type: ignore[attr-defined]
    costs = ablated(stack, CHAIN, *batch())
    assert all(max(abs(cost) for cost in one) == 0 for one in costs.values()), "nor what comes before it"


class Nothing(nn.Module):
    """A layer that adds nothing."""

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return h


@pytest.mark.parametrize("form", ["residual:r=3", "residual:r=3,bypass=0.5", "residual:r=3,basis=learned"])
def test_the_canvas_is_not_silenced(form: str) -> None:
    """Regions that add nothing tell nothing, though a residual form sends the canvas's share."""
    stack, (inputs, targets) = model(form), batch()
    stack.layers = nn.ModuleList(Nothing() for _ in stack.layers)
    regions = Regions.of(stack, CHAIN)
    with torch.no_grad():
        x0 = stack.embed(inputs)
        ctx = stack.layer_context(x0, inputs)
        sent, told = regions.messages(x0, ctx), regions.told(x0, ctx)
    assert all(message.abs().max() > 0.1 for message in sent)
    assert all(message.abs().max() < 1e-12 for message in told)
    costs = ablated(stack, CHAIN, inputs, targets)
    assert all(abs(cost) < 1e-12 for one in costs.values() for cost in one)
