"""What fewer bits cost, by prefix, as a figure and a table."""

from __future__ import annotations

from typing import Any

import pytest

from topograd.report.data import RunData
from topograd.report.drawing import render, style
from topograd.report.stage_figures import precision_panel

COST = {"bpb": [1.1, 1.02], "float32_bpb": [1.0, 1.0], "agreement": [0.9, 0.95]}


def run(**cost: Any) -> RunData:
    return RunData("run", {}, [], {"precision": cost})


def test_a_row_for_each_precision_and_exit() -> None:
    with style():
        panel = precision_panel(run(int8=COST, int4=COST | {"bpb": [1.5, 1.4]}))
        assert panel is not None
        assert panel.figure is not None
        assert "<svg" in render(panel.figure)[0]
    assert panel.table is not None
    assert [row[:2] for row in panel.table.rows] == [
        ("int8", "1"),
        ("int8", "2"),
        ("int4", "1"),
        ("int4", "2"),
    ]
    assert panel.table.rows[1] == ("int8", "2", "1.0200", "1.0000", "2.00", "95.00")


@pytest.mark.parametrize("cost", [None, {}, "x", COST | {"bpb": [1.0]}, COST | {"agreement": [None, 1.0]}])
def test_without_a_whole_record_there_is_no_figure(cost: Any) -> None:
    assert precision_panel(run(int8=cost)) is None
    assert precision_panel(RunData("run", {}, [], {})) is None
