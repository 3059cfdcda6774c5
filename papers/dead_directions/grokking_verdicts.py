"""What the readings of a training that groks say: phases, the fall of the test loss, warnings, verdicts.

Statement. The rules were fixed before the trainings of docs/results ran, and behind pilots of the same task.

    phase          fitting: less than FITTED of the pairs to learn are right. Then by the test accuracy:
                   memorisation below LOW, transition, generalisation from HIGH on
    m              the first reading that is no longer fitting
    the fall, T    the first reading from m on where the test loss is below half of its largest value so far
    change point   of a signal's logarithm over the readings from m on (`geometry/series.py`): `at` where it
                   lies once all readings are known, `seen` the first reading by which those so far show one
    turn           the first reading from m on where a signal that had moved by TURN has come back by TURN
    lead           T minus `seen`, or T minus the turn: above 0 the signal was first
    false alarm    a change point or a turn from m on in a control that does not grok

A signal warns with a seed if it is ahead of the fall and neither control of that seed has a false alarm. λ̂
counts where it is calibrated.

Symbols. A row is one training, a point one of its readings. Cost: none beside the readings.
Source: "Dead Directions: Geometric Singular Learning" §12.1, §13.5, §15, Corollary 39; the rules are ours.
Limits. `inspect --series` takes change points over all checkpoints; here they begin at m, since every signal
changes when fitting ends.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from papers.outcome import ResultTable, Row
from papers.verdicts import Claim, above, every, within
from topograd.geometry.monitors.phase import read_phase
from topograd.geometry.series import MIN_SIDE, change_points

DECAY, NO_DECAY, ALL_PAIRS = "decay", "no decay", "all pairs"
CONTROLS = (NO_DECAY, ALL_PAIRS)
FITTED, LOW, HIGH = 0.99, 0.1, 0.95
TURN = 0.05
"""In units of the logarithm."""
COLLAPSED = 3.0
"""Decades that a trace must fall to have collapsed; one that keeps its size stays within one."""
AGREE = 500
"""Steps within which two change points are at the same time: two readings of λ̂."""
SIGNALS = {
    "train_loss": "train loss",
    "norm": "weight norm",
    "sigma": "σ_r of the stream",
    "effective_rank": "effective rank",
    "unexplained": "1 - Schur ratio",
    "empirical": "trace of the empirical G",
    "coefficient": "λ̂",
}
Point = Mapping[str, Any]


def phase_of(train: float | None, test: float | None) -> str:
    """The phase by the accuracies; without a test, what is fitted generalises.

    >>> [phase_of(0.5, 0.1), phase_of(1.0, 0.03), phase_of(1.0, 0.4), phase_of(1.0, None)]
    ['fitting', 'memorisation', 'transition', 'generalisation']
    """
    if train is None or train < FITTED:
        return "fitting"
    if test is None or test >= HIGH:
        return "generalisation"
    return "memorisation" if test < LOW else "transition"


def fitted(points: Sequence[Point]) -> int | None:
    """The place of m among the readings."""
    return next((i for i, point in enumerate(points) if point["phase"] != "fitting"), None)


def fall(points: Sequence[Point]) -> int | None:
    """The place of T among the readings."""
    start, most = fitted(points), -math.inf
    if start is None or points[0]["test_loss"] is None:
        return None
    for i in range(start, len(points)):
        most = max(most, points[i]["test_loss"])
        if points[i]["test_loss"] < most / 2:
            return i
    return None


def groks(points: Sequence[Point]) -> bool:
    """It memorised, and generalised after at least twice the steps to fit."""
    phases = [point["phase"] for point in points]
    if points[0]["test_loss"] is None or "memorisation" not in phases or phases[-1] != "generalisation":
        return False
    start = fitted(points)
    assert start is not None
    return bool(points[phases.index("generalisation")]["step"] >= 2 * points[start]["step"])


def value_of(point: Point, signal: str) -> float | None:
    """A signal that has a logarithm, else None."""
    if signal == "coefficient" and not point["calibrated"]:
        return None
    value = 1 - point["schur"] if signal == "unexplained" else point[signal]
    return value if value is not None and value > 0 else None


@dataclass(frozen=True)
class Warned:
    """The steps at which a signal spoke; None where it did not."""

    at: int | None
    seen: int | None
    turn: int | None


def warned(points: Sequence[Point], signal: str) -> Warned:
    """What a signal does from m on."""
    start = fitted(points)
    known = [] if start is None else [(p["step"], value_of(p, signal)) for p in points[start:]]
    pairs = [(step, value) for step, value in known if value is not None]
    steps, values = [step for step, _ in pairs], [value for _, value in pairs]
    result = change_points(signal, steps, values)
    return Warned(result[0].step if result else None, _seen(steps, values), turn(steps, values))


def _seen(steps: Sequence[int], values: Sequence[float]) -> int | None:
    for i in range(2 * MIN_SIDE, len(steps) + 1):
        if change_points("", steps[:i], values[:i]):
            return steps[i - 1]
    return None


def turn(steps: Sequence[int], values: Sequence[float]) -> int | None:
    """Where a signal that had moved has come back by TURN.

    >>> turn([0, 1, 2, 3, 4], [1.0, 1.2, 1.3, 1.28, 1.1]), turn([0, 1, 2], [1.0, 1.2, 1.3])
    (4, None)
    """
    logs = [math.log(value) for value in values]
    for i, here in enumerate(logs):
        high, low = max(logs[: i + 1]), min(logs[: i + 1])
        fell = high - logs[0] > TURN and here < high - TURN
        rose = logs[0] - low > TURN and here > low + TURN
        if fell or rose:
            return steps[i]
    return None


def lead(points: Sequence[Point], step: int | None) -> float:
    """Steps before the fall; nan where there is no fall, or nothing before or after it."""
    place = fall(points)
    return math.nan if place is None or step is None else float(points[place]["step"] - step)


def points_of(rows: Sequence[Mapping[str, Any]], arm: str) -> dict[int, list[Point]]:
    """The readings of an arm by seed."""
    return {row["seed"]: row["points"] for row in rows if row["arm"] == arm}


Spoken = Mapping[tuple[str, int, str], Warned]
"""By arm, seed and signal."""


def spoken(rows: Sequence[Mapping[str, Any]]) -> Spoken:
    """What every signal of every training does."""
    return {
        (row["arm"], row["seed"], signal): warned(row["points"], signal) for row in rows for signal in SIGNALS
    }


def marks(rows: Sequence[Mapping[str, Any]], message: Spoken) -> list[Row]:
    """What figures need of each training, as plain numbers: its fall, and each signal's values and events."""
    return [
        {
            "arm": row["arm"],
            "seed": row["seed"],
            "fitted": fitted(row["points"]) is not None,
            "fall": None if (place := fall(row["points"])) is None else row["points"][place]["step"],
            "signals": {
                signal: asdict(message[row["arm"], row["seed"], signal])
                | {"values": [value_of(point, signal) for point in row["points"]]}
                for signal in SIGNALS
            },
        }
        for row in rows
    ]


