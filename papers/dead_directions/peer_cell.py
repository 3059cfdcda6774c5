"""Cell E: Shampoo, SOAP and K-FAC at a dead direction, beside cells A, C and D of `ablations.py`.

Statement. The loss, start and readings of those cells, with the two layers as modules on the rows √d e_i, so
that their mean loss is the population's:

    L = 1/(2d) Σ_i ‖(W_2 W_1 - M) √d e_i‖² = ½ ‖W_2 W_1 - M‖²

The slope 2 + 4 t⁴ / (σ² + t⁴) of log G_dd by log t is that of optimizers which keep W_1 = W_2 =
diag(1, .., 1, t). What these three do is the reading:

    Shampoo   keeps it. Its length is Adam's, of which only the dead entry has any: t falls as with signs,
              slower than η says because L, R and V are averages
    SOAP      turns the direction. All of L but the dead entry is zero, so that the basis of its kernel is
              arbitrary, and Adam divides rounding by rounding there: alignment falls, and no slope is read
    K-FAC     leaves W_1 = W_2: A_1 = 1 and A_2 = W_1 W_1ᵀ are not alike, so one layer's entry goes to 0 at a
              constant rate and the other's stays. It ends on one arm of the crossing t_1 t_2 = 0, where
              nothing is dead but the entry that vanished; `other` is the entry of layer 2

Steps. η = 0.95 t₀ / steps for Shampoo and SOAP, as signs have it, η = 0.01 without momentum for K-FAC; with
0.1 its first step overshoots to -1.3. At most MOST steps are made: no reading changes behind them. Cost: some
three seconds for 1,000 steps of all three; roots and inverses every tenth. Source: "Dead Directions:
Geometric Singular Learning" appendix B.3 has the cells; these optimizers in them are ours. Limits: those of
`ablations.bridge`; one start, which is aligned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from papers.dead_directions.ablations import NOISE, READ_EVERY, START, WIDTH, Row, slopes
from papers.dead_directions.kfac import KFAC
from papers.dead_directions.shampoo import SOAP, Shampoo
from topograd.errors import OptimError

KFAC_LR, MOST = 0.01, 3000


def peers(steps: int) -> list[Row]:
    """A row for each of the three, as those of `bridge`."""
    if steps < 30 * READ_EVERY:
        raise OptimError(setting="steps", given=steps, remedy=f"a slope needs at least {30 * READ_EVERY}")
    steps = min(steps, MOST)
    short = 0.95 * START / steps
    makers: dict[str, tuple[float, Callable[[nn.Module], Optimizer]]] = {
        "Shampoo": (short, lambda model: Shampoo(model.parameters(), lr=short)),
        "SOAP": (short, lambda model: SOAP(model.parameters(), lr=short)),
        "KFAC": (KFAC_LR, lambda model: KFAC(model, lr=KFAC_LR, momentum=0.0)),
    }
    return [
        {"driver": name, "knob": "lr", "value": lr, "lr": lr} | _row(make, steps)
        for name, (lr, make) in makers.items()
    ]


def _row(make: Callable[[nn.Module], Optimizer], steps: int) -> Row:
    *readings, other = _train(make, steps)
    return slopes(steps, *readings) | {"other": other[-1].item()}


def _train(make: Callable[[nn.Module], Optimizer], steps: int) -> tuple[Tensor, ...]:
    """t, G_dd, alignment and layer 2's entry at every reading."""
    target = torch.eye(WIDTH, dtype=torch.float64)
    target[-1, -1] = 0
    rows = WIDTH**0.5 * torch.eye(WIDTH, dtype=torch.float64)
    first, second = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for layer in (first, second):
            layer.weight.copy_(target)
            layer.weight[-1, -1] = START
    model = nn.Sequential(first, second)
    optimizer = make(model)
    results: list[tuple[Tensor, ...]] = []
    for step in range(steps):
        optimizer.zero_grad()
        (0.5 * (model(rows) - rows @ target.T).square().sum(1).mean()).backward()
        optimizer.step()
        if (step + 1) % READ_EVERY == 0 or step + 1 == steps:
            results.append(_reading(first.weight.detach(), second.weight.detach(), target))
    return tuple(torch.stack(values) for values in zip(*results, strict=True))


def _reading(W1: Tensor, W2: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    """|t|, G_dd of layer 1 by its formula, how far dead rows point along the dead unit, |t| of layer 2."""
    dead = W2[:, -1:]
    signal = ((W2 @ W1 - target).T @ dead).square().sum()
    entry = signal + NOISE**2 * dead.square().sum()
    alignment = torch.stack([W[-1, -1].abs() / W[-1].norm() for W in (W1, W2)]).min()
    return W1[-1, -1].abs(), entry, alignment, W2[-1, -1].abs()
