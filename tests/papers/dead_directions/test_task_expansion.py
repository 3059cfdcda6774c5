"""The alarm when a classifier 20-32-5 becomes 20-32-10, and its silence before."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.dead_directions.task_expansion import ExpansionDetector
from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.head_factor import anisotropy


def head_factor(hidden: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    """G of the head from the cross-entropy's own gradients p - e_y."""
    delta = (head(hidden).softmax(-1) - F.one_hot(labels, head.out_features)).detach()
    return delta.T @ delta / len(labels)


def grown(head: nn.Linear, outputs: int) -> nn.Linear:
    """The head with fresh random rows below the old ones."""
    wider = nn.Linear(head.in_features, outputs).double()
    with torch.no_grad():
        wider.weight[: head.out_features] = head.weight
        wider.bias[: head.out_features] = head.bias
    return wider


@pytest.mark.parametrize("seed", range(3))
def test_a_grown_head_raises_the_alarm_at_once(seed: int) -> None:
    torch.manual_seed(seed)
    labels = torch.arange(300) % 5
    inputs = torch.randn(5, 20).double()[labels] + 0.8 * torch.randn(300, 20).double()
    encoder = nn.Sequential(nn.Linear(20, 32), nn.ReLU()).double()
    head = nn.Linear(32, 5).double()
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], lr=1e-2)
    detector = ExpansionDetector(softmax=True)
    for step in range(1, 241):
        loss = F.cross_entropy(head(encoder(inputs)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            before = detector.update(head_factor(encoder(inputs), head, labels))
            assert not before.alarm
    after = detector.update(head_factor(encoder(inputs), grown(head, 10), labels))
    assert after.alarm
    assert after.log_anisotropy > before.log_anisotropy + 3, "20 times as anisotropic at least"


def test_with_the_gauge_nothing_would_be_seen() -> None:
    torch.manual_seed(0)
    hidden, labels = torch.randn(200, 8).double(), torch.arange(200) % 4
    factor = head_factor(hidden, nn.Linear(8, 4).double(), labels)
    assert anisotropy(factor, softmax=True) < 100
    assert anisotropy(factor, softmax=False) > 1e13


def test_without_the_ones_the_rest_of_the_spectrum_stays() -> None:
    torch.manual_seed(0)
    ones = torch.ones(5, 1, dtype=torch.float64)
    basis, _ = torch.linalg.qr(torch.cat((ones, torch.randn(5, 4, dtype=torch.float64)), dim=1))
    factor = basis @ torch.diag(torch.tensor([0.0, 2.0, 3.0, 5.0, 14.0]).double()) @ basis.T
    assert anisotropy(factor, softmax=True) == pytest.approx(7)


def test_the_alarm_waits_for_enough_readings_and_allows_some_slack() -> None:
    detector = ExpansionDetector(softmax=False)

    def reading(a: float) -> bool:
        return detector.update(torch.diag(torch.tensor([1.0, a]))).alarm

    few = (10.0, 1e6, *[10.0] * 6)
    assert not any(reading(a) for a in few), "too few to know what is usual"
    assert not reading(12.0)
    assert reading(14.0)
    assert not reading(2.0), "less anisotropic is no expansion"


def test_stationary_noise_raises_few_alarms() -> None:
    """3 MAD were 2 standard deviations: 4.5 % of readings of a head that does not change."""
    noise = (0.3 * torch.randn(4000, generator=torch.Generator().manual_seed(0))).double()
    detector = ExpansionDetector(softmax=False)
    alarms = [detector.update(torch.diag(torch.stack((a.exp(), (a * 0 - 5).exp())))).alarm for a in noise]
    assert sum(alarms) <= 8, "0.2 % of 4000"


@pytest.mark.parametrize(
    ("factor", "given"),
    [
        (torch.ones(2, 3), (2, 3)),
        (torch.eye(2), (2, 2)),
        (torch.zeros(3, 3), "zero"),
        (torch.full((3, 3), float("nan")), "not finite"),
    ],
)
def test_bad_factors_are_named(factor: Tensor, given: object) -> None:
    with refused(GeometryError, setting="factor", given=given):
        ExpansionDetector(softmax=True).update(factor)


def test_a_memory_must_hold_what_is_usual() -> None:
    with refused(GeometryError, setting="memory", given=3):
        ExpansionDetector(softmax=True, memory=3)
