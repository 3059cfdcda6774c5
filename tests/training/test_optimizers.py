from typing import Any

import pytest
import torch
from torch import nn

from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.training.optimizers import make_optimizers, parameter_groups, set_learning_rates

PER_STAGE = Topology.chain(Configuration.parse("2,2", heads="per-stage"))
CASES: dict[str, tuple[Topology, dict[str, Any]]] = {
    "backprop": (Topology.chain("4"), {}),
    "tied": (Topology.chain("2,2"), {"tied": True}),
    "per-stage": (PER_STAGE, {}),
    "per-stage-tied": (PER_STAGE, {"tied": True}),
    "low-rank": (PER_STAGE, {"head_rank": 3}),
    "plain": (Topology.chain("2,2"), {"smear": False, "x0_blend": False, "value_embeddings": "none"}),
    "swiglu": (Topology.chain("4"), {"mlp": "swiglu", "kv_heads": 1, "value_embeddings": "all"}),
}


def model(topology: Topology, **settings: Any) -> GPT:
    stack = GPT(**{"layers": 4, "width": 16, "heads": 2, "vocab": 24, "context": 8, **settings})
    prepare(stack, topology)
    return stack


def names(stack: GPT, parameters: list[nn.Parameter]) -> set[str]:
    known = {id(p): name for name, p in stack.named_parameters()}
    return {known[id(p)] for p in parameters}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_in_exactly_one_group(case: str) -> None:
    topology, settings = CASES[case]
    stack = model(topology, **settings)
    grouped = [id(p) for group in parameter_groups(stack).values() for p in group]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in stack.parameters()}
    optimized = [
        id(p)
        for o in make_optimizers(stack, OptimizerConfig()).values()
        for g in o.param_groups
        for p in g["params"]
    ]
    assert sorted(optimized) == sorted(grouped)


def test_who_takes_what() -> None:
    groups = {
        name: names(stack, group)
        for stack in [model(PER_STAGE, head_rank=3)]
        for name, group in parameter_groups(stack).items()
    }
    assert groups["embeddings"] == {
        "embedding.weight",
        "previous.weight",
        "layers.1.attention.value_embedding.weight",
        "layers.3.attention.value_embedding.weight",
    }
    deltas = {f"head.deltas.{k}.{part}" for k in (0, 1) for part in ("up", "down")}
    assert groups["head"] == {"head.weight"} | deltas
    matrices = (
        "attention.query",
        "attention.key",
        "attention.value",
        "attention.output",
        "mlp.up",
        "mlp.down",
    )
    assert groups["matrices"] == {f"layers.{i}.{name}.weight" for i in range(4) for name in matrices}
    gates = {"layers.1.attention.value_gate", "layers.3.attention.value_gate"}
    assert groups["scalars"] == {f"layers.{i}.x0_scale" for i in range(4)} | gates


def test_a_tied_head_counts_as_a_head() -> None:
    stack = model(Topology.chain("2,2"), tied=True)
    groups = parameter_groups(stack)
    assert any(p is stack.embedding.weight for p in groups["head"])
    assert names(stack, groups["embeddings"]).isdisjoint({"embedding.weight", "head.weight"})


def test_frozen_parameters_are_left_out() -> None:
    stack = model(Topology.chain("1,2").with_specialist(1))
    grouped = {name for group in parameter_groups(stack).values() for name in names(stack, group)}
    assert grouped == {name for name, p in stack.named_parameters() if p.requires_grad}
    assert all(name.startswith(("layers.3.", "head.deltas.2.")) for name in grouped)


def test_rates_and_their_schedule() -> None:
    config = OptimizerConfig(matrices=0.1, embeddings=0.2, head=0.3, scalars=0.4, warmup=0.0, warmdown=0.5)
    stack = model(PER_STAGE)
    optimizers = make_optimizers(stack, config)
    assert [group["lr"] for group in optimizers["muon"].param_groups] == [0.1]
    assert [group["lr"] for group in optimizers["adamw"].param_groups] == [0.2, 0.3, 0.4]
    for multiplier in (0.5, 0.0, 1.0):  # from the peak each time, not from the last rate
        set_learning_rates(optimizers, multiplier)
        rates = [group["lr"] for group in optimizers["adamw"].param_groups]
        assert rates == [pytest.approx(peak * multiplier) for peak in (0.2, 0.3, 0.4)]
    assert config.multiplier(0, 10) == 1.0
    assert config.multiplier(9, 10) == pytest.approx(config.floor)


def test_one_step_moves_every_parameter() -> None:
    stack = model(PER_STAGE, head_rank=3)
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    torch.manual_seed(0)
    for parameter in stack.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in make_optimizers(stack, OptimizerConfig()).values():
        optimizer.step()
    still = [name for name, p in stack.named_parameters() if torch.equal(p, before[name])]
    assert not still


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"matrices": -0.1}, "learning rate matrices is -0.1"),
        ({"head": float("nan")}, "learning rate head is nan"),
        ({"clip": 0.0}, "clip is 0.0"),
        ({"betas": (0.9, 1.0)}, "betas are"),
        ({"betas": (0.9,)}, "betas are"),
        ({"warmup": 0.6, "warmdown": 0.6}, "their sum is at most 1"),
        ({"floor": 2.0}, "floor=2.0"),
    ],
)
def test_settings_outside_their_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(**change)


@pytest.mark.parametrize("change", [{"momentum": 1.5}, {"newton_schulz_steps": -1}, {"weight_decay": -1.0}])
def test_what_muon_cannot_take_is_refused_when_it_is_made(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Muon was given"):
        make_optimizers(model(PER_STAGE), OptimizerConfig(**change))
