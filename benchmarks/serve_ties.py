"""Greedy answers in float32 that depend on company: how many, and how near their ties were.

    python benchmarks/serve_ties.py [RUN] [--texts 64] [--tokens 48] [--runtime torch onnx] [--json]

Every text is written alone, and again among others that come and go, at several depths
(`serve/scheduler.py`). Counted are texts that differ. Printed is how far apart the two best logits were, in
units of the largest, where the first difference is: the last bits of a product depend on how many rows it
has, so a text can only turn where two tokens are that close. In float64 no text turns
(`tests/serve/test_scheduler.py`).
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch

import clone  # noqa: F401  (for what is not installed)
from tests.oracles.decoding import next_logits
from topograd.decode.sampling import Sampling
from topograd.decode.text import TextStream
from topograd.pretrained import REFERENCE
from topograd.serve.jobs import Job, Progress
from topograd.serve.metrics import Counters
from topograd.serve.scheduler import Scheduler
from topograd.serve.server import open_served
from topograd.serve.settings import Limits
from topograd.serve.texts import ServedModel

DEPTHS = ("full", "prefix:1", "full", "speculate:lookup")
WORDS = ("def", "class", "import", "for", "self", "return", "name", "value", "(", ")", ":", "=", "in", "if")


def write(
    served: ServedModel, asked: list[tuple[list[int], str]], tokens: int, company: bool
) -> list[list[int]]:
    """What is written behind each prompt, one after the other or side by side."""
    dice = random.Random(1)
    model, limits = served.model, Limits(rows=12 if company else 1)
    scheduler = Scheduler(model.session, model.engine, limits, Counters())
    texts: list[list[int]] = [[] for _ in asked]
    for text, (prompt, depth) in zip(texts, asked, strict=True):

        def tell(progress: Progress, text: list[int] = text) -> None:
            text += [written.token for written in progress.written]

        scheduler.add([Job(list(prompt), tokens, depth, Sampling(), TextStream(served.tokenizer), tell)])
        for _ in range(dice.randint(0, 6) if company else 0):
            scheduler.step()
    while scheduler.step():
        pass
    return texts


def gap(served: ServedModel, tokens: list[int], depth: str) -> float:
    """How far apart the two best logits behind a text are, over the largest."""
    session = served.model.session
    exits = session.plan.predicting()
    stage = exits[0] if depth == "prefix:1" else exits[-1]
    with torch.inference_mode():
        logits = next_logits(session.stack, session.plan, tokens, stage).double()
    first, second = logits.topk(2).values.tolist()
    return (first - second) / float(logits.abs().max())


def measure(served: ServedModel, texts: int, tokens: int) -> dict[str, Any]:
    """Write everything twice and compare."""
    dice = random.Random(0)
    asked = [
        (served.encode(" ".join(dice.choices(WORDS, k=dice.randint(1, 12)))), DEPTHS[k % len(DEPTHS)])
        for k in range(texts)
    ]
    alone, together = (write(served, asked, tokens, company) for company in (False, True))
    gaps = []
    for (prompt, depth), one, other in zip(asked, alone, together, strict=True):
        if one != other:
            place = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            gaps.append(gap(served, [*prompt, *one[:place]], depth))
    written = sum(map(len, alone))
    return {"texts": texts, "tokens": written, "turned": len(gaps), "largest_gap": max(gaps, default=None)}


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, default=REFERENCE)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runtime", nargs="+", default=["torch", "onnx"])
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    results = {}
    for runtime in asked.runtime:
        served = open_served(asked.run, None, Limits(), runtime=runtime)
        results[runtime] = measure(served, asked.texts, asked.tokens)
        if not asked.json:
            print(runtime, json.dumps(results[runtime]), flush=True)
    if asked.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
