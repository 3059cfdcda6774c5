"""Depth strings and the decode strategies that they name.

full                  every stage, every token
prefix:J              the first J of the stages that predict
path:1,3              some stages, skipping others
branches:1-4*3+1-2    several paths, pooled in log space with weights
pool, router          every exit, pooled with the weights that `topograd calibrate` fitted (`exit_pool.py`)
shrinkage             every exit, pooled by how sure it is
wand                  leave early: wand:RULE[:NUMBER], by default wand:flip-rate:0.001; RULE is
                      sum-of-bounds or rival-gain (NUMBER: safety) or flip-rate (NUMBER: ε)
speculate             draft and verify, exact; the run's calibration says who drafts and when, lookup where
                      it has none of this runtime and precision
speculate:WHO+WHO     drafts by these, at each place by the one whose guess is worth most
                      (`calibration/policy.py`):
    N, N:MARGIN       at most N tokens by the first stage, while its margin is above MARGIN
    lookup            what followed the last tokens in the text so far; needs no stages and no calibration
    table             what followed them in the model's own text (`topograd retrofit`)
    draft             a draft stage (`topograd retrofit`)
    FOLDER            another run, smaller and with the same tokenizer; or a folder that retrofit made

At most one of the drafters of a combination computes its drafts (N, draft, a run). Where the run has a draft
stage, N and a run guess the tokens of its vocabulary only; N@all, FOLDER@all guess all tokens.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from topograd.data.digest_cache import remembered_sha256
from topograd.decode.engine import Engine, check_exits
from topograd.decode.strategies import DecodeStrategy, FixedDepth, PathEnsemble
from topograd.errors import ConfigError, RunError
from topograd.runs.adapter import is_adapter
from topograd.runs.session import LoadedTextRun, open_session
from topograd.runtime.choice import runtime_of
from topograd.runtime.native.kept import keep, open_kept, place_of
from topograd.runtime.native.runtime import NativeRuntime
from topograd.runtime.protocol import Runtime
from topograd.runtime.quantize import Precision, check_precision, load_weights, weights_file
from topograd.topology.branches import parse_branches, parse_path

if TYPE_CHECKING:
    from torch import Tensor

    from topograd.decode.calibration.measure import Calibration, PositionCosts
    from topograd.decode.calibration.policy import Rule
    from topograd.decode.calibration.tune import Tuning
    from topograd.decode.drafters import AutoregressiveDrafter, LookupDrafter
    from topograd.decode.retrofitted import Retrofitted
    from topograd.decode.wand import Wand
    from topograd.nn.translator import Translator

ALL = "@all"
"""Behind a drafter that is to guess all tokens."""
DRAFT = "draft"
"""The folder of a run's own adapter."""
PRUNING_VOCAB = 8192
"""From this vocabulary on, the last head is read for the surviving candidates only (docs/results)."""


def engine_of(session: LoadedTextRun, runtime: str | None = None, weights: str = "float32") -> Engine:
    """The session's model, laid out for decoding, in a runtime and a precision (`runtime/choice.py`)."""
    kept = weights_file(session.run.folder, weights)
    file = kept if weights != "float32" and kept.exists() else None
    precision, context = check_precision(weights), session.config.model.context
    exits = partial(_exits, session)
    place = _place(session, runtime, precision, file)
    if place is not None and (packed := open_kept(place, precision, lambda: session.stack)) is not None:
        return Engine(None, session.plan, context, packed, exits)
    made = None if file is None else load_weights(file, precision, session.weights)
    chosen = runtime_of(session.stack, runtime, weights, made)
    engine = Engine(session.stack, session.plan, context, chosen, exits)
    if place is not None and isinstance(chosen, NativeRuntime):
        keep(chosen, engine.plan, place)
    return engine


def _place(
    session: LoadedTextRun, runtime: str | None, precision: Precision, file: Path | None
) -> Path | None:
    """Where the packed weights of a run are kept; None where they are not for sure those of its files."""
    if runtime not in (None, "native") or not session.untouched:
        return None
    heads = [planned.head for planned in session.plan.stages if planned.predicts]
    topology = session.plan.topology
    content = [session.weights, session.config.model.to_dict(), topology.layers, topology.heads, heads]
    return place_of([*content, None if file is None else remembered_sha256(file)], precision)


def _exits(session: LoadedTextRun) -> Mapping[int, Translator]:
    """What the exits of a run are read through."""
    if not is_adapter(session.run.folder / DRAFT):
        return {}
    from topograd.decode.retrofitted import open_exits

    return open_exits(session)


