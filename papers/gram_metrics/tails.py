"""The tail of a spectrum: the exponent of a power law by maximum likelihood.

Statement. Of values x_1 ≤ ... ≤ x_n, those from a threshold x_min on are taken for a continuous power law,

    p(x) = ((α - 1)/x_min) (x/x_min)^{-α},   x ≥ x_min,   with distribution P(x) = 1 - (x/x_min)^{1-α}
    α = 1 + m / Σ_{x_i ≥ x_min} ln(x_i/x_min)                           m values; maximum likelihood
    D = max_x |F(x) - P(x)|                                             Kolmogorov-Smirnov, F of the m values

and x_min is the value at which D is smallest. The standard error of α at a given x_min is (α - 1)/√m.

Symbols and shapes. Values (n,), positive. Cost: O(n²) time and memory; a matrix has at most some thousand
eigenvalues.

Source: "Power-law distributions in empirical data" (A. Clauset, C. R. Shalizi, M. E. J. Newman), equations
3.1 and 3.9 and section 3.3. At a given m it is the estimator of "A simple general approach to inference about
the tail of a distribution" (B. M. Hill).
Some programs, weightwatcher among them, take D on the lower side of the steps of F only, and choose another
threshold now and then (our measurement); here it is the largest distance.
Limits. Every sample gets an exponent, power law or not. x_min jumps where two thresholds fit almost equally
well, and α with it: on the spectrum of a random square matrix of 128 rows, which has no tail, α is anywhere
from 3 to 15 (our measurement). Compare it with α of matrices that have no tail, and with a fixed m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from papers.gram_metrics.network import FieldError


@dataclass(frozen=True)
class Tail:
    """A fitted power law."""

    alpha: float
    threshold: float
    """x_min."""
    count: int
    """m: how many values are in the tail."""
    distance: float
    """D."""

    @property
    def error(self) -> float:
        """The standard error of α at this threshold."""
        return (self.alpha - 1) / self.count**0.5


def fit_tail(values: Tensor) -> Tail:
    """The power law that fits the tail of values (n,) best.

    >>> tail = fit_tail(torch.tensor([0.1, 1.0, 2.0, 4.0], dtype=torch.float64))
    >>> tail.count, round(tail.alpha, 3), round(tail.distance, 3)
    (3, 2.443, 0.333)
    """
    x = _checked(values)
    logs, n = x.log(), len(x)
    places = torch.arange(n, device=x.device)
    tail = places[None] >= places[:, None]
    over = (logs[None] - logs[:, None]) * tail  # (thresholds, values)
    m = (n - places).to(x.dtype)
    exponents = m / over.sum(1)  # α - 1
    model = -torch.expm1(-exponents[:, None] * over)
    below = (places[None] - places[:, None]) / m[:, None]
    apart = torch.maximum(model - below, below + 1 / m[:, None] - model)
    distances = apart.masked_fill(~tail, 0.0).amax(1)
    first = torch.cat([x[:1] > 0, x[1:] > x[:-1]])  # equal values are one threshold
    usable = first & (logs < logs[-1])
    best = int(distances.masked_fill(~usable, float("inf")).argmin())
    return Tail(float(1 + exponents[best]), float(x[best]), n - best, float(distances[best]))


def largest_tail(values: Tensor, count: int) -> float:
    """α of the `count` largest values, with the smallest of them as x_min.

    >>> round(largest_tail(torch.tensor([0.1, 1.0, 2.0, 4.0], dtype=torch.float64), 3), 3)
    2.443
    """
    x = _checked(values)
    if not 2 <= count <= len(x):
        raise FieldError(setting="count", given=count, remedy=f"a tail has from 2 values to all {len(x)}")
    logs = x[-count:].log()
    if logs[0] == logs[-1]:
        raise FieldError(
            f"the {count} largest values are equal",
            setting="values",
            given=count,
            remedy="a tail needs two that differ",
        )
    return float(1 + count / (logs - logs[0]).sum())


def _checked(values: Tensor) -> Tensor:
    """The values in ascending order, in float64."""
    if values.dim() != 1 or not bool((values > 0).all()) or not bool(values.isfinite().all()):
        raise FieldError(
            f"values are {tuple(values.shape)}",
            setting="values",
            given=tuple(values.shape),
            remedy="they must be (n,), positive and finite",
        )
    if len(values) < 2 or bool((values == values[0]).all()):
        raise FieldError(
            f"{len(values)} values were given",
            setting="values",
            given=len(values),
            remedy="a tail needs at least two that differ",
        )
    return values.detach().double().sort().values
