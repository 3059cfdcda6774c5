"""Every runtime on one run, some tokens in turns; and a new process up to its first token.

    python benchmarks/runtimes.py RUN --threads 1 --json

All continue the same prompt at full depth, one row and four, and take turns of eight tokens, so that what
else the machine does meets all; the first token of a turn, whose weights the others have pushed out of the
processor's caches, is not counted. `cpu` is the processor time of the same tokens. The start is `topograd
generate RUN --tokens 1` as a process of its own, from the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from topograd.decode.depths import engine_of
from topograd.decode.strategies import FixedDepth, generate_tokens
from topograd.runs.session import open_session
from topograd.timing import Spread, ratio

RUNTIMES = ("torch", "onnx", "native")
TURN = 8
"""Tokens of a turn; the first is not counted."""
UNCOUNTED = 3
"""Starts that read the files, pack and keep the weights, and hash what was kept while it is new."""


def steps(writing: dict[str, Iterator[Any]], rows: int, tokens: int) -> dict[str, dict[str, list[float]]]:
    """Seconds and processor seconds of each token of each runtime, in turns."""
    found: dict[str, dict[str, list[float]]] = {"wall": {}, "cpu": {}}
    for turn in range(tokens // TURN):
        names = list(writing) if turn % 2 else list(writing)[::-1]
        for name, token in itertools.product(names, range(TURN)):
            began, before = time.perf_counter(), time.process_time()
            for _ in range(rows):
                next(writing[name])
            if not token:
                continue
            for kind, taken in (("wall", time.perf_counter() - began), ("cpu", time.process_time() - before)):
                found[kind].setdefault(name, []).append(taken)
    return found


def start_seconds(run: Path, times: int) -> list[float]:
    """How long the first token of a new process takes."""
    command = [sys.executable, "-m", "topograd", "generate", str(run), "--tokens", "1", "--prompt", "A"]
    seconds = []
    for _ in range(times + UNCOUNTED):
        began = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - began)
    return seconds[UNCOUNTED:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    session = open_session(asked.run)
    prompt = session.tokenizer.encode("A text that is continued is read first, then written. " * 8)[:64]
    engines = {name: engine_of(session, name) for name in RUNTIMES}
    results: dict[str, Any] = {"run": str(asked.run), "threads": asked.threads}
    for rows in (1, 4):
        ready = {}
        for name, engine in engines.items():
            ready[name] = generate_tokens(FixedDepth(engine), [prompt] * rows, asked.tokens + 8)
            for _ in range(8 * rows):
                next(ready[name])
        found = steps(ready, rows, asked.tokens)
        results[f"{rows} rows"] = {
            kind: {
                **{name: Spread.of(each).as_dict() for name, each in seconds.items()},
                **{
                    f"{slower} over {faster}": ratio(seconds, slower, faster).as_dict()
                    for slower, faster in itertools.combinations(RUNTIMES, 2)
                },
            }
            for kind, seconds in found.items()
        }
    if asked.starts:
        results["start"] = Spread.of(start_seconds(asked.run, asked.starts)).as_dict()
    print(json.dumps(results, indent=None if asked.json else 1))


if __name__ == "__main__":
    main()
