import math
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.gpt import GPT
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.search_config import SurgeryConfig
from topograd.runs.session import open_session
from topograd.search.surgery import SurgeryTask, choose, neighbours, surgery_outcome, surgery_run
from topograd.topology.composition import Composition
from topograd.training.runs import resume, start
from topograd.training.trainer import Trainer

HERE, BETTER, BEST, WORSE = map(Composition.parse, ("2,2", "4", "1,3", "3,1"))
SCORES = {HERE: 1.0, BETTER: 0.9, BEST: 0.8, WORSE: 1.1}
WALK = SurgeryConfig(every=3, deployment="datacenter", acceptance="stochastic", temperature=1e3, min_depth=1)
"""Hot enough to accept anything: every operation goes to a neighbour, and the seed decides which."""


def test_the_neighbours_keep_the_least_depth() -> None:
    near = {str(pi) for pi in neighbours(HERE, 1)}
    assert near == {"4", "1,1,2", "2,1,1", "1,3", "3,1"}
    assert [str(pi) for pi in neighbours(HERE, 2)] == ["4"]
    assert {str(pi) for pi in neighbours(HERE, 1, stages=2)} == {"1,3", "3,1"}


def test_greedy_takes_the_best_if_it_is_better() -> None:
    greedy, generator = SurgeryConfig(), np.random.default_rng(0)
    assert choose(HERE, SCORES, greedy, generator) == BEST
    assert choose(BEST, SCORES, greedy, generator) == BEST
    assert choose(HERE, {HERE: 1.0}, greedy, generator) == HERE
    assert choose(HERE, {HERE: 1.0, WORSE: 1.0}, greedy, generator) == HERE


def test_stochastic_takes_a_worse_one_as_often_as_it_should() -> None:
    config = SurgeryConfig(acceptance="stochastic", temperature=0.1)
    generator = np.random.default_rng(0)
    draws = [choose(HERE, {HERE: 1.0, WORSE: 1.1}, config, generator) for _ in range(2000)]
    assert draws.count(WORSE) / 2000 == pytest.approx(math.exp(-1), abs=0.04)  # 3.7 standard deviations
    assert {choose(HERE, {HERE: 1.0, BEST: 0.8}, config, generator) for _ in range(20)} == {BEST}
    assert {choose(HERE, SCORES, config, generator) for _ in range(200)} == set(SCORES)


def begun(config: TrainConfig, surgery: SurgeryConfig, folder: Path) -> Trainer[SurgeryTask]:
    trainer = start(surgery_run(config, surgery), folder)
    assert isinstance(trainer.task, SurgeryTask)
    return cast("Trainer[SurgeryTask]", trainer)


def test_an_operation_changes_boundaries_and_nothing_that_was_learned(
    config: TrainConfig, tmp_path: Path
) -> None:
    modular = SurgeryConfig(every=100, deployment="modular", min_depth=2)
    trainer = begun(config.changed(heads="per-stage"), modular, tmp_path / "run")
    stack = trainer.task.stack
    assert isinstance(stack, GPT)
    trainer.train(stop_after=3)
    layers = {name: value.clone() for name, value in stack.layers.state_dict().items()}
    head = stack.head.matrix(0).clone()
    done = trainer.task.operate(trainer.step)
    assert done.after.parts == (2, 2)  # the only neighbour, and coupling and capability speak for it
    assert (done.before, trainer.task.config.topology.partition) == (Composition.parse("4"), "2,2")
    assert done.gain > 0
    assert done.merge == {}
    assert set(done.split) == {2}
    assert all(torch.equal(layers[n], v) for n, v in stack.layers.state_dict().items())
    assert torch.equal(stack.head.matrix(0), head)
    assert torch.equal(stack.head.matrix(1), head)
    trainer.train(stop_after=4)
    assert not torch.equal(stack.head.matrix(0), stack.head.matrix(1))


def test_the_number_of_stages_can_be_kept(config: TrainConfig, tmp_path: Path) -> None:
    walk = replace(WALK, stages=2)
    trainer = begun(config.changed(partition="2,2"), walk, tmp_path / "run")
    trainer.train()
    assert trainer.task.operations
    assert all(len(done["after"]) == 2 for done in trainer.task.operations)
    with refused(ConfigError, setting="stages", given=2):
        begun(config.changed(partition="4"), walk, tmp_path / "other")


