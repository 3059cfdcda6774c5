"""A stage dies while the others go on; it returns, and nothing is lost that was kept."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError
from topograd.files import dump_toml
from topograd.parallel.consolidate import consolidate_stages
from topograd.parallel.independent_stage import check_alone
from topograd.parallel.settings import ParallelConfig
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import build_stack, open_session
from topograd.training.runs import resume, start
from topograd.training.trainer import Trainer
from waiting import wait_until

STAGES = 3


@pytest.fixture(scope="module")
def alone(config: TrainConfig) -> TrainConfig:
    model = config.model.changed(layers=3, x0_blend=False)
    more: dict[str, Any] = {"partition": "1,1,1", "heads": "own", "bus": "detached"}
    return config.changed(model=model, steps=24, save_every=3, eval_every=0, accumulate=2, **more)


@pytest.fixture(scope="module")
def settings(alone: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "config.toml"
    file.write_text(dump_toml(alone.as_dict()))
    return file


@pytest.fixture(scope="module")
def one(alone: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """All stages in one process."""
    trainer = start(alone, tmp_path_factory.mktemp("one") / "run")
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def expected(one: Trainer) -> list[list[float]]:
    """The losses of every stage, step by step."""
    return [r["loss"] for r in one.task.run.metrics() if r["kind"] == "train"]


@pytest.fixture
def stage(launch: Any, settings: Path, links: list[str], tmp_path: Path) -> Any:
    """Start one stage as a process of its own; one that has a folder goes on from its checkpoint.

    It trains no further than to step `last` until the file "go" is there.
    """

    def begin(
        number: int,
        folder: Path,
        *more: str,
        options: str = "",
        stages: int = STAGES,
        last: int | None = None,
    ) -> Any:
        own = folder / f"stage-{number}"
        first = ["--resume", str(own)] if (own / "config.toml").exists() else ["--out", str(folder)]
        first = first if first[0] == "--resume" else ["--config", str(settings), *first]
        where = "+".join(links[:stages])
        parallel = f"stages={stages},stage={number},links={where},timeout=60{options}"
        gate = {} if last is None else {"gate": (last, str(tmp_path / "go"))}
        return launch("cli", 1, argv=["train", *first, "--parallel", parallel, "--json", *more], **gate)

    return begin


@pytest.fixture
def links(free_port: Any) -> Iterator[list[str]]:
    """An address for every stage, each on a port that nobody else is given meanwhile."""
    with ExitStack() as held:
        ports = [held.enter_context(free_port()).getsockname()[1] for _ in range(STAGES)]
        yield [f"127.0.0.1:{port}" for port in ports]


def losses(folder: Path, number: int, kind: str = "train") -> dict[int, float]:
    """The loss of each step; a step that was repeated after a fault counts once."""
    return {
        r["step"]: r["loss"][0] for r in Run.open(folder / f"stage-{number}").metrics() if r["kind"] == kind
    }


def wait_for(folder: Path, number: int, step: int) -> None:
    log = folder / f"stage-{number}" / "metrics.jsonl"
    wait_until(
        lambda: log.exists() and len(log.read_text().splitlines()) >= step, f"step {step} of stage {number}"
    )


@pytest.mark.covers("gpt", "parallel", feature="faults")
@pytest.mark.parametrize(("victim", "last"), [(1, 4), (2, 5), (3, 6)])
def test_a_stage_dies_and_every_loss_stays_bit_for_bit(
    victim: int, last: int, stage: Any, one: Trainer, expected: list[list[float]], tmp_path: Path
) -> None:
    """Waiting stages and a buffer that covers the outage: all of them, the dead one too."""
    jobs = {k: stage(k, tmp_path, last=last if k == victim else None) for k in range(1, STAGES + 1)}
    wait_for(tmp_path, victim, 4)
    jobs[victim].kill(0)  # within a save, behind it, or within the next step
    jobs[victim].wait()
    for k in range(1, victim):  # those before it do not need it
        wait_for(tmp_path, k, 12)
    jobs[victim] = stage(victim, tmp_path)
    for job in jobs.values():
        assert job.wait() == [0], job.said()
    for k in range(1, STAGES + 1):
        assert losses(tmp_path, k) == {s + 1: row[k - 1] for s, row in enumerate(expected)}, k
    folders = [tmp_path / f"stage-{k}" for k in range(1, STAGES + 1)]
    consolidate_stages(folders, tmp_path / "whole")
    session, plain = open_session(tmp_path / "whole"), open_session(one.task.run.folder)
    for (name, ours), theirs in zip(
        session.stack.state_dict().items(), plain.stack.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    resumed = resume(tmp_path / "whole")
    for name, optimizer in resumed.task.loop.optimizers.optimizers.items():
        saved = one.task.loop.optimizers.optimizers[name].state_dict()["state"]
        mine = optimizer.state_dict()["state"]
        assert mine.keys() == saved.keys()
        for index, entries in saved.items():
            for key, value in entries.items():
                assert torch.equal(torch.as_tensor(mine[index][key]), torch.as_tensor(value)), (name, key)


def test_stages_behind_a_dead_one_replay_what_they_heard(
    stage: Any, expected: list[list[float]], tmp_path: Path
) -> None:
    first = stage(1, tmp_path, stages=2, last=12)
    second = stage(2, tmp_path, options=",lost=replay", stages=2)
    wait_for(tmp_path, 2, 4)
    first.kill(0)
    wait_until(lambda: losses(tmp_path, 2, "replay"), "a replay")
    first = stage(1, tmp_path, stages=2)
    assert first.wait() == [0], first.said()
    assert second.wait() == [0], second.said()
    assert json.loads(second.printed(0))["replayed"] > 0
    assert losses(tmp_path, 1) == {s + 1: row[0] for s, row in enumerate(expected)}
    assert sorted(losses(tmp_path, 2)) == list(range(1, 25))


def test_a_stage_that_was_away_too_long_goes_on_with_what_is_kept(
    stage: Any, expected: list[list[float]], tmp_path: Path
) -> None:
    first = stage(1, tmp_path, options=",buffer=4", stages=2)
    second = stage(2, tmp_path, options=",buffer=4", stages=2, last=5)
    wait_for(tmp_path, 2, 4)
    second.kill(0)
    wait_for(tmp_path, 1, 20)
    second = stage(2, tmp_path, options=",buffer=4", stages=2)
    assert first.wait() == [0], first.said()
    assert second.wait() == [0], second.said()
    assert json.loads(second.printed(0))["missed"] > 0
    assert losses(tmp_path, 1) == {s + 1: row[0] for s, row in enumerate(expected)}
    assert max(losses(tmp_path, 2)) == 24


def test_a_stage_is_added_to_a_running_job(stage: Any, expected: list[list[float]], tmp_path: Path) -> None:
    first, second = (stage(k, tmp_path, stages=2, last=6) for k in (1, 2))
    wait_for(tmp_path, 2, 6)
    third = stage(3, tmp_path)
    wait_for(tmp_path, 3, 1)  # it hears what is kept, and the others still run
    (tmp_path / "go").touch()
    for job in (first, second, third):
        assert job.wait() == [0], job.said()
    for k in (1, 2):
        assert losses(tmp_path, k) == {s + 1: row[k - 1] for s, row in enumerate(expected)}
    assert losses(tmp_path, 3) == {s + 1: row[2] for s, row in enumerate(expected)}  # the buffer has it all


REFUSED: dict[str, Any] = {
    "head": ({"heads": "shared"}, "heads"),
    "bus": ({"bus": "live"}, "bus"),
    "x0": ({"x0_blend": True}, "model.x0_blend"),
    "gradient": ({"grad_scale": 0.5}, "stage"),
    "forest": (
        {"graph": "forest", "partition": "L", "branches": ("1", "2")},
        "stage",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_stage_that_needs_more_of_the_others_is_refused(name: str, alone: TrainConfig) -> None:
    changes, setting = REFUSED[name]
    blend = changes.get("x0_blend", False)
    rest = {key: value for key, value in changes.items() if key != "x0_blend"}
    config = alone.changed(model=alone.model.changed(x0_blend=blend), **rest)
    stack, plan = build_stack(config)
    with refused(ConfigError, setting=setting):
        check_alone(stack, plan, ParallelConfig(stages=len(plan.stages), stage=2))


def test_neighbours_that_disagree_are_told_what_about(stage: Any, tmp_path: Path) -> None:
    first, second = stage(1, tmp_path, stages=2), stage(2, tmp_path, "--seed", "5", stages=2)
    assert second.wait() == [2]
    assert "seed is 5 here and 1 at the stage before it" in second.printed(0, "err")
    first.kill(0)
