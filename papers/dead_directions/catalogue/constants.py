"""Constants beside the rates: what live units explain of a dead one, and what LayerNorm leaks.

Statement. In a ReLU chain on isotropic Gaussian input of width d, the live units explain a share of the
dead unit's second moment that does not depend on t or on the layer,

    bᵀC⁻¹b / A_dd = (d - 1) / (π (d + π - 2)),

(`families/two_layer.py`), so that the Schur complement, and with it λ_min(A), keeps the rate of A_dd. And
the dead output of W_2 LN(W_1 x), with both weights diag(1, …, 1, t) and label noise σ², has the second moment

    F(t) = σ² + t² ((d-1)/d) E[τ²Z² / (s² + τ²Z²/d)],    τ² = t² + 1/(d-1),
         = σ² + α t² + β t⁴ + …,

with Z ~ N(0, 1) and (d-1) s² ~ χ²_{d-2} independent: local slopes 0, then 2, then towards 4.

Symbols. C, b, A_dd the blocks of A = E[h hᵀ] on live units and the dead one.
Cost: a quadrature of 100 points, since the ratio depends on B = Z²/(Z² + (d-1)s²) alone, a beta variable.
Source: "Dead Directions: Geometric Singular Learning", Lemma 18 and Theorem 122. The text drops the squared
mean of the live units from LayerNorm's variance, so its α needs d >= 5; with that term it is finite from d
= 3 on.
Limits. Slope 4 shows for large d only (3.2 at most at d = 8), and slope 2 returns for t >> √d.
"""

from __future__ import annotations

import torch
from scipy import special
from torch import Tensor

from papers.dead_directions.catalogue.networks import dead_diagonal, layer_norm, normal, trace_chain
from papers.dead_directions.catalogue.probing import dead_distance
from topograd.errors import GeometryError
from topograd.geometry.rules.architectures import Chain

NODES = 100
"""Points of the quadrature."""


def measured_share(width: int, samples: int, seed: int = 0) -> float:
    """bᵀC⁻¹b / A_dd of a ReLU layer at t = 0.01, by least squares; biased upward by about d / n."""
    t = torch.tensor([1e-2], dtype=torch.float64)
    h = trace_chain(Chain(2, width, "relu", live="identity"), t, samples, seed).forward["A_1"].at
    return float(1 - dead_distance(h).square() / h[..., -1].square().sum(-1))


def layernorm_leak(width: int, t: Tensor, noise: float = 1.0) -> Tensor:
    """F(t) by quadrature, for every t."""
    b, weight = _nodes(width, t)
    tau2 = t[:, None].square() + 1 / (width - 1)
    mean = (tau2 * b / ((1 - b) / (width - 1) + tau2 * b / width)) @ weight
    return noise**2 + t.square() * (width - 1) / width * mean


def leak_coefficients(width: int) -> tuple[float, float]:
    """α and β of F(t) = σ² + α t² + β t⁴.

    >>> [round(c, 3) for c in leak_coefficients(8)]
    [0.192, 1.204]
    """
    b, weight = _nodes(width, torch.empty(0, dtype=torch.float64))
    live, share = (1 - b) / (width - 1), (width - 1) / width
    below = live + b / (width * (width - 1))
    alpha = share * weight @ (b / (width - 1) / below)
    beta = share * weight @ (b * live / below.square())
    return float(alpha), float(beta)


def measured_leak(width: int, t: Tensor, samples: int, noise: float = 1.0, seed: int = 0) -> Tensor:
    """F(t) of the network itself, averaged over samples; the label noise is integrated."""
    weight = dead_diagonal(t, width)
    x = normal(samples, width, seed=seed, like=t)
    out = layer_norm(x @ weight.mT) @ weight.mT
    return noise**2 + out[..., -1].square().mean(1)


def _nodes(width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gauss-Jacobi points and weights for B = Z² / (Z² + (d-1) s²) ~ Beta(1/2, (d-2)/2)."""
    if width < 3:
        raise GeometryError(f"width {width}: the leak is finite from 3 on", setting="width", given=width)
    x, weight = special.roots_jacobi(NODES, (width - 4) / 2, -0.5)
    return torch.from_numpy((1 + x) / 2).to(like), torch.from_numpy(weight / weight.sum()).to(like)
