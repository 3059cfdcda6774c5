"""A tiny training configuration on a small text, shared by the tests of the searches."""

import random
from collections.abc import Iterator

import pytest

from topograd.nn.gpt import GPTConfig
from topograd.training.config import TrainConfig


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    chosen = random.Random(0).choices(["stage", "gradient", "layer", "stack", "relay", "loss"], k=900)
    corpus = tmp_path_factory.mktemp("data") / "corpus.txt"
    corpus.write_text(" ".join(chosen))
    return TrainConfig(
        steps=12,
        batch=3,
        seed=1,
        data=str(corpus),
        tokenizer="bytes",
        eval_every=0,
        eval_bytes=300,
        save_every=4,
        model=GPTConfig(layers=4, width=16, heads=2, context=16),
    )