def strategy_of(
    depth: str,
    session: LoadedTextRun,
    engine: Engine,
    greedy: bool = True,
    draft: Path | str | None = None,
    costs: Callable[[], PositionCosts] | None = None,
) -> DecodeStrategy:
    """The strategy that `depth` names, for greedy or for sampled text, which may have other drafters.

    `draft` is the folder of the draft stage, if it is not the run's own; `costs` are the host's, where drafts
    are chosen without a calibration.
    """
    check_depth(depth)
    kind, _, rest = depth.partition(":")
    if kind == "full":
        return FixedDepth(engine)
    if kind == "prefix":
        return FixedDepth(engine, int(_number(depth, rest, whole=True)) - 1)
    if kind == "path":
        return PathEnsemble(engine, {parse_path(rest): 1.0})
    if kind == "branches":
        return PathEnsemble(engine, parse_branches(rest))
    from topograd.decode.exit_pool import PooledExits, kind_of  # here and below torch is needed

    if (pooled := kind_of(depth)) is not None:
        from topograd.decode.calibration.store import open_pool

        return PooledExits(engine, open_pool(session, pooled))
    if kind == "wand":
        from topograd.decode.calibration.store import load as load_calibration

        check_exits(session.plan)
        return _wand(depth, rest, load_calibration(session, engine.runtime)[0], engine)
    return _speculate(depth, rest, session, engine, greedy, draft, costs)


def check_depth(depth: str) -> None:
    """Raise ConfigError for a depth that no model has."""
    kind, _, rest = depth.partition(":")
    if kind == "prefix":
        if (exit_ := int(_number(depth, rest, whole=True))) < 1:
            problem, remedy = f"exit {exit_} does not exist", "exits are counted from 1"
            raise ConfigError(problem, setting="exit", given=exit_, remedy=remedy)
    elif kind == "path":
        parse_path(rest)
    elif kind == "branches":
        parse_branches(rest)
    elif kind == "wand":
        _wand_rule(depth, rest)
    elif kind == "speculate":
        for word in rest.split("+") if rest else ():
            _check_drafter(depth, word)
    elif depth not in ("full", "pool", "router", "shrinkage"):
        known = "full, prefix:J, path:1,3, branches:1-4*3+1-2, pool, router, shrinkage, wand or speculate"
        remedy = f"use {known}, wand:RULE:NUMBER or speculate:WHO+WHO"
        raise ConfigError(f"depth {depth!r} is unknown", setting="depth", given=depth, remedy=remedy)


def default_depth(session: LoadedTextRun, runtime: Runtime) -> str:
    """Speculation where the run is calibrated for this and it pays; else full. Both write the same."""
    if not session.run.calibration_file.exists():
        return "full"
    from topograd.decode.calibration.store import load as load_calibration

    try:
        _, tuning = load_calibration(session, runtime)
    except RunError as problem:
        _say_other_precision(session, problem, "full depth")
        return "full"
    return "full" if tuning.greedy is None else "speculate"


def _say_other_precision(session: LoadedTextRun, problem: RunError, instead: str) -> None:
    """A line, once for an open run, where it is calibrated for other precisions or runtimes alone."""
    if problem.setting == "precision":
        warn = logging.getLogger("topograd").warning
        session.once(str(problem), lambda: warn("topograd: %s; this is %s", problem, instead))


def speculation_of(
    session: LoadedTextRun, engine: Engine, tuning: Tuning, greedy: bool = True
) -> DecodeStrategy:
    """Speculation by the drafters that were selected, or full depth where none pays."""
    import torch

    from topograd.decode.calibration.tune import drafter_of
    from topograd.decode.speculation import Speculate

    selection = tuning.greedy if greedy else tuning.sampled
    if selection is None:
        return FixedDepth(engine)
    tokens = None if selection.vocabulary is None else torch.tensor(selection.vocabulary)
    own = partial(_retrofitted, session, None)
    drafters = [drafter_of(name, engine, own, tokens) for name in selection.drafters]
    return Speculate(engine, drafters, policy=selection.policy)


def _wand(depth: str, rest: str, calibration: Calibration, engine: Engine) -> Wand:
    from topograd.decode.calibration.policy import thresholds
    from topograd.decode.wand import Wand

    rule, given = _wand_rule(depth, rest)
    bounds = calibration.gain.max if engine.vocab >= PRUNING_VOCAB else None
    return Wand(engine, thresholds(calibration, rule, **given), bounds)


def _wand_rule(depth: str, rest: str) -> tuple[Rule, dict[str, float]]:
    from topograd.decode.calibration.policy import Rule

    name, _, number = rest.partition(":")
    name = name or "flip-rate"
    rule: Rule | None = next((rule for rule in get_args(Rule) if rule == name), None)
    if rule is None:
        problem = f"depth {depth!r} names the rule {name!r}"
        allowed = f"one of {', '.join(get_args(Rule))}"
        raise ConfigError(problem, setting="wand_rule", given=name, allowed=allowed)
    return rule, {"eps" if rule == "flip-rate" else "safety": _number(depth, number)} if number else {}


