"""Teaching a draft stage: it learns, and a kill changes nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from topograd.convert import draft_training
from topograd.convert.draft_training import DraftTraining, draft_agreement, train_draft_stage
from topograd.convert.own_text import OwnText
from topograd.nn.draft_stage import DraftStage, rank_tokens
from topograd.runs.session import LoadedTextRun
from topograd.runs.workspace import Workspace

TRAINING = DraftTraining(epochs=6)


def test_teaching_helps_and_goes_on_where_it_was(
    session: LoadedTextRun, text: OwnText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.stack.requires_grad_(False)
    vocabulary = rank_tokens(torch.from_numpy(text.all_tokens()[0]), 257, 64)

    def fresh() -> DraftStage:
        torch.manual_seed(0)
        return DraftStage(session.stack, vocabulary)

    straight, losses = fresh(), list[float]()
    train_draft_stage(straight, text, TRAINING, None, lambda step, of, loss, _: losses.extend(loss))
    assert sum(losses[-5:]) < sum(losses[:5]) - 1, "the entropy of its teacher is left"
    with monkeypatch.context() as every:  # the two rows that measure are too few to tell anything
        every.setattr(draft_training, "heldout_rows", lambda count: list(range(count)))
        before, after = (draft_agreement(stage, text, steps=2)["chain"] for stage in (fresh(), straight))
    assert after[0] > 2 * before[0] > 0
    assert after[0] >= after[1]

    def dies(step: int, *_: object) -> None:
        if step == 40:
            raise RuntimeError("killed")

    monkeypatch.setattr(draft_training, "SAVE_SECONDS", 1e-9)
    with pytest.raises(RuntimeError, match="killed"):
        train_draft_stage(fresh(), text, TRAINING, tmp_path, dies)

    def ends(step: int, *_: object) -> None:
        if step == 50:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(draft_training, "SAVE_SECONDS", 1e9)
    with pytest.raises(KeyboardInterrupt):
        train_draft_stage(fresh(), text, TRAINING, tmp_path, ends)
    resumed, steps = fresh(), list[int]()
    train_draft_stage(resumed, text, TRAINING, tmp_path, lambda step, *_: steps.append(step))
    assert steps[0] == 51, "it was saved by the clock at 40, and by the signal at 50"
    for a, b in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)
    logged = [r["loss"][0] for r in Workspace(tmp_path / "draft-training").metrics()]
    assert logged == losses
    assert not list(tmp_path.rglob("*.pt"))
    other, again = fresh(), list[int]()
    seeded = replace(TRAINING, seed=1)
    train_draft_stage(other, text, seeded, tmp_path, lambda step, *_: again.append(step))
    assert again[0] == 1, "a training with other settings begins anew"


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from topograd.convert import draft_training
from topograd.convert.own_text import OwnText
from topograd.nn.draft_stage import DraftStage, rank_tokens
from topograd.runs.session import open_session

run, own, work = map(Path, sys.argv[1:])
session = open_session(run)
session.stack.requires_grad_(False)
text = OwnText.open(own, session.weights)
torch.manual_seed(0)
stage = DraftStage(session.stack, rank_tokens(torch.from_numpy(text.all_tokens()[0]), 257, 64))
draft_training.SAVE_SECONDS = 1e-9

def on_step(step, *_):
    if step == 7:
        os.kill(os.getpid(), signal.SIGKILL)

draft_training.train_draft_stage(stage, text, draft_training.DraftTraining(epochs=2), work, on_step)
"""


def test_a_killed_training_goes_on_bit_for_bit(session: LoadedTextRun, text: OwnText, tmp_path: Path) -> None:
    session.stack.requires_grad_(False)
    vocabulary = rank_tokens(torch.from_numpy(text.all_tokens()[0]), 257, 64)
    arguments = [str(session.run.folder), str(text.folder), str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False)
    assert done.returncode == -signal.SIGKILL
    stages = []
    for work in (None, tmp_path):
        torch.manual_seed(0)
        stages.append(DraftStage(session.stack, vocabulary))
        train_draft_stage(stages[-1], text, DraftTraining(epochs=2), work)
    for a, b in zip(*(stage.parameters() for stage in stages), strict=True):
        assert torch.equal(a, b)
