import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from raising import refused
from tests.oracles.train_step import graph_losses
from topograd.errors import ConfigError, TopologyError
from topograd.exec.train_step import train_step
from topograd.nn.gpt import GPT
from topograd.nn.preparation import prepare
from topograd.runs.config import SearchConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.search_config import SoftConfig
from topograd.runs.session import open_session
from topograd.search.soft import SoftBoundaries, SoftTask, expected_boundaries, soft_outcome, soft_run
from topograd.topology.dag import Topology
from topograd.training.evaluation import evaluate
from topograd.training.runs import resume, start


def boundaries_of(layers: int, config: SoftConfig, steps: int) -> SoftBoundaries:
    """As a run of so many layers begins."""
    run = soft_run(TrainConfig(steps=steps).changed(model=TrainConfig().model.changed(layers=layers)), config)
    return SoftBoundaries(run.topology.grad_scales, config, steps)


def learned(losses: list[float], steps: int = 150, **settings: float) -> SoftBoundaries:
    """The boundaries after `steps` under losses that stay as they are."""
    boundaries = boundaries_of(len(losses), SoftConfig(**settings), steps)  # type: ignore[arg-type]
    for step in range(steps):
        boundaries.update(torch.tensor(losses), step / (steps - 1))
    return boundaries


def test_the_temperature_falls_and_the_count_is_right_at_first() -> None:
    config = SoftConfig(stages=3, hot=4.0, cold=0.25)
    assert [config.temperature(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([4.0, 1.0, 0.25])
    assert expected_boundaries(boundaries_of(9, config, 1).grad_scales(0.0)).item() == pytest.approx(2)


def test_boundaries_begin_where_the_settings_say() -> None:
    begun = SoftBoundaries((0.2, 0.9), SoftConfig(stages=2), 9)
    assert begun.grad_scales(0.0).tolist() == pytest.approx([0.2, 0.9])


def test_the_derivative_of_the_soft_loss_by_lambda_is_the_stage_loss() -> None:
    """Of the reference's whole graph, by finite differences, against what the executor returns."""
    torch.manual_seed(0)
    boundaries = boundaries_of(3, SoftConfig(stages=2), 9)

    def topology() -> Topology:
        soft = Topology.soft(boundaries.grad_scales(0.0).tolist(), heads="per-stage")
        return replace(soft, reduction="sum")

    stack = GPT(layers=3, width=16, heads=2, vocab=20, context=8, head_rank=2).double()
    prepare(stack, topology())
    inputs, targets = torch.randint(0, 20, (2, 2, 8))
    losses = train_step(stack, topology(), inputs, targets)
    h = 1e-4
    for i in range(2):
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                boundaries.logits[i] += sign * h
                values.append(graph_losses(stack, topology(), inputs, targets)[0].item())
                boundaries.logits[i] -= sign * h
        lam = boundaries.grad_scales(0.0)[i].item()
        slope = lam * (1 - lam) / boundaries.config.hot
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(-losses[i].item() * slope, rel=1e-6)


def test_boundaries_go_where_the_loss_is_least() -> None:
    found = learned([4.0, 1.0, 4.0, 4.0, 1.0, 4.0, 1.0], stages=3, length=0.0)
    assert found.harden().parts == (2, 3, 2)
    lam = found.grad_scales(1.0)
    assert lam[[1, 4]].max() < 0.1
    assert lam[[0, 2, 3, 5]].min() > 0.9
    assert expected_boundaries(lam).item() == pytest.approx(2, abs=0.1)


def test_the_count_is_met_in_few_steps_while_the_level_of_the_losses_falls() -> None:
    """As in training, where the losses lose some nats together and differ by hundredths in the end."""
    boundaries = boundaries_of(12, SoftConfig(stages=3, length=0.0), 60)
    for step in range(60):
        level = 3 + 3 * (1 - step / 60) ** 4
        boundaries.update(level - 0.02 * torch.arange(12), step / 59)
    lam = boundaries.grad_scales(1.0)
    assert expected_boundaries(lam).item() == pytest.approx(2, abs=0.05)
    assert boundaries.harden().parts == (10, 1, 1)


def test_the_losses_alone_push_boundaries_to_the_end_and_capability_pulls_them_back() -> None:
    falling = [3.0, 2.9, 2.8, 2.7, 2.6, 2.5, 2.4, 2.3]
    alone = learned(falling, stages=3, length=0.0)
    assert alone.harden().parts == (6, 1, 1)
    capable = learned(falling, stages=3, length=0.0, min_depth=2, capability=5.0)
    assert min(capable.harden().parts) >= 2


def test_the_multiplier_holds_the_count_against_a_cost_of_coupling() -> None:
    found = learned([2.0, 1.0, 2.0, 1.1, 2.0], stages=2, coupling=3.0, length=0.0, steps=400)
    assert expected_boundaries(found.grad_scales(1.0)).item() == pytest.approx(1, abs=0.15)
    assert found.multiplier > 0  # losses of 1 to 2 less 3 for coupling: boundaries gain, and are held back


def test_hardening_keeps_to_the_least_depth() -> None:
    boundaries = boundaries_of(6, SoftConfig(stages=3, min_depth=2), 9)
    with torch.no_grad():
        boundaries.logits[:] = torch.tensor([-9.0, 1.0, -5.0, 2.0, -9.0])
    assert boundaries.harden().parts == (2, 2, 2)


def test_every_layer_keeps_a_loss_and_a_hard_boundary_can_open() -> None:
    boundaries = learned([5.0, 1.0, 5.0, 5.0], stages=2, length=0.0)
    lam = boundaries.grad_scales(1.0)
    assert 0 < lam.min() < 1e-3
    assert 1 - 1e-3 < lam.max() < 1
    assert all(stage.weight > 0 for stage in Topology.soft(lam.tolist()).stages)
    for _ in range(100):
        boundaries.update(torch.tensor([1.0, 5.0, 5.0, 5.0]), 1.0)
    assert boundaries.harden().parts == (1, 3)


def test_a_state_is_everything() -> None:
    whole, half = (boundaries_of(5, SoftConfig(stages=2), 9) for _ in range(2))
    losses = torch.tensor([3.0, 1.1, 2.0, 0.7, 0.9])
    for step in range(9):
        whole.update(losses, step / 8)
        if step == 3:
            half.restore(whole.state())
        if step > 3:
            half.update(losses, step / 8)
    assert half.state() == whole.state()
    assert whole.state()["adam"]["step"] == 9


@pytest.fixture(scope="module")
def found(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A soft run that was never stopped."""
    trainer = start(soft_run(config, SoftConfig(stages=2)), tmp_path_factory.mktemp("soft") / "run")
    trainer.train()
    return trainer.task.run


def test_learning_trains_the_model_and_gives_a_partition(config: TrainConfig, found: Run) -> None:
    name = found.store.names()[-1]
    session = open_session(found.folder)
    outcome = soft_outcome(session.config, found.store.extra(name))
    parts = outcome["partition"]
    assert (len(parts), sum(parts)) == (2, 4)
    assert session.plan.topology.head_rank == 4
    assert [len(planned.layers) for planned in session.plan.stages] == parts
    assert len(outcome["grad_scales"]) == 3
    assert outcome["losses"][-1] < math.log(257) - 0.5
    logged = [r["grad_scales"] for r in found.metrics() if r["kind"] == "boundaries"]
    assert len(logged) == config.steps
    assert logged[0] != logged[-1]


def test_what_is_evaluated_is_the_hard_partition(config: TrainConfig, found: Run) -> None:
    """The results of a run, the last record of its log, and what its folder opens as."""
    results = found.read_results()
    assert results is not None
    trainer = resume(found.folder)
    again = evaluate(trainer.task.stack, trainer.task.plan, trainer.task.text).as_dict()
    assert again["bpb"] == results["bpb"]
    assert len(results["bpb"]["prefix"]) == 2
    assert [r["bpb"] for r in found.metrics() if r["kind"] == "eval"][-1] == results["bpb"]
    assert trainer.train()["bpb"] == results["bpb"], "going on with a finished run changes nothing"


class Killed(Exception):
    """Nothing is saved on the way out."""


@pytest.mark.covers("gpt", "train", "resume", feature="search")
@pytest.mark.parametrize("killed_at", [2, 7, 12])
def test_a_killed_soft_run_goes_on_as_if_nothing_had_happened(
    config: TrainConfig, found: Run, tmp_path: Path, killed_at: int
) -> None:
    """Before the first checkpoint, between two, and after the last step."""

    def kill(step: int, steps: int, losses: list[float], reading: object) -> None:
        if step == killed_at:
            raise Killed

    with pytest.raises(Killed):
        start(soft_run(config, SoftConfig(stages=2)), tmp_path / "run").train(on_step=kill)
    if killed_at > config.save_every:
        first = open_session(tmp_path / "run")
        assert first.config.topology.graph == "soft", "until it hardens it opens as what it is"
    trainer = resume(tmp_path / "run")
    assert isinstance(trainer.task, SoftTask)
    trainer.train()
    same = [[r | {"seconds": 0} for r in run.metrics()] for run in (found, trainer.task.run)]
    assert same[0] == same[1]
    names = found.store.names()[-1]
    assert trainer.task.run.store.weights(names) == found.store.weights(names)
    extras = [run.store.extra(names) for run in (found, trainer.task.run)]
    assert extras[0]["search"] == extras[1]["search"]
    assert extras[0]["topology"] == extras[1]["topology"]


def test_bad_settings(config: TrainConfig, tmp_path: Path) -> None:
    with refused(TopologyError, setting="stages", given=5):
        soft_run(config, SoftConfig(stages=5))
    with refused(TopologyError, setting="stages", given=2):
        soft_run(config, SoftConfig(stages=2, min_depth=3))
    with refused(ConfigError, setting="layers", given=1):
        soft_run(replace(config, model=config.model.changed(layers=1)), SoftConfig(stages=1))
    with refused(ConfigError, setting="cold", given=1.0):
        SoftConfig(hot=0.1, cold=1.0)
    with refused(ConfigError, setting="min_depth", given=1):
        SoftConfig(capability=1.0)
    with refused(ConfigError, setting="travel", given=-1):
        SoftConfig(travel=-1)
    with refused(ConfigError, setting="graph", given="chain"):
        start(config.changed(search=SearchConfig(kind="soft")), tmp_path / "chain")
    assert not (tmp_path / "chain" / "config.toml").exists()


def test_losses_may_be_of_any_precision() -> None:
    boundaries = boundaries_of(3, SoftConfig(stages=2), 9)
    half: Tensor = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    boundaries.update(half, 0.0)
    assert boundaries.logits.dtype == torch.float64


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_temperature_that_falls_by_leaps_leaves_every_layer_its_loss(steps: int) -> None:
    """Logits that were bounded at one temperature are beyond the bound at the next."""
    boundaries = boundaries_of(6, SoftConfig(stages=3), steps)
    for step in range(steps):
        progress = step / max(steps - 1, 1)
        boundaries.update(torch.linspace(4, 1, 6), progress)
        lam = boundaries.grad_scales(1.0)
        assert ((lam > 0) & (lam < 1)).all()
    assert boundaries.harden().stages == 3
