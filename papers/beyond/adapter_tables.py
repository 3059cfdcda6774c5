"""Tables, figure and claims of `adapter_placement.py`: learning and forgetting of every arm, at one level.

A row has the bits per byte of the new text at every stop (`new`), and those of each window of the old text
(`old`); the first stop is before any step. Needs no torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from papers.outcome import ResultTable, Row
from papers.verdicts import FAILED, Claim, Drawing, Interval, Series, above

LEARNED = 0.25
"""Of lora's gain; an arm with less has not learned."""
OURS = ("dead", "safe", "named layers")
BASELINES = ("lora", "lora, A held", "pissa")
CONTROLS = {"named layers": ("other layers",)}
"""What an arm stands against beside the baselines."""


def gain(row: Row) -> float:
    """How many bits per byte of the new text an arm has won at the end."""
    first, last = row["new"][0], row["new"][-1]
    return float(first - last)


def of(rows: Sequence[Row], base: str, arm: str) -> list[Row]:
    """The rows of an arm, by seed."""
    results = [row for row in rows if (row["base"], row["arm"]) == (base, arm)]
    return sorted(results, key=lambda row: row["seed"])


def arms_of(rows: Sequence[Row], base: str) -> list[str]:
    """In the order in which they were measured."""
    return list(dict.fromkeys(row["arm"] for row in rows if row["base"] == base))


def has_learned(rows: Sequence[Row], base: str, arm: str) -> bool:
    """Whether an arm gains a quarter of what lora does, with every seed."""
    pairs = zip(of(rows, base, arm), of(rows, base, "lora"), strict=True)
    return all(gain(row) >= LEARNED * gain(usual) for row, usual in pairs)


def level(rows: Sequence[Row], base: str, seed: int) -> float:
    """The new text's bits per byte at which arms are compared."""
    learned = [arm for arm in arms_of(rows, base) if has_learned(rows, base, arm)]
    gains = [gain(row) for arm in learned for row in of(rows, base, arm) if row["seed"] == seed]
    first = next(row["new"][0] for row in of(rows, base, "lora") if row["seed"] == seed)
    return float(first - min(gains) / 2)


def forgetting_at(row: Row, bar: float) -> list[float]:
    """By window of the old text, where the new one first comes down to `bar`; between stops by a line.

    >>> forgetting_at({"new": [4.0, 2.0], "old": [[1.0, 1.0], [2.0, 1.5]]}, 3.0)
    [0.5, 0.25]
    """
    new, old = row["new"], row["old"]
    for i in range(1, len(new)):
        if new[i] <= bar:
            part = (new[i - 1] - bar) / (new[i - 1] - new[i])
            pairs = zip(old[i - 1], old[i], old[0], strict=True)
            return [a + part * (b - a) - first for a, b, first in pairs]
    raise AssertionError("an arm that has learned comes down to the level")


def forgetting(rows: Sequence[Row], base: str, arm: str) -> list[float]:
    """At the level: a number for each seed, or for each window where there is one seed."""
    results = [forgetting_at(row, level(rows, base, row["seed"])) for row in of(rows, base, arm)]
    return results[0] if len(results) == 1 else [statistics.fmean(windows) for windows in results]


def claims(base: str, rows: Sequence[Row]) -> list[Claim]:
    """Each of geometry's arms against each baseline: less forgetting at the level."""
    judged = []
    measured = arms_of(rows, base)
    for ours in (arm for arm in OURS if arm in measured):
        for other in (arm for arm in (*BASELINES, *CONTROLS.get(ours, ())) if arm in measured):
            name = f"{base}: {ours} forgets less than {other}"
            prediction = "Directions that the old text does not use can learn without forgetting."
            if not has_learned(rows, base, ours):
                message = f"{ours} gains less than a quarter of what lora does"
                judged.append(
                    Claim(name, prediction, "failed if it does not learn the new text", message, FAILED, ())
                )
                continue
            if not has_learned(rows, base, other):
                continue
            pairs = zip(forgetting(rows, base, other), forgetting(rows, base, ours), strict=True)
            effect = f"the forgetting of {other} less that of {ours} at one level of the new text"
            judged.append(above(name, prediction, effect, [a - b for a, b in pairs]))
    return judged


def table(base: str, rows: Sequence[Row]) -> ResultTable:
    """One line for each arm: means over seeds."""
    lines = []
    for arm in arms_of(rows, base):
        result = of(rows, base, arm)
        old = [statistics.fmean(row["old"][-1]) - statistics.fmean(row["old"][0]) for row in result]
        cells = [statistics.fmean(row["new"][-1] for row in result), statistics.fmean(old)]
        at = "not learned"
        if has_learned(rows, base, arm):
            at = str(Interval.of(forgetting(rows, base, arm)))
        parameters = f"{result[0]['parameters']:,}"
        lines.append((arm, parameters, f"{result[0]['rate']:g}", *(f"{cell:.3f}" for cell in cells), at))
    first = statistics.fmean(row["new"][0] for row in of(rows, base, "lora"))
    caption = f"{base}: bits per byte of the facts at the end (before: {first:.3f}), and of the old text "
    caption += "above the model before: at the end, and where all arms have learned alike"
    header = ("arm", "learning", "rate", "new", "forgotten", "forgotten at the level")
    return ResultTable(caption, header, tuple(lines))


def findings(base: str, rows: Sequence[Row]) -> list[str]:
    """Who learns most, and who forgets least for it."""
    arms = arms_of(rows, base)
    ends = {arm: statistics.fmean(row["new"][-1] for row in of(rows, base, arm)) for arm in arms}
    learned = [arm for arm in arms if has_learned(rows, base, arm)]
    lost = {arm: statistics.fmean(forgetting(rows, base, arm)) for arm in learned}
    most, least = min(ends, key=lambda arm: ends[arm]), min(lost, key=lambda arm: lost[arm])
    return [f"{base}: {most} learns most, and {least} forgets least at one level of the new text."]


def drawing(rows: Sequence[Row], base: str) -> Drawing:
    """Forgetting by what was learned: one line for each arm, from its first seed."""
    series = []
    for arm in arms_of(rows, base):
        row = of(rows, base, arm)[0]
        first = statistics.fmean(row["old"][0])
        lost = [[statistics.fmean(windows) - first] for windows in row["old"]]
        series.append(Series.of(arm, [row["new"][0] - value for value in row["new"]], lost))
    return Drawing(
        f"{base}: learning and forgetting",
        "bits per byte won on the facts",
        "lost on the old text",
        tuple(series),
    )
