import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from topograd.report.data import RunData, loss_series, smooth
from topograd.report.drawing import look, style
from topograd.report.figures import Panel, gap_panel, loss_panel, prefix_panel
from topograd.report.tables import smoothing_window

MakeRun = Callable[..., RunData]
EMPTY = RunData("empty", {}, [], {})


@pytest.fixture(autouse=True)
def _style() -> Iterator[None]:
    with style():
        yield


def drawn_axes(panel: Panel) -> list[Any]:
    """The axes of a panel that could be drawn, with a description and a table; drawing it must not warn."""
    assert panel.figure is not None
    panel.figure.draw_without_rendering()
    assert panel.alt
    assert panel.table is not None
    assert panel.table.rows
    assert all(len(row) == len(panel.table.header) for row in panel.table.rows)
    return list(panel.figure.axes)


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}


def reason(panel: Panel) -> str:
    assert panel.figure is None
    assert panel.caption.startswith("Left out: ")
    assert panel.caption.count(". ") == 0
    return panel.caption


def test_loss_curves_hold_the_running_mean_of_each_stage_and_of_backprop(make_run: MakeRun) -> None:
    staged = make_run(3, steps=400)
    left, right = drawn_axes(loss_panel(staged, make_run(1, steps=400)))
    curves = lines(left)
    assert list(curves) == ["stage 1", "stage 2", "stage 3", "backprop"]
    series = loss_series(staged)
    assert series is not None
    mean = smooth(series.values, smoothing_window(40))
    for k in range(3):
        assert curves[f"stage {k + 1}"].get_color() == look(k, 3).colour
        np.testing.assert_array_equal(curves[f"stage {k + 1}"].get_ydata(), mean[:, k])
    assert list(lines(right)) == ["stage 2", "stage 3", "backprop"]
    np.testing.assert_allclose(
        lines(right)["stage 3"].get_ydata(), mean[:, 2] - mean[:, 0], rtol=0, atol=1e-12
    )


def test_differences_are_taken_at_common_steps(make_run: MakeRun) -> None:
    _, right = drawn_axes(loss_panel(make_run(1, steps=40), make_run(1, steps=80, every=20)))
    assert lines(right)["backprop"].get_xdata().tolist() == [20, 40]


def test_one_stage_alone_has_no_second_side(make_run: MakeRun) -> None:
    panel = loss_panel(make_run(1, steps=40), None)
    assert len(drawn_axes(panel)) == 1
    assert "minus" not in panel.caption


def test_nan_losses_and_single_points_are_drawn(make_run: MakeRun) -> None:
    run = make_run(2, steps=60)
    diverged = [{**run.metrics[0], "step": 70, "loss": [math.nan, math.inf]}]
    left, _ = drawn_axes(loss_panel(replace(run, metrics=[*run.metrics, *diverged]), None))
    assert lines(left)["stage 1"].get_xdata()[-1] == 70
    first = [run.metrics[0]]
    left, _ = drawn_axes(loss_panel(replace(run, metrics=first), replace(run, metrics=first)))
    assert lines(left)["stage 1"].get_marker() == "o"
    assert [tick for tick in left.get_xticks() if tick != round(tick)] == []


def test_a_stage_that_was_never_finite_leaves_the_others(make_run: MakeRun) -> None:
    run = make_run(2, steps=60)
    broken = [{**record, "loss": [math.nan, 3.0]} for record in run.metrics if record["kind"] == "train"]
    drawn_axes(loss_panel(replace(run, metrics=broken), make_run(1, steps=60)))


def test_no_losses(make_run: MakeRun) -> None:
    assert "no finite training loss" in reason(loss_panel(EMPTY, make_run(1, steps=40)))
    broken = RunData("x", {}, [{"kind": "train", "step": 1, "loss": [math.nan]}], {})
    assert "no finite training loss" in reason(loss_panel(broken, None))


