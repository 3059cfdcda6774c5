"""The authors' interface against its formulas, written out."""

import copy

import torch
from torch import Tensor

from raising import refused
from topograd.errors import TopologyError
from topograd.exec.forward import Predictor
from topograd.interfaces.regions import Regions
from topograd.nn.gpt import GPT
from topograd.nn.interface import add_interfaces
from topograd.nn.interface_config import PublishedInterface
from topograd.nn.published_interface import FirstPublishedRelay, PublishedRelay
from topograd.topology.dag import Topology

WIDTH, CONTEXT, VOCAB, RANK = 8, 6, 11, 4
REGIONS = Topology.regions("2,1,1", first_region=0)


def model() -> GPT:
    torch.manual_seed(0)
    stack = GPT(layers=4, width=WIDTH, heads=2, vocab=VOCAB, context=CONTEXT).double()
    add_interfaces(stack, PublishedInterface(rank=RANK), 3, WIDTH, CONTEXT)
    return stack


def noisy() -> GPT:
    stack = model()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return stack


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def perceptron(stack: GPT, name: str, x: Tensor) -> Tensor:
    """W₂ silu(W₁ x + b₁) + b₂, by the names of a checkpoint."""
    state = stack.state_dict()
    W1, b1, W2, b2 = (state[f"relays.{name}.{part}"] for part in ("0.weight", "0.bias", "2.weight", "2.bias"))
    return silu(x @ W1.T + b1) @ W2.T + b2


def test_it_is_the_statement() -> None:
    stack = noisy()
    inputs = torch.randint(VOCAB, (3, CONTEXT), generator=torch.Generator().manual_seed(1))
    x0 = stack.embed(inputs)
    ctx = stack.layer_context(x0, inputs)
    m = perceptron(stack, "interface-0.start", x0.mean(1))
    for k, region in enumerate(REGIONS.stages):
        h = x0 + perceptron(stack, f"interface-{k}.decode", m)[:, None]
        for layer in range(region.start, region.stop):
            h = stack.layers[layer](h, ctx)
        if k < 2:
            state = stack.state_dict()
            name = f"interface-{k + 1}"
            m = m + torch.tanh(state[f"relays.{name}.alpha"]) * perceptron(stack, f"{name}.encode", h.mean(1))
            centred = m - m.mean(-1, keepdim=True)
            m = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
            m = m * state[f"relays.{name}.norm.weight"] + state[f"relays.{name}.norm.bias"]
    torch.testing.assert_close(Predictor(stack, REGIONS)(inputs), stack.readout(h, 2), rtol=1e-11, atol=1e-12)


def test_it_begins_as_the_authors_have_it() -> None:
    relays = model().learned_relays()
    assert list(relays) == ["interface-0", "interface-1", "interface-2"]
    assert isinstance(relays["interface-0"], FirstPublishedRelay)
    for name in ("interface-1", "interface-2"):
        relay = relays[name]
        assert isinstance(relay, PublishedRelay)
        assert relay.alpha.item() == 0.5
        assert float(relay.state_dict()["decode.2.weight"].abs().max()) > 0, "Dec is not zero at first"
        assert all(linear.bias is not None for linear in (relay.encode[0], relay.decode[2]))
    names = [name for name, _ in relays["interface-1"].named_parameters()]
    assert not any("start" in name for name in names), "m_0 is the first relay's alone"


def test_m_0_learns_through_both_of_its_uses() -> None:
    stack = noisy()
    first, second = stack.relay("interface-0"), stack.relay("interface-1")
    x0 = torch.randn(2, CONTEXT, WIDTH, dtype=torch.float64)
    second.send(torch.zeros_like(x0), x0).square().sum().backward()
    assert first.start[0].weight.grad.abs().max() > 0  # type: ignore[attr-defined]


def test_a_topology_without_the_first_relay_is_refused() -> None:
    with refused(TopologyError, setting="relay"):
        Regions.of(model(), Topology.regions("2,1,1"))
    assert Regions.of(model(), REGIONS).count == 3


def test_a_copy_keeps_its_own_m_0() -> None:
    stack = copy.deepcopy(noisy())
    with torch.no_grad():
        stack.relay("interface-0").start[0].weight.zero_()  # type: ignore[attr-defined]
    x0 = torch.randn(2, CONTEXT, WIDTH, dtype=torch.float64)
    second = stack.relay("interface-1")
    same = second.send(x0, x0), second.send(x0, 2 * x0)
    assert torch.equal(*same), "m_0 is a constant now"
