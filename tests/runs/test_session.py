import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.data import BPETokenizer
from topograd.errors import CheckpointError, ConfigError, DataError, RunError
from topograd.nn.config import GPTConfig
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.folder import Run
from topograd.runs.session import (
    LoadedTextRun,
    build_stack,
    heldout_text,
    open_session,
    read_settings,
    topology_at,
)
from topograd.runs.topology_config import TopologyConfig
from topograd.training.evaluation import Evaluation, evaluate
from topograd.training.runs import start
from topograd.training.trainer import Trainer


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
    session = open_session(trained.task.run.folder)
    assert (session.step, session.config) == (6, trained.task.config)
    assert not session.stack.training
    for (name, one), two in zip(
        session.stack.named_parameters(), trained.task.stack.parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    inputs = torch.randint(257, (1, 16))
    assert torch.equal(session.stack(inputs), trained.task.stack(inputs))


def test_an_earlier_checkpoint_by_name(trained: Trainer) -> None:
    session = open_session(trained.task.run.folder, "step-00000003")
    assert session.step == 3
    assert not torch.equal(
        session.stack.get_parameter("head.weight"), trained.task.stack.get_parameter("head.weight")
    )
    with refused(CheckpointError, setting="name", given="last"):
        open_session(trained.task.run.folder, "last")


def read(session: LoadedTextRun, data: Path | None = None, limit_bytes: int | None = None) -> Evaluation:
    return evaluate(session.stack, session.plan, heldout_text(session, data, limit_bytes))


def test_it_measures_what_the_training_measured(trained: Trainer) -> None:
    recorded = json.loads(trained.task.run.results_file.read_text())
    session = open_session(trained.task.run.folder)
    readings = read(session).as_dict()
    assert readings == {key: recorded[key] for key in readings}
    assert recorded.keys() - readings.keys() == {"run", "steps", "weights", "finished", "seconds"}
    assert recorded["weights"] == session.weights == trained.task.run.store.weights("step-00000006")


def test_other_text_is_read_whole_or_up_to_a_limit(trained: Trainer, tmp_path: Path) -> None:
    session = open_session(trained.task.run.folder)
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
    folder = shutil.copytree(trained.task.run.folder, tmp_path / "run")
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CheckpointError, match="no checkpoint yet; train it with: topograd train --resume"):
        open_session(folder)
    with refused(RunError, setting="folder"):
        open_session(tmp_path / "nowhere")


def test_a_checkpoint_of_another_model_is_refused(trained: Trainer, tmp_path: Path) -> None:
    folder = shutil.copytree(trained.task.run.folder, tmp_path / "run")
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace("width = 16", "width = 32"))
    (folder / "manifest.json").unlink()  # as in a run of version 0.1
    with pytest.raises(CheckpointError, match="does not fit the model"):
        open_session(folder)


def weight(stack: Stack) -> torch.Tensor:
    return stack.get_parameter("embedding.weight")


def test_the_seed_makes_the_model(trained: Trainer) -> None:
    one, plan = build_stack(trained.task.config)
    two, _ = build_stack(trained.task.config)
    other, _ = build_stack(replace(trained.task.config, seed=9))
    assert torch.equal(weight(one), weight(two))
    assert not torch.equal(weight(one), weight(other))
    assert [one.has_head(stage) for stage in range(len(plan.stages))] == [True, True]


ASKED = """
import sys
from topograd.runs.session import open_session
session = open_session(sys.argv[1])
assert session.step == 6
training = {"topograd.training." + name for name in ("optimizers", "trainer", "muon", "loop")}
found = sorted(n for n in sys.modules if n in training or n.startswith("topograd.optim"))
print(" ".join(found) or "none")
"""


def test_opening_a_run_imports_no_optimizer(trained: Trainer) -> None:
    command = [sys.executable, "-c", ASKED, str(trained.task.run.folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "none\n"


def test_settings_and_topologies_need_no_torch() -> None:
    code = "import sys, topograd.runs.config, topograd.runs.manifest, topograd.runs.folder, topograd.registry"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout == "False\n", done.stderr


def test_a_checkpoint_may_have_its_own_topology(trained: Trainer, tmp_path: Path) -> None:
    """As a search leaves it: that of the weights, not that of the start."""
    folder = shutil.copytree(trained.task.run.folder, tmp_path / "run")
    run = Run.open(folder)
    config = read_settings(run)
    table = {"partition": "2", "heads": "shared"}
    changed = topology_at(config, {"topology": table})
    assert changed.topology == TopologyConfig(partition="2", heads="shared")
    assert topology_at(config, {}) == config
    stack, plan = build_stack(changed)
    extra = run.store.extra("step-00000006") | {"topology": table}
    run.store.save(step=7, model=stack, optimizers={}, extra=extra, keep=9)
    session = open_session(folder)
    assert (session.step, session.plan) == (7, plan)
    assert open_session(folder, "step-00000006").plan == trained.task.plan
    with pytest.raises(ConfigError, match="unknown setting partitoin"):
        topology_at(config, {"topology": {"partitoin": "2"}})


def test_a_tokenizer_of_another_size_is_refused_without_a_manifest_too(
    trained: Trainer, tmp_path: Path
) -> None:
    """A run of version 0.1 has no digest of it, but its head has as many rows as it had tokens (R1)."""
    folder = shutil.copytree(trained.task.run.folder, tmp_path / "run")
    (folder / "manifest.json").unlink()
    BPETokenizer(((104, 101), (108, 108))).save(folder / "tokenizer.json")
    with pytest.raises(RunError, match=r"tokenizer\.json has 259 tokens and the model 257; restore it"):
        open_session(folder)
