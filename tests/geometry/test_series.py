"""Series: one probe and one rank, change points and alarms that can be wrong."""

import math

import pytest
import torch
from torch import nn

from raising import refused
from topograd.errors import GeometryError
from topograd.geometry.monitors.stream import StreamMonitor
from topograd.geometry.series import (
    Point,
    SeriesReader,
    alarms,
    change_points,
    events,
    schur_ratio,
)
from topograd.nn.gpt import GPT

STEPS = list(range(0, 2400, 100))


def noisy(values: list[float], seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    noise = (0.02 * torch.randn(len(values), generator=generator)).exp()
    return [value * float(factor) for value, factor in zip(values, noise, strict=True)]


def test_a_level_and_a_slope_change_where_they_do() -> None:
    level = noisy([1.0] * 10 + [0.3] * 14)
    (found,) = change_points("sigma", STEPS, level)
    assert found.step == 1000
    assert found.after == pytest.approx(0.3, rel=0.1)
    slope = noisy([math.exp(0.3 * max(0, i - 12)) for i in range(24)])
    (found,) = change_points("loss", STEPS, slope)
    assert abs(found.step - 1200) <= 200


def test_smooth_curves_do_not_change() -> None:
    """What straight lines are not: decays, powers, slow transitions, waves. A jump on top of one is found."""
    i = torch.arange(24).double()
    curves = [
        (0.5 + 2 * (-i / 4).exp()).log(),
        -0.5 * (1 + i).log(),
        torch.sigmoid((i - 12) / 3),
        (i / 5).cos(),
    ]
    wrong = 0
    for curve in curves:
        for seed in range(12):
            wrong += bool(change_points("s", STEPS, noisy(curve.exp().tolist(), seed)))
        jump = (curve - 0.6 * (i >= 15)).exp().tolist()
        found = [event.step for event in change_points("s", STEPS, noisy(jump))]
        assert 1500 in found
        wrong += len(found) - 1
    assert wrong <= 4, "of 52"


def test_stationary_series_rarely_change() -> None:
    wrong = sum(bool(change_points("s", STEPS, noisy([1.0] * 24, seed))) for seed in range(60))
    assert wrong <= 3
    assert not change_points("s", STEPS, [2.0] * 24)
    assert not change_points("s", STEPS[:5], [1.0, 1.0, 5.0, 5.0, 5.0]), "too few to tell"
    few = sum(bool(change_points("s", STEPS[:8], noisy([1.0] * 8, seed))) for seed in range(60))
    assert few <= 6


def test_alarms_are_readings_far_from_those_before() -> None:
    values = noisy([1.0] * 12 + [5.0] + [1.0] * 11)
    assert [event.step for event in alarms("loss", STEPS, values)] == [1200]
    assert not alarms("loss", STEPS[:6], [1.0, 1.0, 1.0, 1.0, 1.0, 9.0])


def test_a_coefficient_that_is_not_calibrated_makes_no_event() -> None:
    values = [1.0] * 12 + [9.0] * 12
    for calibrated in (True, False):
        points = [
            Point(step, None, 1.0, 0.0, 1.0, 1.0, value, None, calibrated, None)
            for step, value in zip(STEPS, values, strict=True)
        ]
        signals = {event.signal for part in events(points).values() for event in part}
        assert signals == ({"coefficient"} if calibrated else set())


def test_the_schur_ratio_of_independent_and_of_copied_channels() -> None:
    torch.manual_seed(0)
    rows = torch.randn(4000, 6).double()
    assert schur_ratio(rows.T @ rows) < 0.01
    rows[:, 3:] = rows[:, :3] + 1e-3 * rows[:, 3:]
    assert schur_ratio(rows.T @ rows) > 0.99


def test_a_model_that_does_not_change_reads_the_same() -> None:
    torch.manual_seed(0)
    model = GPT(layers=2, width=8, heads=2, vocab=16, context=8)
    tokens = torch.randint(16, (8, 8))
    batches = [(tokens, tokens.roll(-1, 1))]
    reader = SeriesReader(batches, sampling=None)
    first, second = (reader.read(model, step) for step in (0, 10))
    assert (first.sigma, first.schur, first.loss) == (second.sigma, second.schur, second.loss)
    with StreamMonitor(model) as monitor, torch.no_grad():
        model(tokens)
    assert reader.rank == int(0.75 * monitor.profile().rank)
    assert first.sigma == monitor.profile(reader.rank).sigma[-1]
    assert first.reason == "not sampled"
    for name, parameter in model.named_parameters():
        if "layers" not in name:
            nn.init.ones_(parameter)
    assert reader.read(model, 20).sigma is None, "the input has lost its rank"
    assert events([first, second])["alarms"] == []


def test_bad_requests() -> None:
    with refused(GeometryError, setting="batches"):
        SeriesReader([])
    with refused(GeometryError, setting="values", given=1):
        change_points("loss", [1, 2], [1.0])
    with refused(GeometryError, setting="values", given=0.0):
        change_points("loss", [1, 2], [1.0, 0.0])
