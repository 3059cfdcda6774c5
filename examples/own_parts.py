"""A mixer, an objective, an optimizer and a property of your own, in 34 lines, and a run that uses them.

The property is read by `topograd search choose RUN --deployment serving --properties own_parts:width_used`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import topograd as tg


class Seen:
    """A layer's memory while it decodes: what each row had at each position, behind a zero at the start."""

    def __init__(self, values: Tensor) -> None:
        self.values = values

    def truncate(self, length: int) -> int:
        return length  # a position is written again before it is read

    def copy(self) -> Seen:
        return Seen(self.values.clone())


class Shift(nn.Module):
    """A mixer: every position receives a learned map of the one before it."""

    start: Tensor

    def __init__(self, config: tg.GPTConfig, index: int) -> None:
        super().__init__()
        self.register_buffer("start", torch.zeros(config.width), persistent=False)
        self.map = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, ctx: tg.LayerContext, state: Seen | None = None) -> Tensor:
        if state is None:
            return self.map(F.pad(x, (0, 0, 1, -1)))
        state.values[:, ctx.positions + 1] = x
        return self.map(state.values[:, ctx.positions])

    def new_state(self, batch: int, capacity: int) -> Seen:
        return Seen(self.start.repeat(batch, capacity + 1, 1))


class Smoothed:
    """An objective: cross-entropy with smoothed labels, summed over a chunk of tokens."""

    uses_prior = False

    def __call__(self, logits: Tensor, prior: Any, teacher: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=0.05)


def adamax(groups: Any, config: tg.OptimizerConfig, stack: tg.Stack) -> dict[str, torch.optim.Optimizer]:
    """An optimizer: parameters by group and name, to optimizers by name."""
    return {"adamax": torch.optim.Adamax([p for named in groups.values() for p in named.values()], lr=0.01)}


def width_used(trained: Any) -> float:
    """A property: the effective rank of the last stage over the width."""
    return trained.evaluation.effective_rank[-1] / trained.stack.width


def main(folder: Path, steps: int = 120) -> tuple[str, str]:
    """Train in two stages, then write the same text twice: at full depth, and by drafting and verifying."""
    config = tg.preset("tiny", partition="2,2", objective="own_parts:Smoothed", steps=steps).overlaid(
        {"model": {"architecture": "own_parts:Shift"}, "optimizer": {"name": "own_parts:adamax"}}
    )
    tg.start(config, folder).train()
    model = tg.load(folder)
    full, drafted = (model.generate("def ", tokens=40, depth=depth) for depth in ("full", "speculate:4"))
    return full, drafted


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print(*main(Path(place) / "run"), sep="\n")
