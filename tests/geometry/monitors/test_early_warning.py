"""Signals against their definitions, alarms that come and do not come, and hooks that go."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.early_warning import MIN_READINGS, REST, SIGNALS, EarlyWarning


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def trained(monitor: EarlyWarning, net: Net, optimizer: torch.optim.Optimizer, steps: int = 30) -> None:
    generator = torch.Generator().manual_seed(0)
    for step in range(steps):
        x = torch.randn(64, 6, generator=generator)
        loss = F.cross_entropy(net(x), (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0))
        optimizer.zero_grad()
        loss.backward()
        monitor.read(step, loss)
        optimizer.step()


def test_every_signal_is_what_it_says() -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    seen: list[dict[str, float]] = []
    monitor = EarlyWarning(net, optimizer=optimizer, slow_every=1, writer=lambda s, v: seen.append(dict(v)))
    assert monitor.missing == {}
    with monitor:
        trained(monitor, net, optimizer, 3)
        x = torch.randn(64, 6)
        outputs = net(x)
        loss = F.cross_entropy(outputs, torch.randint(4, (64,)))
        optimizer.zero_grad()
        loss.backward()
        net.blocks[0][0].weight.grad[:2] = 0  # type: ignore[index]
        monitor.read(3, loss)
    values = seen[-1]
    assert values.keys() == SIGNALS.keys()
    assert values["loss"] == pytest.approx(loss.item())
    flat = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])
    assert values["gradient_norm"] == pytest.approx(flat.norm().item(), rel=1e-5)
    assert values["logit_size"] == pytest.approx(outputs.abs().max().item())
    rows = sum(p.shape[0] for p in net.parameters() if p.dim() == 2)
    assert values["dead_units"] == pytest.approx(1 + 100 * 2 / rows)
    assert 1 <= values["rank"] <= 6
    assert values["anisotropy"] > 1
    assert 1 <= values["norm_ratio_drift"] < 1.5
    squares = [
        (p.grad.square() / optimizer.state[p]["exp_avg_sq"]).flatten()
        for p in net.parameters()
        if p.grad is not None
    ]
    assert values["update_size"] == pytest.approx(
        torch.cat(squares).clamp(max=1e6).mean().sqrt().item(), rel=1e-4
    )


def test_hooks_go_and_slow_signals_come_seldom() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    seen: list[dict[str, float]] = []
    monitor = EarlyWarning(net, slow_every=4, every=2, writer=lambda s, v: seen.append(dict(v)))
    assert monitor.missing == {"update_size": "no optimizer was given"}
    with monitor:
        trained(monitor, net, optimizer, 9)
    assert ["rank" in values for values in seen] == [True, False, True, False, True]
    assert ["anisotropy" in values for values in seen] == [True, False, True, False, True]
    assert not net.head._forward_hooks
    assert not net.blocks[-1]._forward_hooks


def test_a_jump_is_an_alarm_once_and_a_calm_training_has_none() -> None:
    net = Net()
    monitor = EarlyWarning(net, signals=["loss"])
    generator = torch.Generator().manual_seed(1)
    calm = (1 + 0.05 * torch.randn(60, generator=generator)).tolist()
    assert not [alarm for step, value in enumerate(calm) for alarm in monitor.read(step, value)]
    (alarm,) = monitor.read(60, 4.0)
    assert (alarm.signal, alarm.step, alarm.value) == ("loss", 60, 4.0)
    assert alarm.usual == pytest.approx(1, abs=0.05)
    assert "usually" in str(alarm)
    assert not [again for step in range(61, 60 + REST) for again in monitor.read(step, 4.0)]
    early = EarlyWarning(net, signals=["loss"])
    assert not [one for step in range(MIN_READINGS) for one in early.read(step, 10.0**step)], (
        "too few to tell"
    )
    assert [one.signal for one in monitor.read(90, math.nan)] == ["loss"], "a loss that is no number is one"


def test_a_collapse_of_rank_and_dead_units() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    monitor = EarlyWarning(net, slow_every=1, signals=["rank", "dead_units"])
    with monitor:
        trained(monitor, net, optimizer, 20)
        assert not monitor.alarms
        with torch.no_grad():
            for block in net.blocks:
                block[0].bias.fill_(-100.0)  # type: ignore[index]
                block[2].weight[1:] = 0  # type: ignore[index]
        x = torch.randn(64, 1).expand(64, 6)
        loss = F.cross_entropy(net(x), torch.zeros(64, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        found = {alarm.signal for alarm in monitor.read(20, loss)}
    assert found == {"rank", "dead_units"}


@pytest.mark.parametrize("classes", [96, 1024])
def test_an_isotropic_head_has_no_anisotropy(classes: int) -> None:
    """Differences of neighbouring classes, which are no projection, would read (2C/π)²."""
    torch.manual_seed(0)
    head = nn.Linear(4, classes).double()
    early = EarlyWarning(
        head, head=head, signals=["anisotropy"], writer=lambda step, values: seen.update(values)
    )
    seen: dict[str, float] = {}
    rows = torch.randn(512, classes).double() * 40
    rows = rows - rows.mean(1, keepdim=True)
    with early:
        (head(torch.zeros(512, 4).double()) * rows).sum().backward()
        early.read(0, 1.0)
    assert 1 <= seen["anisotropy"] < 8, "6.4 and 4.4 by the sample of 512 rows (Marchenko and Pastur)"


def test_a_small_old_block_shows_beside_many_new_classes() -> None:
    """Random mixtures of all classes would average the two."""
    torch.manual_seed(0)
    head = nn.Linear(4, 1024).double()
    early = EarlyWarning(
        head, head=head, signals=["anisotropy"], writer=lambda step, values: seen.update(values)
    )
    seen: dict[str, float] = {}
    rows = torch.randn(512, 1024).double()
    rows[:, :100] *= 1e-3
    with early:
        (head(torch.zeros(512, 4).double()) * rows).sum().backward()
        early.read(0, 1.0)
    assert seen["anisotropy"] > 1e5


def test_bad_requests() -> None:
    net = Net()
    with refused(GeometryError, setting="slow_every", given=0):
        EarlyWarning(net, slow_every=0)
    with refused(GeometryError, setting="signals", given="mood"):
        EarlyWarning(net, signals=["mood"])
    with refused(GeometryError, setting="head", given="tail"):
        EarlyWarning(net, head="tail")
    lonely = EarlyWarning(nn.Embedding(3, 2))
    assert {"rank", "anisotropy", "norm_ratio_drift"} <= lonely.missing.keys()
