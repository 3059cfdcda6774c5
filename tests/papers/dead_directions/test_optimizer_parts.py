"""DDCAdam taken apart in miniature: each arm changes what it says, and nothing else."""

import math
from typing import Any

import pytest
import torch

from papers.dead_directions import optimizer_parts as study
from papers.dead_directions.optimizer_comparison import Arm, make_optimizer, train
from papers.dead_directions.optimizer_tasks import losses, modular
from papers.outcome import asked
from papers.run import run_study

ARMS = {arm.name: arm for arm in (*study.BOTH, *study.PARTS, *study.PEERS)}


def test_the_study_in_miniature(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(study, "TRIED", {base: rates[:1] for base, rates in study.TRIED.items()})
    told: list[tuple[int, int]] = []
    found = run_study(asked("optimizer-parts", "tiny", on_more=lambda *done: told.append(done)))
    assert told[-1] == (25, 25), "14 arms and 5 are trained once, and 3 peers tuned on both tasks"
    assert [row[0] for row in found["tables"][0]["rows"]] == list(ARMS)
    assert len(found["tables"][1]["rows"]) == 5


def decays(arm: Arm) -> dict[str, float]:
    task = modular(p=5, hidden=8)
    model = task.build()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = make_optimizer(arm, task, model, 1e-2).param_groups
    return {names[id(p)]: group["lr"] * group["weight_decay"] for group in groups for p in group["params"]}


@pytest.mark.parametrize("base", ["DDCAdam", "AdamW"])
def test_what_decays(base: str) -> None:
    rescaled = {"up.weight", "up.bias", "down.weight"}
    for part, wanted in (("decay on the MLP alone", rescaled), ("decay elsewhere", {"embedding.weight"})):
        found = decays(ARMS[f"{base}, {part}"])
        assert {name for name, shrink in found.items() if shrink} == wanted
        assert all(shrink in (0, pytest.approx(2e-3)) for shrink in found.values())


def test_a_part_has_the_rate_of_its_optimizer() -> None:
    task = modular(p=5, hidden=8)
    assert {study.chosen(task, arm) for arm in study.PARTS if arm.base == "adamw"} == {1e-2}
    assert study.chosen(task, ARMS["DDCAdam, shift alone"]) == 1e-2
    assert study.chosen(task, ARMS["DDCAdam, rescaling alone"]) == 1e-3


def test_gauges_that_ddcadam_is_told_of() -> None:
    task = modular(p=5, hidden=8)
    both = {}
    for name in ("DDCAdam", "DDCAdam, rescaling alone", "DDCAdam, shift alone"):
        optimizer = make_optimizer(ARMS[name], task, task.build(), 1e-2)
        both[name] = [text.split("(")[0] for text in optimizer.param_groups[0]["gauges"]]
    assert list(both.values()) == [["ReLURescale", "CEShiftBias"], ["ReLURescale"], ["CEShiftBias"]]


@pytest.mark.parametrize("base", ["DDCAdam", "AdamW"])
def test_norms_by_decay_alone(base: str) -> None:
    """With no decay norms stay; directions do not."""
    task = modular(p=5, hidden=8, shrink=0.0, steps=3)
    torch.manual_seed(0)
    first = task.build().get_parameter("up.weight").detach()
    seen: dict[str, Any] = {}

    def build() -> Any:
        seen["model"] = modular(p=5, hidden=8).build()
        return seen["model"]

    object.__setattr__(task, "build", build)
    train(task, ARMS[f"{base}, norms by decay alone"], 1e-2, 0, readings=1)
    last = seen["model"].get_parameter("up.weight").detach()
    assert last.norm().item() == pytest.approx(first.norm().item(), rel=1e-5)
    assert (last - first).norm() > 1e-3 * first.norm()


def test_decay_in_raw_and_lifted_coordinates_is_one_step() -> None:
    """ρ W moves log-norms by log ρ each: the radial coordinate, and no direction."""
    task = modular(p=5, hidden=8)
    (gauge, _), model = task.gauges, task.build().double()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = {name: 0.9 * p for name, p in before.items()}
    one, two = gauge.invariants(before), gauge.invariants(after)
    assert gauge.drift(before, after) < 1e-14
    for name in ("up.weight", "down.weight", "up.bias"):
        torch.testing.assert_close(one[name], two[name])
    moved = (two["radial"] - one["radial"]).item()
    assert moved == pytest.approx(math.sqrt(2) * math.log(0.9))


@pytest.mark.parametrize("peer", study.PEERS, ids=lambda arm: arm.name)
def test_peers_learn(peer: Arm) -> None:
    task = modular(p=5, hidden=8, shrink=0.0, steps=60)
    before = losses(task.build()(task.learnt[0]), task.learnt[1]).item()
    assert train(task, peer, 3e-2, 0, readings=1).learnt < 0.9 * before


def test_gains_and_what_is_kept_of_them() -> None:
    rows = []
    for seed in range(3):
        for name in ARMS:
            loss = {"AdamW": 1.0, "DDCAdam": 0.1}.get(name, 0.3 if name.startswith("DDCAdam") else 1.1)
            for task in ("modular", "digits"):
                rows.append(
                    {
                        "task": task,
                        "arm": name,
                        "seed": seed,
                        "lr": 0.1,
                        "learnt": 0.0,
                        "unseen": loss * (1 + 0.01 * seed),
                        "accuracy": 1.0,
                    }
                )
    assert study.gains(rows, "modular", "DDCAdam") == pytest.approx([1.0, 1.0, 1.0])
    verdicts = {claim.name: claim.verdict for claim in study.claims(rows)}
    assert verdicts["modular: DDCAdam, shift alone gains on AdamW"] == "held"
    assert verdicts["modular: AdamW, relative gains on AdamW"] == "failed"
    assert "DDCAdam, rescaling alone 52%" in study.findings(rows)[0]
    assert study.table("modular", rows).rows[1][-1] == "1.00"
