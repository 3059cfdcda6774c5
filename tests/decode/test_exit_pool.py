"""Pools of exits: against a sum written out token by token, in decoding and scoring; what is kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raising import refused
from topograd.data.windows import Text
from topograd.decode.calibration import fit_pool
from topograd.decode.calibration.fit_pool import ExitStates, fit, fit_weights, window_nats
from topograd.decode.calibration.measure import EPS, Bounds, Calibration, PositionCosts
from topograd.decode.calibration.store import open_pool, store
from topograd.decode.calibration.tune import Tuning
from topograd.decode.depths import engine_of, strategy_of
from topograd.decode.exit_pool import KINDS, ExitWeights
from topograd.decode.strategies import generate_batch
from topograd.errors import ConfigError, RunError
from topograd.evaluation.exit_pools import measure
from topograd.evaluation.scoring import Scorer, TokenRow
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, heldout_text
from topograd.serve.texts import SAFE, depth_of_suffix, known_depths

STEP, STAGES, WIDTH = 7, 3, 16
OFF = Tuning(None, None, PositionCosts({1: 0.5, 4: 0.75}))
CALIBRATION = Calibration(
    step=STEP,
    stages=STAGES,
    tokens=4,
    shift=Bounds((1.0, 2.0), (3.0, 4.0)),
    gain=Bounds((0.5, 0.25), (5.0, 6.0)),
    change_rate=(0.5, 0.25),
    agreement=(0.25, 0.75, 1.0),
    flip_thresholds=tuple((100 * eps, float("inf")) for eps in EPS),
)


def some_weights() -> ExitWeights:
    generator = torch.Generator().manual_seed(0)
    A, a, B = (torch.randn(*size, generator=generator) for size in ((5, STAGES * WIDTH), (5,), (STAGES, 5)))
    return ExitWeights(torch.tensor([0.4, -0.3, 0.9]), torch.tensor([0.2, 0.1, 0.7]), A, a, B)


@pytest.fixture(scope="module")
def session(make_session: Callable[..., LoadedTextRun]) -> LoadedTextRun:
    return make_session(STAGES, STEP)


@pytest.fixture
def kept(session: LoadedTextRun, tmp_path: Path) -> LoadedTextRun:
    """The session of a folder whose calibration has a pool."""
    here = replace(session, run=Run(tmp_path))
    store(here, engine_of(here, "torch").runtime, CALIBRATION, OFF, some_weights())
    return here


def expected(session: LoadedTextRun, tokens: list[int], kind: str) -> Tensor:
    """Pooled logits (time, vocab) in float64: layer by layer, and every weight by itself."""
    stack, row, weights = session.stack, torch.tensor([tokens]), some_weights()
    with torch.no_grad():
        h = stack.embed(row)
        ctx = stack.layer_context(h, row)
        states, logits = [], []
        for stage, layer in enumerate(stack.layers):
            h = layer(h, ctx)
            states.append(h[0].double())
            logits.append(stack.readout(h, stage)[0].double())
    result = torch.zeros_like(logits[0])
    for t in range(len(tokens)):
        features: list[float] = []
        for state in states:
            rms = math.sqrt(sum(float(x) ** 2 for x in state[t]) / WIDTH)
            features += [float(x) / rms for x in state[t]]
        hidden = [math.tanh(float(weights.a[r] + weights.A[r].double() @ torch.tensor(features).double()))
                  for r in range(5)]  # fmt: skip
        for k in range(STAGES):
            p = logits[k][t].softmax(-1)
            w = {
                "pool": float(weights.w[k]),
                "router": float(weights.c[k]) + sum(float(weights.B[k, r]) * hidden[r] for r in range(5)),
                "shrinkage": 1 + sum(float(x) * math.log(float(x)) for x in p) / math.log(len(p)),
            }[kind]
            result[t] += w * logits[k][t]
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_the_sum_written_out(kept: LoadedTextRun, kind: str) -> None:
    tokens = [5, 80, 3, 200, 7, 7, 90, 31]
    log_p = expected(kept, tokens[:-1], kind).log_softmax(-1)
    scorer = Scorer(engine_of(kept, "torch"), kind, session=kept)
    [[found]] = scorer.score([[TokenRow(tokens, 2)]])
    assert scorer.depths == 1
    wanted = [float(log_p[t - 1, tokens[t]]) for t in range(2, len(tokens))]
    assert found.logprob[0].tolist() == pytest.approx(wanted, abs=2e-5)


@pytest.mark.parametrize("runtime", ["torch", "native"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_the_likeliest_of_the_sum(kept: LoadedTextRun, kind: str, runtime: str) -> None:
    strategy = strategy_of(kind, kept, engine_of(kept, runtime))
    prompts = [[5, 80, 3], [9]]
    for prompt, row in zip(prompts, generate_batch(strategy, prompts, 6), strict=True):
        text = list(prompt)
        for emitted in row:
            assert emitted.token == int(expected(kept, text, kind)[-1].argmax())
            text.append(emitted.token)


def test_equal_weights_of_one_exit_are_full_depth(kept: LoadedTextRun) -> None:
    last = some_weights()
    last = replace(last, w=torch.tensor([0.0, 0.0, 1.0]), c=torch.tensor([0.0, 0.0, 1.0]), B=0 * last.B)
    store(kept, engine_of(kept, "torch").runtime, CALIBRATION, OFF, last)
    rows = [[TokenRow([5, 80, 3, 200, 7], 1)]]
    engine = engine_of(kept, "torch")
    [[full]] = Scorer(engine, "full").score(rows)
    for kind in ("pool", "router"):
        [[found]] = Scorer(engine, kind, session=kept).score(rows)
        assert torch.equal(found.logprob, full.logprob)


def test_the_fit_is_the_minimum_of_the_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(3, 400, 7, generator=generator, dtype=torch.float64)
    targets = torch.multinomial((0.5 * z[0] + 1.5 * z[2]).softmax(-1), 1, generator=generator)[:, 0]
    parts = [(z[:, :150], targets[:150]), (z[:, 150:], targets[150:])]
    found = fit_weights(lambda: parts)
    w = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [w], max_iter=500, tolerance_grad=1e-12, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(torch.einsum("k,knv->nv", w, z), targets)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert found.tolist() == pytest.approx(w.tolist(), abs=1e-5)


class Made:
    """A reader whose logits are the states: one exit knows the targets where its state says so."""

    def readout(self, h: Tensor, stage: int, rows: Tensor | None = None) -> Tensor:
        return h[:, 1:]


def test_a_router_learns_which_exit_is_right(session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit 1 has the answer where the first number of the states is 3, exit 3 where it is -3."""
    monkeypatch.setattr(fit_pool, "RATE", 0.02)
    torch.manual_seed(0)
    windows = []
    for _ in range(24):
        targets, sign = torch.randint(6, (40,)), torch.randint(2, (40,)) * 2 - 1
        states = {}
        for k, own in enumerate((1, 0, -1)):
            answer = F.one_hot(targets, 6) * 4.0
            noise = F.one_hot(torch.randint(6, (40,)), 6) * 4.0
            logits = torch.where((sign == own)[:, None], answer, noise)
            states[k] = torch.cat([3.0 * sign[:, None], logits], dim=1)
        windows.append((states, targets))
    made = ExitStates(session.plan, Made(), windows)
    nats = {name: sum(rows) for name, rows in window_nats(made, fit(made)).items()}
    assert nats["pool"] < nats["last"]
    assert nats["router"] < 0.5 * nats["pool"]


