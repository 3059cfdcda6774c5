"""The file calibration.json of a run: versioned, verified, bound to weights and exits.

    {"format", "version", "weights", "exits",
     "calibration": the numbers of `measure.Calibration`, a threshold of infinity as null,
     "tuning": {"greedy", "sampled": drafters, policy and predicted speedup, or null; "costs"},
     "pool": what `exit_pool.ExitWeights` has, or null}

`weights` is the digest of the weights that were read, `exits` that of the adapter whose translators were.

Version 1 (up to 0.2) is converted. Where it has a margin rule for a prefix (draft while the margin is above a
threshold), its stage becomes a drafter whose acceptances are those of the margins that the file kept; its
cost of a round with d drafts, (d + 1) draft + deep(d + 1), becomes verify(m) = deep(m) + draft, keep = draft.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import torch

from topograd.decode.calibration.measure import EPS, Bounds, Calibration, PositionCosts
from topograd.decode.calibration.policy import MAX_STEPS, Acceptance, ExpectedGainPolicy
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.engine import check_exits
from topograd.decode.exit_pool import ExitPool, ExitWeights, Kind
from topograd.decode.retrofitted import exits_digest
from topograd.errors import RunError
from topograd.files import dump_json, read_json
from topograd.runs.session import LoadedTextRun

FORMAT = "topograd-calibration"
VERSION = 2
CALIBRATION = "calibration"
"""What an open run remembers it by."""


def store(
    session: LoadedTextRun, calibration: Calibration, tuning: Tuning, pool: ExitWeights | None = None
) -> None:
    """Keep a calibration with its run, whole or not at all, with the weights that it is of."""
    values = {
        "format": FORMAT,
        "version": VERSION,
        "weights": session.weights,
        "exits": exits_digest(session),
        "calibration": calibration_dict(calibration),
        "tuning": tuning_dict(tuning),
        "pool": None if pool is None else pool.as_dict(),
    }
    session.run.manifest.bind(session.run.calibration_file.name, dump_json(values))
    session.remembered.pop(CALIBRATION, None)


def load(session: LoadedTextRun) -> tuple[Calibration, Tuning]:
    """The run's calibration, read once for an open run; RunError where it has none of these weights."""
    again = f"run: topograd calibrate {session.run.folder}"
    if not session.run.calibration_file.exists():
        raise RunError(f"{session.run.folder} is not calibrated", setting="calibration", remedy=again)
    values, calibration, tuning = session.once(CALIBRATION, lambda: _read(session, again))
    exits = len(session.plan.predicting())
    if calibration.step != session.step or calibration.stages != exits:
        raise RunError(
            f"the calibration of {session.run.folder} is of step {calibration.step} and "
            f"{calibration.stages} stages, the weights are of step {session.step} and {exits}",
            setting="step" if calibration.step != session.step else "stages",
            given=calibration.step if calibration.step != session.step else calibration.stages,
            remedy=again,
        )
    weights = values.get("weights", session.weights)  # versions before 0.2 did not keep them
    for name, given, own, what in (
        ("weights", weights, session.weights, "other weights"),
        ("exits", values.get("exits"), exits_digest(session), "other exits (draft/)"),
    ):
        if given != own:
            raise RunError(
                f"the calibration of {session.run.folder} is of {what}",
                setting=name,
                given=given,
                remedy=again,
            )
    return calibration, tuning


def open_pool(session: LoadedTextRun, kind: Kind) -> ExitPool:
    """A pool of the run's exits; RunError where it is one that is fitted and none was."""
    check_exits(session.plan)
    if kind == "shrinkage":
        return ExitPool(kind, session.plan, None)
    load(session)  # which says what does not fit
    again = f"run: topograd calibrate {session.run.folder}"
    values = session.once(CALIBRATION, lambda: _read(session, again))[0].get("pool")
    if values is None:
        raise RunError(
            f"the calibration of {session.run.folder} has no pool", setting="pool", given=None, remedy=again
        )
    return ExitPool(kind, session.plan, _pool_of(values, session, again))


