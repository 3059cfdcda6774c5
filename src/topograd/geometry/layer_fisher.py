"""The Fisher along several directions of every layer, from gradients alone: no scan.

Statement. A layer z = W h moves along v uᵀ. With labels drawn from the model, and S = Σ_m (vᵀδ_m)(uᵀh_m) over
the rows m of one sample (a sequence), δ the gradient of the sum of its n loss terms,

    F = E[S²] / n,        share(nβ) = ½ - e^{-a} / ∫ e^{-at²} dt,   a = nβF/2, t from -1 to 1

F is exact in expectation: scores of labels that were drawn independently have no products in the mean, while
positions of a sequence, which K-FAC takes to be independent, do. The share is that of `finite_share.py` where
K is the parabola F t²/2: that it stays one as far as the data reach is what a scan reads, and this does not.

The interval of F is the middle 90 % over `DRAWS` bootstrap draws of samples; the share's is that of F.

Symbols and shapes. U (d_in, k), V (d_out, k) of a layer; h (M, d_in), δ (M, d_out). Cost: a forward and a
backward pass without gradients of weights for each of `SAMPLES` samples, in the model's own type: S is a sum
of few products, and a relative error of 1e-6 is far inside of its interval.
Source: "Dead Directions: Geometric Singular Learning" §12.1 (a static reading); scores as in "Optimizing
neural networks with Kronecker-factored approximate curvature" (J. Martens, R. Grosse).
Limits. E[S²] of `SAMPLES` samples is uncertain by √(2 / SAMPLES), a quarter of itself. Labels are drawn, so
that a loss of one's own, which has no distribution, has none of these; nor has a layer with several calls of
which a gradient reaches some.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from topograd.geometry.factors import Batch, Outputs, reduce_batches
from topograd.geometry.finite_share import Share
from topograd.geometry.layers import Call
from topograd.geometry.losses import Loss

Directions = Mapping[str, tuple[Tensor, Tensor, float]]
"""U, V and the length of a step t = 1 of every layer."""
SAMPLES = 24
DRAWS = 200


@dataclass(frozen=True)
class LayerFisher:
    """One direction of a layer."""

    fisher: float
    interval: tuple[float, float]
    share: Share
    """Of a parabola with this curvature."""


def read_layers(
    model: nn.Module,
    samples: Sequence[Batch],
    loss: Loss,
    directions: Directions,
    n_beta: float,
    *,
    outputs: Outputs | None = None,
    generator: torch.Generator | None = None,
) -> dict[str, tuple[LayerFisher, ...]]:
    """The readings of every layer, one for each pair of columns; `samples` are batches of one sample each."""
    scores = _Scores(directions)

    def one_by_one() -> Iterator[Batch]:
        for sample in samples:
            yield sample
            scores.end_sample()

    _, terms = reduce_batches(
        model, one_by_one(), scores, loss, "monte-carlo", outputs=outputs, generator=generator
    )
    draws = np.random.default_rng(0).multinomial(len(samples), np.full(len(samples), 1 / len(samples)), DRAWS)
    found = {}
    for layer, rows in scores.clear():
        squares = np.zeros((len(samples), directions[layer][0].shape[1]))  # 0 where no row went through it
        for sample, square in rows.items():
            squares[sample] = directions[layer][2] ** 2 * square.cpu().numpy() / terms
        low, high = np.quantile(draws @ squares, (0.05, 0.95), axis=0)
        readings = zip(squares.sum(0).tolist(), low.tolist(), high.tolist(), strict=True)
        found[layer] = tuple(_reading(*reading, n_beta) for reading in readings)
    return found


def parabola_share(fisher: float, n_beta: float) -> float:
    """The share of K = F t²/2 on a line from -1 to 1.

    >>> round(parabola_share(1.0, 1e4), 6), round(parabola_share(1e-9, 1.0), 6)
    (0.5, 0.0)
    """
    a = n_beta * fisher / 2
    if a < 1e-4:
        return a / 3
    return 0.5 - math.exp(-a) / (math.sqrt(math.pi / a) * math.erf(math.sqrt(a)))


def _reading(fisher: float, low: float, high: float, n_beta: float) -> LayerFisher:
    value, *around = (parabola_share(one, n_beta) for one in (fisher, low, high))
    return LayerFisher(fisher, (low, high), Share(n_beta, value, (around[0], around[1])))


class _Scores:
    """A reducer that sums (vᵀδ)(uᵀh) of each sample, for every direction of every layer."""

    def __init__(self, directions: Directions) -> None:
        self._directions = directions
        self._inputs: dict[str, list[Tensor]] = {}
        self._sums: dict[str, Tensor] = {}
        self._unclear: set[str] = set()
        self._squares: dict[str, dict[int, Tensor]] = {}
        self._sample = 0

    def refuses(self, layer: str, sides: tuple[int, int]) -> str | None:
        return None if layer in self._directions else "its directions are not read"

    def see_inputs(self, layer: str, call: Call) -> None:
        rows = call.inputs(call.source.detach())
        self._inputs.setdefault(layer, []).append(rows @ self._directions[layer][0].to(rows))

    def see_gradients(self, layer: str, rows: Tensor) -> None:
        h = self._inputs[layer].pop()  # the last call is the first of the backward pass
        products = ((rows @ self._directions[layer][1].to(rows)) * h).double().sum(0)
        self._sums[layer] = self._sums.get(layer, 0) + products

    def clear(self) -> Iterator[tuple[str, dict[int, Tensor]]]:
        """Of every layer whose calls could be told apart, S² by sample."""
        return ((layer, rows) for layer, rows in self._squares.items() if layer not in self._unclear)

    def end_sample(self) -> None:
        """The sums of the sample are whole."""
        for layer, total in self._sums.items():
            self._squares.setdefault(layer, {})[self._sample] = total.square()
            if self._inputs[layer]:  # a call that no gradient reached: which one it was is not known
                self._unclear.add(layer)
        self._inputs.clear()
        self._sums.clear()
        self._sample += 1
