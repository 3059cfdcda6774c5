"""RotaryCache and ratios. No test here looks at a clock's value, only at what is counted and divided."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from topograd.timing import Spread, ratio, read_in_turns, take_turns


def test_things_take_turns_and_the_order_rotates() -> None:
    said: list[str] = []
    things = {name: (lambda name=name: said.append(name)) for name in "abc"}
    seconds = take_turns(things, rounds=3, warmup=1)
    assert "".join(said) == "abcbcacababc"
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(value >= 0 for values in seconds.values() for value in values)


def test_a_ratio_is_taken_round_by_round() -> None:
    seconds = {"slow": [2.0, 20.0, 6.0], "fast": [1.0, 10.0, 1.0]}  # the second round was a slow moment
    assert ratio(seconds, "slow", "fast") == Spread(2.0, 2.0, 4.0)


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert str(Spread(1.0, 0.5, 2.25)) == "1.000 (0.500 to 2.250)"
    assert Spread(1.0, 0.5, 2.0).as_dict() == {"median": 1.0, "low": 0.5, "high": 2.0}


def test_rounds_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio({"a": [1.0], "b": [1.0, 2.0]}, "a", "b")


def test_turns_rotate_and_the_first_round_does_not_count() -> None:
    order: list[str] = []

    def clock(name: str) -> Callable[[], float]:
        def show() -> float:
            order.append(name)
            return float(len(order))

        return show

    shown = read_in_turns({"a": clock("a"), "b": clock("b")}, rounds=2, warmup=1)
    assert "".join(order) == "abbaab"
    assert shown == {"a": [4, 5], "b": [3, 6]}
