import pytest
import torch

from raising import refused
from topograd.errors import ConfigError, StackError
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig, SearchConfig, StageOptimizer, TrainConfig
from topograd.search.change_topology import (
    carry_heads,
    carry_state,
    check_searchable,
    nearest_head,
    nearest_heads,
)
from topograd.topology.composition import Composition
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.training.optimizers import OptimizerSet, make_optimizers


def chain(partition: str) -> Topology:
    return Topology.chain(Configuration.parse(partition, heads="per-stage"))


def trained(partition: str, rank: int | None = None) -> tuple[GPT, OptimizerSet]:
    """A GPT with per-stage heads after two steps, so that every head and its state is its own."""
    torch.manual_seed(0)
    stack = GPT(layers=4, width=16, heads=2, vocab=20, context=8, head_rank=rank)
    prepare(stack, chain(partition))
    optimizers = make_optimizers(stack, OptimizerConfig())
    tokens = torch.randint(0, 20, (2, 9))
    for _ in range(2):
        step(stack, chain(partition), optimizers, tokens)
    return stack, optimizers


def step(stack: GPT, topology: Topology, optimizers: OptimizerSet, tokens: torch.Tensor) -> None:
    train_step(stack, topology, tokens[:, :-1], tokens[:, 1:])
    optimizers.step()
    optimizers.zero_grad()


def carried(stack: GPT, optimizers: OptimizerSet, sources: list[int]) -> OptimizerSet:
    copies = carry_heads(stack, sources)
    after = make_optimizers(stack, OptimizerConfig())
    carry_state(optimizers, after, copies)
    return after


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
    optimizers = carried(stack, optimizers, [0, 0, 1])
    for k, source in enumerate([0, 0, 1]):
        assert torch.equal(stack.head.matrix(k), before[source])
    state = optimizers.optimizers["adamw"].state
    for first, second, old in zip(stack.head_parameters(0), stack.head_parameters(1), kept, strict=True):
        assert first is old
        assert first is not second
        assert state[first]["exp_avg"].abs().max() > 0
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(state[first][name], state[second][name])
            assert state[first][name] is not state[second][name]
    step(stack, chain("1,1,2"), optimizers, tokens)
    assert not torch.equal(stack.head.matrix(0), stack.head.matrix(1))
    assert stack.last_stage == 2


def test_a_merge_forgets_the_head_that_is_gone() -> None:
    stack, optimizers = trained("1,1,2")
    gone = stack.head_parameters(0)[0]
    layer = next(p for p in stack.layers[0].parameters() if p.dim() == 2)
    momentum = optimizers.optimizers["muon"].state[layer]["momentum_buffer"].clone()
    optimizers = carried(stack, optimizers, [1, 2])
    owned = [id(p) for o in optimizers.optimizers.values() for g in o.param_groups for p in g["params"]]
    assert id(gone) not in owned
    assert gone not in optimizers.optimizers["adamw"].state
    assert sorted(owned) == sorted(id(p) for p in stack.parameters())
    assert momentum.any()
    assert torch.equal(optimizers.optimizers["muon"].state[layer]["momentum_buffer"], momentum)


def test_a_shared_head_stays_and_a_missing_one_is_named() -> None:
    torch.manual_seed(0)
    stack = GPT(layers=2, width=16, heads=2, vocab=20, context=8)
    assert carry_heads(stack, [0, 0]) == {}
    assert stack.last_stage == 0
    stack, _ = trained("2,2")
    with refused(StackError, setting="sources", given=2):
        carry_heads(stack, [0, 2])


@pytest.mark.parametrize(
    ("change", "setting"),
    [
        ({"graph": "forest", "branches": ("2", "2")}, "graph"),
        ({"partition": "2,2", "relay": "gate"}, "relay"),
        ({"partition": "2,2", "source": "embedding"}, "source"),
        ({"partition": "2,2", "weights": (0.0, 1.0)}, "weights"),
        ({"partition": "2,2", "decoder": 1}, "decoder"),
        ({"partition": "2,2", "prediction": "0.5,0.5"}, "prediction"),
        (
            {"partition": "2,2", "optimizer": OptimizerConfig(stages=(StageOptimizer(stage=2),))},
            "optimizer.stages",
        ),
    ],
)
def test_what_belongs_to_one_stage_cannot_be_searched(
    config: TrainConfig, change: dict[str, object], setting: str
) -> None:
    changed = config.changed(**change, search=SearchConfig(kind="surgery"))
    with refused(ConfigError, setting=setting):
        check_searchable(changed, "chain")