@pytest.mark.parametrize("heads", ["shared", "per-stage"])
def test_training_with_surgery(config: TrainConfig, heads: str, tmp_path: Path) -> None:
    surgery = SurgeryConfig(every=4, deployment="modular")
    trainer = begun(config.changed(heads=heads), surgery, tmp_path / "run")
    results = trainer.train()
    session = open_session(tmp_path / "run")
    store = trainer.task.run.store
    outcome = surgery_outcome(session.config, store.extra(store.names()[-1]))
    steps = [done["step"] for done in outcome["operations"]]
    assert steps == [4, 8]  # none in the last 4 steps
    assert outcome["operations"][0]["before"] == [4]
    assert outcome["operations"][0]["after"] == outcome["operations"][1]["before"] == [2, 2]
    assert outcome["partition"] == outcome["operations"][-1]["after"]
    assert [len(planned.layers) for planned in session.plan.stages] == outcome["partition"]
    losses = [len(r["loss"]) for r in trainer.task.run.metrics() if r["kind"] == "train"]
    assert losses[:8] == [1] * 4 + [2] * 4
    assert len(results["bpb"]["prefix"]) == len(outcome["partition"])
    assert results["bpb"]["prediction"] < 8


def records(run: Run) -> list[dict[str, object]]:
    return [record | {"seconds": 0} for record in run.metrics()]


@pytest.mark.covers("gpt", "train", "resume", feature="search")
@pytest.mark.parametrize(
    ("heads", "optimizer"),
    [("per-stage", "muon+adamw"), ("low-rank", "adamw"), ("per-stage", "ddc-adam")],
)
def test_a_surgery_run_goes_on_as_if_it_had_not_stopped(
    config: TrainConfig, tmp_path: Path, heads: str, optimizer: str
) -> None:
    """Stopped right behind an operation, between two, right behind another, and killed without a save."""
    config = config.changed(
        partition="1,1,2", heads=heads, head_rank=3, save_every=4, optimizer=OptimizerConfig(name=optimizer)
    )
    whole = begun(config, WALK, tmp_path / "whole")
    whole.train()
    moves = [(done["before"], done["after"]) for done in whole.task.operations]
    assert [done["step"] for done in whole.task.operations] == [3, 6, 9]
    assert len({tuple(after) for _, after in moves} | {tuple(before) for before, _ in moves}) > 2
    for before, after in moves:
        near = [list(pi.parts) for pi in neighbours(Composition.of(before), 1)]
        assert after in (before, *near)
    begun(config, WALK, tmp_path / "parts").train(stop_after=3)

    def kill(step: int, steps: int, losses: list[float], reading: object) -> None:
        if step == 10:
            raise InterruptedError

    for stop in (5, 6):
        resume(tmp_path / "parts").train(stop_after=stop)
    with pytest.raises(InterruptedError):
        resume(tmp_path / "parts").train(on_step=kill)
    trainer = resume(tmp_path / "parts")
    assert isinstance(trainer.task, SurgeryTask)
    trainer.train()
    assert trainer.task.operations == whole.task.operations
    assert records(trainer.task.run) == records(whole.task.run)
    name = whole.task.run.store.names()[-1]
    assert trainer.task.run.store.weights(name) == whole.task.run.store.weights(name)


def test_a_broken_stage_keeps_its_boundaries(config: TrainConfig, tmp_path: Path) -> None:
    trainer = begun(config.changed(partition="2,2", heads="per-stage"), WALK, tmp_path / "run")
    trainer.train(stop_after=2)
    with torch.no_grad():
        trainer.task.stack.head_parameters(1)[0].fill_(math.nan)
    trainer.train(stop_after=4)
    assert trainer.task.loop.halted == {1}
    assert trainer.task.operations == []


def test_bad_settings(config: TrainConfig, tmp_path: Path) -> None:
    with refused(ConfigError, setting="deployment", given="moon"):
        SurgeryConfig(deployment="moon")  # type: ignore[arg-type]
    with refused(ConfigError, setting="every", given=0):
        SurgeryConfig(every=0)
    with refused(ConfigError, setting="temperature", given=0):
        SurgeryConfig(temperature=0)
    with refused(ConfigError, setting="partition"):
        begun(config.changed(partition="1,3"), SurgeryConfig(min_depth=2), tmp_path / "a")
    residual = config.changed(partition="2,2", heads="per-stage", objective="residual")
    with refused(ConfigError, setting="objective", given="residual"):
        begun(residual, SurgeryConfig(), tmp_path / "b")
