"""How long a run takes to open, and how much memory: each time in a process of its own.

    python benchmarks/loading.py RUN [--rounds 5] [--json]

`import` is importing topograd, `open` is tg.load, `token` the first token in the fastest runtime, `system`
the part of all that the system's kernel took. All are processor time: they hold on a machine that others use
too. `first` has an empty cache: weights are hashed, packed and kept. The next two hash what was kept, and are
not counted; the others find hashes remembered and map the file. `torch` says whether it was imported. Memory
is the growth of the resident set from before the opening to behind the token, over the bytes of the weights.
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

UNCOUNTED = 2
CHILD = """
import json, os, sys, time
now = time.process_time
began = now()
import topograd as tg
tg.load
imported = now()

def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

before = resident()
model = tg.load(sys.argv[1])
opened = now()
model.generate("A", tokens=1)
done, system, grown, torch = now(), os.times().system, resident() - before, "torch" in sys.modules
weights = sum(p.numel() * p.element_size() for p in model.session.stack.parameters())
print(json.dumps({"import": imported - began, "open": opened - imported, "token": done - opened,
                  "system": system, "memory": grown / weights, "weights": weights, "torch": torch}))
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
        rest = [once(settings.run, cache) for _ in range(settings.rounds + UNCOUNTED)][UNCOUNTED:]
    found: dict[str, Any] = {"first": first, "weights": first["weights"]}
    found["torch"] = any(each["torch"] for each in rest)
    for name in ("import", "open", "token", "system", "memory"):
        found[name] = str(Spread.of([each[name] for each in rest]))
    print(
        json.dumps(found) if settings.json else "\n".join(f"{key:8} {value}" for key, value in found.items())
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
