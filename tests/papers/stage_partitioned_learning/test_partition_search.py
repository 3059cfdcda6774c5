"""Searches beside each other: what they choose is a partition, and gains and regrets are by hand."""

from dataclasses import replace
from typing import Any

import pytest

from papers.outcome import asked
from papers.stage_partitioned_learning import partition_search as study
from papers.stage_partitioned_learning.partition_search import PARTITIONS, WAYS, claims, gains, regrets
from papers.staged_runs import Sizes
from papers.verdicts import FAILED, HELD


def made_up(best: str = "4,1,1") -> list[dict[str, Any]]:
    """BPB 2 for nine partitions and 1 for the best, a little different for each seed."""
    return [
        {"arm": pi, "seed": seed, "bpb": (1.0 if pi == best else 2.0) + 0.01 * seed * (pi == best)}
        for seed in range(3)
        for pi in PARTITIONS
    ]


def test_ten_partitions() -> None:
    assert len(PARTITIONS) == 10
    assert {"4,1,1", "2,2,2", "1,1,4"} <= set(PARTITIONS)


def test_gain_and_regret_by_hand() -> None:
    rows = made_up()
    assert gains(rows, ["4,1,1"] * 3) == pytest.approx([0.9, 0.891, 0.882])
    assert regrets(rows, ["4,1,1"] * 3) == [0, 0, 0]
    assert gains(rows, ["2,2,2"] * 3) == pytest.approx([-0.1, -0.099, -0.098])
    assert regrets(rows, ["4,1,1", "2,2,2", "1,1,4"]) == pytest.approx([0, 0.99, 0.98])


def test_verdicts() -> None:
    found = claims(made_up(), {"good": ["4,1,1"] * 3, "bad": ["2,2,2"] * 3})
    assert [claim.verdict for claim in found] == [HELD, FAILED]


@pytest.mark.parametrize("way", WAYS)
def test_every_way_names_a_partition(way: str, sizes: Sizes) -> None:
    small = replace(sizes, width=8, context=16, batch=2, steps=10)
    assert WAYS[way](small, 0) in PARTITIONS


def test_the_study_keeps_its_searches(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "WAYS", {"first": lambda sizes, seed: PARTITIONS[seed]})
    small = replace(sizes, width=8, context=16, batch=2, steps=2, seeds=2)
    found = study.run(small, asked("partition-search", "tiny"))
    assert len(found.rows) == 20
    assert [cells[0] for cells in found.cells] == ["first", "always 4,1,1"]
    assert found.cells[0][1] == "  ".join(PARTITIONS[:2])
