"""Every family keeps the rate theorem, and the one outside it says so."""

from __future__ import annotations

import pytest

from papers.dead_directions.families.table import families, family_rows


def test_slopes_and_ratio_give_the_order_of_each_family() -> None:
    rows = family_rows()
    assert len(rows) == len(families()) == len({row["family"] for row in rows})
    ordered = [row for row in rows if row["order"] is not None]
    assert len(ordered) == len(rows) - 1
    for row in ordered:
        k = row["order"]
        assert row["fisher_slope"] == pytest.approx(2 * k - 2, abs=0.01), row["family"]
        assert row["kl_slope"] == pytest.approx(2 * k, abs=0.01), row["family"]
        assert row["leading_ratio"] == pytest.approx(2 * k**2, abs=0.01), row["family"]


def test_a_vanishing_weight_has_no_order() -> None:
    (row,) = [row for row in family_rows() if row["order"] is None]
    assert "weight to 0" in row["family"]
    assert row["leading_ratio"] is None
    assert row["kl_slope"] is None
