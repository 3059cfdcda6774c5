import math
from dataclasses import replace

import pytest
from scipy import stats

from papers.outcome import Result
from papers.verdicts import (
    FAILED,
    HELD,
    UNDECIDED,
    Claim,
    Interval,
    Series,
    above,
    each,
    every,
    outside,
    settled,
    within,
    worst,
)


def test_intervals_are_scipys() -> None:
    values = [0.3, 0.5, 0.1, 0.4]
    found = Interval.of(values)
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((low, high))
    assert found.mean == pytest.approx(0.325)
    assert str(found) == f"+0.3250 [{low:+.4f}, {high:+.4f}]"


def test_one_seed_has_no_bounds() -> None:
    found = Interval.of([2.0])
    assert (found.mean, found.low, found.high) == (2.0, -math.inf, math.inf)
    assert str(found) == "+2.0000, one seed"


@pytest.mark.parametrize(
    ("values", "least", "verdict"),
    [
        ([1.0, 1.1, 1.2], 0.0, HELD),
        ([-1.0, -1.1, -1.2], 0.0, FAILED),
        ([-1.0, 0.5, 1.2], 0.0, UNDECIDED),
        ([1.0], 0.0, UNDECIDED),
        ([1.0, 1.1, 1.2], 1.5, FAILED),
        ([0.0, 0.0, 0.0], 0.0, UNDECIDED),
    ],
)
def test_above(values: list[float], least: float, verdict: str) -> None:
    claim = above("name", "words", "the effect", values, least)
    assert claim.verdict == verdict
    assert f"the effect lies above {least:g}" in claim.rule
    assert claim.values == tuple(values)


@pytest.mark.parametrize(
    ("values", "inside", "beyond"),
    [
        ([0.1, 0.11, 0.09], HELD, FAILED),
        ([1.1, 1.11, 1.09], FAILED, HELD),
        ([-1.1, -1.11, -1.09], FAILED, HELD),
        ([0.1, 2.0, 1.0], UNDECIDED, UNDECIDED),
        ([0.1], UNDECIDED, UNDECIDED),
    ],
)
def test_within_and_outside(values: list[float], inside: str, beyond: str) -> None:
    assert within("n", "w", "e", values, 0.5).verdict == inside
    assert outside("n", "w", "e", values, 0.5).verdict == beyond


def test_each_step_counts() -> None:
    rises, flat, falls = [1.0, 1.1], [-1.0, 1.0], [-1.0, -1.1]
    assert each("n", "w", "e", [rises, rises]).verdict == HELD
    assert each("n", "w", "e", [rises, flat]).verdict == UNDECIDED
    assert each("n", "w", "e", [rises, flat, falls]).verdict == FAILED
    assert each("n", "w", "e", [rises, falls]).values == pytest.approx((1.05, -1.05))


def test_every_seed_counts() -> None:
    assert every("n", "w", "e", [True, True]).verdict == HELD
    assert every("n", "w", "e", [False, False]).verdict == FAILED
    assert every("n", "w", "e", [True, False]).verdict == UNDECIDED
    assert every("n", "w", "e", [True]).verdict == UNDECIDED
    assert every("n", "w", "e", [True, False]).measured == "1 of 2 seeds"


def test_no_claim_holds_nothing() -> None:
    assert worst([]) == UNDECIDED


def test_models_that_know_nothing_decide_nothing() -> None:
    claims = [Claim("n", "w", "r", "m", verdict, ()) for verdict in (HELD, FAILED)]
    known = [{"seed": seed, "bpb": bpb, "order0": 4.0} for seed in (0, 1) for bpb in (3.0, 5.0)]
    assert [claim.verdict for claim in settled(claims, known)] == [HELD, FAILED]
    blind = [*known, {"seed": 2, "bpb": 4.5, "order0": 4.0}]
    assert [claim.verdict for claim in settled(claims, blind)] == [UNDECIDED, UNDECIDED]


def test_series_have_bars_where_there_are_seeds() -> None:
    found = Series.of("name", [1, 2], [[1.0, 3.0], [5.0]])
    assert found.y == (2.0, 5.0)
    assert found.low[0] < 1.0
    assert (found.low[1], found.high[1]) == (5.0, 5.0)


def test_a_result_has_the_verdict_of_its_claims() -> None:
    good = above("one", "is above", "it", [1.0, 1.1])
    bad = above("two", "is above", "it", [-1.0, -1.1])
    found = Result(setting="", rows=[], tables=(), claims=(good, bad))
    assert found.verdict == FAILED
    assert replace(found, claims=(good,), verdict=None).verdict == HELD
    assert Result(setting="", rows=[], tables=()).verdict is None, "nothing was claimed"
    assert Result(setting="", rows=[], tables=(), claims=(good,), verdict="its own").verdict == "its own"
