"""Two versions of this package beside each other: nothing may get slower.

    python benchmarks/versions.py OLD/src NEW/src [--rounds 5] [--json]

Each round runs the same commands once with each version, in processes of their own that take turns: a short
training (its seconds, and its bits per byte, which should not move), decoding with the reference model at
full depth and by speculation (tokens a second, as the command reports them), and the time of `train --help`.
Ratios are new over old, round by round, so that below 1 is faster for seconds and above 1 for speeds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from topograd.timing import Spread

TRAIN = ["train", "--preset", "small", "--partition", "2,2,2", "--eval-bytes", "40000"]
PROMPT = "def read(self, size=-1):\n"


@dataclass(frozen=True)
class Settings:
    """Which versions, and how long to measure."""

    old: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OLD")]
    new: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="NEW")]
    rounds: int = 5
    steps: int = 60
    tokens: int = 200
    threads: int = 1
    json: bool = False


def call(source: Path, words: list[str], threads: int) -> str:
    """What the command prints with the package that lies in `source`."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "topograd", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd="/")
    return done.stdout


def one_round(source: Path, settings: Settings) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        words = [*TRAIN, "--steps", str(settings.steps), "--out", f"{place}/run", "--json"]
        trained = json.loads(call(source, words, settings.threads))
        found["training seconds"] = trained["seconds"]
        found["bpb"] = trained["bpb"]["last"]
    for depth in ("full", "speculate:4:1.0"):
        words = ["generate", "--prompt", PROMPT, "--tokens", str(settings.tokens), "--depth", depth, "--json"]
        found[f"tokens/s, {depth}"] = json.loads(call(source, words, settings.threads))["tokens_per_second"]
    began = time.perf_counter()
    call(source, ["train", "--help"], settings.threads)
    found["seconds of train --help"] = time.perf_counter() - began
    return found


def measure(settings: Settings) -> dict[str, Any]:
    trees = {"old": settings.old.resolve(), "new": settings.new.resolve()}
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(settings.rounds):
        order = list(trees) if number % 2 == 0 else list(reversed(trees))
        rounds.append({name: one_round(trees[name], settings) for name in order})
    answer = {}
    for key in rounds[0]["old"]:
        ratios = Spread.of([each["new"][key] / each["old"][key] for each in rounds]).as_dict()
        medians = {name: Spread.of([each[name][key] for each in rounds]).median for name in trees}
        answer[key] = {"ratio": ratios, **medians}
    return answer


def main() -> None:
    settings = tyro.cli(Settings)
    found = measure(settings)
    if settings.json:
        print(json.dumps(found))
        return
    for key, row in found.items():
        spread = row["ratio"]
        print(
            f"{key:28} old {row['old']:9.4f}  new {row['new']:9.4f}  "
            f"new/old {spread['median']:.3f} ({spread['low']:.3f} to {spread['high']:.3f})"
        )


if __name__ == "__main__":
    main()
