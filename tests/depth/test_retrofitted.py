"""What was kept of a draft stage and a table comes back; what does not fit its base is one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from topograd.depth.lookup import NGramTable
from topograd.depth.retrofitted import KIND, open_retrofit, retrofit_tensors
from topograd.errors import RunError
from topograd.nn.draft_stage import DraftStage
from topograd.runs.session import Session
from topograd.runs.sidecar import BaseIdentity, create_sidecar


@pytest.fixture(scope="module")
def session(make_session: Callable[..., Session]) -> Session:
    return make_session(2)


def test_what_was_kept_comes_back(session: Session, tmp_path: Path) -> None:
    stage = DraftStage(session.stack, torch.arange(0, 200, 3))
    for parameter in stage.parameters():
        nn.init.normal_(parameter)
    table = NGramTable.of(np.array([[1, 2, 3, 1, 2, 3]]), least=1)
    tensors = retrofit_tensors(stage, table)
    base = BaseIdentity.of(session)
    create_sidecar(tmp_path / "a", kind=KIND, base=base, tensors=tensors, settings={}, card="")
    random = torch.random.get_rng_state()
    found = open_retrofit(session, tmp_path / "a")
    assert torch.equal(torch.random.get_rng_state(), random), "opening draws nothing"
    for mine, its in zip(stage.state_dict().values(), found.stage.state_dict().values(), strict=True):
        assert torch.equal(mine, its)
    assert found.table.find([1, 2]) == table.find([1, 2])
    assert not any(p.requires_grad for p in found.stage.parameters())
    wrong = {**tensors, "stage.relay.token.weight": torch.zeros(3, 3)}
    create_sidecar(tmp_path / "b", kind=KIND, base=base, tensors=wrong, settings={}, card="")
    with pytest.raises(RunError, match="does not fit its base"):
        open_retrofit(session, tmp_path / "b")
    create_sidecar(tmp_path / "c", kind="lora", base=base, tensors=tensors, settings={}, card="")
    with pytest.raises(RunError, match="is a lora, and a draft is wanted"):
        open_retrofit(session, tmp_path / "c")
