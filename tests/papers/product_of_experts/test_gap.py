"""The gap: its three comparisons on made-up numbers, and the study in miniature."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from papers.outcome import asked
from papers.product_of_experts import gap, gap_costs
from papers.product_of_experts.gap import POOLED, _claims, add_gaps, at_length, config_of, fastest, pooled_bpb
from papers.product_of_experts.gap_arms import ARMS
from papers.product_of_experts.gap_training import Training
from papers.run import run_study
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.data import Text
from topograd.training.evaluation import evaluate

SAVING = {
    "recomputed": {"memory_ratio": 0.4, "step_time": {"median": 1.3}},
    "2 parts": {"memory_ratio": 0.55, "step_time": {"median": 1.1}},
}


def made_up(arms: dict[str, tuple[float, float, float]], seeds: int = 3) -> list[dict[str, Any]]:
    """Rows of backprop's curve and of arms with (BPB, time, memory), a little different for each seed."""
    rows = []
    for seed in range(seeds):
        noise = random.Random(seed).uniform(-1e-4, 1e-4)
        common = {"seed": seed, "order0": 5.0, "gradient_depth": 2, "traffic": 2.0}
        for length, bpb in ((1.0, 2.0), (2.0, 1.8), (0.75, 2.1)):
            name = "backprop" if length == 1 else f"backprop, {length:g} × steps"
            cost = {"length": length, "step_time_ratio": 1.0, "memory_ratio": 1.0}
            rows.append({"arm": name, "bpb": bpb, **cost, **common})
        for name, (bpb, time, memory) in arms.items():
            cost = {"length": 1.0, "step_time_ratio": time, "memory_ratio": memory}
            rows.append({"arm": name, "bpb": bpb + noise, **cost, **common})
    add_gaps(rows, SAVING)
    return rows


def of(rows: list[dict[str, Any]], arm: str) -> dict[str, Any]:
    return next(row for row in rows if row["arm"] == arm)


def test_backprop_between_and_beyond_its_lengths() -> None:
    curve = {0.75: 2.1, 1.0: 2.0, 2.0: 1.8}
    assert at_length(curve, 1.0) == 2.0
    assert at_length(curve, 2**0.5) == pytest.approx(1.9)
    assert at_length(curve, 4.0) == pytest.approx(1.6), "the last slope goes on"
    assert at_length(curve, 0.5) > 2.1
    assert at_length({1.0: 2.0}, 3.0) == 2.0


def test_the_fastest_backprop_that_fits() -> None:
    assert fastest(1.0, SAVING) == 1.0
    assert fastest(0.6, SAVING) == 1.1
    assert fastest(0.5, SAVING) == 1.3
    assert fastest(0.1, SAVING) == 1.3, "the leanest where none fits"


def test_three_gaps() -> None:
    rows = made_up({"staged": (2.04, 2**0.5, 0.5), "next": (2.0, 1.0, 1.0)}, seeds=1)
    row = of(rows, "staged")
    assert row["gap_steps"] == pytest.approx(2.0, abs=0.02)
    assert row["gap_time"] == pytest.approx(100 * (2.04 / 1.9 - 1), abs=0.02)
    room = at_length({1.0: 2.0, 2.0: 1.8}, 2**0.5 / 1.3)
    assert row["gap_memory"] == pytest.approx(100 * (2.04 / room - 1), abs=0.02)
    assert "gap_steps" not in of(rows, "backprop, 2 × steps")


def test_a_longer_training_stands_beside_backprop_of_its_length() -> None:
    rows = made_up({"staged": (2.04, 1.1, 0.5)}, seeds=1)
    rows.append({**of(rows, "staged"), "arm": "staged, 2 × steps", "length": 2.0, "bpb": 1.89, "tokens": 20})
    of(rows, "staged")["tokens"] = 10
    add_gaps(rows, SAVING)
    assert rows[-1]["gap_length"] == pytest.approx(100 * (1.89 / 1.8 - 1))
    assert any("after 10 and 20 tokens: +2.0" in words for words in gap._findings(rows))


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    return [claim.verdict for claim in _claims(rows)]


