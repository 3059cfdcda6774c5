"""Interactive scatter plot without script: marks that move between axes, and a card for each mark.

The marks are the radio buttons of one group, so that the mouse, a touch and the arrow keys all reach them.
Each has its place along every property as a CSS variable, and a rule for each choice says which two places
count; for that a browser must know `:has`, as all do since the end of 2023. A mark that is pointed at,
focused or chosen shows its card, the element after it: one rule for all, quick with hundreds of marks.

Shapes tell again what colours tell. Marks that would cover one another step aside, to the poorer side. The
line is the front of the two shown properties alone, among what trained to the end: those alone had the same
budget.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from topograd.report.drawing import GRID, INK, MUTED, look
from topograd.report.markup import escape
from topograd.report.tables import fixed

Record = Mapping[str, Any]
Trial = Mapping[str, Any]
KINDS = {
    "front": "on the front",
    "done": "trained to the end and beaten",
    "early": "stopped early or under way",
}
"""The kinds of marks, by the names of their CSS classes."""
WIDTH, HEIGHT = 720, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 704, 16, 396  # the field within WIDTH and HEIGHT
_LEAST = 170  # pixels: the smaller side of the field, on a phone
_APART = 11  # pixels between the middles of marks
_GRID = np.array(list(product(range(0, 41, 4), repeat=2)), dtype=np.float64)  # pixels to step aside
_TRIES = _GRID[np.argsort(np.hypot(*_GRID.T), kind="stable")]
_FRONT, _DONE = look(0, 2).colour, look(1, 2).colour

STYLE = f"\n:root {{ --front: {_FRONT}; --done: {_DONE}; --mark: {INK}; }}\n" + (
    resources.files("topograd.report") / "pareto.css"
).read_text("utf-8")
"""What is the same for every study."""


@dataclass(frozen=True)
class Axis:
    """A property, and where its values are drawn."""

    key: str
    sign: int
    """1 if less is better, -1 if more is."""
    low: float
    high: float
    ticks: tuple[float, ...]
    digits: int
    """Digits after the point of its values."""

    @classmethod
    def of(cls, key: str, direction: str, trials: Sequence[Trial]) -> Axis:
        """An axis with room for the values of all the trials."""
        values = [trial["values"][key] for trial in trials]
        digits = 0 if all(value == int(value) for value in values) else 4
        room = 0.07 * (max(values) - min(values)) or 0.05 * abs(max(values)) or 0.5
        low, high = min(values) - room, max(values) + room
        locator = MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10], integer=digits == 0, min_n_ticks=1)
        ticks = tuple(float(tick) for tick in locator.tick_values(low, high) if low <= tick <= high)
        return cls(key, 1 if direction == "minimize" else -1, low, high, ticks, digits)

    @property
    def name(self) -> str:
        """The property in words."""
        return self.key.replace("_", " ")

    def read(self, trial: Trial) -> float:
        """The value of a trial."""
        return float(trial["values"][self.key])

    def text(self, value: float) -> str:
        """A value as it is written."""
        return fixed(value, self.digits)

    def place(self, value: float) -> float:
        """Percent of the field, from its low end."""
        return 100 * (value - self.low) / (self.high - self.low)


def kind_of(trial: Trial) -> str:
    """Which of `KINDS` a trial is."""
    return "front" if trial["on_front"] else "done" if trial["state"] == "complete" else "early"


def rules(properties: int) -> str:
    """What each choice of two properties shows: marks in their places, two scales and a line."""
    lines = []
    for i in range(properties):
        across, up = f".pareto:has(#across-{i}:checked)", f".pareto:has(#up-{i}:checked)"
        lines += [f"{across} .across-{i},{up} .up-{i}{{display:inline}}"]
        lines += [f"{across} .point{{left:var(--v{i})}}{up} .point{{bottom:var(--v{i})}}"]
        for j in (j for j in range(properties) if j != i):
            both = f"{across}:has(#up-{j}:checked)"
            lines += [f"{both} .line-{i}-{j}{{display:inline}}{both} .point{{translate:var(--o{i}-{j},0 0)}}"]
    return "\n".join(lines)


def field_html(
    trials: Sequence[Trial], axes: Sequence[Axis], names: Sequence[str], cards: Sequence[str]
) -> str:
    """The drawing, and upon it a mark for each trial with its card, which shows at the side of the board."""
    margins = (TOP, WIDTH - RIGHT, HEIGHT - BOTTOM, LEFT)
    sides = " ".join(f"{100 * margin / WIDTH:.4f}%" for margin in margins)  # CSS: all are shares of the width
    marks = "\n".join(
        f'<input type="radio" name="point" id="point-{trial["number"]}" class="point mark {kind_of(trial)}"'
        f' style="{style}" aria-label="{escape(name)}">{card}'
        for trial, style, name, card in zip(trials, _places(trials, axes), names, cards, strict=True)
    )
    return (
        f'<div class="field">{_drawing(trials, axes)}\n<div class="points" role="radiogroup" '
        f'aria-label="Configurations" style="padding:{sides}">\n{marks}\n</div></div>'
    )


def _drawing(trials: Sequence[Trial], axes: Sequence[Axis]) -> str:
    """The scales of every property along both sides, and the line of every pair."""
    pieces = [_scale(i, axis, side) for i, axis in enumerate(axes) for side in ("across", "up")]
    done = [trial for trial in trials if trial["state"] == "complete"]
    for i, across in enumerate(axes):
        for j, up in enumerate(axes):
            if i != j and done:
                corners = _staircase([(across.read(trial), up.read(trial)) for trial in done], across, up)
                pieces.append(f'<polyline class="part line-{i}-{j}" points="{corners}"/>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{len(trials)} configurations by two '
        f'properties. Every number is in the table below." fill="{MUTED}" font-size="15">\n'
        + "\n".join(pieces)
        + f'\n<path d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="#b9c0cc"/></svg>'
    )


def _scale(i: int, axis: Axis, side: str) -> str:
    """Grid, numbers and name of property number `i` along one side."""
    pieces = []
    for tick in axis.ticks:
        words = f"{tick:.10g}".replace("-", "−")
        if side == "across":
            x = _across(axis.place(tick))
            grid = f"M{x} {TOP}V{BOTTOM}"
            text = f'x="{x}" y="{BOTTOM + 22}" text-anchor="middle"'
        else:
            y = _up(axis.place(tick))
            grid = f"M{LEFT} {y}H{RIGHT}"
            text = f'x="{LEFT - 8}" y="{y}" dy=".35em" text-anchor="end"'
        pieces.append(f'<path d="{grid}" stroke="{GRID}"/><text {text}>{words}</text>')
    where = f'x="{(LEFT + RIGHT) // 2}" y="{BOTTOM + 52}"'
    if side == "up":
        where = f'transform="translate(18 {(TOP + BOTTOM) // 2}) rotate(-90)"'
    better = "less is better" if axis.sign == 1 else "more is better"
    title = f'<text {where} text-anchor="middle" fill="{INK}">{escape(axis.name)} ({better})</text>'
    return f'<g class="part {side}-{i}">{"".join(pieces)}{title}</g>'


def _staircase(done: Sequence[tuple[float, float]], across: Axis, up: Axis) -> str:
    """The edge of what the points beat: by way of their front, and on to the poor ends of the field."""
    front: list[tuple[float, float]] = []
    for x, y in sorted({(across.sign * x, up.sign * y) for x, y in done}):
        if not front or y < front[-1][1]:
            front.append((x, y))
    steps = [(across.place(across.sign * x), up.place(up.sign * y)) for x, y in front]
    poor_x, poor_y = (100.0 if axis.sign == 1 else 0.0 for axis in (across, up))
    corners = [(steps[0][0], poor_y), steps[0]]
    for x, y in steps[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    corners.append((poor_x, steps[-1][1]))
    return " ".join(f"{_across(x)},{_up(y)}" for x, y in corners)


def _across(percent: float) -> float:
    return round(LEFT + (RIGHT - LEFT) * percent / 100, 2)


def _up(percent: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * percent / 100, 2)


def _places(trials: Sequence[Trial], axes: Sequence[Axis]) -> list[str]:
    """For each trial the variables that the rules read: places --vI, and steps aside --oI-J (right, down)."""
    places = np.array([[axis.place(axis.read(trial)) for axis in axes] for trial in trials])
    variables = [[f"--v{i}:{place:.2f}%" for i, place in enumerate(row)] for row in places]
    for i in range(len(axes)):
        for j in range(i + 1, len(axes)):
            for point, (x, y) in enumerate(_aside(places[:, [i, j]], [axes[i].sign, axes[j].sign])):
                if x or y:
                    variables[point] += [f"--o{i}-{j}:{x:g}px {0 - y:g}px", f"--o{j}-{i}:{y:g}px {0 - x:g}px"]
    return [";".join(each) for each in variables]


def _aside(places: NDArray[np.float64], signs: Sequence[int]) -> NDArray[np.float64]:
    """Pixels by which marks (N, 2) step aside, so that none covers another; earlier ones keep their places.

    Every mark takes the nearest free spot, or the one with most room where none is free. It steps to the poor
    side of both properties only, so that none looks better than it is. Both sides of the field count as the
    smaller one at its least size: where they are larger, marks are only further apart.
    """
    spots, tries = places * _LEAST / 100, _TRIES * signs
    aside = np.zeros_like(spots)
    for k in range(1, len(spots)):
        gaps = spots[k] - spots[:k]
        squares = (tries**2).sum(1)[:, None] + 2 * tries @ gaps.T + (gaps**2).sum(1)  # of |gap + try|
        aside[k] = tries[np.argmax(np.minimum(squares.min(1), _APART**2))]
        spots[k] += aside[k]
    return aside
