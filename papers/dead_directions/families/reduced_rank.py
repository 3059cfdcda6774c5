"""Reduced-rank regression: a product of two matrices, its gauge orbit, and its known learning coefficient.

Statement. y = W₂W₁x + ε, x ~ N(0, I), ε ~ N(0, I), teacher M of rank r below the hidden width h:

    K(W) = ½ ‖W₂W₁ - M‖_F²,    F = JᵀJ,  J = [W₂ ⊗ I, I ⊗ W₁ᵀ] = ∂vec(W₂W₁)/∂(vec W₁, vec W₂), vec by rows,
    F₁₁ = W₂ᵀW₂ ⊗ I,   F₂₂ = I ⊗ W₁W₁ᵀ,   F₁₂ = W₂ᵀ ⊗ W₁ᵀ.

With D = d_in + d_out and both factors of rank h, F has the rank h(D - h): the other h² eigenvalues are gauge
zeros, tangent to (W₁, W₂) -> (AW₁, W₂A⁻¹). Towards the teacher along diag(1, …, 1, t, …, t) in both factors,
with r ones,

    h²  zeros,   h(D-h) - r(D-r)  eigenvalues ~ t²,   r(D-r)  constants,    K = ½(h-r) t⁴:  KL order k = 2.

For h = r+1 the middle count is (d_in - r) + (d_out - r) - 1. Another representative A has the same counts and
rates: the rate belongs to the quotient. The learning coefficient λ and multiplicity m are known in closed
form for all sizes (`learning_coefficient`); the direction of the approach alone contributes 1/(2k) = ¼.

Symbols and shapes. W₁ (h, d_in), W₂ (d_out, h). Eigenvalues of F are squares of singular values of J, which
resolves them down to 1e-30 of the largest. Cost: an SVD of (d_in d_out, hD).
Source: "Dead Directions: Geometric Singular Learning", §5 (Table 8), §10.1. λ and m: Aoyagi and Watanabe,
"Stochastic complexities of reduced rank regression in Bayesian estimation", main theorem.
Limits. Unit noise and isotropic inputs. Learned trajectories show the rank deficit, not the exponents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import GeometryError
from topograd.geometry.rates import fit_rate, log_grid

ZERO = 1e-26
"""Eigenvalues of F below this part of the largest are zero: singular values of J below 1e-13."""


@dataclass(frozen=True)
class SpectrumCounts:
    """How many eigenvalues of F are zero, vanish as t^slope, or stay, along an approach."""

    zero: int
    vanishing: int
    constant: int
    slopes: tuple[float, ...]


@dataclass(frozen=True)
class ReducedRank:
    """W₂W₁ of hidden width h, with a teacher of rank r < h; a Family.

    >>> t = torch.tensor([0.1], dtype=torch.float64)
    >>> model = ReducedRank(inputs=4, hidden=3, outputs=4, rank=2)
    >>> round((model.fisher(t) * t**2 / model.kl(t)).item(), 9)  # 2k²
    8.0
    """

    inputs: int
    hidden: int
    outputs: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.hidden <= min(self.inputs, self.outputs):
            raise GeometryError(
                f"hidden {self.hidden}, rank {self.rank}, inputs {self.inputs}, outputs {self.outputs}: "
                "give 0 <= rank < hidden <= inputs and outputs",
                setting="hidden",
                given=self.hidden,
            )

    @property
    def name(self) -> str:
        """Sizes and the teacher's rank."""
        return f"reduced rank {self.inputs}-{self.hidden}-{self.outputs}, teacher of rank {self.rank}"

    @property
    def order(self) -> int:
        """K = ½ (h - r) t⁴."""
        return 2

    @property
    def direction(self) -> str:
        """What moves."""
        return "the dead hidden units' diagonal entries of both factors"

    def factors(self, t: Tensor | float) -> tuple[Tensor, Tensor]:
        """W₁(t) (…, h, d_in) and W₂(t) (…, d_out, h), float64, with a leading dimension for a vector of t."""
        t = torch.as_tensor(t, dtype=torch.float64)
        first, second = self._diagonals(t.device)
        alive, dead = (first[0], second[0]), (first[1], second[1])
        scale = t[..., None, None]
        return alive[0] + scale * dead[0], alive[1] + scale * dead[1]

    def fisher(self, t: Tensor) -> Tensor:
        """‖Ẇ₂W₁ + W₂Ẇ₁‖_F²."""
        W1, W2 = self.factors(t)
        first, second = self._diagonals(W1.device)
        return (second[1] @ W1 + W2 @ first[1]).square().sum((-2, -1))

    def kl(self, t: Tensor) -> Tensor:
        """½ ‖W₂W₁ - M‖_F², the difference taken entry by entry: nothing cancels that is not zero."""
        W1, W2 = self.factors(t)
        return (W2 @ W1 - self.teacher(W1.device)).square().sum((-2, -1)) / 2

    def teacher(self, device: torch.device | None = None) -> Tensor:
        """M (d_out, d_in)."""
        first, second = self._diagonals(device)
        return second[0] @ first[0]

    def counts(self, gauge: Tensor | None = None, grid: Tensor | None = None) -> SpectrumCounts:
        """The spectrum along the approach, as measured; `gauge` A (h, h) picks another representative."""
        t = log_grid(3e-4, 1e-2) if grid is None else grid
        W1, W2 = self.factors(t)
        if gauge is not None:
            W1, W2 = gauge @ W1, W2 @ torch.linalg.inv(gauge)
        return count_rates(t, torch.stack([spectrum(a, b) for a, b in zip(W1, W2, strict=True)]))

    @property
    def expected_counts(self) -> tuple[int, int, int]:
        """(zero, vanishing, constant) by the formulas above."""
        h, r, both = self.hidden, self.rank, self.inputs + self.outputs
        constant = r * (both - r)
        return h * h, h * (both - h) - constant, constant

    def _diagonals(self, device: torch.device | None) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """For W₁ and for W₂: the ones of the teacher, and those that t multiplies."""
        ones = torch.ones(self.hidden, dtype=torch.float64, device=device)
        live = ones * (torch.arange(self.hidden, device=device) < self.rank)
        eye = torch.eye(max(self.inputs, self.outputs), dtype=torch.float64, device=device)
        first, second = eye[: self.hidden, : self.inputs], eye[: self.outputs, : self.hidden]
        dead = ones - live
        return (live[:, None] * first, dead[:, None] * first), (second * live, second * dead)


