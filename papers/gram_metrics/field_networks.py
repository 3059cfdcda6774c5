"""The networks, tasks and runs of gradient descent in which fields are studied.

Networks are He-initialised with rows of length √N as inputs, so that Q^{(0)}, and all of K, is of order one
at any width. Y is a mean of ReLUs and so never negative: two classes have the targets LOW and a higher one.
Training is plain gradient descent in the weights, W_l ← W_l - (2η/(M N)) Σ_β r^β z_l^β (u_{l-1}^β)ᵀ, its
gradient taken from the fields, which is exact. A step costs as much as a forward and a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from papers.gram_metrics.field_state import Fields, State, state_of
from papers.outcome import Asked
from topograd.errors import ConfigError, DivergenceError

Data = Literal["teacher", "digits"]
Weights = list[Tensor]
LOW, HIGH = 0.2, 1.0
TEACHER_INPUTS, TEACHER_NEURONS = 16, 4
LEADING = 8
"""Eigenvectors of K that are called leading."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large everything is."""

    depth: int = 4
    width: int = 128
    examples: int = 128
    unseen: int = 512
    steps: int = 500
    readings: int = 24
    """Moments of a run at which kernels are read, spaced by ratios."""
    depths: tuple[int, ...] = (3, 4, 6)
    """Depths at which the shares of the layers are compared."""
    depth_seeds: int = 3
    widths: tuple[int, ...] = (32, 64, 128, 256, 512)
    drift_examples: int = 64
    drift_steps: int = 200
    drift_seeds: int = 3
    highs: tuple[float, ...] = (1.0, 2.0, 3.0)
    """Targets of the upper class in the runs of the conjecture: the further, the more must be learnt."""
    seeds: int = 5
    """Runs for each of them."""
    pairs: int = 6
    """Pairs of examples, of either kind, whose G is decomposed."""


PRESETS: Mapping[str, Sizes] = {
    "small": Sizes(),
    "tiny": Sizes(
        width=24, examples=24, unseen=40, steps=30, readings=6, depths=(3, 4), depth_seeds=2,
        widths=(8, 16, 32), drift_examples=12, drift_steps=20, highs=(1.0, 2.0), seeds=3, pairs=4,
    ),
}  # fmt: skip


def sizes_of(args: Asked) -> Sizes:
    """The preset's, with the steps, the width and the runs of the conjecture that are asked for."""
    return replace(PRESETS[args.preset], steps=args.steps, width=args.width, seeds=args.seeds)


@dataclass(frozen=True)
class Task:
    """Two classes of inputs, and others that are not trained on."""

    inputs: Tensor
    classes: Tensor
    unseen: Tensor
    unseen_classes: Tensor

    def targets(self, high: float = HIGH) -> Tensor:
        """LOW or `high` (M,)."""
        upper, lower = self.inputs.new_tensor([high, LOW])
        return torch.where(self.classes, upper, lower)

    def accuracy(self, weights: Weights, high: float = HIGH) -> float:
        """How many unseen inputs are on their side of the middle."""
        result = (LOW + high) / 2 < state_of(weights, self.unseen).Y
        return float((result == self.unseen_classes).double().mean())


def make_task(data: Data, examples: int, unseen: int, width: int, seed: int) -> Task:
    """Rows of length √width: random ones and what a small random network says of them, or digits."""
    generator = torch.Generator().manual_seed(1000 + seed)
    rows = examples + unseen
    x, classes = (_teacher if data == "teacher" else _digits)(rows, generator)
    x = width**0.5 * x / x.norm(dim=1, keepdim=True)
    return Task(x[:examples], classes[:examples], x[examples:], classes[examples:])


def _teacher(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal inputs; a class for the upper half of a teacher's outputs."""
    x = torch.randn(rows, TEACHER_INPUTS, generator=generator, dtype=torch.float64)
    W = torch.randn(TEACHER_NEURONS, TEACHER_INPUTS, generator=generator, dtype=torch.float64)
    Y = torch.relu(x @ W.T).mean(1) / x.norm(dim=1)
    return x, Y.median() < Y


def _digits(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits of 8 × 8 pixels, centred; a class for the even ones."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ConfigError(
            "the digits need scikit-learn", setting="data", given="digits", remedy="install topograd[studies]"
        ) from None
    result = load_digits()
    x, digits = torch.from_numpy(result.data).double(), torch.from_numpy(result.target)
    chosen = torch.randperm(len(x), generator=generator)[:rows]
    return (x - x.mean(0))[chosen], digits[chosen] % 2 == 0


def make_weights(depth: int, width: int, inputs: int, seed: int) -> Weights:
    """N(0, 2/N) in every layer."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(width, inputs), *[(width, width)] * (depth - 1)]
    scale = (2 / width) ** 0.5
    return [scale * torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


@dataclass(frozen=True)
class Moment:
    """A run before step t."""

    t: int
    weights: Weights
    state: State
    residual: Tensor
    drives: Fields
    """Σ_β r^β z_l^β (u_{l-1}^β)ᵀ (N_l, N_{l-1}); the gradient is 2/(M N) times that."""


def descent(weights: Weights, inputs: Tensor, targets: Tensor, eta: float, steps: int) -> Iterator[Moment]:
    """Gradient descent: the moments 0..steps."""
    M = len(targets)
    for t in range(steps + 1):
        state = state_of(weights, inputs)
        r = state.Y - targets
        if not bool(r.isfinite().all()):
            raise DivergenceError(
                f"the outputs are not finite at step {t}",
                setting="eta",
                given=eta,
                remedy="take a smaller eta",
            )
        drives = {i: (r[:, None] * state.z[i]).T @ state.u[i - 1] for i in range(1, len(weights) + 1)}
        yield Moment(t, weights, state, r, drives)
        weights = [W - 2 * eta / (M * state.N) * drives[i] for i, W in enumerate(weights, 1)]


def reading_steps(steps: int, readings: int) -> list[int]:
    """0, and steps up to the last that grow by equal ratios, as far as whole numbers can.

    >>> reading_steps(100, 5)
    [0, 1, 5, 22, 100]
    """
    spaced = np.geomspace(1, steps, readings - 1)
    return sorted({0, *(round(step) for step in spaced)})
