"""The contract: torchrun starts it, kills and all, and rank 0 prints one JSON object."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from topograd.parallel.launch import facts_of, is_restart
from topograd.runs.session import open_session

SOURCE = str(Path(__file__).parents[2] / "src")
FLAGS = "--preset tiny --partition 2,2 --parallel stages=2 --steps 20 --seed 1 --save-every 5 --json"


def torchrun(out: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *more,
        "-m",
        "topograd",
    ]
    environment = os.environ | {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, "train", *FLAGS.split(), "--out", str(out)],
        stdout=pipe,
        stderr=pipe,
        text=True,
        env=environment,
    )


def of_rank(job: subprocess.Popen[str], rank: int) -> int | None:
    """The process of a rank, by its environment."""
    for folder in Path("/proc").iterdir():
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (OSError, IndexError):
            continue
        if int(parent) == job.pid and f"RANK={rank}".encode() in words:
            return int(folder.name)
    return None


def test_a_rank_is_killed_and_torchrun_goes_on_from_the_last_set(tmp_path: Path, straight_twin: Path) -> None:
    job = torchrun(tmp_path / "run", "--max-restarts", "1")
    end = time.monotonic() + 60
    while not list(tmp_path.glob("run/checkpoints/step-*")) and time.monotonic() < end:
        time.sleep(0.01)
    victim = of_rank(job, 1)
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    printed, said = job.communicate(timeout=120)
    assert job.returncode == 0, said[-3000:]
    found = json.loads(printed)
    assert found["finished"]
    assert found["steps"] == 20
    ours, theirs = open_session(tmp_path / "run"), open_session(straight_twin)
    for (name, a), b in zip(ours.stack.state_dict().items(), theirs.stack.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture
def straight_twin(launch: object, tmp_path: Path) -> Path:
    """The same run without a fault."""
    argv = ["train", *FLAGS.split(), "--out", str(tmp_path / "twin")]
    assert launch("cli", 2, argv=argv).results() == [0, 0]  # type: ignore[operator]
    return tmp_path / "twin"


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
