"""`topograd calibrate`: measure when a run's tokens may leave early, which drafts pay, and fit its exit pool.

Every second window of the held-out text calibrates. What a rule then does is measured on the others, which
it has not seen: how often its tokens are full depth's, given the same text before them, and where they leave;
and what the pools of all exits gain in bits per byte.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from topograd.cli.console import (
    Json,
    ModelArgument,
    RuntimeFlag,
    WeightsFlag,
    grid,
    note,
    number,
    parse,
    show,
)
from topograd.cli.results import accuracy_text
from topograd.errors import DataError, RunError
from topograd.limits import BYTES, check_numbers

if TYPE_CHECKING:
    from topograd.data import Text
    from topograd.decode.calibration.measure import Calibration, Readings
    from topograd.decode.calibration.tune import Tuning
    from topograd.runs.session import LoadedTextRun


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure when a run's tokens may leave early and which drafts pay, in a runtime and a precision, and fit
    --depth pool and router; kept in its calibration.json, beside what was measured in others."""

    model: ModelArgument
    bytes: int = 200_000
    """Read at most this much held-out text, spaced evenly over it."""
    runtime: RuntimeFlag = None
    weights: WeightsFlag = "float32"
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, bytes=BYTES)


def run(argv: list[str]) -> int:
    args = parse(Calibrate, argv, "calibrate")
    from topograd.cli.progress import counted
    from topograd.convert.model_argument import resolve_model
    from topograd.decode.calibration.fit_pool import ExitStates, fit
    from topograd.decode.calibration.measure import Calibration, heldout_readings
    from topograd.decode.calibration.store import store
    from topograd.decode.calibration.tune import tune
    from topograd.decode.depths import engine_of
    from topograd.decode.engine import check_exits
    from topograd.decode.retrofitted import has_retrofit, open_retrofit
    from topograd.evaluation.exit_pools import measure
    from topograd.runs.session import open_session
    from topograd.runtime.choice import check_runtime

    check_runtime(args.runtime, args.weights)
    session = open_session(resolve_model(args.model))
    check_exits(session.plan)
    if not os.access(session.run.folder, os.W_OK):
        raise RunError(
            f"{session.run.folder} cannot be written, so nothing can be kept there", remedy="copy it first"
        )
    text = _text(session, args.bytes)
    engine = engine_of(session, args.runtime, args.weights)
    readings = heldout_readings(session, text, on_batch=counted("windows read"), engine=engine)
    calibrating, measuring = readings.split()
    calibration = Calibration.of(calibrating, session.step)
    note("measuring what drafts cost on this machine")
    tuning = tune(engine, text, open_retrofit(session) if has_retrofit(session) else None)
    note("fitting a pool of the exits")
    rows = range(len(text.inputs))
    pool = fit(ExitStates.read(session, text, rows[::2]))
    store(session, engine.runtime, calibration, tuning, pool)
    note(f"kept in {session.run.calibration_file}")
    results = {
        "run": str(session.run.folder),
        "runtime": engine.runtime.name,
        "weights": engine.runtime.precision,
        **_measured(calibration),
        "rules": rules(calibration, measuring),
        "tuning": _tuned(tuning),
        "pool": {
            "weights": pool.w.tolist(),
            **measure(session, ExitStates.read(session, text, rows[1::2]), pool),
        },
    }
    show(args.json, results, _head, _transitions, _exits, _rules, _pools, _drafts)
    return 0


def _text(session: LoadedTextRun, limit_bytes: int) -> Text:
    """Held-out text of at least one window for each half."""
    from topograd.runs.session import heldout_text

    text = heldout_text(session, None, limit_bytes)
    if len(text.inputs) < 2:
        raise DataError(
            f"the held-out text gives 1 window of {session.config.model.context} tokens",
            remedy=(
                "calibrating needs 2, one of them to measure on: give more --bytes, or train on more text"
            ),
        )
    return text


