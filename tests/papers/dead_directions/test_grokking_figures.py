"""The figures of the grokking study: what is drawn is what was read."""

import math
from typing import Any

import numpy as np

from papers.dead_directions.grokking_figures import grokking_panels, shown
from papers.dead_directions.grokking_verdicts import CONTROLS, DECAY, SIGNALS, marks, phase_of, spoken
from topograd.report.drawing import render, style
from topograd.report.tables import whole


def row(arm: str, fits: bool = True) -> dict[str, Any]:
    points = []
    for step in range(0, 2000, 100):
        test = None if arm == CONTROLS[1] else 5.0 if step < 1000 else 0.5
        train = 1.0 if fits and step >= 200 else 0.1
        sampled = step % 500 == 0
        points.append(
            {
                "step": step,
                "train_loss": math.exp(-step / 300),
                "train_accuracy": train,
                "test_loss": test,
                "test_accuracy": None if test is None else 1.0 if step >= 1000 else 0.0,
                "norm": 10.0 + (step if step < 700 else 1400 - step) / 100,
                "sigma": None if step > 1500 else 0.1,
                "effective_rank": 20.0,
                "schur": 0.5,
                "empirical": 1e-6,
                "expected": 1e-3,
                "coefficient": 30.0 if sampled else None,
                "calibrated": sampled and step != 500,
                "phase": phase_of(train, None if test is None else 1.0 if step >= 1000 else 0.0),
            }
        )
    return {"arm": arm, "seed": 0, "rank": 4, "points": points}


def record(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As the study keeps it."""
    return {"rows": rows, "signals": SIGNALS, "marks": marks(rows, spoken(rows))}


def test_every_signal_is_drawn_over_the_same_steps() -> None:
    with style():
        axis, lead = grokking_panels(record([row(arm) for arm in (DECAY, *CONTROLS)]))
        assert axis.figure is not None
        assert lead.figure is not None
        plots = axis.figure.axes
        assert [plot.get_ylabel() for plot in plots] == [*shown(SIGNALS).values(), "trace of G"]
        hollow = [line for line in plots[-2].get_lines() if line.get_fillstyle() == "none"]
        assert [np.asarray(line.get_xdata()).tolist() for line in hollow] == [[500]] * 3
        assert render(axis.figure)[0].startswith("<?xml")
    assert axis.table is not None
    assert lead.table is not None
    assert [cells[0] for cells in axis.table.rows] == [whole(step) for step in (0, 500, 1000, 1500)]
    assert axis.table.rows[1][1] == "memorisation"
    assert ("weight norm", "turn", "+200") in lead.table.rows


def test_a_training_that_fits_nothing_is_drawn_too() -> None:
    with style():
        axis, lead = grokking_panels(record([row(arm, fits=False) for arm in (DECAY, *CONTROLS)]))
    assert axis.figure is not None
    assert lead.caption == "Nothing was fitted, so nothing could warn."
