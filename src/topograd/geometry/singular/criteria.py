"""What λ, m and ν say about losses: free energy, generalisation, training, WAIC, at any temperature.

Statement. A posterior ∝ exp(-nβ L_n(w)) φ(w), L_n the mean of -log p(x_i|w), the true density in the model,
with the loss L_0. With λ and m of the crossing and ν of the fluctuation at the same β,

    F_n = n L_n(w_0) + λ log n - (m-1) log log n + O(1)    free energy, -log of the evidence (β = 1)
    n(E G - L_0) = (λ - ν)/β + ν                           generalisation, G = -∫ q log E_w p
    n(E T - L_0) = (λ - ν)/β - ν                           training, T = -(1/n) Σ_i log E_w p(x_i)
    E V = 2ν/β                                             functional variance, V = Σ_i Var_w log p(x_i)
    WAIC = T + βV/n,  so that E WAIC = E G up to o(1/n);  the gap E G - E T is 2ν/n.

Symbols and shapes. log p(x_i | w_s) is a matrix (draws, data), draws from the posterior.
Cost: one pass over it.
Source: "Dead Directions: Geometric Singular Learning", §13.5; Watanabe, "Mathematical Theory of Bayesian
Statistics" and "Asymptotic equivalence of Bayes cross validation and WAIC in singular learning theory".
Limits. Leading order in 1/n. ν depends on β (see `fluctuation.py`), so give the one of this temperature.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from topograd.errors import GeometryError


@dataclass(frozen=True)
class Losses:
    """Expectations over data sets: generalisation and training loss, functional variance."""

    generalization: float
    training: float
    variance: float


@dataclass(frozen=True)
class Waic:
    """T, V and WAIC of one data set, and the fluctuation ν ≈ βV/2 that it shows."""

    training: float
    variance: float
    waic: float
    fluctuation: float


def free_energy(n: int, loss: float, rlct: float, multiplicity: int = 1) -> float:
    """F_n without its O(1), from L_n(w_0) = `loss`.

    >>> round(free_energy(1000, 0.5, rlct=0.25), 3)
    501.727
    """
    if n < 3:
        raise GeometryError(f"n is {n}: log log n needs 3 samples or more")
    if not rlct > 0 or multiplicity < 1:
        raise GeometryError(f"rlct {rlct} and multiplicity {multiplicity}: give λ > 0 and m of at least 1")
    return n * loss + rlct * math.log(n) - (multiplicity - 1) * math.log(math.log(n))


def expected_losses(n: int, loss: float, rlct: float, fluctuation: float, beta: float = 1.0) -> Losses:
    """E G, E T and E V for n samples, from L_0 = `loss`, λ, and ν at this β.

    >>> losses = expected_losses(100, 0.0, rlct=0.5, fluctuation=0.5)  # a regular parameter
    >>> losses.generalization, losses.training, losses.variance
    (0.005, -0.005, 1.0)
    """
    if n < 1 or not beta > 0:
        raise GeometryError(f"n is {n} and beta is {beta}: both are positive")
    if not (rlct > 0 and fluctuation > 0):
        raise GeometryError(f"rlct {rlct} and fluctuation {fluctuation}: both are positive")
    shared = (rlct - fluctuation) / beta
    return Losses(
        loss + (shared + fluctuation) / n, loss + (shared - fluctuation) / n, 2 * fluctuation / beta
    )


def waic(log_likelihoods: Tensor, beta: float = 1.0) -> Waic:
    """WAIC from log p(x_i | w_s), shape (draws, data), with draws from the posterior at this β."""
    if log_likelihoods.dim() != 2 or log_likelihoods.shape[0] < 2 or log_likelihoods.shape[1] < 1:
        raise GeometryError(
            f"log-likelihoods of shape {tuple(log_likelihoods.shape)}: give (draws, data), 2 draws or more"
        )
    if not beta > 0:
        raise GeometryError(f"beta is {beta}: an inverse temperature is positive")
    logs = log_likelihoods.detach().double()
    if not torch.isfinite(logs).all():
        draw, datum = (~torch.isfinite(logs)).nonzero()[0].tolist()
        raise GeometryError(
            f"the log-likelihood of draw {draw} at datum {datum} is {logs[draw, datum].item()}"
        )
    draws, n = logs.shape
    T = float(-(logs.logsumexp(0) - math.log(draws)).mean())
    V = float(logs.var(0).sum())
    return Waic(T, V, T + beta * V / n, beta * V / 2)
