"""Which optimizer takes what, at which rate; all of them in runs that resume; symmetries that they keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import ConfigError
from topograd.exec.forward import stage_logits
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig, StageOptimizer, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import build_stack, open_session
from topograd.topology.configuration import Configuration
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan
from topograd.training.optimizers import (
    OPTIMIZERS,
    head_gauges,
    make_optimizers,
    mlp_gauges,
    parameter_groups,
)
from topograd.training.runs import resume, start
from topograd.training.step_runner import StepRunner

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
    config = OptimizerConfig(
        lr_matrix=0.1, lr_embedding=0.2, lr_head=0.3, lr_scalar=0.4, warmup=0.0, warmdown=0.5
    )
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
    "change",
    [
        {"lr_matrix": -0.1},
        {"lr_head": float("nan")},
        {"clip": 0.0},
        {"betas": (0.9, 1.0)},
        {"betas": (0.9,)},
        {"warmup": 0.6, "warmdown": 0.6},
        {"floor": 2.0},
        {"momentum": 1.5},
        {"momentum": float("nan")},
        {"newton_schulz_steps": -1},
        {"newton_schulz_steps": 10**9},
        {"weight_decay": -1.0},
    ],
    ids=str,
)
def test_settings_outside_their_range_are_refused(change: dict[str, Any]) -> None:
    with refused(ConfigError, setting=next(iter(change))):
        OptimizerConfig(**change)


def test_an_unknown_optimizer_is_named() -> None:
    with pytest.raises(ConfigError, match="adamw2"):
        OptimizerConfig(name="adamw2")


NAMES = ("muon+adamw", "adamw", "sgd", "ddc-adam", "ddc-muon")


def small(config: TrainConfig, **optimizer: Any) -> TrainConfig:
    return replace(
        config, steps=8, save_every=3, eval_every=0, keep=9, optimizer=OptimizerConfig(**optimizer)
    )


def losses(run: Run) -> list[list[float]]:
    return [record["loss"] for record in run.metrics() if record["kind"] == "train"]


def trained_in_parts(config: TrainConfig, folder: Path) -> Run:
    """The run, trained at once; a second one that was stopped and resumed must be the same bit for bit."""
    start(config, folder / "whole").train()
    start(config, folder / "parts").train(stop_after=5)
    resume(folder / "parts", "step-00000003").train()
    whole, parts = Run.open(folder / "whole"), Run.open(folder / "parts")
    assert losses(parts) == losses(whole)
    assert parts.store.weights("step-00000008") == whole.store.weights("step-00000008")
    return whole


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
@pytest.mark.parametrize("name", NAMES)
def test_each_optimizer_trains_and_resumes(
    name: str, heads: str, config: TrainConfig, tmp_path: Path
) -> None:
    rates = {"lr_head": 0.3} if name == "sgd" else {}  # the default is Adam's, whose steps are larger
    run = trained_in_parts(small(config, name=name, **rates).changed(heads=heads), tmp_path)
    first, last = losses(run)[0], losses(run)[-1]
    assert all(after < before - 0.3 for before, after in zip(first, last, strict=True)), "it learns"


def test_the_registry_has_these_and_no_other() -> None:
    assert tuple(OPTIMIZERS) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES)
def test_each_optimizer_takes_every_parameter_once(name: str, case: str) -> None:
    topology, settings = CASES[case]
    stack = model(topology, **settings)
    made = make_optimizers(stack, OptimizerConfig(name=name, weight_decay=0.0))
    taken = [p for o in made.optimizers.values() for g in o.param_groups for p in g["params"]]
    assert sorted(map(id, taken)) == sorted(id(p) for p in stack.parameters())
    assert all(g["peak"] == g["lr"] for o in made.optimizers.values() for g in o.param_groups)


@pytest.mark.parametrize(
    ("name", "rate"),
    [("muon+adamw", 0.02), ("adamw", 0.002), ("sgd", 0.1), ("ddc-adam", 0.002), ("ddc-muon", 0.02)],
)
def test_matrices_have_a_rate_of_their_optimizers_size_unless_told(name: str, rate: float) -> None:
    stack = model(PER_STAGE)
    matrix = stack.layers[0].get_parameter("mlp.up.weight")
    for given, expected in ((None, rate), (0.007, 0.007)):
        made = make_optimizers(stack, OptimizerConfig(name=name, lr_matrix=given))
        rates = [
            g["lr"]
            for o in made.optimizers.values()
            for g in o.param_groups
            if any(p is matrix for p in g["params"])
        ]
        assert rates == [expected]


# Symmetries


def every_stage(tokens: Tensor) -> Callable[[nn.Module], list[Tensor]]:
    def read(network: nn.Module) -> list[Tensor]:
        assert isinstance(network, GPT)
        return [stage_logits(network, Plan.of(PER_STAGE, 4), stage, tokens) for stage in (0, 1)]

    return read


@pytest.mark.parametrize("case", ["backprop", "per-stage", "plain"])
def test_the_gauges_hold(case: str) -> None:
    """Every stage's probabilities are what they were, whichever element of the gauge acts."""
    topology, settings = CASES[case]
    stack = model(topology, **settings).double()
    groups = parameter_groups(stack)
    gauges = [*mlp_gauges(stack, groups), *head_gauges(stack, groups)]
    assert len(gauges) == 5, "four MLPs and the heads"
    tokens = torch.randint(24, (2, 8))
    example = every_stage(tokens) if case == "per-stage" else tokens
    assert max(gauge.residual(stack, example) for gauge in gauges) < 1e-12


