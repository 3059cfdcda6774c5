"""What a bounded interface costs in quality: rank, segments, pool and region size, on four architectures.

After Tables 2 and 6 of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", with two changes.
The interface is causal, and beside the dense model stands the shallow control: the last region alone, which
is what a bounded-interface model falls back to when its interface says nothing. All models see the same bytes
for the same number of steps. They are plain GPTs: with an embedding of the previous token, value embeddings
and x0 in every layer, two layers come so close to eight that there is little left to measure.

    python -m topograd.studies.interfaces OUT.jsonl [ARCHITECTURE ...] [sweeps]

trains every case that OUT.jsonl does not hold yet, appends a line for each, and prints the table. Cost: about
a minute for each case on one core. CE is in nats per byte on held-out text; `early` is that of the first 16
positions of a window, where there is least to read.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from topograd.data import Loader, Prepared, windows
from topograd.nn.gpt import ARCHITECTURES, Architecture, GPTConfig
from topograd.nn.stack import Stack
from topograd.runs.config import TrainConfig
from topograd.runs.session import build_stack, load_data
from topograd.topology.plan import Plan
from topograd.training.executor import train_step
from topograd.training.forward import stage_outputs
from topograd.training.optimizer import OptimizerConfig, make_optimizers, set_learning_rates

WIDTH, CONTEXT, STEPS = 64, 128, 400
EARLY = 16
HELDOUT_BYTES = 60_000
COARSE, FINE = "S=8,r=8,pool=tail", "S=128,r=32,pool=tail"


@dataclass(frozen=True)
class Case:
    """One model of the study."""

    name: str
    architecture: Architecture = "transformer"
    partition: str = "2,2,2,2"
    interface: str | None = None
    seed: int = 0

    def config(self, steps: int = STEPS) -> TrainConfig:
        layers = sum(int(part) for part in self.partition.split(","))
        return TrainConfig(
            partition=str(layers) if self.interface is None else self.partition,
            interface=self.interface,
            steps=steps,
            batch=8,
            seed=self.seed,
            tokenizer="bytes",
            model=GPTConfig(
                layers=layers,
                width=WIDTH,
                heads=2,
                vocab=257,
                context=CONTEXT,
                architecture=self.architecture,
                head_std=0.0,
                smear=False,
                x0_blend=False,
                value_embeddings="none",
            ),
        )


def headline(architecture: Architecture, seeds: Iterable[int] = range(3)) -> list[Case]:
    """Dense, shallow and two interfaces, for each seed."""
    cases = []
    for seed in seeds:
        cases += [
            Case("dense", architecture, seed=seed),
            Case("shallow", architecture, partition="2", seed=seed),
            *(Case(words, architecture, interface=words, seed=seed) for words in (COARSE, FINE)),
        ]
    return cases


def sweeps(architecture: Architecture) -> list[Case]:
    """Segments, rank and region size with one seed; on the transformer also pools, maps and the leak."""
    words = ["S=32,r=32,pool=tail", "S=128,r=4,pool=tail"]
    partitions = ["4,4"]
    if architecture == "transformer":
        words += [f"S={s},r=32,pool=tail" for s in (2, 4, 8, 16, 64)]
        words += ["S=128,r=16,pool=tail", "S=16,r=32,pool=mean", "S=16,r=32,pool=cumulative"]
        words += [f"{FINE},maps=linear", f"{FINE},maps=gated", "S=1,r=16,pool=mean,causal=false"]
        partitions += ["1,1,1,1,1,1,1,1"]
    cases = [Case(word, architecture, interface=word) for word in words]
    for partition in partitions:
        cases.append(Case(f"{FINE}, regions {partition}", architecture, partition, interface=FINE))
    return cases


Watch = Callable[[int, Stack, Plan, Tensor, Tensor], None]
"""Called before each step with its number, the model and the batch."""


def trained(case: Case, steps: int = STEPS, watch: Watch | None = None) -> tuple[Stack, Plan, Prepared]:
    """The case's model after its training, and the text that it was trained on."""
    config, data = load_data(case.config(steps))
    stack, plan = build_stack(config)
    loader = Loader(data.train, CONTEXT, config.batch, config.seed)
    fit(stack, plan, loader, steps, config.optimizer, watch)
    return stack, plan, data


