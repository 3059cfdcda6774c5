"""Adapters in miniature: every arm begins at the model itself, and leaves it as it was."""

import pytest
import torch

from papers.beyond import adapter_placement as study
from papers.beyond.bases import open_base
from papers.outcome import asked
from papers.run import run_study
from topograd.nn.lora import has_lora
from topograd.runs.folder import Run

SMALL = study.Size(
    people=2,
    length=8,
    old=6,
    heldout=2,
    new=2,
    batch=2,
    rank=2,
    rates=(3e-3, 1e-2),
    held_rates=(3e-2, 1e-1),
    stops=(0.5, 1.0),
)


@pytest.fixture(scope="module")
def placed(straight: Run) -> study._Placement:
    return study._Placement(open_base("own", straight.folder, 8, 6, 2), SMALL, steps=2)


def test_the_study_in_miniature(straight: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "folders", lambda asked: {"reference": straight.folder})
    monkeypatch.setattr(study, "TINY", SMALL)
    told: list[tuple[int, int]] = []
    found = run_study(asked("adapter-placement", "tiny", on_more=lambda *done: told.append(done)))
    assert told[-1] == (len(study.ARMS), len(study.ARMS))
    assert [row[0] for row in found["tables"][0]["rows"]] == [arm.name for arm in study.ARMS]
    assert all(row["stops"] == [0, 1, 2] and len(row["old"]) == 3 for row in found["rows"])
    assert {row["parameters"] for row in found["rows"] if "held" not in row["arm"]}


@pytest.mark.parametrize("arm", study.ARMS, ids=lambda arm: arm.name)
def test_an_arm_begins_at_the_model_and_leaves_it(arm: study.Arm, placed: study._Placement) -> None:
    model, inputs = placed.base.model, placed.base.heldout.inputs
    whole, before = model(inputs), {name: p.clone() for name, p in model.named_parameters()}
    found = placed.learn(arm, 0, 1e-2)
    assert found["old"][0] == pytest.approx(placed.learn(study.ARMS[0], 0, 1e-2)["old"][0], abs=1e-5)
    assert found["new"][-1] != found["new"][0], "something was learned"
    assert torch.equal(model(inputs), whole)
    assert {name: p.shape for name, p in model.named_parameters()} == {n: p.shape for n, p in before.items()}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(has_lora(module) for module in model.modules())


def test_arms_have_equal_parameters_and_the_halves_are_disjoint(placed: study._Placement) -> None:
    arms = {arm.name: arm for arm in study.ARMS}
    counts = {name: placed.learn(arm, 0, 1e-2, ())["parameters"] for name, arm in arms.items()}
    assert counts["lora"] == counts["pissa"] == counts["named layers"] == counts["other layers"]
    assert counts["lora, A held"] == counts["dead"] == counts["safe"] < counts["lora"]
    halves = [placed.chosen(arms[name], 0) for name in ("named layers", "other layers")]
    assert halves[0] | halves[1] == set(placed.layers)
    assert not halves[0] & halves[1]


def test_the_rate_is_that_of_the_least_loss(placed: study._Placement) -> None:
    found = placed.tune(study.ARMS[0])
    assert found["rate"] == SMALL.rates[found["tried"].index(min(found["tried"]))]
