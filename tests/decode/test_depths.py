"""Depths as users write them: which mode each spelling makes, with which settings, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raising import refused
from topograd.decode import depths
from topograd.decode.calibration.measure import EPS, Bounds, Calibration, PositionCosts
from topograd.decode.calibration.policy import Acceptance, ExpectedGainPolicy
from topograd.decode.calibration.store import store
from topograd.decode.calibration.tune import DrafterSelection, Tuning
from topograd.decode.depths import default_depth, engine_of, strategy_of
from topograd.decode.drafters import MAX_DRAFT, DraftRule, PrefixDrafter
from topograd.decode.engine import Engine
from topograd.decode.speculation import Speculate
from topograd.decode.strategies import DecodeStrategy, FixedDepth, PathEnsemble, generate_batch
from topograd.decode.wand import Wand
from topograd.errors import ConfigError, RunError, TopologyError
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, open_session
from topograd.runtime.native.kept import KeptRuntime
from topograd.runtime.native.library import missing_reason
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, NEVER = 257, float("inf")
FLIPS = {eps: (100 * eps, NEVER if eps < 0.002 else 10 * eps) for eps in EPS}
CALIBRATION = Calibration(
    step=0,
    stages=3,
    tokens=2,
    shift=Bounds((1.0, 2.0), (3.0, 4.0)),
    gain=Bounds((0.5, 0.25), (5.0, 6.0)),
    change_rate=(0.5, 0.25),
    agreement=(0.25, 0.75, 1.0),
    flip_thresholds=tuple(FLIPS.values()),
)
COSTS = PositionCosts({1: 0.5, 4: 0.75}, keep=0.1)


def selection(*names: str) -> DrafterSelection:
    policy = ExpectedGainPolicy(dict.fromkeys(names, Acceptance((0.0,), (0.5,))), COSTS, 1.5)
    return DrafterSelection(names, policy, 1.5)


DRAFTS = Tuning(selection("stage 2"), selection("lookup", "stage 1"), COSTS)
OFF = Tuning(None, None, COSTS)


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    """A run of three stages, of step 0, calibrated by hand; not to be changed."""
    session = make_session(3)
    store(session, engine_of(session).runtime, CALIBRATION, DRAFTS)
    return session


@pytest.fixture(scope="module")
def engine(session: LoadedTextRun) -> Engine:
    return engine_of(session)


@pytest.fixture
def uncalibrated(session: LoadedTextRun, tmp_path: Path) -> LoadedTextRun:
    return replace(session, run=Run(tmp_path))


def make(depth: str, session: LoadedTextRun, engine: Engine) -> DecodeStrategy:
    return strategy_of(depth, session, engine, greedy=False)


@pytest.mark.parametrize(("depth", "stage"), [("full", 2), ("prefix:1", 0), ("prefix:2", 1), ("prefix:3", 2)])
def test_prefixes(session: LoadedTextRun, engine: Engine, depth: str, stage: int) -> None:
    mode = make(depth, session, engine)
    assert isinstance(mode, FixedDepth)
    assert (mode.engine, mode.stage) == (engine, stage)


@pytest.mark.parametrize(
    ("depth", "heads", "ends", "weights"),
    [
        ("path:1", (0,), (0,), [1.0]),
        ("path:1,3", (0, 2), (1,), [1.0]),
        ("path:1-3", (0, 1, 2), (2,), [1.0]),
        ("branches:1-3*3+1-2", (0, 1, 2), (2, 1), [3.0, 1.0]),
        ("branches:1-2 + 1,3*0.5", (0, 1, 2), (1, 2), [1.0, 0.5]),
    ],
)
def test_paths_and_branches(
    session: LoadedTextRun,
    engine: Engine,
    depth: str,
    heads: tuple[int, ...],
    ends: tuple[int, ...],
    weights: list[float],
) -> None:
    mode = make(depth, session, engine)
    assert isinstance(mode, PathEnsemble)
    read = tuple(planned.head for planned in mode.engine.plan.stages)
    assert (read, mode.ends, mode.weights) == (heads, ends, weights)
    assert mode.exit == max(heads)


@pytest.mark.parametrize(
    ("depth", "thresholds"),
    [
        ("wand", FLIPS[0.001]),
        ("wand:flip-rate", FLIPS[0.001]),
        ("wand:flip-rate:0.001", FLIPS[0.001]),
        ("wand:flip-rate:0.01", FLIPS[0.01]),
        ("wand:flip-rate:5e-2", FLIPS[0.05]),
        ("wand:sum-of-bounds", (3.0, 2.0)),
        ("wand:sum-of-bounds:2", (6.0, 4.0)),
        ("wand:rival-gain", (0.5, 0.25)),
        ("wand:rival-gain:0.5", (0.25, 0.125)),
    ],
)
def test_leaving_early(
    session: LoadedTextRun, engine: Engine, depth: str, thresholds: tuple[float, ...]
) -> None:
    mode = make(depth, session, engine)
    assert isinstance(mode, Wand)
    assert mode.exits == [(k, tau) for k, tau in enumerate(thresholds) if tau < NEVER]
    assert mode.bounds is None


@pytest.mark.parametrize(("least", "pruned"), [(VOCAB, True), (VOCAB + 1, False)])
@pytest.mark.parametrize("depth", ["wand", "wand:rival-gain:2"])
def test_candidates_are_pruned_from_some_vocabulary_on(
    session: LoadedTextRun,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    depth: str,
    least: int,
    pruned: bool,
) -> None:
    monkeypatch.setattr(depths, "PRUNING_VOCAB", least)
    mode = strategy_of(depth, session, engine)
    assert isinstance(mode, Wand)
    assert mode.bounds == ((5.0, 6.0) if pruned else None), "the most that a rival gained"


@pytest.mark.parametrize(
    ("depth", "rule", "stage"),
    [
        ("speculate:1", DraftRule(0.0, 1), 0),
        (f"speculate:{MAX_DRAFT}", DraftRule(0.0, MAX_DRAFT), 0),
        ("speculate:4:0.5", DraftRule(0.5, 4), 0),
    ],
)
def test_drafts(session: LoadedTextRun, engine: Engine, depth: str, rule: DraftRule, stage: int) -> None:
    mode = make(depth, session, engine)
    assert isinstance(mode, Speculate)
    computing = mode.drafter.computing
    assert isinstance(computing, PrefixDrafter)
    assert (computing.rule, computing.exit) == (rule, stage)


@pytest.mark.parametrize("greedy", [True, False])
def test_calibrated_drafters(session: LoadedTextRun, engine: Engine, greedy: bool) -> None:
    """Greedy and sampled text have drafters of their own."""
    strategy = strategy_of("speculate", session, engine, greedy)
    assert isinstance(strategy, Speculate)
    computing = strategy.drafter.computing
    assert isinstance(computing, PrefixDrafter)
    chosen = DRAFTS.greedy if greedy else DRAFTS.sampled
    assert chosen is not None
    assert [drafter.name for drafter in strategy.drafter.drafters] == list(chosen.drafters)
    assert (computing.exit, strategy.drafter.policy) == (1 if greedy else 0, chosen.policy)


def test_drafts_that_do_not_pay_are_full_depth(uncalibrated: LoadedTextRun, engine: Engine) -> None:
    store(uncalibrated, engine.runtime, CALIBRATION, OFF)
    mode = make("speculate", uncalibrated, engine)
    assert isinstance(mode, FixedDepth)
    assert mode.exit == engine.last
    assert isinstance(make("speculate:2", uncalibrated, engine), Speculate), "unless they are asked for"


def test_every_spelling_writes(session: LoadedTextRun, engine: Engine) -> None:
    """And speculation, in one row, what full depth writes."""
    spellings = ("full", "prefix:2", "path:1,3", "branches:1-3*3+1-2", "wand", "speculate", "speculate:3:0.1")
    written = {
        depth: [e.token for e in generate_batch(strategy_of(depth, session, engine), [[1, 2]], 5)[0]]
        for depth in spellings
    }
    assert {len(tokens) for tokens in written.values()} == {5}
    assert written["speculate"] == written["speculate:3:0.1"] == written["full"] != written["prefix:2"]


@pytest.mark.parametrize(
    ("depth", "setting", "given"),
    [
        *((depth, "depth", depth) for depth in ("", "Full", "full:2", "half\nof it")),
        *((depth, "depth", depth) for depth in ("prefix", "prefix:", "prefix:two", "prefix:1.5")),
        *((f"prefix:{exit_}", "exit", exit_) for exit_ in (0, 4)),
        *((depth, None, None) for depth in ("path", "path:0", "path:1-x", "path:3-1", "branches:1++2")),
        *((depth, None, None) for depth in ("branches:1*x", "branches:1*0")),
        ("wand:best", "wand_rule", "best"),
        ("wand:0.001", "wand_rule", "0.001"),
        ("wand:flip-rate:low", "depth", "wand:flip-rate:low"),
        ("wand:flip-rate:0.3", "eps", 0.3),
        ("wand:rival-gain:0", "safety", 0.0),
        ("wand:rival-gain:-inf", "safety", -float("inf")),
        ("wand:sum-of-bounds:1:2", "depth", "wand:sum-of-bounds:1:2"),
        ("speculate:few", "drafter", "few"),
        ("speculate:2.5", "depth", "speculate:2.5"),
        ("speculate:0", "longest", 0),
        ("speculate:-1", "longest", -1),
        (f"speculate:{MAX_DRAFT + 1}", "longest", MAX_DRAFT + 1),
        ("speculate:2:sure", "depth", "speculate:2:sure"),
        ("speculate:2:-1", "threshold", -1.0),
        ("speculate:2:-inf", "threshold", -float("inf")),
    ],
)
def test_what_cannot_be_read_is_one_line(
    session: LoadedTextRun, engine: Engine, depth: str, setting: str | None, given: object
) -> None:
    fields = {} if setting is None else {"setting": setting, "given": given}
    with refused(ConfigError, **fields):
        strategy_of(depth, session, engine, greedy=False)


@pytest.mark.parametrize(
    ("depth", "why"), [("path:4", "stage 4 does not exist"), ("path:2-3", "begins with stage 2")]
)
def test_paths_that_the_run_does_not_have(
    session: LoadedTextRun, engine: Engine, depth: str, why: str
) -> None:
    with pytest.raises(TopologyError, match=why):
        strategy_of(depth, session, engine, greedy=False)


@pytest.mark.parametrize("depth", ["wand", "wand:rival-gain:2"])
def test_without_calibration(uncalibrated: LoadedTextRun, engine: Engine, depth: str) -> None:
    with refused(RunError, setting="calibration"):
        strategy_of(depth, uncalibrated, engine, greedy=False)
    assert isinstance(make("speculate:3", uncalibrated, engine), Speculate)


def test_without_calibration_lookup_drafts(uncalibrated: LoadedTextRun, engine: Engine) -> None:
    """Also where there is one stage, as in a model that was just imported: who is served asks for it."""
    one = replace(uncalibrated, plan=Plan.of(Topology.chain("3"), 3))
    for session in (uncalibrated, one):
        mode = strategy_of("speculate", session, engine, greedy=False)
        assert isinstance(mode, Speculate)
        assert [drafter.name for drafter in mode.drafter.lookups] == ["lookup"]


@pytest.mark.parametrize("depth", ["wand", "speculate", "speculate:3"])
def test_one_stage_has_no_early_exit(session: LoadedTextRun, engine: Engine, depth: str) -> None:
    one = replace(session, plan=Plan.of(Topology.chain("3"), 3))
    with refused(ConfigError, setting="partition"):
        strategy_of(depth, one, engine, greedy=False)


def test_the_default_is_what_pays(
    session: LoadedTextRun, uncalibrated: LoadedTextRun, engine: Engine
) -> None:
    assert default_depth(session, engine.runtime) == "speculate"
    assert default_depth(uncalibrated, engine.runtime) == "full", "it is not calibrated"
    store(uncalibrated, engine.runtime, CALIBRATION, OFF)
    assert default_depth(uncalibrated, engine.runtime) == "full", "drafts do not pay"
    store(uncalibrated, engine.runtime, replace(CALIBRATION, step=1), DRAFTS)
    assert default_depth(uncalibrated, engine.runtime) == "full", "the weights are others"
    store(uncalibrated, engine.runtime, CALIBRATION, DRAFTS)
    assert default_depth(uncalibrated, engine.runtime) == "speculate"
    (uncalibrated.run.folder / "calibration.json").write_text("{")
    assert default_depth(uncalibrated, engine.runtime) == "speculate", "an open run remembers what it read"
    assert default_depth(replace(uncalibrated), engine.runtime) == "full", "it is damaged"


@pytest.mark.skipif(missing_reason() is not None, reason=str(missing_reason()))
def test_kept_weights_are_used_while_nobody_has_had_the_model_in_hand(
    session: LoadedTextRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that somebody may have changed is packed, and is not kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def kept(later: bool, change: bool = False, runtime: str | None = None) -> bool:
        opened = open_session(session.run.folder, later=later)
        if change:
            with torch.no_grad():
                next(opened.stack.parameters()).add_(1)
        engine = engine_of(opened, runtime)
        texts.append(generate_batch(FixedDepth(engine), [[1, 2]], 20))
        return isinstance(engine.runtime, KeptRuntime)

    texts: list[object] = []
    assert [kept(False), kept(True, change=True)] == [False, False]
    assert not (tmp_path / "topograd" / "packed").exists()
    assert [kept(True), kept(True), kept(True, runtime="native")] == [False, True, True]
    assert [kept(False), kept(True, change=True), kept(True, runtime="torch")] == [False, False, False]
    assert texts[0] == texts[2] == texts[3] == texts[4] == texts[5] == texts[7]


def test_a_calibration_of_another_precision_is_not_used_and_that_is_said_once(
    session: LoadedTextRun, caplog: pytest.LogCaptureFixture
) -> None:
    here, engine = replace(session), engine_of(session, "native", "int8")
    for _ in range(2):
        assert default_depth(here, engine.runtime) == "full"
    (said,) = caplog.messages
    assert "is calibrated for native float32, not for native int8; run: topograd calibrate" in said
    assert said.endswith("--runtime native --weights int8; this is full depth")
    strategy = strategy_of("speculate", replace(session), engine)
    assert isinstance(strategy, Speculate)
    assert [drafter.name for drafter in strategy.drafter.drafters] == ["lookup"]
    assert caplog.messages[1].endswith("this is lookup")
    with refused(RunError, setting="precision"):
        strategy_of("wand", here, engine)