@pytest.mark.parametrize("case", ["tied", "per-stage-tied", "low-rank", "swiglu"])
def test_what_would_not_be_a_symmetry_is_no_gauge(case: str) -> None:
    topology, settings = CASES[case]
    stack = model(topology, **settings)
    groups = parameter_groups(stack)
    assert len(mlp_gauges(stack, groups)) == (0 if case == "swiglu" else 4)
    assert len(head_gauges(stack, groups)) == (1 if case == "swiglu" else 0)
    capped = model(Topology.chain("4"), softcap=15.0)
    assert head_gauges(capped, parameter_groups(capped)) == []


def apart(name: str) -> float:
    """How far the losses of two models part that are one function, written differently."""
    torch.manual_seed(0)
    stack = model(PER_STAGE).double()
    groups = parameter_groups(stack)
    gauges = [*mlp_gauges(stack, groups), *head_gauges(stack, groups)]
    twin = copy.deepcopy(stack)
    named = {n: p.detach() for n, p in twin.named_parameters()}
    for gauge in gauges:
        for n, tensor in gauge.act(named, gauge.element(named)).items():
            named[n].copy_(tensor)
    loops = [StepRunner(s, make_optimizers(s, OptimizerConfig(name=name))) for s in (stack, twin)]
    generator = torch.Generator().manual_seed(0)
    off = 0.0
    for _ in range(6):
        inputs, targets = torch.randint(24, (2, 4, 8), generator=generator)
        one, two = (loop.step(Plan.of(PER_STAGE, 4), [(inputs, targets)]).losses for loop in loops)
        off = max(off, float(((one - two) / one).abs().max()))
    return off


def test_two_models_that_are_one_function_stay_one() -> None:
    """The step commutes with the symmetries; AdamW's does not, so the test can fail."""
    assert apart("ddc-adam") < 1e-11
    assert apart("ddc-muon") < 1e-11
    assert apart("adamw") > 1e-4
    assert apart("muon+adamw") > 1e-4


@pytest.mark.parametrize(("name", "most"), [("ddc-adam", 0.01), ("ddc-muon", 0.03)])
def test_a_first_step_is_of_the_size_of_the_learning_rate(name: str, most: float) -> None:
    """Without `rms` a step of a rescaled matrix is √numel times as large: 0.4 of a weight at width 96."""
    torch.manual_seed(0)
    topology = Topology.chain("2")
    stack = model(topology, layers=2, width=96)
    loop = StepRunner(stack, make_optimizers(stack, OptimizerConfig(name=name)))
    before = {n: p.detach().clone() for n, p in stack.named_parameters() if n.endswith("mlp.up.weight")}
    inputs, targets = torch.randint(24, (2, 4, 8))
    loop.step(Plan.of(topology, 2), [(inputs, targets)])
    for n, weight in before.items():
        change = float((stack.get_parameter(n).detach() - weight).norm() / weight.norm())
        assert 0 < change < most, n


@pytest.mark.parametrize("name", ["ddc-adam", "ddc-muon"])
def test_a_halted_stage_rests_in_its_gauges_too(name: str) -> None:
    """What heads share goes on; what only the halted stage has stays."""
    torch.manual_seed(0)
    stack = model(Topology.chain("2,2"))
    plan = Plan.of("2,2", 4)
    loop = StepRunner(stack, make_optimizers(stack, OptimizerConfig(name=name)), halted={0})
    before = {n: p.detach().clone() for n, p in stack.named_parameters()}
    inputs, targets = torch.randint(24, (2, 4, 8))
    for _ in range(2):
        loop.step(plan, [(inputs, targets)])
    moved = {n for n, p in stack.named_parameters() if not torch.equal(p, before[n])}
    assert not {n for n in moved if n.startswith(("layers.0.", "layers.1."))}
    assert {"head.weight", "layers.2.mlp.up.weight", "layers.3.mlp.down.weight"} <= moved


