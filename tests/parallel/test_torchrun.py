"""Who speaks where all ranks of a machine find the same fault."""

import pytest

from topograd.parallel import torchrun
from topograd.parallel.torchrun import let_the_first_speak, speaks_for_machine


def test_the_first_rank_of_a_machine_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert speaks_for_machine()
    for rank, speaks in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert speaks_for_machine() == speaks


def test_under_torchrun_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(torchrun.time, "sleep", slept.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    let_the_first_speak()
    assert not slept
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    let_the_first_speak()
    assert slept == [torchrun.LINGER]