def _speculate(
    depth: str,
    rest: str,
    session: LoadedTextRun,
    engine: Engine,
    greedy: bool,
    draft: Path | str | None,
    costs: Callable[[], PositionCosts] | None,
) -> DecodeStrategy:
    from topograd.decode.calibration.policy import MAX_STEPS, USUAL_COSTS, ExpectedGainPolicy
    from topograd.decode.calibration.store import load as load_calibration
    from topograd.decode.drafters import AutoregressiveDrafter, PrefixDrafter
    from topograd.decode.speculation import Speculate

    if not rest and draft is None:
        rest = "lookup"  # needs neither a measurement nor a second exit
        if session.run.calibration_file.exists():
            check_exits(session.plan)
            try:
                return speculation_of(session, engine, load_calibration(session, engine.runtime)[1], greedy)
            except RunError as problem:
                if problem.setting != "precision":
                    raise
                _say_other_precision(session, problem, "lookup")
    usual = ["lookup", "draft"] if is_adapter(str(draft)) else [str(draft)]
    drafters = [
        _drafter(depth, word, session, engine, draft) for word in (rest.split("+") if rest else usual)
    ]
    if any(isinstance(drafter, PrefixDrafter) for drafter in drafters):  # a margin is no probability
        return Speculate(engine, drafters)
    most = min((d.most for d in drafters if isinstance(d, AutoregressiveDrafter)), default=MAX_STEPS)
    policy = ExpectedGainPolicy(costs=USUAL_COSTS if costs is None else costs(), steps=min(most, MAX_STEPS))
    return Speculate(engine, drafters, policy=policy)


def _drafter(
    depth: str, word: str, session: LoadedTextRun, engine: Engine, draft: Path | str | None
) -> LookupDrafter | AutoregressiveDrafter:
    """One drafter of a combination."""
    from topograd.decode.calibration.tune import drafter_of
    from topograd.decode.draft_model import ModelDrafter
    from topograd.decode.draft_stage import DraftStageDrafter
    from topograd.decode.drafters import MAX_DRAFT, DraftRule, PrefixDrafter

    if word in ("lookup", "table", "draft"):
        return drafter_of(word, engine, partial(_retrofitted, session, draft))
    word, whole = word.removesuffix(ALL), word.endswith(ALL)
    tokens = None if whole else _vocabulary(session, draft)
    _check_drafter(depth, word)
    if _is_count(word):
        check_exits(session.plan)
        longest, _, margin = word.partition(":")
        count = int(_number(depth, longest, whole=True))
        if count > MAX_DRAFT:
            raise ConfigError(setting="longest", given=count, allowed=f"at most {MAX_DRAFT}")
        rule = DraftRule(_number(depth, margin) if margin else 0.0, count)
        return PrefixDrafter(engine, rule, vocabulary=tokens)
    if is_adapter(word):
        return DraftStageDrafter(engine, _retrofitted(session, word).stage)
    small = session.once(("run", word), lambda: _small(session, Path(word)))
    return ModelDrafter(engine, small, Path(word).name, vocabulary=tokens)


def _is_count(word: str) -> bool:
    return re.match(r"[-+.\d]", word) is not None and not Path(word).is_dir()


def _check_drafter(depth: str, word: str) -> None:
    word = word.removesuffix(ALL)
    known = word in ("lookup", "table", "draft") or _is_count(word)
    if not known and (not word or not Path(word).is_dir()):
        problem = f"depth {depth!r} names the drafter {word!r}, which is unknown"
        remedy = "use lookup, table, draft, a number of tokens, or the folder of a smaller run"
        raise ConfigError(problem, setting="drafter", given=word, remedy=remedy)


def _vocabulary(session: LoadedTextRun, draft: Path | str | None) -> Tensor | None:
    """The tokens of the draft stage, `draft` or the run's own; None where there is none."""
    from topograd.decode.retrofitted import has_retrofit

    if draft is not None and is_adapter(draft):
        return _retrofitted(session, draft).stage.vocabulary
    return _retrofitted(session, None).stage.vocabulary if has_retrofit(session) else None


def _retrofitted(session: LoadedTextRun, folder: Path | str | None) -> Retrofitted:
    from topograd.decode.retrofitted import KIND, open_retrofit

    return session.once((KIND, str(folder)), lambda: open_retrofit(session, folder))


def _small(session: LoadedTextRun, folder: Path) -> Engine:
    """A run that drafts for another."""
    other = open_session(folder)
    if other.tokenizer.digest != session.tokenizer.digest:
        problem = f"the draft model {folder} has another tokenizer than {session.run.folder}"
        raise ConfigError(problem, setting="draft", given=folder, remedy="give a run with the same")
    return engine_of(other)


def _number(depth: str, text: str, whole: bool = False) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        problem = f"depth {depth!r} has {text!r} where {'a whole' if whole else 'a'} number belongs"
        remedy = "see topograd generate --help"
        raise ConfigError(problem, setting="depth", given=depth, remedy=remedy) from None
