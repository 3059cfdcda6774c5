"""Why an interface carries little: oracle and coherence by hand, verdicts, the study in miniature."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from papers.latent_bounded_interfaces import interface_hypotheses as study
from papers.latent_bounded_interfaces.interface_hypotheses import Model, build, coherence, oracle
from papers.outcome import asked
from papers.run import run_study
from papers.staged_runs import Sizes
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.data import Loader, windows
from topograd.runs.session import load_data


def config(data: str | None) -> Any:
    return Sizes(
        width=8, context=16, batch=2, steps=2, soft_steps=0, eval_bytes=300, seeds=1, data=data
    ).config(0)


def test_all_models_of_a_seed_begin_alike(sizes: Sizes) -> None:
    settings = config(sizes.data)
    first = build(Model("dense"), settings)[0].state_dict()
    joined = build(Model("x", kind="segments", interface="S=8,r=4"), settings)[0].state_dict()
    assert all(torch.equal(tensor, joined[name]) for name, tensor in first.items())


def test_coherence_is_one_where_batches_are_equal(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, data = load_data(config(sizes.data))
    stack, plan = build(Model("dense"), settings)
    for p in stack.parameters():
        torch.nn.init.normal_(p, std=0.2)
    differ = coherence(stack, plan, data, settings)
    assert all(-1 <= cosine < 1 for cosine in differ)
    batch = next(Loader(data.train, 16, 2, 0))
    monkeypatch.setattr(study, "Loader", lambda *given: iter([batch] * 9))
    assert coherence(stack, plan, data, settings) == pytest.approx([1.0] * 4, abs=1e-6)
    assert all(p.grad is None for p in stack.parameters())


def test_an_oracle_with_all_numbers_is_the_model_itself(sizes: Sizes) -> None:
    settings, data = load_data(config(sizes.data))
    stack, plan = build(Model("dense"), settings)
    for p in stack.parameters():
        torch.nn.init.normal_(p, std=0.2)
    inputs, targets, _ = windows(data.heldout, data.tokenizer, 16, 300)
    found = oracle(stack, data, settings, inputs, targets)
    own = found["own position"]
    assert own["all"] == pytest.approx(study._loss(stack, plan, inputs, targets), abs=0.02)
    assert own["0"] == found["segment before"]["0"], "no numbers are no numbers"
    assert list(own) == ["0", "4", "16", "all"]


def test_the_tail_of_the_segment_before() -> None:
    m = torch.arange(6.0).view(1, 6, 1)
    assert study._tails(m, 2).flatten().tolist() == [0, 0, 1, 1, 3, 3]


def made_up(**loss: float) -> list[dict[str, Any]]:
    base = {model.name: 2.0 for model in study.models(64)}
    rows = []
    for seed in range(3):
        for name, ce in {**base, **{k.replace("_", " "): v for k, v in loss.items()}}.items():
            noisy = ce + 1e-4 * seed
            row = {"model": name, "seed": seed, "ce": noisy, "coherence": [0.4 + 0.01 * seed] * 4}
            row |= {"zero": noisy, "shuffled": noisy + 0.1 - 0.01 * seed, "mean": noisy}
            if name == "dense":
                row["oracle"] = {
                    "own position": {"16": 2.0 + 0.01 * seed},
                    "segment before": {"16": 2.5 - 0.01 * seed},
                }
            rows.append(row)
    return rows


def test_verdicts() -> None:
    rows = made_up(own_position=1.9)
    for row in rows:
        if row["model"] == "own position":
            row["ce"] += 1e-4 * row["seed"]
    found = {claim.name: claim.verdict for claim in study._claims(rows)}
    assert found["A: own position"] == HELD
    assert found["G: S = 8 is used"] == HELD
    assert found["H: the segment's tail is not enough"] == HELD
    assert "B: larger batches" in found
    assert "E: AdamW" not in found, "the preset small has no AdamW"
    worse = made_up(own_position=2.1)
    for row in worse:
        if row["model"] == "own position":
            row["ce"] += 1e-4 * row["seed"]
    assert {c.name: c.verdict for c in study._claims(worse)}["A: own position"] == FAILED


def test_a_longer_training_has_adamw_and_no_larger_batches() -> None:
    names = {model.name: model for model in study.models(64, "long")}
    assert names["S = 8, authors, AdamW"].optimizer == names["shallow, AdamW"].optimizer == "adamw"
    assert all(model.batch == 1 for model in names.values())
    assert {c.better for c in study.COMPARISONS} | {c.worse for c in study.COMPARISONS} <= set(names)
    rows = made_up(**{"S_=_8,_authors,_AdamW": 1.7, "shallow,_AdamW": 1.9, "S_=_T": 2.2})
    for row in rows:
        row["ce"] += 1e-5 * row["seed"] * len(row["model"])
    claims = {claim.name: claim.verdict for claim in study._claims(rows)}
    assert claims["E: AdamW"] == HELD
    assert claims["F: S = T beats two layers"] == FAILED


def test_the_study_in_miniature(sizes: Sizes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "_config", lambda asked, seed: config(sizes.data))
    told: list[tuple[int, int]] = []
    record = run_study(asked("interface-hypotheses", "tiny", on_more=lambda *done: told.append(done)))
    assert record["verdict"] == UNDECIDED, "one seed"
    letters = {claim["name"][0] for claim in record["claims"]}
    assert letters == set("ABCDEFGHI")
    assert told[-1] == (10, 10)
    assert len(record["tables"]) == 3
    json.dumps(record)
