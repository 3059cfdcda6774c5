"""All families in one table: the order that each is built with, beside what its Fisher and divergence say.

Along an approach of order k, F ~ t^{2k-2}, K ~ t^{2k} and F t² / K → 2k² ("Dead Directions: Geometric
Singular Learning", Theorem 2). A family outside the theorem has no order, and shows what can be read.
"""

from __future__ import annotations

from typing import Any

from papers.dead_directions.expansion import leading_ratio, ratio_of_order
from papers.dead_directions.families import Family
from papers.dead_directions.families.autoencoder import Autoencoder
from papers.dead_directions.families.gaussian import Gaussian
from papers.dead_directions.families.mixture import Merge, WeightBoundary
from papers.dead_directions.families.reduced_rank import ReducedRank
from papers.dead_directions.families.superposition import Superposition
from papers.dead_directions.families.two_layer import ACTIVATIONS, DeadUnit
from topograd.geometry.rates import fit_rate, log_grid

WINDOW = (1e-4, 1e-2)


def families() -> tuple[Family, ...]:
    """One or more of every kind."""
    return (
        *(Gaussian(order) for order in (1, 2, 3, 4)),
        Merge((0.5, 0.5)),
        Merge((0.8, 0.2)),
        Merge((0.3, 0.3, 0.4), others=(3.0,)),
        *(ReducedRank(*sizes) for sizes in ((3, 3, 3, 2), (4, 3, 4, 2), (5, 2, 4, 1))),
        Superposition(),
        *(DeadUnit(activation) for activation in ACTIVATIONS),
        Autoencoder("relu"),
        WeightBoundary(),
    )


def family_rows() -> list[dict[str, Any]]:
    """Name, direction, order, both slopes and the leading ratio of each."""
    t = log_grid(*WINDOW)
    rows = []
    for family in families():
        fisher, divergence = family.fisher(t), family.kl(t)
        rows.append(
            {
                "family": family.name,
                "direction": family.direction,
                "order": family.order,
                "fisher_slope": fit_rate(t, fisher, estimator="exact Fisher").slope,
                "kl_slope": fit_rate(t, divergence, estimator="exact divergence").slope,
                "leading_ratio": leading_ratio(t, fisher, divergence).value if family.order else None,
                "limit": ratio_of_order(family.order) if family.order else None,
            }
        )
    return rows
