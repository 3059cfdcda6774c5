"""Seconds of a training step of each gradient engine, in this checkout and in another.

    python benchmarks/engine_steps.py OTHER [--rounds 5] [--steps 12] [--json]

OTHER is the folder of another checkout of this package, or its src. Each round trains for some steps with
every engine, once in each checkout, in processes of their own that take turns. A process gives the median of
its steps behind the first few; a ratio is this checkout's seconds over the other's, round by round, so below
1 is faster. An engine that a checkout does not have (older ones cannot choose Jacobians) has no ratio, and
the reason stands beside it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from topograd.timing import Spread
from versions import call

HERE = Path(__file__).parents[1]
ENGINES = {
    "autograd": [],
    "scan, loop": ["--backward", "scan"],
    "scan, batched": ["--backward", "scan", "--jacobian", "batched"],
    "scan, forward": ["--backward", "scan", "--jacobian", "forward"],
    "scan, pullback": ["--backward", "scan", "--jacobian", "pullback"],
    "hybrid": ["--backward", "hybrid"],
}


@dataclass(frozen=True)
class Settings:
    """Which checkout is compared, and what is trained for how long."""

    other: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OTHER")]
    preset: str = "small"
    partition: str = "2,2,2"
    interface: str = "S=4,r=4"
    rounds: int = 5
    steps: int = 12
    warmup: int = 3
    """Steps of each process that do not count."""
    threads: int = 1
    json: bool = False


def step_seconds(source: Path, flags: list[str], settings: Settings) -> float:
    """The median seconds of a step, in a process of its own."""
    with tempfile.TemporaryDirectory() as place:
        model = ["--preset", settings.preset, "--partition", settings.partition]
        words = ["--interface", settings.interface, *flags, "--steps", str(settings.steps)]
        call(source, ["train", *model, *words, "--out", f"{place}/run", "--json"], settings.threads)
        lines = Path(place, "run", "metrics.jsonl").read_text().splitlines()
    records = [record for line in lines if (record := json.loads(line))["kind"] == "train"]
    late = [record for record in records if record["step"] >= settings.warmup]
    return statistics.median(
        (b["seconds"] - a["seconds"]) / (b["step"] - a["step"]) for a, b in pairwise(late)
    )


def measure(settings: Settings) -> dict[str, Any]:
    """Seconds of every engine in both checkouts, and their ratio."""
    trees = {"here": HERE / "src", "other": settings.other.resolve()}
    if (trees["other"] / "src").is_dir():
        trees["other"] /= "src"
    seconds: dict[str, dict[str, list[float]]] = {name: {tree: [] for tree in trees} for name in ENGINES}
    missing: dict[str, str] = {}
    for number in range(settings.rounds):
        for name, flags in ENGINES.items():
            for tree in list(trees) if number % 2 == 0 else list(reversed(trees)):
                if (key := f"{name}, {tree}") in missing:
                    continue
                try:
                    seconds[name][tree].append(step_seconds(trees[tree], flags, settings))
                except subprocess.CalledProcessError as error:
                    missing[key] = (error.stderr.strip().splitlines() or [f"exit code {error.returncode}"])[
                        -1
                    ]
    results: dict[str, Any] = {"settings": {**vars(settings), "other": str(trees["other"])}, "engines": {}}
    for name, both in seconds.items():
        found: dict[str, Any] = {
            tree: Spread.of(each).as_dict() if each else missing[f"{name}, {tree}"]
            for tree, each in both.items()
        }
        if all(both.values()):
            pairs = zip(both["here"], both["other"], strict=True)
            found["ratio"] = Spread.of([a / b for a, b in pairs]).as_dict()
        results["engines"][name] = found
    return results


def main() -> None:
    """Measure and print."""
    settings = tyro.cli(Settings)
    results = measure(settings)
    if settings.json:
        print(json.dumps(results))
        return
    for name, found in results["engines"].items():
        each = [
            f"{key} {Spread(**x)!s}" if isinstance(x, dict) else f"{key}: {x}" for key, x in found.items()
        ]
        print(f"{name:16} {'   '.join(each)}")


if __name__ == "__main__":
    main()
