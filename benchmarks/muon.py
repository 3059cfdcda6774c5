"""The optimizer step alone: our Muon against torch.optim.Muon and AdamW, on the matrices of two GPTs.

One process, the optimizers interleaved, gradients fixed. Prints the median, the spread (10th to 90th
percentile) and the ratio to our Muon. torch's Muon goes through the matrices one by one, and takes seconds
for each layer of the larger model where bfloat16 is emulated: it gets one layer, and its time is multiplied
by the number of layers.

    python benchmarks/muon.py [--threads 1] [--json]
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass

import torch
from torch import nn

from topograd.training.muon import Muon

MODELS = ((96, 6, 6.0), (256, 8, 16.0))  # width, layers, seconds
MAX_ROUNDS = 60


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


def measure(width: int, layers: int, seconds: float) -> list[Row]:
    """Rounds of one step of each, until the time is over; the first round warms up."""
    entries = contestants(width, layers)
    times: list[list[float]] = [[] for _ in entries]
    start = time.perf_counter()
    for index in range(MAX_ROUNDS + 1):
        for entry, values in zip(entries, times, strict=True):
            began = time.perf_counter()
            entry.optimizer.step()
            if index:
                values.append(1e3 * entry.factor * (time.perf_counter() - began))
        elapsed = time.perf_counter() - start
        if index and elapsed * (index + 2) / (index + 1) > seconds:
            break
    quantiles = [torch.tensor(values).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist() for values in times]
    base = quantiles[0][1]
    return [
        Row(width, layers, entry.name, median, low, high, median / base, len(times[0]))
        for entry, (low, median, high) in zip(entries, quantiles, strict=True)
    ]


def table(rows: list[Row]) -> str:
    lines = [f"{'model':<10} {'optimizer':<32} {'ms':>9} {'10% .. 90%':>20} {'ratio':>8} {'rounds':>7}"]
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
