"""Exit thresholds of the three rules, and candidate pruning."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raising import refused
from topograd.decode.calibration.measure import EPS, Bounds, Calibration, Readings, read
from topograd.decode.calibration.policy import agreement, exits, thresholds
from topograd.decode.wand import survivors
from topograd.errors import ConfigError, DataError

STAGES, TOKENS, VOCAB = 4, 1500, 6


def logits(drift: float = 0.3, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(STAGES, TOKENS, VOCAB, generator=generator, dtype=torch.float64)
    noise[1:] *= drift
    return list(noise.cumsum(0))


@pytest.fixture(scope="module")
def readings() -> Readings:
    return read(logits(), torch.arange(TOKENS) // 50)


@pytest.fixture(scope="module")
def calibration(readings: Readings) -> Calibration:
    return Calibration.of(readings, 0)


def by_maxima(calibration: Calibration) -> Calibration:
    """Its largest readings in the place of its percentiles: bounds of its own text."""
    shift, gain = (Bounds(each.max, each.max) for each in (calibration.shift, calibration.gain))
    return replace(calibration, shift=shift, gain=gain)


def test_sum_of_bounds(calibration: Calibration) -> None:
    a, b, c = calibration.shift.p99
    assert thresholds(calibration, "sum-of-bounds") == pytest.approx((a + b + c, b + c, c), rel=1e-12)
    a, b, c = calibration.shift.max
    expected = (0.5 * (a + b + c), 0.5 * (b + c), 0.5 * c)
    found = thresholds(by_maxima(calibration), "sum-of-bounds", safety=0.5)
    assert found == pytest.approx(expected, rel=1e-12)


def test_rival_gain(calibration: Calibration) -> None:
    assert thresholds(calibration, "rival-gain") == calibration.gain.p99
    found = thresholds(by_maxima(calibration), "rival-gain", safety=2.0)
    assert found == tuple(2 * gain for gain in calibration.gain.max)


@pytest.mark.parametrize("eps", EPS)
def test_flip_rate(calibration: Calibration, readings: Readings, eps: float) -> None:
    taus = thresholds(calibration, "flip-rate", eps=eps)
    assert taus == calibration.flip_thresholds[EPS.index(eps)]
    assert agreement(readings, exits(readings, taus)) >= 1 - eps


def test_the_largest_gain_proves_every_exit_on_its_own_text(
    calibration: Calibration, readings: Readings
) -> None:
    leaves = exits(readings, thresholds(by_maxima(calibration), "rival-gain"))
    assert (leaves < STAGES - 1).any()
    assert agreement(readings, leaves) == 1.0


def test_a_bound_on_the_logits_moves_a_margin_by_twice_as_much() -> None:
    """Sum-of-bounds with safety 1 is no proof: no logit moves by more than 1, and a margin of 1.5 falls."""
    first = torch.tensor([[1.5, 0.0]] * 4, dtype=torch.float64)
    change = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    readings = read([first, first + change], torch.zeros(4))
    calibration = Calibration.of(readings, 0)
    once = exits(readings, thresholds(by_maxima(calibration), "sum-of-bounds"))
    assert once.tolist() == [0] * 4
    assert agreement(readings, once) == 0.0
    twice = exits(readings, thresholds(by_maxima(calibration), "sum-of-bounds", safety=2.0))
    assert twice.tolist() == [1] * 4
    assert agreement(readings, twice) == 1.0


def test_exits_are_the_first_stage_above_its_threshold(readings: Readings) -> None:
    limits = (1.0, 0.5, math.inf)
    expected = [
        next((k for k in range(3) if readings.margin[k, t].item() > limits[k]), 3) for t in range(TOKENS)
    ]
    found = exits(readings, limits)
    assert found.tolist() == expected
    assert set(expected) == {0, 1, 3}
    wrong = sum(int(readings.top[k, t] != readings.top[3, t]) for t, k in enumerate(expected))
    assert wrong > 0
    assert agreement(readings, found) == pytest.approx(1 - wrong / TOKENS, rel=1e-12)


def test_a_margin_equal_to_its_threshold_stays(readings: Readings) -> None:
    limit = readings.margin[0, 7].item()
    assert exits(readings, (limit, math.inf, math.inf))[7] == 3
    assert exits(readings, (math.nextafter(limit, 0), math.inf, math.inf))[7] == 0


def test_the_extremes(readings: Readings) -> None:
    assert (exits(readings, (math.inf,) * 3) == 3).all()
    assert (exits(readings, (0.0,) * 3) == 0).all()  # no ties among random numbers
    assert agreement(readings, exits(readings, (math.inf,) * 3)) == 1.0


def test_the_final_argmax_survives_its_true_gain() -> None:
    first, *_, last = logits(drift=1.0, seed=1)
    change = last - first
    pruned = moved = 0
    for z, change_of_token, final in zip(first, change, last.argmax(-1), strict=True):
        gain = (change_of_token.max() - change_of_token[z.argmax()]).item()
        left = survivors(z, gain).tolist()
        assert final.item() in left
        assert z.argmax().item() in left
        pruned += VOCAB - len(left)
        moved += int(final != z.argmax())
    assert pruned > 100  # or the claim would be empty
    assert moved > 100


@pytest.mark.parametrize(
    ("bound", "left"), [(0.0, [2]), (0.9, [2]), (1.0, [0, 2]), (math.inf, [0, 1, 2])], ids=str
)
def test_survivors_are_within_the_bound(bound: float, left: list[int]) -> None:
    assert survivors(torch.tensor([2.0, -1.0, 3.0]), bound).tolist() == left


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"rule": "wand"}, "rule"),
        ({"safety": 0.0}, "safety"),
        ({"safety": -math.inf}, "safety"),
        ({"rule": "flip-rate", "eps": 0.5}, "eps"),
    ],
)
def test_bad_settings(calibration: Calibration, settings: dict[str, Any], name: str) -> None:
    with refused(ConfigError, setting=name, given=settings[name]):
        thresholds(calibration, **{"rule": "rival-gain", **settings})


def test_bad_arguments(readings: Readings) -> None:
    with refused(ConfigError, setting="thresholds", given=[1.0, 1.0]):
        exits(readings, (1.0, 1.0))
    with refused(DataError, setting="tokens", given=0):
        agreement(readings.take(torch.zeros(TOKENS, dtype=torch.bool)), torch.zeros(0, dtype=torch.long))
    for bound in (-0.1, math.nan):
        with refused(ConfigError, setting="bound"):
            survivors(torch.zeros(3), bound)
    with refused(ConfigError, setting="logits", given=(1, 3)):
        survivors(torch.zeros(1, 3), 1.0)
