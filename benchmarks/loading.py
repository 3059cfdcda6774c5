"""How long a run takes to open, and how much memory: each time in a process of its own.

    python benchmarks/loading.py RUN [--rounds 5] [--json]

`torch` is importing torch, `import` importing topograd after that, `open` is tg.load, `token` the first token
in the fastest runtime, which packs every weight once; `system` the part of it that the system's kernel took.
All are processor time: they hold on a machine that others use too. `first` opens with an empty cache of
hashes, so that the weights are hashed; the others find their hash remembered. Memory is the growth of the
resident set from before the opening to behind the token, over the bytes of the weights.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from topograd.timing import Spread

CHILD = """
import json, os, sys, time
now = time.process_time
began = now()
import torch
first = now()
import topograd as tg
tg.load
from topograd.runs import session
imported = now()

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

before = resident()
model = tg.load(sys.argv[1])
opened, system = now(), os.times().system
model.generate("A", tokens=1)
done = now()
weights = sum(p.numel() * p.element_size() for p in model.session.stack.parameters())
print(json.dumps({"torch": first - began, "import": imported - first, "open": opened - imported,
                  "token": done - opened, "system": os.times().system - system,
                  "memory": (resident() - before) / weights, "weights": weights}))
"""


@dataclass(frozen=True)
class Settings:
    """Which run, and how often."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    rounds: int = 5
    json: bool = False


def once(run: Path, cache: str) -> dict[str, float]:
    """One opening in a new process."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    command = [sys.executable, "-c", CHILD, str(run)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as cache:
        first = once(settings.run, cache)
        rest = [once(settings.run, cache) for _ in range(settings.rounds)]
    found: dict[str, Any] = {"first": first["open"], "weights": first["weights"]}
    for name in ("torch", "import", "open", "token", "system", "memory"):
        found[name] = str(Spread.of([each[name] for each in rest]))
    print(
        json.dumps(found) if settings.json else "\n".join(f"{key:8} {value}" for key, value in found.items())
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
