"""The selection rule: which eigenvalue of a Fisher or a factor carries the rate, if any does.

Statement. At a smooth point of the singular set, with d_⊥ normal directions of which one is dead with KL
order k and the others quadratic, the eigenvalues of the Fisher along an approach t → 0 are

    transversal    one,  t^{2k-2}
    constant       d_⊥ - 1
    tangential     one per direction along the set, t^{2α}; α the order of its score after the Schur reduction

With 2α ≠ 2k - 2 for all of them the transversal one is known by its exponent; its eigenvector turns at most
as t^{|α-(k-1)|}. Then the local RLCT is λ = (d_⊥ - 1)/2 + 1/(2k).

The rule as used on a measured spectrum:
    1. follow each eigenvector from one t to the next where vectors are given, by the assignment that
       maximises the sum of |overlaps|; else take eigenvalues by their place, which is right only if none
       cross
    2. drop ranks whose mean is below τ times the largest eigenvalue of all: rounding, gauge zeros
    3. fit a rate to each of the others
    4. choose the one closest to the predicted exponent if it is within the tolerance; else say
       "theorem-reach exceeded". That is a result, not an error: nothing is forced to match.

Symbols and shapes. t (n,), eigenvalues (n, r), eigenvectors (n, d, r) as columns, in the order of the
eigenvalues; any r of the d. Cost: O(n r (r² + r d)).
Source: "Dead Directions: Geometric Singular Learning", Theorem 3, Lemma 5 and §5.1. The thresholds are ours.
Limits. One dead direction: at a crossing of several the orders are read by `singular`. A rank that meets
its tolerance by accident is chosen too, and a straight line proves no regime (`rules/chains.py`): so
a selection keeps every rank with its rate. A Fisher whose tangential eigenvalue is exactly 0, as with one
output, shows it as floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from topograd.errors import GeometryError
from topograd.geometry.rates import Noise, Rate, fit_rate

Kind = Literal["transversal", "tangential", "constant", "floor", "unread"]
FLOOR = 1e-12
"""τ: what the eigenvalues of a matrix in float64 hold beside the largest one."""
TOLERANCE = 0.5
"""How far a slope may be from the predicted one. Exponents are even integers: none is in doubt."""
EXCEEDED = "theorem-reach exceeded"


@dataclass(frozen=True)
class Rank:
    """One eigenvalue along the approach: its place at the smallest t, its rate, and what it is.

    Floor ranks have no rate; unread ones have a rate that was refused, or that grows as t → 0.
    """

    index: int
    kind: Kind
    rate: Rate | None


@dataclass(frozen=True)
class Selection:
    """All ranks, and the one that carries the predicted rate; None where no rank does."""

    predicted: float
    ranks: tuple[Rank, ...]
    chosen: Rank | None

    @property
    def verdict(self) -> str:
        """ "transversal", or "theorem-reach exceeded"."""
        return EXCEEDED if self.chosen is None else self.chosen.kind

    def count(self, kind: Kind) -> int:
        """How many ranks are of this kind."""
        return sum(rank.kind == kind for rank in self.ranks)


def select_rank(
    t: Tensor,
    eigenvalues: Tensor,
    predicted: float,
    *,
    eigenvectors: Tensor | None = None,
    tau: float = FLOOR,
    estimator: str = "given eigenvalues",
    noise: Noise = "none",
) -> Selection:
    """Classify every rank of a spectrum along t, and choose the one whose slope is the predicted exponent.

    `tau` is what the eigenvalues hold beside the largest one: less than FLOOR for squared singular values.

    >>> t = torch.logspace(-3, -1, 7, dtype=torch.float64)
    >>> said = select_rank(t, torch.stack((0 * t, t**4, t**2, 1 + t), dim=1), predicted=2.0)
    >>> said.verdict, [rank.kind for rank in said.ranks]
    ('transversal', ['floor', 'tangential', 'transversal', 'constant'])
    >>> select_rank(t, torch.stack((t**4, 1 + t), dim=1), predicted=9.0).verdict
    'theorem-reach exceeded'
    """
    t, eigenvalues, eigenvectors = _ascending(t, eigenvalues, eigenvectors)
    if eigenvectors is not None:
        eigenvalues = eigenvalues.gather(1, match_ranks(eigenvectors))
    floor = tau * float(eigenvalues.max())
    if floor <= 0:
        raise GeometryError(
            "no eigenvalue is above 0: there is nothing to select from",
            setting="eigenvalues",
            remedy="check the factor",
        )
    ranks = []
    for index, values in enumerate(eigenvalues.unbind(1)):
        if float(values.mean()) <= floor:
            ranks.append(Rank(index, "floor", None))
            continue
        rate = fit_rate(t, values.clamp(min=0), floor=floor, estimator=estimator, noise=noise)
        ranks.append(Rank(index, _kind(rate, predicted), rate))
    return Selection(predicted, tuple(ranks), _closest(ranks, predicted))


def match_ranks(eigenvectors: Tensor) -> Tensor:
    """(n, r): for each t, the column that continues each column of the first t.

    Neighbouring t are matched one to one, with the largest sum of |overlaps|.

    >>> turn = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> match_ranks(torch.stack((torch.eye(2), turn, turn))).tolist()
    [[0, 1], [1, 0], [1, 0]]
    """
    if eigenvectors.dim() != 3 or eigenvectors.shape[2] > eigenvectors.shape[1]:
        raise GeometryError(
            f"eigenvectors of shape {tuple(eigenvectors.shape)}: give (points, size, ranks)",
            setting="eigenvectors",
            given=tuple(eigenvectors.shape),
        )
    overlaps = (eigenvectors[:-1].mT @ eigenvectors[1:]).abs().cpu().numpy()
    places = [torch.arange(eigenvectors.shape[2])]
    for overlap in overlaps:
        _, following = linear_sum_assignment(overlap, maximize=True)
        places.append(torch.as_tensor(following)[places[-1]])
    return torch.stack(places).to(eigenvectors.device)


def local_rlct(normal_directions: int, order: int) -> float:
    """λ = (d_⊥ - 1)/2 + 1/(2k), with d_⊥ normal directions of which one has KL order k and the others 1.

    >>> local_rlct(3, 2)
    1.25
    """
    if normal_directions < 1 or order < 1:
        raise GeometryError(
            f"{normal_directions} normal directions and KL order {order}: give 1 or more of each",
            setting="order" if order < 1 else "normal_directions",
            given=min(order, normal_directions),
        )
    return (normal_directions - 1) / 2 + 1 / (2 * order)


def _kind(rate: Rate, predicted: float) -> Kind:
    if rate.slope is None:
        return "unread"
    if abs(rate.slope - predicted) <= TOLERANCE:
        return "transversal"
    if abs(rate.slope) <= TOLERANCE:
        return "constant"
    return "tangential" if rate.slope > 0 else "unread"


def _closest(ranks: list[Rank], predicted: float) -> Rank | None:
    """The transversal rank whose slope is nearest to the predicted one."""
    errors = {
        rank.index: abs(rank.rate.slope - predicted)
        for rank in ranks
        if rank.kind == "transversal" and rank.rate is not None and rank.rate.slope is not None
    }
    return ranks[min(errors, key=errors.__getitem__)] if errors else None


def _ascending(
    t: Tensor, eigenvalues: Tensor, eigenvectors: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """All three checked against one another, in the order of t."""
    if t.dim() != 1 or eigenvalues.dim() != 2 or len(t) != len(eigenvalues) or eigenvalues.numel() == 0:
        raise GeometryError(
            f"eigenvalues of shape {tuple(eigenvalues.shape)} at {tuple(t.shape)} points t: give (t, ranks)",
            setting="eigenvalues",
            given=tuple(eigenvalues.shape),
        )
    if not torch.isfinite(eigenvalues).all():
        raise GeometryError(
            "an eigenvalue is not finite: check the weights and inputs of the factor", setting="eigenvalues"
        )
    order = t.argsort()
    if eigenvectors is None:
        return t[order], eigenvalues[order], None
    if eigenvectors.dim() != 3 or eigenvectors.shape[::2] != eigenvalues.shape:
        raise GeometryError(
            f"eigenvectors of shape {tuple(eigenvectors.shape)} for eigenvalues {tuple(eigenvalues.shape)}: "
            "give (points, size, ranks)",
            setting="eigenvectors",
            given=tuple(eigenvectors.shape),
        )
    return t[order], eigenvalues[order], eigenvectors[order]
