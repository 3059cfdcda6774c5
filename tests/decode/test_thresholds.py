"""Bounds, flip-rate thresholds, and what is stored of them."""

import json
import math
from typing import Any

import pytest
import torch

from raising import refused
from topograd.decode.calibration.measure import (
    EPS,
    Bounds,
    Calibration,
    Readings,
    flip_thresholds,
    read,
)
from topograd.decode.calibration.store import calibration_dict, calibration_of
from topograd.errors import ConfigError, DataError, RunError


def make(stages: int = 3, tokens: int = 2000, length: int = 50, seed: int = 0) -> Readings:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(stages, tokens, 6, generator=generator, dtype=torch.float64)
    noise[1:] *= 0.4
    return read(list(noise.cumsum(0)), torch.arange(tokens) // length)


def by_hand(margins: list[list[float]], wrong: list[list[int]]) -> Readings:
    """Readings with given margins of the exit stages, and which of their tops differ from the last's."""
    tokens = len(margins[0])
    exits = len(margins)
    top = torch.tensor([*wrong, [0] * tokens])
    margin = torch.tensor([*margins, [1.0] * tokens])
    zeros = torch.zeros(exits, tokens)
    return Readings(top, margin, zeros, zeros, torch.zeros(tokens, dtype=torch.long))


def flips(readings: Readings, taus: tuple[float, ...]) -> list[int]:
    """Wrong tokens that leave at each stage, one token at a time."""
    count = [0] * len(taus)
    for t in range(len(readings)):
        for k, tau in enumerate(taus):
            if readings.margin[k, t].item() > tau:
                count[k] += int(readings.top[k, t] != readings.top[-1, t])
                break
    return count


@pytest.fixture(scope="module")
def readings() -> Readings:
    return make()


@pytest.fixture(scope="module")
def calibration(readings: Readings) -> Calibration:
    return Calibration.of(readings, step=40)


def test_bounds_and_rates(readings: Readings, calibration: Calibration) -> None:
    assert (calibration.step, calibration.stages, calibration.tokens) == (40, 3, 2000)
    for bounds, table in ((calibration.shift, readings.shift), (calibration.gain, readings.gain)):
        for k, row in enumerate(table.tolist()):
            assert bounds.max[k] == max(row)
            assert bounds.p99[k] == sorted(row)[1979]  # 1980 of 2000 do not exceed it
    top = readings.top.tolist()
    for k in range(2):
        changes = sum(a != b for a, b in zip(top[k], top[k + 1], strict=True))
        assert calibration.change_rate[k] == changes / 2000
    for k in range(3):
        agreeing = sum(a == b for a, b in zip(top[k], top[2], strict=True))
        assert calibration.agreement[k] == agreeing / 2000
    assert calibration.agreement[2] == 1


@pytest.mark.parametrize(("tokens", "p99"), [(1, 1), (99, 99), (100, 99), (101, 100), (150, 149)], ids=str)
def test_p99_covers_99_percent_of_any_number_of_tokens(tokens: int, p99: int) -> None:
    assert Bounds.of(torch.arange(1.0, tokens + 1)[None]) == Bounds((p99,), (tokens,))


@pytest.mark.parametrize("stages", [2, 3, 5])
@pytest.mark.parametrize("eps", EPS)
def test_at_most_eps_of_the_calibration_tokens_flip(stages: int, eps: float) -> None:
    """The theorem of the module's head, for every stage's part and for the whole."""
    readings = make(stages)
    count = flips(readings, flip_thresholds(readings, eps))
    assert max(count) <= eps * 2000 / (stages - 1) + 1e-9
    assert sum(count) / 2000 <= eps


@pytest.mark.parametrize("eps", [0.002, 0.02, 0.05])
def test_no_smaller_threshold_would_do(eps: float) -> None:
    readings = make()
    taus = flip_thresholds(readings, eps)
    for k, tau in enumerate(taus):
        assert 0 < tau < math.inf
        lower = (*taus[:k], math.nextafter(tau, 0), *taus[k + 1 :])
        assert flips(readings, lower)[k] > eps * 2000 / 2


def test_thresholds_by_hand() -> None:
    """Ten tokens, one flip in ten allowed at each of two exits."""
    readings = by_hand(
        [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [9, 9, 9, 9, 1, 2, 3, 9, 9, 9]],
        [[1, 0, 0, 1, 0, 0, 1, 0, 1, 0], [0, 0, 1, 0, 0, 1, 0, 0, 1, 1]],
    )
    # Stage 0 is wrong at 9, 7, 4 and 1: above 7 one flip remains, and the tokens of 8, 9 and 10 leave.
    # Stage 1 is wrong at 9 and 2 among the seven others: above 2 one flip remains.
    assert flip_thresholds(readings, 0.2) == (7.0, 2.0)
    assert flip_thresholds(readings, 0.8) == (0.0, math.inf)  # all leave at once, and none is left to judge


def test_a_decimal_eps_is_not_rounded_down() -> None:
    """0.29 · 100 is 28.999... in binary; 29 flips are allowed."""
    readings = by_hand([[float(m) for m in range(1, 101)]], [[1] * 30 + [0] * 70])
    assert flip_thresholds(readings, 0.29) == (1.0,)
    assert flip_thresholds(readings, 0.30) == (0.0,)


def test_where_the_largest_margin_is_wrong_nothing_leaves() -> None:
    readings = by_hand([[1, 2, 3]], [[0, 0, 1]])
    assert flip_thresholds(readings, 0.01) == (math.inf,)
    calibration = Calibration.of(readings, 0)
    stored = json.loads(json.dumps(calibration_dict(calibration)))
    assert stored["flip_thresholds"]["0.05"] == [None]
    assert calibration_of(stored) == calibration


def test_smaller_eps_has_larger_thresholds(readings: Readings, calibration: Calibration) -> None:
    assert calibration.flip_thresholds == tuple(flip_thresholds(readings, eps) for eps in EPS)
    first = [each[0] for each in calibration.flip_thresholds]
    assert first == sorted(first, reverse=True)
    assert first[0] > first[-1]


def test_json_there_and_back(calibration: Calibration) -> None:
    text = json.dumps(calibration_dict(calibration), allow_nan=False)
    assert calibration_of(json.loads(text)) == calibration


def test_what_cannot_be_calibrated(readings: Readings) -> None:
    with refused(RunError, setting="stages", given=1):
        Calibration.of(make(1), 0)
    with refused(DataError, setting="tokens", given=0):
        Calibration.of(readings.take(torch.tensor([], dtype=torch.long)), 0)
    logits = torch.zeros(2, 5, 3)
    logits[0, 1, 2] = math.nan
    logits[1, 3, 0] = -math.inf
    with refused(RunError, setting="logits", given=2):
        Calibration.of(read(list(logits), torch.zeros(5)), 0)


DAMAGE: list[tuple[str, Any, str]] = [
    ("step", -1, "step"),
    ("step", 1.0, "step"),
    ("stages", 1, "stages"),
    ("stages", 4, "shift"),
    ("tokens", True, "tokens"),
    ("shift", [1, 2], "shift"),
    ("gain", {"p99": [1, 2]}, "gain.max"),
    ("gain", {"p99": [1, 2], "max": [1, math.inf]}, "gain"),
    ("gain", {"p99": [1, -2], "max": [1, 2]}, "gain"),
    ("change_rate", [0.1, 1.5], "change_rate"),
    ("change_rate", [0.1, None], "change_rate[1]"),
    ("change_rate", [0.1, True], "change_rate[1]"),
    ("agreement", "1", "agreement"),
    ("agreement", [0.1, math.nan, 1], "agreement"),
    ("flip_thresholds", {str(eps): [1, "2"] for eps in EPS}, "flip_thresholds[0][1]"),
]


@pytest.mark.parametrize(
    ("name", "value", "setting"), DAMAGE, ids=[f"{i}-{d[0]}" for i, d in enumerate(DAMAGE)]
)
def test_a_damaged_file(calibration: Calibration, name: str, value: Any, setting: str) -> None:
    values = json.loads(json.dumps(calibration_dict(calibration)))
    values["shift"] = {"p99": [1.0, 2.0], "max": [3.0, 4.0]}
    with refused(ConfigError, setting=setting):
        calibration_of(values | {name: value})


@pytest.mark.parametrize(
    "name", ["step", "stages", "tokens", "shift", "gain", "change_rate", "agreement", "flip_thresholds"]
)
def test_a_missing_field(calibration: Calibration, name: str) -> None:
    values = json.loads(json.dumps(calibration_dict(calibration)))
    del values[name]
    with pytest.raises((ConfigError, KeyError), match=name):
        calibration_of(values)
