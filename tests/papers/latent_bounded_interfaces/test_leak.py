"""The leak's study: training and prefix-only evaluation tell an honest model from a leaky one."""

import pytest
import torch

from papers.latent_bounded_interfaces.interfaces import position_losses, prefix_losses
from papers.latent_bounded_interfaces.leak import (
    CAUSAL,
    FLOOR,
    LEAKY,
    LENGTH,
    VOCAB,
    iid_batch,
    iid_loss,
    leak,
)
from raising import refused
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.interface_config import parse_interface
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology


@pytest.mark.parametrize(("interface", "honest"), [(LEAKY, False), (CAUSAL, True)])
def test_an_honest_model_needs_no_later_token(interface: str, honest: bool) -> None:
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=VOCAB, context=LENGTH).double()
    first = parse_interface(interface).first_region
    plan = prepare(stack, Topology.regions("1,1", interface, first_region=first))
    for parameter in stack.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    inputs, targets = iid_batch(3)
    forced = position_losses(stack, plan, inputs, targets)
    alone = prefix_losses(stack, plan, inputs, targets)
    assert alone.shape == forced.shape
    assert torch.allclose(forced, alone, rtol=1e-10) == honest
    assert torch.allclose(forced[:, -1], alone[:, -1], rtol=1e-10), "the last position has seen all in both"


@pytest.mark.parametrize(("interface", "honest"), [(LEAKY, False), (CAUSAL, True)])
def test_only_a_model_that_sees_its_targets_beats_chance(interface: str, honest: bool) -> None:
    """80 steps are enough for the published interface to read 0.08 nats from what is to be predicted."""
    gained = FLOOR - iid_loss(interface, steps=80)
    assert (-0.1 < gained < 0.01) if honest else (gained > 0.04), gained


def test_targets_follow_inputs() -> None:
    inputs, targets = iid_batch(4)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_leak_of_a_small_model() -> None:
    assert leak() == 0.0
    assert leak(pool="mean", segments=1, causal=False) > 1e-3


def test_an_interface_that_cannot_be() -> None:
    with refused(ConfigError, setting="causal", given=False):
        leak(causal=False)
    with pytest.raises(ConfigError, match="S is 5 and the context 32"):
        leak(segments=5)
