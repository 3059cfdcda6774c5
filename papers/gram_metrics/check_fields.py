"""The kernel from fields, and whole runs in fields, against their witnesses: two quick questions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from papers.limits import check_total
from topograd.cli.console import Json
from topograd.limits import DEPTH, REPEATS, SEED, SIZE, check_numbers


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """Compare K from the fields with the tangent kernel from Jacobians, on a random network."""

    depth: int = 4
    """Layers."""
    width: int = 128
    """Neurons of each layer, and inputs."""
    examples: int = 64
    """Examples, so that the kernel is EXAMPLES × EXAMPLES."""
    seed: int = 0
    """Draws the network and its examples."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, depth=DEPTH, width=SIZE, examples=SIZE, seed=SEED)
        check_total(self.examples * self.depth * self.width**2, "--examples, --depth or --width")  # Jacobians

    def answer(self) -> dict[str, Any]:
        from papers.gram_metrics.checks import compare_with_ntk  # torch

        return compare_with_ntk(self.depth, self.width, self.examples, self.seed)

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [kernel_table(answer)]


@dataclass(frozen=True, kw_only=True)
class Simulate:
    """Run gradient descent in the fields, and compare it with the weights', on a random network."""

    depth: int = 1
    """Layers; deeper than 1, a run costs more the longer it is."""
    width: int = 64
    """Neurons of each layer, and inputs."""
    examples: int = 32
    """Examples that are learnt."""
    steps: int = 500
    """Steps of gradient descent."""
    eta: float | None = None
    """The step; by default a tenth of where a frozen kernel would diverge."""
    seed: int = 0
    """Draws the network, its examples and what they are taught."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, depth=DEPTH, width=SIZE, examples=SIZE, steps=(0, REPEATS[1]), seed=SEED)
        check_numbers(self, eta=(1e-300, math.inf))
        retained = self.steps if self.depth > 1 else 1  # deeper, a run remembers its past
        numbers = self.depth * self.width * (self.width + retained * self.examples)
        check_total(numbers, "--depth, --width, --examples or --steps")

    def answer(self) -> dict[str, Any]:
        from papers.gram_metrics.checks import compare_with_weights  # torch

        return compare_with_weights(self.depth, self.width, self.examples, self.steps, self.seed, self.eta)

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [simulation_table(answer)]


def kernel_table(answer: Mapping[str, Any]) -> Table:
    """The difference from the tangent kernel, by layer and in total."""
    table = Table(title="K from fields against Jacobians", title_justify="left")
    for column in ("layer", "share of the trace", "relative error"):
        table.add_column(column, justify="right")
    for layer in answer["layers"]:
        cells = (f"{layer['share_of_trace']:.3f}", f"{layer['relative_error']:.1e}")
        table.add_row(str(layer["layer"]), *cells)
    table.add_row("all", "1.000", f"{answer['relative_error_vs_ntk']:.1e}")
    table.caption = f"{1e3 * answer['seconds']:.1f} ms; Jacobians {1e3 * answer['seconds_reference']:.1f} ms"
    return table


def simulation_table(answer: Mapping[str, Any]) -> Table:
    """What a run in the fields misses, beside what predictions from kernels miss."""
    table = Table(show_header=False)
    rows = (
        ("largest error against the weights", f"{answer['max_abs_error_vs_weights']:.1e}"),
        ("the same of the frozen kernel", f"{answer['frozen_max_abs_error']:.1e}"),
        ("the same of a kernel for each step", f"{answer['relinearised_max_abs_error']:.1e}"),
        ("mask crossings", str(answer["mask_crossings"])),
        ("loss", f"{answer['first_loss']:.3g} to {answer['last_loss']:.3g}"),
        ("step", f"{answer['eta']:.4g}"),
        ("seconds, in fields and in weights", f"{answer['seconds']:.2f}, {answer['seconds_weights']:.2f}"),
    )
    for row in rows:
        table.add_row(*row)
    return table
