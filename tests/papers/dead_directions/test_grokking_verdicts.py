"""Phases, the fall, leads and false alarms of made-up trainings whose answer is known."""

import math
from typing import Any

import pytest

from papers.dead_directions import grokking_verdicts as v

STEPS = range(0, 2000, 50)
BREAK, FALL = 600, 1000
"""Where signals change, and where the test loss falls."""


def training(arm: str, seed: int = 0, **changed: Any) -> dict[str, Any]:
    """Fitted from step 100 on; with decay the norm turns at BREAK and the test loss falls at FALL."""
    points = []
    for step in STEPS:
        late = arm == v.DECAY
        small = 1e-3 * math.exp(-step / 100)
        point: dict[str, Any] = {
            "step": step,
            "train_accuracy": 0.2 if step < 100 else 1.0,
            "test_accuracy": None if arm == v.ALL_PAIRS else 0.96 if late and step >= 1500 else 0.02,
            "test_loss": None if arm == v.ALL_PAIRS else 1.0 if late and step >= FALL else 8.0,
            "train_loss": math.exp(-step / 500),
            "norm": 10 * math.exp((step if not late or step < BREAK else 2 * BREAK - step) / 1000),
            "sigma": 1.0,
            "effective_rank": 20.0,
            "schur": 0.5,
            "empirical": small**2,
            "expected": small,
            "coefficient": 50.0 if step % 250 == 0 else None,
            "calibrated": step % 250 == 0,
            "reason": None,
        }
        point |= {name: make(step) for name, make in changed.items()}
        point["phase"] = v.phase_of(point["train_accuracy"], point["test_accuracy"])
        points.append(point)
    return {"arm": arm, "seed": seed, "rank": 4, "points": points}


def rows(**changed: Any) -> list[dict[str, Any]]:
    return [training(arm, seed, **changed) for seed in range(3) for arm in (v.DECAY, *v.CONTROLS)]


def verdicts(found: list[dict[str, Any]]) -> dict[str, str]:
    return {claim.name: claim.verdict for claim in v.claims(found, v.spoken(found))}


def test_where_it_fits_falls_and_generalises() -> None:
    points = training(v.DECAY)["points"]
    start, low = v.fitted(points), v.fall(points)
    assert start is not None
    assert low is not None
    assert (points[start]["step"], points[low]["step"]) == (100, FALL)
    assert v.groks(points)
    assert not v.groks(training(v.NO_DECAY)["points"])
    assert not v.groks(training(v.ALL_PAIRS)["points"]), "nothing was left to generalise to"
    early = training(v.DECAY, test_accuracy=lambda step: 1.0 if step >= 150 else 0.02)["points"]
    assert not v.groks(early), "less than twice the steps to fit"


def test_a_change_point_is_seen_after_it_lies_there() -> None:
    points = training(v.DECAY)["points"]
    found = v.warned(points, "norm")
    assert found.at == pytest.approx(BREAK, abs=50)
    assert found.seen is not None
    assert BREAK < found.seen <= BREAK + 250
    assert found.turn == BREAK + 100, "5 % behind the peak"
    assert v.lead(points, found.seen) == FALL - found.seen
    assert math.isnan(v.lead(training(v.NO_DECAY)["points"], 300)), "nothing fell"
    assert v.warned(points, "sigma") == v.Warned(None, None, None)


def test_a_signal_that_leads_and_is_silent_in_controls_warns() -> None:
    said = verdicts(rows())
    assert said["it groks"] == said["no grokking without decay"] == "held"
    assert said["a change point of weight norm warns"] == said["a turn of weight norm warns"] == "held"
    assert said["a change point of σ_r of the stream warns"] == "failed", "it never speaks"
    assert said["weights grow while it memorises (§12.1)"] == "held"
    assert said["weights shrink when it generalises (§12.1)"] == "held"


def test_a_signal_that_also_speaks_in_a_control_does_not_warn() -> None:
    turned = {"norm": lambda step: 10 * math.exp(-abs(step - BREAK) / 1000)}
    found = rows(**turned)
    said = verdicts(found)
    assert said["a turn of weight norm warns"] == said["a change point of weight norm warns"] == "failed"
    table = v.event_table(found, v.spoken(found))
    (norm,) = [cells for cells in table.rows if cells[0] == "weight norm"]
    assert norm[4] == "3 and 3 of 3"
    assert norm[3] == "+350, +350, +350"


def test_corollary_39_on_a_training_that_memorises() -> None:
    """(1 - p)² and p(1 - p) of a loss that falls: both vanish."""
    said = verdicts(rows())
    assert said["the empirical Fisher collapses (Corollary 39)"] == "held"
    assert said["the expected Fisher stays (Corollary 39)"] == "failed"
    assert said["empirical goes as expected squared (ours)"] == "held"


def test_coefficients_that_are_not_calibrated_do_not_count() -> None:
    falling = {"coefficient": lambda step: 50 * math.exp(-step / 500) if step % 250 == 0 else None}
    found = rows(**falling)
    assert v.fallen(found[0]["points"]) == pytest.approx((1750 - 250) / 500)
    refused = rows(**falling, calibrated=lambda step: False, reason=lambda step: "too far")
    assert math.isnan(v.fallen(refused[0]["points"]))
    assert verdicts(refused)["λ̂ falls from memorisation to generalisation"].startswith("undecided")
    assert "refused at 72 of 72 readings, such as: too far" in v.findings(refused, ())[1]
    assert v.phase_table(refused).rows[0][-1] == "8 of 8"


def test_trainings_that_never_fit_decide_nothing() -> None:
    found = rows(train_accuracy=lambda step: 0.1)
    judged = v.claims(found, v.spoken(found))
    said = {claim.name: (claim.measured, claim.verdict) for claim in judged}
    assert said["a turn of weight norm warns"] == ("0 of 0 seeds", "undecided at this size")
    assert said["it groks"][1] == said["no grokking without decay"][1] == "undecided at this size"
    assert said["λ̂ falls further than without grokking"][0] == "not known with every seed"
    assert all(value == value for claim in judged for value in claim.values), "no nan"
