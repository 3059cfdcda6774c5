"""`python -m papers check`: quick questions of the papers, each answered by numbers in seconds or minutes."""

from __future__ import annotations

from papers import PROGRAM
from papers.dead_directions.check_optimizers import Cells, Equivariance
from papers.dead_directions.check_rates import Catalogue, Families, Ladder
from papers.gram_metrics.check_fields import Kernel, Simulate
from papers.latent_bounded_interfaces.check_costs import Costs
from papers.latent_bounded_interfaces.check_interfaces import Leak, Parity, Planned
from topograd.cli.console import out, parse_one_of, print_json

Check = (
    Catalogue | Ladder | Families | Equivariance | Cells | Kernel | Simulate | Costs | Parity | Leak | Planned
)
CHECKS: dict[str, type[Check]] = {
    "catalogue": Catalogue,
    "ladder": Ladder,
    "families": Families,
    "equivariance": Equivariance,
    "cells": Cells,
    "kernel": Kernel,
    "simulate": Simulate,
    "costs": Costs,
    "parity": Parity,
    "leak": Leak,
    "plan": Planned,
}


def run(argv: list[str]) -> int:
    """Answer one question, and return the exit code: 1 if a cell of the catalogue is not what theory says."""
    args = parse_one_of(CHECKS, argv, "check", program=PROGRAM)
    answer = args.answer()
    if args.json:
        print_json(answer)
    else:
        console = out()
        for table in args.tables(answer):
            console.print(table)
    return int(isinstance(args, Catalogue) and not all(cell["ok"] for cell in answer["cells"]))
