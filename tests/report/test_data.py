import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topograd.report.data import (
    RunData,
    Series,
    bpb_prediction,
    bpb_series,
    entry,
    gap_at_seconds,
    gap_at_steps,
    last_value,
    loss_series,
    number,
    numbers,
    percent_above,
    smooth,
    stage_count,
)


def run(*metrics: dict, **evaluation: object) -> RunData:
    return RunData("run", {}, metrics, evaluation)


def series(steps: list[float], seconds: list[float], values: list[list[float]]) -> Series:
    return Series(np.array(steps, float), np.array(seconds, float), np.array(values, float))


@pytest.mark.parametrize(
    "value", [None, "3", True, [1.0], math.nan, math.inf, -math.inf, 1e16, 10**400, -(10**400)]
)
def test_what_is_no_sound_number_is_nan(value: object) -> None:
    assert math.isnan(number(value))


def test_numbers_and_entries_forgive() -> None:
    assert numbers([1, 2.5]) == [1.0, 2.5]
    assert numbers("12") == []
    assert entry({"a": {"b": 3}}, "a", "b") == 3
    assert entry({"a": 1}, "a", "b") is None
    assert entry(None, "a") is None


def test_losses_are_ordered_by_step_and_the_last_record_of_a_step_counts() -> None:
    found = loss_series(
        run(
            {"kind": "train", "step": 20, "loss": [4.0, None], "seconds": 2.0},
            {"kind": "train", "step": 10, "loss": [9.0, 9.0], "seconds": 1.0},
            {"kind": "eval", "step": 15, "loss": [7.0]},
            {"kind": "train", "step": 10, "loss": [5.0, 6.0], "seconds": 1.5},
            {"kind": "train", "loss": [1.0, 1.0]},
        )
    )
    assert found is not None
    assert found.steps.tolist() == [10, 20]
    assert found.seconds.tolist() == [1.5, 2.0]
    np.testing.assert_array_equal(found.values, [[5.0, 6.0], [4.0, np.nan]])


def test_records_with_other_numbers_of_stages_are_filled_with_nan() -> None:
    found = bpb_series(
        run(
            {"kind": "eval", "step": 1, "bpb": {"last": 2.0}},
            {"kind": "eval", "step": 2, "bpb": {"last": 1.5, "prefix": [1.8, 1.5]}},
        )
    )
    assert found is not None
    np.testing.assert_array_equal(found.values, [[2.0, np.nan], [1.8, 1.5]])


def test_a_series_without_a_finite_value_is_none() -> None:
    assert loss_series(run({"kind": "train", "step": 1, "loss": [math.nan]})) is None
    assert loss_series(run({"kind": "train", "step": 1})) is None
    assert bpb_series(run()) is None


def test_last_stage_is_the_longest_prefix() -> None:
    assert bpb_prediction({"prefix": [1.8, 1.5]}) == 1.5
    assert bpb_prediction({"last": 1.4, "prefix": [1.8, 1.5]}) == 1.4
    assert math.isnan(bpb_prediction(None))


def test_stage_count_and_last_value() -> None:
    records = [{"kind": "train", "step": k, "loss": [1.0, 1.0], "tokens": t} for k, t in ((1, 8), (2, None))]
    assert stage_count(run(*records)) == 2
    assert stage_count(run(*records, ece=[0.1, 0.1, 0.1])) == 3
    assert stage_count(run()) == 0
    assert last_value(run(*records), "train", "tokens") == 8
    assert math.isnan(last_value(run(*records), "eval", "tokens"))


def test_gap_at_common_steps_is_relative_to_backprop() -> None:
    staged = series([10, 20, 30], [1, 2, 3], [[4.4, 4.2], [3.3, 3.0], [2.0, 2.0]])
    backprop = series([20, 10], [1, 2], [[3.0], [4.0]])
    found = gap_at_steps(staged, backprop)
    assert found is not None
    assert found.steps.tolist() == [10, 20]
    np.testing.assert_allclose(found.values, [[10.0, 5.0], [10.0, 0.0]], atol=1e-12)


def test_gap_in_the_same_time_interpolates_and_never_extrapolates() -> None:
    staged = series([1, 2, 3, 4], [0.5, 1.5, 2.0, 9.0], [[5.0], [3.3], [2.2], [2.0]])
    backprop = series([1, 2], [1.0, 2.0], [[4.0], [2.0]])
    found = gap_at_seconds(staged, backprop)
    assert found is not None
    np.testing.assert_allclose(found.values[:, 0], [np.nan, 10.0, 10.0, np.nan], atol=1e-12)


def test_gaps_without_partners_are_none() -> None:
    staged = series([1, 2], [1.0, 2.0], [[5.0], [4.0]])
    assert gap_at_steps(staged, series([3], [1.0], [[2.0]])) is None
    assert gap_at_seconds(staged, series([1], [1.0], [[2.0]])) is None
    assert gap_at_seconds(staged, series([1, 2], [5.0, 6.0], [[2.0], [2.0]])) is None
    assert gap_at_seconds(staged, series([1, 2], [math.nan, math.nan], [[2.0], [2.0]])) is None


def test_percent_above_a_useless_base_is_nan() -> None:
    assert percent_above(1.1, 1.0) == pytest.approx(10.0)
    assert all(math.isnan(percent_above(1.0, base)) for base in (0.0, -1.0, 1e-300, math.nan))


@given(
    st.lists(st.floats(-50, 50) | st.just(math.nan), min_size=1, max_size=30),
    st.integers(1, 12),
)
def test_smooth_is_the_mean_of_each_window(values: list[float], window: int) -> None:
    found = smooth(np.array(values), window)
    for index in range(len(values)):
        half = min(index, window // 2)
        inside = [v for v in values[index - half : index + half + 1] if not math.isnan(v)]
        expected = math.fsum(inside) / len(inside) if inside else math.nan
        np.testing.assert_allclose(found[index], expected, rtol=1e-9, atol=1e-9)


def test_smooth_keeps_columns_apart() -> None:
    values = np.arange(12.0).reshape(6, 2) ** 2
    columns = [smooth(values[:, k], 3) for k in range(2)]
    np.testing.assert_array_equal(smooth(values, 3), np.stack(columns, axis=1))
