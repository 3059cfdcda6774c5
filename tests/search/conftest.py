"""A tiny training configuration on a small text, shared by the tests of the searches."""

from pathlib import Path

import pytest

from topograd.nn.config import GPTConfig
from topograd.runs.config import TrainConfig


@pytest.fixture(scope="session")
def config(corpus: Path) -> TrainConfig:
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
