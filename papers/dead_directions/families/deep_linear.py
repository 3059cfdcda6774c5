"""The learning coefficient of deep linear networks, exactly: what samplers are scored against.

Statement. A product W_L ⋯ W_1 of matrices between widths H_1, …, H_{L+1}, the truth a matrix of rank r,
Gaussian noise. Let M_s = H_s - r. There is a set 𝓜 of ℓ + 1 widths, the smallest ones, with

    max_𝓜 M_s < min_{not 𝓜} M_s,    Σ_𝓜 M_s ≥ ℓ max_𝓜 M_s,    Σ_𝓜 M_s < ℓ min_{not 𝓜} M_s,

and with S = Σ_𝓜 M_s, M = ⌈S/ℓ⌉, a = S - (M - 1) ℓ,

    λ = (r (H_1 + H_{L+1}) - r²)/2 + a(ℓ - a)/(4ℓ) - (ℓ - 1) S² / (4ℓ) + ½ Σ_{i<j ∈ 𝓜} M_i M_j
    m = a(ℓ - a) + 1.

For L = 2 this is the coefficient of reduced-rank regression (`reduced_rank.py`); for widths of 1 and r = 0 it
is that of K = (w_1 ⋯ w_L)²: λ = ½, m = L.

Symbols. widths (H_1, …, H_{L+1}), L + 1 of them. Cost: O(L log L).
Source: Aoyagi, "Consideration on the learning efficiency of multiple-layered neural networks with linear
units", as restated by Lau et al., "The Local Learning Coefficient".
Limits. The global coefficient: that of the most singular parameters of the truth. Elsewhere on the set of
true parameters the local one is larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from topograd.errors import GeometryError


def deep_linear_coefficient(widths: Sequence[int], rank: int) -> tuple[float, int]:
    """(λ, m) of a product of matrices between these widths, the truth of this rank.

    >>> deep_linear_coefficient((1, 1, 1, 1), 0), deep_linear_coefficient((5, 2, 4), 1)
    ((0.5, 3), (5.5, 1))
    """
    if len(widths) < 2 or min(widths, default=0) < 1:
        raise GeometryError(
            f"widths {tuple(widths)}: give two or more, each at least 1",
            setting="widths",
            given=tuple(widths),
        )
    if not 0 <= rank <= min(widths):
        raise GeometryError(
            f"rank {rank} of a product between widths {tuple(widths)}: at most {min(widths)}",
            setting="rank",
            given=rank,
        )
    M = sorted(width - rank for width in widths)
    chosen = _smallest(M)
    ell, S = len(chosen) - 1, sum(chosen)
    a = S - (-(-S // ell) - 1) * ell
    pairs = sum(one * other for i, one in enumerate(chosen) for other in chosen[i + 1 :])
    regular = Fraction(rank * (widths[0] + widths[-1]) - rank**2, 2)
    singular = Fraction(a * (ell - a), 4 * ell) - Fraction((ell - 1) * S * S, 4 * ell) + Fraction(pairs, 2)
    return float(regular + singular), a * (ell - a) + 1


def _smallest(M: Sequence[int]) -> list[int]:
    """The set 𝓜, as the first ones of the sorted excesses."""
    for size in range(2, len(M) + 1):
        inside, outside = list(M[:size]), M[size:]
        ell, S = size - 1, sum(inside)
        if ell * inside[-1] <= S and (not outside or (inside[-1] < outside[0] and ell * outside[0] > S)):
            return inside
    raise AssertionError("Aoyagi's theorem: there is such a set")
