"""The learned relays: their formulas, where they start, who trains them, and what they do to the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pieces import Decoded
from raising import refused
from topograd.errors import ConfigError, StackError, TopologyError
from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.learned_relays import LEARNED, LearnedRelay, Linear, LowRank, add_relays
from topograd.nn.relays import RELAYS
from topograd.nn.stack import LayerContext, Stack
from topograd.topology.dag import CANVAS, EMBEDDING, PLAIN_RELAYS, Edge, Topology
from topograd.topology.plan import Plan
from topograd.training.evaluation import activation_rank

WIDTH, RANK = 16, 4
CTX = LayerContext(torch.zeros(1), torch.zeros(1), torch.zeros(1))
KINDS = (*PLAIN_RELAYS, *LEARNED)


def made(kind: str, beside: bool = False, noise: float = 0.0) -> LearnedRelay:
    torch.manual_seed(0)
    relay = LEARNED[kind](WIDTH, RANK, beside).double()
    with torch.no_grad():
        for parameter in relay.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return relay


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(kind: str, relay: Any, h: Tensor) -> Tensor:
    """The formulas of the module, matrix by matrix."""
    if kind == "linear":
        return h @ relay.map.weight.T
    if kind == "low-rank":
        return h @ (relay.up.weight @ relay.down.weight).T
    open_ = 1 / (1 + torch.exp(-(h @ relay.gate.weight.T + relay.gate.bias)))
    if kind == "gate":
        return h * open_
    if kind == "residual-gate":
        return h + (h @ (relay.change.up.weight @ relay.change.down.weight).T) * open_
    return open_


@pytest.mark.parametrize("kind", LEARNED)
def test_formulas(kind: str) -> None:
    relay, h = made(kind, noise=0.3), normal(2, 5, WIDTH)
    assert relay.send(h, None) is h
    torch.testing.assert_close(relay.receive(h, CTX), by_hand(kind, relay, h), rtol=1e-12, atol=1e-12)


def test_pre_norm_keeps_the_direction_and_drops_the_size() -> None:
    h = normal(2, 5, WIDTH)
    got = RELAYS["pre-norm"].receive(7 * h, CTX)
    torch.testing.assert_close(got.square().mean(-1), torch.ones(2, 5, dtype=torch.float64))
    torch.testing.assert_close(torch.cosine_similarity(got, h, dim=-1), torch.ones(2, 5, dtype=torch.float64))


def test_first_sources_pass_and_those_beside_are_quiet() -> None:
    h = normal(200, WIDTH)
    first = {kind: made(kind).receive(h, CTX) for kind in LEARNED}
    beside = {kind: made(kind, beside=True).receive(h, CTX) for kind in LEARNED}
    assert torch.equal(first["linear"], h)
    assert torch.equal(first["residual-gate"], h)
    torch.testing.assert_close(first["gate"], 0.8807970779778823 * h)
    twice = made("low-rank").receive(first["low-rank"], CTX)
    torch.testing.assert_close(twice, first["low-rank"], rtol=0, atol=1e-5)  # made orthogonal in float32
    assert first["low-rank"].norm() < 0.6 * h.norm(), "a projection onto 4 of 16 keeps half of the length"
    assert not beside["linear"].any()
    assert not beside["low-rank"].any()
    torch.testing.assert_close(beside["gate"], 0.11920292202211755 * h)


def test_two_linear_relays_are_one_map_of_the_concatenation() -> None:
    first, beside, h, e = (
        made("linear", noise=0.3),
        made("linear", True, 0.3),
        normal(5, WIDTH),
        normal(5, WIDTH),
    )
    assert isinstance(first, Linear)
    assert isinstance(beside, Linear)
    whole = torch.cat((first.map.weight, beside.map.weight), dim=1)
    expected = torch.cat((h, e), dim=-1) @ whole.T
    torch.testing.assert_close(first.receive(h, CTX) + beside.receive(e, CTX), expected)


def test_the_plain_relays_are_those_without_parameters() -> None:
    assert tuple(RELAYS) == (*PLAIN_RELAYS, CANVAS)
    assert not set(RELAYS) & set(LEARNED)


def test_the_bounded_relay_compresses_and_the_gate_does_not() -> None:
    """Prop. 10.18 on normal activations; the ranks are those of the module's head, at width 16."""
    h = normal(2000, WIDTH)
    before = activation_rank(h)
    assert activation_rank(made("sigmoid").receive(h, CTX)) < 0.75 * before
    assert activation_rank(made("gate", noise=0.1).receive(h, CTX)) > 0.97 * before
    assert activation_rank(made("low-rank").receive(h, CTX)) <= RANK


