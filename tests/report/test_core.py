"""CORE by prefix, with its intervals, beside backprop."""

from __future__ import annotations

from typing import Any

import pytest

from topograd.report.data import RunData
from topograd.report.drawing import render, style
from topograd.report.stage_figures import core_panel

CORE = {"name": "CORE-2", "core": [0.1, 0.2], "interval": [[0.0, 0.2], [0.15, 0.3]]}


def run(core: Any) -> RunData:
    return RunData("run", {}, [], {"core": core})


def test_a_row_for_each_exit_and_for_backprop() -> None:
    other = run(CORE | {"core": [0.25], "interval": [[0.2, 0.31]]})
    with style():
        panel = core_panel(run(CORE), other)
        assert panel is not None
        assert panel.figure is not None
        assert "<svg" in render(panel.figure)[0]
    assert panel.table is not None
    assert [row[0] for row in panel.table.rows] == ["stages 1..1", "stages 1..2", "backprop"]
    assert panel.table.rows[1] == ("stages 1..2", "0.2000", "0.1500 to 0.3000")
    assert panel.title == "CORE-2 by number of stages"


@pytest.mark.parametrize(
    "other",
    [
        {"name": "CORE-3"},
        {"tasks": {"copa": {"items": 50}}},
        {"tasks": {"piqa": {"items": 9}}},
        {"baselines": "v2"},
    ],
)
def test_other_tasks_or_items_are_not_compared(other: dict[str, Any]) -> None:
    asked = CORE | {"tasks": {"copa": {"items": 9}}}
    with style():
        panel = core_panel(run(asked), run(asked | other))
    assert panel is not None
    assert panel.table is not None
    assert len(panel.table.rows) == 2
    assert "was evaluated on other tasks or items" in panel.caption


def test_without_a_whole_record_there_is_no_figure() -> None:
    for core in (None, {}, {"core": [0.1]}, CORE | {"interval": [[0, 1]]}, CORE | {"interval": [1, 2]}, "x"):
        assert core_panel(run(core), None) is None
