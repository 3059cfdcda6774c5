"""How long the kernel takes from fields, and how much memory, against the contraction of Jacobians.

    python benchmarks/kernel.py [--examples 512] [--width 512] [--depth 6] [--rounds 3] [--json]

Everything is measured in one process. Times take turns, a ratio is taken within its round, and its median and
quartiles are shown (`timing.py`); peaks are bytes of tensors allocated and not yet freed
(`memory.py`). Weights are N(0, 2/N) and inputs N(0, 1). The peer forms ∂Y/∂W for every example with
`torch.func`, as its documentation shows, and contracts it with itself over all weights: M · L N² numbers.

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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table
from torch import Tensor
from torch.func import jacrev, vmap

import clone  # noqa: F401  (for what is not installed)
from papers.gram_metrics.transport import conjugate_change, materialised_numbers
from papers.limits import check_total
from topograd.cli.console import Json, note, number, out, print_json
from topograd.fields.field_state import state_of
from topograd.fields.kernel import kernel
from topograd.limits import DEPTH, REPEATS, SIZE, check_numbers
from topograd.memory import peak_bytes
from topograd.timing import Spread, ratio, take_turns


@dataclass(frozen=True, kw_only=True)
class Settings:
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


def bench_kernel(settings: Settings) -> dict[str, Any]:
    """Every reading of this module, as plain numbers."""
    return {
        "threads": torch.get_num_threads(),
        "settings": asdict(settings),
        "kernel": _kernel_row(settings.examples, settings.width, settings.depth, settings.rounds),
        "growth": _growth(settings),
        "transport": _transport(settings),
    }


def _random_network(depth: int, width: int, examples: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Weights of `depth` layers as wide as the inputs, and inputs (M, N)."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(width, width, generator=generator, dtype=dtype) for _ in range(depth)]
    inputs = torch.randn(examples, width, generator=generator, dtype=dtype)
    return [(2 / width) ** 0.5 * W for W in weights], inputs


def _kernel_row(examples: int, width: int, depth: int, rounds: int) -> dict[str, Any]:
    """Both ways at one size."""
    weights, inputs = _random_network(depth, width, examples, torch.float32)
    ways = {FIELDS: partial(_by_fields, weights, inputs), JACOBIANS: partial(_by_jacobians, weights, inputs)}
    ours, theirs = (way() for way in ways.values())  # and both are warm
    apart = float((ours - theirs).abs().max() / theirs.abs().max())
    del ours, theirs
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


def _by_fields(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    return kernel(weights, inputs).total


def _output(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    """Y, the mean of the last layer."""
    u = inputs
    for W in weights:
        u = torch.relu(u @ W.T)
    return u.mean(-1)


def _by_jacobians(weights: Sequence[Tensor], inputs: Tensor) -> Tensor:
    jacobians = vmap(jacrev(_output), (None, 0))(tuple(weights), inputs)
    return torch.stack([J.flatten(1) @ J.flatten(1).T for J in jacobians]).sum(0)


def _growth(settings: Settings) -> list[dict[str, Any]]:
    """A small size, and each of M, N, L doubled; goals are for the large size only."""
    M, N, L = settings.growth_examples, settings.growth_width, settings.growth_depth
    rows = []
    for doubled, size in (("", (M, N, L)), ("M", (2 * M, N, L)), ("N", (M, 2 * N, L)), ("L", (M, N, 2 * L))):
        row = _kernel_row(*size, settings.rounds)
        for key in ("faster", "smaller"):
            row[key] = {name: x for name, x in row[key].items() if name not in ("goal", "met")}
        rows.append({"doubled": doubled, **row})
    return rows


def _transport(settings: Settings) -> dict[str, Any]:
    """Peak bytes of Δb in float64, the fields included, beside the matrices."""
    M, N, L = settings.transport_examples, settings.transport_width, settings.depth
    weights, inputs = _random_network(L, N, M, torch.float64)

    def change() -> None:
        state = state_of(weights, inputs)
        conjugate_change(weights, state, state.Y - 1.0, eta=1.0)

    peak = peak_bytes(change)
    matrices = 8 * materialised_numbers(state_of(weights, inputs))
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


def kernel_table(results: Mapping[str, Any]) -> Table:
    """Fields against Jacobians: the size with goals first, then as M, N and L double."""
    table = Table(
        title=f"K from fields against Jacobians, {results['threads']} threads", title_justify="left"
    )
    for column in ("M", "N", "L", "ms", "faster", "quartiles", "MiB", "smaller", "differ"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in (results["kernel"], *results["growth"]):
        faster, peak = row["faster"], row["peak_bytes"]["fields"]
        table.add_row(
            *(str(row[key]) for key in ("examples", "width", "depth")),
            number(1e3 * row["seconds"]["fields"]["median"], 1),
            number(faster["median"], 1),
            f"{number(faster['low'], 1)}–{number(faster['high'], 1)}",
            number(peak / 2**20, 1),
            number(row["smaller"]["ratio"], 1),
            f"{row['relative_difference']:.0e}",
        )
    first, change = results["kernel"], results["transport"]
    met = all(part["met"] for part in (first["faster"], first["smaller"], change))
    table.caption = (
        f"first row: goals {first['faster']['goal']:.0f} and {first['smaller']['goal']:.0f}; Δb for "
        f"M = {change['examples']}, N = {change['width']}, L = {change['depth']}: "
        f"{change['peak_bytes'] / 2**20:.1f} MiB, as matrices {change['as_matrices_bytes'] / 2**30:.1f} GiB; "
        f"goals {'met' if met else 'not met'}"
    )
    return table


def main(settings: Annotated[Settings, tyro.conf.arg(name="")], json: Json = False) -> None:
    """Measure the tangent kernel from fields against the contraction of Jacobians: time and memory."""
    note("measuring kernels: a minute or two and 4 GB, on a quiet machine if you can")
    results = bench_kernel(settings)
    if json:
        print_json(results)
        return
    out().print(kernel_table(results))


if __name__ == "__main__":
    tyro.cli(main)
