"""The study of optimizers in miniature: equal terms for all arms, and readings that can fail."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from papers.dead_directions import optimizer_comparison as study
from papers.dead_directions.chain_rates import simplex
from papers.dead_directions.optimizer_comparison import Moment, read_moment, readable
from papers.dead_directions.optimizer_figures import optimizer_panels
from papers.dead_directions.optimizer_tasks import Task, digits, gpt, losses, modular
from papers.outcome import asked
from topograd.optim import find_gauges
from topograd.optim.gauges.translation import Translation
from topograd.report.drawing import style

ADAMW, RELATIVE, ZLOSS, DDC, RETRACT, SGD = study.ARMS


def small(steps: int = 40, shrink: float = 0.0) -> Task:
    return modular(p=7, steps=steps, shrink=shrink, hidden=16)


@pytest.mark.parametrize("make", [small, lambda: gpt(width=16, text=4096), digits])
def test_the_gauges_of_a_task_are_those_that_can_be_found(make: Callable[[], Task]) -> None:
    if make is digits:
        pytest.importorskip("sklearn")
    task = make()
    model = task.build()
    inputs = task.learnt[0][:4]
    example = inputs.double() if inputs.is_floating_point() else inputs
    assert find_gauges(model, example).gauges == task.gauges
    assert isinstance(study.make_optimizer(DDC, task, model, 1e-3), torch.optim.Optimizer)


def test_no_example_is_both_learnt_and_unseen() -> None:
    task = modular()
    learnt, unseen = ({tuple(pair) for pair in part[0].tolist()} for part in (task.learnt, task.unseen))
    assert not learnt & unseen
    assert len(learnt) + len(unseen) == 31**2
    assert torch.equal(task.unseen[0].sum(1) % 31, task.unseen[1])


def test_first_steps_of_rescaled_weights_have_the_size_of_adams() -> None:
    task = small()
    moved = {}
    for arm in (ADAMW, DDC):
        torch.manual_seed(0)
        model = task.build()
        before = model.get_parameter("up.weight").detach().clone()
        optimizer = study.make_optimizer(arm, task, model, 1e-3)
        losses(model(task.learnt[0]), task.learnt[1]).backward()
        optimizer.step()
        moved[arm.name] = study.rms([model.get_parameter("up.weight").detach() - before])
    assert moved["DDCAdam"] == pytest.approx(moved["AdamW"], rel=0.5)


@pytest.mark.parametrize("arm", study.ARMS, ids=lambda arm: arm.name)
def test_all_arms_shrink_weights_alike_and_spare_translations(arm: study.Arm) -> None:
    task = small(shrink=1e-2)
    optimizer = study.make_optimizer(arm, task, task.build(), 1e-3)
    momentum = 1 - study.MOMENTUM if arm.base == "sgd" else 1.0
    taken = [group["lr"] * group["weight_decay"] / momentum for group in optimizer.param_groups]
    assert taken[0] == taken[1] == pytest.approx(1e-2)
    assert taken[-1] == 0.0
    assert isinstance(task.gauges[1], Translation)


def test_relative_rates_follow_the_weights_and_keep_the_decay() -> None:
    task = small(shrink=1e-2)
    model = task.build()
    optimizer = study.make_optimizer(RELATIVE, task, model, 1e-3)
    firsts = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    with torch.no_grad():
        model.get_parameter("up.weight").mul_(3)
        model.get_parameter("embedding.weight").mul_(3)
    study.set_rates(optimizer.param_groups, firsts, 0.5)
    rates = {group["param_names"][0]: group["lr"] for group in optimizer.param_groups}
    expected = {"embedding.weight": 5e-4, "up.weight": 1.5e-3, "down.weight": 5e-4}
    assert {name: rates[name] for name in expected} == pytest.approx(expected)
    shrunk = [group["lr"] * group["weight_decay"] for group in optimizer.param_groups[:-1]]
    assert shrunk == pytest.approx([5e-3] * len(shrunk))


def test_a_run_follows_from_its_seed() -> None:
    task = replace(small(steps=5), batch=8)
    one, again, other = (study.train(task, ADAMW, 1e-2, seed, readings=1) for seed in (0, 0, 1))
    assert one == again
    assert one.unseen != other.unseen


def test_ddc_adam_learns_and_stays_on_its_orbit_where_adamw_drifts() -> None:
    task = small(steps=120)
    found = {arm.name: study.train(task, arm, 1e-2, 0, readings=4) for arm in (ADAMW, DDC, RETRACT)}
    for run in found.values():
        assert run.learnt < 1.0
        assert run.gap == run.unseen - run.learnt
    assert found["AdamW"].rescale > 20 * found["DDCAdam"].rescale > 20 * found["DDCAdam, retract"].rescale
    assert found["AdamW"].shift > 1e-4 > 1e-6 > found["DDCAdam"].shift


def test_tuning_takes_the_best_rate_and_survives_divergence() -> None:
    lr, tried = study.tune(small(steps=20), SGD)
    assert tuple(tried) == SGD.rates
    assert tried[lr] == min(tried.values()) < float("inf")
    assert len({len(arm.rates) for arm in study.ARMS}) == 1


@pytest.mark.parametrize("task", [small(steps=20), small(steps=20, shrink=1e-3)])
def test_rates_are_chosen_by_what_the_task_says(task: Task) -> None:
    _, tried = study.tune(task, DDC)
    run = study.train(task, DDC, 1e-2, study.TUNING, readings=1)
    assert task.tuned_on == ("unseen" if task.shrink else "learnt")
    assert tried[1e-2] == (run.unseen if task.shrink else run.learnt) != run.gap


def test_the_study_becomes_tables_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "ADAM_RATES", (1e-3, 1e-2))
    monkeypatch.setattr(study, "ARMS", (ADAMW, DDC))
    found = study.run(asked("optimizers", "tiny", seeds=2))
    (table,) = found.tables
    assert [row[0] for row in table.rows] == ["AdamW", "DDCAdam"]
    assert all(len(row) == len(table.header) for row in table.rows)
    assert [(row["arm"], row["seed"]) for row in found.rows] == [
        (arm, seed) for arm in ("AdamW", "DDCAdam") for seed in (0, 1)
    ]
    with style():
        drawn = optimizer_panels(found.record)
    assert [panel.name for panel in drawn] == ["equivariance", "drift", "unseen"]
    ends = [
        run["curves"]["unseen"][-1] for run in found.record["by_task"][0]["runs"] if run["arm"] == "AdamW"
    ]
    shown = drawn[2].table
    assert shown is not None
    assert shown.rows[0] == ("AdamW", f"{sum(ends) / 2:.3f}")


def test_a_table_marks_rates_at_the_end_of_the_grid() -> None:
    run = study.train(small(steps=6), ADAMW, 1e-2, 0, readings=1)
    runs = [{**vars(run), "gap": run.gap}] * 2
    for tried, mark in (({1e-3: 2.0, 1e-2: 1.0}, "0.01*"), ({1e-3: 2.0, 1e-2: 1.0, 0.1: 3.0}, "0.01")):
        assert study.table({"task": "t", "tried": {"AdamW": tried}, "runs": runs}).rows[0][1] == mark


class TestRates:
    def test_a_shared_dead_direction_is_aligned_and_read(self) -> None:
        moments = []
        torch.manual_seed(0)
        inputs = torch.randn(64, 4, dtype=torch.float64)
        for t in (0.005, 0.01, 0.02, 0.04, 0.07, 0.1):
            up, down = (nn.Linear(4, size, bias=False, dtype=torch.float64) for size in (4, 5))
            scales = torch.tensor([1.0, 1.0, 1.0, t], dtype=torch.float64)
            with torch.no_grad():
                up.weight.copy_(torch.diag(scales))
                down.weight.copy_(simplex(4, inputs) @ torch.diag(scales))
            moments.append(read_moment(nn.Sequential(up, nn.Identity(), down), ("0", "2"), inputs))
        rate = readable(moments)
        assert rate.refused is None
        assert rate.slope == pytest.approx(2.0, abs=0.1)

    def test_one_moment_without_alignment_refuses_the_rate(self) -> None:
        moments = [Moment(t, t**2, 1.0) for t in (0.005, 0.01, 0.02, 0.05, 0.1)]
        assert readable(moments).slope == pytest.approx(2.0)
        refused = readable([*moments, Moment(0.06, 0.0036, 0.5)]).refused
        assert refused is not None
        assert "alignment error 1.7" in refused

    def test_units_that_never_fire_leave_nothing_to_read(self) -> None:
        refused = readable([Moment(0.0, 0.0, 1.0)] * 6).refused
        assert refused is not None
        assert "a rate needs 5" in refused
