"""The figures of the grokking study: every signal over one axis of steps, and who spoke first.

The record has the readings of every training (`rows`, the arm that groks first, then its controls), the
names of its signals (`signals`), and for each training its fall, and the values and events of each signal
(`marks`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from topograd.report.drawing import MUTED, legend_below, look, new_figure, panels, powers, whole_steps
from topograd.report.figures import Panel
from topograd.report.tables import Table, read_row, whole

Record = Mapping[str, Any]
BANDS = {"memorisation": "#f3e3c6", "transition": "#dfe8f5", "generalisation": "#dcefdf"}
TESTS = {"test_loss": "test loss", "test_accuracy": "test accuracy"}
FISHERS = {"empirical": "labels of the data", "expected": "labels of the model"}


class Course:
    """One training: its readings, its fall, and what its signals did."""

    def __init__(self, row: Record, mark: Record) -> None:
        self.arm, self.seed, self.points = row["arm"], row["seed"], row["points"]
        self.fall, self.fitted, self.signals = mark["fall"], mark["fitted"], mark["signals"]

    def values(self, name: str) -> list[Any]:
        """A signal, or a reading of the test, at every point; None where there is none."""
        if name in self.signals:
            return list(self.signals[name]["values"])
        return [point[name] for point in self.points]


def grokking_panels(record: Record) -> tuple[Panel, ...]:
    """One axis of steps, and the leads."""
    courses = [Course(row, mark) for row, mark in zip(record["rows"], record["marks"], strict=True)]
    return axis_panel(courses, record["signals"]), lead_panel(courses, record["signals"])


def shown(signals: Mapping[str, str]) -> dict[str, str]:
    """What is drawn over the steps, with its words."""
    return {**TESTS, **{name: words for name, words in signals.items() if name != "empirical"}}


def axis_panel(courses: Sequence[Course], signals: Mapping[str, str]) -> Panel:
    """A plot for each signal, all over the same steps; bands are the phases of the first seed with decay."""
    drawn = shown(signals)
    figure = new_figure(1.45 * (len(drawn) + 1))
    axes = panels(figure, len(drawn) + 1, stacked=True, sharex=True)
    arms = _arms(courses)
    first = _first(courses, arms[0])
    for axis, (signal, words) in zip(axes, drawn.items(), strict=False):
        _curves(axis, courses, signal)
        if signal in signals and (at := first.signals[signal]["at"]) is not None:
            axis.axvline(at, color=look(0, len(arms)).colour, linestyle=":", linewidth=1.2)
        axis.set_ylabel(words)
        if signal not in ("test_accuracy", "norm", "effective_rank"):
            _logarithmic(axis)
    for i, (signal, words) in enumerate(FISHERS.items()):
        for arm, dash in zip(arms[:2], ("-", "--"), strict=False):
            points = _first(courses, arm).points
            pairs = [(p["step"], p[signal]) for p in points if p[signal] > 0]
            axes[-1].plot(*_columns(pairs), color=look(i, 2).colour, linestyle=dash, linewidth=1.2)
        axes[-1].plot([], [], color=look(i, 2).colour, label=words)
    axes[-1].set_ylabel("trace of G")
    _logarithmic(axes[-1])
    if axes[-1].get_legend_handles_labels()[0]:
        axes[-1].legend(loc="upper right", fontsize=8)
    for axis in axes:
        _bands(axis, first)
    whole_steps(axes[-1])
    legend_below(figure, axes[0])
    caption = (
        "Bold: the first seed; thin: the others. Bands are the phases of the first seed with decay: fitting "
        "(white), memorisation, transition, generalisation. The vertical line is the fall of its test loss, "
        "a dotted one a signal's first change point from the end of fitting on, known once all readings are. "
        "Hollow marks of λ̂ are readings that are not calibrated. In the last plot, dashed is the control "
        "without decay."
    )
    table = _table(first, drawn)
    title = "One axis of steps"
    return Panel("axis", title, caption, figure, f"{title}. {read_row(table, 0)}", table)


def _arms(courses: Sequence[Course]) -> list[str]:
    return list(dict.fromkeys(course.arm for course in courses))


def _first(courses: Sequence[Course], arm: str) -> Course:
    return next(course for course in courses if course.arm == arm)


def _columns(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def _curves(axis: Axes, courses: Sequence[Course], signal: str) -> None:
    arms, sampled = _arms(courses), signal == "coefficient"
    for course in courses:
        drawn = look(arms.index(course.arm), len(arms))
        values = course.values(signal)
        pairs = [(p["step"], v) for p, v in zip(course.points, values, strict=True) if v is not None]
        axis.plot(
            *_columns(pairs),
            color=drawn.colour,
            linestyle=drawn.dash,
            linewidth=1.8 if course.seed == 0 else 0.7,
            marker="o" if sampled else None,
            markersize=3,
            label=course.arm if course.seed == 0 else None,
        )
        if sampled:
            refused = [p for p in course.points if not p["calibrated"] and (p["coefficient"] or 0) > 0]
            hollow = [(p["step"], p["coefficient"]) for p in refused]
            axis.plot(*_columns(hollow), "o", color=drawn.colour, markersize=4, fillstyle="none")


def _logarithmic(axis: Axes) -> None:
    """Where something above 0 was drawn."""
    if any((np.asarray(line.get_ydata()) > 0).any() for line in axis.get_lines()):
        powers(axis, "y")


def _bands(axis: Axes, course: Course) -> None:
    for here, after in itertools.pairwise(course.points):
        if here["phase"] in BANDS:
            axis.axvspan(here["step"], after["step"], color=BANDS[here["phase"]], linewidth=0, zorder=0)
    if course.fall is not None:
        axis.axvline(course.fall, color=MUTED, linewidth=1)


def _table(course: Course, drawn: Mapping[str, str]) -> Table:
    """The readings of the first seed with decay at which λ̂ was sampled."""
    header = ("step", "phase", *drawn.values(), "empirical trace", "expected trace")
    columns = [course.values(name) for name in drawn]
    cells = []
    for place, point in enumerate(course.points):
        if point["coefficient"] is None:
            continue
        values = [column[place] for column in columns] + [point[name] for name in FISHERS]
        words = ("–" if value is None else f"{value:.3g}" for value in values)
        cells.append((whole(point["step"]), point["phase"], *words))
    return Table("With decay, first seed", header, tuple(cells))


def _leads(courses: Sequence[Course], signal: str, event: str) -> list[float | None]:
    """Steps from an event to the fall, by seed; None where one of them is missing."""
    pairs = [(course.fall, course.signals[signal][event]) for course in courses]
    return [None if fall is None or step is None else fall - step for fall, step in pairs]


def lead_panel(courses: Sequence[Course], signals: Mapping[str, str]) -> Panel:
    """When each signal's change point was seen and when it turned, before (right) or after the fall."""
    courses = [course for course in courses if course.arm == _arms(courses)[0]]
    figure = new_figure(3.6)
    (axes,) = panels(figure, 1)
    names = list(signals)[::-1]
    cells = []
    for place, signal in enumerate(names):
        for i, (field, words) in enumerate((("seen", "change point, when seen"), ("turn", "turn"))):
            drawn = look(i, 2)
            leads = _leads(courses, signal, field)
            known = [value for value in leads if value is not None]
            axes.plot(
                known,
                [place + 0.12 - 0.24 * i] * len(known),
                drawn.marker,
                color=drawn.colour,
                label=words if place == 0 else None,
            )
            message = ", ".join("none" if value is None else f"{value:+.0f}" for value in leads)
            cells.append((signals[signal], words, message))
    axes.axvline(0, color=MUTED, linewidth=1)
    axes.set_yticks(range(len(names)), [signals[name] for name in names])
    axes.set_ylim(-0.5, len(names) - 0.5)
    axes.set_xlabel("steps before the fall of the test loss (below 0: after it)")
    legend_below(figure, axes)
    table = Table("Leads, seed by seed", ("signal", "event", "steps"), tuple(cells[::-1]))
    caption = (
        "One mark for each seed with decay. Whether a signal also speaks where nothing groks is in the table "
        "of false alarms below."
    )
    if not any(course.fitted for course in courses):
        caption = "Nothing was fitted, so nothing could warn."
    title = "Who speaks first"
    return Panel("lead", title, caption, figure, f"{title}. {read_row(table, 0)}", table)
