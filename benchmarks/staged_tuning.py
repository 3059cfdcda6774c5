"""Staged fine-tuning of a model from outside: what each way costs, and what its exits gain.

    python benchmarks/staged_tuning.py RUN --out FOLDER [--partition 10,10,10] [--steps 60] [--json]

Four ways, each a `topograd train --init RUN` with the same text and the same number of steps (exits, whose
steps cost a small part of the others', get four times as many):

    exits        --frozen: heads of low rank at the exits, distilled from the model's own last stage
    lora         LoRA, hierarchical, weights by depth, layer dropout, distillation: LayerSkip's recipe
    local        LoRA, no gradient across boundaries, distillation from the own last stage
    later        LoRA on the last stage alone, the states before it computed once

Before and after: bits per byte of every prefix on held-out text of the embedded corpus and on prose, and how
often an exit has the argmax of full depth (of the same model, and of the model before). `full depth` is how
much full depth moved: the change of its bits per byte, and the largest change of a logit; 0 is bit-identical.
Seconds are those of the steps and, apart, of computing hidden states once.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from topograd.data import Text, windows
from topograd.runs.config import TrainConfig, tuning
from topograd.runs.session import Session, heldout_text, open_session
from topograd.topology.plan import Plan
from topograd.training.evaluation import evaluate
from topograd.training.forward import predict, stage_outputs
from topograd.training.trainer import start

WAYS: dict[str, dict[str, Any]] = {
    "exits": {"frozen": True},
    "lora": {"lora_rank": 8, "layer_dropout": 0.1},
    "local": {"lora_rank": 8},
    "later": {"lora_rank": 8, "first_layer": None},
}
TAUGHT: dict[str, Any] = {"objective": "distillation", "teacher": "self"}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "exits": TAUGHT,
    "lora": {"transmissivity": 1.0, "depth_weights": 0.1, **TAUGHT},
    "local": TAUGHT,
    "later": {},
}


@dataclass(frozen=True)
class Settings:
    """Which run, where to, and for how long."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    out: Path
    partition: str = "10,10,10"
    ways: tuple[str, ...] = tuple(WAYS)
    steps: int = 60
    window: int = 64
    batch: int = 4
    eval_bytes: int = 8_000
    threads: int = 1
    json: bool = False


def config_of(settings: Settings, base: Session, way: str, steps: int) -> TrainConfig:
    """The settings of one way."""
    whole = tuning(replace(base.config, init=str(base.run.folder), data=None), small=True)
    stops = list(map(int, settings.partition.split(",")))
    tune: dict[str, Any] = {
        name: sum(stops[:-1]) if value is None else value for name, value in WAYS[way].items()
    }
    config = replace(
        whole,
        steps=steps,
        batch=settings.batch,
        eval_bytes=10_000,
        save_every=0,
        tune=replace(whole.tune, window=settings.window, **tune),
    )
    return config.changed(partition=settings.partition, **TOPOLOGIES[way])


def texts(base: Session, limit: int) -> dict[str, Text]:
    """Held-out text of the embedded corpus, most of it code, and prose: the pages of docs/."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    prose = base.tokenizer.encode_batch([page.read_text(encoding="utf-8") for page in pages])
    context = min(512, base.config.model.context)
    small = replace(base, config=replace(base.config, model=replace(base.config.model, context=context)))
    return {
        "held out": heldout_text(small, limit_bytes=limit),
        "prose": Text(*windows(prose, base.tokenizer, context, limit)),
    }


@torch.no_grad()
def tops(session: Session, text: Text, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """(exits, tokens) argmax, and the logits of full depth on the first row."""
    found: list[torch.Tensor] = []
    first: torch.Tensor | None = None
    for row in range(len(text.inputs)):
        inputs, counted = text.inputs[row : row + 1], text.targets[row] != -100
        outputs = stage_outputs(session.stack, plan, inputs, plan.predicting())
        logits = [
            predict(session.stack, plan, outputs, plan.prediction.after(k))[0, counted]
            for k in plan.predicting()
        ]
        first = logits[-1] if first is None else first
        found.append(torch.stack([z.argmax(-1) for z in logits]))
    assert first is not None
    return torch.cat(found, dim=1), first


def reading(session: Session, plan: Plan, samples: dict[str, Text], before: dict[str, Any]) -> dict[str, Any]:
    """What the exits predict, and how far full depth is from what it was."""
    found: dict[str, Any] = {}
    for name, text in samples.items():
        top, logits = tops(session, text, plan)
        was = before.get(name, (top, logits))
        found[name] = {
            "bpb": evaluate(session.stack, plan, text, batch=1).bpb.prefix,
            "agreement": [(row == top[-1]).float().mean().item() for row in top],
            "agreement_before": [(row == was[0][-1]).float().mean().item() for row in top],
            "largest_change": (logits - was[1]).abs().max().item(),
            "bit_identical": torch.equal(logits, was[1]),
        }
        before.setdefault(name, (top, logits))
    return found


def tune(settings: Settings, base: Session, way: str) -> dict[str, Any]:
    """Train one way; what it cost."""
    steps = settings.steps * (4 if way == "exits" else 1)
    trainer = start(config_of(settings, base, way, steps), settings.out / way)
    began, states = time.perf_counter(), 0.0

    def on_rows(done: int, of: int) -> None:
        nonlocal states
        states = time.perf_counter() - began

    trainer.train(on_rows=on_rows)
    learned = sum(p.numel() for p in trainer.stack.parameters() if p.requires_grad)
    size = sum(f.stat().st_size for f in (settings.out / way / "checkpoints").rglob("model.safetensors"))
    return {
        "steps": steps,
        "tokens": steps * settings.batch * settings.window,
        "seconds": trainer.seconds,
        "state_seconds": states,
        "learned": learned,
        "bytes": size,
    }


def main(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    settings.out.mkdir(parents=True, exist_ok=True)
    base = open_session(settings.run)
    plan = Plan.of(settings.partition, len(base.stack.layers))
    samples = texts(base, settings.eval_bytes)
    before: dict[str, Any] = {}
    rows: dict[str, Any] = {"before": {"cost": None, **reading(base, plan, samples, before)}}
    for way in settings.ways:
        cost = tune(settings, base, way)
        tuned = open_session(settings.out / way)
        rows[way] = {"cost": cost, **reading(tuned, tuned.plan, samples, before)}
        print(json.dumps({way: rows[way]}), flush=True)
    print(json.dumps(rows) if settings.json else table(rows))


def table(rows: dict[str, Any]) -> str:
    """As LOG.md has it."""
    lines = [
        "| way | steps, tokens | seconds (states) | learned | text | BPB by prefix | agreement by prefix "
        "| with before | full depth: largest change of a logit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, row in rows.items():
        cost = row["cost"]
        spent = (
            "| | | "
            if cost is None
            else (
                f"| {cost['steps']}, {cost['tokens']} | {cost['seconds']:.0f} ({cost['state_seconds']:.0f}) "
                f"| {cost['learned'] / 1e6:.2f} M "
            )
        )
        for name in (key for key in row if key != "cost"):
            part = row[name]
            shown = [" ".join(f"{x:.3f}" for x in part[k]) for k in ("bpb", "agreement", "agreement_before")]
            moved = "0, bit-identical" if part["bit_identical"] else f"{part['largest_change']:.2f}"
            lines.append(f"| {way} {spent}| {name} | {' | '.join(shown)} | {moved} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main(tyro.cli(Settings))