def test_verdicts() -> None:
    worse = {"staged": (2.06, 1.1, 0.5)}
    assert verdicts(made_up(worse)) == [HELD, FAILED, FAILED, FAILED]
    assert verdicts(made_up({**worse, "next": (2.01, 1.2, 0.7)})) == [HELD, HELD, FAILED, FAILED]
    lean = {**worse, "lean": (2.01, 1.05, 0.4)}
    assert verdicts(made_up(lean)) == [HELD, HELD, FAILED, HELD], "backprop must recompute to fit"
    fast = {**worse, "fast": (1.9, 1.0, 0.4)}
    assert verdicts(made_up(fast)) == [HELD, HELD, HELD, HELD]
    assert verdicts(made_up({"staged": (1.9, 1.0, 0.5)}))[1:] == [UNDECIDED] * 3, (
        "a size that decides nothing"
    )
    assert verdicts(made_up(worse, seeds=1)) == [UNDECIDED] * 4


def test_findings_tell_what_cuts_the_gradient_from_what_does_not() -> None:
    rows = made_up({"staged": (2.06, 1.1, 0.5), "lean": (2.03, 1.1, 0.5), "whole": (1.99, 1.0, 1.0)})
    for row in rows:
        row["gradient_depth"] = 6 if row["arm"] == "whole" else 2
    first = gap._findings(rows)[0]
    assert "nearest to backprop is whole, -0.5" in first
    assert "of those that cut the gradient lean, +1.5" in first


def test_a_pool_is_fitted_on_one_half_and_read_on_the_other() -> None:
    arm = next(arm for arm in ARMS if arm.name == "staged")
    training = Training(arm, config_of(asked("gap", "tiny"), 0))
    for p in training.stack.parameters():
        torch.nn.init.normal_(p, std=0.3)
    inputs = torch.randint(257, (8, 16))
    text = Text(inputs, training.stack(inputs).argmax(-1), 128)
    found = pooled_bpb(training, text)
    last = evaluate(training.stack, training.plan, text).bpb.last
    z = training.stack(inputs).detach()
    best = min(float(F.cross_entropy(b * z.flatten(0, 1), text.targets.flatten())) for b in (1, 2, 4))
    assert found < last, "the targets are the last stage's own, so a larger weight is better"
    assert found * 0.6931 * 128 / text.targets.numel() < best + 0.05


def test_the_study_in_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_costs, "ROUNDS", 1)
    names = ("backprop", "backprop, 2 × steps", "staged", "next")
    monkeypatch.setattr(gap, "TINY", tuple(arm for arm in ARMS if arm.name in names))
    told: list[tuple[int, int]] = []
    record = run_study(asked("gap", "tiny", steps=2, seeds=2, on_more=lambda *done: told.append(done)))
    assert {row["arm"] for row in record["rows"]} == {*names, POOLED}
    for row in record["rows"]:
        assert {"arm", "bpb", "seed", "step_time_ratio", "memory_ratio"} <= row.keys()
        assert row["trajectory"][-1]["step"] == row["steps"]
    assert record["verdict"] == UNDECIDED, "four steps decide nothing"
    assert len(record["claims"]) == 4
    assert told[-1] == (8, 8), "the other length of backprop has the first seed alone"
    json.dumps(record)
    pair = [row["bpb"] for row in record["rows"] if row["arm"] == "backprop"]
    assert pair[0] != pair[1], "seeds differ"
    assert {series["name"] for series in record["figure"]["series"]} == {
        "gradient depth",
        "memory",
        "traffic",
    }


def test_the_demos_model() -> None:
    config = config_of(asked("gap", "demo", steps=7), 2)
    assert (config.model.width, config.model.layers, config.steps, config.seed) == (96, 6, 7, 2)
    assert config.tokenizer != "bytes"
