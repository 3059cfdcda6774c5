"""WAIC of posterior draws, and its relation to λ and ν at any temperature.

Statement. A posterior ∝ exp(-nβ L_n(w)) φ(w), L_n the mean of -log p(x_i|w), the true density in the model,
with the loss L_0. With λ of the crossing and ν of the fluctuation at the same β,

    n(E G - L_0) = (λ - ν)/β + ν                           generalisation, G = -∫ q log E_w p
    n(E T - L_0) = (λ - ν)/β - ν                           training, T = -(1/n) Σ_i log E_w p(x_i)
    E V = 2ν/β                                             functional variance, V = Σ_i Var_w log p(x_i)
    WAIC = T + βV/n,  so that E WAIC = E G up to o(1/n);  the gap E G - E T is 2ν/n.

Symbols and shapes. log p(x_i | w_s) is a matrix (draws, data), draws from the posterior.
Cost: one pass over it.
Source: "Dead Directions: Geometric Singular Learning", §13.5; Watanabe, "Mathematical Theory of Bayesian
Statistics" and "Asymptotic equivalence of Bayes cross validation and WAIC in singular learning theory".
Limits. Leading order in 1/n. ν depends on β (see `invariants.py`).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import GeometryError


@dataclass(frozen=True)
class Waic:
    """T, V and WAIC of one data set, and the fluctuation ν ≈ βV/2 that it shows."""

    training: float
    variance: float
    waic: float
    fluctuation: float


def waic(log_likelihoods: Tensor, beta: float = 1.0) -> Waic:
    """WAIC from log p(x_i | w_s), shape (draws, data), with draws from the posterior at this β."""
    if log_likelihoods.dim() != 2 or log_likelihoods.shape[0] < 2 or log_likelihoods.shape[1] < 1:
        shape = tuple(log_likelihoods.shape)
        raise GeometryError(setting="log_likelihoods", given=shape, allowed="(draws, data), 2 draws or more")
    if not beta > 0:
        raise GeometryError(setting="beta", given=beta, allowed="above 0, as inverse temperatures are")
    logs = log_likelihoods.detach().double()
    if not torch.isfinite(logs).all():
        draw, datum = (~torch.isfinite(logs)).nonzero()[0].tolist()
        value = logs[draw, datum].item()
        raise GeometryError(
            f"the log-likelihood of draw {draw} at datum {datum} is {value}",
            setting="log_likelihoods",
            given=(draw, datum),
        )
    draws, n = logs.shape
    T = float(-(logs.logsumexp(0) - math.log(draws)).mean())
    V = float(logs.var(0).sum())
    return Waic(T, V, T + beta * V / n, beta * V / 2)
