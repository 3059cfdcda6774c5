"""Staged fine-tuning of a model from outside: what each way costs, and what its exits gain.

    python benchmarks/staged_tuning.py RUN --out FOLDER [--own OWN_TEXT] [--partition 10,10,10] [--json]

Three ways, each a `topograd train --init RUN` on the same text:

    exits        --frozen: heads of low rank at the exits, distilled from the model's own last stage
    anchored     LoRA and heads of low rank, hierarchical, weights by depth; every exit, the last one too,
                 is distilled from the model as it was, so that full depth stays near it
    layerskip    LoRA, hierarchical, weights by depth, layer dropout; exits distilled from the own last stage,
                 which itself learns the text

The text is half of the embedded corpus and, with `--own`, half of the model's own (a folder that `topograd
retrofit --text` wrote). Before and after: bits per byte of every prefix on held-out text of the embedded
corpus, on prose and on held-out own text, and how often an exit has the argmax of full depth (of the same
model, and of the model before). `full depth` is how much full depth moved: the largest change of a logit on
the first row; 0 is bit-identical.

Core-minutes are processor time of computing states and of the steps. A run that is stopped (Ctrl-C, SIGTERM)
reports what it has reached; the same call goes on from the checkpoints in FOLDER.
"""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import tyro

from topograd.convert.own_text import OwnText, heldout_rows, training_rows
from topograd.data import Text, windows
from topograd.data.corpus import read_corpus
from topograd.exec.forward import predict, stage_outputs
from topograd.runs.config import TrainConfig, tuning
from topograd.runs.folder import Run
from topograd.runs.session import LoadedTextRun, heldout_text, open_session
from topograd.topology.plan import Plan
from topograd.training.runs import resume, start
from topograd.training.trainer import Trainer

WAYS: dict[str, dict[str, Any]] = {
    "exits": {"frozen": True},
    "anchored": {"lora_rank": 16},
    "layerskip": {"lora_rank": 16, "layer_dropout": 0.1},
}
DEEP: dict[str, Any] = {"grad_scale": 1.0, "depth_weights": 0.1, "objective": "distillation"}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "exits": {"objective": "distillation", "teacher": "self"},
    "anchored": {
        **DEEP,
        "heads": "low-rank",
        "head_rank": 32,
        "teacher_temperature": 1.0,
        "teacher_mix": 1.0,
    },
    "layerskip": {**DEEP, "teacher": "self"},
}
RATES = {"exits": 1e-3, "anchored": 3e-4, "layerskip": 3e-4}
TEACHER_TOP = 64
"""Logits of the model as it was that are kept of each position."""


@dataclass(frozen=True)
class Settings:
    """Which run, where to, and for how long."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN")]
    out: Path
    own: Path | None = None
    partition: str = "10,10,10"
    ways: tuple[str, ...] = tuple(WAYS)
    steps: tuple[int, ...] = (50, 60, 40)
    """Of each way."""
    window: int = 64
    batch: int = 4
    eval_bytes: int = 3_000
    threads: int = 1
    json: bool = False

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.ways):
            raise SystemExit(f"--steps has {len(self.steps)} for {len(self.ways)} ways; give one each")


def config_of(settings: Settings, base: LoadedTextRun, way: str, steps: int, data: Path) -> TrainConfig:
    """The settings of one way."""
    whole = tuning(replace(base.config, init=str(base.run.folder), data=str(data)), small=True)
    config = replace(
        whole,
        steps=steps,
        batch=settings.batch,
        optimizer=replace(whole.optimizer, lr_matrix=RATES[way], lr_head=RATES[way]),
        eval_bytes=2_000,
        save_every=20,
        model=whole.model.changed(context=min(256, whole.model.context)),
        tune=replace(whole.tune, seq_len=settings.window, **WAYS[way]),
    )
    topology = TOPOLOGIES[way]
    if "teacher" not in topology:
        topology = {**topology, "teacher": str(base.run.folder), "teacher_top": TEACHER_TOP}
    return config.changed(partition=settings.partition, **topology)


def own_text(settings: Settings, base: LoadedTextRun, held: bool) -> list[str]:
    """The model's own text row by row, that to learn from or that to judge on."""
    if settings.own is None:
        return []
    text = OwnText.open(settings.own, base.weights)
    rows = (heldout_rows if held else training_rows)(len(text))
    return [base.tokenizer.decode(line.tolist()) for line in text.all_tokens()[0][rows]]


