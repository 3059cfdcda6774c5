"""Parallel sweeps of the forward: exact after the chain's length, and Newton by a linear chain in one."""

from __future__ import annotations

import pytest
import torch

from papers.latent_bounded_interfaces import forward_sweeps as study
from topograd.interfaces.regions import Regions
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology


def regions(words: str) -> Regions:
    torch.manual_seed(0)
    stack = GPT(layers=5, width=8, heads=2, vocab=11, context=8).double()
    plan = prepare(stack, Topology.regions("1,1,1,1,1", words, first_region=int(":" not in words)))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return Regions.of(stack, plan)


@pytest.mark.parametrize("words", ["published:r=4", "S=4,r=4"])
def test_sweeps_end_at_the_chain_s_own_messages(words: str) -> None:
    inputs = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(1))
    made = regions(words)
    for way in ("picard", "newton"):
        errors = study.sweeps(made, inputs, way)
        assert len(errors) == 4
        assert errors[0] > 1e-3
        assert errors[-1] < 1e-12
    picard, newton = (study.sweeps(made, inputs, way) for way in ("picard", "newton"))
    assert newton[-2] < picard[-2]


def test_how_many_are_needed() -> None:
    assert study.needed([1.0, 1e-7, 1e-9]) == 1
    assert study.needed([1.0, 1e-7, 1e-3, 0.0]) == 3
    assert study.needed([0.0, 0.0]) == 0
