"""Experiment D: how boundaries harden, and its verdicts in worlds that are made up."""

import pytest

from topograd.studies import experiment_d
from topograd.studies.verdicts import FAILED, HELD


def test_d_hardens_to_any_three_stages() -> None:
    assert experiment_d.nearest([1, 1, 1, 0.1, 0.2]).parts == (4, 1, 1)
    assert experiment_d.nearest([1, 0.1, 1, 0.2, 1]).parts == (2, 2, 2)
    assert experiment_d.WEIGHTS["losses alone"] == 0


@pytest.mark.parametrize(
    ("alone", "worth", "expected"),
    [((4, 1, 1), (2, 2, 2), HELD), ((2, 2, 2), (4, 1, 1), FAILED)],
)
def test_d_in_both_worlds(alone: tuple[int, ...], worth: tuple[int, ...], expected: str) -> None:
    rows = []
    for seed in range(3):
        for arm in experiment_d.WEIGHTS:
            parts = alone if arm == "losses alone" else worth
            usable = sum(part >= 2 for part in parts) / 3
            rows.append({"arm": arm, "seed": seed, "first_depth": parts[0], "capability": usable})
    assert {claim.verdict for claim in experiment_d.claims(rows)} == {expected}
