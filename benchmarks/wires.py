"""What rounding the activations between ranks costs in quality: the same training with three wires.

    python benchmarks/wires.py --out FOLDER [--steps 300] [--seeds 3]

Each run is `topograd train --preset tiny --partition 2,2` on two ranks under torchrun, with nothing shared,
once for each wire and seed: the same weights, the same batches. Differences are BPB of the held-out text
against the exact wire, seed by seed. The first stage never hears a wire, so its BPB must not move at all.
About half a minute a run on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from topograd.timing import Spread

WIRES = ("exact", "bf16", "int8")


def train(out: Path, wire: str, seed: int, steps: int) -> list[float]:
    """BPB of each stage after a run on two ranks."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words += ["-m", "topograd", "train", "--preset", "tiny", "--partition", "2,2", "--stage-heads", "own"]
    words += ["--bus", "detached", "--model.no-x0-blend", "--parallel", f"stages=2,wire={wire}"]
    words += ["--steps", str(steps), "--seed", str(seed), "--out", str(out), "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])["bpb"]["stages"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    found: dict[str, list[list[float]]] = {wire: [] for wire in WIRES}
    for seed in range(asked.seeds):
        for wire in WIRES:
            found[wire].append(train(asked.out / f"{wire}-{seed}", wire, seed, asked.steps))
            print(f"{wire}, seed {seed}: {found[wire][-1]}", file=sys.stderr, flush=True)
    costs: dict[str, Any] = {}
    for wire in WIRES[1:]:
        pairs = list(zip(found[wire], found["exact"], strict=True))
        costs[wire] = {
            f"stage {k + 1}": Spread.of([mine[k] - exact[k] for mine, exact in pairs]).as_dict()
            for k in range(2)
        }
    print(json.dumps({"steps": asked.steps, "bpb": found, "cost": costs}))


if __name__ == "__main__":
    main()
