"""What every stack of the catalogue (conftest.py) must do, and what the documentation says about them."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pieces import Decoded
from raising import refused
from tests.oracles.train_step import graph_losses
from topograd.decode.cache import Cache
from topograd.errors import StackError
from topograd.exec.forward import stage_outputs
from topograd.exec.train_step import train_step
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan


def close(a: Tensor, b: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * b.abs().max().item())


def last_hidden(stack: Stack, inputs: Tensor) -> Tensor:
    h = stack.embed(inputs)
    ctx = stack.layer_context(h, inputs)
    for layer in stack.layers:
        h = layer(h, ctx)
    return h


def plan_of(stack: Stack, partition: str) -> Plan:
    return Plan.of(Topology.chain(partition), len(stack.layers))


def test_forward_is_embed_layers_readout(case: Any, stack: Stack) -> None:
    inputs = case.inputs()
    assert torch.equal(stack(inputs), stack.readout(last_hidden(stack, inputs), stack.last_stage))


@torch.no_grad()
def test_later_tokens_change_nothing_before_them(sequence: tuple[Any, Stack]) -> None:
    case, stack = sequence
    inputs = case.inputs()
    before = stack(inputs)
    for t in (1, 4, 8):
        changed = inputs.clone()
        changed[:, t:] = (changed[:, t:] + 1) % 23
        after = stack(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.equal(after[:, t], before[:, t])


def test_no_gradient_from_earlier_logits_to_later_embeddings(sequence: tuple[Any, Stack]) -> None:
    case, stack = sequence
    inputs = case.inputs()
    x0 = stack.embed(inputs).detach().requires_grad_()
    h, ctx = x0, stack.layer_context(x0, inputs)
    for layer in stack.layers:
        h = layer(h, ctx)
    (gradient,) = torch.autograd.grad(stack.readout(h, 0)[:, 5].square().sum(), x0)
    assert gradient[:, 6:].count_nonzero() == 0
    assert gradient[:, :6].abs().amax((0, 2)).gt(0).sum() >= 3


@torch.no_grad()
def test_rows_of_a_batch_are_independent(case: Any, stack: Stack) -> None:
    inputs = case.inputs()
    together = stack(inputs)
    close(torch.cat([stack(row[None]) for row in inputs]), together, case.tolerance)
    changed = torch.cat((inputs[:1], case.inputs()[1:]))
    assert torch.equal(stack(changed)[0], together[0])


@torch.no_grad()
def test_readout_on_rows_of_the_vocabulary(case: Any, stack: Stack) -> None:
    h = last_hidden(stack, case.inputs())
    rows = torch.tensor([1, 0, 1])
    for stage in range(3):
        close(stack.readout(h, stage, rows), stack.readout(h, stage)[..., rows], case.tolerance)


@torch.no_grad()
def test_readout_on_any_leading_shape(case: Any, stack: Stack) -> None:
    h = last_hidden(stack, case.inputs())
    logits, features = stack.readout(h, 1), h.shape[case.leading :]
    vocab = logits.shape[-1]
    close(stack.readout(h.reshape(-1, *features), 1), logits.reshape(-1, vocab), case.tolerance)
    close(stack.readout(h.reshape(2, -1, *features), 1), logits.reshape(2, -1, vocab), case.tolerance)
    one = (0,) * case.leading
    close(stack.readout(h[one], 1), logits[one], case.tolerance)


@torch.no_grad()
def test_projection_is_the_readout(case: Any, stack: Stack) -> None:
    h = last_hidden(stack, case.inputs())
    for stage in range(3):
        projection = stack.projection(stage)
        if projection is None:
            assert not case.own_heads
            continue
        x = projection.normalize(h)
        z = torch.nn.functional.linear(x, projection.weight, projection.bias)
        if projection.low_rank is not None:
            up, down = projection.low_rank
            z = z + torch.nn.functional.linear(x, up @ down)
        if projection.softcap is not None:
            z = projection.softcap * torch.tanh(z / projection.softcap)
        close(stack.readout(h, stage), z, case.tolerance)


@torch.no_grad()
def test_state_dict_round_trip(case: Any, stack: Stack, rebuild: Callable[..., Stack]) -> None:
    inputs, other = case.inputs(), rebuild(case, seed=1)
    assert not torch.equal(other(inputs), stack(inputs))
    other.load_state_dict(stack.state_dict())
    assert torch.equal(other(inputs), stack(inputs))


def test_a_stage_computes_the_same_in_every_chain(case: Any, stack: Stack) -> None:
    """Prefix consistency (Prop. 4.1): the first j stages do not know what comes after them."""
    inputs = case.inputs()
    fine = stage_outputs(stack, plan_of(stack, "1,1,1,1"), inputs, [0, 1, 2, 3])
    for partition, terminals in (("1,3", (0, 3)), ("2,2", (1, 3)), ("3,1", (2, 3)), ("4", (3,))):
        coarse = stage_outputs(stack, plan_of(stack, partition), inputs, range(len(terminals)))
        for k, terminal in enumerate(terminals):
            assert torch.equal(coarse[k], fine[terminal])
    with torch.no_grad():
        assert torch.equal(stack.readout(fine[3], stack.last_stage), stack(inputs))


def test_per_stage_heads(case: Any) -> None:
    torch.manual_seed(0)
    stack, inputs = case.make().double().eval(), case.inputs()
    with torch.no_grad():
        before = stack(inputs)
        if not case.own_heads:
            with refused(StackError, setting="heads", given="per-stage"):
                stack.add_heads(range(2))
            return
        assert stack.head_parameters(0) == []
        assert stack.add_heads(range(2))
        assert not stack.add_heads(range(2))
        assert torch.equal(stack(inputs), before)
        added = [p for k in range(2) for p in stack.head_parameters(k)]
        assert {id(p) for p in added} <= {id(p) for p in stack.parameters()}
        assert len({id(p) for p in added}) == len(added) > 0
        last_hidden_state = last_hidden(stack, inputs)
        untouched = stack.readout(last_hidden_state, 0)
        for parameter in stack.head_parameters(1):
            parameter.add_(1.0)
        assert torch.equal(stack.readout(last_hidden_state, 0), untouched)
        assert not torch.equal(stack(inputs), before)


def test_every_parameter_learns(case: Any, stack: Stack) -> None:
    heads = "per-stage" if case.own_heads else "shared"
    train_step(
        stack, Topology.chain(Configuration.parse("1,1,2", heads=heads)), case.inputs(), case.targets()
    )
    idle = [n for n, p in stack.named_parameters() if p.grad is None or p.grad.count_nonzero() == 0]
    assert idle == []
    names = [name for name, _ in stack.named_parameters()]
    assert len(names) == len(set(names)) == len({id(p) for p in stack.parameters()})


@pytest.mark.parametrize(
    "topology",
    [Topology.chain("2,2"), Topology.chain("1,3", grad_scale=0.3), Topology.forest(["2", "1,1"])],
    ids=["chain", "soft", "forest"],
)
def test_training_step_is_the_reference(case: Any, stack: Stack, topology: Topology) -> None:
    inputs, targets = case.inputs(), case.targets()
    prepare(stack, topology)
    total, expected_losses = graph_losses(stack, topology, inputs, targets)
    total.backward()
    expected = {name: p.grad for name, p in stack.named_parameters()}
    stack.zero_grad()
    losses = train_step(stack, topology, inputs, targets)
    close(losses, expected_losses, 1e-12)
    for name, parameter in stack.named_parameters():
        gradient = expected[name]
        assert (parameter.grad is None) == (gradient is None), name
        if parameter.grad is not None and gradient is not None:
            close(parameter.grad, gradient, 1e-11)


def decode(decoded: Decoded, inputs: Tensor, pieces: Sequence[int]) -> list[Tensor]:
    """Hidden states of every stage at all positions, decoded piece by piece."""
    stages = range(len(decoded.cache.plan.stages))
    steps = [decoded.outputs(part, stages) for part in inputs.split(list(pieces), dim=1)]
    return [torch.cat([step[k] for step in steps], dim=1) for k in stages]


@pytest.mark.parametrize("pieces", [(9,), (1,) * 9, (3, 1, 4, 1), (1, 8), (8, 1)])
def test_decoding_in_pieces_is_the_full_forward(decoder: tuple[Any, Stack], pieces: tuple[int, ...]) -> None:
    case, stack = decoder
    inputs, plan = case.inputs(2), plan_of(stack, "2,2")
    whole = stage_outputs(stack, plan, inputs, [0, 1])
    for k, h in enumerate(decode(Decoded(stack, plan, 2, 9), inputs, pieces)):
        close(h, whole[k], 1e-12)


def test_decoding_goes_back_and_on(decoder: tuple[Any, Stack]) -> None:
    case, stack = decoder
    inputs, other, plan = case.inputs(2), case.inputs(2), plan_of(stack, "1,1,2")
    other[:, :4] = inputs[:, :4]
    decoded = Decoded(stack, plan, 2, 9)
    decode(decoded, inputs, (5, 4))
    decoded.truncate(4)
    reached = {mark for sequence in decoded.batch for mark in sequence.marks}
    assert len(reached) == 1, "stages that ran together go back together"
    assert reached.pop() <= 4, "a recurrent layer may go back further, and runs the rest again"
    again = decode(decoded, other[:, 4:], (2, 3))
    whole = stage_outputs(stack, plan, other, [0, 1, 2])
    for k, h in enumerate(again):
        close(h, whole[k][:, 4:], 1e-12)


def test_a_stack_that_keeps_no_states_is_run_from_the_start(case: Any, stack: Stack) -> None:
    stages = Cache(stack, plan_of(stack, "2,2"), capacity=9).stages
    assert [stage.from_start for stage in stages] == [not case.decodes] * 2


def test_a_stack_without_parts_says_so() -> None:
    stack = Stack()
    with refused(StackError, setting="embed"):
        stack.embed(torch.zeros(1, 2))
    with refused(StackError, setting="readout"):
        stack.readout(torch.zeros(1, 2), 0)


def test_the_example_stands_in_the_documentation_and_is_short(examples: Path) -> None:
    code = (examples / "own_stack.py").read_text()
    page = (examples.parent / "docs" / "how-to" / "own-stack.md").read_text()
    assert code in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    body = code[code.index("@dataclass") :].splitlines()
    assert sum(bool(line.strip()) for line in body) < 60
