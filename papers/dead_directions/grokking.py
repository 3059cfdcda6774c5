"""A training that groks, on one axis of steps: what its geometry does before the test loss falls.

Statement. A network learns (a + b) mod p from half of all pairs, all of them in every step, with weight
decay. It first memorises and later generalises (groks). At every reading, on the same pairs to learn,

    losses, accuracies   of the pairs to learn (train) and of the others (test)
    phase                fitting, memorisation, transition, generalisation (`grokking_verdicts.py`)
    norm, sigma, effective_rank, schur      as `inspect --series` reads them (`geometry/series.py`), σ_r at
                         the rank that the first reading fixes
    coefficient          λ̂ of all weights with its interval, and whether it is calibrated, at fewer readings
    empirical, expected  tr G of the first map by the labels of the data, and by labels of the model

Two controls do not grok: one without decay, which memorises and stays, and one that learns all pairs, whose
decay has nothing left to find. What a signal says in those is a false alarm.

Network: x = [E_a; E_b] (d), one layer x ← x + W_2 ReLU(W_1 x + b_1) + b_2 of 2d units, a linear head: a
stream of one width, which σ_r needs. AdamW, float64: in float32 the losses end in rounding, and without decay
the training then jumps (a control of another kind).

λ̂ is sampled with localization γ = 100 and one step for all readings. With γ = 1 its chains would need some
10⁴ steps at each reading: the virial says 0.2 after 200. So it counts directions whose curvature exceeds
γ / nβ, a scale that is the same at every reading; the virial says where the step does not bear it. The
weights are a minimum of the loss with decay, and not of the loss.

Symbols. d = width, p = MODULUS. Cost: `small` about 18 minutes of one core, most of it for λ̂.
Source: "Dead Directions: Geometric Singular Learning" §12.1 (phases), §13.5 (change points), §15 (the Schur
ratio of random and of trained networks), Corollary 39 (empirical Fisher); A. Power et al., "Grokking:
Generalization Beyond Overfitting on Small Algorithmic Datasets"; N. Nanda et al., "Progress Measures for
Grokking via Mechanistic Interpretability".
Limits. One task, one network, one optimizer. The setting was chosen because it groks soon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from papers.dead_directions.grokking_verdicts import (
    ALL_PAIRS,
    DECAY,
    NO_DECAY,
    SIGNALS,
    claims,
    event_table,
    findings,
    marks,
    phase_of,
    phase_table,
    spoken,
)
from papers.dead_directions.optimizer_tasks import MODULUS, Task, modular
from papers.outcome import Asked, Result, Row, check_seeds
from topograd.geometry.factors import Batch, kfac_factors
from topograd.geometry.losses import Fisher
from topograd.geometry.series import SeriesReader
from topograd.geometry.singular.coefficient import learning_coefficient
from topograd.geometry.singular.langevin import Langevin

RATE, BETAS = 4e-3, (0.9, 0.98)
READINGS, EVERY = 80, 5
"""Readings of a training, and how many of them come to one λ̂."""
SAMPLING = Langevin(3e-4, localization=100.0, chains=3, burn_in=300, draws=30, thin=8)
TINY = Langevin(3e-4, localization=100.0, chains=1, burn_in=0, draws=8, thin=1)
FISHERS: tuple[Fisher, ...] = ("empirical", "expected")
FIRST = "layers.0.up"
"""The map at whose output the Fisher information is read."""


@dataclass(frozen=True)
class Arm:
    """What is learned, and under which decay."""

    name: str
    share: float
    decay: float


ARMS = (Arm(DECAY, 0.5, 1.0), Arm(NO_DECAY, 0.5, 0.0), Arm(ALL_PAIRS, 1.0, 1.0))


class Branch(nn.Module):
    """x + W_2 ReLU(W_1 x + b_1) + b_2."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, d) → (n, d)."""
        return x + self.down(F.relu(self.up(x)))