def claims(rows: Sequence[Row], message: Spoken) -> tuple[Claim, ...]:
    """Everything that is judged."""
    return (*_course(rows), *_coefficients(rows, message), *_fisher(rows), *_warnings(rows, message))


def _course(rows: Sequence[Row]) -> list[Claim]:
    """Whether it groks, and the phases of §12.1."""
    runs, plain = list(points_of(rows, DECAY).values()), list(points_of(rows, NO_DECAY).values())
    grokked = [groks(run) for run in runs if fitted(run) is not None]  # else it was not trained for long
    return [
        every("it groks", "with decay, test follows train late", "it groks", grokked),
        every(
            "no grokking without decay",
            "the control memorises and stays",
            "it memorises and the test loss does not fall",
            [fall(run) is None for run in plain if fitted(run) is not None],
        ),
        above(
            "weights grow while it memorises (§12.1)",
            "accumulation: the weight norm rises",
            "log ‖w‖ at the fall minus that at m",
            [_moved(run, "norm", fitted(run), fall(run)) for run in runs],
        ),
        above(
            "σ_r grows while it memorises (§12.1)",
            "accumulation: σ_min rises",
            "log σ_r at the fall minus that at m",
            [_moved(run, "sigma", fitted(run), fall(run)) for run in runs],
        ),
        above(
            "weights shrink when it generalises (§12.1)",
            "compression: the weight norm falls",
            "log ‖w‖ at the fall minus that at the end",
            [_moved(run, "norm", -1, fall(run)) for run in runs],
        ),
        above(
            "σ_r falls when it generalises (§12.1)",
            "compression: the dead direction's eigenvalue descends",
            "log σ_r at the fall minus that at the end",
            [_moved(run, "sigma", -1, fall(run)) for run in runs],
        ),
        above(
            "training lowers the Schur ratio (§15)",
            "it collapses from random to trained",
            "the ratio at step 0 minus that at the end",
            [run[0]["schur"] - run[-1]["schur"] for run in runs],
        ),
    ]