# Stages with an optimizer of their own


def test_a_stage_may_have_its_own_optimizer_rate_and_schedule() -> None:
    own = StageOptimizer(stage=2, name="sgd", rate=0.5, warmup=0.0, warmdown=0.0)
    config = OptimizerConfig(warmup=0.0, warmdown=1.0, floor=0.0, lr_head=0.3, stages=(own,))
    stack = model(PER_STAGE)
    made = make_optimizers(stack, config, Plan.of(PER_STAGE, 4))
    assert list(made.optimizers) == ["stage-2.sgd", "muon", "adamw"]
    names = {id(p): n for n, p in stack.named_parameters()}
    mine = {names[id(p)] for g in made.optimizers["stage-2.sgd"].param_groups for p in g["params"]}
    assert mine == {n for n in names.values() if n.startswith(("layers.2.", "layers.3.", "head.deltas.1."))}
    taken = [p for o in made.optimizers.values() for g in o.param_groups for p in g["params"]]
    assert sorted(map(id, taken)) == sorted(names)

    rates = {names[id(p)]: g for o in made.optimizers.values() for g in o.param_groups for p in g["params"]}
    assert rates["head.deltas.1.weight"]["peak"] == 0.15
    assert rates["head.deltas.0.weight"]["peak"] == 0.3
    assert rates["layers.2.mlp.up.weight"]["peak"] == 0.05, "half of what SGD takes"
    made.set_rates(9, 10)
    assert rates["head.deltas.1.weight"]["lr"] == 0.15, "its schedule stays where it is"
    assert rates["head.deltas.0.weight"]["lr"] == 0.0, "that of the others has ended"


def test_stages_with_their_own_optimizers_train_and_resume(config: TrainConfig, tmp_path: Path) -> None:
    stages = (StageOptimizer(stage=1, name="ddc-adam", floor=0.5), StageOptimizer(stage=2, rate=0.0))
    chosen = small(config, stages=stages).changed(heads="per-stage")
    trained_in_parts(chosen, tmp_path)
    stack = open_session(tmp_path / "whole").stack
    first, _ = build_stack(open_session(tmp_path / "whole").config)
    before = dict(first.named_parameters())
    moved = {n for n, p in stack.named_parameters() if not torch.equal(p, before[n])}
    assert not {n for n in moved if n.startswith(("layers.1.", "head.deltas.1."))}, "its rate is 0"
    assert {"layers.0.mlp.up.weight", "head.deltas.0.weight", "head.weight"} <= moved


def test_stages_that_share_layers_cannot_each_have_one() -> None:
    cover = Topology.cover([(0, 3), (2, 4)])
    both = OptimizerConfig(stages=(StageOptimizer(stage=1), StageOptimizer(stage=2)))
    with refused(ConfigError, setting="optimizer.stages", given=2):
        make_optimizers(model(cover), both, Plan.of(cover, 4))
    with refused(ConfigError, setting="plan"):
        make_optimizers(model(cover), both)


# One of your own


MODULE = """
import torch


def make(groups, config, stack):
    own = [p for named in groups.values() for p in named.values()]
    return {"mine": torch.optim.RMSprop(own, lr=config.lr_scalar)}


NOTHING = None
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module that somebody else wrote."""
    name = f"somebodys_optimizers_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_an_optimizer_of_your_own_by_its_address(foreign: str, config: TrainConfig, tmp_path: Path) -> None:
    chosen = small(config, name=f"{foreign}:make", lr_scalar=0.01)
    run = trained_in_parts(chosen, tmp_path)
    assert TrainConfig.from_dict(run.read_config()).optimizer.name == f"{foreign}:make"
    assert losses(run)[-1][0] < losses(run)[0][0] - 0.3
    made = resume(run.folder).task.loop.optimizers.optimizers
    assert [type(o).__name__ for o in made.values()] == ["RMSprop"]


@pytest.mark.parametrize("address", ["nowhere.at_all:make", "math:no_such_thing"])
def test_an_address_that_leads_nowhere_is_one_line(address: str, config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"optimizer '{address}' cannot be imported") as caught:
        start(small(config, name=address), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "config.toml").exists()
