"""Every topology is a run: its settings are a file, and stopped and resumed it ends where it would have."""

from __future__ import annotations

import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.files import dump_toml
from topograd.runs.config import OptimizerConfig, StageOptimizer, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import heldout_text, open_session
from topograd.topology.dag import EMBEDDING, Edge, Stage
from topograd.training.evaluation import evaluate
from topograd.training.runs import resume, start

STEPS = 4
ROOT = Edge(EMBEDDING, grad_scale=1.0)
STAGES = (
    Stage(0, 1, (ROOT,), weight=0.0),
    Stage(1, 3, (Edge(0, grad_scale=0.5),), objective="z-loss", weight=2.0),
    Stage(2, 4, (Edge(1, layer=2), Edge(EMBEDDING, relay="pre-norm"))),
)
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "chain": {"partition": "2,2"},
    "backprop": {},
    "residual": {"partition": "2,2", "heads": "per-stage", "objective": "residual"},
    "low-rank-heads": {"partition": "2,2", "heads": "low-rank", "head_rank": 3},
    "decoder": {"partition": "1,3", "heads": "per-stage", "decoder": 1},
    "forest": {"graph": "forest", "branches": ("1,1", "2")},
    "cover": {"graph": "cover", "intervals": ((0, 3), (1, 4)), "heads": "per-stage"},
    "soft": {"graph": "soft", "grad_scales": (0.25, 1.0, 0.0)},
    "stages": {"graph": "stages", "stages": STAGES, "prediction": "0,1,3"},
    "relay-and-bus": {
        "partition": "1,1,2",
        "relay": "gate",
        "source": "embedding",
        "join": "low-rank",
        "relay_rank": 3,
        "source_grad_scale": 0.5,
    },
    "early-layer": {"partition": "2,1,1", "source": "layer:1", "join": "gate", "bus": "detached"},
    "grad_scales": {"partition": "1,1,2", "grad_scales": (0.2, 0.9), "reduction": "sum"},
    "own-objectives": {
        "partition": "1,1,2",
        "objectives": ("cross-entropy", "z-loss", "residual"),
        "weights": (0.5, 1.0, 2.0),
    },
    "z-loss": {"partition": "2,2", "objective": "z-loss"},
    "mean": {"partition": "2,2", "prediction": "mean"},
    "path": {"partition": "1,1,2", "prediction": "path:1,3"},
    "distillation": {"partition": "2,2", "objective": "distillation", "teacher_mix": 0.7},
    "kept-logits": {"partition": "2,2", "objective": "distillation", "teacher_top": 8},
    "interface": {"partition": "1,1,2", "interface": "S=4,r=4,pool=tail"},
    "interface-scan": {"partition": "1,1,2", "interface": "S=4,r=4", "backward": "scan"},
    "interface-hybrid": {"partition": "1,1,1,1", "interface": "S=4,r=4", "backward": "hybrid"},
    "interface-pullback": {
        "partition": "1,1,1,1",
        "interface": "S=4,r=4",
        "backward": "scan",
        "jacobian": "pullback",
        "jacobian_chunk": 2,
    },
    "recompute": {"partition": "2,2", "recompute": True},
    "interface-recompute": {
        "partition": "1,1,2",
        "interface": "S=4,r=4",
        "backward": "scan",
        "recompute": True,
    },
}


def settings(name: str, config: TrainConfig, teacher: Run) -> TrainConfig:
    table = dict(TOPOLOGIES[name])
    if table.get("objective") == "distillation":
        table["teacher"] = str(teacher.folder)
    base = config.changed(partition="L", steps=STEPS, save_every=2, eval_every=0, keep=3)
    return base.changed(model=config.model.changed(layers=4), **table)


def final(run: Run) -> dict[str, Any]:
    """All that a run found, but for how long it took and where it lies."""
    results = run.read_results()
    assert results is not None
    rest = {key: value for key, value in results.items() if key not in ("seconds", "run")}
    logged = [{key: value for key, value in record.items() if key != "seconds"} for record in run.metrics()]
    return rest | {"log": logged, "found": run.store.weights(run.store.names()[-1])}


@pytest.mark.covers("gpt", "train", "resume")
@pytest.mark.covers("gpt", "train", "resume", feature="topologies")
@pytest.mark.covers("gpt", "train", "resume", feature="objectives")
@pytest.mark.covers("gpt", "train", "resume", feature="relays")
@pytest.mark.covers("gpt", "train", "resume", feature="interfaces")
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_it_trains_resumes_bit_for_bit_and_is_measured_again(
    name: str, config: TrainConfig, straight: Run, tmp_path: Path
) -> None:
    chosen = settings(name, config, straight)
    whole = start(chosen, tmp_path / "whole")
    first = {n: p.detach().clone() for n, p in whole.task.stack.named_parameters()}
    whole.train()
    still = [n for n, p in whole.task.stack.named_parameters() if torch.equal(p, first[n])]
    assert not still, f"these parameters never learned: {still}"
    assert final(whole.task.run)["finished"]

    start(chosen, tmp_path / "parts").train(stop_after=3)
    trainer = resume(tmp_path / "parts", "step-00000002")
    assert (trainer.step, trainer.task.config, trainer.task.plan) == (2, whole.task.config, whole.task.plan)
    trainer.train()
    assert final(trainer.task.run) == final(whole.task.run)

    session = open_session(tmp_path / "parts")
    assert session.plan == whole.task.plan
    assert evaluate(session.stack, session.plan, heldout_text(session)).as_dict().items() <= (
        final(whole.task.run).items()
    )


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_its_settings_are_a_file(name: str, config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    chosen = settings(name, config, straight)
    run = Run.create(tmp_path / "run")
    run.write_config(chosen.as_dict())
    assert TrainConfig.from_dict(run.read_config()) == chosen
    read = tomllib.loads(dump_toml(chosen.as_dict()))
    assert chosen.overlaid({}) == chosen
    assert TrainConfig().overlaid(read) == chosen, "a whole file laid over the defaults is that file"


def test_stages_with_optimizers_of_their_own_are_a_file_too(config: TrainConfig, tmp_path: Path) -> None:
    own = (StageOptimizer(stage=2, name="sgd", rate=0.5, warmdown=0.1), StageOptimizer(stage=1, floor=0.2))
    chosen = replace(config, optimizer=OptimizerConfig(name="adamw", stages=own, clip=1.0))
    run = Run.create(tmp_path / "run")
    run.write_config(chosen.as_dict())
    assert TrainConfig.from_dict(run.read_config()) == chosen


def test_a_teacher_that_learned_on_is_refused(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    teacher = Run(shutil.copytree(straight.folder, tmp_path / "teacher"))
    chosen = settings("distillation", config, teacher)
    start(chosen, tmp_path / "run").train(stop_after=2)
    shutil.rmtree(teacher.checkpoints / "step-00000020")
    with refused(ValueError, setting="teacher"):
        resume(tmp_path / "run")
    shutil.copytree(straight.checkpoints / "step-00000020", teacher.checkpoints / "step-00000020")
    resume(tmp_path / "run").train()


def test_a_teacher_of_other_tokens_is_refused(config: TrainConfig, straight: Run, tmp_path: Path) -> None:
    chosen = settings("distillation", config, straight)
    other = replace(chosen, tokenizer="bpe", model=chosen.model.changed(vocab=270))
    with refused(ValueError, setting="teacher"):
        start(other, tmp_path / "run")
    long = replace(chosen, model=chosen.model.changed(context=32))
    with refused(ValueError, setting="teacher"):
        start(long, tmp_path / "run")
    assert not (tmp_path / "run" / "config.toml").exists()