def write_data(settings: Settings, base: LoadedTextRun) -> Path:
    """Own text, and as many bytes of the embedded corpus spread over it."""
    folder = settings.out / "text"
    folder.mkdir(exist_ok=True)
    own = own_text(settings, base, held=False)
    pieces = [d.text[i : i + 1500] for d in read_corpus(None).train for i in range(0, len(d.text), 1500)]
    if own:
        every = max(1, sum(map(len, pieces)) // sum(map(len, own)))
        pieces = pieces[::every]
    lines = [json.dumps({"text": piece}) for piece in (*own, *pieces)]
    (folder / "mixed.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def texts(settings: Settings, base: LoadedTextRun) -> dict[str, Text]:
    """Held-out text of the embedded corpus, most of it code; prose, the pages of docs/; own text."""
    limit, context = settings.eval_bytes, min(256, base.config.model.context)
    pages = sorted((Path(__file__).parents[1] / "docs").rglob("*.md"))
    small = replace(base, config=replace(base.config, model=base.config.model.changed(context=context)))

    def cut(documents: list[str]) -> Text:
        return Text(*windows(base.tokenizer.encode_batch(documents), base.tokenizer, context, limit))

    found = {
        "held out": heldout_text(small, limit_bytes=limit),
        "prose": cut([page.read_text(encoding="utf-8") for page in pages]),
    }
    own = own_text(settings, base, held=True)
    return {**found, "own": cut(own)} if own else found


@torch.no_grad()
def predicted(
    session: LoadedTextRun, plan: Plan, text: Text
) -> tuple[torch.Tensor, torch.Tensor, list[float]]:
    """(exits, tokens) argmax, full depth's logits on the first row, and the bits per byte of each exit."""
    found: list[torch.Tensor] = []
    first: torch.Tensor | None = None
    bits = torch.zeros(len(plan.predicting()), dtype=torch.float64)
    for row in range(len(text.inputs)):
        inputs, counted = text.inputs[row : row + 1], text.targets[row] != -100
        outputs = stage_outputs(session.stack, plan, inputs, plan.predicting())
        logits = [
            predict(session.stack, plan, outputs, plan.prediction.after(k))[0, counted]
            for k in plan.predicting()
        ]
        targets = text.targets[row][counted]
        bits += torch.stack([F.cross_entropy(z, targets, reduction="sum").double() for z in logits])
        first = logits[-1] if first is None else first
        found.append(torch.stack([z.argmax(-1) for z in logits]))
    assert first is not None
    return torch.cat(found, dim=1), first, (bits / math.log(2) / text.nbytes).tolist()


def reading(
    session: LoadedTextRun, plan: Plan, samples: dict[str, Text], before: dict[str, Any]
) -> dict[str, Any]:
    """What the exits predict, and how far full depth is from what it was."""
    found: dict[str, Any] = {}
    for name, text in samples.items():
        top, logits, bpb = predicted(session, plan, text)
        was = before.setdefault(name, (top, logits))
        found[name] = {
            "tokens": top.shape[1],
            "bpb": bpb,
            "agreement": [(row == top[-1]).float().mean().item() for row in top],
            "agreement_before": [(row == was[0][-1]).float().mean().item() for row in top],
            "largest_change": (logits - was[1]).abs().max().item(),
            "bit_identical": torch.equal(logits, was[1]),
        }
    return found


def tune(settings: Settings, base: LoadedTextRun, way: str, steps: int, data: Path) -> dict[str, Any]:
    """Train one way, from where it was; what it cost."""
    folder = settings.out / way
    there = folder.exists() and bool(Run.open(folder).store.names())
    trainer: Trainer = resume(folder) if there else start(config_of(settings, base, way, steps, data), folder)
    spent_file = settings.out / f"{way}.seconds"
    earlier = float(spent_file.read_text()) if there and spent_file.exists() else 0.0
    began = time.process_time()

    def on_step(step: int, of: int, losses: list[float], _: object) -> None:
        spent_file.write_text(str(earlier + time.process_time() - began))
        print(f"{way} {step}/{of} {losses} {time.process_time() - began:.0f} s", flush=True)

    done = trainer.train(on_step=on_step)
    spent = earlier + time.process_time() - began
    size = sum(f.stat().st_size for f in (folder / "checkpoints").rglob("model.safetensors"))
    return {
        "steps": trainer.step,
        "finished": done["finished"],
        "tokens": trainer.step * settings.batch * settings.window,
        "core_minutes": spent / 60,
        "learned": sum(p.numel() for p in trainer.task.stack.parameters() if p.requires_grad),
        "bytes": size,
    }


def main(settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    settings.out.mkdir(parents=True, exist_ok=True)
    base = open_session(settings.run)
    plan = Plan.of(settings.partition, len(base.stack.layers))
    data, samples = write_data(settings, base), texts(settings, base)
    before: dict[str, Any] = {}
    rows: dict[str, Any] = {"before": {"cost": None, **reading(base, plan, samples, before)}}
    print(json.dumps(rows), flush=True)
    for way, steps in zip(settings.ways, settings.steps, strict=True):
        cost = tune(settings, base, way, steps, data)
        tuned = open_session(settings.out / way)
        rows[way] = {"cost": cost, **reading(tuned, tuned.plan, samples, before)}
        print(json.dumps({way: rows[way]}), flush=True)
        if not cost["finished"]:
            break
    print(json.dumps(rows) if settings.json else table(rows))


def table(rows: dict[str, Any]) -> str:
    """As docs/results has it."""
    lines = [
        "| way | steps, tokens | core-minutes | learned | text | BPB by prefix | agreement by prefix "
        "| with before | full depth: largest change of a logit |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for way, row in rows.items():
        cost = row["cost"]
        spent = (
            "| | | "
            if cost is None
            else (
                f"| {cost['steps']}, {cost['tokens']} | {cost['core_minutes']:.1f} "
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
