"""Fine-tuning: the base does not move by a bit, kept states and resumption change nothing, rates as asked."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from raising import refused
from topograd.errors import ConfigError, RunError
from topograd.runs import checkpoint
from topograd.runs.adapter import TENSORS
from topograd.runs.config import OptimizerConfig
from topograd.runs.session import LoadedTextRun, open_session
from topograd.specialists.attach import new_specialist, open_specialist
from topograd.specialists.finetune import FineTuning
from topograd.specialists.settings import FineTune

Bases = dict[str, LoadedTextRun]


def settings(chats: Path, **more: Any) -> FineTune:
    given: dict[str, Any] = {"data": str(chats), "steps": 6, "batch": 3, "context": 16, "save_every": 2}
    return FineTune(**given | more)


def trained(base: LoadedTextRun, folder: Path, chats: Path, **more: Any) -> dict[str, Any]:
    new_specialist(folder, base, layers=1, head_rank=4)
    return FineTuning.start(folder, settings(chats, **more)).train()


@pytest.mark.covers("gpt", "train", feature="specialists")
@pytest.mark.covers("imported", "train", feature="specialists")
@pytest.mark.parametrize("which", ["gpt", "imported"])
def test_it_learns_and_the_base_does_not_move(bases: Bases, which: str, chats: Path, tmp_path: Path) -> None:
    base = bases[which]
    before = {name: p.clone() for name, p in base.stack.state_dict().items()}
    result = trained(base, tmp_path / "s", chats, steps=30, rate=2.0, head_rate=2.0)
    assert result["base_max_abs_logit_delta"] == 0.0
    assert result["base_bit_identical"]
    assert result["finished"]
    assert [row["step"] for row in result["preservation"]] == list(range(0, 31, 2))
    assert result["preservation"][0]["bpb"] == result["base_bpb"], "inserted, it changes nothing"
    assert result["bpb"] != result["base_bpb"]
    losses = [
        r["loss"]
        for r in map(json.loads, (tmp_path / "s/training/metrics.jsonl").read_text().splitlines())
        if r["kind"] == "train"
    ]
    assert losses[-1][0] < 0.7 * losses[0][0]
    assert open_specialist(tmp_path / "s").settings["steps"] == 30
    again = open_session(base.run.folder)
    assert all(torch.equal(p, before[name]) for name, p in again.stack.state_dict().items())
    assert not (tmp_path / "s/training/hidden-states").exists()


def test_kept_states_change_nothing(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    """The base computed once and the base computed at every step: the same specialist."""
    weights = []
    for keep in (False, True):
        trained(gpt, tmp_path / str(keep), chats, keep_states=keep)
        weights.append(open_specialist(tmp_path / str(keep)).tensors)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-5)  # another batch shape


@pytest.mark.covers("gpt", "resume", feature="specialists")
@pytest.mark.parametrize("average", [0.0, 0.9])
def test_a_resumed_training_is_bit_identical(
    gpt: LoadedTextRun, chats: Path, tmp_path: Path, average: float
) -> None:
    trained(gpt, tmp_path / "straight", chats, average=average)
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)
    first = FineTuning.start(tmp_path / "s", settings(chats, average=average)).train(stop_after=3)
    assert not first["finished"]
    assert first["steps"] == 3
    with pytest.raises(RunError, match="is not finished; continue it with --resume"):
        FineTuning.start(tmp_path / "s", settings(chats))
    assert FineTuning.resume(tmp_path / "s").train()["finished"]
    contents = [(tmp_path / n / TENSORS).read_bytes() for n in ("straight", "s")]
    assert contents[0] == contents[1]
    lines = [(tmp_path / n / "training/metrics.jsonl").read_text().splitlines() for n in ("straight", "s")]
    logs = [[json.loads(line) | {"seconds": 0} for line in log] for log in lines]
    assert logs[0] == logs[1]


def test_other_data_cannot_be_resumed_on(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(chats, tmp_path / "chat.jsonl"))
    new_specialist(tmp_path / "s", gpt)
    with pytest.raises(RunError, match="has no training to resume"):
        FineTuning.resume(tmp_path / "s")
    FineTuning.start(tmp_path / "s", settings(copy)).train(stop_after=2)
    copy.write_text(copy.read_text().replace("Lima", "Rome"))
    with refused(RunError, setting="data"):
        FineTuning.resume(tmp_path / "s")


def test_a_finished_specialist_can_be_trained_on(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    trained(gpt, tmp_path / "s", chats)
    before = open_specialist(tmp_path / "s")
    result = FineTuning.start(tmp_path / "s", settings(chats, steps=2)).train()
    assert result["finished"]
    assert open_specialist(tmp_path / "s").digest != before.digest


def test_rates_are_shares_of_the_bases() -> None:
    made = FineTune().optimizer(OptimizerConfig())
    assert made.lr_matrix == pytest.approx(0.004)
    assert made.lr_head == pytest.approx(0.005)
    assert (made.weight_decay, made.warmup, made.warmdown) == (0.1, 0.05, 0.5)
    assert FineTune(rate=1.0).optimizer(OptimizerConfig(name="adamw")).lr_matrix == 0.002
    assert FineTune(rate=0.5).optimizer(OptimizerConfig(lr_matrix=0.1)).lr_matrix == 0.05


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"data": "/nowhere.jsonl"}, "data"),
        ({"data": " "}, "data"),
        ({"context": 17}, "context"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    gpt: LoadedTextRun, chats: Path, tmp_path: Path, given: dict[str, Any], setting: str
) -> None:
    new_specialist(tmp_path / "s", gpt)
    with refused(ConfigError, setting=setting):
        FineTuning.start(tmp_path / "s", settings(chats, **given))
    assert not (tmp_path / "s" / "training").exists()


def test_every_checkpoint_has_its_reading(
    gpt: LoadedTextRun, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that was ended while it wrote a checkpoint has one reading of every step."""
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)

    def ended(*_: Any, step: int, **more: Any) -> Path:
        if step == 4:
            raise KeyboardInterrupt
        return save(*_, step=step, **more)

    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", ended)
    with pytest.raises(KeyboardInterrupt):
        FineTuning.start(tmp_path / "s", settings(chats)).train()
    monkeypatch.undo()
    resumed = FineTuning.resume(tmp_path / "s")
    assert resumed.step == 2
    assert [row["step"] for row in resumed.train()["preservation"]] == [0, 2, 4, 6]


