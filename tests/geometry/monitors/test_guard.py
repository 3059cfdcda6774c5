"""Actions on alarms in a plain loop: what is left out, lowered or restored, bit for bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from raising import refused
from topograd.errors import DivergenceError, GeometryError
from topograd.geometry.monitors.early_warning import EarlyWarning
from topograd.geometry.monitors.guard import CALM, LOWER, MAX_REFUSED, Guard, OnAlarm

BAD = 35


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    return (x, x.sum(1, keepdim=True)) if step != BAD else (x, 1e3 * torch.ones(16, 1))


def train(
    action: OnAlarm,
    steps: int = 50,
    see: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
) -> tuple[nn.Module, Guard]:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = EarlyWarning(model, signals=("loss", "gradient_norm"))
    guard = Guard(monitor, action, model, optimizer, keep_every=5)
    with monitor:
        for step in range(steps):
            x, y = batch(step)
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if guard.allows(step, loss, batch=f"batch {step}"):
                optimizer.step()
            if see is not None:
                see(step, model, optimizer)
    return model, guard


def test_every_action_names_the_batch_and_nothing_else_alarms() -> None:
    for action in ("report", "skip", "lower", "rollback"):
        _, guard = train(action)
        (done,) = guard.actions
        assert (done.step, done.batch, done.action) == (BAD, f"batch {BAD}", action)
        assert {alarm.signal for alarm in done.alarms} == {"loss", "gradient_norm"}
        assert f"batch {BAD}" in str(done)


def test_report_changes_nothing_and_skip_leaves_one_step_out() -> None:
    reported, _ = train("report")
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    twins = {}
    for left_out in (None, BAD):
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(50):
            x, y = batch(step)
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            if step != left_out:
                optimizer.step()
        twins[left_out] = model
    assert torch.equal(reported.get_parameter("weight"), twins[None].weight)
    assert torch.equal(train("skip")[0].get_parameter("weight"), twins[BAD].weight)


def test_a_rollback_is_bit_exact() -> None:
    kept = {}

    def see(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        moments = [value.clone() for state in optimizer.state.values() for value in state.values()]
        kept[step] = [p.detach().clone() for p in model.parameters()] + moments

    _, guard = train("rollback", see=see)
    restored = guard.actions[0].restored
    assert restored is not None
    assert BAD - 5 <= restored < BAD
    before = kept[restored - 1]  # what was there before the step that had no alarm
    assert len(before) == len(kept[BAD])
    assert all(torch.equal(a, b) for a, b in zip(before, kept[BAD], strict=True))
    assert not torch.equal(kept[BAD - 1][0], kept[BAD][0])


def test_lower_is_for_a_while_and_the_rate_comes_back() -> None:
    held: dict[int, Tensor] = {}

    def see(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        assert optimizer.param_groups[0]["lr"] == 1e-3
        held[step] = model.get_parameter("weight").detach().clone()

    train("lower", steps=BAD + CALM + 5, see=see)
    moved = {step: float((held[step] - held[step - 1]).abs().max()) for step in range(1, len(held))}
    lowered = [moved[step] for step in range(BAD, BAD + CALM)]
    assert max(lowered) < 2 * LOWER * 1e-3
    assert moved[BAD + CALM] > 0.2e-3


def test_a_loss_that_is_not_finite_ends_after_many_steps() -> None:
    model = nn.Linear(1, 1)
    guard = Guard(EarlyWarning(model, signals=("loss",)), "skip", model)
    with refused(DivergenceError, setting="on_alarm"):
        for step in range(2 * MAX_REFUSED):
            assert not guard.allows(step, float("nan"))
    assert len(guard.actions) == MAX_REFUSED + 1


def test_a_restored_guard_acts_alike() -> None:
    model = nn.Linear(1, 1)
    first, second = (Guard(EarlyWarning(model, signals=("loss",)), "skip", model) for _ in range(2))
    for step in range(20):
        first.allows(step, 1.0 + 0.01 * (step % 3))
    second.load_state(first.state())
    assert first.allows(20, 9.0) == second.allows(20, 9.0) is False
    assert first.state() == second.state()


def test_bad_requests() -> None:
    model = nn.Linear(1, 1)
    with refused(GeometryError, setting="action", given="stop"):
        Guard(EarlyWarning(model), "stop")  # type: ignore[arg-type]
    with refused(GeometryError, setting="model"):
        Guard(EarlyWarning(model), "rollback", None, torch.optim.SGD(model.parameters()))
    with refused(GeometryError, setting="keep_every", given=0):
        Guard(EarlyWarning(model), "rollback", model, torch.optim.SGD(model.parameters()), keep_every=0)


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_the_trainer_of_transformers_acts(action: OnAlarm, tmp_path: object) -> None:
    transformers = pytest.importorskip("transformers")
    from topograd.geometry.monitors.adapters import trainer_callback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.map = nn.Linear(4, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.map(x) - labels).square().mean()}

    rows = [{"x": x, "labels": y} for step in range(45) for x, y in zip(*batch(step), strict=True)]
    model = Model()
    guard = Guard(EarlyWarning(model, signals=("gradient_norm",)), action, model, keep_every=5)
    seen: list[Tensor] = []

    class See(transformers.TrainerCallback):  # type: ignore[name-defined]
        def on_step_end(self, args: object, state: object, control: object, **more: object) -> None:
            seen.append(model.map.weight.detach().clone())

    still = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True}
    order = {"lr_scheduler_type": "constant", "learning_rate": 1e-3, "train_sampling_strategy": "sequential"}
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=16, max_steps=45, **still, **order
    )
    transformers.Trainer(model, args, train_dataset=rows, callbacks=[trainer_callback(guard), See()]).train()
    (done,) = guard.actions
    assert done.step == BAD
    expected = BAD if action == "skip" else done.restored
    assert expected is not None
    assert torch.equal(seen[BAD], seen[expected - 1])
