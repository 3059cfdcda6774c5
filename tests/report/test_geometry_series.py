"""The page of a series."""

from pathlib import Path
from typing import Any

import pytest

from raising import refused
from topograd.errors import RunError
from topograd.report.drawing import style
from topograd.report.geometry_series import series_panel, write_series


def point(step: int, coefficient: float | None) -> dict[str, Any]:
    return {
        "step": step,
        "sigma": 0.1 / (step + 1),
        "effective_rank": 7.5,
        "schur": 0.4,
        "loss": 3.0,
        "norm": 12.0,
        "coefficient": coefficient,
        "interval": None if coefficient is None else [coefficient - 1, coefficient + 1],
        "calibrated": coefficient is not None,
        "reason": None,
    }


@pytest.fixture
def record() -> dict[str, Any]:
    event = {"signal": "sigma", "step": 20, "before": 1.0, "after": 0.1}
    return {
        "run": "runs/<b>mine</b>",
        "text": "held-out",
        "rank": 6,
        "points": [point(0, 4.0), point(10, None), point(20, 5.0)],
        "random": point(0, None),
        "alarms": [],
        "change_points": [event],
        "phase": "undecided",
        "refused": ["λ̂ at step 10: <i>no</i>"],
    }


def test_the_page_says_everything_and_is_the_same_again(record: dict[str, Any], tmp_path: Path) -> None:
    page = write_series(tmp_path / "series.html", record).read_text()
    assert page.count("<svg") == 2, "the figure in two layouts"
    assert "<b>mine" not in page
    assert "<i>no" not in page
    for words in ("undecided", "3.00 to 5.00", "at rank 6"):
        assert words in page
    assert write_series(tmp_path / "again.html", record).read_text() == page
    with refused(RunError, setting="out", given=str(tmp_path / "no" / "series.html")):
        write_series(tmp_path / "no" / "series.html", record)


def test_the_table_has_a_row_for_each_step(record: dict[str, Any]) -> None:
    with style():
        found = series_panel(record)
    assert found.table is not None
    assert [row[0] for row in found.table.rows] == ["0", "10", "20"]
    assert found.table.rows[1][6:] == ("–", "–", "no")
