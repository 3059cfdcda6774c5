"""No logit depends on a later position: exactly 0.0 for every pool, S and mixer; the published one leaks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from papers.latent_bounded_interfaces.causality import future_gradient
from raising import refused
from tests.oracles.interfaces import interface_forward
from topograd.errors import StackError
from topograd.exec.forward import stage_outputs
from topograd.nn.config import ARCHITECTURES, Architecture, Maps, Pool, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import SegmentRelay, add_interfaces
from topograd.nn.stack import LayerContext
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

CONTEXT, VOCAB = 12, 5
CHAIN = Topology.regions("1,1,1")
PLAN = Plan.of(CHAIN, 3)
PUBLISHED = SegmentInterface(segments=1, rank=4, pool="mean", causal=False)
POOLS: list[Pool] = ["tail", "mean", "cumulative"]


def model(settings: SegmentInterface, **config: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"layers": 3, "width": 8, "heads": 2, "vocab": VOCAB, "context": CONTEXT, "ssm_state": 4}
    stack = GPT(**{**sizes, **config}).double()
    add_interfaces(stack, settings, 3, 8, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


def tokens(time: int = CONTEXT) -> Tensor:
    return torch.randint(VOCAB, (2, time), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("segments", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("pool", POOLS)
def test_nothing_leaks(pool: Pool, segments: int) -> None:
    assert (
        future_gradient(model(SegmentInterface(segments=segments, rank=4, pool=pool)), PLAN, tokens()) == 0.0
    )


@pytest.mark.parametrize("maps", ["linear", "gated"])
@pytest.mark.parametrize("time", [CONTEXT, 10, 2])
def test_nothing_leaks_with_other_maps_and_lengths(maps: Maps, time: int) -> None:
    stack = model(
        SegmentInterface(segments=4, rank=4, pool="cumulative", maps=maps), windows=(3, 0), mlp="swiglu"
    )
    assert future_gradient(stack, PLAN, tokens(time)) == 0.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_leaks_from_any_mixer(architecture: Architecture) -> None:
    for pool in POOLS:
        stack = model(SegmentInterface(segments=4, rank=4, pool=pool), architecture=architecture)
        assert future_gradient(stack, PLAN, tokens()) == 0.0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_published_interface_leaks(architecture: Architecture) -> None:
    assert future_gradient(model(PUBLISHED, architecture=architecture), PLAN, tokens()) > 1e-3


@pytest.mark.parametrize("settings", [SegmentInterface(segments=4, rank=4, pool="mean"), PUBLISHED])
def test_it_is_the_reference_s_jacobian(settings: SegmentInterface, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of ∂ logits / ∂ x0, of the graph that leaves nothing out: zero where ours is, and not elsewhere."""
    stack, inputs = model(settings), tokens()[:1]
    x0 = stack.embed(inputs).detach()
    canvas: list[Tensor] = []
    monkeypatch.setattr(stack, "embed", lambda _: canvas[-1])

    def logits(x: Tensor) -> Tensor:
        canvas.append(x)
        return interface_forward(stack, CHAIN, inputs)[0][0]

    J = torch.autograd.functional.jacobian(logits, x0)[:, :, 0].abs().amax((1, 3))  # (t, t')
    canvas.append(x0)
    future = J.triu(1).max().item()
    assert (future == 0.0) == settings.causal
    assert (future_gradient(stack, PLAN, inputs) == 0.0) == settings.causal
    assert J.tril().diagonal().min() > 0


@pytest.mark.parametrize("pool", POOLS)
def test_later_tokens_change_nothing(pool: Pool) -> None:
    """Through whatever they come: x0, value embeddings or the layer context. Bit for bit."""
    stack = model(SegmentInterface(segments=4, rank=4, pool=pool), value_embeddings="all")
    inputs = tokens()
    whole = stage_outputs(stack, PLAN, inputs, [2])[2]
    for t in range(1, CONTEXT):
        other = torch.cat((inputs[:, :t], (inputs[:, t:] + 1) % VOCAB), dim=1)
        changed = stage_outputs(stack, PLAN, other, [2])[2]
        assert torch.equal(changed[:, :t], whole[:, :t])
        assert not torch.equal(changed[:, t], whole[:, t])


class _TooEarly(SegmentRelay):
    """Tells a segment's state `early` positions before the segment begins."""

    early = 0

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        decoded = super().receive(message, ctx) - ctx.x0
        return ctx.x0 + decoded.roll(-self.early, dims=1)


class _Peeking(torch.nn.Module):
    """A layer that adds a little of a later position's canvas, at one place alone."""

    def __init__(self, block: torch.nn.Module, place: int, ahead: int) -> None:
        super().__init__()
        self.block, self.place, self.ahead = block, place, ahead

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        seen = torch.zeros(ctx.x0.shape[1], 1, dtype=h.dtype)
        seen[self.place] = 1e-9
        return self.block(h, ctx) + seen * ctx.x0.roll(-self.ahead, dims=1)


@pytest.mark.parametrize(("early", "found"), [(0, False), (1, False), (2, True)])
def test_a_planted_leak_of_the_relay_is_found(early: int, found: bool) -> None:
    """The last position of a segment may hear what ends with itself; the one before it may not."""
    settings = SegmentInterface(segments=4, rank=4)
    stack = model(settings)
    planted = _TooEarly(settings, 8, CONTEXT, first=False).double()
    planted.early = early
    planted.load_state_dict(stack.relays["interface-2"].state_dict())
    stack.add_relay("interface-2", planted)
    assert (future_gradient(stack, PLAN, tokens()) > 1e-3) == found


@pytest.mark.parametrize("place", [0, 5, CONTEXT - 2])
def test_a_planted_leak_of_the_last_layer_is_found_at_every_position(place: int) -> None:
    stack = model(SegmentInterface(segments=4, rank=4))
    stack.layers[2] = _Peeking(stack.layers[2], place, ahead=1)
    assert 0 < future_gradient(stack, PLAN, tokens()) < 1e-6


@pytest.mark.parametrize(("ahead", "found"), [(4, True), (1, False)])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_planted_leak_of_an_early_region_is_found(layer: int, ahead: int, found: bool) -> None:
    """Position 3 sees one that is `ahead`, and its segment 3..5 is told to positions 6 and later.

    So position 7 comes too early at 6; position 4 does not.
    """
    stack = model(SegmentInterface(segments=4, rank=4, pool="mean"))
    stack.layers[layer] = _Peeking(stack.layers[layer], 3, ahead)
    assert (future_gradient(stack, PLAN, tokens()) > 0) == found


def test_bad_input() -> None:
    stack = model(SegmentInterface(segments=4, rank=4))
    for inputs in (tokens(1), tokens()[0]):
        with refused(StackError, setting="inputs"):
            future_gradient(stack, PLAN, inputs)