def test_a_fit_is_measured_on_other_windows(session: LoadedTextRun) -> None:
    text: Text = heldout_text(session, None, 300)
    rows = range(len(text.inputs))
    weights = fit(ExitStates.read(session, text, rows[::2]))
    states = ExitStates.read(session, text, rows[1::2])
    found = measure(session, states, weights)
    counted = [int((text.targets[i] != -100).sum()) for i in rows[1::2]]
    assert found["tokens"] == sum(counted)
    total = 0.0
    for i in rows[1::2]:
        own = text.targets[i] != -100
        z = ExitStates.read(session, text, [i])
        logits = torch.cat([part[0] for part in z.batches()], dim=1).double()
        pooled = sum(float(w) * logits[k] for k, w in enumerate(weights.w))
        assert isinstance(pooled, Tensor)
        total += float(F.cross_entropy(pooled, text.targets[i][own], reduction="sum"))
    assert found["bpb"]["pool"] == pytest.approx(total / (math.log(2) * sum(counted)), rel=1e-5), "bytes"
    assert found["gain"]["pool"] == pytest.approx(found["bpb"]["last"] - found["bpb"]["pool"], abs=1e-6)
    low, high = found["interval"]["pool"]
    assert low <= found["gain"]["pool"] <= high


def test_few_logits_end_the_reading(session: LoadedTextRun, monkeypatch: pytest.MonkeyPatch) -> None:
    text = heldout_text(session, None, 300)
    monkeypatch.setattr(fit_pool, "FIT_LOGITS", 1)
    assert len(ExitStates.read(session, text, range(5)).windows) == 1


def test_a_run_without_a_pool_says_how_to_get_one(session: LoadedTextRun, tmp_path: Path) -> None:
    here = replace(session, run=Run(tmp_path))
    with refused(RunError, setting="calibration"):
        open_pool(here, "pool")
    assert open_pool(here, "shrinkage").weights is None
    store(here, engine_of(here, "torch").runtime, CALIBRATION, OFF)
    with refused(RunError, setting="pool", remedy=f"run: topograd calibrate {tmp_path}"):
        strategy_of("router", here, engine_of(here, "torch"))
    with refused(ConfigError, setting="depth", given="pool:3"):
        strategy_of("pool:3", here, engine_of(here, "torch"))


@pytest.mark.parametrize("name", ["w", "A", "B"])
def test_a_damaged_pool_is_refused(kept: LoadedTextRun, name: str) -> None:
    values = json.loads(kept.run.calibration_file.read_text())
    values["pool"][name] = values["pool"][name][:-1]
    kept.run.manifest.bind(kept.run.calibration_file.name, json.dumps(values).encode())
    with refused(RunError, setting="pool", given=kept.run.calibration_file):
        open_pool(kept, "pool")


def test_the_server_knows_them(kept: LoadedTextRun, session: LoadedTextRun, tmp_path: Path) -> None:
    runtime = engine_of(session, "torch").runtime
    assert known_depths(kept, runtime)[-2:] == ["pool", "router"]
    bare = replace(session, run=Run(tmp_path / "bare"))
    assert "pool" not in known_depths(bare, runtime)
    for kind in KINDS:
        assert SAFE.fullmatch(kind)
        assert depth_of_suffix(kind) == kind
