"""Fine-tuning: the base does not move by a bit, kept states and resumption change nothing, rates as asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from topograd.errors import ConfigError, RunError
from topograd.runs import checkpoint
from topograd.runs.config import OptimizerConfig
from topograd.runs.session import Session, open_session
from topograd.runs.sidecar import TENSORS
from topograd.specialists.attach import new_specialist, open_specialist
from topograd.specialists.finetune import FineTuning
from topograd.specialists.settings import FineTune

Bases = dict[str, Session]


def settings(chats: Path, **more: Any) -> FineTune:
    given: dict[str, Any] = {"data": str(chats), "steps": 6, "batch": 3, "context": 16, "save_every": 2}
    return FineTune(**given | more)


def trained(base: Session, folder: Path, chats: Path, **more: Any) -> dict[str, Any]:
    new_specialist(folder, base, layers=1, head_rank=4)
    return FineTuning.start(folder, settings(chats, **more)).train()


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
    assert losses[-1] < 0.7 * losses[0]
    assert open_specialist(tmp_path / "s").settings["steps"] == 30
    again = open_session(base.run.folder)
    assert all(torch.equal(p, before[name]) for name, p in again.stack.state_dict().items())
    assert not (tmp_path / "s/training/hidden-states").exists()


def test_kept_states_change_nothing(gpt: Session, chats: Path, tmp_path: Path) -> None:
    """The base computed once and the base computed at every step: the same specialist."""
    weights = []
    for keep in (False, True):
        trained(gpt, tmp_path / str(keep), chats, keep_states=keep)
        weights.append(open_specialist(tmp_path / str(keep)).tensors)
    for name, tensor in weights[0].items():
        torch.testing.assert_close(tensor, weights[1][name], rtol=1e-3, atol=1e-5)  # another batch shape


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_a_resumed_training_is_bit_identical(
    gpt: Session, chats: Path, tmp_path: Path, average: float
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
    assert [r for r in lines[0] if '"train"' in r] == [r for r in lines[1] if '"train"' in r]


def test_other_data_cannot_be_resumed_on(gpt: Session, chats: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(chats, tmp_path / "chat.jsonl"))
    new_specialist(tmp_path / "s", gpt)
    with pytest.raises(RunError, match="has no training to resume"):
        FineTuning.resume(tmp_path / "s")
    FineTuning.start(tmp_path / "s", settings(copy)).train(stop_after=2)
    copy.write_text(copy.read_text().replace("Lima", "Rome"))
    with pytest.raises(RunError, match="has changed since"):
        FineTuning.resume(tmp_path / "s")


def test_a_finished_specialist_can_be_trained_on(gpt: Session, chats: Path, tmp_path: Path) -> None:
    trained(gpt, tmp_path / "s", chats)
    before = open_specialist(tmp_path / "s")
    result = FineTuning.start(tmp_path / "s", settings(chats, steps=2)).train()
    assert result["finished"]
    assert open_specialist(tmp_path / "s").digest != before.digest


def test_rates_are_shares_of_the_bases() -> None:
    made = FineTune().optimizer(OptimizerConfig())
    assert made.matrices == pytest.approx(0.004)
    assert made.head == pytest.approx(0.005)
    assert (made.weight_decay, made.warmup, made.warmdown) == (0.1, 0.05, 0.5)
    assert FineTune(rate=1.0).optimizer(OptimizerConfig(name="adamw")).matrices == 0.002
    assert FineTune(rate=0.5).optimizer(OptimizerConfig(matrices=0.1)).matrices == 0.05


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"data": "/nowhere.jsonl"}, "does not exist"),
        ({"data": " "}, "data is empty"),
        ({"context": 17}, "the base sees 16 tokens at most"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    gpt: Session, chats: Path, tmp_path: Path, given: dict[str, Any], words: str
) -> None:
    new_specialist(tmp_path / "s", gpt)
    with pytest.raises(ConfigError, match=words):
        FineTuning.start(tmp_path / "s", settings(chats, **given))
    assert not (tmp_path / "s" / "training").exists()


def test_every_checkpoint_has_its_reading(
    gpt: Session, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training that was ended while it wrote a checkpoint has one reading of every step."""
    new_specialist(tmp_path / "s", gpt, layers=1, head_rank=4)

    def ended(*_: Any, step: int, **more: Any) -> None:
        if step == 4:
            raise KeyboardInterrupt
        save(*_, step=step, **more)

    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", ended)
    with pytest.raises(KeyboardInterrupt):
        FineTuning.start(tmp_path / "s", settings(chats)).train()
    monkeypatch.undo()
    resumed = FineTuning.resume(tmp_path / "s")
    assert resumed.step == 2
    assert [row["step"] for row in resumed.train()["preservation"]] == [0, 2, 4, 6]
