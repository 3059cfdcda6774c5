"""The published interface sees the future, and how much that flatters it.

"LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces" §3.1 (eqs. 4-5) pools a whole output
into one state and adds it to every position of the next region. So a prediction at position t has read the
tokens after t. Two experiments show what follows, each beside a causal interface of the same rank:

    i.i.d. tokens    uniform over 16, fresh in every batch: nothing can be predicted, and no honest model can
                     have a cross entropy below ln 16 = 2.7726 nats. One that does has read its targets.
    prefix only      a model of text, teacher-forced as usual, against the same weights given only the tokens
                     up to t, which is all that there is when one writes. An honest model has the same loss.

    python -m papers.latent_bounded_interfaces.leak

`leak` asks the same of a model that is not trained: whether a logit has a derivative by a later input.
Cost: about three minutes on one core; `leak` some seconds.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from papers.fit import fit
from papers.latent_bounded_interfaces.causality import future_gradient
from papers.latent_bounded_interfaces.interfaces import (
    CONTEXT,
    EARLY,
    PUBLISHED,
    STEPS,
    Case,
    position_losses,
    prefix_losses,
    trained,
)
from papers.latent_bounded_interfaces.parity import REGIONS, random_batch, random_model
from topograd.data import windows
from topograd.nn.config import Architecture, Pool, SegmentInterface
from topograd.nn.gpt import GPT
from topograd.nn.interface_config import parse_interface
from topograd.nn.preparation import prepare
from topograd.runs.config import OptimizerConfig
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

VOCAB, LENGTH, RANK = 16, 16, 16
FLOOR = math.log(VOCAB)
LEAKY = PUBLISHED[RANK]
CAUSAL = "S=8,r=16,pool=mean"


def iid_loss(interface: str, steps: int = 500, seed: int = 0) -> float:
    """Cross entropy on fresh i.i.d. tokens after `steps` batches of them; ln 16 is the honest floor."""
    torch.manual_seed(seed)
    stack = GPT(layers=4, width=64, heads=2, vocab=VOCAB, context=LENGTH)
    first = parse_interface(interface).first_region
    plan = prepare(stack, Topology.regions("2,2", interface, first_region=first))
    fit(stack, plan, (iid_batch(32) for _ in range(steps)), steps, OptimizerConfig())
    return position_losses(stack, plan, *iid_batch(512)).mean().item()


def iid_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of uniform tokens."""
    tokens = torch.randint(VOCAB, (rows, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def text_losses(interface: str, steps: int = STEPS, rows: int = 24) -> dict[str, Any]:
    """Cross entropy of a trained model on held-out text: as usual, and from prefixes only."""
    stack, plan, data, _ = trained(Case(interface, interface=interface), steps)
    inputs, targets, _ = windows(data.heldout, data.tokenizer, CONTEXT, rows * CONTEXT)
    forced = position_losses(stack, plan, inputs, targets)
    honest = prefix_losses(stack, plan, inputs, targets)
    return {
        "forced": forced.nanmean().item(),
        "honest": honest.nanmean().item(),
        "early_forced": forced[:, :EARLY].nanmean().item(),
        "early_honest": honest[:, :EARLY].nanmean().item(),
    }


def leak(
    architecture: Architecture = "transformer",
    pool: Pool = "tail",
    segments: int = 4,
    causal: bool = True,
    seed: int = 0,
) -> float:
    """`future_gradient` of a small model with random parameters, in float64.

    `causal=False`, with segments=1 and pool="mean", is the published interface, and leaks.
    """
    settings = SegmentInterface(segments=segments, rank=6, pool=pool, causal=causal)
    stack = random_model(architecture, settings, seed)
    inputs, _ = random_batch(seed)
    return future_gradient(stack, Plan.of(REGIONS, len(stack.layers)), inputs[:1])


def main() -> None:
    """Both experiments, as tables."""
    console = Console()
    tokens = Table(title=f"i.i.d. tokens: nats per token, honest floor {FLOOR:.4f}")
    tokens.add_column("interface")
    tokens.add_column("CE", justify="right")
    for interface in (LEAKY, CAUSAL):
        tokens.add_row(interface, f"{iid_loss(interface):.4f}")
    console.print(tokens)
    text = Table(title=f"text: nats per byte; early is the first {EARLY} positions")
    for column in ("interface", "teacher-forced", "prefix only", "early, forced", "early, prefix only"):
        text.add_column(column, justify="left" if column == "interface" else "right")
    for interface in (LEAKY, CAUSAL):
        result = text_losses(interface)
        text.add_row(interface, *(f"{value:.4f}" for value in result.values()))
    console.print(text)


if __name__ == "__main__":
    main()
