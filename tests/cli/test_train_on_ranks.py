"""`train --parallel` says in one line what it lacks; the ranks themselves are in tests/parallel."""

import pytest

from raising import refused
from topograd.cli import train_on_ranks
from topograd.cli.train import run
from topograd.errors import ConfigError, ParallelError


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--parallel", "stages=2"], "--parallel needs --out DIR"),
        (["--parallel", "stages=x", "--out", "run"], "stages is 'x'; it must be a number"),
        (["--parallel", "2", "--out", "run"], "give stages=P"),
    ],
)
def test_bad_words_are_refused(flags: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        run(["--preset", "tiny", *flags])


def test_without_torchrun_it_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ParallelError, match="start it with: torchrun --nproc-per-node 2"):
        run(["--preset", "tiny", "--parallel", "stages=2", "--out", "run"])


def test_a_lost_rank_says_how_to_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*_: object) -> None:
        raise ParallelError("rank 1 is gone")

    for name, value in (("LOCAL_WORLD_SIZE", "2"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("topograd.parallel.ranks.join", lambda *_: None)
    monkeypatch.setattr("topograd.parallel.ranks.leave", lambda: None)
    monkeypatch.setattr(train_on_ranks, "_train", lost)
    again = "topograd train --resume 'a run'"
    how = f"torchrun --nproc-per-node 2 -m {again} --parallel stages=2 (or in one process: {again})"
    with refused(ParallelError, problem="rank 1 is gone", remedy=f"continue with: {how}"):
        run(["--preset", "tiny", "--parallel", "stages=2", "--out", "a run"])
    monkeypatch.setenv("WORLD_SIZE", "4")
    with refused(ParallelError) as caught:
        run(["--preset", "tiny", "--parallel", "stages=2", "--out", "a run"])
    assert "continue with: torchrun as before -m" in str(caught.value)
