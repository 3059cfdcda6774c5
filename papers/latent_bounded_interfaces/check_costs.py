"""The published cost model of bounded interfaces as numbers: a quick question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from papers.latent_bounded_interfaces.costs import Region, SSMRegion, TransformerRegion, cost_model
from topograd.cli.console import DASH, Json
from topograd.limits import DEPTH, SIZE, check_numbers


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The published cost model as numbers: FLOPs, traffic and intensity of Jacobians, work and span."""

    batch: int = 8
    """B, sequences."""
    tokens: int = 2048
    """L, tokens of each."""
    width: int = 768
    """D, numbers in the hidden state of a token."""
    state: int = 16
    """N, the state of an SSM for each channel."""
    heads: int = 12
    """H, heads of a Transformer."""
    mlp_width: int = 3072
    """X, the inner width of its MLP."""
    rank: int = 64
    """r, the width of the interface."""
    regions: int = 16
    """K, regions."""
    ops_per_byte: float = 295.0
    """Operations for a byte from which on a device is bound by compute; 295 is the source's H100."""
    json: Json = False

    def __post_init__(self) -> None:
        check_numbers(self, batch=SIZE, tokens=SIZE, width=SIZE, state=SIZE, heads=SIZE, mlp_width=SIZE)
        check_numbers(self, rank=SIZE, regions=DEPTH, ops_per_byte=(1e-9, 1e9))

    def answer(self) -> dict[str, Any]:
        sizes = {"B": self.batch, "L": self.tokens, "D": self.width}
        models: dict[str, Region] = {
            "ssm": SSMRegion(**sizes, N=self.state),
            "transformer": TransformerRegion(**sizes, H=self.heads, X=self.mlp_width),
        }
        return {
            "rank": self.rank,
            "regions": self.regions,
            "ops_per_byte": self.ops_per_byte,
            **{
                name: cost_model(region, self.rank, self.regions, self.ops_per_byte)
                for name, region in models.items()
            },
        }

    def tables(self, answer: Mapping[str, Any]) -> list[Table]:
        return [costs_table(answer)]


def costs_table(answer: Mapping[str, Any]) -> Table:
    """A row for each quantity, a column for each kind of region; what the source has otherwise is marked."""
    table = Table(title=f"K = {answer['regions']} regions, r = {answer['rank']}", title_justify="left")
    for column in ("one region", "SSM", "Transformer"):
        table.add_column(column, justify="left" if column == "one region" else "right")
    pair = (answer["ssm"], answer["transformer"])

    def add(name: str, *values: float | None) -> None:
        table.add_row(name, *(DASH if value is None else f"{value:,.4g}" for value in values))

    add("forward, multiply-adds", *(model["forward_flops"] for model in pair))
    add("forward, bytes", *(model["forward_bytes"] for model in pair))
    add("forward, per byte", *(model["forward_intensity"] for model in pair))
    add("Jacobian, multiply-adds", *(model["jacobian_flops"] for model in pair))
    for chunk in pair[0]["jacobian_intensity"]:
        add(f"Jacobian by {chunk}, per byte", *(model["jacobian_intensity"][chunk] for model in pair))
    bound = f"bound by compute ({answer['ops_per_byte']:g} per byte) from chunk"
    add(bound, *(model["least_chunk"] for model in pair))
    add("  published, passes not whole", *(model["published_least_chunk"] for model in pair))
    add("scan over Jacobians", *(model["scan_over_jacobians"] for model in pair))
    add("  published, for one sample", *(model["published_scan_over_jacobians"] for model in pair))
    table.add_section()
    add("all regions: work", *(model["work"] for model in pair))
    add("all regions: span", *(model["span"] for model in pair))
    for name in pair[0]["transport"]:
        add(f"transport by {name}: span", *(model["transport"][name]["span"] for model in pair))
    return table
