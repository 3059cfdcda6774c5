"""The leak's study: what prefix-only evaluation says of an honest and of a leaky model."""

import pytest
import torch

from topograd.nn.gpt import GPT
from topograd.nn.interface import SegmentInterface, add_interfaces
from topograd.studies.interfaces import position_losses
from topograd.studies.leak import CAUSAL, FLOOR, LEAKY, LENGTH, VOCAB, iid_batch, iid_loss, prefix_losses
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan


@pytest.mark.parametrize(("interface", "honest"), [(LEAKY, False), (CAUSAL, True)])
def test_an_honest_model_needs_no_later_token(interface: str, honest: bool) -> None:
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=VOCAB, context=LENGTH).double()
    add_interfaces(stack, SegmentInterface.parse(interface), 2, 16, LENGTH)
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    plan = Plan.of(Topology.regions("1,1"), 2)
    inputs, targets = iid_batch(3)
    forced = position_losses(stack, plan, inputs, targets)
    alone = prefix_losses(stack, plan, inputs, targets)
    assert alone.shape == forced.shape
    assert torch.allclose(forced, alone, rtol=1e-10) == honest
    assert torch.allclose(forced[:, -1], alone[:, -1], rtol=1e-10), "the last position has seen all in both"


def test_an_honest_model_does_not_beat_chance() -> None:
    assert FLOOR - 0.02 < iid_loss(CAUSAL, steps=2) < FLOOR + 0.5


def test_targets_follow_inputs() -> None:
    inputs, targets = iid_batch(4)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
