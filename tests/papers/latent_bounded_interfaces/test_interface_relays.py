"""Interfaces that differ in one thing: causal all of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from papers.latent_bounded_interfaces.interface_relays import (
    KINDS,
    Authors,
    OwnPosition,
    Phase,
    join_regions,
)
from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.interfaces.ablation import silenced
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

CONTEXT = 8


def model(kind: str) -> tuple[GPT, Plan]:
    torch.manual_seed(0)
    stack = GPT(
        layers=3,
        width=8,
        heads=2,
        vocab=20,
        context=CONTEXT,
        smear=False,
        x0_blend=False,
        value_embeddings="none",
    )
    join_regions(stack, kind, "S=4,r=4,pool=tail", 3, 8, CONTEXT)
    plan = prepare(stack, Topology.regions("1,1,1"))
    for p in stack.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return stack.double(), plan


def logits(stack: GPT, plan: Plan, inputs: Tensor) -> Tensor:
    return stack.readout(stage_outputs(stack, plan, inputs, [2])[2], 2)


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_looks_ahead(kind: str) -> None:
    stack, plan = model(kind)
    inputs = torch.randint(20, (1, CONTEXT))
    before = logits(stack, plan, inputs)
    for t in range(CONTEXT):
        other = inputs.clone()
        other[0, t] = (other[0, t] + 1) % 20
        moved = (logits(stack, plan, other) - before)[0].abs().amax(-1)
        assert not moved[:t].any()
        assert moved[t:].any()


def test_a_position_hears_itself_at_once_and_segments_do_not() -> None:
    """Attention off: what changes at the position itself comes through the relay and the canvas alone."""
    for kind, hears in (("own", True), ("segments", False)):
        stack, plan = model(kind)
        inputs = torch.randint(20, (1, CONTEXT))
        plain = logits(stack, plan, inputs)
        with silenced(stack, "zero"):
            deaf = logits(stack, plan, inputs)
        assert bool((plain - deaf)[0, 0].any()) is hears, "position 0 has no segment before it"


def test_kinds_say_what_they_are() -> None:
    own: Any = model("own")[0].learned_relays()["interface-1"]
    phase: Any = model("phase")[0].learned_relays()["interface-1"]
    assert isinstance(own, OwnPosition)
    assert isinstance(phase, Phase)
    assert phase.phase.weight.shape == (2, 4), "a segment has two positions"
    authors: dict[str, Any] = dict(model("authors")[0].learned_relays())
    assert isinstance(authors["interface-1"], Authors)
    assert authors["interface-1"].start is not None, "m_0 comes from the tokens"
    assert authors["interface-2"].start is None


def test_steady_messages_have_no_common_part() -> None:
    stack, plan = model("steady")
    inputs = torch.randint(20, (64, CONTEXT))
    relay: Any = stack.learned_relays()["interface-1"]
    sent: list[Tensor] = []
    plain = relay.receive

    def receive(message: Tensor, ctx: Any) -> Any:
        sent.append(message.detach())
        return plain(message, ctx)

    relay.receive = receive
    for _ in range(2):
        train_step(stack, plan, inputs, inputs)
        stack.after_step()
    assert sent[0].mean(dim=(0, 1)).abs().max() > 1e-3
    torch.testing.assert_close(sent[1].mean(dim=(0, 1)), torch.zeros(4).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(sent[1].var(dim=(0, 1)), torch.ones(4).double(), atol=1e-3, rtol=0)
    before = relay.newest
    logits(stack, plan, inputs)
    assert relay.newest is before, "reading changes nothing"


def test_phase_zero_is_the_plain_interface() -> None:
    stack, plan = model("phase")
    plain, other = model("segments")
    relays: dict[str, Any] = dict(stack.learned_relays())
    for name, relay in relays.items():
        torch.nn.init.zeros_(relay.phase.weight)
        plain.learned_relays()[name].load_state_dict(
            {key: value for key, value in relay.state_dict().items() if not key.startswith("phase")}
        )
    shared = {k: v for k, v in stack.state_dict().items() if "interface" not in k}
    plain.load_state_dict(shared, strict=False)
    inputs = torch.randint(20, (2, CONTEXT))
    torch.testing.assert_close(logits(stack, plan, inputs), logits(plain, other, inputs))
