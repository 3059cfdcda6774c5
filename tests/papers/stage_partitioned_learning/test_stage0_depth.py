from collections.abc import Callable, Sequence
from typing import Any

import pytest

from papers.stage_partitioned_learning import stage0_depth as module
from papers.stage_partitioned_learning.stage0_depth import PAPER, TWINS, claims, excess
from papers.staged_runs import SWEEP, Arm, bpb_at, chain
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.topology.composition import Composition

ARMS = [chain(partition) for partition in (*SWEEP, "6")]


def course(bpb: Callable[[Arm], float], early: Callable[[Arm], float] | None = None) -> dict[str, Any]:
    """Readings at the end and on the way, where all is level unless something is given."""
    return {"bpb": bpb} | {bpb_at(share): early or (lambda arm: 4.0) for share in module.SHARES}


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in claims(rows, ARMS[:-1])}


def test_the_papers_table() -> None:
    assert len(PAPER) == 9
    depths = [(Composition.parse(partition).parts[0], bpb) for partition, bpb in PAPER.items()]
    means = [min(b for d, b in depths if d == depth) for depth in sorted({d for d, _ in depths})]
    assert means == sorted(means, reverse=True)
    for ours, theirs in TWINS.items():
        assert Composition.parse(ours).parts[0] / 6 == Composition.parse(theirs).parts[0] / 12
    assert excess(PAPER["2,5,5"], PAPER["8,2,2"]) == pytest.approx(6.856, abs=1e-3)


def test_a_world_as_the_paper_says(invent: Any) -> None:
    falls = {1: 3.0, 2: 2.8, 3: 2.7, 4: 2.65}
    rows = invent(ARMS, **course(lambda arm: falls.get(arm.depth, 2.6), lambda arm: 4 - 0.01 * arm.depth))
    assert set(verdicts(rows).values()) == {HELD}


def test_the_opposite_world(invent: Any) -> None:
    gains = {1: 3.0, 2: 3.05, 3: 3.1, 4: 3.0}
    found = verdicts(invent(ARMS, **course(lambda arm: 3 + 0.1 * arm.depth, lambda arm: 3 + 0.2 * arm.depth)))
    assert (found["trend"], found["monotone"], found["backprop is best"]) == (FAILED, FAILED, FAILED)
    assert (found["stable"], found["widens"]) == (FAILED, HELD)
    found = verdicts(invent(ARMS, **course(lambda arm: gains.get(arm.depth, 3.2), lambda arm: 3 - arm.depth)))
    assert (found["diminishing returns"], found["widens"], found["stable"]) == (FAILED, FAILED, HELD)


def test_one_step_that_rises_breaks_the_lemma_and_not_the_trend(invent: Any) -> None:
    def bpb(arm: Arm) -> float:
        return {1: 3.0, 2: 3.02, 3: 2.5, 4: 2.0}.get(arm.depth, 1.9)

    found = verdicts(invent(ARMS, **course(bpb)))
    assert (found["trend"], found["monotone"]) == (HELD, FAILED)


def test_tails_that_differ(invent: Any) -> None:
    rows = invent(ARMS, **course(lambda arm: 3 - 0.1 * arm.depth + 0.2 * (arm.name == "3,1,2")))
    assert verdicts(rows)["tails"] == FAILED


def test_one_seed_decides_nothing(invent: Any) -> None:
    every = invent(ARMS, **course(lambda arm: 3 - 0.1 * arm.depth))
    rows = [row for row in every if row["seed"] == 0]
    assert set(verdicts(rows).values()) == {UNDECIDED}


def test_the_table_stands_beside_the_papers(invent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = invent(ARMS, **course(lambda arm: 3 - 0.1 * arm.depth))
    trained: list[Arm] = []

    def train_arms(arms: list[Arm], *rest: Any, shares: Sequence[float]) -> list[dict[str, Any]]:
        assert tuple(shares) == (0.25, 0.5, 0.75)
        trained.extend(arms)
        return rows

    monkeypatch.setattr(module, "train_arms", train_arms)
    found = module.run(None, None)  # type: ignore[arg-type]
    assert [row[0] for row in found.cells] == [*SWEEP, "6"]
    assert [arm.topology.heads for arm in trained] == ["per-stage"] * 5 + ["shared"], "backprop has one head"
    assert len(trained[-1].topology.stages) == 1
    shallow = found.cells[1]
    assert shallow[:2] == ("2,2,2", "2.8000")
    assert shallow[3:] == ("+7.69", "4,4,4", "0.9340", "+3.28", "+4.41")
    assert found.cells[3][4:] == ("–", "–", "–", "–")
    assert all(len(row) == len(found.header) for row in found.cells)
    ours, theirs = found.drawing.series
    assert ours.y[0] == pytest.approx(100 * (2.9 / 2.6 - 1), abs=0.02)
    assert max(theirs.x) == pytest.approx(10 / 12)
