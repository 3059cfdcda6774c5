from typing import Any

import pytest
import torch

from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.training.optimizers import make_optimizers, parameter_groups

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


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_in_exactly_one_group(case: str) -> None:
    topology, settings = CASES[case]
    stack = model(topology, **settings)
    grouped = [id(p) for group in parameter_groups(stack).values() for p in group.values()]
    assert len(grouped) == len(set(grouped))
    assert set(grouped) == {id(p) for p in stack.parameters()}
    optimized = [
        id(p)
        for o in make_optimizers(stack, OptimizerConfig()).optimizers.values()
        for g in o.param_groups
        for p in g["params"]
    ]
    assert sorted(optimized) == sorted(grouped)


def test_who_takes_what() -> None:
    groups = {name: set(group) for name, group in parameter_groups(model(PER_STAGE, head_rank=3)).items()}
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
    assert any(p is stack.embedding.weight for p in groups["head"].values())
    assert groups["embeddings"].keys().isdisjoint({"embedding.weight", "head.weight"})


def test_frozen_parameters_are_left_out() -> None:
    stack = model(Topology.chain("1,2").with_specialist(1))
    grouped = {name for group in parameter_groups(stack).values() for name in group}
    assert grouped == {name for name, p in stack.named_parameters() if p.requires_grad}
    assert all(name.startswith(("layers.3.", "head.deltas.2.")) for name in grouped)


def test_rates_and_their_schedule() -> None:
    config = OptimizerConfig(matrices=0.1, embeddings=0.2, head=0.3, scalars=0.4, warmup=0.0, warmdown=0.5)
    stack = model(PER_STAGE)
    made = make_optimizers(stack, config)
    assert [group["lr"] for group in made.optimizers["muon"].param_groups] == [0.1]
    assert [group["lr"] for group in made.optimizers["adamw"].param_groups] == [0.2, 0.3, 0.4]
    for step in (7, 9, 0):  # from the peak each time, not from the last rate
        made.set_rates(step, 10)
        multiplier = config.multiplier(step, 10)
        rates = [group["lr"] for group in made.optimizers["adamw"].param_groups]
        assert rates == [pytest.approx(peak * multiplier) for peak in (0.2, 0.3, 0.4)]
    assert config.multiplier(0, 10) == 1.0
    assert config.multiplier(9, 10) == pytest.approx(config.floor)


def test_one_step_moves_every_parameter() -> None:
    stack = model(PER_STAGE, head_rank=3)
    before = {name: p.detach().clone() for name, p in stack.named_parameters()}
    torch.manual_seed(0)
    for parameter in stack.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in make_optimizers(stack, OptimizerConfig()).optimizers.values():
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
        ({"momentum": 1.5}, "momentum is 1.5"),
        ({"momentum": float("nan")}, "momentum is nan"),
        ({"newton_schulz_steps": -1}, "newton_schulz_steps is -1"),
        ({"newton_schulz_steps": 10**9}, "newton_schulz_steps is 1000000000"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        (
            {"name": "adamw2"},
            "'adamw2' is unknown; choose one of muon\\+adamw, adamw, sgd, ddc-adam",
        ),
    ],
)
def test_settings_outside_their_range_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        OptimizerConfig(**change)
