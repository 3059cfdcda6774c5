"""Every way to a region's Jacobian against `torch.autograd.functional.jacobian` of the obvious transition."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raising import refused
from tests.oracles.interfaces import canvas_with_states, next_states
from topograd.errors import ConfigError, StackError
from topograd.interfaces import jacobian
from topograd.interfaces.jacobian import Visit, interface_jacobian, visit
from topograd.interfaces.regions import Regions
from topograd.nn.config import ARCHITECTURES, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface import SegmentRelay, add_interfaces
from topograd.nn.stack import LayerContext
from topograd.runs.topology_config import Jacobian
from topograd.topology.dag import Topology

CONTEXT, BATCH = 12, 3
INTERFACES = {
    "tail": SegmentInterface(segments=4, rank=4),
    "tail-2": SegmentInterface(segments=2, rank=4),
    "tail-6": SegmentInterface(segments=6, rank=3, maps="linear"),
    "mean": SegmentInterface(segments=4, rank=5, pool="mean", maps="gated"),
    "cumulative": SegmentInterface(segments=3, rank=4, pool="cumulative"),
    "published": SegmentInterface(segments=1, rank=6, pool="mean", causal=False),
}
WAYS: dict[str, dict[str, Any]] = {
    "loop": {"way": "loop"},
    "loop-untrimmed": {"way": "loop", "trimmed": False},
    "batched": {"way": "batched"},
    "batched-chunks": {"way": "batched", "trimmed": False, "chunk": 1},
    "forward": {"way": "forward"},
    "forward-chunks": {"way": "forward", "chunk": 5},
    "pullback": {"way": "pullback"},
    "pullback-chunks": {"way": "pullback", "chunk": 1},
}


@cache
def inner_region(
    interface: str, architecture: str = "transformer"
) -> tuple[Regions, Tensor, LayerContext, Tensor]:
    """Three regions, the message to the middle one, the context and its Jacobian (B, n, n) by definition."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "layers": 4,
        "width": 8,
        "heads": 2,
        "vocab": 11,
        "context": CONTEXT,
        "ssm_state": 4,
    }
    stack = GPT(**sizes, architecture=architecture).double()
    add_interfaces(stack, INTERFACES[interface], 3, 8, CONTEXT)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    regions = Regions.of(stack, Topology.regions("1,2,1"))
    inputs = torch.randint(11, (BATCH, CONTEXT))
    x0 = stack.embed(inputs).detach()
    ctx = stack.layer_context(x0, inputs)
    message = regions.messages(x0, ctx)[0].detach().requires_grad_()
    return regions, message, ctx, defined(regions, message.detach(), ctx)


def defined(regions: Regions, message: Tensor, ctx: LayerContext) -> Tensor:
    def transition(m: Tensor) -> Tensor:
        states = list(m.unbind(1))
        h = canvas_with_states(regions.relays[0], ctx.x0, states)
        for layer in regions.plan.stages[1].layers:
            h = regions.stack.layers[layer](h, ctx)
        return torch.stack(next_states(regions.relays[1], h, states), dim=1)

    whole = torch.autograd.functional.jacobian(transition, message).flatten(4, 5).flatten(1, 2)  # b i c j
    per_sample = torch.stack([whole[b, :, b] for b in range(BATCH)])
    for b in range(BATCH):
        whole[b, :, b] = 0
    assert not whole.any(), "samples are independent"
    return per_sample


def seen(interface: str, way: Jacobian, architecture: str = "transformer") -> Visit:
    regions, message, ctx, _ = inner_region(interface, architecture)
    return visit(regions, 1, message, ctx, way)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("interface", INTERFACES)
def test_every_way_is_the_definition(interface: str, name: str) -> None:
    J = interface_jacobian(seen(interface, WAYS[name]["way"]), **WAYS[name])
    torch.testing.assert_close(J, inner_region(interface)[3], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name != "transformer"])
