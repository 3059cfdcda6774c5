"""The contract: torchrun starts it, kills and all, and rank 0 prints one JSON object."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.files import dump_toml
from topograd.parallel.launch import facts_of, is_restart
from topograd.runs.config import TrainConfig
from topograd.runs.session import open_session
from waiting import LIMIT, wait_until

SOURCE = str(Path(__file__).parents[2] / "src")


@pytest.fixture(scope="module")
def flags(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("settings") / "config.toml"
    file.write_text(dump_toml(replace(config, eval_every=0).as_dict()))
    return ["train", "--config", str(file), "--json"]


def test_torchrun_starts_it_and_it_prints_one_object(flags: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    command += ["-m", "topograd", *flags, "--parallel", "stages=1", "--out", str(tmp_path / "run")]
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["finished"], found["steps"]) == (True, 20)
    assert open_session(tmp_path / "run").step == 20


def test_a_rank_is_killed_and_torchrun_goes_on_from_the_last_set(
    flags: list[str], launch: Any, tmp_path: Path
) -> None:
    def argv(name: str) -> list[str]:
        return [*flags, "--parallel", "stages=2", "--out", str(tmp_path / name)]

    words = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    job = launch("torchrun", 1, flags=words, argv=argv("run"), last=5)
    wait_until(lambda: list(tmp_path.glob("run/checkpoints/step-*")), "the first checkpoint")
    victim = job.folder / "1.pid"
    before = victim.read_text()
    os.kill(int(before), signal.SIGKILL)
    twin = launch("cli", 2, argv=argv("twin"))
    job.results()
    assert victim.read_text() != before, "it was started again"
    found = json.loads(job.printed(0))
    assert (found["finished"], found["steps"]) == (True, 20)
    assert twin.results() == [0, 0]
    ours, theirs = open_session(tmp_path / "run"), open_session(tmp_path / "twin")
    for (name, a), b in zip(ours.stack.state_dict().items(), theirs.stack.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_restart_is_known_by_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not is_restart()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert is_restart()


def test_facts_name_versions_and_settings() -> None:
    facts = facts_of("1.2", {"seed": 3, "model": {"width": 8}}, **{"--from": None})
    assert facts["version of topograd"] == "1.2"
    assert facts["version of torch"] == torch.__version__
    assert (facts["seed"], facts["model.width"], facts["--from"]) == (3, 8, "None")