def fit(
    stack: Stack,
    plan: Plan,
    batches: Iterable[tuple[Tensor, Tensor]],
    steps: int,
    config: OptimizerConfig,
    watch: Watch | None = None,
) -> None:
    """`steps` steps on as many batches."""
    optimizers = make_optimizers(stack, config)
    for step, (inputs, targets) in zip(range(steps), batches, strict=False):
        set_learning_rates(optimizers, config.multiplier(step, steps))
        if watch is not None:
            watch(step, stack, plan, inputs, targets)
        train_step(stack, plan.topology, inputs, targets)
        for optimizer in optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def train_case(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Train it; what it reached."""
    began = time.perf_counter()
    stack, plan, data = trained(case, steps)
    seconds = time.perf_counter() - began
    inputs, targets, _ = windows(data.heldout, data.tokenizer, CONTEXT, HELDOUT_BYTES)
    losses = position_losses(stack, plan, inputs, targets)
    return {
        "ce": losses.nanmean().item(),
        "early": losses[:, :EARLY].nanmean().item(),
        "seconds": seconds,
        "parameters": sum(p.numel() for p in stack.parameters()),
        "steps": steps,
    }


@torch.no_grad()
def position_losses(stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats of every target (rows, time); nan where a target does not count."""
    last, parts = len(plan.stages) - 1, []
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        z = stack.readout(stage_outputs(stack, plan, x, [last])[last], last)
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        parts.append(loss.masked_fill(y == -100, float("nan")))
    return torch.cat(parts)


def read(file: Path) -> dict[tuple[str, str, int], dict[str, Any]]:
    """What is there, by architecture, name and seed."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(row["architecture"], row["name"], row["seed"]): row for row in rows}


def run(file: Path, cases: Sequence[Case], steps: int = STEPS) -> dict[tuple[str, str, int], dict[str, Any]]:
    """Train what is missing, one line of JSON for each; a killed study goes on where it was."""
    done = read(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    for i, case in enumerate(cases, 1):
        key = (case.architecture, case.name, case.seed)
        if key in done:
            continue
        row = {
            "architecture": case.architecture,
            "name": case.name,
            "seed": case.seed,
            **train_case(case, steps),
        }
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        done[key] = row
        print(
            f"{i}/{len(cases)} {key}: CE {row['ce']:.4f}, {row['seconds']:.0f} s", file=sys.stderr, flush=True
        )
    return done


def table(rows: Iterable[dict[str, Any]]) -> Table:
    """Mean over seeds and their spread, with the distance to dense and to shallow."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["architecture"], row["name"]), []).append(row)
    mean = {key: statistics.fmean(row["ce"] for row in group) for key, group in groups.items()}
    shown = Table(title="Held-out CE in nats per byte")
    for column in ("architecture", "model", "CE", "±", "early", "seeds", "to dense", "to shallow"):
        shown.add_column(column, justify="left" if column in ("architecture", "model") else "right")
    for (architecture, name), group in groups.items():
        here = mean[architecture, name]
        values = [row["ce"] for row in group]
        gaps = [mean.get((architecture, other)) for other in ("dense", "shallow")]
        shown.add_row(
            architecture,
            name,
            f"{here:.4f}",
            f"{statistics.stdev(values):.4f}" if len(values) > 1 else "–",
            f"{statistics.fmean(row['early'] for row in group):.4f}",
            str(len(values)),
            *("–" if gap is None else f"{here - gap:+.4f}" for gap in gaps),
        )
    return shown


def main(argv: Sequence[str]) -> None:
    """Run the study, or the architectures that are named."""
    chosen = [a for a in ARCHITECTURES if a in argv[1:] or len(argv) == 1]
    cases = [case for architecture in chosen for case in headline(architecture)]
    if "sweeps" in argv[1:] or len(argv) == 1:
        cases += [case for architecture in chosen for case in sweeps(architecture)]
    Console().print(table(run(Path(argv[0]), cases).values()))


if __name__ == "__main__":
    main(sys.argv[1:])
