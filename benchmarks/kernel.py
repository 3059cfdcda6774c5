"""How long the kernel takes from fields, and how much memory, against the contraction of Jacobians.

Everything is measured in one process. Times take turns, a ratio is taken within its round, and its median and
quartiles are shown (`timing.py`); peaks are bytes of tensors allocated and not yet freed
(`memory.py`). The peer forms ∂Y/∂W for every example with `torch.func` and contracts it with itself
over all weights (`reference/ntk.py`): M · L N² numbers.

    kernel       one size: times, peaks, ratios with their goals, and how far the two kernels are apart
    growth       the same ratios as M, N and L double, one at a time, from a smaller size
    transport    Δb of all layers without operators: its peak, and what the operators would take as matrices

Goals: 50 times faster, a 20th of the peak, and Δb within 1 GiB where matrices would not fit.

Source: the cost follows from "Learning Dynamics Reveal a Hierarchy of Weight-Induced Layerwise Gram Metrics"
(C. Nordio), equations 172 and 184-187; the goals are ours.
Cost: a minute or two at the default sizes, and 4 GB for the peer's Jacobians. Limits: float32 by default, for
the peer's sake; random weights; scratch space inside a product is not counted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from papers.gram_metrics.checks import Problem, random_problem, relative_error
from tests.oracles.ntk import empirical_ntk
from topograd.fields.field_state import state_of
from topograd.fields.kernel import kernel
from topograd.fields.transport import conjugate_change, materialised_numbers
from topograd.limits import DEPTH, REPEATS, SIZE, check_numbers, check_total
from topograd.memory import peak_bytes
from topograd.timing import Spread, ratio, take_turns


@dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """The sizes of kernels, and how often everything is measured."""

    examples: int = 512
    """M."""
    width: int = 512
    """N."""
    depth: int = 6
    """L."""
    growth_examples: int = 128
    """M that doubles in the table of growth."""
    growth_width: int = 256
    """N that doubles there."""
    growth_depth: int = 3
    """L that doubles there."""
    transport_examples: int = 64
    """M of Δb, which has the same depth."""
    transport_width: int = 256
    """N of Δb."""
    rounds: int = 3
    """How often both sides are measured, in turns."""

    def __post_init__(self) -> None:
        check_numbers(self, examples=SIZE, width=SIZE, depth=DEPTH, growth_examples=SIZE, growth_width=SIZE)
        check_numbers(self, growth_depth=DEPTH, transport_examples=SIZE, transport_width=SIZE, rounds=REPEATS)
        choices = "examples, width or depth"
        check_total(self.examples * self.depth * self.width**2, choices)  # the peer's Jacobians
        check_total(4 * self.growth_examples * self.growth_depth * self.growth_width**2, choices)


SPEED_GOAL, MEMORY_GOAL, TRANSPORT_GOAL = 50.0, 20.0, 2**30
FIELDS, JACOBIANS = "fields", "Jacobians"


def bench_kernel(settings: KernelSettings) -> dict[str, Any]:
    """Every reading of this module, as plain numbers."""
    return {
        "threads": torch.get_num_threads(),
        "settings": asdict(settings),
        "kernel": _kernel_row(settings.examples, settings.width, settings.depth, settings.rounds),
        "growth": _growth(settings),
        "transport": _transport(settings),
    }


def _kernel_row(examples: int, width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Both ways at one size."""
    problem = random_problem(depth, width, examples, dtype=torch.float32)
    ways = {FIELDS: partial(_by_fields, problem), JACOBIANS: partial(_by_jacobians, problem)}
    apart = relative_error(_by_fields(problem), _by_jacobians(problem))  # and both are warm
    peaks = {name: peak_bytes(way) for name, way in ways.items()}
    seconds = take_turns(ways, rounds, warmup=0)
    faster, smaller = ratio(seconds, JACOBIANS, FIELDS), peaks[JACOBIANS] / peaks[FIELDS]
    return {
        "examples": examples,
        "width": width,
        "depth": depth,
        "seconds": {name: Spread.of(times).as_dict() for name, times in seconds.items()},
        "peak_bytes": peaks,
        "faster": {**faster.as_dict(), "goal": SPEED_GOAL, "met": faster.median >= SPEED_GOAL},
        "smaller": {"ratio": smaller, "goal": MEMORY_GOAL, "met": smaller >= MEMORY_GOAL},
        "relative_difference": apart,
    }


def _by_fields(problem: Problem) -> torch.Tensor:
    return kernel(problem.weights, problem.inputs).total


def _by_jacobians(problem: Problem) -> torch.Tensor:
    return torch.stack(empirical_ntk(problem.weights, problem.inputs)).sum(0)


def _growth(settings: KernelSettings) -> list[dict[str, Any]]:
    """A small size, and each of M, N, L doubled; goals are for the large size only."""
    M, N, L = settings.growth_examples, settings.growth_width, settings.growth_depth
    rows = []
    for doubled, size in (("", (M, N, L)), ("M", (2 * M, N, L)), ("N", (M, 2 * N, L)), ("L", (M, N, 2 * L))):
        row = _kernel_row(*size, settings.rounds)
        for key in ("faster", "smaller"):
            row[key] = {name: x for name, x in row[key].items() if name not in ("goal", "met")}
        rows.append({"doubled": doubled, **row})
    return rows


def _transport(settings: KernelSettings) -> dict[str, Any]:
    """Peak bytes of Δb in float64, the fields included, beside the matrices."""
    M, N, L = settings.transport_examples, settings.transport_width, settings.depth
    problem = random_problem(L, N, M)

    def change() -> None:
        state = state_of(problem.weights, problem.inputs)
        conjugate_change(problem.weights, state, state.Y - problem.targets, eta=1.0)

    peak = peak_bytes(change)
    matrices = 8 * materialised_numbers(state_of(problem.weights, problem.inputs))
    met = peak <= TRANSPORT_GOAL
    return {
        "examples": M,
        "width": N,
        "depth": L,
        "peak_bytes": peak,
        "as_matrices_bytes": matrices,
        "goal": TRANSPORT_GOAL,
        "met": met,
        "matrices_fit": matrices <= TRANSPORT_GOAL,
    }
