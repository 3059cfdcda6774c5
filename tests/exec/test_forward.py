"""Running plans forward: chains, forests, covers, input buses, relays, and only what is needed."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pieces import Decoded
from raising import refused
from topograd.errors import StackError
from topograd.exec.forward import run_stage, stage_logits, stage_outputs
from topograd.nn.gpt import GPT
from topograd.nn.stack import LayerContext
from topograd.topology.dag import EMBEDDING, Edge, Stage, Topology
from topograd.topology.plan import Plan


@pytest.fixture
def model() -> GPT:
    """Float64, with noise on every parameter, so that nothing is hidden by zeros."""
    torch.manual_seed(0)
    gpt = GPT(layers=4, width=16, heads=2, vocab=23, context=16).double()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return gpt


@pytest.fixture
def inputs() -> Tensor:
    return torch.randint(23, (2, 9))


@torch.no_grad()
def through(model: GPT, inputs: Tensor, layers: range, start: Tensor | None = None) -> Tensor:
    """The hidden state behind some layers, by hand."""
    x0 = model.embed(inputs)
    ctx = model.layer_context(x0, inputs)
    h = x0 if start is None else start
    for i in layers:
        h = model.layers[i](h, ctx)
    return h


def outputs_of(model: GPT, topology: Topology, inputs: Tensor, stages: list[int]) -> dict[int, Tensor]:
    return stage_outputs(model, Plan.of(topology, 4), inputs, stages)


def ran(model: GPT, topology: Topology, inputs: Tensor, stages: list[int]) -> list[int]:
    """Which layers run, in order, to answer for `stages`."""
    seen: list[int] = []

    def note(index: int) -> Callable[[nn.Module, tuple[object, ...]], None]:
        return lambda module, arguments: seen.append(index)

    hooks = [layer.register_forward_pre_hook(note(i)) for i, layer in enumerate(model.layers)]
    outputs_of(model, topology, inputs, stages)
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("grad_scale", [0.0, 0.4, 1.0])
def test_chain(model: GPT, inputs: Tensor, grad_scale: float) -> None:
    outputs = outputs_of(model, Topology.chain("1,3", grad_scale=grad_scale), inputs, [0, 1])
    assert torch.equal(outputs[0], through(model, inputs, range(1)))
    assert torch.equal(outputs[1], through(model, inputs, range(4)))
    assert not outputs[1].requires_grad


def test_forest(model: GPT, inputs: Tensor) -> None:
    outputs = outputs_of(model, Topology.forest(["1,1", "2"]), inputs, [0, 1, 2])
    assert torch.equal(outputs[0], through(model, inputs, range(1)))
    assert torch.equal(outputs[1], through(model, inputs, range(2)))
    assert torch.equal(outputs[2], through(model, inputs, range(2, 4)))


def test_cover(model: GPT, inputs: Tensor) -> None:
    """Each interval starts where an earlier one passed, not where it ended."""
    outputs = outputs_of(model, Topology.cover([(0, 3), (1, 3), (2, 4)]), inputs, [0, 1, 2])
    for k, stop in enumerate((3, 3, 4)):
        assert torch.equal(outputs[k], through(model, inputs, range(stop)))


def test_input_bus_adds_the_embedding(model: GPT, inputs: Tensor) -> None:
    outputs = outputs_of(model, Topology.chain("2,2").with_input_bus(), inputs, [1])
    with torch.no_grad():
        start = through(model, inputs, range(2)) + model.embed(inputs)
    assert torch.equal(outputs[1], through(model, inputs, range(2, 4), start))


def test_only_what_is_asked_for_comes_back(model: GPT, inputs: Tensor) -> None:
    topology = Topology.chain("1,1,2")
    assert outputs_of(model, topology, inputs, [1]).keys() == {1}
    assert outputs_of(model, topology, inputs, []) == {}
    assert torch.equal(
        outputs_of(model, topology, inputs, [1])[1], outputs_of(model, topology, inputs, [2, 0, 1])[1]
    )


def test_only_what_is_needed_runs(model: GPT, inputs: Tensor) -> None:
    assert ran(model, Topology.chain("1,1,2"), inputs, [0]) == [0]
    assert ran(model, Topology.chain("1,1,2"), inputs, [1]) == [0, 1]
    assert ran(model, Topology.forest(["1,1", "2"]), inputs, [2]) == [2, 3]
    assert ran(model, Topology.forest(["1,1", "2"]), inputs, [0, 2]) == [0, 2, 3]
    assert ran(model, Topology.cover([(0, 2), (0, 1), (1, 4)]), inputs, [2]) == [0, 1, 2, 3]
    assert ran(model, Topology.cover([(0, 2), (0, 1), (0, 4)]), inputs, [1]) == [0]


def test_needed() -> None:
    plan = Plan.of(Topology.forest(["1,1", "2"]), 4)
    assert [p.index for p in plan.needed(1)] == [0, 1]
    assert [p.index for p in plan.needed(2)] == [2]


class Doubling(nn.Module):
    """Sends h plus what was received, and receives twice that."""

    def send(self, h: Tensor, received: Tensor | None) -> Tensor:
        assert received is not None
        return h + received

    def receive(self, message: Tensor, ctx: LayerContext) -> Tensor:
        return 2 * message


def relayed(relay: str) -> Topology:
    first = Stage(0, 1, (Edge(EMBEDDING, grad_scale=1.0),))
    return Topology(4, (first, Stage(1, 4, (Edge(0, relay=relay),))))


def test_a_relay_works_at_both_ends(model: GPT, inputs: Tensor) -> None:
    model.add_relay("doubling", Doubling())
    outputs = stage_outputs(model, Plan.of(relayed("doubling"), 4), inputs, [1])
    with torch.no_grad():
        start = 2 * (through(model, inputs, range(1)) + model.embed(inputs))
    assert torch.equal(outputs[1], through(model, inputs, range(1, 4), start))


def test_unknown_relay(model: GPT, inputs: Tensor) -> None:
    with refused(StackError, setting="relay", given="pigeon"):
        outputs_of(model, relayed("pigeon"), inputs, [1])


def test_a_stage_needs_a_message_for_each_source(model: GPT, inputs: Tensor) -> None:
    x0 = model.embed(inputs)
    stage = Plan.of(Topology.chain("2,2").with_input_bus(), 4).stages[1]
    with pytest.raises(ValueError, match="shorter"):
        run_stage(model, stage, [x0], model.layer_context(x0, inputs))


def test_a_prefix_decodes_alone(model: GPT, inputs: Tensor) -> None:
    """A stage that is never asked for runs nothing; asked for later, it runs all that is pending."""
    plan = Plan.of(Topology.chain("2,2"), 4)
    decoded = Decoded(model, plan, rows=2, capacity=9)
    decoded.outputs(inputs[:, :6], [0])
    rest = decoded.outputs(inputs[:, 6:], [0])[0]
    whole = stage_outputs(model, plan, inputs, [0, 1])
    torch.testing.assert_close(rest, whole[0][:, 6:], rtol=1e-12, atol=1e-12)
    assert [sequence.marks for sequence in decoded.batch] == [[9, 0]] * 2
    with pytest.raises(StackError, match="stage 2 has not run that many positions; run it first"):
        decoded.cache.hidden(decoded.batch, 1)
    with torch.inference_mode():
        decoded.cache.run(decoded.batch, 1)
        late = decoded.cache.hidden(decoded.batch, 1, [9, 9]).unflatten(0, (2, 9))
    torch.testing.assert_close(late, whole[1], rtol=1e-12, atol=1e-12)


def test_logits_with_a_graph_are_those_of_the_outputs(model: GPT, inputs: Tensor) -> None:
    plan = Plan.of(Topology.chain("1,2,1"), 4)
    for stage in range(3):
        logits = stage_logits(model, plan, stage, inputs)
        assert torch.equal(logits, model.readout(stage_outputs(model, plan, inputs, [stage])[stage], stage))
        assert logits.requires_grad
    x0 = model.embed(inputs).detach().requires_grad_()
    again = stage_logits(model, plan, 2, inputs, x0)
    assert torch.equal(again, logits)
    (gradient,) = torch.autograd.grad(again.square().sum(), x0)
    assert gradient.abs().sum(-1).min() > 0, "it passes every boundary"
