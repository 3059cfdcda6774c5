import math

import pytest

from topograd.report.data import RunData
from topograd.report.tables import (
    DASH,
    all_numbers,
    byte_unit,
    comparison_numbers,
    fixed,
    gap_percent,
    percent,
    settings,
    size,
    spread,
    whole,
)


def run(config: dict | None = None, **evaluation: object) -> RunData:
    return RunData("run", config or {}, [], evaluation)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.23456, "1.235"),
        (-0.5, "−0.500"),
        (0.0, "0.000"),
        (2e-5, "2.0e−05"),
        (3e7, "3.0e+07"),
        (math.nan, DASH),
    ],
)
def test_fixed(value: float, text: str) -> None:
    assert fixed(value) == text


def test_how_numbers_are_written() -> None:
    assert whole(1234567.0) == "1\u00a0234\u00a0567"
    assert percent(4.13) == "+4.1\u00a0%"
    assert percent(-4.16) == "−4.2\u00a0%"
    assert (whole(math.nan), percent(math.nan), size(math.nan)) == (DASH, DASH, DASH)
    assert size(1536) == "1.5 KiB"
    assert byte_unit(1023) == (1.0, "bytes")
    assert byte_unit(3 * 2**30) == (2.0**30, "GiB")
    assert byte_unit(1e15)[1] == "TiB"


@pytest.mark.parametrize("count", [1, 2, 9, 10, 11, 1000])
def test_spread_holds_both_ends(count: int) -> None:
    rows = spread(count, 10)
    assert rows[0] == 0
    assert rows[-1] == count - 1
    assert len(rows) == min(count, 10)


def test_backprop_stands_beside_the_last_stage() -> None:
    staged = run(bpb={"last": 1.5, "sum": 1.6, "prefix": [1.7, 1.5]}, ece=[0.1, 0.2], usefulness=[None, 0.01])
    table = all_numbers(staged, run(bpb={"last": 1.4, "prefix": [1.4]}, ece=[0.3]))
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.header[1:] == ("staged", "backprop")
    assert rows["bits per byte, first 1 of 2 stages"] == ("1.7000", DASH)
    assert rows["bits per byte, first 2 of 2 stages"] == ("1.5000", "1.4000")
    assert rows["expected calibration error, stage 2"] == ("0.2000", "0.3000")
    assert "tail usefulness U, stage 1" not in rows
    assert rows["tail usefulness U, stage 2"] == ("0.0100", DASH)


def test_what_the_model_predicts_has_a_row_of_its_own() -> None:
    """It need not be what any exit predicts: a path is none of them."""
    staged = run(bpb={"prediction": 1.55, "last": 1.5, "prefix": [1.7, 1.5]})
    rows = {row[0]: row[1:] for row in all_numbers(staged, run(bpb={"last": 1.4})).rows}
    assert rows["bits per byte, what the model predicts"] == ("1.5500", DASH)
    old = all_numbers(run(bpb={"last": 1.4, "prefix": [1.4]}), None)
    assert "bits per byte, what the model predicts" not in {row[0] for row in old.rows}, "before 0.2"


def test_the_gap_is_of_what_the_models_predict() -> None:
    residual = run(bpb={"prediction": 3.0, "last": 6.0, "prefix": [4.0, 3.0]})
    assert gap_percent(residual, run(bpb={"prediction": 2.0, "last": 2.0}), None) == pytest.approx(50.0)


def test_a_measured_gap_goes_before_a_computed_one() -> None:
    staged, backprop = run(bpb={"last": 1.1}), run(bpb={"last": 1.0})
    assert gap_percent(staged, backprop, {"gap": 4.0}) == 4.0
    assert gap_percent(staged, backprop, None) == pytest.approx(10.0)
    assert math.isnan(gap_percent(staged, None, None))


def test_comparison_numbers_leave_out_what_was_not_measured() -> None:
    table = comparison_numbers({"gap": 4.0, "memory": None, "step_time_ratio": {"median": 1.1}})
    assert table is not None
    assert table.rows == (
        ("gap at matched steps", "+4.0\u00a0%"),
        ("step time, staged over backprop, median", "1.100"),
    )
    assert comparison_numbers({}) is None
    assert comparison_numbers(None) is None


def test_settings_are_flattened_and_differences_named() -> None:
    ours = run({"model": {"width": 96, "mlp": {"kind": "relu2"}}, "betas": [0.8, 0.95]})
    theirs = run({"model": {"width": 128, "mlp": {"kind": "relu2"}}, "seed": 1})
    assert settings(ours, None).rows[1] == ("model.mlp.kind", "relu2")
    assert settings(ours, theirs).rows == (
        ("model.width", "96", "128", "differs"),
        ("model.mlp.kind", "relu2", "relu2", ""),
        ("betas", "0.8, 0.95", DASH, "differs"),
        ("seed", DASH, "1", "differs"),
    )
