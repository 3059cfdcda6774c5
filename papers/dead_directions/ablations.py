"""Four cells: what the knobs of an optimizer do to a dead direction, and what they do not.

Statement. Cells A, C and D train two linear layers of width d on the population loss from the singular point,
moved by t₀ along its dead direction:

    L = ½ ‖W_2 W_1 - M‖²,  M = diag(1, .., 1, 0),   W_1 = W_2 = diag(1, .., 1, t₀)
    G_1 = W_2ᵀ (R Rᵀ + σ² 1) W_2,  R = W_2 W_1 - M             covariance of layer 1's backward signal

With W_1 = W_2 = diag(1, .., 1, t) all along, its dead entry is t² (σ² + t⁴), so that

    d log G_dd / d log t = 2 + 4 t⁴ / (σ² + t⁴)

for any optimizer that keeps them so: the slope 2 is read where t⁴ ≪ σ², however fast t shrinks. The three
cells turn the knobs of the three drivers (`drivers.py`). How fast: for a step of degree h in the gradient t³,
t ~ step^{-1/(3h-1)} where h > 1/3 (`decay`, derived here), so that SGD has step^{-1/2}.

Cell B trains a diagonal network w = u² - v² (u, v (d,), both α at first) on n samples of a sparse linear map
in batches, and asks how many of the inactive pairs have a member below 1e-12, how many at exactly 0.

Readings. Slopes are fits over the last third of the steps. alignment is the smallest |W_dd| / ‖W_d·‖ of both
layers there; below 0.99 the direction has turned, G_dd is no longer its entry, and the slope is None.
`asymptotic` says whether t⁴ ≤ σ² / 100 there.

Steps. SGD and the floors take η = 0.1 (η = 0.001 in cell B). Signs move by η however small the gradient is:
in cells C and D theirs is 0.95 t₀ / steps, which never reaches 0; in cell B it is incommensurate with α,
because t on a lattice of steps through 0 would meet 0 by coincidence.

Symbols and shapes. All variants of a cell are one tensor (V, ...), their gradients are made together, and
each has its own optimizer on its slice.

Cost: at full size a minute or so for the four cells.

Source: "Dead Directions: Geometric Singular Learning" appendix B.3; cell B's network is that of "Implicit
Bias of SGD for Diagonal Linear Networks: a Provable Benefit of Stochasticity". Step sizes are ours.

Limits. The population loss cannot turn a direction that starts aligned: the samples of a training set can.
In cell B the paper counts exact zeros. In our runs (20000 steps, three seeds) ε ≤ 1e-4 brought 56 to 78 % of
the pairs below 1e-12, the smallest to 1e-139, and none to exactly 0: it would be underflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from papers.dead_directions.drivers import HomogeneityDial, MomentumSign, ParametricEpsFloor
from topograd.errors import OptimError

WIDTH, NOISE, START = 8, 0.1, 0.3
"""d, σ and t₀ of cells A, C and D."""
PAIRS, ACTIVE, SAMPLES, BATCH, ALPHA = 60, 5, 40, 5, 0.05
"""d, active pairs, n, batch and α of cell B."""
SIGN_LR = 1e-3 * math.pi / 3
"""The step of signs in cell B; α is no multiple of it."""
SMALLEST_ALIGNMENT, BELOW = 0.99, 1e-12
READ_EVERY = 10
"""Steps between two readings."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """A driver at one value of its knob."""

    driver: type[ParametricEpsFloor] | type[HomogeneityDial] | type[MomentumSign]
    knob: str
    value: float
    lr: float

    def build(self, parameter: nn.Parameter) -> Optimizer:
        """The optimizer of one tensor."""
        knobs: Any = {self.knob: self.value}
        return self.driver([parameter], lr=self.lr, **knobs)

    @property
    def row(self) -> Row:
        """How the variant is named in a table."""
        return {"driver": self.driver.__name__, "knob": self.knob, "value": self.value, "lr": self.lr}


def floors(values: Sequence[float], lr: float) -> list[Variant]:
    """ParametricEpsFloor at several ε."""
    return [Variant(ParametricEpsFloor, "eps", eps, lr) for eps in values]


def dials(values: Sequence[float], lr: float, sign_lr: float) -> list[Variant]:
    """HomogeneityDial at several h; sign descent has a step of its own."""
    return [Variant(HomogeneityDial, "h", h, lr if h else sign_lr) for h in values]


def signs(values: Sequence[float], sign_lr: float) -> list[Variant]:
    """MomentumSign at several β."""
    return [Variant(MomentumSign, "beta", beta, sign_lr) for beta in values]


def cells(steps: int = 20_000, seeds: int = 3) -> dict[str, Any]:
    """The rows of all four cells; `seeds` are those of cell B."""
    sign_lr = 0.95 * START / max(steps, 1)
    return {
        "steps": steps,
        "seeds": seeds,
        "A": bridge(floors((1e-8, 1e-4, 1e-2, 1.0, 10.0, 100.0), 0.1), steps),
        "B": diagonal(steps=steps, seeds=seeds),
        "C": bridge(dials((1.0, 0.75, 0.5, 0.0), 0.1, sign_lr), steps),
        "D": bridge(signs((0.0, 0.9, 0.99), sign_lr), steps),
    }


def bridge(variants: Sequence[Variant], steps: int, tilt: float = 0.0) -> list[Row]:
    """Cells A, C, D: a row for each variant. With `tilt` t₀ points that many radians off, into a live column.

    >>> (row,) = bridge(floors([1.0], lr=0.1), steps=600)
    >>> row["alignment"], round(row["slope"], 1)
    (1.0, 2.0)
    """
    if steps < 30 * READ_EVERY:
        raise OptimError(setting="steps", given=steps, remedy=f"a slope needs at least {30 * READ_EVERY}")
    M = torch.eye(WIDTH, dtype=torch.float64)
    M[-1, -1] = 0
    start = torch.stack([M, M])
    start[:, -1, -2:] = START * torch.tensor([math.sin(tilt), math.cos(tilt)], dtype=torch.float64)

    def gradient(layers: Tensor, step: int) -> Tensor:
        W1, W2 = layers.unbind(1)
        R = W2 @ W1 - M
        return torch.stack([W2.mT @ R, R @ W1.mT], dim=1)

    sizes, entries, alignments = [], [], []
    for layers in _train(variants, start, gradient, steps):
        W1, W2 = layers.unbind(1)
        dead = W2[:, :, -1:]  # G_1's dead row: how layer 2 reads the dead unit
        signal = ((W2 @ W1 - M).mT @ dead).square().sum((1, 2))
        sizes.append(W1[:, -1, -1].abs())
        entries.append(signal + NOISE**2 * dead.square().sum((1, 2)))
        rows = layers[:, :, -1]
        alignments.append((rows[..., -1].abs() / rows.norm(dim=-1)).amin(1))
    readings = [torch.stack(values, dim=1) for values in (sizes, entries, alignments)]
    return [
        variant.row | slopes(steps, *reading)
        for variant, *reading in zip(variants, *(values.unbind() for values in readings), strict=True)
    ]


def slopes(steps: int, t: Tensor, G: Tensor, alignment: Tensor) -> Row:
    """What one run says: t, G_dd and alignment at every reading, from the first."""
    late = slice(2 * len(t) // 3, None)
    step = (READ_EVERY * torch.arange(1, len(t) + 1, dtype=torch.float64)).clamp_max(steps)
    aligned = alignment[late].min().item()
    slope, fit = _fit(t[late], G[late])
    decay, _ = _fit(step[late], t[late])
    readable = aligned >= SMALLEST_ALIGNMENT
    return {
        "slope": slope if readable else None,
        "r2": fit if readable else None,
        "alignment": aligned,
        "decay": decay,
        "t_late": t[late][0].item(),
        "t_last": t[-1].item(),
        "asymptotic": bool(t[late].max() ** 4 <= NOISE**2 / 100),
    }


def _fit(x: Tensor, y: Tensor) -> tuple[float | None, float | None]:
    """Slope and R² of log y on log x; None where there is nothing to fit."""
    x, y = x.log(), y.log()
    x, y = x - x.mean(), y - y.mean()
    across = x.square().sum()
    if not (across > 1e-12 and across.isfinite() and y.isfinite().all()):
        return None, None
    slope = (x @ y) / across
    return slope.item(), (1 - (y - slope * x).square().sum() / y.square().sum()).item()


def diagonal(variants: Sequence[Variant] | None = None, steps: int = 20_000, seeds: int = 3) -> list[Row]:
    """Cell B: how many inactive pairs of w = u² - v² come to have a member below 1e-12, over the seeds."""
    for name, count in (("steps", steps), ("seeds", seeds)):
        if count < 1:
            raise OptimError(setting=name, given=count, allowed="at least 1")
    if variants is None:
        variants = floors((1e-8, 1e-4, 1e-2, 1.0), 1e-3) + dials((1.0, 0.5, 0.0), 1e-3, SIGN_LR)
        variants += signs((0.9, 0.99), SIGN_LR)
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    X = torch.stack([torch.randn(SAMPLES, PAIRS, generator=g, dtype=torch.float64) for g in generators])
    wanted = X[:, :, :ACTIVE].sum(-1)
    orders = torch.stack([torch.randint(SAMPLES, (steps, BATCH), generator=g) for g in generators])
    each = torch.arange(seeds)[:, None]

    def gradient(pairs: Tensor, step: int) -> Tensor:
        u, v = pairs.unbind(-2)
        order = orders[:, step]
        x, y = X[each, order], wanted[each, order]
        off = torch.einsum("sbd,vsd->vsb", x, u * u - v * v) - y
        by_w = torch.einsum("sbd,vsb->vsd", x, off) / BATCH
        return torch.stack([2 * u * by_w, -2 * v * by_w], dim=-2)

    start = torch.full((seeds, 2, PAIRS), ALPHA, dtype=torch.float64)
    for last in _train(variants, start, gradient, steps):
        pairs = last
    smaller = pairs[..., ACTIVE:].abs().amin(-2)
    w = pairs[..., 0, :].square() - pairs[..., 1, :].square()
    losses = (torch.einsum("snd,vsd->vsn", X, w) - wanted).square().mean(-1) / 2
    return [
        variant.row | _reach(tensor, loss)
        for variant, tensor, loss in zip(variants, smaller, losses, strict=True)
    ]


def _reach(smaller: Tensor, losses: Tensor) -> Row:
    """Fractions of pairs, from the smaller member of each inactive one (seeds, pairs)."""
    below = (smaller < BELOW).double().mean(1)
    return {
        "below": below.mean().item(),
        "below_by_seed": below.tolist(),
        "exact_zeros": (smaller == 0).double().mean().item(),
        "smallest": smaller.min().item(),
        "loss": losses.mean().item(),
    }


def _train(
    variants: Sequence[Variant], start: Tensor, gradient: Callable[[Tensor, int], Tensor], steps: int
) -> Iterator[Tensor]:
    """Every variant from one start; yields all of them (V, ...) after every READ_EVERY steps and the last."""
    states = start.repeat(len(variants), *(1 for _ in start.shape))
    slices = [nn.Parameter(state) for state in states]  # they share the storage of `states`
    optimizers = [variant.build(piece) for variant, piece in zip(variants, slices, strict=True)]
    for step in range(steps):
        for piece, grad in zip(slices, gradient(states, step), strict=True):
            piece.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % READ_EVERY == 0 or step + 1 == steps:
            yield states
