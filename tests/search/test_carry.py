import pytest
import torch

from topograd.errors import StackError
from topograd.nn.gpt import GPT
from topograd.search.carry import carry_heads, nearest_head, nearest_heads
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.training.executor import prepare, train_step
from topograd.training.optimizer import OptimizerConfig, make_optimizers

Optimizers = dict[str, torch.optim.Optimizer]


def trained(partition: str, rank: int | None = None) -> tuple[GPT, Optimizers]:
    """A GPT with per-stage heads after two steps, so that every head and its state is its own."""
    torch.manual_seed(0)
    stack = GPT(layers=4, width=16, heads=2, vocab=20, context=8, head_rank=rank)
    topology = Topology.chain(Configuration.parse(partition, heads="per-stage"))
    prepare(stack, topology)
    optimizers = make_optimizers(stack, OptimizerConfig())
    tokens = torch.randint(0, 20, (2, 9))
    for _ in range(2):
        step(stack, topology, optimizers, tokens)
    return stack, optimizers


def step(stack: GPT, topology: Topology, optimizers: Optimizers, tokens: torch.Tensor) -> None:
    train_step(stack, topology, tokens[:, :-1], tokens[:, 1:])
    for optimizer in optimizers.values():
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def test_the_nearest_head() -> None:
    old = Composition.parse("3,3,6")
    assert [nearest_head(old, i) for i in range(1, 13)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert nearest_heads(old, Composition.parse("12")) == [2]
    assert nearest_heads(old, old) == [0, 1, 2]


@pytest.mark.parametrize("rank", [None, 3])
def test_a_split_copies_head_and_state(rank: int | None) -> None:
    stack, optimizers = trained("2,2", rank)
    tokens = torch.randint(0, 20, (2, 9))
    before = [stack.head.matrix(k).clone() for k in range(2)]
    kept = stack.head_parameters(0)
    carry_heads(stack, [0, 0, 1], optimizers)
    for k, source in enumerate([0, 0, 1]):
        assert torch.equal(stack.head.matrix(k), before[source])
    state = optimizers["adamw"].state
    for first, second, old in zip(stack.head_parameters(0), stack.head_parameters(1), kept, strict=True):
        assert first is old
        assert first is not second
        assert state[first]["exp_avg"].abs().max() > 0
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[first][name], state[second][name])
            assert state[first][name] is not state[second][name]
    step(stack, Topology.chain(Configuration.parse("1,1,2", heads="per-stage")), optimizers, tokens)
    assert not torch.equal(stack.head.matrix(0), stack.head.matrix(1))
    assert stack.last_stage == 2


def test_a_merge_forgets_the_head_that_is_gone() -> None:
    stack, optimizers = trained("1,1,2")
    gone = stack.head_parameters(0)[0]
    layer = next(p for p in stack.layers[0].parameters() if p.dim() == 2)
    momentum = {k: v.clone() for k, v in optimizers["muon"].state[layer].items() if torch.is_tensor(v)}
    carry_heads(stack, [1, 2], optimizers)
    owned = [id(p) for o in optimizers.values() for g in o.param_groups for p in g["params"]]
    assert id(gone) not in owned
    assert gone not in optimizers["adamw"].state
    assert sorted(owned) == sorted(id(p) for p in stack.parameters())
    assert momentum
    for name, value in momentum.items():
        assert torch.equal(optimizers["muon"].state[layer][name], value)


def test_a_shared_head_stays_and_a_missing_one_is_named() -> None:
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=20, context=8)
    carry_heads(stack, [0, 0], {})
    assert stack.last_stage == 0
    stack, optimizers = trained("2,2")
    with pytest.raises(StackError, match=r"heads \[0, 2\] were asked for and there are 2"):
        carry_heads(stack, [0, 2], optimizers)
