"""Training a draft stage on a frozen model's own text, from states that are on the disk.

    loss = Σ_j w^j mean_t CE(p_t, q_t^{(j)}),   j = 0..STEPS-1

p_t is the base's distribution behind position t on the draft vocabulary, read off its kept state by its own
head; q^{(j)} is the stage's, unrolled j times on its own states, or its slot j (`nn/draft_stage.py`).
Positions whose next token is outside the draft vocabulary do not count. The base is not run and not changed.

Matrices learn by Muon, gains by AdamW, with a linear warmdown. In a folder the training is saved every
SAVE_SECONDS, and the same call resumes it (`training/trainer.py`); batches are a function of the seed
and the step.

Cost a token: 6 multiply-adds a parameter and step, and 4 |V| width for the frozen head. Source: "EAGLE-3"
(Li et al. 2025) §3.2: no regression on states, a loss on tokens alone, on own states.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from topograd.convert.own_text import (
    Block,
    OwnText,
    greedy_rows,
    heldout_rows,
    rows_of_step,
    training_rows,
)
from topograd.limits import SEED, check_numbers
from topograd.nn.draft_stage import DraftStage
from topograd.runs.schedule import warmup_stable_warmdown
from topograd.training.muon import Muon
from topograd.training.trainer import OnStep, Schedule, StepRecord, Task, train_task

SAVE_SECONDS = 20.0
MEASURED_ROWS = 64


@dataclass(frozen=True)
class DraftTraining:
    """How a draft stage learns."""

    epochs: float = 2.0
    batch: int = 2
    steps: int = 2
    """How often it is unrolled on its own states; of a block, every slot is taught."""
    decay: float = 0.8
    """w: each further step weighs so much of the one before."""
    matrices: float = 0.02
    scalars: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        check_numbers(
            self,
            epochs=(1e-6, 1e6), batch=(1, 4096), steps=(1, 16), decay=(0, 1),
            matrices=(0, 10), scalars=(0, 10), seed=SEED,
        )  # fmt: skip


class DraftTask(Task):
    """A draft stage that learns from a model's own text."""

    def __init__(self, stage: DraftStage, text: OwnText, config: DraftTraining) -> None:
        self.rows = training_rows(len(text))
        steps = max(1, math.ceil(len(self.rows) * config.epochs / config.batch))
        super().__init__(Schedule(steps, save_seconds=SAVE_SECONDS))
        self.stage, self.text, self.config = stage, text, config
        self.model, self.optimizers = stage, _optimizers(stage, config)
        shape = {name: list(p.shape) for name, p in stage.named_parameters()}
        self.key = {
            **asdict(config),
            **{"tokens": text.tokens, "weights": text.weights, "total": steps, "stage": shape},
        }

    def step(self, step: int) -> StepRecord:
        scale = warmup_stable_warmdown(step, self.schedule.steps, warmup=0.02, warmdown=0.6, floor=0.0)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = scale * group["initial_lr"]
        block = self.text.take(rows_of_step(self.rows, self.config.batch, self.config.seed, step))
        loss = draft_loss(self.stage, block, self.config)
        loss.backward()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return StepRecord([loss.item()])


def train_draft_stage(
    stage: DraftStage,
    text: OwnText,
    config: DraftTraining | None = None,
    work: Path | None = None,
    on_step: OnStep | None = None,
) -> None:
    """Train the stage; with a `work` folder a stopped training is resumed."""
    folder = None if work is None else work / "draft-training"
    train_task(DraftTask(stage, text, config or DraftTraining()), folder, on_step)


def draft_loss(stage: DraftStage, block: Block, config: DraftTraining) -> Tensor:
    """The loss of the module's head on some rows."""
    states, tokens = _read(stage, block), block.tokens
    places = stage.places()[tokens[:, 1:]]
    counted = places >= 0
    counted[:, 0] = False  # a first state is unlike all others
    with torch.no_grad():
        targets = stage.base_logits(states[:, :-1, -1][counted]).softmax(-1)
    total = states.new_zeros(())
    steps = config.steps if stage.slots == 1 else stage.slots
    for step, g in enumerate(stage.unroll(tokens, states, steps)):
        alive = counted.clone()
        alive[:, : step + 1] = False  # the first positions have no chain behind them
        logits = stage.readout(g[:, :-1][alive])
        total = total + config.decay**step * F.cross_entropy(logits, targets[alive[counted]])
    return total


def _read(stage: DraftStage, block: Block) -> Tensor:
    """The states that the stage reads: (rows, length, depths, width)."""
    return stage.pick(block.states).to(stage.vocabulary.device, stage.relay.state.weight.dtype)


@torch.no_grad()
def draft_agreement(
    stage: DraftStage, text: OwnText, steps: int = 5, rows: Sequence[int] | None = None
) -> dict[str, list[float]]:
    """How often the stage says what the model says, where that is the model's own, by default on greedy rows
    that were not trained on: `agreement` of each step by itself, `chain` of all steps up to it."""
    rows = greedy_rows(text, heldout_rows(len(text)))[:MEASURED_ROWS] if rows is None else rows
    steps = steps if stage.slots == 1 else min(steps, stage.slots)
    hits, chains, count = torch.zeros(steps), torch.zeros(steps), 0.0
    for start in range(0, len(rows), 8):
        block = text.take(rows[start : start + 8])
        states, tokens = _read(stage, block), block.tokens
        time_ = tokens.shape[1]
        said = [stage.vocabulary[stage.readout(g).argmax(-1)] for g in stage.unroll(tokens, states, steps)]
        right = [(words[:, :-1] == tokens[:, 1:]) & block.own[:, 1:] for words in said]
        begun = block.own[:, 1 : time_ - steps + 1]
        alive = begun.clone()
        count += float(begun.sum())
        for step in range(steps):
            here = right[step][:, step : time_ - steps + step]
            hits[step] += (here & begun).sum()
            alive &= here
            chains[step] += alive.sum()
    return {"agreement": (hits / max(count, 1)).tolist(), "chain": (chains / max(count, 1)).tolist()}


def _optimizers(stage: DraftStage, config: DraftTraining) -> dict[str, torch.optim.Optimizer]:
    matrices = [p for p in stage.parameters() if p.dim() == 2 and p is not stage.masks]
    others = [p for p in stage.parameters() if p.dim() != 2 or p is stage.masks]
    made: dict[str, torch.optim.Optimizer] = {"muon": Muon(matrices, lr=config.matrices, weight_decay=0.01)}
    if others:
        made["adamw"] = torch.optim.AdamW(others, lr=config.scalars, weight_decay=0.0)
    for optimizer in made.values():
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return made
