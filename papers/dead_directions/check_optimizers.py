"""Which optimizers respect a network's symmetries, and what their knobs do: two quick questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from topograd.cli.console import DASH, Json, note, number
from topograd.limits import REPEATS, SEED, check_numbers

QUICK = 2_000
"""Steps of the cells that take no while."""


@dataclass(frozen=True, kw_only=True)
class Equivariance:
    """Train twice from one orbit, for every gauge: how far optimizers let the two runs part."""

    steps: int = 200
    """Steps of each run."""
    lr: float = 0.01
    """The learning rate of all optimizers."""
    seed: int = 0
    """Draws the weights, the data and the element of each gauge."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=REPEATS, lr=(1e-12, 1e6), seed=SEED)

    def answer(self) -> dict[str, Any]:
        from papers.dead_directions.equivariance import equivariance  # torch

        return equivariance(self.steps, self.lr, self.seed)

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [equivariance_table(answer), peers_table(answer)]


@dataclass(frozen=True, kw_only=True)
class Cells:
    """Turn the knobs of three optimizers on a dead direction: slopes and alignment, and who reaches zero."""

    steps: int = 20_000
    """Steps of each run; a slope needs at least 300."""
    seeds: int = 3
    """Runs of cell B for each optimizer."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, steps=(300, REPEATS[1]), seeds=REPEATS)

    def answer(self) -> dict[str, Any]:
        if self.steps > QUICK:
            note("training five cells: a minute or two")
        from papers.dead_directions.ablations import cells  # torch
        from papers.dead_directions.peer_cell import peers

        return cells(self.steps, self.seeds) | {"E": peers(self.steps)}

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return cell_tables(answer)


def equivariance_table(answer: Mapping[str, Any]) -> Table:
    """How far two runs from one orbit part, gauge by gauge."""
    from papers.dead_directions.equivariance import GOAL32, GOAL64

    table = Table(title=f"From θ and g·θ, {answer['steps']} steps: how far apart", title_justify="left")
    for column in ("gauge", "frozen64", "frozen32", "sgd64", "AdamW", "drift", "AdamW's"):
        table.add_column(column, justify="left" if column == "gauge" else "right", no_wrap=column != "gauge")
    columns = ("frozen64", "frozen32", "sgd64", "adamw64", "drift", "adamw_drift")
    for row in answer["gauges"]:
        table.add_row(row["name"], *(f"{row[column]:.0e}" for column in columns))
    table.caption = (
        f"DDCAdam frozen and sgd, goals {GOAL64:.0e} and {GOAL32:.0e}; "
        "drift: how far a run moves along its orbit"
    )
    return table


def peers_table(answer: Mapping[str, Any]) -> Table:
    """The same of optimizers that know no gauge."""
    names = list(answer["gauges"][0]["peers"])
    table = Table(title="Peers in float64: how far apart, and drift", title_justify="left")
    for column in ("gauge", *(part for name in names for part in (name, "drift"))):
        table.add_column(column, justify="left" if column == "gauge" else "right", no_wrap=column != "gauge")
    for row in answer["gauges"]:
        results = [row["peers"][name] for name in names]
        table.add_row(row["name"], *(f"{peer[key]:.0e}" for peer in results for key in ("residual", "drift")))
    return table


def cell_tables(answer: Mapping[str, Any]) -> list[Table]:
    """Slopes on the bridge, then how far the diagonal network reaches."""
    from papers.dead_directions.ablations import SMALLEST_ALIGNMENT

    bridge = Table(title=f"A, C, D, E: log G_dd by log t, {answer['steps']} steps", title_justify="left")
    for column in ("optimizer", "knob", "slope", "R²", "align", "last t", "late"):
        bridge.add_column(column, justify="left" if column == "optimizer" else "right", no_wrap=True)
    for cell in "ACDE":
        for row in answer[cell]:
            slopes = (number(row[key], digits) for key, digits in (("slope", 4), ("r2", 4), ("alignment", 3)))
            late = "yes" if row["asymptotic"] else "no"
            bridge.add_row(f"{cell} {row['driver']}", _knob(row), *slopes, f"{row['t_last']:.0e}", late)
    bridge.caption = (
        f"predicted 2; late: t⁴ ≤ σ² / 100 where it is read; {DASH}: alignment below {SMALLEST_ALIGNMENT}"
    )
    reach = Table(title="B: pairs of w = u² - v² that reach zero", title_justify="left")
    for column in ("optimizer", "knob", "below 1e-12", "zeros", "smallest", "loss"):
        reach.add_column(column, justify="left" if column == "optimizer" else "right", no_wrap=True)
    for row in answer["B"]:
        shares = (f"{100 * row[key]:.0f} %" for key in ("below", "exact_zeros"))
        reach.add_row(row["driver"], _knob(row), *shares, f"{row['smallest']:.0e}", f"{row['loss']:.0e}")
    return [bridge, reach]


def _knob(row: Mapping[str, Any]) -> str:
    letter = {"eps": "ε", "beta": "β"}.get(row["knob"], row["knob"])
    return f"{letter} = {row['value']:g}"
