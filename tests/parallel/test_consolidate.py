"""What ranks wrote becomes the checkpoint of one process; the run's results stay its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.cli.consolidate import run as consolidate
from topograd.errors import CheckpointError, ConfigError
from topograd.files import dump_toml
from topograd.parallel.consolidate import consolidate_run, consolidate_stages
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import open_session


def test_a_set_becomes_one_file(
    launch: Any, config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder = tmp_path / "config.toml", tmp_path / "run"
    file.write_text(dump_toml(config.as_dict()))
    argv = ["train", "--config", str(file), "--out", str(folder), "--stop-after", "2"]
    assert launch("cli", 2, argv=[*argv, "--parallel", "stages=2"]).results() == [0, 0]
    before = open_session(folder)
    assert consolidate([str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    after = open_session(folder)
    assert (after.step, after.weights) == (2, printed["weights"])
    assert sorted(p.name for p in (folder / "checkpoints" / "step-00000002").iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    for ours, theirs in zip(after.stack.parameters(), before.stack.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    results = Run.open(folder).read_results()
    assert results is not None
    assert results["weights"] == after.weights != before.weights


def test_what_cannot_be_consolidated_is_said(straight: Run, tmp_path: Path) -> None:
    with refused(ConfigError, setting="folders", given=1):
        consolidate_stages([straight.folder], tmp_path / "out")
    with pytest.raises(ConfigError, match="give one run, or all stages and --out"):
        consolidate([str(straight.folder), str(straight.folder)])
    empty = Run.create(tmp_path / "empty")
    empty.write_config(straight.read_config())
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        consolidate_run(empty.folder)
    with refused(CheckpointError, setting="folders"):
        consolidate_stages([straight.folder, empty.folder], tmp_path / "out")
