"""Ways of decoding over full depth, by processor time of one thread, in each runtime.

    python benchmarks/depths.py [RUN] [--tokens 80] [--rounds 3]

Eight short prompts of code, one row, greedy. Every way continues every prompt in each round, taking turns in
one process; the least time of the rounds counts, since other work can only add to it. A ratio is of the sums
over prompts; beside it those of single prompts, in order. RUN is the package's own model if not given.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from topograd.decode.depths import engine_of, strategy_of
from topograd.decode.engine import Engine
from topograd.decode.strategies import generate_tokens
from topograd.pretrained import REFERENCE
from topograd.runs.session import LoadedTextRun, open_session

WAYS = ("full", "speculate", "speculate:lookup", "speculate:4+lookup", "wand")
PROMPTS = (
    "def read(self, path):\n    ",
    "class Parser:\n    def __init__(",
    "import os\nimport sys\n\n",
    "    for line in lines:\n        ",
    '"""Return the',
    "def test_",
    "if __name__ == ",
    "try:\n    ",
)


def seconds_of(session: LoadedTextRun, engine: Engine, way: str, prompt: str, tokens: int) -> float:
    """Processor seconds of a token."""
    begin = [session.tokenizer.separator, *session.tokenizer.encode(prompt)]
    strategy = strategy_of(way, session, engine)
    began = time.process_time()
    written = sum(1 for _ in generate_tokens(strategy, [begin], tokens))
    return (time.process_time() - began) / written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=REFERENCE)
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    session = open_session(asked.run)
    found: dict[str, Any] = {}
    for runtime in ("onnx", "torch"):
        engine = engine_of(session, runtime)
        least = {way: [float("inf")] * len(PROMPTS) for way in WAYS}
        for _ in range(asked.rounds):
            for way in WAYS:
                for i, prompt in enumerate(PROMPTS):
                    taken = seconds_of(session, engine, way, prompt, asked.tokens)
                    least[way][i] = min(least[way][i], taken)
        full = least["full"]
        found[runtime] = {
            "full_ms": 1000 * sum(full) / len(full),
            "over_full": {way: sum(full) / sum(least[way]) for way in WAYS[1:]},
            "by_prompt": {
                way: sorted(f / w for f, w in zip(full, least[way], strict=True)) for way in WAYS[1:]
            },
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