def jacobian(W1: Tensor, W2: Tensor) -> Tensor:
    """J (d_out d_in, h d_in + d_out h) of vec(W₂W₁), vec by rows."""
    d_in, d_out = W1.shape[1], W2.shape[0]
    return torch.cat((torch.kron(W2, _eye(d_in, W1)), torch.kron(_eye(d_out, W1), W1.T.contiguous())), 1)


def spectrum(W1: Tensor, W2: Tensor) -> Tensor:
    """All eigenvalues of F, largest first, as squares of the singular values of J."""
    result = torch.linalg.svdvals(jacobian(W1, W2)).square()
    missing = W1.numel() + W2.numel() - len(result)
    return torch.cat((result, result.new_zeros(max(missing, 0))))


def count_rates(t: Tensor, spectra: Tensor) -> SpectrumCounts:
    """Sort the ranks of spectra (points, n), largest first, by how they go with t: nil, a slope, constant."""
    nil = (spectra < ZERO * spectra[:, :1]).any(0)
    slopes = []
    for values in spectra[:, ~nil].T:
        rate = fit_rate(t, values, estimator="eigenvalue of the exact Fisher")
        if rate.slope is None:
            raise GeometryError(
                f"an eigenvalue has {rate}: choose a grid nearer to the singular point", setting="grid"
            )
        slopes.append(rate.slope)
    moving = tuple(slope for slope in slopes if abs(slope) > 0.5)
    return SpectrumCounts(int(nil.sum()), len(moving), len(slopes) - len(moving), moving)


def learning_coefficient(inputs: int, hidden: int, outputs: int, rank: int) -> tuple[float, int]:
    """(λ, m) of Aoyagi and Watanabe, for M = d_in, N = d_out, H = h and a teacher of rank r.

    >>> learning_coefficient(4, 3, 4, 2), learning_coefficient(6, 3, 4, 2), learning_coefficient(1, 1, 1, 0)
    ((7.0, 2), (9.0, 1), (0.5, 2))
    """
    M, H, N, r = inputs, hidden, outputs, rank
    if min(M, H, N) < 1 or not 0 <= r <= min(M, H, N):
        raise GeometryError(
            f"inputs {M}, hidden {H}, outputs {N}, rank {r}: give positive sizes and a rank up to the least",
            setting="rank",
            given=r,
        )
    if M + r > N + H:
        return (H * N - H * r + M * r) / 2, 1
    if N + r > M + H:
        return (H * M - H * r + N * r) / 2, 1
    if H + r > M + N:
        return M * N / 2, 1
    odd = (M + H + N + r) % 2
    eightfold = -((H + r) ** 2) - M * M - N * N + 2 * (H + r) * (M + N) + 2 * M * N
    return (eightfold + odd) / 8, 1 + odd


def _eye(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)
