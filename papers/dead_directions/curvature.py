"""Sectional curvature of a Fisher metric on the way to a singularity: the exponent as it is measured.

Statement. The Fisher metric is the one that ψ = 2√p inherits from flat L²: g_ab = ⟨∂_aψ, ∂_bψ⟩; for a
Gaussian of unit covariance and mean f(w), that of f in flat ℝᵐ. In both cases Gauss's equation gives the
curvature of a plane

    K_sec(v, e) = [⟨II(v,v), II(e,e)⟩ - |II(v,e)|²] / (g_vv g_ee - g_ve²),    II(a, b) = (∂_a∂_bψ)^⊥,

with ^⊥ the part normal to all d tangents of the model. Towards a dead direction v of KL order k,
g_vv ~ t^{2k-2} and the normal parts of ∂_v∂_vψ and ∂_e∂_vψ stay bounded, so |K_sec| = O(t^{-(2k-2)}):

    |K_sec| ~ t^{-(2k-2)}    where ∂_e∂_vψ keeps a normal part; at most t^{-(k-1)} otherwise, often bounded.
    Vol{|K_sec| > κ} ~ κ^{-k/(2k-2)} (Fisher),  κ^{-1/(2k-2)} (Lebesgue),    k ≥ 2.

Symbols and shapes. embedding: w (d,) -> ψ (m,), with the flat product of ℝᵐ; plane (2, d), its rows v and e.
Cost: d + 3 forward-mode passes and a QR of (m, d) for each point.
Source: "Dead Directions: Geometric Singular Learning", §6; derived here by Gauss's equation.
Limits. Proposition 8 and Corollary 9 of the paper have 2k-1 in place of 2k-2. That is the exponent of a
diagonal metric with ∂_v g_ee ≠ 0 chosen freely; a Fisher metric of a dead direction is not free: ∂_v g_ee is
cancelled by ∂_e g_ve. Measured: mean (s(1+t), t^k, st) has ∂_t g_ss ≠ 0 and, at s = 0,
K_sec = -1/(k² t^{2k-2} (1+2t+2t²)²).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacfwd, jvp

from topograd.errors import GeometryError
from topograd.geometry.rates import Rate, fit_rate, log_grid

Embedding = Callable[[Tensor], Tensor]

FLAT = 1e-12
"""A plane with sin² of its angle below this is a line; its curvature would be rounding."""


def sectional_curvature(embedding: Embedding, point: Tensor, plane: Tensor) -> Tensor:
    """K_sec of the plane spanned by two rows, at a point of the surface that `embedding` draws in flat space.

    >>> def sphere(w):  # of radius 2
    ...     return 2 * torch.stack((w[0].cos() * w[1].cos(), w[0].sin() * w[1].cos(), w[1].sin()))
    >>> round(sectional_curvature(sphere, torch.tensor([0.3, 0.4]).double(), torch.eye(2).double()).item(), 9)
    0.25
    """
    if plane.shape != (2, *point.shape) or point.dim() != 1:
        raise GeometryError(
            f"a plane of shape {tuple(plane.shape)} at a point {tuple(point.shape)}: give two rows of d",
            setting="plane",
            given=tuple(plane.shape),
        )
    tangents = jacfwd(embedding)(point)  # (m, d)
    sizes = torch.linalg.vector_norm(tangents, dim=0)
    if not (sizes > 0).all():
        raise GeometryError(
            "the Fisher vanishes along a coordinate here: approach the singular point, not at it",
            setting="point",
        )
    v, e = _normed(tangents, plane)
    basis = torch.linalg.qr(tangents / sizes).Q
    vv, ee, ve = (_normal(basis, _second(embedding, point, a, b)) for a, b in ((v, v), (e, e), (v, e)))
    cosine = (tangents @ v) @ (tangents @ e)  # v and e are unit in the Fisher metric
    if not 1 - cosine**2 > FLAT:
        raise GeometryError(
            "the plane's two directions are one to the Fisher metric here: choose another plane",
            setting="plane",
        )
    return (vv @ ee - ve @ ve) / (1 - cosine**2)


def curvature_rate(embedding: Embedding, point: Tensor, plane: Tensor, *, grid: Tensor | None = None) -> Rate:
    """The exponent of |K_sec| along point + t v, v the plane's first row; 0 where it stays finite."""
    t = log_grid(1e-3, 1e-2) if grid is None else grid
    values = [sectional_curvature(embedding, point + float(ti) * plane[0], plane).abs() for ti in t]
    return fit_rate(t, torch.stack(values), estimator="sectional curvature")


def volume_exponents(k: int) -> tuple[float, float]:
    """(Fisher, Lebesgue): how Vol{|K_sec| > κ} falls with κ, where |K_sec| ~ t^{-(2k-2)}.

    >>> volume_exponents(2)
    (-1.0, -0.5)
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 2:
        raise GeometryError(
            f"the KL order is {k!r}: curvature stays bounded below k = 2",
            setting="k",
            given=k,
            remedy="give 2 or more",
        )
    return -k / (2 * k - 2), -1 / (2 * k - 2)


def _normed(tangents: Tensor, plane: Tensor) -> Tensor:
    """The plane's rows, each of length 1 in the Fisher metric, so that no power of t is left to underflow."""
    lengths = torch.linalg.vector_norm(tangents @ plane.T, dim=0)
    if not (lengths > 0).all():
        raise GeometryError(
            "a direction of the plane has no length in the Fisher metric: choose another plane",
            setting="plane",
        )
    return plane / lengths[:, None]


def _second(embedding: Embedding, point: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """∂_a ∂_b ψ."""

    def along_b(w: Tensor) -> Tensor:
        derivative: Tensor = jvp(embedding, (w,), (b,))[1]
        return derivative

    second: Tensor = jvp(along_b, (point,), (a,))[1]
    return second


def _normal(basis: Tensor, x: Tensor) -> Tensor:
    """x less its projection on the tangents, twice: the first leaves rounding of the size of x."""
    for _ in range(2):
        x = x - basis @ (basis.T @ x)
    return x
