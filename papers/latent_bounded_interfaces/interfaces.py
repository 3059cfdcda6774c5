"""What a bounded interface costs in quality: rank, segments, pool and region size, on four architectures.

After Tables 2, 6 and 7 of "LBI: Parallel Scan Backpropagation via Latent Bounded Interfaces", with two
additions. Beside the published interface stand causal ones, and beside the dense model the shallow control:
the last region alone, which is what a bounded-interface model falls back to when its interface says nothing.
All models see the same bytes for the same number of steps. They are plain GPTs: with an embedding of the
previous token, value embeddings and x0 in every layer, two layers come so close to eight that there is little
left to measure. The claims that the rows test are in `interface_quality.py`.

    python -m papers.latent_bounded_interfaces.interfaces OUT.jsonl [ARCHITECTURE ...] [sweeps]
                                          [--steps N] [--seeds N] [--optimizer NAME] [--relays RATE]

trains every case that OUT.jsonl does not hold yet, appends a line for each, and prints the table. Without
words after the file, all architectures and the sweeps. `--optimizer` and `--relays` change the recipe: which
optimizer takes the layers' matrices, and the learning rate of the interfaces. Cost: about a minute for each
case of 400 steps on one core. A row has, in nats per byte on held-out text:

    ce         all of it                     early      the first 16 positions of a window
    sample     the first windows alone       honest     the same, each byte predicted from those before it
    shuffled   all of it, where the last region hears another row's messages

`honest` is of the published interface, which sees the future otherwise, and is `sample` for every other
model. Of the published interface a row also has Table 7's norms along the training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from papers.fit import Watch, fit, trajectory
from topograd.data import Loader, Prepared, windows
from topograd.exec.forward import stage_outputs
from topograd.interfaces.ablation import silenced
from topograd.interfaces.analysis import analyse
from topograd.nn.config import ARCHITECTURES, Architecture, GPTConfig
from topograd.nn.preparation import prepare
from topograd.nn.stack import Stack
from topograd.runs.config import OptimizerConfig, TrainConfig
from topograd.runs.session import build_stack, load_data
from topograd.runs.topology_config import TopologyConfig
from topograd.topology.dag import Topology
from topograd.topology.plan import Plan

WIDTH, CONTEXT, STEPS = 64, 128, 400
EARLY = 16
HELDOUT_BYTES = 60_000
SAMPLE_ROWS = 24
"""Windows that are also predicted byte by byte, from prefixes."""
LOOKS = 4
"""Times that Jacobians are read, beside the last."""
READ = ("local_norm", "suffix_norm", "rms", "message_spread")
COARSE, FINE = "S=8,r=8,pool=tail", "S=128,r=32,pool=tail"
PUBLISHED = {rank: f"published:r={rank}" for rank in (16, 32, 64)}
"""The authors' own module by its rank: one state of the whole sequence, which sees the future."""
RESIDUAL = "residual:r={half}"
"""The positive control at half of the width; at all of it, it is the dense model."""
RANKED: tuple[Architecture, ...] = ("transformer", "mamba3")
"""Architectures with every rank and every size of regions."""
REGION_SIZES = {1: "1,1,1,1,1,1,1,1", 2: "2,2,2,2", 3: "3,3,2", 4: "4,4"}

Key = tuple[str, str, str, int, int]
KEY = ("architecture", "name", "recipe", "seed", "steps")
"""What makes a training another one."""


