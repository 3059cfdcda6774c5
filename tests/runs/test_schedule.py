"""The schedule against its definition: ends, pieces, bounds, slopes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raising import refused
from topograd.errors import ConfigError
from topograd.runs.schedule import warmup_stable_warmdown


@st.composite
def schedules(draw: st.DrawFn) -> tuple[int, float, float, float]:
    steps = draw(st.integers(1, 300))
    warmup = draw(st.floats(0, 1))
    warmdown = draw(st.floats(0, 1)) * (1 - warmup)
    return steps, warmup, warmdown, draw(st.floats(0, 1))


def whole(steps: int, warmup: float, warmdown: float, floor: float) -> list[float]:
    return [warmup_stable_warmdown(t, steps, warmup, warmdown, floor) for t in range(steps)]


@given(schedules())
def test_bounds_and_ends(case: tuple[int, float, float, float]) -> None:
    steps, _, warmdown, floor = case
    values = whole(*case)
    assert values[0] > 0 or steps * warmdown > steps - 1  # only a warmdown over the whole run may start at 0
    assert all(0 <= value <= 1 for value in values)
    assert values[-1] == floor if warmdown > 0 else values[-1] > 0


@given(schedules())
def test_rises_then_stays_then_falls_with_constant_slopes(case: tuple[int, float, float, float]) -> None:
    steps, warmup, warmdown, floor = case
    values = whole(*case)
    rise, fall = warmup * steps, warmdown * steps
    for t in range(steps - 1):
        change = values[t + 1] - values[t]
        if t + 2 <= rise and steps - 2 - t >= fall:
            assert math.isclose(change, 1 / rise, abs_tol=1e-12)
        elif steps - 1 - t <= fall:
            assert math.isclose(change, -(1 - floor) / fall, abs_tol=1e-12)
        elif t + 1 >= rise and steps - 2 - t >= fall:
            assert values[t] == values[t + 1] == 1.0
        # Continuity: where two pieces meet, the change is no larger than the steeper slope beside it.
        slopes = [1 / rise if t + 1 < rise else 0.0, (1 - floor) / fall if steps - 2 - t < fall else 0.0]
        assert abs(change) <= max(slopes) + 1e-12


@given(schedules())
def test_shares_are_counted_in_steps(case: tuple[int, float, float, float]) -> None:
    steps, warmup, warmdown, _ = case
    below = [value < 1 for value in whole(steps, warmup, warmdown, 0.0)]
    rising = sum(t + 1 < warmup * steps for t in range(steps))
    falling = math.ceil(warmdown * steps)
    assert sum(below) <= rising + falling
    assert sum(below) >= max(rising, falling)


def test_the_pieces_by_hand() -> None:
    assert whole(8, 0.5, 0.25, 0.5) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 0.75, 0.5]
    assert whole(4, 0.0, 0.0, 0.1) == [1.0, 1.0, 1.0, 1.0]
    assert whole(4, 1.0, 0.0, 0.0) == [0.25, 0.5, 0.75, 1.0]
    assert whole(4, 0.0, 1.0, 0.0) == [0.75, 0.5, 0.25, 0.0]
    assert whole(1, 0.0, 0.3, 0.2) == [0.2]


def test_shares_that_round_above_one_are_accepted() -> None:
    warmup, warmdown = 0.2 + 0.1, 0.7  # 1.0000000000000002 in some order of addition; always meant as 1
    assert warmup_stable_warmdown(9, 10, warmup, warmdown + 1e-12, 0.1) == 0.1


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [
        ((-1, 10, 0.1, 0.1, 0.0), "step"),
        ((10, 10, 0.1, 0.1, 0.0), "step"),
        ((0, 0, 0.1, 0.1, 0.0), "step"),
        ((0, 10, -0.1, 0.1, 0.0), "warmup"),
        ((0, 10, 0.1, 1.5, 0.0), "warmdown"),
        ((0, 10, 0.1, 0.1, 2.0), "floor"),
        ((0, 10, math.nan, 0.1, 0.0), "warmup"),
        ((0, 10, 0.6, 0.6, 0.0), "warmup"),
    ],
)
def test_bad_settings_are_one_line(arguments: tuple[int, int, float, float, float], setting: str) -> None:
    with refused(ConfigError, setting=setting) as error:
        warmup_stable_warmdown(*arguments)
    assert "\n" not in str(error.value)
