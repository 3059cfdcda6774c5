import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from topograd.report.data import RunData
from topograd.report.drawing import BACKPROP, look, style
from topograd.report.figures import Panel
from topograd.report.stage_figures import memory_panel, rank_panel, reliability_panel

MakeRun = Callable[..., RunData]


@pytest.fixture(autouse=True)
def _style() -> Iterator[None]:
    with style():
        yield


def run(**evaluation: object) -> RunData:
    return RunData("run", {}, [], evaluation)


def drawn_axes(panel: Panel) -> list[Any]:
    """The visible axes of a panel that could be drawn, with a description; drawing it must not warn."""
    assert panel.figure is not None
    panel.figure.draw_without_rendering()
    assert panel.alt
    assert panel.table is not None
    assert all(len(row) == len(panel.table.header) for row in panel.table.rows)
    return [axes for axes in panel.figure.axes if axes.get_visible()]


def heights(axes: Any) -> list[float]:
    return [bar.get_height() for bar in axes.patches]


def test_reliability_shows_the_bins_that_hold_tokens() -> None:
    bins = {"confidence": [None, 0.5, 0.9], "accuracy": [None, 0.4, 1.0], "count": [0, 30, 10]}
    panel = reliability_panel(run(reliability=[bins], ece=[0.1]), None)
    (axes,) = drawn_axes(panel)
    points = axes.get_lines()[1]
    assert points.get_xdata().tolist() == [0.5, 0.9]
    assert points.get_ydata().tolist() == [0.4, 1.0]
    assert heights(axes) == [0.75, 0.25]
    assert axes.get_title(loc="left") == "stage 1, ECE 0.100"
    assert panel.table is not None
    assert panel.table.rows == (("stage 1", "0.1000", "0.900, 1.000"),)


@pytest.mark.parametrize("stages", [1, 5])
def test_reliability_has_one_diagram_for_each_stage_and_one_for_backprop(
    make_run: MakeRun, stages: int
) -> None:
    axes = drawn_axes(reliability_panel(make_run(stages, steps=20), make_run(1, steps=20)))
    titles = [each.get_title(loc="left").split(",")[0] for each in axes]
    assert titles == [*(f"stage {k + 1}" for k in range(stages)), "backprop"]
    assert axes[0].get_lines()[1].get_color() == look(0, stages).colour
    assert axes[-1].get_lines()[1].get_color() == BACKPROP


def test_reliability_forgives_what_is_missing() -> None:
    good = {"confidence": [0.5], "accuracy": [0.4], "count": [30]}
    half = {"confidence": [0.5, math.nan], "accuracy": [0.4], "count": [30, 3, 4]}
    axes = drawn_axes(reliability_panel(run(reliability=[None, good, half]), run()))
    assert [each.get_title(loc="left") for each in axes] == ["stage 2, ECE –", "stage 3, ECE –"]
    for broken in (None, "text", [], [None], [{"confidence": [math.nan], "accuracy": [1.0], "count": [3]}]):
        panel = reliability_panel(run(reliability=broken), None)
        assert panel.figure is None
        assert "no reliability bins" in panel.caption


def test_memory_bars_start_at_zero_on_one_scale(comparison: dict[str, Any]) -> None:
    panel = memory_panel(comparison, 3)
    pair, by_stages = drawn_axes(panel)
    assert heights(pair) == pytest.approx([35.9, 14.2])
    assert heights(by_stages) == pytest.approx([35.9, 19.5, 14.2, 8.8])
    assert pair.get_ylabel() == "MiB"
    assert pair.get_ylim() == by_stages.get_ylim()
    assert pair.get_ylim()[0] == 0
    assert pair.texts[1].get_text() == "14.2 (×0.40)"
    assert [label.get_text() for label in by_stages.get_xticklabels()] == ["1", "2", "3", "6"]
    assert "staged 14.2 MiB" in panel.alt


def test_memory_by_number_of_stages_is_in_order_of_number() -> None:
    panel = memory_panel({"memory": {"by_stages": {"10": 1.0, "2": 5.0, "x": 3.0, "4": None}}}, 2)
    (axes,) = drawn_axes(panel)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["2", "10"]
    assert heights(axes) == [5.0, 1.0]


@pytest.mark.parametrize(
    "comparison", [None, {}, {"memory": None}, {"memory": {"staged": 3.0}}, {"memory": {"by_stages": []}}]
)
def test_no_memory(comparison: dict[str, Any] | None) -> None:
    panel = memory_panel(comparison, 3)
    assert panel.figure is None
    assert panel.caption == "Left out: no comparison of memory was measured."


def test_rank_and_usefulness_stand_side_by_side() -> None:
    staged = run(effective_rank=[60.0, 50.0], usefulness=[None, -0.01])
    panel = rank_panel(staged, run(effective_rank=[70.0]))
    rank, useful = drawn_axes(panel)
    assert heights(rank) == [60.0, 50.0, 70.0]
    assert heights(useful) == [-0.01]
    assert useful.patches[0].get_facecolor() == rank.patches[1].get_facecolor()
    assert "usefulness u, stage 2 −0.0100" in panel.alt


def test_rank_names_the_width_where_it_is_known(make_run: MakeRun) -> None:
    assert "width of 96" in rank_panel(make_run(2, steps=20), None).caption
    assert "width" not in rank_panel(run(effective_rank=[3.0, 4.0]), None).caption


@pytest.mark.parametrize("stages", [6, 40])
def test_many_stages_are_stacked(make_run: MakeRun, stages: int) -> None:
    rank, useful = drawn_axes(rank_panel(make_run(stages, steps=20), make_run(1, steps=20)))
    assert rank.get_position().y0 > useful.get_position().y1


def test_no_rank() -> None:
    assert "no effective rank" in rank_panel(run(), None).caption
    assert rank_panel(run(effective_rank=[math.nan], usefulness=[None]), None).figure is None
    lonely = rank_panel(run(effective_rank=[61.3], usefulness=[None]), None)
    assert lonely.figure is None
    assert lonely.caption == "Left out: there is only one value to show, effective rank 61.3."
