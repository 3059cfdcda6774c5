"""Experiment D: what its boundaries harden to, when an answer is open, and its verdicts in made-up worlds."""

import math
from dataclasses import replace
from typing import Any

import pytest

from papers.stage_partitioned_learning import experiment_d
from papers.staged_runs import Sizes
from papers.verdicts import FAILED, HELD, UNDECIDED
from topograd.search.utility import structural_capability
from topograd.topology.composition import enumerate_compositions


def test_d_hardens_to_any_three_stages() -> None:
    assert experiment_d.nearest([1, 1, 1, 0.1, 0.2]).parts == (4, 1, 1)
    assert experiment_d.nearest([1, 0.1, 1, 0.2, 1]).parts == (2, 2, 2)
    assert experiment_d.WEIGHTS["losses alone"] == 0


def made_up(alone: tuple[int, ...], worth: tuple[int, ...], needed: float) -> dict[str, str]:
    rows: list[dict[str, Any]] = []
    for seed in range(3):
        for arm in experiment_d.WEIGHTS:
            parts = alone if arm == "losses alone" else worth
            usable = sum(part >= 2 for part in parts) / 3
            row = {"arm": arm, "seed": seed, "first_depth": parts[0], "capability": usable, "needed": needed}
            rows.append(row)
    return {claim.name: claim.verdict for claim in experiment_d.claims(rows)}


@pytest.mark.parametrize(
    ("alone", "worth", "expected"),
    [((4, 1, 1), (2, 2, 2), HELD), ((2, 2, 2), (4, 1, 1), FAILED)],
)
def test_d_in_both_worlds(alone: tuple[int, ...], worth: tuple[int, ...], expected: str) -> None:
    """Where the losses could outweigh both arms, every claim is judged."""
    assert set(made_up(alone, worth, needed=5.0).values()) == {expected}


def test_an_answer_that_follows_from_the_worth_alone_is_not_judged() -> None:
    verdicts = made_up((4, 1, 1), (2, 2, 2), needed=0.1)
    assert verdicts.pop("modular: interior") == verdicts.pop("strong: interior") == UNDECIDED
    assert set(verdicts.values()) == {HELD}
    between = made_up((4, 1, 1), (2, 2, 2), needed=1.0)
    assert (between["modular: interior"], between["strong: interior"]) == (HELD, UNDECIDED)


@pytest.mark.parametrize("seed", range(5))
def test_the_worth_that_is_needed_is_where_the_best_partition_changes(seed: int) -> None:
    """By trying all ten partitions a little above and a little below it."""
    losses = [3 - 0.1 * i + 0.3 * math.sin(7.0 * i + seed) for i in range(6)]
    needed = experiment_d.needed_worth(losses)

    def best(worth: float) -> tuple[int, ...]:
        def score(pi: Any) -> float:
            bits = sum(losses[end - 1] for end in pi.terminals[:-1]) / math.log(2)
            return float(bits - worth * structural_capability(pi, 2))

        return min(enumerate_compositions(6, 3), key=score).parts

    assert best(needed + 1e-6) == (2, 2, 2)
    assert needed == 0 or best(needed - 1e-6) != (2, 2, 2)


def test_an_arm_is_a_soft_run(sizes: Sizes) -> None:
    row = experiment_d._learned("strong", 2.0, replace(sizes, soft_steps=3), seed=0)
    assert sum(row["partition"]) == 6
    assert len(row["losses"]) == 6
    assert row == experiment_d._learned("strong", 2.0, replace(sizes, soft_steps=3), seed=0)
