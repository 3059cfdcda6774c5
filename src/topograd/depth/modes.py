"""Depths as users write them, and the modes that they name.

full                  every stage, every token
prefix:J              the first J of the stages that predict
path:1,3              some stages, skipping others
branches:1-4*3+1-2    several paths, pooled in log space with weights
wand                  leave early: wand:RULE[:NUMBER], by default wand:flip-rate:0.001; RULE is
                      sum-of-bounds or rival-gain (NUMBER: safety) or flip-rate (NUMBER: ε)
speculate             draft and verify, exact; the run's calibration says when to draft
speculate:N           drafts of N tokens, always
speculate:N:MARGIN    drafts of at most N tokens, while the first stage's margin is above MARGIN
speculate:lookup      drafts looked up in the text so far; needs no stages and no calibration
speculate:lookup+N    lookup first; where it finds nothing, drafts of N tokens by the first stage
"""

from __future__ import annotations

from typing import get_args

from topograd.depth.autotune import DraftRule
from topograd.depth.calibrate import Tuning
from topograd.depth.calibrate import load as load_calibration
from topograd.depth.calibration import Calibration
from topograd.depth.drafters import Drafter, FirstOf, LookupDrafter, PrefixDrafter
from topograd.depth.engine import Composed, Engine, Mode, Prefix
from topograd.depth.exit_rules import Rule, check_exits, thresholds
from topograd.depth.sampling import Sampling
from topograd.depth.speculation import Speculate
from topograd.depth.wand import Wand
from topograd.errors import ConfigError, RunError
from topograd.runs.session import Session
from topograd.topology.branches import parse_branches, parse_path

PRUNING_VOCAB = 8192
"""From this vocabulary on, the last head is read for the surviving candidates only (LOG.md)."""
MOST_DRAFT = 64


def engine_of(session: Session) -> Engine:
    """The session's model, laid out for decoding."""
    return Engine(session.stack, session.plan, session.config.model.context)


def mode_of(depth: str, session: Session, engine: Engine, sampling: Sampling) -> Mode:
    """The mode that `depth` names."""
    kind, _, rest = depth.partition(":")
    if kind == "full" and not rest:
        return Prefix(engine, None, sampling)
    if kind == "prefix":
        return Prefix(engine, int(_number(depth, rest, whole=True)) - 1, sampling)
    if kind == "path":
        return Composed(engine, {parse_path(rest): 1.0}, sampling)
    if kind == "branches":
        return Composed(engine, parse_branches(rest), sampling)
    if kind == "wand":
        check_exits(session.plan)
        return _wand(depth, rest, load_calibration(session)[0], engine, sampling)
    if kind == "speculate":
        return _speculate(depth, rest, session, engine, sampling)
    raise ConfigError(
        f"depth {depth!r} is unknown; use full, prefix:J, path:1,3, branches:1-4*3+1-2, wand or speculate"
    )


def default_depth(session: Session) -> str:
    """Speculation where the run is calibrated and it pays; else full. Both write the same."""
    try:
        _, tuning = load_calibration(session)
    except RunError:
        return "full"
    return "full" if tuning.rule is None else "speculate"


def speculation_of(engine: Engine, tuning: Tuning, sampling: Sampling) -> Mode:
    """What the tuning says: drafts, or full depth where drafting loses."""
    rule = tuning.rule if sampling.greedy else tuning.sampled
    if rule is None:
        return Prefix(engine, None, sampling)
    return Speculate(engine, rule, tuning.stage, sampling)


def _wand(depth: str, rest: str, calibration: Calibration, engine: Engine, sampling: Sampling) -> Wand:
    name, _, number = rest.partition(":")
    name = name or "flip-rate"
    rule: Rule | None = next((rule for rule in get_args(Rule) if rule == name), None)
    if rule is None:
        raise ConfigError(f"wand rule {name!r} is unknown; choose one of {', '.join(get_args(Rule))}")
    if not number:
        limits = thresholds(calibration, rule)
    elif rule == "flip-rate":
        limits = thresholds(calibration, rule, eps=_number(depth, number))
    else:
        limits = thresholds(calibration, rule, safety=_number(depth, number))
    bounds = calibration.gain.max if engine.vocab() >= PRUNING_VOCAB else None
    return Wand(engine, limits, sampling, bounds)


def _speculate(depth: str, rest: str, session: Session, engine: Engine, sampling: Sampling) -> Mode:
    word, plus, rest_of = rest.partition("+")
    if word == "lookup":
        drafters: list[Drafter] = [LookupDrafter(engine)]
        if plus:
            drafters.append(PrefixDrafter(engine, _rule(depth, rest_of)))
        return Speculate(engine, FirstOf(drafters), 0, sampling)
    check_exits(session.plan)
    if not rest:
        return speculation_of(engine, load_calibration(session)[1], sampling)
    return Speculate(engine, _rule(depth, rest), 0, sampling)


def _rule(depth: str, rest: str) -> DraftRule:
    longest, _, margin = rest.partition(":")
    count = int(_number(depth, longest, whole=True))
    if count > MOST_DRAFT:
        raise ConfigError(f"depth {depth!r} drafts {count} tokens; at most {MOST_DRAFT} make sense")
    return DraftRule(_number(depth, margin) if margin else 0.0, count)


def _number(depth: str, text: str, whole: bool = False) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"depth {depth!r} has {text!r} where {kind} belongs; see --help") from None
