"""Teaching a draft stage: it learns, and a kill changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from topograd.convert import draft_training
from topograd.convert.draft_training import DraftTraining, draft_agreement, train_draft_stage
from topograd.convert.own_text import OwnText
from topograd.nn.draft_stage import DraftStage, rank_tokens
from topograd.runs.session import Session

TRAINING = DraftTraining(epochs=6)


def test_teaching_helps_and_goes_on_where_it_was(
    session: Session, text: OwnText, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.stack.requires_grad_(False)
    vocabulary = rank_tokens(torch.from_numpy(text.all_tokens()[0]), 257, 64)

    def fresh() -> DraftStage:
        torch.manual_seed(0)
        return DraftStage(session.stack, vocabulary)

    straight, losses = fresh(), []
    train_draft_stage(straight, text, TRAINING, None, lambda step, of, loss: losses.append(loss))
    assert sum(losses[-5:]) < sum(losses[:5]) - 1, "the entropy of its teacher is left"
    with monkeypatch.context() as every:  # the two rows that measure are too few to tell anything
        every.setattr(draft_training, "heldout_rows", lambda count: list(range(count)))
        before, after = (draft_agreement(stage, text, steps=2)["chain"] for stage in (fresh(), straight))
    assert after[0] > 2 * before[0] > 0
    assert after[0] >= after[1]

    def dies(step: int, of: int, loss: float) -> None:
        if step == 40:
            raise KeyboardInterrupt

    monkeypatch.setattr(draft_training, "SAVE_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        train_draft_stage(fresh(), text, TRAINING, tmp_path, dies)
    resumed, steps = fresh(), list[int]()
    train_draft_stage(resumed, text, TRAINING, tmp_path, lambda step, *_: steps.append(step))
    assert steps[0] == 40, "step 40 was told of before it was kept"
    for a, b in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(a, b)
