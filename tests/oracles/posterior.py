"""Posteriors in one dimension, by adding up over a grid. The slow, obvious version.

    the limit     π_ξ(s) ∝ |s|^h exp(-½ s^{2k} + √β ξ s^k),  ν = ½ E_ξ Var(s^k),      s ∈ ℝ, ξ ~ N(0, 1)
    the sample    p(w | x_1..x_n) ∝ Π_i N(x_i; a w^k, 1)^β,  uniform in w, data from w = 0

The sample's losses are those of Watanabe, "Mathematical Theory of Bayesian Statistics": with E over the
posterior,

    T = -(1/n) Σ_i log E p(x_i | w),    G = -∫ q(x) log E p(x | w) dx,    V = Σ_i Var log p(x_i | w).

Each is answered less the loss of the true density on the same data, whose expectation is zero.
The fast version is in `geometry/singular/`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def fluctuation_on_a_grid(k: int, beta: float = 1.0, prior: int = 0, points: int = 4001) -> float:
    """ν(k, β, h) from s and ξ on even grids; good to 3 decimals or better for h = 0 or more."""
    edge = (2 * 45.0) ** (1 / (2 * k)) + (9 * beta**0.5) ** (1 / k)
    s = torch.linspace(-edge, edge, points, dtype=torch.float64)
    total, weights = 0.0, 0.0
    for xi in torch.linspace(-8, 8, 161, dtype=torch.float64):
        logs = prior * s.abs().log() - s ** (2 * k) / 2 + beta**0.5 * xi * s**k
        posterior = torch.softmax(logs, 0)
        mean = posterior @ s**k
        weight = torch.exp(-(xi**2) / 2)
        total += float(weight * (posterior @ (s**k - mean) ** 2))
        weights += float(weight)
    return total / weights / 2


def data_free_fluctuation(k: int, prior: float = 0) -> float:
    """ν without the fluctuation of the data, on the half line s > 0: the paper's closed form.

    ν_0(k, h) = a - (Γ(a+½)/Γ(a))², a = (h+1)/(2k). On the whole line it is ν_0 for even k and a for odd k.
    """
    a = (prior + 1) / (2 * k)
    return a - math.exp(2 * (math.lgamma(a + 0.5) - math.lgamma(a)))


def power_model_losses(
    k: int, data: Tensor, beta: float = 1.0, scale: float = 1.0, points: int = 121
) -> tuple[Tensor, Tensor, Tensor]:
    """(n G, n T, V) for each row of data (sets, n), drawn from N(0, 1), under the model N(scale · w^k, 1).

    G and T are less the loss of N(0, 1): in the mean over data for G, on the same row for T.
    """
    n = data.shape[1]
    w, posterior = power_model_posterior(k, data, beta, scale, points)
    f = scale * w**k  # log p(x | w) - log p(x | 0) = x f - f²/2
    ratios = data[:, :, None] * f - f**2 / 2  # (sets, n, points)
    predictive = (posterior[:, None] * ratios.exp()).sum(-1).log()
    mean = (posterior[:, None] * ratios).sum(-1, keepdim=True)
    V = (posterior[:, None] * (ratios - mean) ** 2).sum(-1).sum(-1)
    x = torch.linspace(-8, 8, 161, dtype=data.dtype)
    q = torch.softmax(-(x**2) / 2, 0)
    gains = (posterior @ (x[:, None] * f - f**2 / 2).exp().T).log()  # (sets, 161)
    return -n * (gains @ q), -predictive.sum(-1), V


def power_model_posterior(
    k: int, data: Tensor, beta: float = 1.0, scale: float = 1.0, points: int = 121
) -> tuple[Tensor, Tensor]:
    """The grid w (points,) and the posterior's mass on it (sets, points), for data (sets, n)."""
    n = data.shape[1]
    edge = (12 / (scale * (n * beta) ** 0.5)) ** (1 / k)
    w = torch.linspace(-edge, edge, points, dtype=data.dtype)
    f = scale * w**k
    logs = beta * (data.sum(1, keepdim=True) * f - n * f**2 / 2)
    return w, torch.softmax(logs, -1)
