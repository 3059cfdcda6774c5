"""What a second `generate` of one token costs over the token itself.

    python benchmarks/second_generate.py [RUN] [--rounds 15] [--json]

A loaded model keeps what it has read (calibration, adapters, digests), so only the first call pays for it. In
turns: `Model.generate` of a one-token prompt and one token, and the same token by the engine alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from topograd.decode.model import load
from topograd.decode.strategies import FixedDepth, generate_batch
from topograd.pretrained import REFERENCE
from topograd.timing import ratio, take_turns


@dataclass(frozen=True)
class Settings:
    """Which run, and how often."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")] = REFERENCE
    rounds: int = 15
    json: bool = False


def main() -> None:
    """Measure and print."""
    asked = tyro.cli(Settings)
    model = load(asked.run)
    prompt = [model.session.tokenizer.separator]
    full = FixedDepth(model.engine)
    turns = {
        "generate": lambda: model.generate(prompt, 1, depth="full"),
        "token": lambda: generate_batch(full, [prompt], 1),
    }
    seconds = take_turns(turns, asked.rounds, warmup=2)
    found = ratio(seconds, "generate", "token").as_dict()
    print(json.dumps(found) if asked.json else f"generate over token: {found}")


if __name__ == "__main__":
    main()