def _moved(points: Sequence[Point], signal: str, start: int | None, end: int | None) -> float:
    """The change of a signal's logarithm between two readings; nan where one is missing."""
    if start is None or end is None:
        return math.nan
    before, after = value_of(points[start], signal), value_of(points[end], signal)
    return math.nan if before is None or after is None else math.log(after / before)


def fallen(points: Sequence[Point]) -> float:
    """By how much log λ̂ fell from the first calibrated reading from m on to the last."""
    start = fitted(points)
    known = [] if start is None else [value_of(point, "coefficient") for point in points[start:]]
    retained = [value for value in known if value is not None]
    return math.log(retained[0] / retained[-1]) if len(retained) > 1 else math.nan


def _coefficients(rows: Sequence[Row], message: Spoken) -> list[Claim]:
    runs, plain = points_of(rows, DECAY), points_of(rows, NO_DECAY)
    apart = []
    for seed in runs:
        one, other = (message[DECAY, seed, signal].at for signal in ("coefficient", "sigma"))
        apart.append(math.nan if one is None or other is None else float(one - other))
    return [
        above(
            "λ̂ falls from memorisation to generalisation",
            "generalisation sits at the more degenerate structure (§12.1)",
            "log λ̂ at m minus that at the end",
            [fallen(run) for run in runs.values()],
        ),
        above(
            "λ̂ falls further than without grokking",
            "the fall is that of generalising, and not of a small loss",
            "the fall of log λ̂ minus that of the control without decay",
            [fallen(run) - fallen(plain[seed]) for seed, run in runs.items()],
        ),
        within(
            "change points agree (§13.5)",
            "λ̂ and the Fisher side agree on the time of the transition",
            "the first change point of λ̂ minus that of σ_r, in steps,",
            apart,
            AGREE,
        ),
    ]


def _fisher(rows: Sequence[Row]) -> list[Claim]:
    """Corollary 39, in the control that memorises and stays."""
    runs = list(points_of(rows, NO_DECAY).values())
    ten = math.log(10)
    return [
        above(
            "the empirical Fisher collapses (Corollary 39)",
            "where a network memorises perfectly, it vanishes",
            "decades that the trace of the empirical G falls after m",
            [_moved(run, "empirical", -1, fitted(run)) / ten for run in runs],
            COLLAPSED,
        ),
        within(
            "the expected Fisher stays (Corollary 39)",
            "it keeps its size under the same memorisation",
            "decades that the trace of the expected G falls after m",
            [_moved(run, "expected", -1, fitted(run)) / ten for run in runs],
            1.0,
        ),
        within(
            "empirical goes as expected squared (ours)",
            "(1 - p_y)² against p_y (1 - p_y): both vanish, one twice as fast",
            "the slope of one logarithm on the other after m, minus 2,",
            [_slope(run) - 2 for run in runs],
            0.1,
        ),
    ]


def _slope(points: Sequence[Point]) -> float:
    """Of log empirical on log expected, from m on."""
    start = fitted(points)
    late = [] if start is None else points[start:]
    pairs = [(math.log(p["expected"]), math.log(p["empirical"])) for p in late if p["empirical"] > 0]
    if len({x for x, _ in pairs}) < 2:
        return math.nan
    return float(statistics.linear_regression([x for x, _ in pairs], [y for _, y in pairs]).slope)