def same_as(straight: Path, folder: Path) -> None:
    """The same specialist, the same log."""
    assert (straight / TENSORS).read_bytes() == (folder / TENSORS).read_bytes()
    logs = [
        [
            json.loads(line) | {"seconds": 0}
            for line in (f / "training/metrics.jsonl").read_text().splitlines()
        ]
        for f in (straight, folder)
    ]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_a_resumption_goes_on_from_it(
    number: signal.Signals, gpt: LoadedTextRun, chats: Path, tmp_path: Path
) -> None:
    """Up to `save_every` steps were lost: the default was more than most trainings have."""
    trained(gpt, tmp_path / "straight", chats, save_every=100)
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)

    def on_step(step: int, *_: object) -> None:
        if step == 4:
            os.kill(os.getpid(), number)

    result = FineTuning.start(tmp_path / "s", settings(chats, save_every=100)).train(on_step=on_step)
    assert (result["steps"], result["finished"]) == (4, False)
    assert open_specialist(tmp_path / "s").settings["steps"] == 4
    resumed = FineTuning.resume(tmp_path / "s")
    assert resumed.step == 4
    assert resumed.train()["finished"]
    same_as(tmp_path / "straight", tmp_path / "s")


KILLED = """
import os, signal, sys
from topograd.specialists.finetune import FineTuning

def on_step(step, *_):
    if step == 5:
        os.kill(os.getpid(), signal.SIGKILL)

FineTuning.resume(sys.argv[1]).train(on_step=on_step)
"""


def test_a_killed_training_goes_on_bit_for_bit(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    trained(gpt, tmp_path / "straight", chats, average=0.9)
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)
    FineTuning.start(tmp_path / "s", settings(chats, average=0.9))
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "s")], check=False)
    assert done.returncode == -signal.SIGKILL
    resumed = FineTuning.resume(tmp_path / "s")
    assert resumed.step == 4
    resumed.train()
    same_as(tmp_path / "straight", tmp_path / "s")


def test_checkpoints_by_the_clock_change_nothing(
    gpt: LoadedTextRun, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(gpt, tmp_path / "straight", chats, save_every=5)
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)
    trainer = FineTuning.start(tmp_path / "s", settings(chats, save_every=5))
    trainer.task.schedule = replace(trainer.task.schedule, save_seconds=1e-9)
    with pytest.raises(KeyError):
        trainer.train(on_step=lambda step, *_: {}[step] if step == 4 else None)
    resumed = FineTuning.resume(tmp_path / "s")
    assert resumed.step == 4
    resumed.train()
    same_as(tmp_path / "straight", tmp_path / "s")


def stopped(gpt: LoadedTextRun, folder: Path, chats: Path, **more: Any) -> Path:
    new_specialist(folder, gpt, layers=1, head_rank=4)
    FineTuning.start(folder, settings(chats, **more)).train(stop_after=4)
    return folder / "training"


def test_settings_of_another_specialist_are_refused(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    here, other = (stopped(gpt, tmp_path / name, chats, rate=rate) for name, rate in (("a", 0.2), ("b", 0.3)))
    shutil.copy(other / "finetune.json", here / "finetune.json")
    with pytest.raises(RunError, match="belongs to a training with other settings or other data"):
        FineTuning.resume(tmp_path / "a")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda log: log.write_bytes(log.read_bytes()[:-40]), "is not the log that step-00000004 was saved"),
        (lambda log: log.unlink(), "is not the log that step-00000004 was saved"),
        (
            lambda log: log.write_text(log.read_text().replace('"step": 3', '"step": 2')),
            "is not the log that",
        ),
    ],
    ids=["cut", "deleted", "changed"],
)
def test_a_log_that_is_not_its_own_is_refused(
    damage: Any, words: str, gpt: LoadedTextRun, chats: Path, tmp_path: Path
) -> None:
    log = stopped(gpt, tmp_path / "s", chats) / "metrics.jsonl"
    damage(log)
    with pytest.raises(RunError, match=words):
        FineTuning.resume(tmp_path / "s")


def test_a_finished_training_without_its_log_has_a_result(
    gpt: LoadedTextRun, chats: Path, tmp_path: Path
) -> None:
    trained(gpt, tmp_path / "s", chats)
    (tmp_path / "s/training/metrics.jsonl").write_text("")
    result = FineTuning.resume(tmp_path / "s").train()
    assert result["finished"]
    assert result["base_bit_identical"]
    assert (result["loss"], result["preservation"]) == (None, [])


def test_a_damaged_file_of_settings_is_one_line(gpt: LoadedTextRun, chats: Path, tmp_path: Path) -> None:
    stopped(gpt, tmp_path / "s", chats)
    (tmp_path / "s/training/finetune.json").write_text('{"settings": {}}')
    with pytest.raises(RunError, match=r"finetune\.json is damaged; restore it"):
        FineTuning.resume(tmp_path / "s")
    with pytest.raises(RunError, match=r"finetune\.json is damaged; restore it"):
        FineTuning.start(tmp_path / "s", settings(chats))