@dataclass(frozen=True)
class Case:
    """One model of the study."""

    name: str
    architecture: Architecture = "transformer"
    partition: str = "2,2,2,2"
    interface: str | None = None
    seed: int = 0
    shallow: bool = False
    """Whether it is the layers of the last region alone."""
    width: int = WIDTH
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def key(self, steps: int) -> Key:
        """The values of `KEY`."""
        recipe = f"{self.optimizer.name}, relays {self.optimizer.lr_relay:g}"
        return self.architecture, self.name, recipe, self.seed, steps

    def config(self, steps: int = STEPS) -> TrainConfig:
        layers = sum(int(part) for part in self.partition.split(","))
        return TrainConfig(
            topology=TopologyConfig(
                partition=str(layers) if self.interface is None else self.partition,
                interface=self.interface and self.interface.format(half=self.width // 2),
            ),
            steps=steps,
            batch=8,
            seed=self.seed,
            tokenizer="bytes",
            model=GPTConfig(
                layers=layers,
                width=self.width,
                heads=2,
                vocab=257,
                context=CONTEXT,
                architecture=self.architecture,
                head_std=0.0,
                smear=False,
                x0_blend=False,
                value_embeddings="none",
            ),
            optimizer=self.optimizer,
        )


def headline(architecture: Architecture, seeds: Iterable[int] = range(3)) -> list[Case]:
    """Dense, shallow, a causal interface and the published one, for each seed (Table 2)."""
    ranks = PUBLISHED if architecture in RANKED else [32]
    cases = []
    for seed in seeds:
        cases += [
            Case("dense", architecture, seed=seed),
            Case("shallow", architecture, shallow=True, seed=seed),
            Case(FINE, architecture, interface=FINE, seed=seed),
            Case(RESIDUAL, architecture, interface=RESIDUAL, seed=seed),
            *(Case(PUBLISHED[r], architecture, interface=PUBLISHED[r], seed=seed) for r in ranks),
        ]
    return cases


def region_sizes(architecture: Architecture, seeds: Iterable[int] = range(3)) -> list[Case]:
    """The published interface of rank 32 between regions of other sizes, for each seed (Table 6)."""
    return [
        Case(f"{PUBLISHED[32]}, regions {partition}", architecture, partition, PUBLISHED[32], seed)
        for seed in seeds
        for size, partition in REGION_SIZES.items()
        if size != 2
    ]


def sweeps(architecture: Architecture) -> list[Case]:
    """Segments, rank and region size with its control, one seed; on transformers pools and maps too."""
    words = [COARSE, "S=32,r=32,pool=tail", "S=128,r=4,pool=tail"]
    partitions = ["4,4"]
    if architecture == "transformer":
        words += [f"S={s},r=32,pool=tail" for s in (2, 4, 8, 16, 64)]
        words += ["S=128,r=16,pool=tail", "S=16,r=32,pool=mean", "S=16,r=32,pool=cumulative"]
        words += [f"{FINE},maps=linear", f"{FINE},maps=gated"]
        partitions += ["1,1,1,1,1,1,1,1"]
    cases = [Case(word, architecture, interface=word) for word in words]
    for partition in partitions:
        cases.append(Case(f"{FINE}, regions {partition}", architecture, partition, interface=FINE))
    return [*cases, Case("4 layers alone", architecture, "4")]


class Fitted(NamedTuple):
    """A model after its training."""

    stack: Stack
    plan: Plan
    data: Prepared
    losses: Tensor
    """Of the stages at every step (steps, stages)."""


def trained(case: Case, steps: int = STEPS, watch: Watch | None = None) -> Fitted:
    """The case's model after its training, the text that it was trained on, and its losses."""
    config, data = load_data(case.config(steps))
    stack, plan = build(case, config)
    loader = Loader(data.train, CONTEXT, config.batch, config.seed)
    losses = fit(stack, plan, loader, steps, config.optimizer, watch)
    return Fitted(stack, plan, data, losses)


def build(case: Case, config: TrainConfig) -> tuple[Stack, Plan]:
    """The case's model before its training; shallow is what a silent interface leaves of the dense one."""
    stack, plan = build_stack(config)
    if case.shallow:
        last = int(case.partition.rpartition(",")[2])
        stack.layers = nn.ModuleList(list(stack.layers)[-last:])
        plan = prepare(stack, Topology.chain(str(last)))
    return stack, plan


def train_case(case: Case, steps: int = STEPS) -> dict[str, Any]:
    """Train it; what it reached, and of the published interface its Jacobians on the way."""
    began = time.perf_counter()
    published = case.interface in PUBLISHED.values()
    looks: list[dict[str, Any]] = []

    def watch(step: int, stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> None:
        if published and (step % max(1, steps // LOOKS) == 0 or step == steps - 1):
            result = analyse(stack, plan.topology, inputs[:2], targets[:2])
            looks.append({"step": step} | {name: result[name] for name in READ})

    stack, plan, data, losses = trained(case, steps, watch)
    seconds = time.perf_counter() - began
    inputs, targets, _ = windows(data.heldout, data.tokenizer, CONTEXT, HELDOUT_BYTES)
    result = position_losses(stack, plan, inputs, targets)
    sample = result[:SAMPLE_ROWS].nanmean().item()
    row = {
        "ce": result.nanmean().item(),
        "early": result[:, :EARLY].nanmean().item(),
        "sample": sample,
        "honest": sample,
        "seconds": seconds,
        "parameters": sum(p.numel() for p in stack.parameters()),
        "steps": steps,
        "trajectory": trajectory(losses),
    }
    if case.interface is not None:
        with silenced(stack, "shuffled"):
            row["shuffled"] = position_losses(stack, plan, inputs, targets).nanmean().item()
    if published:
        alone = prefix_losses(stack, plan, inputs[:SAMPLE_ROWS], targets[:SAMPLE_ROWS])
        row |= {"honest": alone.nanmean().item(), "looks": looks}
    return row


@torch.no_grad()
def position_losses(stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats of every target (rows, time); nan where a target does not count."""
    last, parts = len(plan.stages) - 1, []
    for x, y in zip(inputs.split(16), targets.split(16), strict=True):
        z = stack.readout(stage_outputs(stack, plan, x, [last])[last], last)
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
        parts.append(loss.masked_fill(y == -100, float("nan")))
    return torch.cat(parts)


@torch.no_grad()
def prefix_losses(stack: Stack, plan: Plan, inputs: Tensor, targets: Tensor) -> Tensor:
    """`position_losses`, with every prediction made from the tokens up to it and no others."""
    last = [
        position_losses(stack, plan, inputs[:, : t + 1], targets[:, : t + 1])[:, -1]
        for t in range(inputs.shape[1])
    ]
    return torch.stack(last, dim=1)


def read(file: Path) -> dict[Key, dict[str, Any]]:
    """The trainings that are there."""
    if not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return {(*(row[name] for name in KEY),): row for row in rows}


def run(file: Path, cases: Sequence[Case], steps: int = STEPS) -> dict[Key, dict[str, Any]]:
    """Train what is missing, one line of JSON for each; a killed study goes on where it was."""
    done = read(file)
    file.parent.mkdir(parents=True, exist_ok=True)
    for i, case in enumerate(cases, 1):
        key = case.key(steps)
        if key in done:
            continue
        row = dict(zip(KEY, key, strict=True)) | train_case(case, steps)
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")
        done[key] = row
        print(
            f"{i}/{len(cases)} {key}: CE {row['ce']:.4f}, {row['seconds']:.0f} s", file=sys.stderr, flush=True
        )
    return done


def table(rows: Iterable[dict[str, Any]]) -> Table:
    """Mean over seeds and their spread, with the distance to dense and to shallow trained alike."""
    groups: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        alike = (row["architecture"], row["name"], row["recipe"], row["steps"])
        groups.setdefault(alike, []).append(row)
    mean = {key: statistics.fmean(row["ce"] for row in group) for key, group in groups.items()}
    shown = Table(title="Held-out CE in nats per byte")
    words, numbers = ("architecture", "model", "recipe"), ("steps", "CE", "±", "early", "seeds")
    for column in (*words, *numbers, "to dense", "to shallow"):
        shown.add_column(column, justify="left" if column in words else "right")
    for key, group in groups.items():
        architecture, name, recipe, steps = key
        values = [row["ce"] for row in group]
        gaps = [mean.get((architecture, other, recipe, steps)) for other in ("dense", "shallow")]
        shown.add_row(
            architecture,
            name,
            recipe,
            str(steps),
            f"{mean[key]:.4f}",
            f"{statistics.stdev(values):.4f}" if len(values) > 1 else "–",
            f"{statistics.fmean(row['early'] for row in group):.4f}",
            str(len(values)),
            *("–" if gap is None else f"{mean[key] - gap:+.4f}" for gap in gaps),
        )
    return shown


def main(argv: Sequence[str]) -> None:
    """Run the study, or the parts of it that are named."""
    parser = argparse.ArgumentParser(prog="python -m papers.latent_bounded_interfaces.interfaces")
    parser.add_argument("file", type=Path, help="lines of JSON, one for each training")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(ARCHITECTURES)} or sweeps")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of every training")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of all but the sweeps")
    parser.add_argument("--optimizer", default=OptimizerConfig().name, help="as muon+adamw or adamw")
    parser.add_argument("--relays", type=float, default=OptimizerConfig().lr_relay, help="rate of interfaces")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - {*ARCHITECTURES, "sweeps"}:
        parser.error(f"{sorted(unknown)[0]!r} is no part; choose from {', '.join(ARCHITECTURES)}, sweeps")
    if args.steps < 1 or args.seeds < 1:
        parser.error(f"--steps is {args.steps} and --seeds {args.seeds}; both must be at least 1")
    chosen = [a for a in get_args(Architecture) if a in args.parts or not args.parts]
    cases = [case for architecture in chosen for case in headline(architecture, range(args.seeds))]
    if "sweeps" in args.parts or not args.parts:
        cases += [case for architecture in chosen for case in sweeps(architecture)]
    optimizer = OptimizerConfig(name=args.optimizer, lr_relay=args.relays)
    cases = [replace(case, optimizer=optimizer) for case in cases]
    Console().print(table(run(args.file, cases, args.steps).values()))


if __name__ == "__main__":
    main(sys.argv[1:])
