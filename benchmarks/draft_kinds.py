"""Kinds of draft stages on one text, taught by the same number of steps: how often they are right.

    python benchmarks/draft_kinds.py RUN --out FOLDER [--tokens 100000] [--seeds 3] [--weights int8] [--json]

    chain     one layer on the last state, unrolled on its own states
    depths    the same on the states of three depths
    block     three depths and four slots

Each is taught with several seeds on the same own text of the run (FOLDER/text, written by the kernels of that
precision) and stays in FOLDER/KIND-SEED, for `drafters.py --draft`. `agreement` is by step on held-out greedy
rows, `chain` of all steps up to it (`convert/draft_training.py`): the expected tokens of a draft add up. Time
is the process's own.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from topograd.convert.draft_training import DraftTraining
from topograd.convert.own_text import OwnTextConfig
from topograd.convert.retrofit import RetrofitConfig, retrofit
from topograd.runs.session import open_session

KINDS = {"chain": (1, 1), "depths": (3, 1), "block": (3, 4)}
"""Depths and slots."""


@dataclass(frozen=True)
class Settings:
    """Which run, and how much is taught."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    out: Path
    tokens: int = 100_000
    vocabulary: int = 1024
    epochs: float = 2.0
    seeds: int = 3
    kinds: tuple[str, ...] = tuple(KINDS)
    length: int = 256
    """Tokens of a row of own text."""
    weights: str = "float32"
    """The precision that writes it."""
    json: bool = False


def measure(settings: Settings) -> list[dict[str, Any]]:
    """A record for each kind and seed."""
    session, made = open_session(settings.run), []
    text = OwnTextConfig(length=settings.length, weights=settings.weights)
    base = RetrofitConfig(settings.tokens, settings.vocabulary, text=text)
    retrofit(  # so that the writing of the text is in no one's time
        session,
        settings.out / "first",
        replace(base, training=DraftTraining(epochs=1e-3)),
        text=settings.out / "text",
    )
    for seed in range(settings.seeds):
        for kind in settings.kinds:
            depths, slots = KINDS[kind]
            training = DraftTraining(epochs=settings.epochs, seed=seed)
            config = replace(base, depths=depths, slots=slots, training=training)
            began = time.process_time()
            found = retrofit(session, settings.out / f"{kind}-{seed}", config, text=settings.out / "text")
            seconds = time.process_time() - began
            made.append({**found, "kind": kind, "seed": seed, "core_seconds": seconds})
            print(
                f"{kind} {seed}: {seconds:.0f} s, {found['agreement']} {found['chain']}",
                file=sys.stderr,
                flush=True,
            )
    return made


def show(made: list[dict[str, Any]]) -> None:
    """The mean and the range over seeds, by kind."""
    for kind in dict.fromkeys(row["kind"] for row in made):
        rows = [row for row in made if row["kind"] == kind]
        seconds = sum(row["core_seconds"] for row in rows) / len(rows)
        print(f"{kind}: {rows[0]['parameters'] / 1e6:.2f} M parameters, {seconds:.0f} core-seconds")
        for name in ("agreement", "chain"):
            steps = list(zip(*(row[name] for row in rows), strict=True))
            each = (f"{sum(s) / len(s):.3f} ({min(s):.3f} to {max(s):.3f})" for s in steps)
            print(f"    {name:10} {'  '.join(each)}")


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    made = measure(settings)
    if settings.json:
        print(json.dumps(made))
    else:
        show(made)


if __name__ == "__main__":
    main()