@pytest.mark.parametrize("name", ["loop", "loop-untrimmed", "batched", "forward-chunks"])
def test_recurrent_regions(architecture: str, name: str) -> None:
    J = interface_jacobian(seen("tail", WAYS[name]["way"], architecture), **WAYS[name])
    torch.testing.assert_close(J, inner_region("tail", architecture)[3], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("interface", ["mean", "cumulative"])
def test_no_state_depends_on_a_later_one(interface: str, name: str) -> None:
    J = interface_jacobian(seen(interface, WAYS[name]["way"]), **WAYS[name])
    chosen = INTERFACES[interface]
    blocks = J.view(BATCH, chosen.segments - 1, chosen.rank, chosen.segments - 1, chosen.rank)
    for s in range(chosen.segments - 1):
        assert blocks[:, s, :, : s + 1].abs().amax((0, 1, 3)).min() > 0, "on itself and those before"
        assert torch.equal(blocks[:, s, :, s + 1 :], torch.zeros_like(blocks[:, s, :, s + 1 :]))


@settings(max_examples=25, deadline=None)
@given(rank=st.integers(3, 9), seed=st.integers(0, 1000))
def test_tangent_basis(rank: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(4, rank, generator=generator, dtype=torch.float64)
    m = torch.nn.functional.layer_norm(v, (rank,), eps=1e-24)
    Q = SegmentRelay(SegmentInterface(segments=2, rank=rank), 8, 8, first=False).tangent(m)
    assert Q.shape == (4, rank, rank - 2)
    identity = torch.eye(rank - 2, dtype=torch.float64).expand(4, -1, -1)
    torch.testing.assert_close(Q.mT @ Q, identity, rtol=0, atol=1e-14)
    for dead in (torch.ones_like(m), m):
        assert (Q.mT @ dead[..., None]).abs().max() < 1e-13


@pytest.mark.parametrize("interface", INTERFACES)
def test_the_dead_directions_lose_nothing(interface: str) -> None:
    """J = Q Qᵀ J, of the Jacobian by definition."""
    _, _, _, J = inner_region(interface)
    one = seen(interface, "loop")
    sent = one.message_out.detach()
    Q = one.relay_out.tangent(sent)
    assert Q is not None
    rows = J.view(*sent.shape, -1)
    torch.testing.assert_close(Q @ (Q.mT @ rows), rows, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("way", "trimmed", "calls"), [("loop", True, 6), ("loop", False, 6), ("batched", True, 3)]
)
def test_rank_minus_two_rows_for_each_state(
    way: Jacobian, trimmed: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S - 1 = 3 states of rank 4: two VJPs each in a loop, one each when batched."""
    one = seen("tail", way)
    count = []
    grad = torch.autograd.grad

    def counted(*arguments: Any, **options: Any) -> Any:
        count.append(1)
        return grad(*arguments, **options)

    monkeypatch.setattr(jacobian.torch.autograd, "grad", counted)
    interface_jacobian(one, way, trimmed=trimmed)
    assert len(count) == calls


def test_trimmed_rows_run_through_their_prefix_only() -> None:
    """The rows of state s need (s + 1) ℓ positions; the last ones use the visit's own graph."""
    regions, message, ctx, _ = inner_region("tail")
    one = visit(regions, 1, message, ctx)
    lengths: list[int] = []
    hook = regions.stack.layers[1].register_forward_pre_hook(
        lambda _, given: lengths.append(given[0].shape[1])
    )
    interface_jacobian(one, "loop")
    assert lengths == [3, 6]
    lengths.clear()
    interface_jacobian(one, "loop", trimmed=False)
    hook.remove()
    assert lengths == []


class _NoForwardMode(torch.autograd.Function):
    """Twice x, without a jvp."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class _OldStyle(torch.autograd.Function):
    """Twice x, in the form that torch.func does not take at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class _Layer(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor, ctx: LayerContext) -> Tensor:
        return self.function.apply(h)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("function", [_NoForwardMode, _OldStyle])
def test_a_layer_without_forward_mode_is_refused_in_one_line(
    function: type[torch.autograd.Function], chunk: int | None
) -> None:
    torch.manual_seed(0)
    stack = GPT(layers=3, width=8, heads=2, vocab=11, context=CONTEXT).double()
    add_interfaces(stack, INTERFACES["tail"], 3, 8, CONTEXT)
    stack.layers[1] = _Layer(function)
    regions = Regions.of(stack, Topology.regions("1,1,1"))
    inputs = torch.randint(11, (BATCH, CONTEXT))
    ctx = stack.layer_context(stack.embed(inputs).detach(), inputs)
    message = regions.messages(ctx.x0, ctx)[0].detach().requires_grad_()
    with refused(StackError, setting="jacobian", given="forward") as caught:
        interface_jacobian(visit(regions, 1, message, ctx, "forward"), "forward", chunk)
    assert "\n" not in str(caught.value)
    loop = interface_jacobian(visit(regions, 1, message, ctx), "loop")
    torch.testing.assert_close(loop, defined(regions, message.detach(), ctx), rtol=1e-11, atol=1e-13)


def test_bad_settings() -> None:
    regions, message, ctx, _ = inner_region("tail")
    with refused(ConfigError, setting="jacobian", given="magic"):
        visit(regions, 1, message, ctx, "magic")  # type: ignore[arg-type]
    with refused(ConfigError, setting="chunk", given=0):
        interface_jacobian(visit(regions, 1, message, ctx), chunk=0)
