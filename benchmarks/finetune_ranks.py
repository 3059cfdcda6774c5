"""Fine-tuning a model by LoRA over two processes and a slow wire: backprop against thin and late gradients.

    python benchmarks/finetune_ranks.py MODEL --out FOLDER [--seeds 3] [--steps 20] [--mbit 10] [--json]

Half of the layers are in each process, with one loss at the end; embedding and head stay as they are and are
not added up, and LoRA's factors belong to their layers, so activations and gradients alone are on the wire.

    whole            backprop, by 1F1B
    thin             gradients in four bits
    thin-late        and one step late
    thin-late-int8   and activations in int8

New text are modules of the standard library, of which the run holds some out. Every way is a run of
`topograd train --parallel stages=2`, in turns, with the same settings: quality does not depend on the wire,
times do. A row is kept as it comes, and is not made again. Links are shaped as in `pipeline_ways.py` (root).
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import tyro

from pipeline_settings import BITS, PipelineSettings
from pipeline_ways import run_ranks
from topograd.cli.console import Json, out, print_json
from topograd.data.corpus import read_corpus
from topograd.runs.folder import Run
from topograd.runs.session import heldout_text, open_session
from topograd.timing import Spread
from topograd.training.evaluation import evaluate

WAYS = {
    "whole": ([], "exact"),
    "thin": (["--grad-bits", str(BITS)], "exact"),
    "thin-late": (["--grad-bits", str(BITS), "--grad-delay", "1"], "exact"),
    "thin-late-int8": (["--grad-bits", str(BITS), "--grad-delay", "1"], "int8"),
}
MODULES, BYTES = 40, 8000
WARM = 2
"""Steps that are not timed: shapes are announced, and a late stage has nothing to learn from."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is tuned, and over which wire."""

    model: Annotated[Path, tyro.conf.Positional]
    """A run, such as one that `topograd import` made."""
    out: Path
    """A folder for the text, the rows and the runs."""
    seeds: int = 3
    steps: int = 20
    microbatches: int = 4
    tokens: int = 64
    """Of the one sequence of a micro-batch."""
    partition: str = "15,15"
    rank: int = 8
    """Of LoRA."""
    rate: float = 0.001
    """Of AdamW, for every way."""
    mbit: float | None = None
    latency: float | None = None
    ways: tuple[str, ...] = tuple(WAYS)
    json: Json = False


def main(asked: Settings) -> None:
    asked.out.mkdir(parents=True, exist_ok=True)
    text = asked.out / "text.txt"
    if not text.exists():
        text.write_text(_text())
    file = asked.out / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for seed in range(asked.seeds):
        for way in asked.ways:
            key = {"way": way, "seed": seed, "steps": asked.steps, "rate": asked.rate}
            key |= {"mbit": asked.mbit, "latency": asked.latency}
            if not any(key.items() <= row.items() for row in rows):
                rows.append(key | _tuned(asked, text, way, seed))
                with file.open("a") as opened:
                    opened.write(json.dumps(rows[-1]) + "\n")
    if asked.json:
        print_json({"rows": rows})
    else:
        for row in rows:
            out().print(row)


def _text() -> str:
    named = [d for d in read_corpus(None).train if d.name.endswith(".py") and len(d.text) > 2000]
    return "\n\n".join(d.text[:BYTES] for d in random.Random(0).sample(named, MODULES))


def _tuned(asked: Settings, text: Path, way: str, seed: int) -> dict[str, Any]:
    """One run: what it makes of held-out text, before and after, and the seconds of its steps."""
    folder = asked.out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    edge, wire = WAYS[way]
    words = ["--init", str(asked.model), "--data", str(text), "--out", str(folder), "--seed", str(seed)]
    words += ["--partition", asked.partition, "--weights", "0", "1", "--grad-scale", "1", *edge]
    words += ["--lora-rank", str(asked.rank), "--seq-len", str(asked.tokens), "--batch", "1"]
    words += ["--accumulate", str(asked.microbatches), "--steps", str(asked.steps), "--eval-every", "0"]
    words += ["--optimizer.name", "adamw", "--optimizer.lr-matrix", str(asked.rate)]
    words += [
        "--eval-bytes",
        str(BYTES),
        "--save-every",
        "0",
        "--parallel",
        f"stages=2,wire={wire},timeout=600",
    ]
    wire_of = PipelineSettings(layers=2, mbit=asked.mbit, latency=asked.latency)
    printed = run_ranks(wire_of, [sys.executable, "-m", "topograd", "train", *words, "--json"], 3600.0)
    times = [r["seconds"] for r in Run.open(folder).metrics() if r["kind"] == "train"]
    each = [b - a for a, b in pairwise(times)][WARM - 1 :]
    session, base = open_session(folder), open_session(asked.model)
    before = evaluate(base.stack, session.plan, heldout_text(session)).bpb.prediction
    shutil.rmtree(folder)
    return {
        "bpb": printed["bpb"]["prediction"],
        "bpb_before": before,
        "seconds_a_step": Spread.of(each).as_dict() if each else None,
    }


if __name__ == "__main__":
    main(tyro.cli(Settings))