class SumStream(nn.Module):
    """Logits of (a + b) mod p from a stream that begins as [E_a; E_b]."""

    def __init__(self, p: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(p, width // 2)
        nn.init.normal_(self.embedding.weight, std=(width // 2) ** -0.5)
        self.layers = nn.ModuleList([Branch(width)])
        self.head = nn.Linear(width, p)

    def forward(self, pairs: Tensor) -> Tensor:
        """pairs (n, 2) → (n, p)."""
        x = self.embedding(pairs).flatten(1)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def run(args: Asked) -> Result:
    """Every arm with every seed."""
    check_seeds(args.seeds)
    rows: list[Row] = []
    total, sampling = len(ARMS) * args.seeds, TINY if args.preset == "tiny" else SAMPLING
    for seed in range(args.seeds):
        for arm in ARMS:
            key = {"arm": arm.name, "seed": seed}
            train = partial(trained, arm, seed, args.steps, args.width, sampling)
            rows.append(args.kept.row(key, train))
            args.on_more(len(rows), total)
    message = spoken(rows)
    judged = claims(rows, message)
    return Result(
        setting=(
            f"(a + b) mod {MODULUS} by a residual network of width {args.width}, AdamW at {RATE:g}, full "
            f"batch, {args.steps} steps in float64. "
            + " ".join(f"{arm.name}: {arm.share:.0%} of the pairs, decay {arm.decay:g}." for arm in ARMS)
        ),
        rows=rows,
        tables=(phase_table(rows), event_table(rows, message)),
        findings=findings(rows, judged),
        claims=judged,
        seeds=args.seeds,
        record={"signals": SIGNALS, "marks": marks(rows, message)},
    )


def trained(arm: Arm, seed: int, steps: int, width: int, sampling: Langevin = SAMPLING) -> Row:
    """One training and its readings, as plain numbers."""
    probe = modular(share=ARMS[0].share, seed=seed).learnt
    task = modular(share=arm.share, seed=seed)
    torch.manual_seed(seed)
    model = SumStream(MODULUS, width).double()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, weight_decay=arm.decay, fused=True
    )
    reader, every = SeriesReader([probe], sampling=None), max(1, steps // READINGS)
    points: list[dict[str, Any]] = []
    for step in range(steps + 1):
        if step % every == 0:
            points.append(_read(model, task, reader, step))
            if len(points) % EVERY == 1:
                points[-1] |= _coefficient(model, reader.batches[0], sampling)
        optimizer.zero_grad()
        F.cross_entropy(model(task.learnt[0]), task.learnt[1]).backward()
        optimizer.step()
    return {"arm": arm.name, "seed": seed, "rank": reader.rank, "points": points}


def _read(model: SumStream, task: Task, reader: SeriesReader, step: int) -> dict[str, Any]:
    """All signals at one step but λ̂."""
    train, test = _scores(model, task.learnt), _scores(model, task.unseen)
    traces: dict[str, float] = {
        fisher: float(kfac_factors(model, reader.batches[0], "cross-entropy", fisher)[FIRST].G.trace())
        for fisher in FISHERS
    }
    return {
        **asdict(reader.read(model, step)),
        **{f"train_{name}": value for name, value in train.items()},
        **{f"test_{name}": value for name, value in test.items()},
        **traces,
        "phase": phase_of(train["accuracy"], test["accuracy"]),
    }


def _coefficient(model: SumStream, probe: Batch, sampling: Langevin) -> dict[str, Any]:
    result = learning_coefficient(model, "cross-entropy", probe, sampling)
    names = ("interval", "calibrated", "reason", "virial")
    return {"coefficient": result.value, **{name: getattr(result, name) for name in names}}


@torch.no_grad()
def _scores(model: SumStream, examples: tuple[Tensor, Tensor]) -> Mapping[str, float | None]:
    """Loss and accuracy; None where there are no examples."""
    pairs, sums = examples
    if not len(pairs):
        return {"loss": None, "accuracy": None}
    logits = model(pairs)
    return {
        "loss": float(F.cross_entropy(logits, sums)),
        "accuracy": float((logits.argmax(-1) == sums).double().mean()),
    }
