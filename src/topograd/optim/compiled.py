"""DDCAdam's step of rescaled blocks as one compiled function: split, Adam and the step back in few passes.

Statement. What `split.py` and Adam do one operation after another,

    components → m, v → Δ → W,     m, v, Δ as in `ddc_adam.py`

is traced once for each batch of gauges and compiled: sums over a block are taken together, and what stands
between two sums is one pass. By counting, a block is read for its norms and γ, then for τ, m, v and ⟨W, Δ⟩,
then for the step: 12 reads and writes of a number, where a fused Adam has 7. On our CPU inductor does
not get there and nothing is gained (LOG.md), so that it is off by default.

Cost: a compilation for each batch of gauges of new shapes, tens of seconds on a CPU. Learning rates and decay
are tensors and layouts have no names, so that neither a schedule nor the next layer compiles anything again.
Limits. Results differ from the plain step in the last bits (sums in another order). It needs a C++ compiler
on a CPU; where there is none one line says so, once, and the plain step runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from topograd.optim.split import Layout, RescalingSplit, Ways

Step = Callable[..., None]


def rescaling_step(
    layout: Layout,
    ways: Ways,
    betas: tuple[float, float],
    eps: float,
    tensors: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    lr: Tensor,
    keep: Tensor,
    counts: Sequence[Tensor],
    frame: tuple[Tensor, Tensor],
) -> None:
    """One step of the tensors of some gauges; moments, and which step it is, in the order of the slots."""
    split = RescalingSplit(layout, frame, tensors, keep, ways)
    beta1, beta2 = betas
    moves = []
    for y, m, v, count in zip(split.components, averages, squares, counts, strict=True):
        m.lerp_(y, 1 - beta1)
        v.mul_(beta2).addcmul_(y, y, value=1 - beta2)
        first, second = (1 - beta**count for beta in betas)
        moves.append(-lr / first * m / ((v / second).sqrt() + eps))
    split.apply(moves, lr)


class CompiledStep:
    """`rescaling_step`, compiled when it is first called; the plain one where that cannot be done."""

    def __init__(self, backend: str = "inductor") -> None:
        self._step: Step = torch.compile(rescaling_step, dynamic=False, fullgraph=True, backend=backend)
        self.works = True

    def __call__(self, *given: Any) -> bool:
        """Whether the step was made."""
        if not self.works:
            return False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the tracer, about caches that it looks through
                self._step(*given)
        except (RuntimeError, ImportError, OSError) as problem:
            self.works = False
            said = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
            warnings.warn(f"the step of DDCAdam was not compiled ({said}); it runs uncompiled", stacklevel=4)
        return self.works
