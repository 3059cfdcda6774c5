import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from topograd.errors import CheckpointError, ConfigError, DataError, RunError
from topograd.nn.config import GPTConfig
from topograd.runs.config import TrainConfig
from topograd.runs.session import Session, build_stack, device_of, heldout_text, open_session
from topograd.runs.topology_config import TopologyConfig
from topograd.training.evaluation import Evaluation, evaluate
from topograd.training.trainer import Trainer, start


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("session")
    chosen = random.Random(0).choices(["plan", "relay", "loss", "bus"], k=900)
    (folder / "corpus.txt").write_text(" ".join(chosen))
    config = TrainConfig(
        topology=TopologyConfig(partition="1,1", heads="per-stage"),
        steps=6,
        batch=2,
        data=str(folder / "corpus.txt"),
        tokenizer="bytes",
        eval_bytes=250,
        save_every=3,
        model=GPTConfig(layers=2, width=16, heads=2, context=16),
    )
    trainer = start(config, folder / "run")
    trainer.train()
    return trainer


def test_a_session_has_the_weights_of_the_newest_checkpoint(trained: Trainer) -> None:
    session = open_session(trained.run.folder)
    assert (session.step, session.config) == (6, trained.config)
    assert not session.stack.training
    for (name, one), two in zip(session.stack.named_parameters(), trained.stack.parameters(), strict=True):
        assert torch.equal(one, two), name
    inputs = torch.randint(257, (1, 16))
    assert torch.equal(session.stack(inputs), trained.stack(inputs))


def test_an_earlier_checkpoint_by_name(trained: Trainer) -> None:
    session = open_session(trained.run.folder, "step-00000003")
    assert session.step == 3
    assert not torch.equal(session.stack.head.weight, trained.stack.head.weight)
    with pytest.raises(CheckpointError, match="no checkpoint 'last'; it has step-00000003, step-00000006"):
        open_session(trained.run.folder, "last")


def read(session: Session, data: Path | None = None, limit_bytes: int | None = None) -> Evaluation:
    return evaluate(session.stack, session.plan, heldout_text(session, data, limit_bytes))


def test_it_measures_what_the_training_measured(trained: Trainer) -> None:
    recorded = json.loads(trained.run.results_file.read_text())
    session = open_session(trained.run.folder)
    readings = read(session).as_dict()
    assert readings == {key: recorded[key] for key in readings}
    assert recorded.keys() - readings.keys() == {"run", "steps", "weights", "finished", "seconds"}
    assert recorded["weights"] == session.weights == trained.run.store.weights("step-00000006")


def test_other_text_is_read_whole_or_up_to_a_limit(trained: Trainer, tmp_path: Path) -> None:
    session = open_session(trained.run.folder)
    other = tmp_path / "other.txt"
    other.write_text("another text, of nothing but this " * 20)
    whole = read(session, other)
    assert whole.bytes == whole.tokens == other.stat().st_size
    assert whole.bpb.last > read(session).bpb.last + 0.5, "it never saw such text"
    part = read(session, other, 200)
    assert 100 < part.bytes <= 200
    with pytest.raises(DataError, match="too small for one window"):
        read(session, other, 1)
    with pytest.raises(DataError, match="does not exist"):
        read(session, tmp_path / "nowhere")


def test_a_run_without_a_checkpoint_says_how_to_get_one(trained: Trainer, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.run.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint yet; train it with: topograd train --resume"):
        open_session(folder)
    with pytest.raises(RunError, match="does not exist"):
        open_session(tmp_path / "nowhere")


def test_a_checkpoint_of_another_model_is_refused(trained: Trainer, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.run.folder, tmp_path / "run")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("width = 16", "width = 32"))
    (folder / "manifest.json").unlink()  # as in a run of version 0.1
    with pytest.raises(CheckpointError, match="does not fit the model"):
        open_session(folder)


def test_the_seed_makes_the_model(trained: Trainer) -> None:
    one, plan = build_stack(trained.config)
    two, _ = build_stack(trained.config)
    other, _ = build_stack(replace(trained.config, seed=9))
    assert torch.equal(one.embedding.weight, two.embedding.weight)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    assert len(plan.stages) == len(one.head.deltas) == 2


@pytest.mark.parametrize("device", ["abacus", "cuda:99", ""])
def test_a_device_that_is_not_there(device: str, trained: Trainer) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used \(.*\); try 'cpu'"):
        device_of(replace(trained.config, device=device))
