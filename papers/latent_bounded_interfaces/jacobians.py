"""The interface Jacobians while a model of regions is trained: what one region amplifies, and all together.

After appendix F (Figure 3, Table 7) of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces",
with a causal interface, and with what that appendix leaves open: effective ranks of Jacobians and messages,
and how much of the gradient reaches each interface.

    python -m papers.latent_bounded_interfaces.jacobians [ARCHITECTURE ...] [--relays RATE]

`--relays` is the learning rate of the interfaces, on which it depends whether messages collapse to a constant
(their spread over the data then falls to 0). Cost: about a minute for each architecture on one core, and the
inner regions' Jacobians each `EVERY` steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from torch import Tensor

from papers.latent_bounded_interfaces.interfaces import Case, trained
from topograd.interfaces.analysis import analyse
from topograd.nn.config import Architecture
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig
from topograd.topology.plan import Plan

INTERFACE = "S=8,r=8,pool=tail"
EVERY = 50
RELAYS = OptimizerConfig().lr_relay


def watched(
    architecture: Architecture, steps: int, every: int = EVERY, relays: float = RELAYS
) -> list[dict[str, Any]]:
    """`analyse` of the training batch at the first step and every so many, each with its step."""
    results: list[dict[str, Any]] = []

    def watch(step: int, stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> None:
        if step % every == 0 or step == steps - 1:
            results.append({"step": step} | analyse(stack, plan.topology, inputs[:2], targets[:2]))

    optimizer = OptimizerConfig(lr_relay=relays)
    trained(Case(INTERFACE, architecture, interface=INTERFACE, optimizer=optimizer), steps, watch)
    return results


def table(architecture: str, rows: Sequence[dict[str, Any]]) -> Table:
    """One line for each look, means over regions as in Table 7, and the adjoints from first to last."""
    shown = Table(title=f"{architecture}, {INTERFACE}: interface Jacobians in training")
    columns = ("step", "loss", "‖J‖", "‖P‖", "‖J‖_F/√n", "rank J", "rank m", "spread m", "‖m̄‖ by interface")
    for column in columns:
        shown.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        names = ("local_norm", "suffix_norm", "rms", "effective_rank", "message_rank", "message_spread")
        means = (f"{statistics.fmean(row[name]):.3g}" for name in names)
        adjoints = " ".join(f"{norm:.1e}" for norm in row["adjoint_norm"])
        shown.add_row(str(row["step"]), f"{row['loss']:.3f}", *means, adjoints)
    return shown


def main(argv: Sequence[str]) -> None:
    """The named architectures, or all."""
    parser = argparse.ArgumentParser(prog="python -m papers.latent_bounded_interfaces.jacobians")
    known = get_args(Architecture)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=", ".join(known))
    parser.add_argument("--relays", type=float, default=RELAYS, help="learning rate of the interfaces")
    args = parser.parse_args(argv)
    if unknown := set(args.architectures) - set(known):
        parser.error(f"{sorted(unknown)[0]!r} is no architecture; choose from {', '.join(known)}")
    for architecture in args.architectures or known:
        rows = watched(architecture, steps=300, relays=args.relays)
        Console().print(table(architecture, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
