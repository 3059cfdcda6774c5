"""Page of `topograd inspect --series`: geometry signals of a run's checkpoints over steps."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from topograd.report.drawing import look, new_figure, powers
from topograd.report.figures import Panel
from topograd.report.markup import escape, tiles_html
from topograd.report.page import write_figures
from topograd.report.tables import Table, fixed, whole

SIGNALS = {
    "loss": "loss of the probe",
    "sigma": "σ_r behind the last layer",
    "effective_rank": "effective rank",
    "schur": "Schur ratio",
    "coefficient": "λ̂",
}
LINE, MARK = look(0, 2).colour, look(1, 2).colour


def write_series(path: Path, record: Mapping[str, Any]) -> Path:
    """Write the page and return its path. The same record gives the same bytes."""
    lead = (
        f"{len(record['points'])} checkpoints, all read on this text: {record['text']}, at rank "
        f"{record['rank']}. Nothing here is a rate of an approach."
    )
    reasons = "".join(f"<li>{escape(reason)}</li>" for reason in record["refused"])
    counts = [(name.replace("_", " "), whole(len(record[name]))) for name in ("change_points", "alarms")]
    tiles = tiles_html([("phase over all checkpoints", record["phase"]), *counts])
    return write_figures(
        path,
        (f"Geometry of {record['run']}, step by step", lead, tiles),
        lambda: [series_panel(record)],
        after=[("missing", "Not measured", f"<ul>{reasons}</ul>" if reasons else "")],
        saved=False,
    )


def series_panel(record: Mapping[str, Any]) -> Panel:
    """One small plot for each signal, all over the same steps, with change points and alarms."""
    points = record["points"]
    known = [name for name in SIGNALS if any(point[name] is not None and point[name] > 0 for point in points)]
    figure = new_figure(1.6 * len(known))
    axes = figure.subplots(len(known), 1, sharex=True, squeeze=False)[:, 0]
    for name, axis in zip(known, axes, strict=True):
        pairs = [(point["step"], point[name]) for point in points if point[name] is not None]
        shown = [value if value > 0 else math.nan for _, value in pairs]
        axis.plot([step for step, _ in pairs], shown, color=LINE, marker="o", markersize=4)
        if name not in ("schur", "effective_rank"):
            powers(axis, "y")
        if name == "schur":
            axis.axhline(record["random"]["schur"], color=MARK, linestyle="--", linewidth=1)
        axis.set_ylabel(SIGNALS[name])
        for kind, dashes in (("change_points", "-"), ("alarms", ":")):
            for event in record[kind]:
                if event["signal"] == name:
                    axis.axvline(event["step"], color=MARK, linestyle=dashes, linewidth=1)
    axes[-1].set_xlabel("step")
    caption = (
        "The same text and the same rank at every checkpoint, so that a model that does not change reads the "
        "same. Solid lines are change points, dotted ones alarms. The dashed line is the Schur ratio of a "
        "random network of this shape. λ̂ is a sample with its interval in the table; those that are not "
        "calibrated are marked there and should not be compared."
    )
    alt = f"{len(known)} signals over {len(points)} steps."
    return Panel("series", "Signals by step", caption, figure, alt, series_table(record))


def series_table(record: Mapping[str, Any]) -> Table:
    """Every signal at each step."""
    header = ("step", "loss", "σ_r", "effective rank", "Schur ratio", "‖w‖", "λ̂", "interval", "calibrated")
    return Table("Signals by step", header, tuple(map(_cells, record["points"])))


def _cells(point: Mapping[str, Any]) -> tuple[str, ...]:
    interval = point["interval"]
    return (
        whole(point["step"]),
        fixed(point["loss"], 3),
        "–" if point["sigma"] is None else f"{point['sigma']:.3g}",
        fixed(point["effective_rank"], 1),
        fixed(point["schur"], 3),
        fixed(point["norm"], 2),
        "–" if point["coefficient"] is None else fixed(point["coefficient"], 2),
        "–" if interval is None else f"{interval[0]:.2f} to {interval[1]:.2f}",
        "yes" if point["calibrated"] else "no",
    )
