"""Which guess pays: against every other choice, by hand and by replay."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raising import refused
from topograd.decode.calibration.measure import PositionCosts
from topograd.decode.calibration.policy import Acceptance, ExpectedGainPolicy
from topograd.errors import ConfigError

CHEAP = PositionCosts({1: 1.0, 2: 1.05, 4: 1.15, 16: 1.75}, draft=0.01)
DEAR = PositionCosts({1: 1.0, 2: 2.0}, draft=0.5)
RATES = {
    "lookup": Acceptance((1.0, 3.0), (0.2, 0.9)),
    "draft": Acceptance((0.0, 0.5), (0.1, 0.8), (0.3, 0.7)),
}


def guesses(*scores: float) -> list[tuple[int, float]]:
    return [(7, score) for score in scores]


def test_acceptances_by_score() -> None:
    found = Acceptance.of([0.1] * 8 + [0.9] * 8, [False] * 8 + [True] * 8)
    assert found.at(0.0) == found.at(0.1) == pytest.approx(1 / 10)
    assert found.at(0.95) == pytest.approx(9 / 10)
    assert sum(found.weights) == 1
    assert Acceptance((0.0, 1.0), (0.5, 0.5)).weights == (0.5, 0.5)
    assert Acceptance.of([], []).at(3.0) == 0.0
    for bounds, shares in (((1.0, 0.0), None), ((0.0,), None), ((0.0, 1.0), (1.0,))):
        with refused(ConfigError, setting="bounds", given=bounds):
            Acceptance(bounds, (0.5, 0.5), shares)
    with refused(ConfigError, setting="rates", given=(1.5,)):
        Acceptance((0.0,), (1.5,))
    with refused(ConfigError, setting="shares", given=(2.0,)):
        Acceptance((0.0,), (0.5,), (2.0,))


def test_what_is_worth_most_is_chosen() -> None:
    policy = ExpectedGainPolicy(RATES, CHEAP, 1.2)
    assert policy.choose(0, 1.0, {"lookup": guesses(3, 4, 5)}, "draft", 1) == ("lookup", 3)
    assert policy.choose(0, 1.0, {"lookup": guesses(1)}, "draft", 1) == ("draft", 1)
    assert policy.choose(0, 1.0, {"lookup": guesses(1)}, None, 1) == ("lookup", 1)
    assert policy.choose(0, 1.0, {"lookup": []}, None, 1) == (None, 0)
    assert policy.choose(0, 0.01, {"lookup": guesses(3)}, "draft", 1) == (None, 0), "it would not be reached"


def test_nothing_pays_where_rows_are_dear() -> None:
    policy = ExpectedGainPolicy(RATES, DEAR, 1.2)
    assert policy.choose(0, 1.0, {"lookup": guesses(3, 4)}, "draft", 1) == (None, 0)
    assert policy.accept("draft", 0.9, 0, 1.0, 1, True) is None


def test_a_guess_is_kept_by_its_own_score() -> None:
    policy = ExpectedGainPolicy(RATES, CHEAP, 1.2)
    assert policy.accept("draft", 0.9, 0, 1.0, 1, True) == pytest.approx(0.8)
    assert policy.accept("draft", 0.9, 1, 0.5, 1, True) == pytest.approx(0.4)
    assert policy.accept("draft", 0.1, 0, 0.4, 1, True) is None, "0.04 tokens for 0.06"


def test_what_pays_together_is_taken_together() -> None:
    """Two rows cost half a token more than one, eight hardly more than two: drafts are long or none."""
    stepped = PositionCosts({1: 1.0, 2: 1.8, 16: 1.9}, draft=0.01)
    policy = ExpectedGainPolicy({"lookup": Acceptance((1.0, 4.0), (0.3, 0.8))}, stepped, 1.0)
    assert policy.choose(0, 1.0, {"lookup": guesses(*[4] * 8)}, None, 1) == ("lookup", 8)
    assert policy.choose(0, 1.0, {"lookup": guesses(*[1] * 8)}, None, 1) == (None, 0)
    assert policy.accept("lookup", 4.0, 0, 1.0, 1, False) == pytest.approx(0.8)


def test_many_rows_pay_less() -> None:
    full = PositionCosts({1: 1.0, 4: 1.1, 8: 4.0, 16: 8.0}, draft=0.01)
    policy = ExpectedGainPolicy(RATES, full, 1.2)
    assert policy.price(0, 1, False) < policy.price(0, 8, False)


@pytest.mark.parametrize(("keep", "start"), [(0.0, 0.0), (0.3, 0.0), (0.0, 0.1)])
def test_values_are_those_of_the_stopping_problem(keep: float, start: float) -> None:
    """Against the recursion over all scores that can follow, without a grid."""
    policy = ExpectedGainPolicy(RATES, replace(CHEAP, keep=keep, draft=0.05, start=start), 1.2, 4)
    rates = RATES["draft"]

    def best(place: int, chance: float) -> float:
        if place == 4:
            return 0.0
        worth = -1.2 * (0.05 if place else 0.05 + start)
        for rate, share in zip(rates.rates, rates.weights, strict=True):
            price = 1.2 * (CHEAP.seconds(place + 2) - CHEAP.seconds(place + 1) + keep)
            worth += share * max(0.0, chance * rate - price + best(place + 1, chance * rate))
        return max(0.0, worth)

    for place in range(5):
        for chance in (1.0, 0.77, 0.4, 0.1, 0.0):
            assert policy.value("draft", place, chance, 1) == pytest.approx(best(place, chance), abs=0.003)
    assert best(0, 1.0) > best(2, 1.0) > 0 == policy.value("draft", 0, 0.05, 1)


def test_priors_where_nothing_was_measured() -> None:
    assert ExpectedGainPolicy().accept("somebody", 0.95, 0, 1.0, 1, True) is not None, (
        "priors for whom nothing was measured"
    )


def test_drafts_of_a_batch_pay_together_or_not_at_all() -> None:
    """A pass over several sequences costs more as soon as one has a draft: one guess must not pay for it."""
    policy = ExpectedGainPolicy(RATES, replace(CHEAP, uneven=0.2), 1.0)
    assert policy.pays([[0.9]]), "alone nothing else is uneven"
    assert not policy.pays([[0.8], [], [], []])
    assert policy.pays([[0.9], [0.9], [0.8, 0.7], []])
    assert not policy.pays([[], []])
    assert not ExpectedGainPolicy(RATES, DEAR, 1.0).pays([[0.9], [0.9]])


def test_a_drafter_that_is_refused_more_than_it_promised_is_asked_less() -> None:
    policy = ExpectedGainPolicy(RATES, PositionCosts({1: 1.0, 2: 1.2, 16: 3.0}, draft=0.01), 1.2)
    found = {"lookup": guesses(3, 4)}
    assert policy.choose(0, 1.0, found, None, 1)[0] == "lookup"
    for _ in range(200):
        policy.observe("lookup", 0.9 * policy.trust("lookup"), accepted=False)
    assert policy.trust("lookup") < 0.1
    assert policy.choose(0, 1.0, found, None, 1) == (None, 0)
    for _ in range(400):
        policy.observe("lookup", 0.9 * policy.trust("lookup"), accepted=True)
    assert policy.trust("lookup") == 1.0, "what was long ago is forgotten"
    assert policy == ExpectedGainPolicy(RATES, policy.costs, 1.2), "it is of this process alone"
