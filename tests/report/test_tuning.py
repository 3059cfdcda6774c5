"""Figures of a fine-tuned run: drawn from its numbers, and left out where it has none."""

from __future__ import annotations

from pathlib import Path

from topograd.report.data import RunData
from topograd.report.drawing import render, style
from topograd.report.page import write_report
from topograd.report.tuning import forgetting_panel, layers_panel

METRICS = [
    {"kind": "eval", "step": step, "seconds": 1.0, "bpb": {"prediction": 2.0 - learned, "prefix": [2.0]},
     "learned": learned, "forgotten": forgotten}
    for step, learned, forgotten in ((0, 0.0, 0.0), (5, 0.25, 0.0125), (10, 0.5, 0.0625))
]  # fmt: skip
RUN = RunData("tuned", {}, METRICS, {"bpb": {"prediction": 1.5, "prefix": [1.5]}})
SHARES = {
    "layers": [
        {"layer": "1", "learned": 0.125, "forgotten": 0.05},
        {"layer": "2", "learned": 0.375, "forgotten": -0.0125},
        {"layer": "embedding and head", "learned": 0.0, "forgotten": 0.025},
    ],
    "learned": 0.5,
    "forgotten": 0.0625,
    "rest": {"learned": 0.0, "forgotten": 0.0},
}


def test_numbers_are_those_of_the_run() -> None:
    with style():
        over, layers = forgetting_panel(RUN), layers_panel(SHARES)
        assert over is not None
        assert layers is not None
        assert over.table is not None
        assert over.table.rows[-1] == ("10", "0.5000", "0.0625")
        assert layers.table is not None
        assert layers.table.rows[1] == ("2", "0.37500", "−0.01250")
        assert layers.table.rows[-1][0] == "not shared out"
        assert layers.figure is not None
        assert len(layers.figure.axes[0].patches) == 3
        assert "learned: 0.5000 in all" in layers.figure.axes[0].get_title("left")
        assert "<svg" in render(layers.figure).svg


def test_the_page_has_both_sections(tmp_path: Path) -> None:
    page = write_report(tmp_path / "report.html", RUN, None, None, shares=SHARES).read_text()
    for anchor in ("forgetting", "layers"):
        assert f'id="{anchor}"' in page
        assert (tmp_path / "figures" / f"{anchor}.svg").is_file()
    plain = RunData("plain", {}, [], RUN.evaluation)
    page = write_report(tmp_path / "report.html", plain, None, None).read_text()
    assert 'id="layers"' not in page
    assert 'id="forgetting"' not in page
