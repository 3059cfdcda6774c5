"""The interface Jacobians while a model of regions is trained: what one region amplifies, and all together.

After appendix F (Figure 3, Table 7) of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces",
with a causal interface, and with what that appendix leaves open: effective ranks of Jacobians and messages,
and how much of the gradient reaches each interface.

    python -m topograd.studies.jacobians [ARCHITECTURE ...]

Cost: about a minute for each architecture on one core, and the inner regions' Jacobians each `EVERY` steps.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import Tensor

from topograd.interfaces.analysis import analyse
from topograd.nn.gpt import ARCHITECTURES, Architecture
from topograd.nn.stack import Stack
from topograd.studies.interfaces import Case, trained
from topograd.topology.plan import Plan

INTERFACE = "S=8,r=8,pool=tail"
EVERY = 50


def watched(architecture: Architecture, steps: int, every: int = EVERY) -> list[dict[str, Any]]:
    """`analyse` of the training batch at the first step and every so many, each with its step."""
    found: list[dict[str, Any]] = []

    def watch(step: int, stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> None:
        if step % every == 0 or step == steps - 1:
            found.append({"step": step} | analyse(stack, plan.topology, inputs[:2], targets[:2]))

    trained(Case(INTERFACE, architecture, interface=INTERFACE), steps, watch)
    return found


def table(architecture: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each look, means over regions as in Table 7, and the adjoints from first to last."""
    shown = Table(title=f"{architecture}, {INTERFACE}: interface Jacobians in training")
    columns = ("step", "loss", "‖J‖", "‖P‖", "‖J‖_F/√n", "rank J", "rank m", "‖m̄‖ by interface")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        names = ("local_norm", "suffix_norm", "rms", "effective_rank", "message_rank")
        means = (f"{statistics.fmean(row[name]):.3g}" for name in names)
        adjoints = " ".join(f"{norm:.1e}" for norm in row["adjoint_norm"])
        shown.add_row(str(row["step"]), f"{row['loss']:.3f}", *means, adjoints)
    return shown


def main(argv: Sequence[str]) -> None:
    """The named architectures, or all."""
    for architecture in ARCHITECTURES:
        if architecture in argv or not argv:
            Console().print(table(architecture, watched(architecture, steps=300)))


if __name__ == "__main__":
    main(sys.argv[1:])
