"""The file calibration.json of a run: an entry for each runtime and precision, bound to weights and exits.

    {"format", "version", "weights", "exits", "entries": {"native int8":
         {"calibration": the numbers of `measure.Calibration`, a threshold of infinity as null,
          "tuning": {"greedy", "sampled": drafters, policy and predicted speedup, or null; "costs"}}},
     "pool": what `exit_pool.ExitWeights` has, or null}

`weights` is the digest of the weights that were read, `exits` that of the adapter whose translators were.
What drafts cost and how often they are right is another in int8 than in float32, so no entry serves another
precision or runtime.

Version 2 (0.3) kept one calibration, of float32, and did not say of which runtime: it is read for each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from topograd.decode.calibration.measure import EPS, Calibration, PositionCosts
from topograd.decode.calibration.policy import MAX_STEPS, Acceptance, ExpectedGainPolicy
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.engine import check_exits
from topograd.decode.exit_pool import ExitPool, ExitWeights, Kind
from topograd.decode.retrofitted import exits_digest
from topograd.errors import RunError
from topograd.files import dump_json, read_json
from topograd.reading import build_dataclass
from topograd.runs.session import LoadedTextRun
from topograd.runtime.protocol import Runtime

FORMAT = "topograd-calibration"
VERSION = 3
ANY_RUNTIME = "float32"
"""The entry of a file of 0.3."""
CALIBRATION = "calibration"
"""What an open run remembers it by."""


def store(
    session: LoadedTextRun,
    runtime: Runtime,
    calibration: Calibration,
    tuning: Tuning,
    pool: ExitWeights | None = None,
) -> None:
    """Keep a calibration with its run, whole or not at all, beside those of other precisions and runtimes.

    Those of other weights or exits are dropped. A pool is of the weights alone, so one serves them all.
    """
    own = {"weights": session.weights, "exits": exits_digest(session)}
    entries, kept = {}, None
    with suppress(RunError):
        file = _read(session, "")
        entries, kept = (file.entries, file.pool) if file.about == own else ({}, None)
    entries |= {entry_name(runtime): (calibration, tuning)}
    values: dict[str, Any] = {"format": FORMAT, "version": VERSION, **own}
    values["entries"] = {
        name: {
            "calibration": calibration_dict(read),
            "tuning": {
                "greedy": selection_dict(tuned.greedy),
                "sampled": selection_dict(tuned.sampled),
                "costs": tuned.costs.as_dict(),
            },
        }
        for name, (read, tuned) in entries.items()
    }
    values["pool"] = kept if pool is None else pool.as_dict()
    session.run.manifest.bind(session.run.calibration_file.name, dump_json(values))
    session.remembered.pop(CALIBRATION, None)


def entry_name(runtime: Runtime) -> str:
    """What a calibration of this runtime and its precision is called in the file."""
    return f"{runtime.name} {runtime.precision}"


def load(session: LoadedTextRun, runtime: Runtime) -> tuple[Calibration, Tuning]:
    """The run's calibration for a runtime and its precision, read once for an open run.

    RunError where there is none, with the `setting` "precision" where there are others, or of other weights.
    """
    file, again = _file(session), _again(session)
    wanted = entry_name(runtime)
    found = file.entries.get(wanted)
    if found is None and runtime.precision == "float32":
        found = file.entries.get(ANY_RUNTIME)
    if found is None:
        problem = f"{session.run.folder} is calibrated for {', '.join(file.entries)}, not for {wanted}"
        again += f" --runtime {runtime.name} --weights {runtime.precision}"
        raise RunError(problem, setting="precision", given=wanted, remedy=again)
    read, exits = found[0], len(session.plan.predicting())
    of = f"step {read.step} and {read.stages} stages, the weights are of step {session.step} and {exits}"
    for name, given, own in (("step", read.step, session.step), ("stages", read.stages, exits)):
        if given != own:
            problem = f"the calibration of {session.run.folder} is of {of}"
            raise RunError(problem, setting=name, given=given, remedy=again)
    _check_about(session, file)
    return found


def _file(session: LoadedTextRun) -> _File:
    """What the run keeps, read once; RunError where there is nothing."""
    again = _again(session)
    if not session.run.calibration_file.exists():
        raise RunError(f"{session.run.folder} is not calibrated", setting="calibration", remedy=again)
    return session.once(CALIBRATION, lambda: _read(session, again))


def _check_about(session: LoadedTextRun, file: _File) -> None:
    for name, own, what in (
        ("weights", session.weights, "other weights"),
        ("exits", exits_digest(session), "other exits (draft/)"),
    ):
        if file.about[name] != own:
            problem = f"the calibration of {session.run.folder} is of {what}"
            raise RunError(problem, setting=name, given=file.about[name], remedy=_again(session))


def open_pool(session: LoadedTextRun, kind: Kind) -> ExitPool:
    """A pool of the run's exits; RunError where it is one that is fitted and none was."""
    check_exits(session.plan)
    if kind == "shrinkage":
        return ExitPool(kind, session.plan, None)
    file, again = _file(session), _again(session)
    _check_about(session, file)
    if file.pool is None:
        problem = f"the calibration of {session.run.folder} has no pool"
        raise RunError(problem, setting="pool", given=None, remedy=again)
    return ExitPool(kind, session.plan, _pool_of(file.pool, session, again))


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
        message = f"{session.run.calibration_file} is damaged ({problem})"
        raise RunError(message, setting="pool", given=session.run.calibration_file, remedy=again) from None


