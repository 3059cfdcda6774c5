"""The profile over (K, d_0): the grid, its fronts and its verdicts by hand, and what is read of an arm."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from papers.outcome import Asked, asked
from papers.presets import Size
from papers.stage_partitioned_learning import property_profile as module
from papers.stage_partitioned_learning.property_profile import (
    FRONTS,
    PROFILE,
    Cell,
    chosen,
    fronts,
    grid,
    grid_claims,
    probe,
    refined,
    slice_claims,
)
from papers.staged_runs import PRESETS, Arm, Sizes, train_arms
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.topology.composition import Composition

GRID = (
    *("6", "1,5", "2,4", "3,3", "4,2", "5,1", "1,3,2", "2,2,2", "3,2,1", "4,1,1"),
    *("1,2,2,1", "2,2,1,1", "3,1,1,1", "1,2,1,1,1", "2,1,1,1,1", "1,1,1,1,1,1"),
)
REGION = ("2,4", "3,3", "4,2", "2,2,2")
BACKPROP, LOCAL, EQUAL, HALVES = Cell(1, 6), Cell(6, 1), Cell(3, 2), Cell(2, 3)
ASKED = Asked("property-profile", "tiny", Size(0.5, 4, 8, 2), lambda done, total: None)


def world(invent: Any, sign: float, **other: Callable[[Arm], float]) -> list[dict[str, Any]]:
    """Readings as the paper says, or, with the sign turned, the contrary."""

    def bpb(arm: Arm) -> float:
        return 3 + sign * (0.1 * len(Composition.parse(arm.partition)) - 0.02 * arm.depth)

    def falls(arm: Arm) -> float:
        return 0.5 - sign * 0.05 * arm.depth

    def capability(arm: Arm) -> float:
        return 0.5 + sign * (0.4 * (arm.name in REGION) - 0.05 * arm.depth)

    readings: dict[str, Callable[[Arm], float]] = {
        "bpb": bpb,
        "capability": capability,
        "specialist": falls,
        "composition": falls,
        "exit_accuracy": lambda arm: 0.3 + sign * 0.02 * arm.depth,
        "activation_layers": lambda arm: max(Composition.parse(arm.partition).parts),
        "peak_kb": lambda arm: 900 + sign * 100 * max(Composition.parse(arm.partition).parts),
    }
    rows: list[dict[str, Any]] = invent([cell.arm for cell in grid()], **(readings | other))
    return rows


def four() -> list[dict[str, Any]]:
    """Four configurations with one seed; halves are no better than thirds in anything but capability."""
    found = {
        BACKPROP: (2.0, 6, 1.0, 0.1),
        HALVES: (2.1, 3, 1 / 2, 0.6),
        EQUAL: (2.1, 2, 1 / 3, 0.5),
        LOCAL: (2.2, 1, 1 / 6, 0.3),
    }
    keys = ("bpb", "activation_layers", "exit_compute", "capability")
    return [
        {"arm": cell.name, "seed": 0, **dict(zip(keys, read, strict=True))} for cell, read in found.items()
    ]


def test_the_grid_by_hand() -> None:
    assert tuple(cell.name for cell in grid()) == GRID
    assert all(cell.arm.topology.heads == "per-stage" for cell in grid())
    assert [cell.name for cell in grid() if not cell.interior] == ["6", "1,1,1,1,1,1"]
    assert tuple(cell.name for cell in grid() if cell.capable) == REGION
    assert all(cell.arm.depth == cell.depth for cell in grid())
    assert all(len(cell.composition) == cell.stages for cell in grid())


def test_fronts_by_hand() -> None:
    cells = [BACKPROP, HALVES, EQUAL, LOCAL]
    assert fronts(four(), cells, FRONTS["training"]) == [{"6", "2,2,2", "1,1,1,1,1,1"}]
    assert fronts(four(), cells, FRONTS["serving"]) == [{"6", "3,3"}]
    worse = [{**row, "seed": 1, "bpb": row["bpb"] + (row["arm"] == "2,2,2")} for row in four()]
    both = fronts([*four(), *worse], cells, FRONTS["training"])
    assert both == [{"6", "2,2,2", "1,1,1,1,1,1"}, {"6", "3,3", "1,1,1,1,1,1"}], "each seed has its own front"


def test_the_configuration_that_is_on_most_fronts() -> None:
    found = [{"6", "3,3"}, {"6", "3,3", "2,2,2"}, {"6", "2,2,2", "4,1,1"}, {"6", "2,2,2"}]
    assert chosen(found, grid()) == "2,2,2", "backprop is on all of them, and no interior configuration"


def test_refinement_by_hand() -> None:
    rows = [
        {"arm": name, "seed": 0, "bpb": bpb} for name, bpb in (("6", 1.0), ("3,3", 2.0), ("1,1,1,1,1,1", 4.0))
    ]
    assert refined(rows, [BACKPROP, HALVES, LOCAL]) == [pytest.approx((1 + 3 + 2) / 3)]
    rows.append({"arm": "2,2,2", "seed": 0, "bpb": 9.0})
    with_thirds = refined(rows, [BACKPROP, HALVES, EQUAL, LOCAL])
    assert with_thirds == [pytest.approx((1 + 3 + 2 + 8 - 5) / 5)], "2,2,2 does not compare with 3,3"


@pytest.mark.parametrize(("sign", "verdict"), [(1.0, HELD), (-1.0, FAILED)])
def test_the_slice_in_both_worlds(invent: Any, sign: float, verdict: str) -> None:
    found = {claim.name: claim.verdict for claim in slice_claims(world(invent, sign), grid())}
    assert found == {
        "BPB falls": verdict,
        "memory follows the deepest stage": verdict,
        "the first exit knows more": verdict,
        "capability declines": verdict,
        "specialists decline": verdict,
        "composition declines": verdict,
    }


def test_the_slice_is_of_three_stages_alone(invent: Any) -> None:
    """What the others do is no part of level 1."""
    rows = world(invent, 1.0, capability=lambda arm: -0.1 * arm.depth if arm.partition.count(",") == 2 else 0)
    found = {claim.name: claim for claim in slice_claims(rows, grid())}["capability declines"]
    assert found.values == pytest.approx([0.1] * 3, abs=1e-3)


@pytest.mark.parametrize(("sign", "verdict"), [(1.0, HELD), (-1.0, FAILED)])
def test_the_grid_in_both_worlds(invent: Any, sign: float, verdict: str) -> None:
    on: set[str] = {"6", "2,2,2"} if sign > 0 else {"6", "1,1,1,1,1,1"}
    claims = grid_claims(world(invent, sign), grid(), {name: [on] * 3 for name in FRONTS})
    assert [claim.verdict for claim in claims] == [verdict] * 4


def test_a_region_that_is_no_better_than_one_layer_a_stage(invent: Any) -> None:
    rows = world(invent, 1.0, capability=lambda arm: 0.5 + 0.2 * (arm.name == LOCAL.name))
    claims = grid_claims(rows, grid(), {name: [{"6"}] * 3 for name in FRONTS})
    assert claims[1].verdict == FAILED


def test_a_front_that_changes_from_seed_to_seed(invent: Any) -> None:
    changing = [{"6", "3,3"}, {"6", "2,2,2"}, {"6", "2,2,2"}]
    claims = grid_claims(world(invent, 1.0), grid(), dict.fromkeys(FRONTS, changing))
    for claim in claims[2:]:
        assert claim.verdict == UNDECIDED
        assert claim.measured == "2 of 3 seeds"
        assert "2,2,2" in claim.rule


def test_what_is_read_of_an_arm(sizes: Sizes) -> None:
    rows = train_arms([EQUAL.arm, BACKPROP.arm], replace(sizes, seeds=1), ASKED, probe)
    thirds, whole = rows
    closed = ("gradient_depth", "activation_layers", "pipeline_granularity", "coupling", "exit_compute")
    assert [thirds[key] for key in closed] == [2, 2, 3, pytest.approx(0.6), pytest.approx(1 / 3)]
    assert [whole[key] for key in closed] == [6, 6, 1, 1.0, 1.0]
    assert whole["peak_kb"] > thirds["peak_kb"] > 0
    assert thirds["within_half"] == thirds["exit_accuracy"], "of the exits after 2, 4 and 6 layers one fits"
    assert whole["within_half"] == whole["wand"] == whole["composition"] == 0.0
    assert whole["exit_accuracy"] == whole["accuracy"]
    for row in rows:
        assert row["root_rank"] == pytest.approx(row["effective_rank"][0])
        assert row["calibration"] == pytest.approx(sum(row["ece"]) / len(row["ece"]))
        assert 0 <= row["capability"] <= 1
        assert {key for key, _ in PROFILE.values()} <= row.keys()


def test_tables_and_curves(invent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = world(invent, 1.0)
    for row in rows:
        parts = Composition.parse(row["arm"]).parts
        exact = {"activation_layers": max(parts), "exit_compute": parts[0] / 6, "order0": 5.0}
        row.update({key: 0.5 for key, _ in PROFILE.values() if key not in row} | exact)
    monkeypatch.setattr(module, "train_arms", lambda *given: rows)
    found = module.run(asked("property-profile", "tiny", seeds=3))
    along, over = found.tables
    assert along.header == ("property", "1,3,2", "2,2,2", "3,2,1", "4,1,1")
    assert [float(bpb) for bpb in along.rows[0][1:]] == pytest.approx([3.28, 3.26, 3.24, 3.22], abs=2e-4)
    assert along.rows[2] == ("activation layers", "3", "2", "3", "4")
    assert len(along.rows) == len(PROFILE)
    assert [row[:2] for row in over.rows] == [(f"({c.stages}, {c.depth})", c.name) for c in grid()]
    always = {row[1] for row in over.rows if row[-2] == "3 of 3"}
    never = {row[1] for row in over.rows if row[-2] == "0 of 3"}
    assert never == {"3,2,1", "4,1,1", "2,2,1,1", "3,1,1,1", "1,2,1,1,1", "2,1,1,1,1"}
    assert always == {*GRID} - never
    serving = {row[1]: row[-1] for row in over.rows}
    assert [serving[name] for name in ("6", "4,2", "3,3", "1,5", "4,1,1")] == ["3 of 3"] * 3 + ["0 of 3"] * 2
    assert {claim.verdict for claim in found.claims} == {HELD}
    assert found.drawing is not None
    assert [series.name for series in found.drawing.series] == [f"K = {k}" for k in range(1, 7)]
    assert [len(series.x) for series in found.drawing.series] == [1, 5, 4, 3, 2, 1]


def test_the_study_in_miniature(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [BACKPROP, HALVES, Cell(3, 1), EQUAL, Cell(3, 4), LOCAL]
    monkeypatch.setattr(module, "grid", lambda: few)
    monkeypatch.setitem(PRESETS, "tiny", sizes)
    told: list[tuple[int, int]] = []
    found = module.run(
        asked("property-profile", "tiny", steps=1, seeds=1, on_more=lambda *done: told.append(done))
    )
    assert told == [(i + 1, 6) for i in range(6)]
    assert {claim.verdict for claim in found.claims[:8]} == {UNDECIDED}, "one seed"
    assert len(found.claims) == 10
    for table in found.tables:
        assert all(len(row) == len(table.header) for row in table.rows)
    assert "1 steps" in found.setting