def rules(calibration: Calibration, measuring: Readings) -> list[dict[str, Any]]:
    """Every rule at its calibrated settings, and what it does on text that it has not seen."""
    from topograd.decode.calibration.measure import EPS
    from topograd.decode.calibration.policy import Rule, judged, thresholds

    rows = []
    for rule in get_args(Rule):
        for value in EPS if rule == "flip-rate" else (1.0,):
            setting = "eps" if rule == "flip-rate" else "safety"
            limits = thresholds(calibration, rule, **{setting: value})
            about = {"rule": rule, "number": value, "thresholds": list(limits)}
            rows.append(about | judged(measuring, limits))
    return rows


def _measured(calibration: Calibration) -> dict[str, Any]:
    """What was read, with stages counted from 1."""
    shift, gain, change = calibration.shift, calibration.gain, calibration.change_rate
    each = range(calibration.stages - 1)
    return {
        "step": calibration.step,
        "tokens": calibration.tokens,
        "transitions": [
            {"from": k + 1, "to": k + 2, "p99": shift.p99[k], "max": shift.max[k], "change_rate": change[k]}
            for k in each
        ],
        "rival_gain": [{"stage": k + 1, "p99": gain.p99[k], "max": gain.max[k]} for k in each],
        "agreement": list(calibration.agreement),
    }


def _tuned(tuning: Tuning) -> dict[str, Any]:
    """The drafters for greedy and for sampled text, null where drafting is off."""
    from topograd.decode.calibration.store import selection_dict

    return {
        "predicted_speedup": 1.0 if tuning.greedy is None else tuning.greedy.predicted,
        "greedy": selection_dict(tuning.greedy),
        "sampled": selection_dict(tuning.sampled),
        "seconds": tuning.costs.as_dict(),
    }


def _head(results: dict[str, Any]) -> str:
    return (
        f"{results['run']}: step {results['step']}, calibrated on {results['tokens']} tokens "
        f"for {results['runtime']} {results['weights']}"
    )


def _transitions(results: dict[str, Any]) -> Table:
    rows = results["transitions"]
    table = grid("How far a transition moves the logits", "stages", "p99 |Δ|", "max |Δ|", "top-1 changes")
    for row in rows:
        name = f"{row['from']} → {row['to']}"
        table.add_row(name, number(row["p99"], 2), number(row["max"], 2), accuracy_text(row["change_rate"]))
    return table


def _exits(results: dict[str, Any]) -> Table:
    table = grid("Each exit against the last stage", "stage", "p99 gain", "max gain", "top-1 agrees")
    for row, agreed in zip(results["rival_gain"], results["agreement"][:-1], strict=True):
        table.add_row(str(row["stage"]), number(row["p99"], 2), number(row["max"], 2), accuracy_text(agreed))
    return table


def _rules(results: dict[str, Any]) -> Table:
    rows = results["rules"]
    stages = len(rows[0]["exits"])
    title = "Leaving early, on text that was not calibrated on"
    table = grid(title, "rule", "margin above", "top-1 agrees", f"leave after 1..{stages}, %")
    for row in rows:
        limits = " ".join(f"{number(limit, 2):>5}" for limit in row["thresholds"])
        shares = " ".join(f"{100 * share:5.1f}" for share in row["exits"])
        table.add_row(f"{row['rule']}:{row['number']:g}", limits, accuracy_text(row["agreement"]), shares)
    return table


def _pools(results: dict[str, Any]) -> Table:
    pool = results["pool"]
    title = (
        f"All exits pooled, on text that was not fitted to ({pool['bpb']['last']:.4f} bits per byte alone)"
    )
    table = grid(title, "depth", "bits per byte", "gain", "95 % of windows drawn again")
    for name, gain in pool["gain"].items():
        low, high = pool["interval"][name]
        table.add_row(name, f"{pool['bpb'][name]:.4f}", f"{gain:+.4f}", f"{low:+.4f} to {high:+.4f}")
    return table


def _drafts(results: dict[str, Any]) -> str:
    tuning = results["tuning"]
    if tuning["greedy"] is None:
        return "Drafts: off; none is predicted to be faster than full depth on this machine."
    return (
        f"Drafts: by {' and '.join(tuning['greedy']['drafters'])}, where they pay; "
        f"{tuning['predicted_speedup']:.2f} times full depth is predicted."
    )
