"""Pruning in miniature: equal budgets, choices that differ, and claims that can fail."""

from typing import Any

import pytest
import torch

from papers.beyond import pruning
from papers.beyond.bases import open_base
from papers.beyond.units import HiddenLayer
from papers.outcome import asked
from papers.run import run_study
from topograd.runs.folder import Run


def test_the_study_in_miniature(straight: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "folders", lambda asked: {"reference": straight.folder})
    monkeypatch.setattr(pruning, "TINY", pruning.Size(8, 6, 3))
    told: list[tuple[int, int]] = []
    found = run_study(asked("pruning", "tiny", on_more=lambda *done: told.append(done)))
    assert told[-1][0] == told[-1][1] == len(found["rows"])
    (table,) = found["tables"]
    assert {row[0] for row in table["rows"]} >= {
        "random",
        "fisher",
        "unexplained, repaired",
        "random, trained",
    }
    assert len(found["claims"]) == 7
    assert all(len(row["bpb"]) == 3 for row in found["rows"])
    plain = {row["choice"]: row["shares"] for row in found["rows"] if row["way"] == "plain" and row["budget"]}
    assert all(shares == [0.25, 0.25] for shares in plain.values()), "equal budgets"


def test_a_budget_is_met_in_every_layer_or_in_all(straight: Run) -> None:
    study = pruning._Pruning(open_base("own", straight.folder, 8, 6, 3), 1)
    for way in ("plain", "any layer"):
        removed = study.removed(pruning.Cut("fisher", 0.5, way))
        assert sum(map(len, removed.values())) == 64, "half of two layers of 64"
    readings = study.readings()
    for layer, units in study.removed(pruning.Cut("fisher", 0.5)).items():
        fisher = readings[layer.out].fisher
        kept = torch.ones(64, dtype=torch.bool)
        kept[units] = False
        assert fisher[units].max() <= fisher[kept].min(), "the dead ones go"


def test_layers_lose_unlike_shares_and_keep_some() -> None:
    flat, rich = HiddenLayer("a", ()), HiddenLayer("b", ())
    scores = {flat: torch.arange(20) / 100, rich: 1 + torch.arange(20.0)}
    removed = pruning.from_any_layer(scores, 0.5)
    assert removed[flat].tolist() == list(range(12)), "eight stay"
    assert removed[rich].tolist() == list(range(8))


def invented(costs: dict[str, float]) -> list[dict[str, Any]]:
    rows = [{"base": "m", "choice": "none", "budget": 0.0, "way": "plain", "bpb": [1.0, 1.1, 1.2]}]
    for choice, cost in costs.items():
        for way in ("plain", "repaired"):
            bpb = [1 + cost, 1.1 + cost + 0.001, 1.2 + cost]
            rows.append({"base": "m", "choice": choice, "budget": 0.25, "way": way, "bpb": bpb})
    return rows


def test_claims_hold_and_fail() -> None:
    costs = {"random": 0.4, "magnitude": 0.3, "variance": 0.05, "product": 0.1, "fisher": 0.1}
    rows = invented({**costs, "unexplained": 0.02})
    verdicts = {claim.name: claim.verdict for claim in pruning.claims("m", rows)}
    assert verdicts["m: fisher beats random"] == "held"
    assert verdicts["m: fisher beats variance"] == "failed"
    assert verdicts["m: fisher beats product"] == "undecided at this size"
    assert verdicts["m: unexplained beats variance, repaired"] == "held"
    assert pruning.findings("m", rows)[0] == "m, plain: least bits per byte with unexplained at 25%."
    assert pruning.table("m", rows).rows[0] == ("random", "1.500")
