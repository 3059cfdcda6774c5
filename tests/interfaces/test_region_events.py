"""The words of the shortest schedule: what `train` can run."""

from __future__ import annotations

import pytest

from topograd.interfaces.region_events import RegionTimes, planned
from topograd.parallel.layout import deal


@pytest.mark.parametrize(("regions", "ranks"), [(4, 4), (5, 4), (6, 4), (6, 5), (7, 5), (9, 6)])
def test_a_hybrid_carries_the_regions_of_whole_ranks(regions: int, ranks: int) -> None:
    owners = deal([1] * regions, ranks)
    times = RegionTimes(forward=1, backward=1.2, jacobian=4.5)
    words = planned(owners, 1, times, (1, 1, 1), 1e9, 0.0)["train"]
    assert words.startswith("--backward hybrid --carried ")
    begins = regions - 1 - int(words.split()[3])
    assert 1 <= begins < regions - 1, "the first region receives no state"
    assert owners[begins] == owners[begins - 1] + 1 == ranks - 2, "no rank does both"


def test_micro_batches_are_among_the_words() -> None:
    words = planned(range(3), 4, RegionTimes(forward=1, backward=2, jacobian=9), (1, 1, 1), 1e9, 0.0)["train"]
    assert words == "--backward autograd --parallel stages=3 --accumulate 4"


def test_interfaces_that_differ_are_scanned_on_one_rank_only() -> None:
    times = RegionTimes(forward=1.0, backward=2.0, jacobian=0.01)
    words = [planned(range(5), 1, times, (1, 1, 1), 1e9, 0.0, alike)["train"] for alike in (True, False)]
    assert words == ["--backward scan --parallel stages=5", "--backward autograd --parallel stages=5"]
