"""Shards of a stage's layers: what a run keeps of them, and what cannot be cut (and test_stage_loop.py)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError
from topograd.files import dump_toml
from topograd.parallel.rank_task import check_shards
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session
from waiting import wait_until

SHARDS = "stages=1,replicas=2,shard,timeout=300"


@pytest.fixture(scope="module")
def cut(config: TrainConfig) -> TrainConfig:
    small = config.changed(steps=30, accumulate=2, eval_every=0, save_every=3)
    return replace(small, optimizer=OptimizerConfig(name="adamw"))


@pytest.mark.covers("gpt", "resume", "parallel", feature="shards")
def test_a_run_in_shards_is_killed_and_resumed_bit_for_bit(
    cut: TrainConfig, launch: Any, tmp_path: Path
) -> None:
    """Weights and moments go through a checkpoint of whole tensors, which one process reads too."""
    file = tmp_path / "config.toml"
    file.write_text(dump_toml(cut.as_dict()))
    flags = ["--parallel", SHARDS, "--json"]
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    begin = ["train", "--config", str(file), *flags, "--out"]
    gate = tmp_path / "gate"
    job = launch("cli", 2, argv=[*begin, str(halves)], gate=(4, str(gate)))
    wait_until(lambda: list(halves.glob("checkpoints/step-*")), "the first checkpoint")
    job.kill(1)
    gate.touch()  # rank 0 may have come to it already
    straight = launch("cli", 2, argv=[*begin, str(whole)])
    assert job.wait([0]) == [2], job.said()
    assert "is gone: rank 0 lost it while" in job.printed(0, "err")
    assert launch("cli", 2, argv=["train", "--resume", str(halves), *flags]).results() == [0, 0]
    assert straight.results() == [0, 0]
    ours, theirs = open_session(halves).stack.state_dict(), open_session(whole).stack.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    one, two = ([r for r in Run.open(folder).metrics() if r["kind"] == "train"] for folder in (whole, halves))
    assert [r["loss"] for r in one] == [r["loss"] for r in two]


def test_what_needs_a_whole_matrix_is_refused(cut: TrainConfig) -> None:
    check_shards(cut)
    with refused(ConfigError, setting="optimizer.name", given="muon+adamw"):
        check_shards(replace(cut, optimizer=OptimizerConfig(name="muon+adamw")))
