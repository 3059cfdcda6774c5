"""Signals against their definitions, alarms that come and do not come, and hooks that go."""

import contextlib
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.early_warning import REST, SIGNALS, UPDATES, EarlyWarning
from topograd.geometry.monitors.outliers import MIN_READINGS, Furthest


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
    assert monitor.missing == {"critical_sharpness": "again= was not given"}
    with monitor:
        trained(monitor, net, optimizer, 3)
        x = torch.randn(64, 6)
        outputs = net(x)
        stream = net.blocks[1](x + net.blocks[0](x)).detach()
        labels = torch.randint(4, (64,))
        loss = F.cross_entropy(outputs, labels)
        optimizer.zero_grad()
        loss.backward()
        net.blocks[0][0].weight.grad[:2] = 0  # type: ignore[index]
        monitor.read(3, loss)
    values = seen[-1]
    assert values.keys() == SIGNALS.keys() - {*UPDATES, "turning_rank"}, "which have no usual value yet"
    first, last = torch.linalg.svdvals(x), torch.linalg.svdvals(stream)
    assert values["stream_sigma"] == pytest.approx(float(last[-1] / first[-1]), rel=1e-4)
    G = torch.autograd.grad(F.cross_entropy(leaf := outputs.detach().requires_grad_(), labels), leaf)[0]
    G = G.double().T @ G.double() / len(G)
    bottom = torch.linalg.eigvalsh(G)[1]  # the first is that of the softmax
    assert values["head_bottom"] == pytest.approx(float(bottom), rel=1e-4)
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
    assert monitor.missing.keys() == {"update_size", *UPDATES}
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


def test_updates_are_read_and_the_weights_put_back() -> None:
    net, plain = Net(), Net()
    seen: dict[int, dict[str, float]] = {}
    batch: list[Tensor] = []
    kept: list[list[Tensor]] = []

    def again() -> Tensor:
        return F.cross_entropy(net(batch[0]), (batch[0][:, 0] > 0).long())

    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    monitor = EarlyWarning(
        net,
        optimizer=optimizer,
        slow_every=1,
        signals=["layer_update", "critical_sharpness", "turning_rank", "logit_size"],
        again=again,
        writer=lambda step, values: seen.update({step: dict(values)}),
    )
    for model, watched in ((net, monitor), (plain, None)):
        generator = torch.Generator().manual_seed(0)
        one = optimizer if watched else torch.optim.AdamW(plain.parameters(), lr=1e-2)
        with watched or contextlib.nullcontext():
            for step in range(16):
                batch = [torch.randn(64, 6, generator=generator)]
                loss = F.cross_entropy(model(batch[0]), (batch[0][:, 0] > 0).long())
                one.zero_grad()
                loss.backward()
                if watched:
                    watched.read(step, loss)
                    for group in one.param_groups:
                        group["lr"] = 1.0 if step == 14 else 1e-2
                one.step()
                if step == 13:
                    kept.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True)), "as without a monitor"
    assert not optimizer._optimizer_step_pre_hooks
    assert seen[15]["layer_update"] > 10, "the rate was a hundred times larger in the step before"
    assert seen[15]["critical_sharpness"] > 4 * seen[14]["critical_sharpness"]


def test_a_rank_that_turns() -> None:
    furthest, rest = Furthest(-1), Furthest(-1)
    values = torch.tensor([4.0, 2.0, 1.0])
    assert [furthest.read(values) for _ in range(MIN_READINGS)] == [None] * MIN_READINGS
    assert furthest.read(torch.tensor([8.0, 2.0, 0.25])) == pytest.approx(4), "the third fell most"
    rest.load_state(furthest.state())
    assert rest.read(values) == furthest.read(values) == pytest.approx(1)


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
