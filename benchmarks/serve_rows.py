"""What a step of several texts costs in each runtime.

    python benchmarks/serve_rows.py [RUN] [--rows 1 2 3 4 6 8 16] [--rounds 9] [--weights int8] [--json]

Unlike texts, sequences of one cache, write a token each at full depth. The runtimes take turns in one
process; printed are milliseconds a step, the median of `rounds` turns of four steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from topograd.decode.cache import Batch
from topograd.decode.model import Model
from topograd.decode.strategies import FixedDepth
from topograd.pretrained import REFERENCE
from topograd.runs.session import open_session

STEPS = 4
TEXT = "def read(self, size=-1):\n    return self.file.read(size)\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, default=REFERENCE)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 16])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--weights", nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    session = open_session(asked.run)
    ways = [("torch", "float32"), ("onnx", "float32"), *(("onnx", weights) for weights in asked.weights)]
    full = {f"{name} {weights}": FixedDepth(Model(session, name, weights).engine) for name, weights in ways}
    prompt = session.tokenizer.encode(TEXT)[:24]
    found: list[dict[str, Any]] = []
    for count in asked.rows:
        batches: dict[str, Batch] = {}
        times: dict[str, list[float]] = {name: [] for name in full}
        for name, strategy in full.items():
            batches[name] = strategy.engine.start([[k + 5, *prompt] for k in range(count)])
            strategy.step(batches[name])
            strategy.step(batches[name])
        for _ in range(asked.rounds):
            for name, strategy in full.items():
                began = time.perf_counter()
                for _ in range(STEPS):
                    strategy.step(batches[name])
                times[name].append(1000 * (time.perf_counter() - began) / STEPS)
        found.append({"rows": count, "ms": {name: statistics.median(each) for name, each in times.items()}})
        if not asked.json:
            print(count, {name: round(value, 2) for name, value in found[-1]["ms"].items()}, flush=True)
    if asked.json:
        print(json.dumps({"threads": torch.get_num_threads(), "steps": found}))


if __name__ == "__main__":
    main()
