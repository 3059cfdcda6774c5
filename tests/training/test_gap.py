"""A staged run beside backprop: the gap, and what the step is measured on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from raising import refused
from topograd.errors import ConfigError
from topograd.nn.config import GPTConfig
from topograd.runs.config import TrainConfig
from topograd.runs.session import open_session
from topograd.runs.topology_config import TopologyConfig
from topograd.training.gap import gap_percent, measure_step
from topograd.training.runs import start


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "text.txt").write_text(" ".join(random.Random(0).choices(["plan", "relay", "bus"], k=900)))
    return TrainConfig(
        topology=TopologyConfig(partition="2,2"),
        steps=1,
        batch=2,
        data=str(tmp_path / "text.txt"),
        tokenizer="bytes",
        eval_bytes=250,
        model=GPTConfig(layers=4, width=16, heads=2, context=16),
    )


def test_the_gap_is_relative_to_backprop() -> None:
    assert gap_percent(2.12, 2.0) == pytest.approx(6.0)


def test_memory_falls_with_the_number_of_stages(config: TrainConfig, tmp_path: Path) -> None:
    start(config, tmp_path / "run").train()
    session = open_session(tmp_path / "run")
    found = measure_step(session)
    by_stages = found["memory"]["by_stages"]
    assert list(by_stages) == ["1", "2", "4"]
    assert by_stages["1"] > by_stages["2"] > by_stages["4"] > 0
    assert found["memory"]["ratio"] == by_stages["2"] / by_stages["1"]
    step = found["step_time_ratio"]
    assert 0 < step["low"] <= step["median"] <= step["high"]
    assert all(p.grad is None for p in session.stack.parameters()), "the measurement leaves nothing behind"


def test_heads_of_their_own_are_refused(config: TrainConfig, tmp_path: Path) -> None:
    start(config.changed(heads="per-stage"), tmp_path / "run").train()
    with refused(ConfigError, setting="heads", given="per-stage"):
        measure_step(open_session(tmp_path / "run"))
