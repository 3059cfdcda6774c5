"""Figures 1 to 3 of bounded interfaces: what is drawn is what the rows say."""

from typing import Any

import numpy as np
import pytest

from papers.latent_bounded_interfaces import interface_quality as study
from papers.latent_bounded_interfaces import interfaces
from papers.latent_bounded_interfaces.interface_figures import interface_panels
from papers.latent_bounded_interfaces.interfaces import PUBLISHED
from topograd.report.drawing import style


@pytest.fixture
def record() -> dict[str, Any]:
    """Losses that fall by seed and model, and norms that rise with the rank."""
    rows = []
    for number, case in enumerate(study.cases(range(2))):
        losses = [{"step": s, "losses": [None, 5.0 - s / 100 + case.seed]} for s in (100, 200)]
        row = dict(zip(interfaces.KEY, case.key(200), strict=True)) | {"trajectory": losses, "ce": number}
        if case.interface in PUBLISHED.values():
            rank = next(r for r, words in PUBLISHED.items() if words == case.interface)
            norms = [{"step": s, "local_norm": [rank, rank + 2], "suffix_norm": [s]} for s in (0, 100, 200)]
            row["looks"] = norms
        rows.append(row)
    return {"rows": rows, "drawn": study.drawn(tiny=False)}


def test_every_figure_draws_its_rows(record: dict[str, Any]) -> None:
    with style():
        curves, regions, norms = interface_panels(record)
    assert curves.table is not None
    assert len(curves.table.rows) == 4 * 4
    assert curves.table.rows[0] == ("transformer", "dense", "3.5000", "0.7071"), "4 and 3 by seed"
    assert regions.table is not None
    assert [row[1] for row in regions.table.rows] == ["1 layer", "2 layers", "3 layers", "4 layers"] * 2
    assert norms.table is not None
    assert norms.table.rows[0] == ("one region, ‖J‖", "r = 16", "17.0000", "0.0000"), "the mean over regions"
    figure = norms.figure
    assert figure is not None
    drawn = figure.axes[1].lines[0].get_xydata()
    assert np.asarray(drawn).tolist() == [[100, 100], [200, 200]], "without the first look"
    assert [axes.get_title(loc="left") for axes in curves.figure.axes] == [  # type: ignore[union-attr]
        "transformer",
        "mamba2",
        "mamba3",
        "hybrid",
    ]


def test_a_short_run_has_the_curves_alone(record: dict[str, Any]) -> None:
    shown = ("dense", study.FINE)
    few = [row for row in record["rows"] if row["architecture"] == "transformer" and row["name"] in shown]
    with style():
        (curves,) = interface_panels({"rows": few, "drawn": study.drawn(tiny=True)})
    assert curves.table is not None
    assert [row[1] for row in curves.table.rows] == ["dense", "causal, S = T"]
    assert len(curves.figure.axes[0].lines) == 2  # type: ignore[union-attr]
