"""A set of files is a checkpoint when all of it is there, and is read by any number of processes."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from topograd.errors import CheckpointError
from topograd.parallel.checkpoint_set import IndependentStageStore
from topograd.parallel.layout import Layout, shed
from topograd.runs.checkpoint import FolderStore
from topograd.runs.config import OptimizerConfig
from topograd.training.optimizers import make_optimizers


def half(server: ModuleType, place: int) -> tuple[torch.nn.Module, dict[str, torch.optim.Optimizer]]:
    """A stack with one of two stages, and its optimizers after a step."""
    stack, plan = server.model({"partition": "2,2"})
    layout = Layout.of(plan, 2)
    shed(stack, [*layout.owned(stack, place), *layout.shared(stack, place)])
    made = make_optimizers(stack, OptimizerConfig(), plan)
    for parameter in stack.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    made.step()
    return stack, made.optimizers


def test_one_stage_comes_back_whole(server: ModuleType, tmp_path: Path) -> None:
    store = IndependentStageStore(tmp_path)
    stack, optimizers = half(server, 1)
    name = store.save(step=3, model=stack, optimizers=optimizers, extra={"a": 1}, keep=1)
    other, fresh = half(server, 1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_() if not parameter.is_meta else None
    loaded = store.load(name, other, fresh)
    assert (loaded.step, loaded.extra, loaded.weights) == (3, {"a": 1}, store.weights(name))
    for (key, ours), theirs in zip(other.state_dict().items(), stack.state_dict().values(), strict=True):
        assert ours.is_meta == theirs.is_meta
        assert ours.is_meta or torch.equal(ours, theirs), key
    for title, optimizer in optimizers.items():
        mine, its = fresh[title].state_dict()["state"], optimizer.state_dict()["state"]
        assert mine.keys() == its.keys()
        for index, entries in its.items():
            assert all(
                torch.equal(torch.as_tensor(mine[index][k]), torch.as_tensor(entries[k])) for k in entries
            )


def test_a_set_is_refused_when_a_byte_or_a_file_is_wrong(server: ModuleType, tmp_path: Path) -> None:
    store = IndependentStageStore(tmp_path)
    stack, optimizers = half(server, 0)
    name = store.save(step=1, model=stack, optimizers=optimizers, extra={}, keep=1)
    with pytest.raises(CheckpointError, match="does not fit the model"):  # it is one stage of two
        FolderStore(tmp_path).load(name, server.model({"partition": "2,2"})[0])
    with pytest.raises(CheckpointError, match="does not fit the stage"):
        store.load(name, half(server, 1)[0])
    (file,) = (tmp_path / name).glob("*.safetensors")
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="SHA-256"):
        store.load(name, stack)
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        store.load(name, stack)
    assert json.loads((tmp_path / name / "state.json").read_text())["set"] is True


def test_a_full_disk_leaves_the_one_before(
    server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = IndependentStageStore(tmp_path)
    stack, optimizers = half(server, 0)
    store.save(step=1, model=stack, optimizers=optimizers, extra={}, keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("topograd.parallel.checkpoint_set.write_state", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*make room and resume"):
        store.save(step=2, model=stack, optimizers=optimizers, extra={}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    store.load("step-00000001", stack, optimizers)


def test_a_kill_before_any_operation_leaves_a_whole_set(launch: Any, server: ModuleType) -> None:
    """A set is saved over the one before, and over itself; from what a kill leaves, a run goes on."""
    job = launch("saving", 2, parallel="stages=2")
    counts = job.results()
    assert min(counts) >= 2
    assert counts[0] >= 40, "rank 0 finishes the sets"
    seen = set()
    for copy in (path for rank in (0, 1) for path in (job.folder / f"kills-{rank}").iterdir()):
        stack, plan = server.model({"partition": "2,2"})
        made = make_optimizers(stack, OptimizerConfig(name="adamw"), plan)
        store = FolderStore(copy)
        newest = store.names()[-1]
        step = store.load(newest, stack, made.optimizers).step
        entries = [entry["step"] for entry in made.optimizers["adamw"].state_dict()["state"].values()]
        assert {float(entry) for entry in entries} == {float(step)}
        seen.add((step, newest.startswith(".old-")))
        store.save(step=3, model=stack, optimizers=made.optimizers, extra={}, keep=1)
        assert [path.name for path in copy.iterdir()] == ["step-00000003"], "leftovers of killed saves stay"
    assert seen == {(1, False), (2, False), (2, True)}


def test_ranks_wait_for_a_slow_disk_as_long_as_rank_0_lives(launch: Any) -> None:
    """It hashes and syncs the files of all ranks by itself, which may take longer than their timeout."""
    job = launch("slow_disk", 2, parallel="stages=2")
    assert job.results() == ["step-00000001"] * 2
    assert "rank 0 is still finishing step-00000001" in job.printed(0, "err")