def _pool_of(values: Any, session: LoadedTextRun, again: str) -> ExitWeights:
    try:
        found = ExitWeights(**{name: torch.tensor(numbers) for name, numbers in values.items()})
        exits, width = len(session.plan.predicting()), session.stack.width
        shapes = [(exits,), (exits,), (len(found.a), exits * width), (len(found.a),), (exits, len(found.a))]
        tensors = (found.w, found.c, found.A, found.a, found.B)
        if [tuple(t.shape) for t in tensors] != shapes or not all(t.isfinite().all() for t in tensors):
            raise ValueError("its pool has other shapes than the run, or numbers that are not finite")
        return found
    except (TypeError, ValueError, AttributeError, RuntimeError) as problem:
        raise RunError(
            f"{session.run.calibration_file} is damaged ({problem})",
            setting="pool",
            given=session.run.calibration_file,
            remedy=again,
        ) from None


def _read(session: LoadedTextRun, again: str) -> tuple[dict[str, Any], Calibration, Tuning]:
    """The file's values, and what they say."""
    file = session.run.calibration_file
    session.run.manifest.verify(file.name)
    try:
        values = read_json(file)
        if not isinstance(values, dict):
            raise RunError("it is no JSON object")
        inner = values.get("calibration")
        about = values if "format" in values else inner if isinstance(inner, dict) else {}  # version 1
        if about.get("format") != FORMAT:
            raise RunError(f"it does not name the format {FORMAT!r}")
        if about.get("version") not in (1, VERSION):
            raise RunError(f"it has version {about.get('version')!r}, this program reads 1 and {VERSION}")
        calibration = calibration_of(inner)
        tuning = values["tuning"]
        return values, calibration, tuning_of(tuning if about is values else _from_version_1(tuning, inner))
    except (RunError, KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as problem:
        raise RunError(
            f"{file} is damaged ({problem})", setting="calibration", given=file, remedy=again
        ) from None


# The readings


def calibration_dict(calibration: Calibration) -> dict[str, Any]:
    """Plain JSON."""
    thresholds = {
        str(eps): [None if math.isinf(tau) else tau for tau in each]
        for eps, each in zip(EPS, calibration.flip_thresholds, strict=True)
    }
    bounds = {"shift": vars(calibration.shift), "gain": vars(calibration.gain)}
    return {**vars(calibration), **bounds, "flip_thresholds": thresholds}


def calibration_of(values: object) -> Calibration:
    """What `calibration_dict` gave; anything else raises RunError."""
    stages = _whole(values, "stages", 2)
    exits = stages - 1
    bounds = {
        name: Bounds(*(_numbers(_field(_field(values, name), part), name, exits) for part in ("p99", "max")))
        for name in ("shift", "gain")
    }
    flips = _field(values, "flip_thresholds")
    return Calibration(
        step=_whole(values, "step", 0),
        stages=stages,
        tokens=_whole(values, "tokens", 1),
        **bounds,
        change_rate=_numbers(_field(values, "change_rate"), "change_rate", exits, high=1),
        agreement=_numbers(_field(values, "agreement"), "agreement", stages, high=1),
        flip_thresholds=tuple(
            _numbers(_field(flips, str(eps)), "flip_thresholds", exits, null=math.inf) for eps in EPS
        ),
    )


def _damaged(name: str, given: object, allowed: str) -> RunError:
    return RunError(setting=name, given=given, allowed=allowed, remedy="calibrate again")


def _field(values: object, name: str) -> Any:
    if not isinstance(values, Mapping) or name not in values:
        raise _damaged(name, None, "given")
    return values[name]


def _whole(values: object, name: str, least: int) -> int:
    value = _field(values, name)
    if type(value) is not int or value < least:
        raise _damaged(name, value, f"a whole number of at least {least}")
    return value


def _numbers(
    values: object, name: str, count: int, *, high: float = sys.float_info.max, null: float | None = None
) -> tuple[float, ...]:
    """`count` numbers of 0..high. Where `null` is given, null stands for it."""
    if not isinstance(values, list) or len(values) != count:
        raise _damaged(name, values, f"a list of {count} numbers")
    for value in values:
        fits = null is not None if value is None else type(value) in (int, float) and 0 <= value <= high
        if not fits:
            raise _damaged(name, value, f"a number of 0..{high:g}")
    return tuple(null if value is None and null is not None else float(value) for value in values)


# The tuning


def tuning_dict(tuning: Tuning) -> dict[str, Any]:
    """Plain JSON."""
    return {
        "greedy": selection_dict(tuning.greedy),
        "sampled": selection_dict(tuning.sampled),
        "costs": tuning.costs.as_dict(),
    }


def selection_dict(selection: DrafterSelection | None) -> dict[str, Any] | None:
    """Plain JSON of drafters that pay; None where none does."""
    if selection is None:
        return None
    policy = selection.policy
    return {
        "drafters": list(selection.drafters),
        "predicted": selection.predicted,
        "speedup": policy.speedup,
        "steps": policy.steps,
        "vocabulary": None if selection.vocabulary is None else list(selection.vocabulary),
        "costs": policy.costs.as_dict(),
        "acceptance": {name: vars(rates) for name, rates in policy.acceptance.items()},
    }


def tuning_of(values: Any) -> Tuning:
    """What `tuning_dict` gave."""
    greedy, sampled = (_selection_of(values[name]) for name in ("greedy", "sampled"))
    return Tuning(greedy, sampled, _costs_of(values["costs"]))


def _selection_of(values: Any) -> DrafterSelection | None:
    if values is None:
        return None
    acceptance = {}
    for name, given in values["acceptance"].items():
        bounds, rates = (tuple(map(float, given[part])) for part in ("bounds", "rates"))
        shares = None if given["shares"] is None else tuple(map(float, given["shares"]))
        acceptance[str(name)] = Acceptance(bounds, rates, shares)
    steps = _whole({"steps": MAX_STEPS, **values}, "steps", 1)  # 0.4 kept neither these nor a vocabulary
    policy = ExpectedGainPolicy(acceptance, _costs_of(values["costs"]), float(values["speedup"]), steps)
    vocabulary = values.get("vocabulary")
    if vocabulary is not None:
        vocabulary = tuple(_whole({"token": token}, "token", 0) for token in vocabulary)
    return DrafterSelection(
        tuple(map(str, values["drafters"])), policy, float(values["predicted"]), vocabulary
    )


def _costs_of(values: Any) -> PositionCosts:
    verify = {int(size): float(seconds) for size, seconds in values["verify"].items()}
    rest = {name: float(values[name]) for name in ("draft", "keep", "uneven")}
    return PositionCosts(verify, **rest, start=float(values.get("start", 0.0)))


def _from_version_1(values: Any, calibration: Any) -> dict[str, Any]:
    """A tuning of version 1 in today's form."""
    stage, draft = int(values["stage"]), float(values["costs"]["draft"])
    deep = {size: seconds + draft for size, seconds in values["costs"]["deep"].items()}
    costs = {"verify": deep, "draft": 0.0, "keep": draft, "uneven": 0.0}
    sample = calibration["sample"]
    margins = Acceptance.of(sample["margins"][stage], sample["agrees"][stage])
    by_margin = {
        "drafters": [f"stage {stage + 1}"],
        "predicted": values["predicted"],
        "speedup": max(float(values["predicted"]), 1.0),
        "costs": costs,
        "acceptance": {f"stage {stage + 1}": vars(margins)},
    }
    converted: dict[str, Any] = {"costs": costs}
    for name, rule, drafting in (("greedy", "rule", "drafting"), ("sampled", "sampled", "sampled_drafting")):
        converted[name] = by_margin if values[rule] is not None else None
        if (choice := values.get(drafting)) is not None:
            policy = choice["policy"]
            converted[name] = {
                "drafters": choice["drafters"],
                "predicted": choice["predicted"],
                "speedup": policy["speedup"],
                "costs": {
                    "verify": policy["costs"]["deep"],
                    "draft": policy["costs"]["draft"],
                    "keep": 0.0,
                    "uneven": 0.0,
                },
                "acceptance": {who: {**a, "shares": None} for who, a in policy["acceptance"].items()},
            }
    return converted
