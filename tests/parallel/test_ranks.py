"""Ranks that do not answer, or are not there, are named."""

from typing import Any

import pytest

from topograd.errors import ParallelError
from topograd.parallel.ranks import ENVIRONMENT, flat_facts, join
from topograd.parallel.settings import ParallelConfig


def test_a_stalled_rank_is_named_by_all_who_wait(launch: Any) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0: it is rank 0 that says nothing."""
    job = launch("stalled", 3, parallel="stages=3,timeout=1", rank=0, seconds=60.0)
    job.wait([1, 2], limit=45.0)
    for rank in (1, 2):
        assert "rank 0 did not answer for 1 s" in job.error(rank), job.error(rank)
        assert f"rank {rank} gave up while" in job.error(rank)
    job.kill(0)


def test_without_torchrun_it_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ParallelError, match="torchrun --nproc-per-node 6 -m topograd train"):
        join(ParallelConfig(stages=3, replicas=2), {})


@pytest.mark.parametrize(("rank", "world"), [("x", "2"), ("2", "2"), ("-1", "2"), ("0", "")])
def test_an_environment_of_nonsense_is_one_line(
    rank: str, world: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in zip(ENVIRONMENT, (rank, world, "127.0.0.1", "1"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(ParallelError, match=f"RANK is '{rank}' and WORLD_SIZE '{world}'"):
        join(ParallelConfig(stages=2), {})


def test_facts_are_flat() -> None:
    assert flat_facts({"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 1, "b.c": 2, "b.d.e": 3}