def _warnings(rows: Sequence[Row], message: Spoken) -> list[Claim]:
    """For every signal: does it speak before the fall, and only then?"""
    falling = {seed: run for seed, run in points_of(rows, DECAY).items() if fall(run) is not None}
    results = []
    for signal, words in SIGNALS.items():
        for name, field in (("change point", "seen"), ("turn", "turn")):
            hits = []
            for seed, run in falling.items():
                ahead = lead(run, getattr(message[DECAY, seed, signal], field)) > 0
                false = any(getattr(message[arm, seed, signal], field) is not None for arm in CONTROLS)
                hits.append(ahead and not false)
            results.append(
                every(
                    f"a {name} of {words} warns",
                    "it comes before the fall of the test loss, and only where it falls",
                    f"its {name} leads and neither control has one",
                    hits,
                )
            )
    return results


def event_table(rows: Sequence[Row], message: Spoken) -> ResultTable:
    """Lead times of every signal, and false alarms of the controls."""
    runs = points_of(rows, DECAY)
    cells = []
    for signal, words in SIGNALS.items():
        parts = [
            _steps([lead(run, getattr(message[DECAY, seed, signal], field)) for seed, run in runs.items()])
            for field in ("at", "seen", "turn")
        ]
        for arm in CONTROLS:
            other = [message[arm, seed, signal] for seed in points_of(rows, arm)]
            seen, turned = (sum(getattr(o, f) is not None for o in other) for f in ("seen", "turn"))
            parts.append(f"{seen} and {turned} of {len(other)}")
        cells.append((words, *parts))
    header = ("signal", "lead of its change point", "lead when seen", "lead of its turn")
    return ResultTable(
        "Steps from a signal to the fall of the test loss, seed by seed, and false alarms (change points and "
        "turns) of the controls",
        (*header, *(f"false, {arm}" for arm in CONTROLS)),
        tuple(cells),
    )


def _steps(leads: Sequence[float]) -> str:
    return ", ".join("none" if math.isnan(value) else f"{value:+.0f}" for value in leads)


def phase_table(rows: Sequence[Row]) -> ResultTable:
    """When each training fitted, fell and generalised, what its phases read as, and λ̂'s refusals."""
    cells = []
    for row in rows:
        points = row["points"]
        start, low = fitted(points), fall(points)
        phases = [point["phase"] for point in points]
        general = phases.index("generalisation") if "generalisation" in phases else None
        sampled = [point for point in points if point["coefficient"] is not None]
        end = len(points) if low is None else low
        cells.append(
            (
                f"{row['arm']}, seed {row['seed']}",
                *("–" if place is None else str(points[place]["step"]) for place in (start, low, general)),
                _regime([] if start is None else points[start:end]),
                _regime(points[end:]),
                f"{sum(not point['calibrated'] for point in sampled)} of {len(sampled)}",
            )
        )
    header = ("training", "fitted", "fall of the test loss", "generalised", "m to the fall", "after it")
    return ResultTable("Phases", (*header, "λ̂ refused"), tuple(cells))


def _regime(points: Sequence[Point]) -> str:
    """Accumulation or compression by the weight norm and σ_r."""
    pairs = [(point["norm"], point["sigma"]) for point in points if point["sigma"]]
    return read_phase([a for a, _ in pairs], [b for _, b in pairs]).phase if pairs else "–"


def findings(rows: Sequence[Row], judged: Sequence[Claim]) -> tuple[str, ...]:
    """In sentences."""
    runs = list(points_of(rows, DECAY).values())
    sampled = [p for row in rows for p in row["points"] if p["coefficient"] is not None]
    refused = [p["reason"] for p in sampled if not p["calibrated"]]
    sentences = [
        f"{sum(map(groks, runs))} of {len(runs)} trainings with decay grok, and "
        f"{sum(groks(run) for arm in CONTROLS for run in points_of(rows, arm).values())} of the controls.",
        f"λ̂ was refused at {len(refused)} of {len(sampled)} readings"
        + (f", such as: {refused[0]}." if refused else "."),
    ]
    ahead = [claim.name for claim in judged if claim.name.endswith("warns") and claim.verdict == "held"]
    sentences.append(
        "Signals that lead with every seed and are silent in both controls: "
        + (f"{'; '.join(ahead)}." if ahead else "none.")
    )
    return tuple(sentences)