def _again(session: LoadedTextRun) -> str:
    return f"run: topograd calibrate {session.run.folder}"


@dataclass(frozen=True)
class _File:
    """What a run keeps."""

    about: dict[str, Any]
    """The digests of the weights and of the exits that were read."""
    entries: dict[str, tuple[Calibration, Tuning]]
    pool: Any
    """As JSON holds it; None where none was fitted."""


def _read(session: LoadedTextRun, again: str) -> _File:
    """The file's values, and what they say."""
    file = session.run.calibration_file
    session.run.manifest.verify(file.name)
    try:
        values = read_json(file)
        if not isinstance(values, dict):
            raise RunError("it is no JSON object")
        if values.get("format") != FORMAT:
            raise RunError(f"it does not name the format {FORMAT!r}")
        version = values.get("version")
        if version not in (2, VERSION):
            raise RunError(f"it has version {version!r}, this program reads 2 and {VERSION}")
        each = values["entries"] if version == VERSION else {ANY_RUNTIME: values}
        entries = {}
        for name, entry in each.items():
            tuned = entry["tuning"]
            greedy, sampled = _selection_of(tuned["greedy"]), _selection_of(tuned["sampled"])
            tuning = Tuning(greedy, sampled, _costs_of(tuned["costs"]))
            entries[str(name)] = calibration_of(entry["calibration"]), tuning
        about = {"weights": values["weights"], "exits": values["exits"]}
        return _File(about, entries, values.get("pool"))
    except (RunError, KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as problem:
        message = f"{file} is damaged ({problem})"
        raise RunError(message, setting="calibration", given=file, remedy=again) from None


# The readings


def calibration_dict(calibration: Calibration) -> dict[str, Any]:
    """Plain JSON."""
    thresholds = {
        str(eps): [None if math.isinf(tau) else tau for tau in each]
        for eps, each in zip(EPS, calibration.flip_thresholds, strict=True)
    }
    bounds = {"shift": vars(calibration.shift), "gain": vars(calibration.gain)}
    return {**vars(calibration), **bounds, "flip_thresholds": thresholds}


def calibration_of(values: Mapping[str, Any]) -> Calibration:
    """What `calibration_dict` gave. `_read` says of any error here that the file is damaged."""
    flips = values["flip_thresholds"]
    thresholds = [[math.inf if tau is None else tau for tau in flips[str(eps)]] for eps in EPS]
    calibration: Calibration = build_dataclass(Calibration, {**values, "flip_thresholds": thresholds})
    return calibration


# The tuning


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


def _selection_of(values: Any) -> DrafterSelection | None:
    if values is None:
        return None
    acceptance = {
        str(name): Acceptance(**{part: row and tuple(row) for part, row in given.items()})
        for name, given in values["acceptance"].items()
    }
    steps, vocabulary = values.get("steps", MAX_STEPS), values.get("vocabulary")  # 0.4 kept neither at first
    if not all(type(number) is int and number >= 0 for number in (steps - 1, *(vocabulary or ()))):
        raise ValueError("its steps or tokens are no whole numbers")
    policy = ExpectedGainPolicy(acceptance, _costs_of(values["costs"]), float(values["speedup"]), steps)
    drafters, predicted = tuple(map(str, values["drafters"])), float(values["predicted"])
    return DrafterSelection(drafters, policy, predicted, None if vocabulary is None else tuple(vocabulary))


def _costs_of(values: Any) -> PositionCosts:
    verify = {int(size): seconds for size, seconds in values["verify"].items()}
    return PositionCosts(**{**values, "verify": verify})
