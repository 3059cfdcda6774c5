"""The optimizer step alone: our Muon against torch.optim.Muon and AdamW, on the matrices of two GPTs.

One process, the optimizers taking turns, gradients fixed. Prints the median, the quartiles and the ratio to
our Muon. torch's Muon goes through the matrices one by one, and takes seconds
for each layer of the larger model where bfloat16 is emulated: it gets one layer, and its time is multiplied
by the number of layers.

    python benchmarks/muon.py [--threads 1] [--json]
"""

import argparse
import json
from dataclasses import asdict, dataclass

import torch
from torch import nn

from topograd.timing import Spread, ratio, take_turns
from topograd.training.muon import Muon

MODELS = ((96, 6, 40), (256, 8, 4))  # width, layers, rounds


@dataclass(frozen=True)
class Contestant:
    name: str
    optimizer: torch.optim.Optimizer
    factor: int = 1
    """What its time is multiplied by to stand for the whole model."""


@dataclass(frozen=True)
class Row:
    width: int
    layers: int
    optimizer: str
    milliseconds: float
    low: float
    high: float
    ratio: float
    """Median time over that of our Muon."""
    rounds: int


def matrices(width: int, layers: int) -> list[nn.Parameter]:
    """The matrices of a GPT, each with a gradient."""
    torch.manual_seed(0)
    shapes = [(width, width)] * 4 + [(4 * width, width), (width, 4 * width)]
    found = [nn.Parameter(torch.randn(shape)) for _ in range(layers) for shape in shapes]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter)
    return found


def contestants(width: int, layers: int) -> list[Contestant]:
    """Each on matrices of its own; the first is the base of the ratios."""
    adamw = torch.optim.AdamW
    return [
        Contestant("Muon", Muon(matrices(width, layers))),
        Contestant("torch.optim.Muon", torch.optim.Muon(matrices(width, 1)), layers),
        Contestant("torch.optim.AdamW, foreach", adamw(matrices(width, layers), foreach=True)),
        Contestant("torch.optim.AdamW, fused", adamw(matrices(width, layers), fused=True)),
    ]


def measure(width: int, layers: int, rounds: int) -> list[Row]:
    """One step of each per round, taking turns."""
    entries = contestants(width, layers)
    seconds = take_turns({entry.name: entry.optimizer.step for entry in entries}, rounds, warmup=1)
    rows = []
    for entry in entries:
        times = Spread.of([1e3 * entry.factor * value for value in seconds[entry.name]])
        over = entry.factor * ratio(seconds, entry.name, entries[0].name).median
        rows.append(Row(width, layers, entry.name, times.median, times.low, times.high, over, rounds))
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'model':<10} {'optimizer':<32} {'ms':>9} {'25% .. 75%':>20} {'ratio':>8} {'rounds':>7}"]
    for row in rows:
        model, spread = f"d{row.width} L{row.layers}", f"{row.low:.2f} .. {row.high:.2f}"
        lines.append(
            f"{model:<10} {row.optimizer:<32} {row.milliseconds:>9.2f} {spread:>20} {row.ratio:>8.2f} "
            f"{row.rounds:>7}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--threads", type=int, default=None, help="threads of torch (default: torch's choice)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows = [row for model in MODELS for row in measure(*model)]
    if options.json:
        print(json.dumps({"threads": torch.get_num_threads(), "rows": [asdict(row) for row in rows]}))
    else:
        print(f"threads: {torch.get_num_threads()}")
        print(table(rows))


if __name__ == "__main__":
    main()
