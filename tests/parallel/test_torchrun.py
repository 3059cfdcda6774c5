"""One rank of a machine prints an error that all of them find."""

import pytest

from topograd.parallel import settings
from topograd.parallel.settings import is_first_local_rank, wait_for_first_rank


def test_the_first_rank_of_a_machine_prints_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert is_first_local_rank()
    for rank, prints in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        assert is_first_local_rank() == prints


def test_under_torchrun_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(settings.time, "sleep", slept.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    wait_for_first_rank()
    assert not slept
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    wait_for_first_rank()
    assert slept == [settings.LINGER]