def test_a_bounded_relay_can_raise_the_rank() -> None:
    """Prop. 8.16 does not hold for every h: what has rank 3 is bent into more directions."""
    h = 5 * normal(2000, 3) @ normal(3, WIDTH) / 3**0.5
    assert activation_rank(h) < 3.01
    assert activation_rank(made("sigmoid").receive(h, CTX)) > 5


def chain(kind: str, grad_scale: float = 0.0) -> Topology:
    return Topology.chain("1,1,2", grad_scale=grad_scale).with_relays(kind)


def with_relays(make_gpt: Callable[..., GPT], topology: Topology) -> GPT:
    model = make_gpt()
    add_relays(model, replace(topology, relay_rank=RANK))
    for relay in model.learned_relays().values():
        for parameter in relay.parameters():
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("kind", LEARNED)
def test_the_listener_trains_its_relay_at_every_grad_scale(kind: str, make_gpt: Callable[..., GPT]) -> None:
    """λ = 0: the relay learns, from its own stage alone, and the stage before it does not."""
    topology = chain(kind)
    silent = Topology(4, tuple(_only(s, k == 1) for k, s in enumerate(topology.stages)))
    model, inputs = with_relays(make_gpt, topology), torch.randint(23, (2, 9))
    train_step(model, silent, inputs, inputs.roll(-1, 1))
    assert all(p.grad is not None and p.grad.any() for p in model.learned_relays()[f"{kind}-1"].parameters())
    assert all(p.grad is None for p in model.learned_relays()[f"{kind}-2"].parameters())
    assert all(p.grad is None for p in model.layers[0].parameters())


def _only(stage: Any, learns: bool) -> Any:
    return type(stage)(stage.start, stage.stop, stage.sources, weight=float(learns))


TOPOLOGIES = {
    **{kind: chain(kind) for kind in KINDS},
    "bus": chain("linear").with_input_bus(Edge(EMBEDDING, relay="linear")),
    "early": Topology.chain("2,1,1").with_input_bus(Edge(0, layer=1, relay="low-rank")),
}


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_step_by_step_is_all_at_once(topology: Topology, make_gpt: Callable[..., GPT]) -> None:
    model, inputs = with_relays(make_gpt, topology), torch.randint(23, (2, 9))
    plan = Plan.of(topology, 4)
    whole = stage_outputs(model, plan, inputs, [0, 1, 2])
    states = Decoded(model, plan, rows=2, capacity=9)
    steps = [states.outputs(part, [0, 1, 2]) for part in inputs.split([4, 1, 1, 3], 1)]
    for k in range(3):
        torch.testing.assert_close(torch.cat([s[k] for s in steps], 1), whole[k], rtol=1e-11, atol=1e-11)


def test_every_edge_has_a_relay_of_its_own_and_is_given_it_once(make_gpt: Callable[..., GPT]) -> None:
    topology = chain("gate").with_input_bus(Edge(EMBEDDING, relay="gate"))
    model = make_gpt()
    add_relays(model, topology)
    own = model.learned_relays()
    assert sorted(own) == ["gate-1", "gate-1-beside-1", "gate-2", "gate-2-beside-1"]
    assert {p.dtype for relay in own.values() for p in relay.parameters()} == {torch.float64}
    add_relays(model, topology)
    assert all(model.learned_relays()[name] is relay for name, relay in own.items())


def test_the_rank_is_a_quarter_of_the_width_unless_told(make_gpt: Callable[..., GPT]) -> None:
    model, topology = make_gpt(), chain("low-rank")
    add_relays(model, topology)
    relay = model.learned_relays()["low-rank-1"]
    assert isinstance(relay, LowRank)
    assert relay.down.weight.shape == (4, WIDTH)
    told = make_gpt()
    add_relays(told, replace(topology, relay_rank=2))
    assert told.learned_relays()["low-rank-1"].get_parameter("down.weight").shape == (2, WIDTH)


def test_bad_rank_is_one_line(make_gpt: Callable[..., GPT]) -> None:
    with refused(ConfigError, setting="relay_rank", given=17):
        add_relays(make_gpt(), replace(chain("low-rank"), relay_rank=17))
    with refused(TopologyError, setting="relay_rank", given=0):
        replace(chain("low-rank"), relay_rank=0)


def test_a_stack_without_a_width_raises() -> None:
    class Nameless(Stack):
        pass

    with refused(StackError, setting="width"):
        add_relays(Nameless(), chain("gate"))


def test_a_relay_that_was_not_added_is_one_line(make_gpt: Callable[..., GPT]) -> None:
    with refused(StackError, setting="relay", given="gate-1"):
        stage_outputs(make_gpt(), Plan.of(chain("gate"), 4), torch.randint(23, (2, 9)), [2])
