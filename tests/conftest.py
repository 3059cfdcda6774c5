"""What several folders of tests share: a cache of their own, and a small text."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from topograd.nn.config import GPTConfig
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import Session, open_session
from topograd.runs.topology_config import TopologyConfig
from topograd.training.trainer import start


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing that a test prepares stays in the cache of whoever runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chosen = random.Random(0).choices(["stage", "gradient", "layer", "stack", "relay", "loss"], k=900)
    path = tmp_path_factory.mktemp("data") / "corpus.txt"
    path.write_text(" ".join(chosen))
    return path


@pytest.fixture(scope="session")
def config(corpus: Path) -> TrainConfig:
    return TrainConfig(
        topology=TopologyConfig(partition="1,1"),
        steps=20,
        batch=3,
        seed=1,
        data=str(corpus),
        tokenizer="bytes",
        eval_every=8,
        eval_bytes=300,
        save_every=4,
        model=GPTConfig(layers=2, width=16, heads=2, context=16),
    )


@pytest.fixture(scope="session")
def straight(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that was never stopped."""
    trainer = start(config, tmp_path_factory.mktemp("straight") / "run")
    trainer.train()
    return trainer.run


@pytest.fixture(scope="module")
def make_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Session]]:
    """Runs on bytes, a layer a stage, of random weights whose stages disagree; saved as if of some step."""
    folder = tmp_path_factory.mktemp("session")
    (folder / "corpus.txt").write_text(" ".join(random.Random(0).choices(["stage", "loss", "relay"], k=900)))

    def make(stages: int, step: int = 0) -> Session:
        config = TrainConfig(
            topology=TopologyConfig(partition=",".join(["1"] * stages)),
            data=str(folder / "corpus.txt"),
            tokenizer="bytes",
            eval_bytes=300,
            model=GPTConfig(layers=stages, width=16, heads=2, context=16),
        )
        trainer = start(config, folder / f"run-{stages}-{step}")
        with torch.no_grad():
            for parameter in trainer.stack.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        trainer.step = step
        trainer.save()
        return open_session(trainer.run.folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield make
