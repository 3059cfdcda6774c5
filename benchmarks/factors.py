"""K-FAC factors of a GPT against one forward and backward pass over the same data.

    python benchmarks/factors.py [--width 320] [--layers 6] [--sequences 64] [--rounds 5] [--json]

Float32, in one process, taking turns; gradients exist beforehand. The loss of the backward pass is the plain
cross-entropy of the same logits that the factors read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import tyro

from topograd.geometry.factors import kfac_factors
from topograd.nn.gpt import GPT
from topograd.timing import Spread, ratio, take_turns


@dataclass(frozen=True)
class Settings:
    """The model and how long to measure."""

    width: int = 320
    layers: int = 6
    vocab: int = 2048
    context: int = 256
    sequences: int = 64
    batch: int = 8
    rounds: int = 5
    threads: int | None = None
    json: bool = False


def measure(settings: Settings) -> dict[str, Any]:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "layers": settings.layers,
        "width": settings.width,
        "heads": settings.width // 64,
        "vocab": settings.vocab,
        "context": settings.context,
    }
    model = GPT(**shape)
    for parameter in model.parameters():  # output matrices start at zero: then no gradient passes
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(settings.vocab, (2, settings.sequences, settings.context))
    batches = list(zip(*(part.split(settings.batch) for part in tokens), strict=True))

    def learn() -> None:
        for inputs, targets in batches:
            F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()

    learn()
    things = {
        "forward and backward": learn,
        "empirical": lambda: kfac_factors(model, batches),
        "monte-carlo": lambda: kfac_factors(model, batches, fisher="monte-carlo"),
    }
    seconds = take_turns(things, settings.rounds, warmup=1)
    return {
        "settings": {**shape, "sequences": settings.sequences, "threads": torch.get_num_threads()},
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "seconds": {name: Spread.of(times).as_dict() for name, times in seconds.items()},
        "over_forward_and_backward": {
            name: ratio(seconds, name, "forward and backward").as_dict() for name in list(things)[1:]
        },
    }


def main() -> None:
    settings = tyro.cli(Settings)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    result = measure(settings)
    if settings.json:
        print(json.dumps(result))
        return
    print(f"{result['settings']}, {result['parameters'] / 1e6:.1f}M parameters")
    for name, spread in result["seconds"].items():
        print(f"{name:22} {Spread(**spread)!s} s")
    for name, spread in result["over_forward_and_backward"].items():
        print(f"{name} over forward and backward: {Spread(**spread)!s}")


if __name__ == "__main__":
    main()
