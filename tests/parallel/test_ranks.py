"""Ranks that do not answer, or are not there, are named."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from simulator import Machine
from topograd.errors import ParallelError
from topograd.parallel import ranks
from topograd.parallel.ranks import ENVIRONMENT, join
from topograd.parallel.settings import FEW_NUMBERS, ParallelConfig
from topograd.runs.manifest import flat_settings


def test_a_stalled_rank_is_named_by_all_who_wait(launch: Any) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0: it is rank 0 that says nothing."""
    job = launch("stalled", 3, parallel="stages=3", rank=0, seconds=1.0)
    job.wait([1, 2])
    for rank in (1, 2):
        assert "rank 0 did not answer for 1 s" in job.error(rank), job.error(rank)
        assert f"rank {rank} gave up while" in job.error(rank)
    job.kill(0)


def test_one_that_finds_a_rank_gone_is_not_taken_for_the_silent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 gives up on rank 0 and closes its connections, before rank 2 has waited as long for rank 1."""
    monkeypatch.setattr(ranks, "GRACE", 0.0)
    config, store = ParallelConfig(stages=3, timeout=7), dist.HashStore()
    first, second = (ranks.Ranks(rank, config, store, torch.device("cpu")) for rank in (1, 2))
    said = second._blame("waiting", 1, "Connection closed by peer")
    assert said == "rank 1 is gone: rank 2 lost it while waiting; see its own message"
    assert first._blame("waiting", 0, "Timed out").startswith("rank 0 did not answer for 7 s: rank 1 gave up")


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "READING", 0.0)
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(ParallelError, match=r"rank 1 did not come within 9 s; start all of them"):
        ranks._compare(0, 2, store, {"seed": 1}, 9.0)
    assert "rank 1 did not come" in store.get("verdict").decode(), "for those who do come, too late"


def test_every_wait_has_the_whole_timeout_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is late at every step slows the others, and nobody gives up on the sum."""
    limits: list[float] = []
    monkeypatch.setattr(ranks.time, "perf_counter", lambda: 5.0 * len(limits))

    class Late(dist.Work):
        def wait(self, timeout: timedelta = timedelta()) -> bool:
            limits.append(timeout.total_seconds())  # and five seconds have passed
            return True

    mine = ranks.Ranks(0, ParallelConfig(stages=2, timeout=7), dist.HashStore(), torch.device("cpu"))
    for _ in range(3):
        mine.wait(Late(), "waiting", 1)
        mine.collective(Late, "waiting")
    assert limits == [7.0] * 6
    assert mine.waited == 30.0


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
    assert flat_settings({"a": 1, "b": {"c": 2, "d": {"e": 3}}}) == {"a": 1, "b.c": 2, "b.d.e": 3}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("count", [2, FEW_NUMBERS + 1])
def test_a_meeting_gives_every_rank_the_same_sum(world: int, count: int, launch: Any) -> None:
    """In the order of ranks, and with the messages that `benchmarks/simulator.py` counts."""
    found = launch("meeting", world, parallel=f"stages={world}", count=count).results()
    numbers = torch.stack([torch.tensor(result["numbers"]) for result in found])
    sums = [torch.tensor(result["sum"]) for result in found]
    assert all(torch.equal(one, sums[0]) for one in sums)
    assert sums[0] == pytest.approx(numbers.double().sum(0).float(), abs=1e-5)
    parted = world > 2 and count > FEW_NUMBERS
    wide = -(-count // world) if parted else count
    for result in found:
        assert result["posted"] == (1 + parted) * (world - 1), "before anything is sent"
        assert result["sent"] == [4 * wide] * ((1 + parted) * (world - 1))
        assert sum(result["sent"]) == result["sent_bytes"]
        assert result["turns"] == 1 + parted
    latencies = Machine(mbit=1e12, latency=1.0).meeting(4 * count, world)
    assert latencies == pytest.approx(found[0]["turns"], abs=1e-3)
    on_wire = Machine(mbit=8e-6, latency=0.0).meeting(4 * count, world)  # a byte a second
    assert sum(found[0]["sent"]) - 8 * world < on_wire <= sum(found[0]["sent"])
