"""Models with text to calibrate and to judge on: windows without padding, and bits per byte of each."""

from pathlib import Path

import pytest
import torch

from papers.beyond import bases
from papers.kept import Kept
from papers.outcome import asked
from topograd.data import Text
from topograd.runs.folder import Run
from topograd.training.evaluation import evaluate


def test_windows_are_full_and_judged_one_by_one(straight: Run) -> None:
    base = bases.open_base("own", straight.folder, 8, 5, 3)
    assert base.train.inputs.shape == base.train.targets.shape == (5, 8)
    assert base.heldout.inputs.shape == (3, 8)
    assert base.heldout.nbytes.tolist() == [8, 8, 8], "a token is a byte"
    assert (base.heldout.targets >= 0).all(), "no padding"
    found = bases.bits_per_byte(base.model, base.heldout, rows=2)
    text = Text(base.heldout.inputs, base.heldout.targets, 24)
    slow = evaluate(base.session.stack, base.session.plan, text).bpb.prediction
    assert sum(found) / 3 == pytest.approx(slow, rel=1e-5)
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert torch.equal(base.train.batches(2)[0][0], base.train.inputs[:2])


def test_smollm2_is_taken_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "smollm2", lambda place: place / "smollm2")
    kept = Kept(tmp_path / "pruning.rows.jsonl")
    assert list(bases.folders(asked("pruning", "tiny", kept=kept))) == ["reference"]
    found = bases.folders(asked("pruning", "small", kept=kept))
    assert found["smollm2"] == tmp_path / "specialists-work" / "smollm2"
    monkeypatch.setattr(bases, "smollm2", lambda place: None)
    assert list(bases.folders(asked("pruning", "small", kept=kept))) == ["reference"]
