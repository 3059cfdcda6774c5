"""Bounds, flip-rate thresholds, the sample, and what is stored."""

import copy
import json
import math
from typing import Any

import pytest
import torch

from topograd.decode.calibration import EPS, SAMPLE, Bounds, Calibration, flip_thresholds
from topograd.decode.readings import Readings, read
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
    stored = calibration.as_dict()
    assert stored["flip_thresholds"]["0.05"] == [None]
    assert Calibration.from_dict(stored) == calibration


def test_threshold_looks_up_the_grid(readings: Readings, calibration: Calibration) -> None:
    for eps in EPS:
        assert tuple(calibration.threshold(k, eps) for k in range(2)) == flip_thresholds(readings, eps)
    first = [calibration.threshold(0, eps) for eps in EPS]
    assert first == sorted(first, reverse=True)
    assert first[0] > first[-1]
    with pytest.raises(ConfigError, match=r"eps 0.003 has no calibrated thresholds; choose one of \(0.0002,"):
        calibration.threshold(0, 0.003)
    for stage in (-1, 2):
        with pytest.raises(ConfigError, match=rf"stage {stage + 1} has no early exit; stages 1\.\.2 have"):
            calibration.threshold(stage, 0.01)


def test_a_small_sample_is_everything(readings: Readings, calibration: Calibration) -> None:
    sample = calibration.sample
    assert sample.lengths == (50,) * 40
    assert torch.equal(torch.tensor(sample.agrees), (readings.top[:-1] == readings.top[-1]).long())
    assert (torch.tensor(sample.margins) - readings.margin[:-1]).abs().max() <= 0.0005001
    assert all(margin == round(margin, 3) for row in sample.margins for margin in row)


@pytest.mark.parametrize(
    ("tokens", "length", "lengths", "chosen"),
    [
        (15_000, 500, [500] * 12, [i * 5 // 2 for i in range(12)]),
        (6_002, 3_001, [3_001, 2_999], [0, 1]),
        (7_000, 7_000, [6_000], [0]),
    ],
    ids=["many", "two", "one"],
)
def test_a_large_sample_is_of_whole_sequences_evenly_spaced(
    tokens: int, length: int, lengths: list[int], chosen: list[int]
) -> None:
    readings = make(2, tokens, length)
    sample = Calibration.of(readings, 0).sample
    assert list(sample.lengths) == lengths
    assert sum(lengths) <= SAMPLE
    spans = [readings.margin[0, i * length :][:n] for i, n in zip(chosen, lengths, strict=True)]
    expected = [round(m, 3) for m in torch.cat(spans).tolist()]
    assert list(sample.margins[0]) == expected


def test_json_there_and_back(calibration: Calibration) -> None:
    text = json.dumps(calibration.as_dict(), allow_nan=False)
    assert Calibration.from_dict(json.loads(text)) == calibration


def test_what_cannot_be_calibrated(readings: Readings) -> None:
    with pytest.raises(RunError, match="1 predicting stage has no early exit"):
        Calibration.of(make(1), 0)
    with pytest.raises(DataError, match="no tokens to calibrate on"):
        Calibration.of(readings.take(torch.tensor([], dtype=torch.long)), 0)
    logits = torch.zeros(2, 5, 3)
    logits[0, 1, 2] = math.nan
    logits[1, 3, 0] = -math.inf
    with pytest.raises(RunError, match="the logits of 2 of 5 tokens are not finite"):
        Calibration.of(read(list(logits), torch.zeros(5)), 0)


@pytest.mark.parametrize(
    "values", [None, [], {}, {"format": "other"}], ids=["none", "list", "empty", "other"]
)
def test_a_foreign_file(values: object) -> None:
    with pytest.raises(RunError, match="does not name the format 'topograd-calibration'"):
        Calibration.from_dict(values)


DAMAGE: list[tuple[str, Any, str]] = [
    ("version", 2, "has version 2, this program reads version 1"),
    ("step", -1, "'step' is -1, not a whole number of at least 0"),
    ("step", 1.0, "'step' is 1.0"),
    ("stages", 1, "'stages' is 1, not a whole number of at least 2"),
    ("stages", 4, "'shift p99' is not a list of 3 numbers"),
    ("tokens", True, "'tokens' is True"),
    ("shift", [1, 2], "'p99' is missing"),
    ("gain", {"p99": [1, 2]}, "'max' is missing"),
    ("gain", {"p99": [1, 2], "max": [1, math.inf]}, "'gain max' holds inf"),
    ("gain", {"p99": [1, -2], "max": [1, 2]}, "'gain p99' holds -2"),
    ("change_rate", [0.1, 1.5], r"'change_rate' holds 1.5, not a number of 0\.\.1"),
    ("change_rate", [0.1, None], "'change_rate' holds None"),
    ("change_rate", [0.1, True], "'change_rate' holds True"),
    ("agreement", [0.1, math.nan, 1], "'agreement' holds nan"),
    ("agreement", "1", "'agreement' is not a list of 3 numbers"),
    ("flip_thresholds", {"0.0002": [1, 2]}, "'0.0005' is missing"),
    ("flip_thresholds", {str(eps): [1, "2"] for eps in EPS}, "'flip threshold 0.0002' holds '2'"),
    ("sample", {}, "'lengths' is missing"),
    ("sample", {"lengths": [0]}, "'lengths' is not a list of whole numbers"),
    ("sample", {"lengths": [2], "margins": [[1, 2]]}, "'margins' is not a list of 2 rows"),
    ("sample", {"lengths": [2], "margins": [[1, 2], [1]]}, "'margins' is not a list of 2 numbers"),
    ("sample", {"lengths": [1], "margins": [[1], [1]], "agrees": [[0.5], [1]]}, "other than 0 and 1"),
    ("sample", {"lengths": [1], "margins": [[1], [1]], "agrees": [[2], [1]]}, "'agrees' holds 2"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), DAMAGE, ids=[f"{i}-{d[0]}" for i, d in enumerate(DAMAGE)]
)
def test_a_damaged_file(calibration: Calibration, name: str, value: Any, message: str) -> None:
    values = copy.deepcopy(calibration.as_dict())
    values[name] = value
    with pytest.raises(RunError, match=message):
        Calibration.from_dict(values)


@pytest.mark.parametrize(
    "name",
    ["step", "stages", "tokens", "shift", "gain", "change_rate", "agreement", "flip_thresholds", "sample"],
)
def test_a_missing_field(calibration: Calibration, name: str) -> None:
    values = calibration.as_dict()
    del values[name]
    with pytest.raises(RunError, match=f"damaged: '{name}' is missing; calibrate again"):
        Calibration.from_dict(values)