def test_prefix_axis_says_that_it_does_not_start_at_zero(make_run: MakeRun) -> None:
    staged, backprop = make_run(3), make_run(1)
    panel = prefix_panel(staged, backprop)
    (axes,) = drawn_axes(panel)
    low, high = axes.get_xlim()
    values = [*staged.evaluation["bpb"]["prefix"], backprop.evaluation["bpb"]["last"]]
    assert 0 < low < min(values)
    assert max(values) < high
    for text in (axes.get_xlabel(), panel.caption):
        assert f"starts at {low:.3f}, not at zero" in text
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[:3] == [f"first {k} of 3 stages" for k in (1, 2, 3)]
    assert names[3:] == ["pooled by sum", "pooled by mean", "pooled by shrinkage", "backprop"]


def test_prefix_rows_name_their_distance_to_backprop() -> None:
    staged = RunData("a", {}, [], {"bpb": {"prefix": [2.2, 2.1]}})
    panel = prefix_panel(staged, RunData("b", {}, [], {"bpb": {"last": 2.0}}))
    drawn_axes(panel)
    assert panel.table is not None
    assert panel.table.rows[0] == ("first 1 of 2 stages", "2.2000", "+10.0\u00a0%")
    assert panel.table.rows[1][2] == "+5.0\u00a0%"
    alone = prefix_panel(staged, None)
    drawn_axes(alone)
    assert alone.table is not None
    assert alone.table.header == ("model", "bits per byte")


def test_prefixes_that_are_equal_or_unknown() -> None:
    equal = RunData("a", {}, [], {"bpb": {"last": 2.0, "prefix": [2.0, 2.0], "sum": math.nan}})
    (axes,) = drawn_axes(prefix_panel(equal, None))
    assert len(axes.get_yticklabels()) == 2
    one_left = RunData("a", {}, [], {"bpb": {"prefix": [math.nan, 2.0]}})
    assert "only one value to show, 2.000" in reason(prefix_panel(one_left, None))
    assert "no finite bits per byte" in reason(prefix_panel(EMPTY, equal))


def test_gap_lines_hold_the_gap(make_run: MakeRun) -> None:
    staged, backprop = make_run(2, steps=400, pace=0.08), make_run(1, steps=400, pace=0.05)
    panel = gap_panel(staged, backprop)
    left, right = drawn_axes(panel)
    assert list(lines(left)) == ["stage 1", "stages 1–2"]
    ours, theirs = (
        [record["bpb"]["last"] for record in run.metrics if record["kind"] == "eval"]
        for run in (staged, backprop)
    )
    expected = [100 * (one / two - 1) for one, two in zip(ours, theirs, strict=True)]
    np.testing.assert_allclose(lines(left)["stages 1–2"].get_ydata(), expected, rtol=1e-9)
    times = lines(right)["stages 1–2"].get_xdata()
    known = np.isfinite(lines(right)["stages 1–2"].get_ydata())
    assert times[known].max() <= 400 * 0.05
    assert "in the same time" in panel.alt


def test_gap_without_times_has_one_side(make_run: MakeRun) -> None:
    staged, backprop = make_run(2, steps=100), make_run(1, steps=100)
    timeless = [{**record, "seconds": None} for record in backprop.metrics]
    panel = gap_panel(staged, replace(backprop, metrics=timeless))
    assert len(drawn_axes(panel)) == 1
    assert "no comparison at the same time" in panel.caption


def test_a_gap_of_one_point_is_drawn(make_run: MakeRun) -> None:
    panel = gap_panel(make_run(2, steps=10), make_run(1, steps=10))
    (axes,) = drawn_axes(panel)
    assert lines(axes)["stage 1"].get_xdata().tolist() == [10]


def test_no_gap(make_run: MakeRun) -> None:
    run = make_run(2, steps=40)
    silent = replace(run, metrics=[record for record in run.metrics if record["kind"] == "train"])
    elsewhere = [{"kind": "eval", "step": 7, "bpb": {"last": 2.0}}]
    assert "no backprop run" in reason(gap_panel(run, None))
    assert "staged run recorded no evaluation" in reason(gap_panel(silent, run))
    assert "backprop run recorded no evaluation" in reason(gap_panel(run, silent))
    assert "no common step or time" in reason(gap_panel(run, replace(run, metrics=elsewhere)))
